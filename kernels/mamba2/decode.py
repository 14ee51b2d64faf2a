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
def ask_weights(
    weights, at, limit, valid, R: tl.constexpr, LP: tl.constexpr, ROWS: tl.constexpr,
    MATRIX: tl.constexpr,
):  # fmt: skip
    """(weights by lane, decay, this token's weight) of the block from row ``at`` on.

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
    return w, decay, weight_now


@triton.jit
def answer_block(
    codes, scales, past, code, scale, tile, ring_x, c, top, weights, w, decay, weight_now, x,
    valid, row, row_ok, i_b, first, z_ptr, y_ptr, D_ptr, z_stride, y_stride,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """y of a block of rows from what was loaded for it, and x into the ring.

    row [ROWS] counts from head ``first``, which code, scale, tile, ring_x and weights point at.
    codes, scales and past as ``fetch_block`` gives them, w, decay and weight_now as
    ``ask_weights`` does; x: this token's.
    """
    x = x.to(ring_x.dtype.element_ty)
    if MATRIX:
        y = block_dot(codes, scales, past, c, w, decay * top, N, LP, ROWS, OUTPUT)
    else:
        token = tl.arange(0, LP)
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
    AHEAD: tl.constexpr, SHARED: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A unit (HEADS heads, group, row): if the row does not flush, y from the output copy and the
    window, and x joins the ring.

    ROWS rows at a time, counted through the heads; AHEAD (matrix units only): those of the next
    block are loaded while one is worked on. SHARED (matrix units only): a unit is one such block of
    a group's rows, whose heads it may share with its neighbours. D_ROWS: D is absent, or with the
    weights (0, 1), or [H, P] (2). EARLY: the launch before may still be running.
    """
    unit = tl.program_id(0)
    LIMIT: tl.constexpr = ROWS if SHARED else HEADS * R  # rows of a program
    PARTS: tl.constexpr = H // G * R // LIMIT
    i_p, i_g, i_b = unit % PARTS, unit // PARTS % G, (unit // (PARTS * G)).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    # the program's rows count from ``start`` on, through the heads from ``first`` on
    first = i_g * (H // G)
    start = i_p * LIMIT
    if not SHARED:
        first += i_p * HEADS
        start = 0
    BLOCKS: tl.constexpr = (LIMIT + ROWS - 1) // ROWS
    if slot < 0:
        for k in range(BLOCKS):
            row = k * ROWS + tl.arange(0, ROWS)
            zero = tl.zeros([ROWS], y_ptr.dtype.element_ty)
            tl.store(y_ptr + i_b * y_stride + first * R + start + row, zero, mask=row < LIMIT)
    reads = (slot >= 0) & (flush == 0)
    if reads:
        code = copy_ptr + slot * copy_stride + first * COPY_HEAD
        scale = copy_scale_ptr + slot * copy_scale_stride + first * COPY_SCALE_HEAD
        tile = copy_tile_ptr + slot * copy_tile_stride + first * TILES
        ring_x = ring_x_ptr + slot * ring_x_stride + first * R
        weights = weight_ptr + (i_b * H + first) * (LP + 2)
        inputs = i_b * x_stride + first * R
        c = c_ptr + (i_b * G + i_g) * N
        codes, scales, past = (), (), ()
        # of these, what a block needs lies side by side through all heads (SHARED: R % 16 == 0)
        codes_at = code + start * (COPY_HEAD // R)
        scales_at = scale + start * (COPY_SCALE_HEAD // R)
        tiles_at = tile + start // 16
        past_at = ring_x + start
        if MATRIX:
            codes, scales, past = fetch_block(
                codes_at, scales_at, tiles_at, past_at, 0, LIMIT, valid,
                R, N, TILES, H * R, LP, ROWS, OUTPUT,
            )  # fmt: skip
        row = tl.arange(0, ROWS)
        x = tl.load(x_ptr + inputs + start + row, mask=row < LIMIT, other=0.0)
        if EARLY:
            wait_for_previous()
        if MATRIX:
            c = load_operand(c, N, OUTPUT)
        else:
            c = load_stored(c, N, WP, OUTPUT)
        top = tl.load(top_ptr + i_b * G + i_g)
        end = start + LIMIT
        w, decay, weight_now = ask_weights(weights, start, end, valid, R, LP, ROWS, MATRIX)
        for k in tl.static_range(BLOCKS):
            row = k * ROWS + tl.arange(0, ROWS)
            row_ok = row < LIMIT
            if k > 0 and not AHEAD:
                if MATRIX:
                    codes, scales, past = fetch_block(
                        codes_at, scales_at, tiles_at, past_at, k * ROWS, LIMIT, valid,
                        R, N, TILES, H * R, LP, ROWS, OUTPUT,
                    )  # fmt: skip
                w, decay, weight_now = ask_weights(
                    weights, start + k * ROWS, end, valid, R, LP, ROWS, MATRIX
                )
                x = tl.load(x_ptr + inputs + start + row, mask=row_ok, other=0.0)
            if AHEAD and k + 1 < BLOCKS:  # the next block is on its way meanwhile
                codes_next, scales_next, past_next = fetch_block(
                    codes_at, scales_at, tiles_at, past_at, (k + 1) * ROWS, LIMIT, valid,
                    R, N, TILES, H * R, LP, ROWS, OUTPUT,
                )  # fmt: skip
                w_next, decay_next, weight_next = ask_weights(
                    weights, start + (k + 1) * ROWS, end, valid, R, LP, ROWS, MATRIX
                )
                row_next = (k + 1) * ROWS + tl.arange(0, ROWS)
                x_next = tl.load(
                    x_ptr + inputs + start + row_next, mask=row_next < LIMIT, other=0.0
                )
            answer_block(
                codes, scales, past, code, scale, tile, ring_x, c, top, weights, w, decay,
                weight_now, x, valid, start + row, row_ok, i_b, first, z_ptr, y_ptr, D_ptr,
                z_stride, y_stride, H, R, N, WP, LP, ROWS, TILES, OUTPUT, MATRIX, D_ROWS, HAS_Z,
            )  # fmt: skip
            if AHEAD and k + 1 < BLOCKS:
                codes, scales, past = codes_next, scales_next, past_next
                w, decay, weight_now, x = w_next, decay_next, weight_next, x_next
    else:
        if EARLY:
            wait_for_previous()


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
