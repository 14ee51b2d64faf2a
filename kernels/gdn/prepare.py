"""Everything of a GDN step that does not touch the state: norms, gates, the walk over the window.

One program serves a (row, key head) and its value heads. Rows that do not flush append their input
to the ring and push the query back through the window (``reference``): the result is one weight for
each v and one effective query a value head. Rows that flush leave the window's keys and query,
normalised and rotated, and the gates of the new token, for ``flush``; with DOT also the window's
triangular system, solved.

With cumulative log decays G_i the corrections d_i = b_i (v_i - a_i S_{i-1} k_i) of a window over a
checkpoint U obey (I + A) d = b (v - e^G U k), A_ij = b_i e^(G_i - G_j) k_i . k_j for j < i, and the
state after it is e^(G_n) U + sum_i e^(G_n - G_i) d_i k_i^T. So a flush needs, a value head, the
matrix W_ij = e^(G_n - G_i) [(I + A)^-1]_ij b_j, the vector e^G and e^(G_n). No exponent is
positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.activation import softplus
from ..common.fold import list_flushes, plane_order, prefetch, thread_order
from ..common.launch import dependents_may_start
from ..common.readout import store_vector


@triton.jit
def rotate_rows(x, sign_ptr, ROWS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """x R for rows [ROWS, KP] in natural order, zero beyond K; signs carry the 1 / sqrt(block)."""
    n = tl.arange(0, KP)[None, :]
    x = x * tl.load(sign_ptr + n, mask=n < K, other=0.0)
    n = tl.broadcast_to(n, [ROWS, KP])
    for stage in tl.static_range(8):
        if K % (2 << stage) == 0:  # the block is the largest power of two that divides K
            other = tl.gather(x, n ^ (1 << stage), 1)
            x = tl.where((n & (1 << stage)) != 0, other - x, x + other)
    return x


@triton.jit
def _store_keys(
    keys, ring_k, ring_rk, sign_ptr, valid, n,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The ring's keys, normalised and rotated, to fp32 rows of K at ``keys``."""
    for j in range(valid):
        k = tl.load(ring_k + j * (HK * K), mask=n < K, other=0.0).to(tl.float32)
        k = k * tl.load(ring_rk + j * HK)
        if ROTATE:
            k = rotate_rows(k, sign_ptr, 1, K, KP)
        tl.store(keys + j * K, k, mask=n < K)


@triton.jit
def halves(x):
    """fp32 as a sum of two fp16 numbers: 22 bits of a value near 1."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _gram(high, low, K: tl.constexpr, LP: tl.constexpr):
    """k_i . k_j of LP fp16 key pairs [LP, K] at ``high`` and ``low``, their places in any order."""
    token = tl.arange(0, LP)[:, None]
    gram = tl.zeros([LP, LP], tl.float32)
    for start in range(0, K, 32):
        n = start + tl.arange(0, 32)[None, :]
        h = tl.load(high + token * K + n)
        lo = tl.load(low + token * K + n)
        gram = tl.dot(h, tl.trans(h), gram)
        gram = tl.dot(lo, tl.trans(h), gram)
        gram = tl.dot(h, tl.trans(lo), gram)
    return gram


@triton.jit
def _solve(gram, g, beta, w_high, w_low, until, total, LP: tl.constexpr):
    """W in two fp16 halves [LP, LP], e^G [LP] and e^(G_n) of one value head, from log decays g."""
    i, j = tl.arange(0, LP)[:, None], tl.arange(0, LP)[None, :]
    wide = g.to(tl.float64)  # differences of long sums lose nothing
    cum = tl.cumsum(wide, 0)
    end = tl.sum(wide, 0)
    gap = tl.where(i > j, cum[:, None] - cum[None, :], 0.0).to(tl.float32)  # masked before exp
    inverse = tl.where(i > j, -gram * tl.exp(gap) * beta[:, None], 0.0)
    for step in range(1, LP):  # row by row: row_i of the inverse from the rows above it
        row = tl.sum(tl.where(i == step, inverse, 0.0), 0, keep_dims=True)
        row += tl.sum(tl.trans(row) * inverse, 0, keep_dims=True)
        inverse = tl.where(i == step, row, inverse)
    inverse += tl.where(i == j, 1.0, 0.0)
    since = tl.exp((end - cum).to(tl.float32))
    high, low = halves(inverse * since[:, None] * beta[None, :])
    tl.store(w_high + i * LP + j, high)
    tl.store(w_low + i * LP + j, low)
    tl.store(until + tl.arange(0, LP), tl.exp(cum.to(tl.float32)))
    tl.store(total, tl.exp(end.to(tl.float32)))


@triton.jit
def _window_system(
    k, i_b, i_k, slot, valid, sign_ptr, ring_k, ring_rk, ring_g, ring_beta, gate, rate,
    high_ptr, low_ptr, w_high_ptr, w_low_ptr, until_ptr, total_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PER: tl.constexpr,
    ROTATE: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Keys of the window (ring and the new key k [1, KP]) and the solved system of each value head.

    ring_k and ring_rk point at the key head's first token, ring_g, ring_beta, gate and rate at the
    first value head.
    """
    n = tl.arange(0, KP)[None, :]
    high = high_ptr + (i_b * HK + i_k) * (2 * LP * KP)
    low = low_ptr + (i_b * HK + i_k) * (2 * LP * KP)
    for j in range(LP):
        key = tl.load(ring_k + j * (HK * K), mask=(n < K) & (j < valid), other=0.0).to(tl.float32)
        key = tl.where(j == valid, k, key * tl.load(ring_rk + j * HK, mask=j < valid, other=0.0))
        if ROTATE:
            key = rotate_rows(key, sign_ptr, 1, K, KP)
        key_high, key_low = halves(key)
        place = thread_order(n, K // 8, KP // 8, WARPS)
        tl.store(high + j * KP + place, key_high)
        tl.store(low + j * KP + place, key_low)
        place = plane_order(n, K // 8, KP // 8)
        tl.store(high + (LP + j) * KP + place, key_high)
        tl.store(low + (LP + j) * KP + place, key_low)
    tl.debug_barrier()  # other lanes read what this program has just written
    gram = _gram(high, low, KP, LP)
    token = tl.arange(0, LP)
    old = token < valid
    for h in range(i_k * PER, i_k * PER + PER):
        g = tl.load(ring_g + token * HV + h, mask=old, other=0.0)
        beta = tl.load(ring_beta + token * HV + h, mask=old, other=0.0)
        g = tl.where(token == valid, tl.load(gate + h), g)
        beta = tl.where(token == valid, tl.load(rate + h), beta)
        of = i_b * HV + h
        _solve(
            gram, g, beta, w_high_ptr + of * (LP * LP), w_low_ptr + of * (LP * LP),
            until_ptr + of * LP, total_ptr + of, LP,
        )  # fmt: skip


@triton.jit
def keys_kernel(
    keys_ptr, sign_ptr, ring_k_ptr, ring_rk_ptr, slot_ptr, valid_ptr,
    ring_k_stride, ring_rk_stride,
    HK: tl.constexpr, K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """keys fp32 [b, HK, L, K] of every row's ring, one program a (row, key head)."""
    i_b, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    if slot < 0:
        return
    n = tl.arange(0, KP)[None, :]
    _store_keys(
        keys_ptr + (i_b * HK + i_k) * (L * K) + n,
        ring_k_ptr + slot * ring_k_stride + i_k * K + n,
        ring_rk_ptr + slot * ring_rk_stride + i_k,
        sign_ptr, tl.load(valid_ptr + i_b), n, HK, K, KP, ROTATE,
    )  # fmt: skip


@triton.jit
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,  # [b, ...], the row strides below
    A_log_ptr, dt_bias_ptr, sign_ptr,  # [HV], [HV], fp32 [K]
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,  # at slot 0
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    list_ptr,  # int32 [b + 1]: count and numbers of the rows that flush
    keys_ptr, query_ptr,  # fp32 [b, HK, L, K], [b, HK, K]
    gate_ptr, rate_ptr,  # fp32 g [b, HV, GW] and beta [b, HV] of the new token
    high_ptr, low_ptr,  # DOT: keys in fp16 halves [b, HK, 2, LP, KP]: thread_order, plane_order
    w_high_ptr, w_low_ptr,  # DOT: fp16 [b, HV, LP, LP]
    until_ptr, total_ptr,  # DOT: fp32 [b, HV, LP], [b, HV]
    c_ptr, top_ptr, w_ptr,  # query int32 [b, HV, K] (store_vector), its max [b, HV], [b, HV, L]
    q_stride, k_stride, v_stride, g_stride, beta_stride,
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    scale, batch,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    ROTATE: tl.constexpr, DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid [b + 1, HK]: the row after the last lists the rows that flush.

    EARLY: programs of the next launch may start.
    """
    if EARLY:
        dependents_may_start()
    i_b, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if i_b == batch:
        if i_k == 0:
            list_flushes(slot_ptr, flush_ptr, list_ptr, batch, L == 1)
        return
    # nothing that can be asked for waits for what was asked before
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = L == 1
    if L > 1:
        flush = tl.load(flush_ptr + i_b).to(tl.int32) != 0
    valid = tl.load(valid_ptr + i_b)
    n = tl.arange(0, KP)[None, :]
    n_ok = n < K
    part = tl.arange(0, PERP)[:, None]
    head = i_k * PER + part
    head_ok = part < PER
    gate = head * GW + n % GW if GW > 1 else head
    gate_ok = head_ok & n_ok if GW > 1 else head_ok
    q = tl.load(q_ptr + i_b * q_stride + i_k * K + n, mask=n_ok, other=0.0).to(tl.float32)
    k_raw = tl.load(k_ptr + i_b * k_stride + i_k * K + n, mask=n_ok, other=0.0)
    k_raw = k_raw.to(ring_k_ptr.dtype.element_ty)
    g = tl.load(g_ptr + i_b * g_stride + gate, mask=gate_ok, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i_b * beta_stride + head, mask=head_ok, other=0.0).to(tl.float32)
    if slot < 0:
        return
    ring_k = ring_k_ptr + slot * ring_k_stride + i_k * K + n
    ring_g = ring_g_ptr + slot * ring_g_stride + gate
    ring_beta = ring_beta_ptr + slot * ring_beta_stride + head
    ring_rk = ring_rk_ptr + slot * ring_rk_stride + i_k
    # the walk takes the ring row by row: fetch the whole window at once (rows beyond it: row 0)
    token = tl.arange(0, LP)
    token = tl.where(token < valid, token, 0)
    LINE: tl.constexpr = 1024 // ring_k_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, KP // LINE if KP > LINE else 1)[None, :] * LINE
    first_k = ring_k_ptr + slot * ring_k_stride + i_k * K
    prefetch(first_k + token[:, None] * (HK * K) + tl.minimum(line, K - 1))
    prefetch(ring_g_ptr + slot * ring_g_stride + token * (HV * GW) + i_k * (PER * GW))
    prefetch(ring_beta_ptr + slot * ring_beta_stride + token * HV + i_k * PER)
    prefetch(ring_rk_ptr + slot * ring_rk_stride + token * HK + i_k)
    if RAW_GATES:
        A_log = tl.load(A_log_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
        g = -tl.exp(A_log) * softplus(g + bias)
        beta = 1.0 / (1.0 + tl.exp(-beta))
        if NEGATIVE:
            beta = beta * 2.0
    k = k_raw.to(tl.float32)
    rk = tl.full([1, 1], 1.0, tl.float32)
    if L2NORM:
        rk = tl.rsqrt(tl.sum(k * k, 1, keep_dims=True) + EPS)
        q = q * tl.rsqrt(tl.sum(q * q, 1, keep_dims=True) + EPS)
    k = k * rk
    q = q * scale

    if flush:
        if ROTATE:
            q = rotate_rows(q, sign_ptr, 1, K, KP)
        tl.store(query_ptr + (i_b * HK + i_k) * K + n, q, mask=n_ok)
        tl.store(gate_ptr + i_b * (HV * GW) + gate, g, mask=gate_ok)
        tl.store(rate_ptr + i_b * HV + head, beta, mask=head_ok)
        if DOT:
            _window_system(
                k, i_b, i_k, slot, valid, sign_ptr, ring_k, ring_rk,
                ring_g_ptr + slot * ring_g_stride, ring_beta_ptr + slot * ring_beta_stride,
                gate_ptr + i_b * HV, rate_ptr + i_b * HV,
                high_ptr, low_ptr, w_high_ptr, w_low_ptr, until_ptr, total_ptr,
                HK, HV, K, KP, PER, ROTATE, LP, WARPS,
            )  # fmt: skip
        else:
            keys = keys_ptr + (i_b * HK + i_k) * (L * K) + n
            _store_keys(keys, ring_k, ring_rk, sign_ptr, valid, n, HK, K, KP, ROTATE)
            if ROTATE:
                k = rotate_rows(k, sign_ptr, 1, K, KP)
            tl.store(keys + valid * K, k, mask=n_ok)
    else:
        tl.store(ring_k + valid * (HK * K), k_raw, mask=n_ok)
        tl.store(ring_g + valid * (HV * GW), g, mask=gate_ok)
        tl.store(ring_beta + valid * HV, beta, mask=head_ok)
        tl.store(ring_rk + valid * HK + tl.zeros([1, 1], tl.int32), rk)
        column = tl.arange(0, VP)[None, :]
        v_ok = head_ok & (column < V)
        v = tl.load(v_ptr + i_b * v_stride + head * V + column, mask=v_ok, other=0.0)
        ring_v = ring_v_ptr + slot * ring_v_stride + valid * (HV * V) + head * V + column
        tl.store(ring_v, v.to(ring_v_ptr.dtype.element_ty), mask=v_ok)

        # the walk: newest token first; the next row of the ring is on its way meanwhile
        row = i_b * HV + head
        weight = w_ptr + row * L
        r = tl.broadcast_to(q, [PERP, KP])
        w = beta * tl.sum(r * k, 1, keep_dims=True)
        tl.store(weight + valid, w, mask=head_ok)
        r = tl.exp(g) * (r - w * k)
        j = valid - 1
        k_next = tl.load(ring_k + j * (HK * K), mask=n_ok & (j >= 0), other=0.0)
        g_next = tl.load(ring_g + j * (HV * GW), mask=gate_ok & (j >= 0), other=0.0)
        beta_next = tl.load(ring_beta + j * HV, mask=head_ok & (j >= 0), other=0.0)
        rk_next = tl.load(ring_rk + j * HK, mask=j >= 0, other=0.0)
        for _ in range(valid):
            k = k_next.to(tl.float32) * rk_next
            g, beta = g_next, beta_next
            i = j - 1
            k_next = tl.load(ring_k + i * (HK * K), mask=n_ok & (i >= 0), other=0.0)
            g_next = tl.load(ring_g + i * (HV * GW), mask=gate_ok & (i >= 0), other=0.0)
            beta_next = tl.load(ring_beta + i * HV, mask=head_ok & (i >= 0), other=0.0)
            rk_next = tl.load(ring_rk + i * HK, mask=i >= 0, other=0.0)
            w = beta * tl.sum(r * k, 1, keep_dims=True)
            tl.store(weight + j, w, mask=head_ok)
            r = tl.exp(g) * (r - w * k)
            j = i
        if ROTATE:
            r = rotate_rows(r, sign_ptr, PERP, K, KP)
        top = tl.max(tl.abs(r), 1, keep_dims=True)
        tl.store(top_ptr + row, top, mask=head_ok)
        inverse = 1.0 / tl.where(top > 0, top, 1.0)
        store_vector(c_ptr + row * K, r, inverse, head_ok, K, KP, OUTPUT, MATRIX)
