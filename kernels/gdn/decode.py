"""GDN readout: y = O r + sum_j w_j v_j, with the effective query r and weights of ``prepare``."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.planes import code_values, load_scales, load_words, spread


@triton.jit
def readout_kernel(
    c_ptr, top_ptr, w_ptr,  # see prepare_kernel
    ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, y_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    ring_v_stride, y_stride, copy_stride, copy_scale_stride, copy_tile_stride,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    WP: tl.constexpr, BV: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    row = i_v * BV + tl.arange(0, BV)
    row_ok = row < V
    y = y_ptr + i_b * y_stride + i_h * V + row
    if slot < 0:
        tl.store(y, tl.zeros([BV], y_ptr.dtype.element_ty), mask=row_ok)
        return
    if tl.load(flush_ptr + i_b).to(tl.int32) != 0:
        return
    ELEM: tl.constexpr = OUTPUT[0]
    GRAN: tl.constexpr = OUTPUT[3]
    BLOCK: tl.constexpr = OUTPUT[4]
    SCALE: tl.constexpr = OUTPUT[5]
    W: tl.constexpr = K // 8
    column = tl.arange(0, WP)
    column_ok = column < W
    mask = row_ok[:, None] & column_ok[None, :]
    code = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
    values = load_words(code, row[:, None] * (COPY_HEAD // V) + column[None, :], mask, W, ELEM)
    values = code_values(values, ELEM, GRAN == "none")
    if GRAN != "none":
        tile = 0.0
        if SCALE == "e4m3":
            tiles = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
            tile = tl.load(tiles + row // 16, mask=row_ok, other=0.0)
        scales = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
        scales = load_scales(scales, tile, row, row_ok, GRAN, SCALE, BLOCK, K)
    c = c_ptr + (i_b * HV + i_h) * K
    total = tl.zeros([BV, WP], tl.float32)
    for i in tl.static_range(8):
        part = values[i] * tl.load(c + i * W + column, mask=column_ok, other=0.0)[None, :]
        if GRAN != "none":
            part = part * spread(scales, column, i, W, BLOCK, K)
        total += tl.where(mask, part, 0.0)
    if OUTPUT[1] > 0:  # the high plane counts in units of 2**low
        total = total * float(1 << OUTPUT[1])
    valid = tl.load(valid_ptr + i_b)
    token = tl.arange(0, LP)
    inside = token <= valid
    v = ring_v_ptr + slot * ring_v_stride + i_h * V
    v = tl.load(
        v + token[:, None] * (HV * V) + row[None, :],
        mask=inside[:, None] & row_ok[None, :],
        other=0.0,
    )
    w = tl.load(w_ptr + (i_b * HV + i_h) * L + token, mask=inside, other=0.0)
    out = tl.sum(total, 1) + tl.sum(w[:, None] * v.to(tl.float32), 0)
    tl.store(y, out.to(y_ptr.dtype.element_ty), mask=row_ok)
