"""What a config costs on a model: bytes a request, bytes moved a token, requests that fit.

Counts the recurrent state alone: weights and the attention's KV cache are the engine's. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import StateConfig
from ..formats.spec import STORAGE_BYTES
from .geometry import LayerGeometry, ModelGeometry
from .layout import CURSOR_BYTES, PENDING_BYTES, StateLayout, fp32_bytes

PARTS = ("checkpoint", "copy", "scales", "ring", "padding")


@dataclass(frozen=True)
class LayerBudget:
    """Layers that are alike: their indices, and bytes of one of them for one request.

    ``parts`` are the stored bytes by ``PARTS``; codes and scales apart. ``conv`` is the state of
    the causal convolution, (kernel - 1) columns in the ring's dtype, and one more for each draft,
    which the engine keeps. state_moved and ring_moved: bytes that one token moves, averaged over a
    window; with drafts, that a step of T = 1 + drafts tokens moves if it keeps them all, and
    moved_one if it keeps one. ring_inputs: entries of the ring.
    """

    indices: tuple[int, ...]
    geometry: LayerGeometry
    config: StateConfig
    parts: Mapping[str, int]
    conv: int
    fp32: int
    state_moved: float
    ring_moved: float
    drafts: int = 0
    ring_inputs: int = 0
    moved_one: float = 0.0

    @property
    def page(self) -> int:
        """Bytes of one slot."""
        return sum(self.parts.values())

    @property
    def moved(self) -> float:
        return self.state_moved + self.ring_moved

    @property
    def fp32_moved(self) -> int:
        """The plain fp32 state, read and written at every token: 8 bytes an element.

        With drafts, as engines keep them, one state is read and one written for each token.
        """
        return (2 + self.drafts) * self.fp32


def layer_budget(
    indices: tuple[int, ...],
    geometry: LayerGeometry,
    config: StateConfig,
    ring_storage: str,
    drafts: int = 0,
) -> LayerBudget:
    """Raises ValueError where a format does not fit the geometry."""
    layout = StateLayout(geometry, config, ring_storage, drafts)
    checkpoint_scales = layout.scale_bytes - layout.copy_scale_bytes
    parts = {
        "checkpoint": layout.checkpoint_bytes - checkpoint_scales,
        "copy": layout.copy_bytes - layout.copy_scale_bytes,
        "scales": layout.scale_bytes,
        "ring": layout.ring_bytes,
    }
    parts["padding"] = layout.page_bytes - sum(parts.values())
    columns = geometry.conv_kernel - 1 + drafts
    conv = columns * geometry.conv_channels * STORAGE_BYTES[ring_storage]
    moved = (layout.state_bytes_per_step, layout.ring_bytes_per_step)
    if drafts:
        moved = layout.verify_bytes(1 + drafts)
    return LayerBudget(
        indices,
        geometry,
        config,
        parts,
        conv,
        fp32_bytes(geometry),
        *moved,
        drafts,
        layout.capacity,
        sum(layout.verify_bytes(1)) if drafts else 0.0,
    )


@dataclass(frozen=True)
class Budget:
    """The whole model on one rank of ``tp``."""

    model: str
    total_layers: int
    layers: tuple[LayerBudget, ...]
    ring_storage: str
    tp: int
    source: str
    drafts: int = 0

    def _sum(self, value: str) -> Any:
        return sum(len(part.indices) * getattr(part, value) for part in self.layers)

    @property
    def recurrent_layers(self) -> int:
        return sum(len(part.indices) for part in self.layers)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes a request over all layers, by ``PARTS``, and the cursors."""
        total = {p: sum(len(x.indices) * x.parts[p] for x in self.layers) for p in PARTS}
        return {**total, "cursors": self.cursors}

    @property
    def cursors(self) -> int:
        return CURSOR_BYTES + (PENDING_BYTES if self.drafts else 0)

    @property
    def request(self) -> int:
        """State bytes of one request: what a ``StatePool`` allocates for a slot."""
        return int(self._sum("page")) + self.cursors

    @property
    def conv(self) -> int:
        return int(self._sum("conv"))

    @property
    def fp32(self) -> int:
        """The plain fp32 state of one request, without the convolution.

        With drafts one for each token of a step, as engines keep them.
        """
        return (1 + self.drafts) * int(self._sum("fp32"))

    @property
    def moved(self) -> float:
        return float(self._sum("moved"))

    @property
    def fp32_moved(self) -> int:
        return int(self._sum("fp32_moved"))

    def fits(self, memory: int) -> tuple[int, int]:
        """Requests that fit in ``memory`` bytes, convolution included: (this config, plain
        fp32)."""
        return memory // (self.request + self.conv), memory // (self.fp32 + self.conv)

    def to_dict(self, memory: int | None = None, batch: int | None = None) -> dict[str, Any]:
        """Plain values: bytes a request and bytes a token, per layer and in total."""

        def layer(part: LayerBudget) -> dict[str, Any]:
            g = part.geometry
            shape = {k: getattr(g, k) for k in ("kind", "heads", "rows", "n", "groups")}
            return {
                "indices": list(part.indices),
                "geometry": shape | {"conv_kernel": g.conv_kernel},
                "config": part.config.to_dict(),
                "label": part.config.label,
                "bytes": {**part.parts, "state": part.page, "conv": part.conv, "fp32": part.fp32},
                "ratio": part.page / part.fp32,
                "bytes_per_token": {
                    "state": part.state_moved,
                    "ring": part.ring_moved,
                    "total": part.moved,
                    "fp32": part.fp32_moved,
                },
            }

        parts = self.parts
        speculation: dict[str, Any] = {}
        if self.drafts:
            speculation["speculation"] = {
                "drafts": self.drafts,
                "ring_inputs": self.layers[0].ring_inputs,
                "bytes_per_step": {
                    "all_kept": self.moved,
                    "one_kept": float(self._sum("moved_one")),
                    "fp32": self.fp32_moved,
                },
            }
        out: dict[str, Any] = {
            "model": self.model,
            "geometry_from": self.source,
            "recurrent_layers": self.recurrent_layers,
            "total_layers": self.total_layers,
            "tp": self.tp,
            "ring_dtype": self.ring_storage,
            "layers": [layer(part) for part in self.layers],
            "bytes_per_request": {
                **parts,
                "state": self.request,
                "conv": self.conv,
                "fp32": self.fp32,
            },
            "ratio": self.request / self.fp32,
            "bytes_per_token": {
                "state": float(self._sum("state_moved")),
                "ring": float(self._sum("ring_moved")),
                "total": self.moved,
                "fp32": self.fp32_moved,
            },
            "moved_ratio": self.moved / self.fp32_moved,
            **speculation,
        }
        if memory is not None:
            ours, plain = self.fits(memory)
            out["memory"] = {"bytes": memory, "requests": ours, "requests_fp32": plain}
        if batch is not None:
            out["batch"] = {
                "requests": batch,
                "bytes": batch * (self.request + self.conv),
                "bytes_fp32": batch * (self.fp32 + self.conv),
                "bytes_per_step": batch * self.moved,
                "bytes_per_step_fp32": batch * self.fp32_moved,
            }
        return out

    def to_markdown(self, memory: int | None = None, batch: int | None = None) -> str:
        """The same as a text of a heading and two tables."""
        d = self.to_dict(memory, batch)
        shared = " (part of the checkpoint)" if self.parts["copy"] == 0 else ""
        names = {
            "checkpoint": "checkpoint codes",
            "copy": f"output copy codes{shared}",
            "scales": "scales",
            "ring": f"ring ({self.ring_storage} inputs)",
            "padding": "padding",
            "cursors": "cursors",
        }
        heads = [f"a layer of {len(p.indices)}" for p in self.layers] + ["all layers"]
        rank = f", one rank of {self.tp}" if self.tp > 1 else ""
        lines = [
            f"## {self.model}: {self.recurrent_layers} of {self.total_layers} layers keep a "
            f"recurrent state{rank}",
            "",
        ]
        for part in self.layers:
            g = part.geometry
            kind = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet"}[g.kind]
            lines.append(
                f"{len(part.indices)} x {kind}, {g.heads} heads of {g.rows} x {g.n}, {g.groups} "
                f"groups: {part.config.label}, L = {part.config.buffer_len}"
            )
        tokens = 1 + self.drafts
        if self.drafts:
            lines.append(
                f"Steps of up to {tokens} tokens ({self.drafts} drafts): rings of "
                f"{self.layers[0].ring_inputs} inputs; fp32 keeps a state for each token."
            )
        lines += [f"Geometry: {self.source}.", "", *_head("bytes a request", *heads, "of fp32")]
        for key, name in names.items():
            each = [p.parts.get(key, 0) for p in self.layers]
            lines.append(_row(name, *each, self.parts[key], _percent(self.parts[key], self.fp32)))
        total, plain = [p.page for p in self.layers], [tokens * p.fp32 for p in self.layers]
        ratio = _percent(self.request, self.fp32)
        lines.append(_row("**state**", *total, self.request, f"**{ratio}**"))
        lines.append(_row("fp32 state", *plain, self.fp32, _percent(1, 1)))
        conv = [p.conv for p in self.layers]
        lines.append(_row("convolution state (apart)", *conv, self.conv, ""))
        what = "bytes moved a token"
        if self.drafts:
            what = f"bytes moved a step of {tokens} tokens, all kept"
        lines += ["", *_head(what, *heads, "of fp32")]
        for key, name in (("state_moved", "checkpoint and copy"), ("ring_moved", "ring")):
            total_ = float(self._sum(key))
            each_ = [getattr(p, key) for p in self.layers]
            lines.append(_row(name, *each_, total_, _percent(total_, self.fp32_moved)))
        moved = [p.moved for p in self.layers]
        ratio = _percent(self.moved, self.fp32_moved)
        lines.append(_row("**total**", *moved, self.moved, f"**{ratio}**"))
        if self.drafts:
            one_kept = [p.moved_one for p in self.layers]
            least = float(self._sum("moved_one"))
            lines.append(_row("if one is kept", *one_kept, least, _percent(least, self.fp32_moved)))
        plain = [p.fp32_moved for p in self.layers]
        lines.append(_row("fp32, read and written", *plain, self.fp32_moved, _percent(1, 1)))
        lines.append("")
        elements = self.fp32 / (4 * tokens)
        unit = "a step" if self.drafts else "a token"
        lines.append(
            f"{self.request / elements:.3f} bytes an element stored, {self.moved / elements:.3f} "
            f"moved {unit} (fp32: {4 * tokens} and {4 * (1 + tokens)}); {human(self.request)} a "
            f"request instead of {human(self.fp32)}."
        )
        if memory is not None:
            m = d["memory"]
            lines.append(
                f"In {memory:,} bytes: {m['requests']:,} requests, {m['requests_fp32']:,} with "
                "fp32 state (convolution included; weights and KV cache not)."
            )
        if batch is not None:
            b = d["batch"]
            lines.append(
                f"Batch {batch}: {human(b['bytes'])} of state (fp32 {human(b['bytes_fp32'])}, "
                f"convolution included), {human(b['bytes_per_step'])} moved a step "
                f"(fp32 {human(b['bytes_per_step_fp32'])})."
            )
        return "\n".join(lines)


def _head(*names: str) -> list[str]:
    return [_row(*names), "|" + " --- |" + " ---: |" * (len(names) - 1)]


def _row(*cells: str | float) -> str:
    return "| " + " | ".join(c if isinstance(c, str) else f"{c:,.0f}" for c in cells) + " |"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def human(value: float) -> str:
    """Bytes in decimal units, as the published tables have them: ``82.6 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def budget(
    model: str,
    geometry: ModelGeometry,
    config: StateConfig | Mapping[int, StateConfig],
    *,
    ring_storage: str = "bf16",
    tp: int = 1,
    source: str = "config.json",
    drafts: int = 0,
) -> Budget:
    """The cost of ``config`` (one, or one for each layer index) on one of ``tp`` ranks.

    source: where the geometry is from, for the reader. drafts: draft tokens that a step verifies
    at most (speculative decoding).

    Raises ValueError where heads do not divide over the ranks or a format does not fit.
    """
    alike: dict[tuple[LayerGeometry, StateConfig], list[int]] = {}
    for index, layer in geometry.layers.items():
        one = config if isinstance(config, StateConfig) else config[index]
        alike.setdefault((layer.shard(tp), one), []).append(index)
    layers = tuple(
        layer_budget(tuple(i), g, c, ring_storage, drafts) for (g, c), i in alike.items()
    )
    return Budget(model, geometry.total_layers, layers, ring_storage, tp, source, drafts)
