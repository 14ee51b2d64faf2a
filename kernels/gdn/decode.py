"""GDN readout: y = O r + sum_j w_j v_j, with the effective query r and weights of ``prepare``.

``readout_kernel`` waits for a launch that prepares; a program asks for its first codes and for the
v of the ring before that. ``read_kernel`` is one launch for both: a program serves a key head, asks
the L2 for all that its value heads will read, and prepares meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.fold import prefetch
from ..common.launch import prefetch_run, wait_for_previous
from ..common.matrix import block_dot, fetch_block, load_operand, load_weights
from ..common.readout import copy_dot, load_stored
from .prepare import activate, append_scalars, ask_inputs, push_back


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


@triton.jit
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


@triton.jit
def read_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, sign_ptr,  # see prepare_kernel
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,  # at slot 0
    slot_ptr, valid_ptr, flush_ptr, y_ptr,  # [b], y [b, HV, V]
    scratch_ptr, c_ptr, top_ptr, w_ptr,  # see prepare_kernel
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    q_stride, k_stride, v_stride, g_stride, beta_stride, y_stride,
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    KP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr, LP: tl.constexpr,
    LPR: tl.constexpr, ROWS: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, ROTATE: tl.constexpr, WORDS: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """A unit (key head, sequence) with matrix units: y of the key head's value heads for a row that
    does not flush, its input into the ring; zeros of a padding row.

    LP and LPR: the window padded for products and for reads. BULK: see ``prefetch_run``.
    """
    unit = tl.program_id(0)
    i_k, i_b = unit % HK, (unit // HK).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    first = i_k * PER
    inputs = ask_inputs(
        i_b, i_k, first, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
        q_stride, k_stride, g_stride, beta_stride, K, KP, PER, PERP, GW, RAW_GATES,
    )  # fmt: skip
    y = y_ptr + i_b * y_stride + first * V
    block = tl.arange(0, ROWS)
    if slot < 0:
        for start in range(0, PER * V, ROWS):
            zero = tl.zeros([ROWS], y_ptr.dtype.element_ty)
            tl.store(y + start + block, zero, mask=start + block < PER * V)
    elif flush == 0:
        code = copy_ptr + slot * copy_stride + first * COPY_HEAD
        scales = copy_scale_ptr + slot * copy_scale_stride + first * COPY_SCALE_HEAD
        tiles = copy_tile_ptr + slot * copy_tile_stride + first * TILES
        prefetch_run(code, PER * COPY_HEAD * 4, BULK)
        SIZE: tl.constexpr = copy_scale_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch_run(scales, PER * COPY_SCALE_HEAD * SIZE, BULK)
        if OUTPUT[3] == "block" and OUTPUT[5] == "e4m3":
            prefetch_run(tiles, PER * TILES * 4, False)
        ring_v = ring_v_ptr + slot * ring_v_stride + first * V
        past = tl.minimum(tl.arange(0, LP), tl.maximum(valid - 1, 0)) * (HV * V)
        STEP: tl.constexpr = 512 // ring_v_ptr.dtype.element_ty.primitive_bitwidth  # 64 bytes
        for line in tl.static_range((PER * V + STEP - 1) // STEP):
            prefetch(ring_v + past + line * STEP)
        ring_k = ring_k_ptr + slot * ring_k_stride + i_k * K
        ring_rk = ring_rk_ptr + slot * ring_rk_stride + i_k
        ring_g = ring_g_ptr + slot * ring_g_stride + first * GW
        ring_beta = ring_beta_ptr + slot * ring_beta_stride + first
        q, k, rk, g, beta, factor = activate(
            inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS
        )
        n = tl.arange(0, KP)[None, :]
        tl.store(ring_k + valid * (HK * K) + n, k, mask=n < K)
        append_scalars(
            rk, g, beta, valid, ring_rk, ring_g, ring_beta, True, True, HK, HV, K, KP, PER, PERP, GW
        )
        head = i_b * HV + first
        push_back(
            q, k, rk, g, beta, factor, q_ptr + i_b * q_stride + i_k * K,
            k_ptr + i_b * k_stride + i_k * K, valid, ring_k, ring_rk, ring_g, ring_beta, sign_ptr,
            scratch_ptr + unit * (LP * LP + PERP * (LP + KP)),
            c_ptr + head * K, top_ptr + head, w_ptr + head * L,
            HK, HV, K, L, KP, LP, PER, PERP, GW, OUTPUT, True, ROTATE, WORDS,
        )  # fmt: skip
        tl.debug_barrier()  # other lanes read what this program has just written
        for h in range(PER):
            c = load_operand(c_ptr + (head + h) * K, K, OUTPUT)
            weights = w_ptr + (head + h) * L
            w = load_weights(weights, valid, LPR)
            weight_now, top = tl.load(weights + valid), tl.load(top_ptr + head + h)
            for start in range(0, V, ROWS):
                row = start + block
                row_ok = row < V
                ring = ring_v + h * V
                fetched = fetch_block(
                    code + h * COPY_HEAD, scales + h * COPY_SCALE_HEAD, tiles + h * TILES, ring,
                    start, V, valid, V, K, TILES, HV * V, LPR, ROWS, OUTPUT, True,
                )  # fmt: skip
                v = tl.load(v_ptr + i_b * v_stride + (first + h) * V + row, mask=row_ok, other=0.0)
                v = v.to(ring_v_ptr.dtype.element_ty)
                tl.store(ring + valid * (HV * V) + row, v, mask=row_ok)
                answer_block(
                    fetched, code, scales, tiles, ring, c, top, w, weight_now, v, valid, row,
                    row_ok, y + h * V, HV, K, V, 0, LPR, ROWS, TILES, OUTPUT, True,
                )  # fmt: skip
