"""Mamba-2 decode over a split state: the rows that do not flush. Reference:
``reference.decode_step``.

A program streams the output copy of some heads of one group of one sequence. What it needs besides,
``prepare`` has left: c, the decays and the weights of the window. It asks for its first codes and
for the window's x before it waits for that launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import wait_for_previous
from ..common.matrix import block_dot, fetch_block, load_operand, load_weights
from ..common.readout import copy_dot, load_stored


@triton.jit
def _ask(
    weights, x, at, limit, valid, R: tl.constexpr, LP: tl.constexpr, ROWS: tl.constexpr,
    MATRIX: tl.constexpr,
):  # fmt: skip
    """(weights by lane, decay, this token's weight, x) of the block from row ``at`` on.

    Rows count through the heads from the one the pointers are at, and end at ``limit``. With matrix
    units the decay is one number or one a lane, else one a row, and the weights are left out.
    """
    row = at + tl.arange(0, ROWS)
    inside = row < limit
    now = weights + row // R * (LP + 2)
    w = ()
    if MATRIX:
        if R % ROWS == 0:  # the block lies in one head
            now = weights + at // R * (LP + 2)
            w = load_weights(now, valid, LP)
            decay = tl.load(now + LP)
        else:
            own = tl.minimum(at + tl.arange(0, 32) // 4 * (ROWS // 8), limit - 1) // R
            own = weights + own * (LP + 2)
            w = load_weights(own, valid, LP)
            decay = tl.load(own + LP)
    else:
        decay = tl.load(now + LP, mask=inside, other=0.0)
    if MATRIX and R % ROWS == 0:
        weight_now = tl.load(now + LP + 1)
    else:
        weight_now = tl.load(now + LP + 1, mask=inside, other=0.0)
    return w, decay, weight_now, tl.load(x + row, mask=inside, other=0.0)


@triton.jit
def read_unit(
    unit,
    # inputs, [b, ...] with a row stride each, contiguous within a row
    x_ptr, z_ptr, y_ptr, D_ptr,  # D [H, P]
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    ring_x_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, c_ptr, top_ptr,  # see prepare_kernel
    x_stride, z_stride, y_stride, ring_x_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    WP: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A unit (HEADS heads, group, row): if the row does not flush, y from the output copy and the
    window, and x joins the ring.

    ROWS rows at a time, counted through the heads; AHEAD (matrix units only): those of the next
    block are loaded while one is worked on. D_ROWS: D is absent, or with the weights (0, 1),
    or [H, P] (2). EARLY: the launch before may still be running.
    """
    PARTS: tl.constexpr = H // G // HEADS
    i_p, i_g, i_b = unit % PARTS, unit // PARTS % G, (unit // (PARTS * G)).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    first = i_g * (H // G) + i_p * HEADS  # the program's first head
    LIMIT: tl.constexpr = HEADS * R
    BLOCKS: tl.constexpr = (LIMIT + ROWS - 1) // ROWS
    if slot < 0:
        for k in range(BLOCKS):
            row = k * ROWS + tl.arange(0, ROWS)
            zero = tl.zeros([ROWS], y_ptr.dtype.element_ty)
            tl.store(y_ptr + i_b * y_stride + first * R + row, zero, mask=row < LIMIT)
    reads = (slot >= 0) & (flush == 0)
    if reads:
        code = copy_ptr + slot * copy_stride + first * COPY_HEAD
        scale = copy_scale_ptr + slot * copy_scale_stride + first * COPY_SCALE_HEAD
        tile = copy_tile_ptr + slot * copy_tile_stride + first * TILES
        ring_x = ring_x_ptr + slot * ring_x_stride + first * R
        weights = weight_ptr + (i_b * H + first) * (LP + 2)
        inputs = i_b * x_stride + first * R
        if MATRIX:
            codes, scales, past = fetch_block(
                code, scale, tile, ring_x, 0, LIMIT, valid, R, TILES, H * R, LP, ROWS, OUTPUT
            )
        if EARLY:
            wait_for_previous()
        c = c_ptr + (i_b * G + i_g) * N
        if MATRIX:
            c = load_operand(c, OUTPUT)
        else:
            c = load_stored(c, N, WP, OUTPUT)
        top = tl.load(top_ptr + i_b * G + i_g)
        token = tl.arange(0, LP)
        row = tl.arange(0, ROWS)
        w, decay, weight_now, x = _ask(
            weights, x_ptr + inputs, 0, LIMIT, valid, R, LP, ROWS, MATRIX
        )
        for k in tl.static_range(BLOCKS):
            row = k * ROWS + tl.arange(0, ROWS)
            row_ok = row < LIMIT
            if k > 0 and not AHEAD:
                if MATRIX:
                    codes, scales, past = fetch_block(
                        code, scale, tile, ring_x, k * ROWS, LIMIT, valid,
                        R, TILES, H * R, LP, ROWS, OUTPUT,
                    )  # fmt: skip
                w, decay, weight_now, x = _ask(
                    weights, x_ptr + inputs, k * ROWS, LIMIT, valid, R, LP, ROWS, MATRIX
                )
            if AHEAD and k + 1 < BLOCKS:  # the next block is on its way meanwhile
                codes_next, scales_next, past_next = fetch_block(
                    code, scale, tile, ring_x, (k + 1) * ROWS, LIMIT, valid,
                    R, TILES, H * R, LP, ROWS, OUTPUT,
                )  # fmt: skip
                w_next, decay_next, weight_next, x_next = _ask(
                    weights, x_ptr + inputs, (k + 1) * ROWS, LIMIT, valid, R, LP, ROWS, MATRIX
                )
            x = x.to(ring_x_ptr.dtype.element_ty)
            if MATRIX:
                y = block_dot(codes, scales, past, c, w, decay * top, LP, ROWS, OUTPUT)
            else:
                y = copy_dot(code, scale, tile, c, top, row, row_ok, R, N, WP, TILES, OUTPUT)
                inside = (token < valid)[:, None] & row_ok[None, :]
                past = ring_x + token[:, None] * (H * R) + row[None, :]
                past = tl.load(past, mask=inside, other=0.0).to(tl.float32)
                mine = weights + (row // R) * (LP + 2)
                w = tl.load(mine[None, :] + token[:, None], mask=inside, other=0.0)
                y = y * decay + tl.sum(w * past, 0)
            y += weight_now * x.to(tl.float32)
            if D_ROWS == 2:
                D = tl.load(D_ptr + first * R + row, mask=row_ok, other=0.0).to(tl.float32)
                y += D * x.to(tl.float32)
            if HAS_Z:
                z = tl.load(z_ptr + i_b * z_stride + first * R + row, mask=row_ok, other=0.0)
                z = z.to(tl.float32)
                y *= z / (1.0 + tl.exp(-z))
            tl.store(ring_x + valid * (H * R) + row, x, mask=row_ok)
            out = y_ptr + i_b * y_stride + first * R + row
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=row_ok)
            if AHEAD and k + 1 < BLOCKS:
                codes, scales, past = codes_next, scales_next, past_next
                w, decay, weight_now, x = w_next, decay_next, weight_next, x_next
    else:
        if EARLY:
            wait_for_previous()


@triton.jit
def readout_kernel(
    # inputs, [b, ...] with a row stride each, contiguous within a row
    x_ptr, z_ptr, y_ptr, D_ptr,  # D [H, P]
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    ring_x_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, c_ptr, top_ptr,  # see prepare_kernel
    x_stride, z_stride, y_stride, ring_x_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    WP: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush, a unit a program; see ``read_unit``."""
    read_unit(
        tl.program_id(0),
        x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, flush_ptr, ring_x_ptr, copy_ptr,
        copy_scale_ptr, copy_tile_ptr, weight_ptr, c_ptr, top_ptr, x_stride, z_stride, y_stride,
        ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, H, G, R, N, WP, LP, HEADS,
        ROWS, AHEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT, MATRIX, D_ROWS, HAS_Z, EARLY,
    )  # fmt: skip


@triton.jit
def read_run(
    mine, programs,
    x_ptr, z_ptr, y_ptr, D_ptr,
    slot_ptr, valid_ptr, flush_ptr,
    ring_x_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, c_ptr, top_ptr,
    x_stride, z_stride, y_stride, ring_x_stride,
    copy_stride, copy_scale_stride, copy_tile_stride, batch,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr,
    TILES: tl.constexpr, OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What ``read_unit`` does, for the share of program ``mine`` of all blocks of ROWS rows.

    While one block is worked on, everything of the next is on its way. A block must lie in one
    group: ROWS divides H / G R. With matrix units only.
    """
    PER_ROW: tl.constexpr = H * R // ROWS
    PER_GROUP: tl.constexpr = H // G * R // ROWS
    total = batch * PER_ROW
    run = tl.cdiv(total, programs)
    begin = mine * run
    end = tl.minimum(begin + run, total)
    last = total - 1
    i_b = (tl.minimum(begin, last) // PER_ROW).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    valid = tl.load(valid_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    at = tl.minimum(begin, last) % PER_ROW * ROWS
    reads = (slot >= 0) & (flush == 0) & (begin < end)
    codes, scales, past = fetch_block(
        copy_ptr + slot * copy_stride, copy_scale_ptr + slot * copy_scale_stride,
        copy_tile_ptr + slot * copy_tile_stride, ring_x_ptr + slot * ring_x_stride,
        at, H * R * reads.to(tl.int32), valid, R, TILES, H * R, LP, ROWS, OUTPUT,
    )  # fmt: skip
    if EARLY:
        wait_for_previous()
    w, factor, weight_now, x = _ask(
        weight_ptr + i_b * (H * (LP + 2)), x_ptr + i_b * x_stride, at, H * R, valid, R, LP, ROWS,
        True,
    )  # fmt: skip
    i_next = (tl.minimum(begin + 1, last) // PER_ROW).to(tl.int64)
    slot_next = tl.load(slot_ptr + i_next).to(tl.int64)
    valid_next = tl.load(valid_ptr + i_next)
    flush_next = tl.load(flush_ptr + i_next).to(tl.int32)
    for block in range(begin, end):
        follows = block + 1 < end
        reads_next = (slot_next >= 0) & (flush_next == 0) & follows
        at_next = tl.minimum(block + 1, last) % PER_ROW * ROWS
        codes_next, scales_next, past_next = fetch_block(
            copy_ptr + slot_next * copy_stride, copy_scale_ptr + slot_next * copy_scale_stride,
            copy_tile_ptr + slot_next * copy_tile_stride, ring_x_ptr + slot_next * ring_x_stride,
            at_next, H * R * reads_next.to(tl.int32), valid_next,
            R, TILES, H * R, LP, ROWS, OUTPUT,
        )  # fmt: skip
        w_next, factor_next, now_next, x_next = _ask(
            weight_ptr + i_next * (H * (LP + 2)), x_ptr + i_next * x_stride, at_next, H * R,
            valid_next, R, LP, ROWS, True,
        )  # fmt: skip
        i_after = (tl.minimum(block + 2, last) // PER_ROW).to(tl.int64)
        slot_after = tl.load(slot_ptr + i_after).to(tl.int64)
        valid_after = tl.load(valid_ptr + i_after)
        flush_after = tl.load(flush_ptr + i_after).to(tl.int32)
        row = at + tl.arange(0, ROWS)
        out = y_ptr + i_b * y_stride + row
        if reads:
            group = i_b * G + (block % PER_ROW) // PER_GROUP
            c = load_operand(c_ptr + group * N, OUTPUT)
            unit = factor * tl.load(top_ptr + group)
            y = block_dot(codes, scales, past, c, w, unit, LP, ROWS, OUTPUT)
            x_kept = x.to(ring_x_ptr.dtype.element_ty)
            y += weight_now * x_kept.to(tl.float32)
            if D_ROWS == 2:
                y += tl.load(D_ptr + row).to(tl.float32) * x_kept.to(tl.float32)
            if HAS_Z:
                z = tl.load(z_ptr + i_b * z_stride + row).to(tl.float32)
                y *= z / (1.0 + tl.exp(-z))
            ring_x = ring_x_ptr + slot * ring_x_stride
            tl.store(ring_x + valid * (H * R) + row, x_kept)
            tl.store(out, y.to(y_ptr.dtype.element_ty))
        if slot < 0:
            tl.store(out, tl.zeros([ROWS], y_ptr.dtype.element_ty))
        codes, scales, past = codes_next, scales_next, past_next
        w, factor, weight_now, x = w_next, factor_next, now_next, x_next
        i_b, slot, valid, at, reads = i_next, slot_next, valid_next, at_next, reads_next
        i_next, slot_next, valid_next, flush_next = i_after, slot_after, valid_after, flush_after


@triton.jit
def readout_run_kernel(
    x_ptr, z_ptr, y_ptr, D_ptr,
    slot_ptr, valid_ptr, flush_ptr,
    ring_x_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, c_ptr, top_ptr,
    x_stride, z_stride, y_stride, ring_x_stride,
    copy_stride, copy_scale_stride, copy_tile_stride, batch,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr,
    TILES: tl.constexpr, OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush, shared by any number of programs; see ``read_run``."""
    read_run(
        tl.program_id(0), tl.num_programs(0),
        x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, flush_ptr, ring_x_ptr, copy_ptr,
        copy_scale_ptr, copy_tile_ptr, weight_ptr, c_ptr, top_ptr, x_stride, z_stride, y_stride,
        ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, batch, H, G, R, N, LP,
        ROWS, COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT, D_ROWS, HAS_Z, EARLY,
    )  # fmt: skip


@triton.jit
def finish(
    y, i_b, first, row, row_ok, inputs,
    x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, z_stride, y_stride,
    R: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Add D x, apply the z gate and store y; ``row`` counts from the program's first head."""
    if D_ROWS > 0:
        x = tl.load(x_ptr + inputs + row, mask=row_ok, other=0.0)
        x = x.to(ring_x_ptr.dtype.element_ty).to(tl.float32)
        at = first * R + row if D_ROWS == 2 else first + row // R
        y += tl.load(D_ptr + at, mask=row_ok, other=0.0).to(tl.float32) * x
    if HAS_Z:
        z = tl.load(z_ptr + i_b * z_stride + first * R + row, mask=row_ok, other=0.0)
        z = z.to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    out = y_ptr + i_b * y_stride + first * R + row
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=row_ok)
