"""GDN decode of a few sequences: one launch for the whole step.

A program serves some rows of one value head of one sequence and needs nothing from another: it
prepares what its rows read or fold (``prepare``), leaves that in scratch memory of its own and
reads it back. That is more work in all, but no launch waits for another; the functions are those of
the separate launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.matrix import fetch_block, load_operand, load_weights
from ..common.readout import load_stored
from .decode import answer_block
from .flush import flush_tile
from .prepare import activate, append_scalars, ask_inputs, push_back, window_base, window_of


@triton.jit(
    do_not_specialize=("layer", "head_offset"),
    do_not_specialize_on_alignment=(
        "slot_ptr",
        "valid_ptr",
        "flush_ptr",
        "position_ptr",
        "key_ptr",
    ),
)
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, sign_ptr,  # see prepare_kernel
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,  # at slot 0
    slot_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr, y_ptr,  # [b], y [b, HV, V]
    # scratch of each program, as prepare_kernel and window_kernel have it of a head or key head
    keys_ptr, query_ptr, gate_ptr, rate_ptr, left_ptr, right_ptr, base_ptr, total_ptr,
    scratch_ptr, c_ptr, top_ptr, w_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    q_stride, k_stride, v_stride, g_stride, beta_stride, y_stride,
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    scale, layer, head_offset,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    KP: tl.constexpr, WP: tl.constexpr, PER: tl.constexpr, GW: tl.constexpr, LP: tl.constexpr,
    LPR: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    MATRIX: tl.constexpr, ROTATE: tl.constexpr, DOT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A unit (ROWS rows, value head, sequence): read and append, or fold and store, or zeros.

    ROWS a multiple of 16; LP and LPR: the window padded for products and for reads. Starting before
    the launch before has ended gained nothing, nor did folding 16 rows a program beside wide reads.
    """
    unit = tl.program_id(0)
    PARTS: tl.constexpr = (V + ROWS - 1) // ROWS
    i_t, i_h, i_b = unit % PARTS, unit // PARTS % HV, (unit // (PARTS * HV)).to(tl.int64)
    i_k = i_h // PER
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    inputs = ask_inputs(
        i_b, i_k, i_h, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
        q_stride, k_stride, g_stride, beta_stride, K, KP, 1, 1, GW, RAW_GATES,
    )  # fmt: skip
    start = i_t * ROWS
    row = start + tl.arange(0, ROWS)
    row_ok = row < V
    v = tl.load(v_ptr + i_b * v_stride + i_h * V + row, mask=row_ok, other=0.0)
    y = y_ptr + i_b * y_stride + i_h * V
    ring_k = ring_k_ptr + slot * ring_k_stride + i_k * K
    ring_rk = ring_rk_ptr + slot * ring_rk_stride + i_k
    ring_g = ring_g_ptr + slot * ring_g_stride + i_h * GW
    ring_beta = ring_beta_ptr + slot * ring_beta_stride + i_h
    ring_v = ring_v_ptr + slot * ring_v_stride + i_h * V
    n = tl.arange(0, KP)[None, :]
    if slot < 0:
        tl.store(y + row, tl.zeros([ROWS], y_ptr.dtype.element_ty), mask=row_ok)
    elif flush == 0:
        code = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
        scales = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
        tiles = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
        block = (), (), ()
        if MATRIX:
            block = fetch_block(
                code,
                scales,
                tiles,
                ring_v,
                start,
                V,
                valid,
                V,
                K,
                TILES,
                HV * V,
                LPR,
                ROWS,
                OUTPUT,
                True,
            )
        q, k, rk, g, beta, factor = activate(
            inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS
        )
        first = i_t == 0
        of_key = first & (i_h % PER == 0)
        tl.store(ring_k + valid * (HK * K) + n, k, mask=(n < K) & of_key)
        append_scalars(
            rk, g, beta, valid, ring_rk, ring_g, ring_beta, of_key, first, HK, HV, K, KP, 1, 1, GW
        )
        v = v.to(ring_v_ptr.dtype.element_ty)
        tl.store(ring_v + valid * (HV * V) + row, v, mask=row_ok)
        push_back(
            q, k, rk, g, beta, factor, q_ptr + i_b * q_stride + i_k * K,
            k_ptr + i_b * k_stride + i_k * K, valid, ring_k, ring_rk, ring_g, ring_beta, sign_ptr,
            scratch_ptr + unit * (LP * LP + LP + KP), c_ptr + unit * K, top_ptr + unit,
            w_ptr + unit * L, HK, HV, K, L, KP, LP, 1, 1, GW, OUTPUT, MATRIX, ROTATE, WORDS,
        )  # fmt: skip
        tl.debug_barrier()  # other lanes read what this program has just written
        weights = w_ptr + unit * L
        if MATRIX:
            c = load_operand(c_ptr + unit * K, K, OUTPUT)
            w = load_weights(weights, valid, LPR)
        else:
            c = load_stored(c_ptr + unit * K, K, WP, OUTPUT)
            token = tl.arange(0, LPR)
            w = tl.load(weights + token, mask=token < valid, other=0.0)
        answer_block(
            block, code, scales, tiles, ring_v, c, tl.load(top_ptr + unit), w,
            tl.load(weights + valid), v, valid, row, row_ok, y,
            HV, K, V, WP, LPR, ROWS, TILES, OUTPUT, MATRIX,
        )  # fmt: skip
    else:
        q, k, rk, g, beta, factor = activate(
            inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS
        )
        keys, query = keys_ptr + unit * (L * K), query_ptr + unit * K
        gate, rate = gate_ptr + unit * GW, rate_ptr + unit
        left, right = left_ptr + unit * (2 * LP * KP), right_ptr + unit * (2 * LP * KP)
        base, total = base_ptr + unit * window_base(V, LP), total_ptr + unit
        window_of(
            q, k, rk, g, beta, v_ptr + i_b * v_stride + i_h * V, valid, sign_ptr,
            ring_k, ring_rk, ring_v, ring_g, ring_beta,
            keys, query, gate, rate, left, right, base, total, i_h >= 0,
            HK, HV, K, KP, V, GW, ROTATE, DOT, LP, True, 1, None,
            start // 64 * 64, (ROWS + 63) // 64,
        )  # fmt: skip
        tl.debug_barrier()
        for i_f in range(i_t * (ROWS // 16), tl.minimum((i_t + 1) * (ROWS // 16), TILES)):
            flush_tile(
                i_b, i_h, i_f, slot, valid, keys, query, gate, rate, v_ptr,
                left, right, base, total,
                ring_v_ptr, ring_g_ptr, ring_beta_ptr, position_ptr, key_ptr, y_ptr,
                code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
                v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
                code_stride, low_stride, scale_stride, tile_stride,
                copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
                HV, K, V, WP, GW,
                CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
                UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, DOT, LP, WARPS,
            )  # fmt: skip
