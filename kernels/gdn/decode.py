"""GDN readout: y = O r + sum_j w_j v_j, with the effective query r and weights of ``prepare``.

A program asks for its first codes and for the v of the ring before it waits for that launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import wait_for_previous
from ..common.matrix import block_dot, fetch_block, load_operand, load_weights
from ..common.readout import copy_dot, load_stored


@triton.jit
def answer_block(
    block, code, scale, tile, ring, c, top, w, weight_now, v, valid, row, row_ok, y,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WP: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """y of rows ``row`` of the head that code, scale, tile, ring and y point at.

    block: what ``fetch_block`` gave (with matrix units); w: the window's weights, as
    ``load_weights`` gives them or [LP]; v: the new token's.
    """
    if MATRIX:
        codes, scales, past = block
        out = block_dot(codes, scales, past, c, w, top, K, LP, ROWS, OUTPUT)
    else:
        token = tl.arange(0, LP)
        past = tl.load(
            ring + token[:, None] * (HV * V) + row[None, :],
            mask=(token < valid)[:, None] & row_ok[None, :], other=0.0,
        )  # fmt: skip
        out = copy_dot(code, scale, tile, c, top, row, row_ok, V, K, WP, TILES, OUTPUT)
        out += tl.sum(w[:, None] * past.to(tl.float32), 0)
    out += weight_now * v.to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=row_ok)


@triton.jit(do_not_specialize_on_alignment=("slot_ptr", "valid_ptr", "flush_ptr"))
def readout_kernel(
    c_ptr, top_ptr, w_ptr,  # see prepare_kernel
    ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, y_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    ring_v_stride, y_stride, copy_stride, copy_scale_stride, copy_tile_stride,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    WP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A unit (BLOCKS blocks of ROWS rows, value head, sequence): y of a row that does not flush,
    zeros of a padding row.

    EARLY: the launch before may still be running.
    """
    unit = tl.program_id(0)
    PARTS: tl.constexpr = (V + ROWS * BLOCKS - 1) // (ROWS * BLOCKS)
    i_v, i_h, i_b = unit % PARTS, unit // PARTS % HV, (unit // (PARTS * HV)).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    start = i_v * (ROWS * BLOCKS)
    y = y_ptr + i_b * y_stride + i_h * V
    if slot < 0:
        for k in range(BLOCKS):
            row = start + k * ROWS + tl.arange(0, ROWS)
            tl.store(y + row, tl.zeros([ROWS], y_ptr.dtype.element_ty), mask=row < V)
    reads = (slot >= 0) & (flush == 0)
    if reads:
        head = i_b * HV + i_h
        ring = ring_v_ptr + slot * ring_v_stride + i_h * V
        code = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
        scale = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
        tile = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
        weights = w_ptr + head * L
        codes, scales, past = (), (), ()
        if MATRIX:
            codes, scales, past = fetch_block(
                code, scale, tile, ring, start, V, valid, V, K, TILES, HV * V, LP, ROWS, OUTPUT
            )
        if EARLY:
            wait_for_previous()
        weight_now = tl.load(weights + valid)
        top = tl.load(top_ptr + head)
        token = tl.arange(0, LP)
        if MATRIX:
            c = load_operand(c_ptr + head * K, K, OUTPUT)
            w = load_weights(weights, valid, LP)
        else:
            c = load_stored(c_ptr + head * K, K, WP, OUTPUT)
            w = tl.load(weights + token, mask=token < valid, other=0.0)
        for k in tl.static_range(BLOCKS):
            base = start + k * ROWS
            row = base + tl.arange(0, ROWS)
            row_ok = row < V
            if MATRIX:
                if AHEAD and k + 1 < BLOCKS:  # the next block is on its way meanwhile
                    codes_next, scales_next, past_next = fetch_block(
                        code, scale, tile, ring, base + ROWS, V, valid,
                        V, K, TILES, HV * V, LP, ROWS, OUTPUT,
                    )  # fmt: skip
                if k > 0 and not AHEAD:
                    codes, scales, past = fetch_block(
                        code,
                        scale,
                        tile,
                        ring,
                        base,
                        V,
                        valid,
                        V,
                        K,
                        TILES,
                        HV * V,
                        LP,
                        ROWS,
                        OUTPUT,
                    )
            v = tl.load(ring + valid * (HV * V) + row, mask=row_ok, other=0.0)
            answer_block(
                (codes, scales, past), code, scale, tile, ring, c, top, w, weight_now, v, valid,
                row, row_ok, y, HV, K, V, WP, LP, ROWS, TILES, OUTPUT, MATRIX,
            )  # fmt: skip
            if AHEAD and k + 1 < BLOCKS:
                codes, scales, past = codes_next, scales_next, past_next
    else:
        if EARLY:
            wait_for_previous()
