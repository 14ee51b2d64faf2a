"""Slots of recurrent state: allocate, clear, copy, save and restore; read and write checkpoints.

A pool has one uint8 page a slot for each recurrent layer, and three vectors a slot that all layers
share: ``valid`` (ring inputs since the last flush), ``position`` (tokens seen) and ``key`` (the
request's random key). Layers of a request advance in lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config import StateConfig
from ..formats.codec import Encoded, decode, encode
from ..formats.philox import element_bits
from .geometry import LayerGeometry
from .layout import StateLayout, StateViews
from .replay import first_offset

PAD_SLOT = -1


@dataclass
class StepRows:
    """Control of one step, a row for each sequence of the batch.

    slots int64 [b] (``PAD_SLOT`` marks padding), valid int32 [b] ring inputs before the step,
    flush bool [b], position int32 [b] tokens in the state after the step, key int64 [b].
    """

    slots: torch.Tensor
    valid: torch.Tensor
    flush: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor

    @property
    def live(self) -> torch.Tensor:
        """Rows that are not padding, as indices."""
        return (self.slots != PAD_SLOT).nonzero(as_tuple=True)[0]

    def take(self, rows: torch.Tensor) -> StepRows:
        """The rows at the given indices."""
        return StepRows(*(getattr(self, n)[rows] for n in self.__dataclass_fields__))


def read_checkpoint(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """The update checkpoint of the slots, decoded: fp32 [b, H, R, N] (rotated if
    config.rotate)."""

    def at(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[slots]

    enc = Encoded(
        views.ckpt[slots], at(views.ckpt_low), at(views.ckpt_scale), at(views.ckpt_head_scale)
    )
    return decode(enc, config.update)


def read_copy(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """What a readout sees, decoded: the output copy, the high plane, or the shared checkpoint."""
    if config.is_shared:
        return read_checkpoint(views, config, slots)
    scale, head = views.copy_scale, views.copy_head_scale
    enc = Encoded(
        views.copy[slots],
        None,
        None if scale is None else scale[slots],
        None if head is None else head[slots],
    )
    return decode(enc, config.readout, high_only=True)


def write_state(
    views: StateViews,
    config: StateConfig,
    slots: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
) -> None:
    """Round an fp32 state [b, H, R, N] into the checkpoint of its slots, and remake the copy.

    The copy is a pure function of the checkpoint: nearest-even of the decoded checkpoint. Random
    bits belong to (key, position, layer, global head, element).
    """
    if slots.numel() == 0:
        return
    heads, rows, n = state.shape[1:]
    rand = None
    if config.uses_random_bits:
        rand = element_bits(
            keys,
            positions,
            layer,
            heads,
            rows,
            n,
            head_offset=head_offset,
            bits=config.random_bits,
            rounds=config.philox_rounds,
        )
    enc = encode(state, config.update, rand, config.random_bits)
    _put(views, "ckpt", enc, slots)
    if config.output is not None:
        _put(views, "copy", encode(decode(enc, config.update), config.output), slots)


def _put(views: StateViews, prefix: str, enc: Encoded, slots: torch.Tensor) -> None:
    parts = {"": enc.codes, "_low": enc.low, "_scale": enc.scale, "_head_scale": enc.head_scale}
    for suffix, value in parts.items():
        if value is not None:
            getattr(views, prefix + suffix)[slots] = value


class StatePool:
    """Recurrent state of up to ``slots`` requests for the given layers, on one device.

    ring_storage: dtype of ring activations (``fp32``, ``bf16``, ``fp16``). Pages are zero at the
    start, which decodes to a zero state in every format.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerGeometry],
        config: StateConfig | Mapping[int, StateConfig],
        slots: int,
        *,
        ring_storage: str = "bf16",
        device: torch.device | str = "cpu",
    ):
        if slots < 1:
            raise ValueError(f"a pool needs at least one slot, not {slots}")
        if not layers:
            raise ValueError("a pool needs at least one recurrent layer; the model has none")
        self.configs = {i: config if isinstance(config, StateConfig) else config[i] for i in layers}
        lengths = {c.buffer_len for c in self.configs.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"layers of one model flush together, but buffer_len differs: {sorted(lengths)}"
            )
        self.buffer_len = lengths.pop()
        self.layouts = {i: StateLayout(g, self.configs[i], ring_storage) for i, g in layers.items()}
        self.pages = {
            i: torch.zeros(slots, layout.page_bytes, dtype=torch.uint8, device=device)
            for i, layout in self.layouts.items()
        }
        self.views = {i: layout.views(self.pages[i]) for i, layout in self.layouts.items()}
        self.valid = torch.zeros(slots, dtype=torch.int32, device=device)
        self.offset = torch.zeros(slots, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int32, device=device)
        self.key = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def slots(self) -> int:
        return self.valid.shape[0]

    @property
    def bytes_per_slot(self) -> int:
        """State bytes of one request: every page, without the four cursors (20 bytes)."""
        return sum(layout.page_bytes for layout in self.layouts.values())

    def _check(self, slots: torch.Tensor) -> None:
        if slots.numel() and not (0 <= int(slots.min()) and int(slots.max()) < self.slots):
            raise ValueError(f"slot {slots.tolist()} is outside the pool of {self.slots} slots")

    def start(self, slots: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> None:
        """Begin requests in their slots after a prompt of ``positions`` tokens, rings empty."""
        self._check(slots)
        self.valid[slots] = 0
        self.position[slots] = positions.to(torch.int32)
        self.key[slots] = keys
        stagger = any(c.stagger for c in self.configs.values())
        offsets = [first_offset(int(k), self.buffer_len) if stagger else 0 for k in keys]
        self.offset[slots] = torch.tensor(offsets, dtype=torch.int32, device=self.offset.device)

    def write(self, layer: int, slots: torch.Tensor, state: torch.Tensor) -> None:
        """Store the fp32 state [b, H, R, N] that a prefill left, unrotated, into both copies."""
        from ..formats.rotation import rotate

        config = self.configs[layer]
        self._check(slots)
        write_state(
            self.views[layer],
            config,
            slots,
            rotate(state) if config.rotate else state,
            self.key[slots],
            self.position[slots],
            layer=layer,
        )

    def rows(self, slots: torch.Tensor, force_flush: bool = False) -> StepRows:
        """Control rows of the next step of these slots."""
        live = slots != PAD_SLOT
        safe = torch.where(live, slots, 0)
        valid = self.valid[safe]
        flush = (valid + self.offset[safe] + 1 >= self.buffer_len) | force_flush
        return StepRows(slots, valid, flush & live, self.position[safe] + 1, self.key[safe])

    def advance(self, rows: StepRows) -> None:
        """Move the cursors after every layer has taken the step; call once a step."""
        rows = rows.take(rows.live)
        self.valid[rows.slots] = torch.where(rows.flush, 0, rows.valid + 1).to(torch.int32)
        self.offset[rows.slots] = torch.where(rows.flush, 0, self.offset[rows.slots])
        self.position[rows.slots] = rows.position

    def clear(self, slots: torch.Tensor) -> None:
        """Zero everything of these slots: checkpoint, copy, scales, rings, cursors, keys."""
        self._check(slots)
        for page in self.pages.values():
            page[slots] = 0
        for vector in (self.valid, self.offset, self.position, self.key):
            vector[slots] = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole requests, rings and cursors included, from slot to slot."""
        self._check(source)
        self._check(target)
        self.restore(target, self.save(source))

    def save(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Everything of these slots as tensors that ``restore`` takes back."""
        self._check(slots)
        saved = {f"page.{i}": page[slots].clone() for i, page in self.pages.items()}
        for name in ("valid", "offset", "position", "key"):
            saved[name] = getattr(self, name)[slots].clone()
        return saved

    def restore(self, slots: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
        """Put saved requests into slots. Raises ValueError if they come from another layout."""
        self._check(slots)
        for i, page in self.pages.items():
            part = saved.get(f"page.{i}")
            if part is None or part.shape != (slots.numel(), page.shape[1]):
                raise ValueError(f"saved state does not fit layer {i}: another model or formats")
            page[slots] = part
        for name in ("valid", "offset", "position", "key"):
            getattr(self, name)[slots] = saved[name]

    def reorder(self, order: torch.Tensor) -> None:
        """Slot i takes over what slot order[i] held (beam search)."""
        for page in self.pages.values():
            page.copy_(page[order])
        for name in ("valid", "offset", "position", "key"):
            vector = getattr(self, name)
            vector.copy_(vector[order])


__all__ = [
    "PAD_SLOT",
    "StatePool",
    "StepRows",
    "read_checkpoint",
    "read_copy",
    "write_state",
]
