"""Shapes of recurrent layers, read from a model's configuration. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        """One rank's share under tensor parallelism; a single group is replicated.

        Raises ValueError where heads or groups do not divide.
        """
        if tp < 1:
            raise ValueError(f"tensor parallelism {tp} must be at least 1")
        if self.heads % tp:
            raise ValueError(
                f"{self.heads} heads do not divide over {tp} ranks; use a divisor of {self.heads}"
            )
        if self.groups % tp and self.groups != 1:
            raise ValueError(
                f"{self.groups} groups do not divide over {tp} ranks; use a divisor of "
                f"{self.groups}"
            )
        groups = 1 if self.groups == 1 else self.groups // tp
        return replace(self, heads=self.heads // tp, groups=groups)


@dataclass(frozen=True)
class ModelGeometry:
    """The recurrent layers of a model by layer index, and the number of all layers."""

    model_type: str
    layers: Mapping[int, LayerGeometry]
    total_layers: int

    @property
    def kinds(self) -> set[str]:
        return {g.kind for g in self.layers.values()}


@dataclass(frozen=True)
class _Family:
    """Names and defaults of one model type's configuration, as transformers has them.

    heads, rows, n and groups are (names separated by spaces, default), conv is names alone, hidden
    and layers are defaults alone. "auto" rows are expand * hidden / heads.
    """

    kind: Kind
    heads: tuple[str, int]
    rows: tuple[str, int | str]
    n: tuple[str, int]
    groups: tuple[str, int]
    conv: str
    hidden: int
    layers: int


_BAMBA = _Family(
    "mamba2",
    ("mamba_n_heads", 128),
    ("mamba_d_head", "auto"),
    ("mamba_d_state", 256),
    ("mamba_n_groups", 1),
    "mamba_d_conv",
    4096,
    32,
)

_NEMOTRON_H = _Family(
    "mamba2",
    ("mamba_num_heads", 128),
    ("mamba_head_dim", 64),
    ("ssm_state_size", 128),
    ("n_groups mamba_n_groups", 8),
    "conv_kernel mamba_d_conv",
    4096,
    4,
)


def _gdn(hidden: int, layers: int) -> _Family:
    return _Family(
        "gdn",
        ("linear_num_value_heads", 32),
        ("linear_value_head_dim", 128),
        ("linear_key_head_dim", 128),
        ("linear_num_key_heads", 16),
        "linear_conv_kernel_dim",
        hidden,
        layers,
    )


_FAMILIES = {
    "mamba2": _Family(
        "mamba2",
        ("num_heads", 128),
        ("head_dim", 64),
        ("state_size", 128),
        ("n_groups", 8),
        "conv_kernel",
        4096,
        64,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_puzzle": _NEMOTRON_H,
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "zamba2": _Family(
        "mamba2",
        ("n_mamba_heads", 8),
        ("", "auto"),  # mamba_headdim is always recomputed from expand, hidden and heads
        ("mamba_d_state", 64),
        ("mamba_ngroups", 1),
        "mamba_d_conv",
        2560,
        54,
    ),
    "qwen3_next": _gdn(2048, 48),
    "qwen3_5_text": _gdn(4096, 32),
    "qwen3_5_moe_text": _gdn(2048, 40),
    "qwen4_exp_text": _gdn(2048, 40),
    "olmo_hybrid": _gdn(3840, 32),
}
# a wrapper whose text_config names no model type
_TEXT_OF = {t: f"{t}_text" for t in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")}

MAMBA2_TYPES = {t for t, f in _FAMILIES.items() if f.kind == "mamba2"}
GDN_TYPES = {t for t, f in _FAMILIES.items() if f.kind == "gdn"} | set(_TEXT_OF)

_MAMBA1 = "Mamba-1 (a decay for each channel and state)"
_KDA = "Kimi Delta Attention (a gate for each key channel)"
_REFUSED = {
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "jamba": _MAMBA1,
    "zamba": _MAMBA1,
    "kimi_linear": _KDA,
    "kimi_k3": _KDA,
    "glm5_next": _KDA,
    "bailing_hybrid": _KDA,
    "minimax": "lightning attention",
    "rwkv": "RWKV",
    "recurrent_gemma": "RG-LRU",
}

_LINEAR, _FULL, _HYBRID = "linear_attention", "full_attention", "hybrid"
_RECURRENT = {_LINEAR, _HYBRID, "mamba", "mamba2", "linear"}  # old files say mamba
_PATTERN = {"M": _LINEAR, "*": _FULL, "-": "mlp", "E": "moe"}
_BLOCKS = {"mamba": _LINEAR, "attention": _FULL, "mlp": "mlp", "moe": "moe"}


def _get(config: Any, names: str, default: Any = None) -> Any:
    """The first of the space-separated names that the object or mapping has, None aside."""
    for name in names.split():
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def _blocks(config: Any, kind: str) -> list[Any]:
    """What a Puzzle model says of each layer, mappings or objects; empty for other models."""
    found = _get(config, "block_configs", ()) if kind == "nemotron_h_puzzle" else ()
    return list(found)


class _Block:
    """A configuration in which one layer's own values come before the model's."""

    def __init__(self, block: Any, config: Any):
        self._block, self._config = block, config

    def __getattr__(self, name: str) -> Any:
        return _get(self._block, name, _get(self._config, name))


def _count(config: Any, names: str, default: int) -> int:
    value = _get(config, names, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"configuration value {names.split()[0]} = {value!r} is no positive integer"
        )
    return value


def _layer(config: Any, kind: str) -> LayerGeometry:
    """The recurrent layer that every recurrent place of the model has."""
    f = _FAMILIES[kind]
    hidden = _count(config, "hidden_size", f.hidden)
    heads_default, groups_default = f.heads[1], f.groups[1]
    rows_default, n_default = f.rows[1], f.n[1]
    if kind == "olmo_hybrid":  # heads and widths follow from the attention where not given
        heads_default = groups_default = _count(config, "num_attention_heads", 30)
        n_default = int(0.75 * hidden / _count(config, f.groups[0], groups_default))
        rows_default = 2 * _count(config, f.n[0], n_default)
    heads = _count(config, f.heads[0], heads_default)
    rows = _get(config, f.rows[0], rows_default)
    if rows == "auto":
        inner = _count(config, "mamba_expand", 2) * hidden
        if kind == "falcon_h1":  # None means expand * hidden, an absent key the class default
            absent = isinstance(config, Mapping) and "mamba_d_ssm" not in config
            inner = _count(config, "mamba_d_ssm", 1024 if absent else inner)
        if inner % heads:
            raise ValueError(f"{heads} Mamba heads do not divide the inner width {inner}")
        rows = inner // heads
    else:
        rows = _count(config, f.rows[0], rows)
    groups = _count(config, f.groups[0], groups_default)
    return LayerGeometry(
        f.kind, heads, rows, _count(config, f.n[0], n_default), groups, _count(config, f.conv, 4)
    )


def _layer_types(config: Any, kind: str) -> Sequence[str]:
    """What each layer is; files that predate layer_types are read as transformers reads them."""
    if kind in ("mamba2", "falcon_h1"):  # every layer is recurrent, whatever else it holds
        word = _LINEAR if kind == "mamba2" else _HYBRID
        return [word] * _count(config, "num_hidden_layers", _FAMILIES[kind].layers)
    blocks = _blocks(config, kind)
    if blocks:
        words = [str(_get(block, "block_type", "?")) for block in blocks]
        unknown = sorted(set(words) - set(_BLOCKS))
        if unknown:
            raise ValueError(
                f"block_configs has blocks of type {', '.join(unknown)}; known are "
                f"{', '.join(_BLOCKS)}"
            )
        return [_BLOCKS[word] for word in words]
    types = _get(config, "layer_types layers_block_type")
    if types is not None:
        if isinstance(types, str) or not isinstance(types, Sequence) or not types:
            raise ValueError(f"configuration value layer_types = {types!r} is no list of names")
        return list(types)
    if _FAMILIES[kind] is _NEMOTRON_H:
        pattern = _get(config, "hybrid_override_pattern", "ME*-")
        unknown = sorted(set(pattern) - set(_PATTERN))
        if unknown:
            raise ValueError(
                f"hybrid_override_pattern has {''.join(unknown)!r}; known are M, *, - and E"
            )
        return [_PATTERN[c] for c in pattern]
    if kind == "zamba2":
        shared = {*range(6, 48, 6), 47, 51}  # a shared transformer block before the Mamba layer
        return [_HYBRID if i in shared else _LINEAR for i in range(54)]
    total = _count(config, "num_hidden_layers", _FAMILIES[kind].layers)
    if kind == "granitemoehybrid":
        return [_LINEAR] * total
    if kind == "bamba":
        attention = set(_get(config, "attn_layer_indices", ()))
        return [_FULL if i in attention else _LINEAR for i in range(total)]
    interval = 4 if kind == "olmo_hybrid" else _count(config, "full_attention_interval", 4)
    types = [_LINEAR if (i + 1) % interval else _FULL for i in range(total)]
    if kind == "olmo_hybrid" and _FULL not in types:
        types[-1] = _FULL
    return types


def _text(config: Any) -> Any:
    """The language model's own configuration inside a multimodal wrapper."""
    return _get(config, "text_config llm_config", config)


def read_geometry(config: Any) -> ModelGeometry:
    """Recurrent layers of a transformers configuration object or its plain dictionary.

    A dictionary may be what ``config.json`` holds: keys that are absent have the defaults of the
    transformers class, older spellings are understood, wrappers are read through text_config.
    Raises ValueError for a model without a Mamba-2 or Gated DeltaNet layer, and for Mamba-1 and KDA
    models, whose recurrences differ.
    """
    outer = str(_get(config, "model_type", "?"))
    config = _text(config)
    kind = str(_get(config, "model_type", outer))
    kind = _TEXT_OF.get(kind, kind)
    supported = ", ".join(sorted(MAMBA2_TYPES | GDN_TYPES))
    refused = _REFUSED.get(kind.removesuffix("_text"))
    if refused:
        raise ValueError(
            f"model type '{kind}' is {refused}, which is not supported; supported are {supported}"
        )
    if kind not in _FAMILIES:
        raise ValueError(
            f"model type '{kind}' has no Mamba-2 or Gated DeltaNet layer that we know; supported "
            f"are {supported}"
        )
    types = _layer_types(config, kind)
    places = [i for i, t in enumerate(types) if t in _RECURRENT]
    blocks = _blocks(config, kind)
    if blocks:
        found = {i: _layer(_Block(blocks[i], config), kind) for i in places}
    else:
        found = dict.fromkeys(places, _layer(config, kind))
    if not found:
        raise ValueError(f"this '{kind}' model has no recurrent layer among {sorted(set(types))}")
    return ModelGeometry(kind, found, len(types))
