"""One launch for both kinds of rows of a Mamba-2 step.

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
    x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, flush_ptr, ring_x_ptr, copy_ptr,
    copy_scale_ptr, copy_tile_ptr, weight_ptr, c_ptr, top_ptr, x_stride, z_stride, y_stride,
    ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, position_ptr, key_ptr,
    list_ptr, flush_weight_ptr, decay_ptr, window_ptr, vector_ptr, code_ptr, low_ptr, scale_ptr,
    tile_ptr, code_stride, low_stride, scale_stride, tile_stride, layer, head_offset, tiles_first,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr,
    COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, EARLY: tl.constexpr, FLUSH_LP: tl.constexpr,
    TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr, CODE_HEAD: tl.constexpr,
    LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr, UPDATE: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Arguments as ``read_unit`` and ``flush_tiles``; tiles_first: programs that flush."""
    program = tl.program_id(0)
    if program < tiles_first:
        if EARLY:
            wait_for_previous()
        flush_tiles(
            program, tiles_first,
            x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, position_ptr, key_ptr, list_ptr,
            ring_x_ptr, flush_weight_ptr, decay_ptr, window_ptr, vector_ptr, code_ptr, low_ptr,
            scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr, x_stride, z_stride,
            y_stride, ring_x_stride, code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset, H, G, R, N, WP,
            FLUSH_LP, TERMS, LEFT, WARPS, CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD,
            COPY_SCALE_HEAD, TILES, UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, D_ROWS, HAS_Z,
        )  # fmt: skip
    else:
        read_unit(
            program - tiles_first,
            x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, flush_ptr, ring_x_ptr, copy_ptr,
            copy_scale_ptr, copy_tile_ptr, weight_ptr, c_ptr, top_ptr, x_stride, z_stride,
            y_stride, ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, H, G, R, N,
            WP, LP, HEADS, ROWS, AHEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT, MATRIX,
            D_ROWS, HAS_Z,
            EARLY,
        )  # fmt: skip
