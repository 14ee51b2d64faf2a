"""Slots of recurrent state: allocate, clear, copy, save and restore; read and write checkpoints.

A pool has one uint8 page a slot for each recurrent layer, and three vectors a slot that all layers
share: ``valid`` (ring inputs since the last flush), ``position`` (tokens seen) and ``key`` (the
request's random key). Layers of a request advance in lockstep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config import StateConfig
from ..formats.codec import Encoded, decode, encode
from ..formats.packing import from_page, to_page
from ..formats.philox import element_bits
from ..formats.rotation import rotate
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

    def check(self, slots: int, buffer_len: int) -> None:
        """Raise unless these rows can step a pool of ``slots`` slots with rings of ``buffer_len``.

        Dtypes and shapes are checked first; then, which waits for the device, that live slots are
        in range and distinct and that no ring holds more than the step allows.
        """
        want = {
            "slots": (torch.int64, torch.int32),
            "valid": (torch.int32,),
            "flush": (torch.bool,),
            "position": (torch.int32,),
            "key": (torch.int64,),
        }
        for name, dtypes in want.items():
            value = getattr(self, name)
            if value.dtype not in dtypes:
                raise TypeError(f"rows.{name} is {value.dtype}; it must be {dtypes[0]}")
            if value.shape != self.slots.shape or value.ndim != 1:
                raise ValueError(
                    f"rows.{name} has shape {tuple(value.shape)}; every vector needs one entry a "
                    f"row, as slots {tuple(self.slots.shape)}"
                )
        _in_range(self.slots, slots, pad=True)
        live = self.take(self.live)
        _distinct(live.slots)
        if live.slots.numel() == 0:
            return
        low, high = int(live.valid.min()), int(live.valid.max())
        if low < 0 or high >= buffer_len:
            raise ValueError(
                f"rows.valid holds {low if low < 0 else high}; a ring of {buffer_len} allows 0 to "
                f"{buffer_len - 1} inputs before a step"
            )
        full = (live.valid == buffer_len - 1) & ~live.flush
        if bool(full.any()):
            slot = int(live.slots[full][0])
            raise ValueError(
                f"slot {slot} holds {buffer_len - 1} inputs and does not flush; the last step of a "
                "window must"
            )
        if int(live.position.min()) < 1:
            raise ValueError("rows.position counts the tokens after the step, so it is at least 1")


def _in_range(slots: torch.Tensor, count: int, pad: bool = False) -> None:
    if slots.numel() == 0:
        return
    lowest = PAD_SLOT if pad else 0
    low, high = int(slots.min()), int(slots.max())
    if low < lowest or high >= count:
        padding = f", or {PAD_SLOT} for padding" if pad else ""
        raise ValueError(
            f"slot {low if low < lowest else high} is outside the pool of {count} slots; use 0 to "
            f"{count - 1}{padding}"
        )


def _distinct(slots: torch.Tensor) -> None:
    values, counts = slots.unique(return_counts=True)
    if values.numel() < slots.numel():
        raise ValueError(
            f"slot {int(values[counts > 1][0])} appears twice; every request needs its own slot"
        )


def read_checkpoint(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """The update checkpoint of the slots, decoded: fp32 [b, H, R, N] (rotated if
    config.rotate)."""

    def at(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[slots]

    low = at(views.ckpt_low)
    enc = Encoded(
        from_page(views.ckpt[slots]),
        None if low is None else from_page(low),
        at(views.ckpt_scale),
        at(views.ckpt_tile_scale),
    )
    return decode(enc, config.update)


def read_copy(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """What a readout sees, decoded: the output copy, the high plane, or the shared checkpoint."""
    if config.is_shared:
        return read_checkpoint(views, config, slots)
    scale, tile = views.copy_scale, views.copy_tile_scale
    enc = Encoded(
        from_page(views.copy[slots]),
        None,
        None if scale is None else scale[slots],
        None if tile is None else tile[slots],
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
    parts = {"": enc.codes, "_low": enc.low, "_scale": enc.scale, "_tile_scale": enc.tile_scale}
    for suffix, value in parts.items():
        if value is not None:
            stored = to_page(value) if suffix in ("", "_low") else value
            getattr(views, prefix + suffix)[slots] = stored


class StatePool:
    """Recurrent state of up to ``slots`` requests for the given layers, on one device.

    ring_storage: dtype of ring activations (``fp32``, ``bf16``, ``fp16``). Pages are zero at the
    start, which decodes to a zero state in every format. debug checks every step's rows in full
    (``StepRows.check``), which waits for the device.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerGeometry],
        config: StateConfig | Mapping[int, StateConfig],
        slots: int,
        *,
        ring_storage: str = "bf16",
        device: torch.device | str = "cpu",
        debug: bool = False,
    ):
        if slots < 1:
            raise ValueError(f"a pool needs at least one slot, not {slots}")
        if not layers:
            raise ValueError("a pool needs at least one recurrent layer; the model has none")
        if not isinstance(config, StateConfig):
            missing = sorted(set(layers) - set(config))
            if missing:
                raise ValueError(f"layers {missing} have no StateConfig; give one for each layer")
        self.configs = {i: config if isinstance(config, StateConfig) else config[i] for i in layers}
        lengths = {c.buffer_len for c in self.configs.values()}
        if len(lengths) > 1:
            raise ValueError(
                f"layers of one model flush together, but buffer_len differs: {sorted(lengths)}"
            )
        self.buffer_len = lengths.pop()
        self.debug = debug
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
        """State bytes of one request: every page, without the cursors (``CURSOR_BYTES``)."""
        return sum(layout.page_bytes for layout in self.layouts.values())

    @property
    def layout_tag(self) -> torch.Tensor:
        """int64 [1]: a digest of layers, formats, rotation and ring, which saved states carry."""
        text = repr([(i, layout.signature) for i, layout in sorted(self.layouts.items())])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)

    def _check(self, slots: torch.Tensor, *, pad: bool = False, distinct: bool = True) -> None:
        if slots.dtype not in (torch.int64, torch.int32) or slots.ndim != 1:
            raise TypeError(
                f"slots must be an integer vector, not {slots.dtype} {tuple(slots.shape)}"
            )
        _in_range(slots, self.slots, pad)
        if distinct:
            _distinct(slots)

    def start(
        self,
        slots: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        *,
        clear: bool = True,
    ) -> None:
        """Begin requests in their slots after a prompt of ``positions`` tokens, rings empty.

        The state is zero until ``write``, whoever had the slot before; clear=False leaves the
        pages as they are. slots int64 [b], keys int64 [b] (``philox.request_key``), positions
        int [b].
        """
        self._check(slots)
        for name, value in (("keys", keys), ("positions", positions)):
            if value.shape != slots.shape or value.is_floating_point():
                raise ValueError(
                    f"{name} must be integers, one a slot {tuple(slots.shape)}, not {value.dtype} "
                    f"{tuple(value.shape)}"
                )
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"position {int(positions.min())} is negative; count prompt tokens")
        if clear:
            for page in self.pages.values():
                page[slots] = 0
        self.valid[slots] = 0
        self.position[slots] = positions.to(torch.int32)
        self.key[slots] = keys
        stagger = any(c.stagger for c in self.configs.values())
        offsets = [first_offset(int(k), self.buffer_len) if stagger else 0 for k in keys]
        self.offset[slots] = torch.tensor(offsets, dtype=torch.int32, device=self.offset.device)

    def write(
        self, layer: int, slots: torch.Tensor, state: torch.Tensor, *, head_offset: int = 0
    ) -> None:
        """Store the fp32 state [b, H, R, N] that a prefill left, unrotated, into both copies.

        head_offset: global number of the first head, for a tensor-parallel shard.
        """
        config = self.configs[layer]
        self._check(slots)
        g = self.layouts[layer].geometry
        shape = (slots.numel(), g.heads, g.rows, g.n)
        if state.dtype != torch.float32 or tuple(state.shape) != shape:
            raise ValueError(
                f"layer {layer} stores fp32 states {shape}, not {state.dtype} "
                f"{tuple(state.shape)}; GDN states have V before K"
            )
        write_state(
            self.views[layer],
            config,
            slots,
            rotate(state) if config.rotate else state,
            self.key[slots],
            self.position[slots],
            layer=layer,
            head_offset=head_offset,
        )

    def rows(self, slots: torch.Tensor, force_flush: bool = False) -> StepRows:
        """Control rows of the next step of these slots (``PAD_SLOT`` for padding).

        Slots are checked on the CPU, and on a GPU only with ``debug``.
        """
        if self.debug or not slots.is_cuda:
            self._check(slots, pad=True, distinct=False)
        live = slots != PAD_SLOT
        safe = torch.where(live, slots, 0)
        valid = self.valid[safe]
        flush = (valid + self.offset[safe] + 1 >= self.buffer_len) | force_flush
        rows = StepRows(slots, valid, flush & live, self.position[safe] + 1, self.key[safe])
        if self.debug:
            rows.check(self.slots, self.buffer_len)
        return rows

    def advance(self, rows: StepRows) -> None:
        """Move the cursors after every layer has taken the step; call once a step."""
        rows = rows.take(rows.live)
        self.valid[rows.slots] = torch.where(rows.flush, 0, rows.valid + 1).to(torch.int32)
        self.offset[rows.slots] = torch.where(rows.flush, 0, self.offset[rows.slots])
        self.position[rows.slots] = rows.position

    def clear(self, slots: torch.Tensor) -> None:
        """Zero everything of these slots: checkpoint, copy, scales, rings, cursors, keys."""
        self._check(slots, distinct=False)
        for page in self.pages.values():
            page[slots] = 0
        for vector in self._vectors().values():
            vector[slots] = 0

    def _vectors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("valid", "offset", "position", "key")}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole requests, rings and cursors included, from slot to slot."""
        self._check(source, distinct=False)
        self._check(target)
        if source.shape != target.shape:
            raise ValueError(f"{source.numel()} source slots do not pair with {target.numel()}")
        self.restore(target, self.save(source))

    def save(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Everything of these slots as tensors that ``restore`` takes back."""
        self._check(slots, distinct=False)
        saved = {f"page.{i}": page[slots].clone() for i, page in self.pages.items()}
        saved |= {name: vector[slots].clone() for name, vector in self._vectors().items()}
        return {**saved, "layout": self.layout_tag}

    def restore(self, slots: torch.Tensor, saved: Mapping[str, torch.Tensor]) -> None:
        """Put saved requests into slots. Raises ValueError if they come from another layout."""
        self._check(slots)
        tag = saved.get("layout")
        if tag is None or not torch.equal(tag.cpu(), self.layout_tag):
            raise ValueError(
                "saved state is from another layout (model, formats, rotation, buffer length or "
                "ring dtype); restore it into a pool made with the same settings"
            )
        if saved["valid"].shape != slots.shape:
            raise ValueError(
                f"{saved['valid'].numel()} saved requests do not pair with {slots.numel()} slots"
            )
        for i, page in self.pages.items():
            page[slots] = saved[f"page.{i}"].to(page.device)
        for name, vector in self._vectors().items():
            vector[slots] = saved[name].to(vector.device)

    def reorder(self, order: torch.Tensor) -> None:
        """Slot i takes over what slot order[i] held (beam search)."""
        self._check(order, distinct=False)
        if order.numel() != self.slots:
            raise ValueError(f"order has {order.numel()} entries; the pool has {self.slots} slots")
        for tensor in (*self.pages.values(), *self._vectors().values()):
            tensor.copy_(tensor[order])


__all__ = [
    "PAD_SLOT",
    "StatePool",
    "StepRows",
    "read_checkpoint",
    "read_copy",
    "write_state",
]
