"""Mamba-2 decode over a split state: the rows that flush. Reference: ``reference.decode_step``.

Flush programs are few and walk the flushing rows, so that a step in which hardly any row flushes
does not pay for the others. A program folds the ring into the checkpoint tile by tile, takes y from
the fp32 state, and stores both copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.hadamard import rotate_vector
from ..common.planes import PAIRS, decode_tile
from ..common.store import encode_state
from .decode import finish, store_weights, window_weights


@triton.jit
def flush_kernel(
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, y_ptr,
    A_ptr, D_ptr, bias_ptr, sign_ptr,
    slot_ptr, valid_ptr, flush_ptr, position_ptr, key_ptr,
    ring_x_ptr, ring_dt_ptr, ring_B_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, vector_ptr, window_ptr,  # scratch [b, H, LP + 1], [programs, N], [programs, L, N]
    x_stride, dt_stride, B_stride, C_stride, z_stride, y_stride,
    ring_x_stride, ring_dt_stride, ring_B_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset, batch,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, WP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, BP: tl.constexpr,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    ROTATE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Rows that flush: the exact fold, y from the fp32 state, checkpoint and copy. BP >= batch.

    The grid is any number of programs; each takes every grid-size-th of the units (row, group,
    part), in an order that no result depends on.
    """
    PARTS: tl.constexpr = H // G // HEADS
    entry = tl.arange(0, BP)
    inside = entry < batch
    flags = tl.load(flush_ptr + entry, mask=inside, other=0).to(tl.int32) != 0
    flags = flags & (tl.load(slot_ptr + entry, mask=inside, other=-1) >= 0)
    through = tl.cumsum(flags.to(tl.int32), 0)
    units = tl.sum(flags.to(tl.int32), 0) * (G * PARTS)
    token, n, column = tl.arange(0, LP), tl.arange(0, NP), tl.arange(0, WP)
    column_ok = column < N // 8
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        i_b = tl.sum((through <= unit // (G * PARTS)).to(tl.int32), 0).to(tl.int64)
        i_b = tl.minimum(i_b, batch - 1)
        i_g, i_p = (unit // PARTS) % G, unit % PARTS
        tl.debug_barrier()  # the last unit's scratch has been read
        first = i_g * (H // G) + i_p * HEADS
        slot = tl.load(slot_ptr + i_b).to(tl.int64)
        valid = tl.load(valid_ptr + i_b)
        weights = weight_ptr + (i_b * H + first) * (LP + 1)
        weight, dt_now = window_weights(
            dt_ptr + i_b * dt_stride + first, A_ptr + first, bias_ptr + first,
            ring_dt_ptr + slot * ring_dt_stride + first, weights,
            valid, token, H, LP, HEADS, HEADS_P, SOFTPLUS, HAS_BIAS,
        )  # fmt: skip
        store_weights(weights, weight, valid, token, LP, HEADS, HEADS_P)
        C = tl.load(C_ptr + i_b * C_stride + i_g * N + n, mask=n < N, other=0.0).to(tl.float32)
        if ROTATE:
            C = rotate_vector(C, sign_ptr, N, NP)
        vector = vector_ptr + tl.program_id(0) * N
        tl.store(vector + n, C, mask=n < N)
        ring_B = ring_B_ptr + slot * ring_B_stride + i_g * N
        window = window_ptr + tl.program_id(0).to(tl.int64) * (L * N)
        for j in range(valid + 1):
            past = tl.load(ring_B + j * (G * N) + n, mask=(n < N) & (j < valid), other=0.0)
            B = B_ptr + i_b * B_stride + i_g * N + n
            B = tl.load(B, mask=(n < N) & (j == valid), other=0.0).to(ring_B_ptr.dtype.element_ty)
            B = tl.where(j < valid, past, B).to(tl.float32)
            if ROTATE:
                B = rotate_vector(B, sign_ptr, N, NP)
            tl.store(window + j * N + n, B, mask=n < N)
        tl.debug_barrier()  # other threads of this program read the scratch back
        inputs = i_b * x_stride + first * R
        ring_x = ring_x_ptr + slot * ring_x_stride + first * R
        for piece in range(HEADS * TILES):
            h, t = piece // TILES, piece % TILES
            i_h = first + h
            pair = t * PAIRS + tl.arange(0, PAIRS)
            row_ok = (2 * pair < R, 2 * pair + 1 < R)
            state = decode_tile(
                pair, column, row_ok, column_ok,
                code_ptr + slot * code_stride + i_h * CODE_HEAD,
                low_ptr + slot * low_stride + i_h * LOW_HEAD,
                scale_ptr + slot * scale_stride + i_h * SCALE_HEAD,
                tile_ptr + slot * tile_stride + i_h * TILES,
                UPDATE, R, N,
            )  # fmt: skip
            factor = tl.load(weights + h * (LP + 1) + LP)
            values = ()
            for e in tl.static_range(16):
                values = values + (state[e] * factor,)
            for j in range(valid + 1):
                w = tl.load(weights + h * (LP + 1) + j)
                pushed = ()
                for p in tl.static_range(2):
                    row = h * R + 2 * pair + p
                    past = ring_x + j * (H * R) + row
                    past = tl.load(past, mask=row_ok[p] & (j < valid), other=0.0)
                    x = tl.load(x_ptr + inputs + row, mask=row_ok[p] & (j == valid), other=0.0)
                    x = x.to(ring_x_ptr.dtype.element_ty)
                    pushed = pushed + (tl.where(j < valid, past, x).to(tl.float32) * w,)
                rows_B = ()
                for i in tl.static_range(8):
                    b = window + j * N + i * (N // 8) + column
                    rows_B = rows_B + (tl.load(b, mask=column_ok, other=0.0),)
                added = ()
                for p in tl.static_range(2):
                    for i in tl.static_range(8):
                        step = pushed[p][:, None] * rows_B[i][None, :]
                        added = added + (values[p * 8 + i] + step,)
                values = added
            for p in tl.static_range(2):
                y = tl.zeros([PAIRS, WP], tl.float32)
                for i in tl.static_range(8):
                    c = tl.load(vector + i * (N // 8) + column, mask=column_ok, other=0.0)
                    y += values[p * 8 + i] * c[None, :]
                finish(
                    tl.sum(y, 1), i_b, first, h * R + 2 * pair + p, row_ok[p], inputs,
                    x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, z_stride, y_stride,
                    R, D_ROWS, HAS_Z,
                )  # fmt: skip
            encode_state(
                values, tl.load(key_ptr + i_b), tl.load(position_ptr + i_b), layer,
                i_h + head_offset, pair, column, row_ok, column_ok,
                code_ptr + slot * code_stride + i_h * CODE_HEAD,
                low_ptr + slot * low_stride + i_h * LOW_HEAD,
                scale_ptr + slot * scale_stride + i_h * SCALE_HEAD,
                tile_ptr + slot * tile_stride + i_h * TILES,
                copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
                copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
                copy_tile_ptr + slot * copy_tile_stride + i_h * TILES,
                UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, R, N,
            )  # fmt: skip
