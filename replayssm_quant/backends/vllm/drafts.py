"""Cursors of slots whose steps verify draft tokens. No vLLM here.

vLLM reports how many tokens of a request are computed before a step. Those are the accepted ones,
so a rejected draft needs no word: its ring entry lies behind what the next step counts, and is
overwritten. Three vectors a slot do the rest, all in tokens: ``folded``, in the checkpoint;
``due``, at which the ring is folded next; ``origin``, at which the convolution's rolling state is
read from its first column. A step moves them when it is planned, so it is planned once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...state.cache import PAD_SLOT, StepRows, VerifyRows
from ...state.layout import ring_capacity
from .cursors import NULL_BLOCK, first_offsets, slot_keys, tenants


@dataclass
class Verify:
    """One step's rows that verify drafts, at fixed addresses where a graph may replay it.

    rows: control of the state; starts int32 [b + 1]: first token of each row; shift int32 [b]: what
    vLLM's convolution takes for accepted tokens, one plus the columns its state has to roll. width:
    tokens of the longest row. gather int64 [b * width] and scatter int64 [tokens]: where a padded
    entry comes from and a token goes to, if the rows differ in length; else both are None.
    """

    rows: VerifyRows
    starts: torch.Tensor
    shift: torch.Tensor
    width: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] as [b, width, ...]; what is beyond a row's count means nothing."""
        if self.gather is not None:
            x = x[self.gather]
        return x.unflatten(0, (-1, self.width))

    def unpack(self, y: torch.Tensor) -> torch.Tensor:
        """[b, width, ...] as [tokens, ...]."""
        y = y.flatten(0, 1)
        return y if self.scatter is None else y[self.scatter]


def ragged(
    starts: torch.Tensor, counts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """gather and scatter of rows of different length.

    starts [b + 1] on the device, counts [b] the same rows' lengths on the CPU.
    """
    tokens, device = int(counts.sum()), starts.device
    starts = starts.long()
    index = torch.arange(width, device=device)
    gather = (starts[:-1, None] + index).clamp(max=max(tokens - 1, 0)).flatten()
    row = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=device), starts.diff(), output_size=tokens
    )
    scatter = torch.arange(tokens, device=device) - starts[row] + row * width
    return gather, scatter


class VerifyBuffers:
    """Control vectors of a step at fixed addresses, as captured CUDA graphs need them."""

    def __init__(self, rows: int, device: torch.device | str):
        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.vectors = {name: zeros(rows, torch.int64) for name in ("slots", "key", "fold_slots")}
        for name in ("valid", "count", "position"):
            self.vectors[name] = zeros(rows, torch.int32)
        self.vectors["flush"] = zeros(rows, torch.bool)
        self.starts, self.shift = zeros(rows + 1, torch.int32), zeros(rows, torch.int32)

    def step(self, count: int, width: int) -> Verify:
        """The first ``count`` rows, as views."""
        rows = VerifyRows(**{name: v[:count] for name, v in self.vectors.items()})
        return Verify(rows, self.starts[: count + 1], self.shift[:count], width)


def shapes(rows: int, drafts: int, device: torch.device | str) -> list[Verify]:
    """Steps of ``rows`` rows as the layers see them: without drafts, all with as many, mixed.

    Nothing in them is a live row; they have addresses and shapes only.
    """
    buffers, width = VerifyBuffers(rows, device), 1 + drafts
    mixed = buffers.step(rows, width)
    mixed.gather = mixed.scatter = torch.arange(rows * width, device=device)
    return [buffers.step(rows, 1), buffers.step(rows, width), mixed]


class DraftCursors:
    """Cursors of one KV-cache group's slots, and the rows of its steps."""

    def __init__(
        self,
        slots: int,
        buffer_len: int,
        drafts: int,
        *,
        stagger: bool,
        seed: int,
        device: object,
    ):
        self.buffer_len, self.drafts, self.stagger = buffer_len, drafts, stagger
        self.capacity = ring_capacity(buffer_len, drafts)
        self.folded, self.due, self.origin = (
            torch.zeros(slots, dtype=torch.int32, device=device)  # type: ignore[call-overload]
            for _ in range(3)
        )
        self.key = slot_keys(seed, slots, self.folded.device, tenant=-1)  # none has come yet

    @property
    def slots(self) -> int:
        return self.folded.shape[0]

    def _first_due(self, keys: torch.Tensor) -> torch.Tensor | int:
        """Tokens from a prefill to its request's first flush."""
        if not self.stagger:
            return self.buffer_len
        return self.buffer_len - first_offsets(keys, self.buffer_len)

    def verify(
        self,
        out: Verify,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> None:
        """Fill the rows of a step and move the cursors; once a step.

        blocks int [b]: block of each row, ``NULL_BLOCK`` for padding. seq_lens int [b]: tokens with
        all of this step. starts int [b + 1]: first token of each row. keys int64 [b]: keys of the
        requests, if the engine shows them.
        """
        if blocks.is_cuda:
            from .cursor_kernel import verify_rows

            verify_rows(out, blocks, seq_lens, starts, self, keys)
            return
        rows, blocks = out.rows, blocks.long()
        count = starts.diff().to(torch.int32)
        live = (blocks != NULL_BLOCK) & (count > 0)
        computed = seq_lens.to(torch.int32) - count
        valid = (computed - self.folded[blocks]).clamp(0, self.capacity - 1)
        flush = live & (valid > 0) & (computed >= self.due[blocks])
        shift = (computed - self.origin[blocks] + 1).clamp(1, 1 + self.drafts)
        shift = torch.where(live, shift, 1)
        rows.slots.copy_(torch.where(live, blocks, PAD_SLOT))
        rows.fold_slots.copy_(torch.where(flush, blocks, PAD_SLOT))  # type: ignore[union-attr]
        rows.valid.copy_(valid * live)
        rows.flush.copy_(flush)
        rows.count.copy_(count * live)
        rows.position.copy_(computed)
        rows.key.copy_(self.key[blocks] if keys is None else keys)
        out.starts.copy_(starts)
        out.shift.copy_(shift)
        moved, folded = blocks[live], blocks[flush]
        self.origin[moved] = computed[live] + 1
        self.folded[folded] = computed[flush]
        self.due[folded] = computed[flush] + self.buffer_len

    def prefill(
        self,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> tuple[StepRows, torch.Tensor]:
        """Rows of a prefill, whose windows begin anew behind it, and int64 [b]: the columns by
        which the convolution's state has to roll before it. Once a step.

        ``valid`` counts the ring inputs that an earlier part of the request left, which the prefill
        must fold in; both mean nothing for a row without earlier tokens.
        """
        # copies, whose addresses do not depend on where in the batch the rows are
        blocks, lens = blocks.long(), seq_lens.to(torch.int32, copy=True)
        computed = lens - query_lens.to(torch.int32)
        valid = (computed - self.folded[blocks]).clamp(0, self.capacity)
        roll = (computed - self.origin[blocks]).clamp(0, self.drafts)
        key = tenants(self.key, blocks, computed, keys)
        self.folded[blocks] = lens
        self.origin[blocks] = lens
        self.due[blocks] = lens + self._first_due(key)
        flush = torch.ones_like(blocks, dtype=torch.bool)
        return StepRows(blocks, valid, flush, lens, key), roll.long()


def move_verify(step: Verify, blocks: torch.Tensor, out: Verify) -> Verify:
    """The same requests in another group's blocks, written to ``out``."""
    if blocks.is_cuda:
        from .cursor_kernel import move_verify_rows

        move_verify_rows(step, blocks, out)
    else:
        for name in ("valid", "flush", "count", "position", "key"):
            getattr(out.rows, name).copy_(getattr(step.rows, name))
        blocks = blocks.long()
        for name, on in (("slots", step.rows.slots >= 0), ("fold_slots", step.rows.flush)):
            getattr(out.rows, name).copy_(torch.where(on, blocks, PAD_SLOT))
        out.starts.copy_(step.starts)
        out.shift.copy_(step.shift)
    out.gather, out.scatter = step.gather, step.scatter
    return out
