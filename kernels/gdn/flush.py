"""GDN flush: fold the window into the checkpoint by the exact recurrence; the copy is never read.

One program owns 16 rows of a value head (``common.planes``): their whole fold happens in registers,
in fp32, token by token. Every correction b (v - a S k) is made from the state itself, so no
low-precision read enters the checkpoint (``reference._fold``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.planes import PAIRS, decode_tile
from ..common.store import encode_state


@triton.jit
def _load_rows(base, pair, row_ok):
    """fp32 values of the even and of the odd rows: two tensors [8, 1]."""
    even = tl.load(base + 2 * pair, mask=row_ok[0], other=0.0).to(tl.float32)
    odd = tl.load(base + 2 * pair + 1, mask=row_ok[1], other=0.0).to(tl.float32)
    return even[:, None], odd[:, None]


@triton.jit
def _load_planes(base, column, column_ok, W: tl.constexpr):
    """A vector of N = 8 W fp32 values as eight tensors [1, W]."""
    out = ()
    for i in tl.static_range(8):
        part = tl.load(base + i * W + column, mask=column_ok, other=0.0)
        out = out + (part[None, :],)
    return out


@triton.jit
def _decays(base, column, column_ok, W: tl.constexpr, GW: tl.constexpr):
    """exp of a token's log decay: one scalar, or eight tensors [1, W] for a gate a key channel."""
    if GW == 1:
        return (tl.exp(tl.load(base)),)
    else:
        out = ()
        for g in _load_planes(base, column, column_ok, W):
            out = out + (tl.exp(g),)
        return out


@triton.jit
def _fold_token(values, k, decay, beta, v, GW: tl.constexpr):
    """S <- a S + b (v - a S k) k^T for sixteen [8, W] tensors of a tile."""
    new = ()
    for p in tl.static_range(2):
        aged = ()
        read = values[p * 8] * 0.0
        for i in tl.static_range(8):
            x = values[p * 8 + i] * (decay[0] if GW == 1 else decay[i])
            read += x * k[i]
            aged = aged + (x,)
        correction = beta * (v[p] - tl.sum(read, 1, keep_dims=True))
        for i in tl.static_range(8):
            new = new + (aged[i] + correction * k[i],)
    return new


@triton.jit
def _fold_ring(
    values, keys, ring_v, ring_g, ring_beta, valid, pair, column, row_ok, column_ok,
    HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, GW: tl.constexpr,
):  # fmt: skip
    """Fold the first ``valid`` tokens; keys at the row's first key, the rings at this head."""
    W: tl.constexpr = K // 8
    for j in range(valid):
        v = _load_rows(ring_v + j * (HV * V), pair, row_ok)
        k = _load_planes(keys + j * K, column, column_ok, W)
        decay = _decays(ring_g + j * (HV * GW), column, column_ok, W, GW)
        values = _fold_token(values, k, decay, tl.load(ring_beta + j * HV), v, GW)
    return values


@triton.jit
def flush_kernel(
    list_ptr, keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,  # see prepare_kernel
    ring_v_ptr, ring_g_ptr, ring_beta_ptr,  # at slot 0
    slot_ptr, valid_ptr, position_ptr, key_ptr, y_ptr,  # [b], y [b, HV, V]
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    WP: tl.constexpr, PER: tl.constexpr, GW: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    W: tl.constexpr = K // 8
    pair = i_t * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, WP)
    column_ok = column < W
    row_ok = (2 * pair < V, 2 * pair + 1 < V)
    for i in range(tl.program_id(2), tl.load(list_ptr), tl.num_programs(2)):
        i_b = tl.load(list_ptr + 1 + i).to(tl.int64)
        slot = tl.load(slot_ptr + i_b).to(tl.int64)
        valid = tl.load(valid_ptr + i_b)
        code = code_ptr + slot * code_stride + i_h * CODE_HEAD
        low = low_ptr + slot * low_stride + i_h * LOW_HEAD
        scales = scale_ptr + slot * scale_stride + i_h * SCALE_HEAD
        tiles = tile_ptr + slot * tile_stride + i_h * TILES
        values = decode_tile(
            pair, column, row_ok, column_ok, code, low, scales, tiles, UPDATE, V, K
        )
        keys = keys_ptr + (i_b * HK + i_h // PER) * (L * K)
        values = _fold_ring(
            values,
            keys,
            ring_v_ptr + slot * ring_v_stride + i_h * V,
            ring_g_ptr + slot * ring_g_stride + i_h * GW,
            ring_beta_ptr + slot * ring_beta_stride + i_h,
            valid, pair, column, row_ok, column_ok, HV, V, K, GW,
        )  # fmt: skip
        head = i_b * HV + i_h
        even, odd = _load_rows(v_ptr + i_b * v_stride + i_h * V, pair, row_ok)
        held = ring_v_ptr.dtype.element_ty  # a flush sees what a ring would have kept
        v = (even.to(held).to(tl.float32), odd.to(held).to(tl.float32))
        k = _load_planes(keys + valid * K, column, column_ok, W)
        decay = _decays(gate_ptr + head * GW, column, column_ok, W, GW)
        values = _fold_token(values, k, decay, tl.load(rate_ptr + head), v, GW)
        q = _load_planes(query_ptr + (i_b * HK + i_h // PER) * K, column, column_ok, W)
        for p in tl.static_range(2):
            dot = values[p * 8] * q[0]
            for e in tl.static_range(1, 8):
                dot += values[p * 8 + e] * q[e]
            y = y_ptr + i_b * y_stride + i_h * V + 2 * pair + p
            tl.store(y, tl.sum(dot, 1).to(y_ptr.dtype.element_ty), mask=row_ok[p])
        encode_state(
            values, tl.load(key_ptr + i_b), tl.load(position_ptr + i_b), layer,
            i_h + head_offset, pair, column, row_ok, column_ok, code, low, scales, tiles,
            copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
            copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
            copy_tile_ptr + slot * copy_tile_stride + i_h * TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, V, K,
        )  # fmt: skip


@triton.jit
def _store_rows(base, values, pair, column, row_ok, column_ok, K: tl.constexpr):
    """A tile to fp32 rows of K in natural order."""
    for p in tl.static_range(2):
        mask = row_ok[p][:, None] & column_ok[None, :]
        for i in tl.static_range(8):
            at = (2 * pair + p)[:, None] * K + i * (K // 8) + column[None, :]
            tl.store(base + at, values[p * 8 + i], mask=mask)


@triton.jit
def load_kernel(
    state_ptr, keys_ptr,  # fp32 [b, HV, V, K], keys as prepare_kernel leaves them
    ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot_ptr, valid_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr,
    ring_v_stride, ring_g_stride, ring_beta_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    WP: tl.constexpr, PER: tl.constexpr, GW: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    TILES: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    i_t, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    W: tl.constexpr = K // 8
    pair = i_t * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, WP)
    column_ok = column < W
    row_ok = (2 * pair < V, 2 * pair + 1 < V)
    base = state_ptr + (i_b * HV + i_h) * (V * K)
    if slot < 0:
        zero = tl.zeros([PAIRS, WP], tl.float32)
        _store_rows(base, (zero,) * 16, pair, column, row_ok, column_ok, K)
        return
    values = decode_tile(
        pair, column, row_ok, column_ok,
        code_ptr + slot * code_stride + i_h * CODE_HEAD,
        low_ptr + slot * low_stride + i_h * LOW_HEAD,
        scale_ptr + slot * scale_stride + i_h * SCALE_HEAD,
        tile_ptr + slot * tile_stride + i_h * TILES,
        UPDATE, V, K,
    )  # fmt: skip
    values = _fold_ring(
        values,
        keys_ptr + (i_b * HK + i_h // PER) * (L * K),
        ring_v_ptr + slot * ring_v_stride + i_h * V,
        ring_g_ptr + slot * ring_g_stride + i_h * GW,
        ring_beta_ptr + slot * ring_beta_stride + i_h,
        tl.load(valid_ptr + i_b), pair, column, row_ok, column_ok, HV, V, K, GW,
    )  # fmt: skip
    _store_rows(base, values, pair, column, row_ok, column_ok, K)
