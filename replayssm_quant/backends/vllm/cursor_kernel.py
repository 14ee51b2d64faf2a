"""Planning and moving of rows as one launch each. Reference: the torch code in cursors, drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...state.cache import StepRows
from .cursors import GroupRows
from .drafts import DraftCursors, Verify

_BLOCK = 128
_NUMBERS = ("block_stride", "count")  # any value of them is one kernel


@triton.jit
def _store_plan(
    valid_ptr, flush_ptr, position_ptr, key_ptr, row, ok, live, tokens, base, key,
    L: tl.constexpr, STAGGER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What rows of ``tokens`` tokens, whose prefill ended at ``base``, do in a decode step."""
    steps = tl.maximum(tokens - 1 - base, 0)
    first = tl.full([BLOCK], L, tl.int32)
    if STAGGER:
        first -= (((key >> 17) & 0xFFFFFFFF) % L).to(tl.int32)
    valid = tl.where(steps < first, steps, tl.maximum(steps - first, 0) % L)
    flush = tl.where(steps < first, steps + 1 == first, valid + 1 == L)
    tl.store(valid_ptr + row, tl.where(live, valid, 0), mask=ok)
    tl.store(flush_ptr + row, (flush & live).to(tl.uint8), mask=ok)
    tl.store(position_ptr + row, tokens, mask=ok)
    tl.store(key_ptr + row, key, mask=ok)


@triton.jit(do_not_specialize=_NUMBERS)
def _decode_rows_kernel(
    block_ptr, len_ptr, base_ptr, slot_key_ptr, request_key_ptr,
    slots_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr,  # the rows
    block_stride, count,
    L: tl.constexpr, STAGGER: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < count
    block = tl.load(block_ptr + row.to(tl.int64) * block_stride, mask=ok, other=0).to(tl.int64)
    tokens = tl.load(len_ptr + row, mask=ok, other=0).to(tl.int32)
    live = block != 0  # block 0 is padding
    if REQUESTS:
        key = tl.load(request_key_ptr + row, mask=ok, other=0)
    else:
        key = tl.load(slot_key_ptr + block, mask=ok, other=0)
    base = tl.load(base_ptr + block, mask=ok, other=0)
    tl.store(slots_ptr + row, tl.where(live, block, -1), mask=ok)
    _store_plan(
        valid_ptr, flush_ptr, position_ptr, key_ptr, row, ok, live, tokens, base, key,
        L, STAGGER, BLOCK,
    )  # fmt: skip


def decode_rows(
    out: StepRows,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    base: torch.Tensor,
    slot_keys: torch.Tensor,
    request_keys: torch.Tensor | None,
    buffer_len: int,
    stagger: bool,
) -> None:
    """Fill ``out`` from blocks int [b] (any stride) and contiguous seq_lens int [b]."""
    count = blocks.shape[0]
    if count == 0:
        return
    _decode_rows_kernel[(triton.cdiv(count, _BLOCK),)](
        blocks, seq_lens, base, slot_keys,
        slot_keys if request_keys is None else request_keys,
        out.slots, out.valid, out.flush.view(torch.uint8), out.position, out.key,
        blocks.stride(0), count,
        L=buffer_len, STAGGER=stagger, REQUESTS=request_keys is not None, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=("slots_stride", "count", "rows"))
def _group_rows_kernel(
    table_ptrs, stride_ptr,  # [groups]: addresses of block tables, and their strides
    len_ptr, base_ptr, request_key_ptr, index_ptr,
    slots_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr,  # slots [groups, rows], rows
    slots_stride, count, rows,
    L: tl.constexpr, STAGGER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    ok, here = row < rows, row < count
    table = tl.load(table_ptrs + group).to(tl.pointer_type(tl.int32))
    at = row.to(tl.int64) * tl.load(stride_ptr + group)
    block = tl.load(table + at, mask=here, other=0).to(tl.int64)
    live = block != 0  # block 0 is padding
    tl.store(slots_ptr + group * slots_stride + row, tl.where(live, block, -1), mask=ok)
    if group == 0:
        index = tl.load(index_ptr + row, mask=here, other=0)
        key = tl.load(request_key_ptr + index, mask=here, other=0)
        tokens = tl.load(len_ptr + row, mask=here, other=0).to(tl.int32)
        base = tl.load(base_ptr + block, mask=here, other=0)
        _store_plan(
            valid_ptr, flush_ptr, position_ptr, key_ptr, row, ok, live, tokens, base, key,
            L, STAGGER, BLOCK,
        )  # fmt: skip


def group_rows(
    out: GroupRows,
    tables: tuple[torch.Tensor, torch.Tensor],
    seq_lens: torch.Tensor,
    base: torch.Tensor,
    request_keys: torch.Tensor,
    index: torch.Tensor,
    count: int,
    rows: int,
    buffer_len: int,
    stagger: bool,
) -> None:
    """Fill the first ``rows`` rows of every group; see ``GroupRows.plan``.

    tables: addresses and row strides of the groups' block tables, which hold int32.
    """
    if rows == 0:
        return
    shared = out.shared
    _group_rows_kernel[(triton.cdiv(rows, _BLOCK), tables[0].shape[0])](
        tables[0], tables[1], seq_lens, base, request_keys, index,
        out.slots, shared["valid"], shared["flush"].view(torch.uint8), shared["position"],
        shared["key"], out.slots.stride(0), count, rows,
        L=buffer_len, STAGGER=stagger, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _move_rows_kernel(
    block_ptr, from_valid_ptr, from_flush_ptr, from_position_ptr, from_key_ptr,
    slots_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr,
    block_stride, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < count
    block = tl.load(block_ptr + row.to(tl.int64) * block_stride, mask=ok, other=0).to(tl.int64)
    tl.store(slots_ptr + row, tl.where(block != 0, block, -1), mask=ok)
    tl.store(valid_ptr + row, tl.load(from_valid_ptr + row, mask=ok), mask=ok)
    tl.store(flush_ptr + row, tl.load(from_flush_ptr + row, mask=ok), mask=ok)
    tl.store(position_ptr + row, tl.load(from_position_ptr + row, mask=ok), mask=ok)
    tl.store(key_ptr + row, tl.load(from_key_ptr + row, mask=ok), mask=ok)


def move_rows(rows: StepRows, blocks: torch.Tensor, out: StepRows) -> None:
    """Fill ``out`` with ``rows`` in the blocks int [b] (any stride) of another group."""
    count = blocks.shape[0]
    if count == 0:
        return
    _move_rows_kernel[(triton.cdiv(count, _BLOCK),)](
        blocks, rows.valid, rows.flush.view(torch.uint8), rows.position, rows.key,
        out.slots, out.valid, out.flush.view(torch.uint8), out.position, out.key,
        blocks.stride(0), count,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _verify_rows_kernel(
    block_ptr, len_ptr, start_ptr,  # int [b], [b], [b + 1]
    folded_ptr, due_ptr, origin_ptr, slot_key_ptr, request_key_ptr,  # of slots; the last of rows
    slots_ptr, fold_ptr, valid_ptr, flush_ptr, count_ptr, position_ptr, key_ptr,  # the rows
    starts_ptr, shift_ptr,
    block_stride, count,
    L: tl.constexpr, DRAFTS: tl.constexpr, REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < count
    start = tl.load(start_ptr + row, mask=row <= count, other=0).to(tl.int32)
    tl.store(starts_ptr + row, start, mask=row <= count)
    tokens = tl.load(start_ptr + row + 1, mask=ok, other=0).to(tl.int32) - start
    block = tl.load(block_ptr + row.to(tl.int64) * block_stride, mask=ok, other=0).to(tl.int64)
    live = ok & (block != 0) & (tokens > 0)  # block 0 is padding
    computed = tl.load(len_ptr + row, mask=ok, other=0).to(tl.int32) - tokens
    if REQUESTS:
        key = tl.load(request_key_ptr + row, mask=ok, other=0)
    else:
        key = tl.load(slot_key_ptr + block, mask=ok, other=0)
    valid = computed - tl.load(folded_ptr + block, mask=live, other=0)
    valid = tl.minimum(tl.maximum(valid, 0), L + DRAFTS)
    flush = live & (valid > 0) & (computed >= tl.load(due_ptr + block, mask=live, other=0))
    shift = computed - tl.load(origin_ptr + block, mask=live, other=0) + 1
    shift = tl.minimum(tl.maximum(shift, 1), 1 + DRAFTS)
    tl.store(slots_ptr + row, tl.where(live, block, -1), mask=ok)
    tl.store(fold_ptr + row, tl.where(flush, block, -1), mask=ok)
    tl.store(valid_ptr + row, tl.where(live, valid, 0), mask=ok)
    tl.store(flush_ptr + row, flush.to(tl.uint8), mask=ok)
    tl.store(count_ptr + row, tl.where(live, tokens, 0), mask=ok)
    tl.store(position_ptr + row, computed, mask=ok)
    tl.store(key_ptr + row, key, mask=ok)
    tl.store(shift_ptr + row, tl.where(live, shift, 1), mask=ok)
    # a slot belongs to one row, so what this program writes no other one reads
    tl.store(origin_ptr + block, computed + 1, mask=live)
    tl.store(folded_ptr + block, computed, mask=flush)
    tl.store(due_ptr + block, computed + L, mask=flush)


def verify_rows(
    out: Verify,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    cursors: DraftCursors,
    request_keys: torch.Tensor | None,
) -> None:
    """Fill ``out`` from blocks int [b] (any stride) and contiguous seq_lens [b], starts [b + 1];
    move the cursors."""
    count, rows = blocks.shape[0], out.rows
    if count == 0:
        return
    _verify_rows_kernel[(triton.cdiv(count + 1, _BLOCK),)](
        blocks, seq_lens, starts, cursors.folded, cursors.due, cursors.origin, cursors.key,
        cursors.key if request_keys is None else request_keys,
        rows.slots, rows.fold_slots, rows.valid, rows.flush.view(torch.uint8), rows.count,
        rows.position, rows.key, out.starts, out.shift,
        blocks.stride(0), count,
        L=cursors.buffer_len, DRAFTS=cursors.drafts, REQUESTS=request_keys is not None,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def _move_verify_kernel(
    block_ptr,
    from_slots_ptr, from_valid_ptr, from_flush_ptr, from_count_ptr, from_position_ptr, from_key_ptr,
    from_starts_ptr, from_shift_ptr,
    slots_ptr, fold_ptr, valid_ptr, flush_ptr, count_ptr, position_ptr, key_ptr,
    starts_ptr, shift_ptr,
    block_stride, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < count
    block = tl.load(block_ptr + row.to(tl.int64) * block_stride, mask=ok, other=0).to(tl.int64)
    live = tl.load(from_slots_ptr + row, mask=ok, other=-1) >= 0
    flush = tl.load(from_flush_ptr + row, mask=ok, other=0)
    tl.store(slots_ptr + row, tl.where(live, block, -1), mask=ok)
    tl.store(fold_ptr + row, tl.where(flush != 0, block, -1), mask=ok)
    tl.store(flush_ptr + row, flush, mask=ok)
    tl.store(valid_ptr + row, tl.load(from_valid_ptr + row, mask=ok), mask=ok)
    tl.store(count_ptr + row, tl.load(from_count_ptr + row, mask=ok), mask=ok)
    tl.store(position_ptr + row, tl.load(from_position_ptr + row, mask=ok), mask=ok)
    tl.store(key_ptr + row, tl.load(from_key_ptr + row, mask=ok), mask=ok)
    tl.store(shift_ptr + row, tl.load(from_shift_ptr + row, mask=ok), mask=ok)
    tl.store(starts_ptr + row, tl.load(from_starts_ptr + row, mask=row <= count), mask=row <= count)


def move_verify_rows(step: Verify, blocks: torch.Tensor, out: Verify) -> None:
    """Fill ``out`` with ``step`` in the blocks int [b] (any stride) of another group."""
    count, a, b = blocks.shape[0], step.rows, out.rows
    if count == 0:
        return
    _move_verify_kernel[(triton.cdiv(count + 1, _BLOCK),)](
        blocks, a.slots, a.valid, a.flush.view(torch.uint8), a.count, a.position, a.key,
        step.starts, step.shift,
        b.slots, b.fold_slots, b.valid, b.flush.view(torch.uint8), b.count, b.position, b.key,
        out.starts, out.shift,
        blocks.stride(0), count,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
