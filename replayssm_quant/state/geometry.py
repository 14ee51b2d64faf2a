"""Shapes of recurrent layers, read from a model's configuration. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["mamba2", "gdn"]


@dataclass(frozen=True)
class LayerGeometry:
    """One recurrent layer: state [heads, rows, n] with ``n`` the contracted axis.

    Mamba-2: heads = nheads, rows = headdim, n = d_state, groups = ngroups (of B and C).
    GDN: heads = value heads HV, rows = V, n = K, groups = key heads HK. gate_width: columns of the
    decay, 1 for both families (a gate for each key channel, as in KDA, would be n).
    """

    kind: Kind
    heads: int
    rows: int
    n: int
    groups: int
    conv_kernel: int = 4
    gate_width: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "rows", "n", "groups", "conv_kernel"):
            if getattr(self, name) < 1:
                raise ValueError(f"geometry {name} = {getattr(self, name)} must be at least 1")
        if self.heads % self.groups:
            raise ValueError(
                f"{self.heads} heads do not divide into {self.groups} groups; heads must be a "
                "multiple of ngroups (Mamba-2) or of the key heads (GDN)"
            )

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def elements(self) -> int:
        """State elements of one request in this layer."""
        return self.heads * self.rows * self.n

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: x, B, C or q, k, v."""
        return self.heads * self.rows + 2 * self.groups * self.n

    def shard(self, tp: int) -> LayerGeometry:
        """One rank's share under tensor parallelism; a single group is replicated."""
        if tp < 1 or self.heads % tp:
            raise ValueError(f"{self.heads} heads do not divide over {tp} ranks")
        if self.groups % tp and self.groups != 1:
            raise ValueError(f"{self.groups} groups do not divide over {tp} ranks")
        groups = 1 if self.groups == 1 else self.groups // tp
        return LayerGeometry(
            self.kind,
            self.heads // tp,
            self.rows,
            self.n,
            groups,
            self.conv_kernel,
            self.gate_width,
        )


@dataclass(frozen=True)
class ModelGeometry:
    """The recurrent layers of a model by layer index, and the number of all layers."""

    model_type: str
    layers: Mapping[int, LayerGeometry]
    total_layers: int

    @property
    def kinds(self) -> set[str]:
        return {g.kind for g in self.layers.values()}


MAMBA2_TYPES = {
    "mamba2",
    "nemotron_h",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "zamba2",
}
GDN_TYPES = {
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
}
_REFUSED = {
    "mamba": "Mamba-1 (one decay for each channel and state)",
    "falcon_mamba": "Mamba-1 (one decay for each channel and state)",
    "jamba": "Mamba-1 (one decay for each channel and state)",
    "zamba": "Mamba-1 (one decay for each channel and state)",
    "kimi_linear": "Kimi Delta Attention (a gate for each key channel)",
    "glm5_next": "Kimi Delta Attention (a gate for each key channel)",
    "bailing_hybrid": "Kimi Delta Attention or lightning attention",
    "rwkv": "RWKV",
    "recurrent_gemma": "RG-LRU",
}


def _get(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    if default is not None:
        return default
    kind = _get(config, "model_type", default="?")
    raise ValueError(f"the configuration of '{kind}' has no {' or '.join(names)}")


def _mamba2_layer(config: Any, kind: str) -> LayerGeometry:
    hidden = _get(config, "hidden_size")
    heads = _get(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    rows = _get(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim", default=0)
    if kind in ("bamba", "granitemoehybrid", "falcon_h1", "zamba2"):
        inner = _get(config, "mamba_d_ssm", default=0) or (
            int(_get(config, "mamba_expand", default=2) * hidden)
        )
        rows = _get(config, "mamba_d_head", "mamba_headdim", default="auto")
        if rows == "auto":
            rows = inner // heads
    n = _get(config, "ssm_state_size", "mamba_d_state", "state_size")
    groups = _get(config, "n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    conv = _get(config, "conv_kernel", "mamba_d_conv", default=4)
    return LayerGeometry("mamba2", int(heads), int(rows), int(n), int(groups), int(conv))


def _layer_types(config: Any, kind: str) -> list[str]:
    types = _get(config, "layer_types", "layers_block_type", default=())
    if not types:
        total = _get(config, "num_hidden_layers")
        if kind in ("mamba2", "falcon_h1"):
            return ["linear_attention"] * total
        raise ValueError(f"the configuration of '{kind}' has neither layer_types nor a pattern")
    return list(types)


_RECURRENT = {"linear_attention", "mamba", "mamba2", "hybrid", "M"}


def read_geometry(config: Any) -> ModelGeometry:
    """Recurrent layers of a transformers configuration object or its plain dictionary.

    Multimodal wrappers are read through their text_config. Raises ValueError for a model without a
    Mamba-2 or Gated DeltaNet layer, and for Mamba-1 and KDA models, whose recurrences differ.
    """
    text = (
        config.get("text_config")
        if isinstance(config, Mapping)
        else (getattr(config, "text_config", None))
    )
    if text is not None and text is not config:
        config = text
    kind = str(_get(config, "model_type", default="?"))
    if kind in _REFUSED:
        raise ValueError(
            f"model type '{kind}' is {_REFUSED[kind]}, which is not supported; supported are "
            f"{', '.join(sorted(MAMBA2_TYPES | GDN_TYPES))}"
        )
    if kind not in MAMBA2_TYPES | GDN_TYPES:
        raise ValueError(
            f"model type '{kind}' has no Mamba-2 or Gated DeltaNet layer that we know; supported "
            f"are {', '.join(sorted(MAMBA2_TYPES | GDN_TYPES))}"
        )
    types = _layer_types(config, kind)
    if kind in MAMBA2_TYPES:
        layer = _mamba2_layer(config, kind)
    else:
        layer = LayerGeometry(
            "gdn",
            int(_get(config, "linear_num_value_heads")),
            int(_get(config, "linear_value_head_dim")),
            int(_get(config, "linear_key_head_dim")),
            int(_get(config, "linear_num_key_heads")),
            int(_get(config, "linear_conv_kernel_dim", default=4)),
        )
    found = {i: layer for i, t in enumerate(types) if t in _RECURRENT}
    if not found:
        raise ValueError(f"this '{kind}' model has no recurrent layer among {sorted(set(types))}")
    return ModelGeometry(kind, found, len(types))
