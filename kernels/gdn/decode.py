"""GDN readout: y = O r + sum_j w_j v_j, with the effective query r and weights of ``prepare``."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.readout import copy_dot, load_stored


@triton.jit
def readout_kernel(
    c_ptr, top_ptr, w_ptr,  # see prepare_kernel
    ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, y_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    ring_v_stride, y_stride, copy_stride, copy_scale_stride, copy_tile_stride,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    WP: tl.constexpr, ROWS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    """One program a (block of ROWS rows, value head, sequence); padding rows get zeros."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    row = i_v * ROWS + tl.arange(0, ROWS)
    row_ok = row < V
    y = y_ptr + i_b * y_stride + i_h * V + row
    if slot < 0:
        tl.store(y, tl.zeros([ROWS], y_ptr.dtype.element_ty), mask=row_ok)
        return
    if tl.load(flush_ptr + i_b).to(tl.int32) != 0:
        return
    head = i_b * HV + i_h
    valid = tl.load(valid_ptr + i_b)
    token = tl.arange(0, LP)
    inside = token <= valid
    v = tl.load(
        ring_v_ptr + slot * ring_v_stride + i_h * V + token[:, None] * (HV * V) + row[None, :],
        mask=inside[:, None] & row_ok[None, :],
        other=0.0,
    )
    w = tl.load(w_ptr + head * L + token, mask=inside, other=0.0)
    top = tl.load(top_ptr + head)
    c = load_stored(c_ptr + head * K, K, WP, OUTPUT)
    out = copy_dot(
        copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
        copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
        copy_tile_ptr + slot * copy_tile_stride + i_h * TILES,
        c, top, row, row_ok, V, K, WP, TILES, OUTPUT,
    )  # fmt: skip
    out += tl.sum(w[:, None] * v.to(tl.float32), 0)
    tl.store(y, out.to(y_ptr.dtype.element_ty), mask=row_ok)
