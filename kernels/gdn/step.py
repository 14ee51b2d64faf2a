"""One launch for both kinds of rows of a GDN step.

The first programs share the tiles of the rows that flush, the others read one unit each: folding
keeps the arithmetic units busy while the memory streams output copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.launch import wait_for_previous
from .decode import read_unit
from .flush import flush_tiles


@triton.jit
def step_kernel(
    c_ptr, top_ptr, w_ptr, ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, y_ptr, copy_ptr,
    copy_scale_ptr, copy_tile_ptr, ring_v_stride, y_stride, copy_stride, copy_scale_stride,
    copy_tile_stride, list_ptr, keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr, high_ptr,
    low_key_ptr, w_high_ptr, w_low_ptr, until_ptr, total_ptr, ring_g_ptr, ring_beta_ptr,
    position_ptr, key_ptr, code_ptr, low_ptr, scale_ptr, tile_ptr, v_stride, ring_g_stride,
    ring_beta_stride, code_stride, low_stride, scale_stride, tile_stride, layer, head_offset,
    tiles_first,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    WP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr,
    COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
    EARLY: tl.constexpr, HK: tl.constexpr, PER: tl.constexpr, GW: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    UPDATE: tl.constexpr, HAS_COPY: tl.constexpr, SR: tl.constexpr, BITS: tl.constexpr,
    ROUNDS: tl.constexpr, DOT: tl.constexpr, FLUSH_LP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Arguments as ``read_unit`` and ``flush_tiles``; tiles_first: programs that flush."""
    program = tl.program_id(0)
    if program < tiles_first:
        if EARLY:
            wait_for_previous()
        flush_tiles(
            program, tiles_first,
            list_ptr, keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr, high_ptr, low_key_ptr,
            w_high_ptr, w_low_ptr, until_ptr, total_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr,
            slot_ptr, valid_ptr, position_ptr, key_ptr, y_ptr, code_ptr, low_ptr, scale_ptr,
            tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr, v_stride, y_stride, ring_v_stride,
            ring_g_stride, ring_beta_stride, code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset, HK, HV, K, V, L,
            WP, PER, GW, CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, DOT, FLUSH_LP, WARPS,
        )  # fmt: skip
    else:
        read_unit(
            program - tiles_first,
            c_ptr, top_ptr, w_ptr, ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, y_ptr, copy_ptr,
            copy_scale_ptr, copy_tile_ptr, ring_v_stride, y_stride, copy_stride, copy_scale_stride,
            copy_tile_stride, HV, K, V, L, LP, WP, ROWS, BLOCKS, AHEAD, COPY_HEAD,
            COPY_SCALE_HEAD, TILES,
            OUTPUT, MATRIX, EARLY,
        )  # fmt: skip
