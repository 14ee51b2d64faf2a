"""Slots of recurrent state: allocate, clear, copy, save and restore; read and write checkpoints.

A pool has one uint8 page a slot for each recurrent layer, and vectors a slot that all layers share:
``valid`` (ring inputs since the last flush), ``position`` (tokens seen) and ``key`` (the request's
random key). Layers of a request advance in lockstep.

With drafts (speculative decoding) a step verifies up to T tokens, of which a prefix is accepted
later. ``valid`` and ``position`` then count committed tokens only, and ``pending`` the tokens that
the last step appended behind them. Accepting some is a move of ``valid``; the others are
overwritten by the next step. So a step is ``commit``, ``verify_rows``, the layers,
``advance_verify``: none of them waits for the device.
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
from .layout import StateLayout, StateViews, ring_capacity
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

    def check(self, slots: int, buffer_len: int, capacity: int | None = None) -> None:
        """Raise unless these rows can step a pool of ``slots`` slots with windows of
        ``buffer_len``, in rings of ``capacity`` (by default as long).

        Dtypes and shapes are checked first; then, which waits for the device, that live slots are
        in range and distinct and that no ring holds more than the step allows.
        """
        _check_vectors(self)
        capacity = buffer_len if capacity is None else capacity
        _in_range(self.slots, slots, pad=True)
        live = self.take(self.live)
        _distinct(live.slots)
        if live.slots.numel() == 0:
            return
        low, high = int(live.valid.min()), int(live.valid.max())
        if low < 0 or high >= capacity:
            raise ValueError(
                f"rows.valid holds {low if low < 0 else high}; a ring of {capacity} allows 0 to "
                f"{capacity - 1} inputs before a step"
            )
        full = (live.valid >= buffer_len - 1) & ~live.flush
        if bool(full.any()):
            slot, held = int(live.slots[full][0]), int(live.valid[full][0])
            raise ValueError(
                f"slot {slot} holds {held} inputs and does not flush; the last step of a window "
                "must"
            )
        if int(live.position.min()) < 1:
            raise ValueError("rows.position counts the tokens after the step, so it is at least 1")


@dataclass
class VerifyRows:
    """Control of a step that verifies drafts, a row for each sequence of the batch.

    slots int64 [b] (``PAD_SLOT`` marks padding); valid int32 [b] committed ring inputs before the
    step; flush bool [b]: they are folded into the checkpoint first, and the ring starts anew; count
    int32 [b] tokens of the step, 0 to T; position int32 [b] committed tokens, which is what the
    random bits of a flush depend on; key int64 [b]; ancestors int32 [b, T] or None: for a tree of
    drafts bit j of entry t says that token j is t itself or comes before it on its path (bits above
    t are clear). None is a chain: every token follows the one before. fold_slots: the slots of rows
    that flush, all others padding; made once a step and not in every layer.
    """

    slots: torch.Tensor
    valid: torch.Tensor
    flush: torch.Tensor
    count: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor
    ancestors: torch.Tensor | None = None
    fold_slots: torch.Tensor | None = None

    @property
    def live(self) -> torch.Tensor:
        """Rows that are not padding, as indices."""
        return (self.slots != PAD_SLOT).nonzero(as_tuple=True)[0]

    @property
    def base(self) -> torch.Tensor:
        """int32 [b]: ring index of a row's first token."""
        return torch.where(self.flush, 0, self.valid)

    def take(self, rows: torch.Tensor) -> VerifyRows:
        """The rows at the given indices."""
        return VerifyRows(
            self.slots[rows],
            self.valid[rows],
            self.flush[rows],
            self.count[rows],
            self.position[rows],
            self.key[rows],
            None if self.ancestors is None else self.ancestors[rows],
            None if self.fold_slots is None else self.fold_slots[rows],
        )

    def folding(self) -> StepRows:
        """Rows of the fold alone: all others are padding, and ``valid`` inputs are to be folded."""
        slots = self.fold_slots
        if slots is None:
            slots = torch.where(self.flush, self.slots, PAD_SLOT)
        return StepRows(slots, self.valid, self.flush, self.position, self.key)

    def paths(self, width: int) -> torch.Tensor:
        """bool [b, T, T]: token j is on the path of token t, and both are in the row."""
        index = torch.arange(width, device=self.slots.device)
        if self.ancestors is None:
            path = (index[None, :] <= index[:, None])[None]
        else:
            path = (self.ancestors[:, :, None] >> index & 1) != 0
        inside = index < self.count[:, None]
        return path & inside[:, :, None] & inside[:, None, :]

    def own(self, width: int, length: int) -> torch.Tensor:
        """bool [b, T, length]: the ring entry is a token of the step, on the path of token t."""
        entry = torch.arange(length, device=self.slots.device) - self.base[:, None]
        inside = (entry >= 0) & (entry < width)
        token = entry.clamp(0, width - 1).long()[:, None].expand(-1, width, -1)
        return self.paths(width).gather(2, token) & inside[:, None]

    def plain(self) -> StepRows:
        """The rows of a step over one token each, after the fold: it appends and never flushes."""
        slots = torch.where(self.count > 0, self.slots, PAD_SLOT)
        flush = torch.zeros_like(self.flush)
        return StepRows(slots, self.base, flush, self.position + 1, self.key)

    def check(self, slots: int, capacity: int, width: int) -> None:
        """Raise unless these rows can verify ``width`` tokens in a pool of ``slots`` slots.

        Dtypes and shapes are checked first; then, which waits for the device, that live slots are
        in range and distinct, that the tokens fit the rings of ``capacity`` and that a tree's nodes
        follow their parents.
        """
        _check_vectors(self)
        batch = self.slots.shape[0]
        tree = self.ancestors
        if tree is not None and (tree.dtype != torch.int32 or tree.shape != (batch, width)):
            raise ValueError(
                f"rows.ancestors is {tree.dtype} {tuple(tree.shape)}; a tree needs int32 "
                f"{(batch, width)}"
            )
        _in_range(self.slots, slots, pad=True)
        live = self.take(self.live)
        _distinct(live.slots)
        if live.slots.numel() == 0:
            return
        for name, value, top in (
            ("valid", live.valid, capacity - 1),
            ("count", live.count, width),
            ("base + count", live.base + live.count, capacity),
        ):
            low, high = int(value.min()), int(value.max())
            if low < 0 or high > top:
                raise ValueError(
                    f"rows.{name} holds {low if low < 0 else high}; a ring of {capacity} and a "
                    f"step of {width} tokens allow 0 to {top}"
                )
        if live.ancestors is not None:
            _check_tree(live.ancestors, width)


def _check_vectors(rows: StepRows | VerifyRows) -> None:
    """Raise unless every vector of the rows has its dtype and one entry a row."""
    want = {
        "slots": (torch.int64, torch.int32),
        "valid": (torch.int32,),
        "flush": (torch.bool,),
        "count": (torch.int32,),
        "position": (torch.int32,),
        "key": (torch.int64,),
    }
    for name, dtypes in want.items():
        if name not in rows.__dataclass_fields__:
            continue
        value = getattr(rows, name)
        if value.dtype not in dtypes:
            raise TypeError(f"rows.{name} is {value.dtype}; it must be {dtypes[0]}")
        if value.shape != rows.slots.shape or value.ndim != 1:
            raise ValueError(
                f"rows.{name} has shape {tuple(value.shape)}; every vector needs one entry a "
                f"row, as slots {tuple(rows.slots.shape)}"
            )


def _check_tree(ancestors: torch.Tensor, width: int) -> None:
    """Raise unless each token's path is its parent's and itself, and parents come first."""
    for row, masks in enumerate(ancestors.tolist()):
        for t, mask in enumerate(masks):
            above = mask & ((1 << t) - 1)
            parent = above.bit_length() - 1
            if mask >> t != 1 or (above and masks[parent] != above):
                raise ValueError(
                    f"rows.ancestors of row {row}, token {t} of {width} is {mask:#b}; it must be "
                    "the token's own bit and the mask of its parent, which comes before it"
                )


def tree_ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Ancestor masks int32 [b, T] of a tree given by parents, integer [b, T].

    parents[:, t] is the index of the token that token t follows, or -1 if that is the last
    committed one; it must be below t. On the device, without waiting for it.
    """
    width = parents.shape[1]
    masks: list[torch.Tensor] = []
    for t in range(width):
        mask = torch.full_like(parents[:, 0], 1 << t, dtype=torch.int32)
        for j, above in enumerate(masks):
            mask = mask | torch.where(parents[:, t] == j, above, 0)
        masks.append(mask.to(torch.int32))
    return torch.stack(masks, 1)


def compact(views: StateViews, rows: VerifyRows, path: torch.Tensor) -> None:
    """Move the tokens of an accepted path of a tree to the front of the step's ring entries.

    rows are those of the step; path integer [b, T] holds the accepted tokens' indices, ascending,
    then -1. ``StatePool.commit`` with the lengths of the paths is next.
    """
    row, to = ((path >= 0) & (rows.slots >= 0)[:, None]).nonzero(as_tuple=True)
    slots, base = rows.slots[row], rows.base.long()[row]
    for name, ring in views.tensors().items():
        if name.startswith("ring"):
            ring[slots, base + to] = ring[slots, base + path[row, to]]


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
    start, which decodes to a zero state in every format. drafts: draft tokens that a step verifies
    at most, 0 for plain decoding. debug checks every step's rows in full (``StepRows.check``),
    which waits for the device.
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
        drafts: int = 0,
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
        self.capacity, self.drafts = ring_capacity(self.buffer_len, drafts), drafts
        self.debug = debug
        self.layouts = {
            i: StateLayout(g, self.configs[i], ring_storage, drafts) for i, g in layers.items()
        }
        self.pages = {
            i: torch.zeros(slots, layout.page_bytes, dtype=torch.uint8, device=device)
            for i, layout in self.layouts.items()
        }
        self.views = {i: layout.views(self.pages[i]) for i, layout in self.layouts.items()}
        self.valid = torch.zeros(slots, dtype=torch.int32, device=device)
        self.offset = torch.zeros(slots, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int32, device=device)
        self.key = torch.zeros(slots, dtype=torch.int64, device=device)
        self.pending = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def slots(self) -> int:
        return self.valid.shape[0]

    @property
    def bytes_per_slot(self) -> int:
        """State bytes of one request: every page, without the cursors (``CURSOR_BYTES``,
        ``PENDING_BYTES``)."""
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
        self.pending[slots] = 0
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
            rows.check(self.slots, self.buffer_len, self.capacity)
            waiting = self.pending[safe[live]]
            if bool((waiting > 0).any()):
                raise ValueError(
                    f"slot {int(safe[live][waiting > 0][0])} has drafts that await acceptance; "
                    "commit before the next step"
                )
        return rows

    def advance(self, rows: StepRows) -> None:
        """Move the cursors after every layer has taken the step; call once a step."""
        rows = rows.take(rows.live)
        self.valid[rows.slots] = torch.where(rows.flush, 0, rows.valid + 1).to(torch.int32)
        self.offset[rows.slots] = torch.where(rows.flush, 0, self.offset[rows.slots])
        self.position[rows.slots] = rows.position

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Keep the first ``accepted`` tokens of each slot's last step and forget the others.

        slots int64 [b] (``PAD_SLOT`` skips a row), accepted integer [b], 0 to the tokens of that
        step; more are cut to that number. A slot that has nothing pending is left as it is, so that
        committing twice, or after a plain step, changes nothing.
        """
        if accepted.shape != slots.shape or accepted.is_floating_point():
            raise ValueError(
                f"accepted must be integers, one a slot {tuple(slots.shape)}, not "
                f"{accepted.dtype} {tuple(accepted.shape)}"
            )
        if self.debug or not slots.is_cuda:
            self._check(slots, pad=True, distinct=False)
        live = slots != PAD_SLOT
        safe = torch.where(live, slots, 0)
        waiting = torch.where(live, self.pending[safe], 0)
        kept = torch.minimum(accepted.to(torch.int32).clamp(min=0), waiting)
        for vector, change in ((self.valid, kept), (self.position, kept), (self.pending, -waiting)):
            vector.index_add_(0, safe, change)  # a padding row adds 0 to slot 0

    def verify_rows(
        self,
        slots: torch.Tensor,
        count: torch.Tensor,
        ancestors: torch.Tensor | None = None,
    ) -> VerifyRows:
        """Control rows of a step that verifies ``count`` int [b] tokens of each slot.

        Call ``commit`` first. Slots whose committed inputs fill a window of L flush before their
        tokens are read; ancestors int32 [b, T]: see ``VerifyRows`` and ``tree_ancestors``. Slots
        are checked on the CPU, and on a GPU only with ``debug``.

        Nothing of the step is folded, for it may be taken back, so even a row of one token reads
        the L-th of a window from the copy where plain decode reads the exact state; what the next
        step folds has the same bytes. Where no token can be rejected, ``rows`` gives plain decode.
        """
        if not self.drafts:
            raise ValueError("this pool verifies no drafts; make it with drafts=1 to 7")
        if self.debug or not slots.is_cuda:
            self._check(slots, pad=True, distinct=False)
        live = slots != PAD_SLOT
        safe = torch.where(live, slots, 0)
        valid = self.valid[safe]
        flush = (valid + self.offset[safe] >= self.buffer_len) & (valid > 0) & live
        rows = VerifyRows(
            slots,
            valid,
            flush,
            count.to(torch.int32),
            self.position[safe],
            self.key[safe],
            ancestors,
            torch.where(flush, slots, PAD_SLOT),
        )
        if self.debug:
            rows.check(self.slots, self.capacity, 1 + self.drafts)
            if bool((self.pending[safe[live]] > 0).any()):
                raise ValueError("drafts await acceptance; commit before the next step")
        return rows

    def advance_verify(self, rows: VerifyRows) -> None:
        """Move the cursors after every layer has taken the step; call once a step."""
        live = rows.slots != PAD_SLOT
        safe = torch.where(live, rows.slots, 0)
        folded = rows.flush & live
        changes = (
            (self.valid, torch.where(folded, -rows.valid, 0)),
            (self.offset, torch.where(folded, -self.offset[safe], 0)),
            (self.pending, torch.where(live, rows.count - self.pending[safe], 0)),
        )
        for vector, change in changes:
            vector.index_add_(0, safe, change.to(torch.int32))

    def clear(self, slots: torch.Tensor) -> None:
        """Zero everything of these slots: checkpoint, copy, scales, rings, cursors, keys."""
        self._check(slots, distinct=False)
        for page in self.pages.values():
            page[slots] = 0
        for vector in self._vectors().values():
            vector[slots] = 0

    def _vectors(self) -> dict[str, torch.Tensor]:
        names = ("valid", "offset", "position", "key")
        return {name: getattr(self, name) for name in (*names, *(("pending",) * bool(self.drafts)))}

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
    "VerifyRows",
    "compact",
    "read_checkpoint",
    "read_copy",
    "tree_ancestors",
    "write_state",
]
