"""Mamba-2 decode over a split state: rows that do not flush. Reference: ``reference.decode_step``.

A program owns some heads of one group of one sequence. It first forms, once for all of them, the
decays and the weights of the window, in a small scratch that only it reads back, then streams the
output copy through ``common.readout``. Rows that flush are ``flush.flush_kernel``'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.activation import softplus
from ..common.hadamard import rotate_vector
from ..common.readout import copy_dot, load_vector


@triton.jit
def window_weights(
    dt_ptr, A_ptr, bias_ptr, ring_dt, weights, valid, token,
    H: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr, HEADS_P: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """exp(a - a_j) dt_j of the window [HEADS_P, LP], and this token's dt [HEADS_P].

    Pointers are at the program's first head. exp(a), the decay of the whole window, goes to
    ``weights`` [HEADS, LP + 1], last column.
    """
    head = tl.arange(0, HEADS_P)
    head_ok = head < HEADS
    dt_now = tl.load(dt_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        dt_now += tl.load(bias_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
    if SOFTPLUS:
        dt_now = softplus(dt_now)
    old = (token < valid)[None, :] & head_ok[:, None]
    dt = tl.load(ring_dt + token[None, :] * H + head[:, None], mask=old, other=0.0)
    dt = tl.where((token == valid)[None, :] & head_ok[:, None], dt_now[:, None], dt)
    decay = dt * tl.load(A_ptr + head, mask=head_ok, other=0.0).to(tl.float32)[:, None]
    later = (token[:, None] < token[None, :]).to(tl.float32)  # sums from the newest token back
    after = tl.sum(decay[:, None, :] * later[None, :, :], 2)
    tl.store(weights + head * (LP + 1) + LP, tl.exp(tl.sum(decay, 1)), mask=head_ok)
    return tl.exp(after) * dt, dt_now


@triton.jit
def store_weights(
    weights, weight, valid, token, LP: tl.constexpr, HEADS: tl.constexpr, HEADS_P: tl.constexpr
):
    """Weights [HEADS_P, LP] of the valid tokens and this one into the scratch."""
    head = tl.arange(0, HEADS_P)
    at = weights + head[:, None] * (LP + 1) + token[None, :]
    tl.store(at, weight, mask=(head < HEADS)[:, None] & (token <= valid)[None, :])


@triton.jit
def readout_kernel(
    # inputs, [b, ...] with a row stride each, contiguous within a row
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, y_ptr,
    A_ptr, D_ptr, bias_ptr, sign_ptr,  # [H] fp32, [H] or [H, P], [H], [N] fp32
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    ring_x_ptr, ring_dt_ptr, ring_B_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, vector_ptr,  # scratch [b, H, LP + 1], [b, G, parts, N] fp32
    x_stride, dt_stride, B_stride, C_stride, z_stride, y_stride,
    ring_x_stride, ring_dt_stride, ring_B_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, WP: tl.constexpr, LP: tl.constexpr,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, ROWS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, ROTATE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Rows that do not flush: y from the output copy and the window; the token joins the ring.

    HEADS heads a program (HEADS_P padded); D_ROWS: D is absent (0), [H] (1) or [H, P] (2).
    """
    i_p, i_g, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    first = i_g * (H // G) + i_p * HEADS  # the program's first head
    if slot < 0:
        for k in range(0, HEADS * R, ROWS):
            row = k + tl.arange(0, ROWS)
            zero = tl.zeros([ROWS], y_ptr.dtype.element_ty)
            tl.store(y_ptr + i_b * y_stride + first * R + row, zero, mask=row < HEADS * R)
        return
    if tl.load(flush_ptr + i_b).to(tl.int32) != 0:
        return
    valid = tl.load(valid_ptr + i_b)
    token, n = tl.arange(0, LP), tl.arange(0, NP)
    old, now = token < valid, token == valid
    weights = weight_ptr + (i_b * H + first) * (LP + 1)
    ring_dt = ring_dt_ptr + slot * ring_dt_stride + first
    weight, dt_now = window_weights(
        dt_ptr + i_b * dt_stride + first, A_ptr + first, bias_ptr + first, ring_dt, weights,
        valid, token, H, LP, HEADS, HEADS_P, SOFTPLUS, HAS_BIAS,
    )  # fmt: skip
    ring_B = ring_B_ptr + slot * ring_B_stride + i_g * N
    B_now = tl.load(B_ptr + i_b * B_stride + i_g * N + n, mask=n < N, other=0.0)
    B_now = B_now.to(ring_B_ptr.dtype.element_ty)
    C = tl.load(C_ptr + i_b * C_stride + i_g * N + n, mask=n < N, other=0.0).to(tl.float32)
    B = tl.load(
        ring_B + token[:, None] * (G * N) + n[None, :],
        mask=old[:, None] & (n < N)[None, :],
        other=0.0,
    )
    B = tl.where(now[:, None], B_now[None, :], B).to(tl.float32)
    weight = weight * tl.sum(B * C[None, :], 1)[None, :]
    store_weights(weights, weight, valid, token, LP, HEADS, HEADS_P)
    head = tl.arange(0, HEADS_P)
    tl.store(ring_dt + valid * H + head, dt_now, mask=head < HEADS)
    if i_p == 0:
        tl.store(ring_B + valid * (G * N) + n, B_now, mask=n < N)
    if ROTATE:
        C = rotate_vector(C, sign_ptr, N, NP)
    PARTS: tl.constexpr = H // G // HEADS
    vector = vector_ptr + ((i_b * G + i_g) * PARTS + i_p) * N
    tl.store(vector + n, C, mask=n < N)
    top = tl.max(tl.abs(C), 0)
    tl.debug_barrier()  # other threads of this program read the scratch back
    c = load_vector(vector, 1.0 / tl.where(top > 0, top, 1.0), N, WP, OUTPUT)
    inputs = i_b * x_stride + first * R
    ring_x = ring_x_ptr + slot * ring_x_stride + first * R
    for k in range(0, HEADS * R, ROWS):
        row = k + tl.arange(0, ROWS)
        row_ok = row < HEADS * R
        y = copy_dot(
            copy_ptr + slot * copy_stride + first * COPY_HEAD,
            copy_scale_ptr + slot * copy_scale_stride + first * COPY_SCALE_HEAD,
            copy_tile_ptr + slot * copy_tile_stride + first * TILES,
            c, top, row, row_ok, R, N, WP, TILES, OUTPUT,
        )  # fmt: skip
        x = tl.load(x_ptr + inputs + row, mask=row_ok, other=0.0)
        x = x.to(ring_x_ptr.dtype.element_ty)
        mask = old[:, None] & row_ok[None, :]
        past = tl.load(ring_x + token[:, None] * (H * R) + row[None, :], mask=mask, other=0)
        past = tl.where(now[:, None], x[None, :], past).to(tl.float32)
        if R % ROWS == 0:  # the block lies in one head
            mine = weights + (k // R) * (LP + 1)
            w = tl.load(mine + token, mask=old | now, other=0.0)[:, None]
            factor = tl.load(mine + LP)
        else:
            mine = weights + (row // R) * (LP + 1)
            w = tl.load(
                mine[None, :] + token[:, None],
                mask=(old | now)[:, None] & row_ok[None, :],
                other=0.0,
            )
            factor = tl.load(mine + LP, mask=row_ok, other=0.0)
        y = y * factor + tl.sum(w * past, 0)
        tl.store(ring_x + valid * (H * R) + row, x, mask=row_ok)
        finish(
            y, i_b, first, row, row_ok, inputs,
            x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, z_stride, y_stride,
            R, D_ROWS, HAS_Z,
        )  # fmt: skip


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
