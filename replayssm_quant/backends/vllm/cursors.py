"""Ring cursors of the slots, as a function of how many tokens a request has. No vLLM here.

Two vectors a slot: ``base``, the tokens in the state when its window sequence began (at the last
prefill), and ``key``, a random key of the slot's present tenant, for engines that do not show the
request. Everything else follows from the number of tokens that vLLM reports, so nothing has to be
advanced, a decode step that is planned twice is planned the same, and a slot is clean once a
prefill has written its base.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ...formats.philox import _REQUEST_STREAM, philox4x32
from ...state.cache import PAD_SLOT, StepRows

NULL_BLOCK = 0
"""vLLM's block of padding rows and dummy runs."""
NEXT_TENANT = 0x9E3779B97F4A7C15 - 2**64
"""From a slot's key to that of its next tenant: odd, so that 2**64 of them differ."""
_RANDOM_TAIL = re.compile(r"-[0-9a-f]{8}$")


def window(
    steps: torch.Tensor, offset: torch.Tensor | int, buffer_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(valid, flush) of the step that follows ``steps`` decoded tokens; int32 and bool.

    The first window is ``offset`` tokens shorter than ``buffer_len``, as in ``state.replay``.
    """
    steps = steps.clamp(min=0)
    first = buffer_len - offset
    early = steps < first
    valid = torch.where(early, steps, (steps - first) % buffer_len)
    flush = torch.where(early, steps + 1 == first, valid + 1 == buffer_len)
    return valid.to(torch.int32), flush


def first_offsets(keys: torch.Tensor, buffer_len: int) -> torch.Tensor:
    """``state.replay.first_offset`` for int64 keys [b]: int32 [b]."""
    return (((keys >> 17) & 0xFFFFFFFF) % buffer_len).to(torch.int32)


def slot_keys(seed: int, slots: int, device: torch.device | str, tenant: int = 0) -> torch.Tensor:
    """A random key for each slot, int64 [slots], where the engine does not show the request.

    Slot i has the key ``request_key(seed, i)`` for its first tenant (0), and the sum of this and
    ``tenant * NEXT_TENANT`` modulo 2**64 for later ones.
    """
    index = torch.arange(slots, dtype=torch.int64, device=device)
    low, high, _, _ = philox4x32(seed, index, 0, _REQUEST_STREAM, 1, 10)
    moved = (tenant * NEXT_TENANT + 2**63) % 2**64 - 2**63
    return (low | (high << 32)) + moved


def tenants(
    key: torch.Tensor, blocks: torch.Tensor, computed: torch.Tensor, keys: torch.Tensor | None
) -> torch.Tensor:
    """Keys int64 [b] of the rows of a prefill: ``keys`` if given, else those of their slots.

    key int64 [slots] moves on for rows without earlier tokens (``computed`` == 0): a request that
    follows in a slot, or one that comes back to it, rounds at the same positions by other bits.
    """
    if keys is not None:
        return keys.clone()
    own = key[blocks] + (computed == 0) * NEXT_TENANT
    key[blocks] = own
    return own


def request_identity(request_id: str, seed: int | None) -> int | str:
    """What a request's key is made from: its sampling seed, else the id its sender gave.

    vLLM appends eight random hex digits to the sender's id; without them the same requests have the
    same keys in every run.
    """
    return seed if seed is not None else _RANDOM_TAIL.sub("", request_id)


class RowBuffers:
    """Control vectors of a step at fixed addresses, as captured CUDA graphs need them."""

    def __init__(self, rows: int, device: torch.device | str):
        rows = -(-rows // 16) * 16  # every vector on 16 bytes, which kernels are compiled for
        sizes = {"slots": 8, "key": 8, "valid": 4, "position": 4, "flush": 1}
        dtypes = {8: torch.int64, 4: torch.int32, 1: torch.bool}
        self.memory = torch.zeros(rows * sum(sizes.values()), dtype=torch.uint8, device=device)
        start = 0
        self.vectors: dict[str, torch.Tensor] = {}
        for name, size in sizes.items():
            stop = start + rows * size
            self.vectors[name] = self.memory[start:stop].view(dtypes[size])
            start = stop

    def rows(self, count: int) -> StepRows:
        """The first ``count`` rows, as views."""
        return StepRows(**{name: v[:count] for name, v in self.vectors.items()})


class GroupRows:
    """Rows of the decode steps of several KV-cache groups, planned for all of them at once.

    Groups differ in their slots alone: ``slots`` int64 [groups, rows]; the other vectors are
    ``shared``. Every address is fixed, as captured CUDA graphs need it.
    """

    def __init__(self, groups: int, rows: int, device: torch.device | str):
        one = RowBuffers(rows, device)
        self.capacity = one.vectors["slots"].shape[0]
        self.slots = torch.zeros(groups, self.capacity, dtype=torch.int64, device=device)
        self.shared = {name: v for name, v in one.vectors.items() if name != "slots"}
        self._tables: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[tuple[int, int], StepRows] = {}

    def holds(self, groups: int, rows: int) -> bool:
        """True if so many groups and rows have their place here."""
        return groups == self.slots.shape[0] and rows <= self.capacity

    def rows(self, group: int, count: int) -> StepRows:
        """The first ``count`` rows of a group, as views."""
        found = self._rows.get((group, count))
        if found is None:
            if len(self._rows) > 4096:
                self._rows.clear()
            shared = {name: v[:count] for name, v in self.shared.items()}
            found = StepRows(slots=self.slots[group, :count], **shared)
            self._rows[group, count] = found
        return found

    def plan(
        self,
        cursors: SlotCursors,
        tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        request_keys: torch.Tensor,
        index: torch.Tensor,
        count: int,
        rows: int,
    ) -> None:
        """Plan every row as a decode row; what it says of a prefill row means nothing but its key.

        cursors: those of the first group. tables: the groups' block tables int32 [>= count, ...],
        of which the first column counts. seq_lens int32 [>= count]: tokens with those of this step.
        request_keys int64 and index int [>= count]: where in it the key of each row is. count: rows
        of the batch; those up to ``rows`` are padding.
        """
        if self.slots.is_cuda:
            from .cursor_kernel import group_rows

            group_rows(
                self, self.addresses(tables), seq_lens, cursors.base, request_keys, index,
                count, rows, cursors.buffer_len, cursors.stagger,
            )  # fmt: skip
            return
        blocks = torch.zeros(len(tables), rows, dtype=torch.int64)
        lens, keys = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
        for group, table in enumerate(tables):
            blocks[group, :count] = table[:count, 0]
        lens[:count] = seq_lens[:count]
        keys[:count] = request_keys[index[:count].long()]
        cursors.decode(self.rows(0, rows), blocks[0], lens, keys)
        self.slots[:, :rows] = torch.where(blocks != NULL_BLOCK, blocks, PAD_SLOT)

    def addresses(self, tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses and row strides of the tables, int64 [groups] on the device; kept, since the
        engine's tables stay where they are."""
        where = tuple((t.data_ptr(), t.stride(0)) for t in tables)
        found = self._tables.get(where)
        if found is None:
            if len(self._tables) > 64:
                self._tables.clear()
            columns = torch.tensor(where, dtype=torch.int64).to(self.slots.device).unbind(1)
            found = self._tables[where] = (columns[0].contiguous(), columns[1].contiguous())
        return found


class SlotCursors:
    """Cursors of one KV-cache group's slots, and the rows of its steps."""

    def __init__(self, slots: int, buffer_len: int, *, stagger: bool, seed: int, device: object):
        self.buffer_len, self.stagger = buffer_len, stagger
        self.base = torch.zeros(slots, dtype=torch.int32, device=device)  # type: ignore[call-overload]
        self.key = slot_keys(seed, slots, self.base.device, tenant=-1)  # none has come yet

    @property
    def slots(self) -> int:
        return self.base.shape[0]

    def _plan(
        self, blocks: torch.Tensor, steps: torch.Tensor, keys: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(key, valid, flush) after ``steps`` decoded tokens."""
        key = self.key[blocks] if keys is None else keys
        offset = first_offsets(key, self.buffer_len) if self.stagger else 0
        valid, flush = window(steps, offset, self.buffer_len)
        return key, valid, flush

    def decode(
        self,
        out: StepRows,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> None:
        """Fill the rows of a decode step.

        blocks int [b]: block of each row, ``NULL_BLOCK`` for padding. seq_lens int [b]: tokens with
        the one of this step. keys int64 [b]: keys of the requests, if the engine shows them.
        """
        if blocks.is_cuda:
            from .cursor_kernel import decode_rows

            decode_rows(
                out, blocks, seq_lens, self.base, self.key, keys, self.buffer_len, self.stagger
            )
            return
        blocks = blocks.long()
        key, valid, flush = self._plan(blocks, seq_lens - 1 - self.base[blocks], keys)
        live = blocks != NULL_BLOCK
        out.slots.copy_(torch.where(live, blocks, PAD_SLOT))
        out.valid.copy_(valid * live)
        out.flush.copy_(flush & live)
        out.position.copy_(seq_lens)
        out.key.copy_(key)

    def prefill(
        self,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> StepRows:
        """Rows of a prefill, whose windows begin anew behind it; once a step.

        ``valid`` counts the ring inputs that an earlier part of the request left, which the prefill
        must fold in; it means nothing for a row without earlier tokens. Such a row is the slot's
        next tenant, with a key of its own.
        """
        # copies, whose addresses do not depend on where in the batch the rows are
        blocks, lens = blocks.long(), seq_lens.to(torch.int32, copy=True)
        computed = lens - query_lens
        keys = tenants(self.key, blocks, computed, keys)
        key, valid, _ = self._plan(blocks, computed - self.base[blocks], keys)
        self.base[blocks] = lens
        flush = torch.ones_like(blocks, dtype=torch.bool)
        return StepRows(blocks, valid, flush, lens, key)


def move(rows: StepRows, blocks: torch.Tensor, out: StepRows | None = None) -> StepRows:
    """The same requests in another group's blocks; written to ``out`` if given."""
    if out is not None and blocks.is_cuda:
        from .cursor_kernel import move_rows

        move_rows(rows, blocks, out)
        return out
    blocks = blocks.long()
    slots = torch.where(blocks != NULL_BLOCK, blocks, PAD_SLOT)
    if out is None:
        return StepRows(slots, rows.valid, rows.flush, rows.position, rows.key)
    for name in ("valid", "flush", "position", "key"):
        getattr(out, name).copy_(getattr(rows, name))
    out.slots.copy_(slots)
    return out
