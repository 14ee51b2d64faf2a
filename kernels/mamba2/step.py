"""Mamba-2 decode of a few sequences: one launch for the whole step.

A program serves some rows of one head of one sequence and needs nothing from another: it prepares
what its head reads or folds (``prepare``, ``flush``), leaves that in scratch memory of the head and
reads it back. Programs of one head write the same numbers to the same places. That is more work in
all, but no launch waits for another. The same functions run as in the separate launches, over the
same shapes or with sums that no shape changes, so the same bits come out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.matrix import fetch_block, load_operand
from ..common.readout import load_stored
from .decode import answer_block, ask_weights
from .flush import flush_tile, window_rows
from .prepare import ask_inputs, prepare_heads


@triton.jit
def _unit(HEADS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr):
    """(tile of 16 rows, head, row of the batch, reads) of a program of a step in one launch.

    There is a program for each tile, which it folds where its row flushes. Where rows do not, the
    first TILES / (ROWS / 16) programs of each head, which come before all others, read ROWS rows
    each, from their tile on.
    """
    READS: tl.constexpr = (16 * TILES + ROWS - 1) // ROWS
    REST: tl.constexpr = TILES - READS
    EACH: tl.constexpr = ROWS // 16
    unit = tl.program_id(0)
    head = unit // READS
    tile = unit % READS * EACH
    reads = True
    if REST > 0:
        first = tl.num_programs(0) // TILES * READS
        other = unit - first
        reads = other < 0
        number = other % REST  # of the tiles at which no block starts
        head = tl.where(reads, head, other // REST)
        tile = tl.where(reads, tile, number // (EACH - 1) * EACH + 1 + number % (EACH - 1))
    return tile, head % HEADS, (head // HEADS).to(tl.int64), reads


@triton.jit(do_not_specialize=("layer", "head_offset"))
def step_kernel(
    # inputs, [b, ...] with a row stride each, contiguous within a row
    x_ptr, z_ptr, y_ptr, dt_ptr, B_ptr, C_ptr,
    A_ptr, D_ptr, bias_ptr, sign_ptr, rotation_ptr,  # see prepare_kernel, window_kernel
    slot_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr,  # [b]
    ring_x_ptr, ring_dt_ptr, ring_B_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    # scratch of each head: fp32 [b, H, LP + 2], [b, H, LP], int32 [b, H, N], fp32 [b, H]; of rows
    # that flush fp32 [b, H, LPW], [b, H], [b, H, TERMS, LPW, 8 WP] (see window_kernel), fp32
    # [b, H, N]
    weight_ptr, dot_ptr, c_ptr, top_ptr, fold_ptr, decay_ptr, window_ptr, vector_ptr,
    x_stride, z_stride, y_stride, dt_stride, B_stride, C_stride,
    ring_x_stride, ring_dt_stride, ring_B_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    WP: tl.constexpr, LP: tl.constexpr, LPW: tl.constexpr, ROWS: tl.constexpr,
    TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    MATRIX: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """A unit (16 rows of a head of a sequence that flushes, or ROWS rows, see ``_unit``): fold
    and store, or read and append, or zeros.

    ROWS a multiple of 16. Starting before the launch before has ended gained nothing.
    """
    i_t, i_h, i_b, reads = _unit(H, TILES, ROWS)
    i_g = i_h // (H // G)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    valid = tl.load(valid_ptr + i_b)
    inputs = ask_inputs(
        i_b, i_g, i_h, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr,
        dt_stride, B_stride, C_stride, N, NP, 1, 1, HAS_BIAS, D_ROWS == 1,
    )  # fmt: skip
    start = i_t * 16
    row = start + tl.arange(0, ROWS)
    row_ok = row < R
    x = tl.load(x_ptr + i_b * x_stride + i_h * R + row, mask=row_ok, other=0.0)
    head = i_b * H + i_h
    if (slot < 0) & reads:
        zero = tl.zeros([ROWS], y_ptr.dtype.element_ty)
        tl.store(y_ptr + i_b * y_stride + i_h * R + row, zero, mask=row_ok)
    elif (flush == 0) & reads:
        code = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
        scale = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
        tile = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
        ring_x = ring_x_ptr + slot * ring_x_stride + i_h * R
        weights = weight_ptr + head * (LP + 2)
        codes, scales, past = (), (), ()
        if MATRIX:
            codes, scales, past = fetch_block(
                code,
                scale,
                tile,
                ring_x,
                start,
                R,
                valid,
                R,
                N,
                TILES,
                H * R,
                LP,
                ROWS,
                OUTPUT,
                True,
            )
        prepare_heads(
            inputs, valid, i_t == 0, (i_t == 0) & (i_h % (H // G) == 0),
            ring_dt_ptr + slot * ring_dt_stride + i_h,
            ring_B_ptr + slot * ring_B_stride + i_g * N,
            sign_ptr, weights, dot_ptr + head * LP, c_ptr + head * N, top_ptr + head,
            H, G, N, NP, LP, 1, 1, OUTPUT, MATRIX, ROTATE, SOFTPLUS, HAS_BIAS, D_ROWS == 1,
        )  # fmt: skip
        tl.debug_barrier()  # other lanes read what this program has just written
        if MATRIX:
            c = load_operand(c_ptr + head * N, N, OUTPUT)
        else:
            c = load_stored(c_ptr + head * N, N, WP, OUTPUT)
        top = tl.load(top_ptr + head)
        w, decay, weight_now = ask_weights(weights, start, R, valid, R, LP, ROWS, MATRIX)
        answer_block(
            codes, scales, past, code, scale, tile, ring_x, c, top, weights, w, decay,
            weight_now, x, valid, row, row_ok, i_b, i_h, z_ptr, y_ptr, D_ptr,
            z_stride, y_stride, H, R, N, WP, LP, ROWS, TILES, OUTPUT, MATRIX, D_ROWS, HAS_Z,
        )  # fmt: skip
    elif (slot >= 0) & (flush != 0):
        window = window_ptr + head * (TERMS * LPW * 8 * WP)
        window_rows(
            i_b, slot, valid, i_g, i_h,
            dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, rotation_ptr, ring_dt_ptr, ring_B_ptr,
            fold_ptr + head * LPW, decay_ptr + head, window, vector_ptr + head * N,
            dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
            H, G, N, NP, WP, LPW, 1, 1, TERMS, WARPS, ROTATE, BLOCK, SOFTPLUS, HAS_BIAS,
        )  # fmt: skip
        tl.debug_barrier()
        flush_tile(
            i_b, i_h, i_t, slot, valid,
            x_ptr, z_ptr, y_ptr, D_ptr, position_ptr, key_ptr, ring_x_ptr,
            fold_ptr + head * LPW, decay_ptr + head, window, vector_ptr + head * N,
            code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
            x_stride, z_stride, y_stride, ring_x_stride,
            code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
            H, R, N, WP, LPW, TERMS, LEFT, WARPS,
            CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, D_ROWS, HAS_Z,
        )  # fmt: skip
