"""Everything of a GDN step that does not touch the state: norms, gates, the walk over the window.

One program serves a (row, key head) and its value heads. Rows that do not flush append their input
to the ring and push the query back through the window (``reference``): the result is one weight for
each v and one effective query a value head. Rows that flush leave the window's keys and query,
normalised and rotated, and the gates of the new token, for ``flush``; with DOT also the window's
triangular system, solved. ``step`` does the same for one value head at a time.

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
from ..common.fold import list_flushes, plane_order, thread_order
from ..common.hadamard import rotate_rows
from ..common.launch import dependents_may_start
from ..common.planes import PTX, rounded_product
from ..common.readout import store_vector


@triton.jit
def store_keys(
    keys, ring_k, ring_rk, sign_ptr, valid, n,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The ring's keys, normalised and rotated, to fp32 rows of K at ``keys``."""
    for j in range(valid):
        k = tl.load(ring_k + j * (HK * K), mask=n < K, other=0.0).to(tl.float32)
        k = k * tl.load(ring_rk + j * HK)
        if ROTATE:
            k = rotate_rows(k, sign_ptr, 1, K, KP, True)
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
def _solve(gram, g, beta, used, w_high, w_low, until, total, LP: tl.constexpr):
    """W in two fp16 halves [LP, LP], e^G [LP] and e^(G_n) of one value head, from log decays g.

    g and beta are zero from token ``used`` on.
    """
    i, j = tl.arange(0, LP)[:, None], tl.arange(0, LP)[None, :]
    wide = g.to(tl.float64)  # differences of long sums lose nothing
    cum = tl.cumsum(wide, 0)
    end = tl.sum(wide, 0)
    gap = tl.where(i > j, cum[:, None] - cum[None, :], 0.0).to(tl.float32)  # masked before exp
    inverse = tl.where(i > j, -gram * tl.exp(gap) * beta[:, None], 0.0)
    for step in range(1, used):  # row by row: row_i of the inverse from the rows above it
        row = tl.sum(tl.where(i == step, inverse, 0.0), 0, keep_dims=True)
        # rounded apart: of two products and a sum each kernel would fuse another one
        row += tl.sum(rounded_product(tl.trans(row), inverse), 0, keep_dims=True)
        inverse = tl.where(i == step, row, inverse)
    inverse += tl.where(i == j, 1.0, 0.0)
    since = tl.exp((end - cum).to(tl.float32))
    high, low = halves(rounded_product(inverse * since[:, None], beta[None, :]))
    tl.store(w_high + i * LP + j, high)
    tl.store(w_low + i * LP + j, low)
    tl.store(until + tl.arange(0, LP), tl.exp(cum.to(tl.float32)))
    tl.store(total, tl.exp(end.to(tl.float32)))


@triton.jit
def window_system(
    k, valid, sign_ptr, ring_k, ring_rk, ring_g, ring_beta, gate, rate,
    high, low, w_high, w_low, until, total,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PER: tl.constexpr,
    ROTATE: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr, NEW: tl.constexpr = True,
):  # fmt: skip
    """Keys of the window (ring and the new key k [1, KP]) and the solved system of PER value heads.

    ring_k and ring_rk point at the key head's first token, ring_g, ring_beta, gate and rate at the
    first value head; the rest at what is written for them (``prepare_kernel``). Without NEW the
    window is the ring's alone.
    """
    n = tl.multiple_of(tl.arange(0, KP), 4)[None, :]  # no wider loads: four neighbours a lane
    for start in range(0, LP, 4):
        some = start + tl.arange(0, 4)
        keys = tl.load(
            ring_k + some[:, None] * (HK * K) + n,
            mask=(some < valid)[:, None] & (n < K), other=0.0,
        )  # fmt: skip
        rk = tl.load(ring_rk + some * HK, mask=some < valid, other=0.0)
        keys = keys.to(tl.float32) * rk[:, None]
        if NEW:
            keys = tl.where((some == valid)[:, None], k, keys)
        if ROTATE:
            keys = rotate_rows(keys, sign_ptr, 4, K, KP, True)
        key_high, key_low = halves(keys)
        place = some[:, None] * KP + thread_order(n, K // 8, KP // 8, WARPS)
        tl.store(high + place, key_high)
        tl.store(low + place, key_low)
        place = (LP + some)[:, None] * KP + plane_order(n, K // 8, KP // 8)
        tl.store(high + place, key_high)
        tl.store(low + place, key_low)
    token = tl.arange(0, LP)
    old = token < valid
    tl.debug_barrier()  # other lanes read what this program has just written
    gram = _gram(high, low, KP, LP)
    for h in range(PER):
        g = tl.load(ring_g + token * HV + h, mask=old, other=0.0)
        beta = tl.load(ring_beta + token * HV + h, mask=old, other=0.0)
        used = valid
        if NEW:
            g = tl.where(token == valid, tl.load(gate + h), g)
            beta = tl.where(token == valid, tl.load(rate + h), beta)
            used = valid + 1
        _solve(
            gram, g, beta, used, w_high + h * (LP * LP), w_low + h * (LP * LP),
            until + h * LP, total + h, LP,
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
    store_keys(
        keys_ptr + (i_b * HK + i_k) * (L * K) + n,
        ring_k_ptr + slot * ring_k_stride + i_k * K + n,
        ring_rk_ptr + slot * ring_rk_stride + i_k,
        sign_ptr, tl.load(valid_ptr + i_b), n, HK, K, KP, ROTATE,
    )  # fmt: skip


@triton.jit
def ask_inputs(
    i_b, i_k, first, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
    q_stride, k_stride, g_stride, beta_stride,
    K: tl.constexpr, KP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr,
    RAW_GATES: tl.constexpr,
):  # fmt: skip
    """(q, k [1, KP], g [PERP, 1 or KP], beta, A_log, dt_bias [PERP, 1]) of the new token, of key
    head i_k and PER value heads from ``first`` on; they depend on no slot."""
    n, part = tl.arange(0, KP)[None, :], tl.arange(0, PERP)[:, None]
    n_ok, head, head_ok = n < K, first + part, part < PER
    gate = head * GW + n % GW if GW > 1 else head
    gate_ok = head_ok & n_ok if GW > 1 else head_ok
    q = tl.load(q_ptr + i_b * q_stride + i_k * K + n, mask=n_ok, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + i_b * k_stride + i_k * K + n, mask=n_ok, other=0.0)
    g = tl.load(g_ptr + i_b * g_stride + gate, mask=gate_ok, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i_b * beta_stride + head, mask=head_ok, other=0.0).to(tl.float32)
    A_log = beta * 0.0
    bias = beta * 0.0
    if RAW_GATES:
        A_log = tl.load(A_log_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
    return q, k, g, beta, A_log, bias


@triton.jit
def activate(
    inputs, ring_k_ptr, scale,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """(q, k as the ring keeps it, 1 / |k|, log decay, beta) from ``ask_inputs``; q of norm
    ``scale``."""
    q, k, g, beta, A_log, bias = inputs
    k = k.to(ring_k_ptr.dtype.element_ty)
    if RAW_GATES:
        g = -tl.exp(A_log) * softplus(g + bias)
        beta = 1.0 / (1.0 + tl.exp(-beta))
        if NEGATIVE:
            beta = beta * 2.0
    rk = tl.full([1, 1], 1.0, tl.float32)
    if L2NORM:
        wide = k.to(tl.float32)
        rk = tl.rsqrt(tl.sum(rounded_product(wide, wide), 1, keep_dims=True) + EPS)
        q = q * tl.rsqrt(tl.sum(q * q, 1, keep_dims=True) + EPS)
    return q * scale, k, rk, g, beta


@triton.jit
def _walk(
    q, k, rk, g, beta, valid, ring_k, ring_rk, ring_g, ring_beta, weight, n_ok, head_ok, gate_ok,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PERP: tl.constexpr,
    GW: tl.constexpr,
):  # fmt: skip
    """r [PERP, KP] token by token, for a gate a key channel or keys too short for a product; the
    weights go to ``weight``."""
    k = k.to(tl.float32) * rk
    # the walk: newest token first; the next row of the ring is on its way meanwhile
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
    return r


@triton.jit
def _key_products(keys):
    """k_i . k_j of keys [LP, KP] in fp32; products of 16-bit numbers are exact."""
    if keys.dtype == tl.float32 or not PTX:
        keys = keys.to(tl.float32)
        return tl.dot(keys, tl.trans(keys), input_precision="ieee")
    else:
        return tl.dot(keys, tl.trans(keys))


@triton.jit
def _solve_back(
    q, k, rk_now, g_now, beta_now, valid, ring_k, ring_rk, ring_g, ring_beta, scratch, weight, n,
    head_ok,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
    PER: tl.constexpr, PERP: tl.constexpr,
):  # fmt: skip
    """The walk's r [PERP, KP] and weights by one small system a head, for a gate a head.

    With r = e^(G_n - G_j) p at token j the decays leave the walk: it is p <- p - e_j k_j with raw
    keys k, e_j = b_j / |k_j|^2 (k_j . p), from the newest token back. So the products of the keys
    with q and with each other are enough: t_i = k_i . q - sum_(j > i) (k_i . k_j) e_j. In the end
    w_j = e^(G_n - G_j) |k_j| e_j and r = e^(G_n) (q - sum_j e_j k_j). The bits of a head depend on
    no other: sums over the window are made in turn, or in fp64, where no order shows.
    """
    token = tl.arange(0, LP)
    old, now = token < valid, token == valid
    part = tl.arange(0, PERP)[:, None]
    inside = head_ok & old[None, :]
    at = token[None, :] * HV + part
    keys = tl.load(ring_k + token[:, None] * (HK * K) + n, mask=old[:, None] & (n < K), other=0.0)
    rk = tl.load(ring_rk + token * HK, mask=old, other=0.0)
    g = tl.load(ring_g + at, mask=inside, other=0.0)
    after = tl.load(ring_g + HV + at, mask=head_ok & (token + 1 < valid)[None, :], other=0.0)
    beta = tl.load(ring_beta + at, mask=inside, other=0.0)
    g = tl.where(now[None, :], g_now, g)
    after = tl.where((token + 1 == valid)[None, :], g_now, after)
    beta = tl.where(now[None, :], beta_now, beta)
    keys = tl.where(now[:, None], k, keys)
    rk = tl.where(now, tl.sum(tl.sum(rk_now, 1), 0), rk)[None, :]
    tl.store(scratch + token[:, None] * LP + token[None, :], _key_products(keys))
    wide = keys.to(tl.float32)
    t = tl.broadcast_to(tl.sum(wide * q, 1)[None, :], [PERP, LP])
    tl.debug_barrier()  # other lanes read what this program has just written
    products = ()
    for i in tl.static_range(LP):
        products = products + (tl.load(scratch + i * LP + token)[None, :],)
    rate = beta * rk * rk
    for i in tl.static_range(1, LP):
        e = tl.gather(rate * t, tl.full([PERP, LP], LP - i, tl.int32), 1)
        t = t - tl.where((token < LP - i)[None, :], products[LP - i], 0.0) * e
    after = tl.exp(tl.cumsum(after.to(tl.float64), 1, reverse=True).to(tl.float32))
    whole = tl.exp(tl.sum(g.to(tl.float64), 1, keep_dims=True).to(tl.float32))
    known = head_ok & (token <= valid)[None, :]
    tl.store(weight + token[None, :], after * beta * rk * t, mask=known)
    moved = scratch + LP * LP
    tl.store(moved + part * LP + token[None, :], rate * t, mask=head_ok)
    tl.debug_barrier()
    back = moved + PERP * LP + n
    for h in range(PER):
        mine = tl.load(moved + h * LP + token)
        tl.store(back + h * KP, q - tl.sum(mine[:, None] * wide, 0)[None, :])
    tl.debug_barrier()
    return tl.load(back + part * KP, mask=head_ok, other=0.0) * whole


@triton.jit
def push_back(
    q, k, rk, g, beta, valid,
    ring_k, ring_rk, ring_g, ring_beta,  # at the slot's first token, the key head or first head
    sign_ptr, scratch, c_ptr, top_ptr, w_ptr,  # at the key head or first head; see prepare_kernel
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr,
    LP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The query pushed back through the window, for PER value heads of one key head.

    q, k, rk, g, beta from ``activate``; scratch fp32 [LP, LP] + [PERP, LP] + [PERP, KP].
    """
    n, part = tl.arange(0, KP)[None, :], tl.arange(0, PERP)[:, None]
    n_ok, head_ok = n < K, part < PER
    weight = w_ptr + part * L
    if GW > 1 or KP < 16:
        r = _walk(
            q, k, rk, g, beta, valid, ring_k + n, ring_rk, ring_g + part * GW + n % GW,
            ring_beta + part, weight, n_ok, head_ok, head_ok & n_ok, HK, HV, K, KP, PERP, GW,
        )  # fmt: skip
    else:
        r = _solve_back(
            q, k, rk, g, beta, valid, ring_k, ring_rk, ring_g, ring_beta, scratch, weight, n,
            head_ok, HK, HV, K, KP, LP, PER, PERP,
        )  # fmt: skip
    if ROTATE:
        r = rotate_rows(r, sign_ptr, PERP, K, KP, True)
    top = tl.max(tl.abs(r), 1, keep_dims=True)
    tl.store(top_ptr + part, top, mask=head_ok)
    inverse = 1.0 / tl.where(top > 0, top, 1.0)
    store_vector(c_ptr + part * K, r, inverse, head_ok, K, KP, OUTPUT, MATRIX)


@triton.jit
def append_scalars(
    rk, g, beta, valid, ring_rk, ring_g, ring_beta, of_key, of_head,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PER: tl.constexpr,
    PERP: tl.constexpr, GW: tl.constexpr,
):  # fmt: skip
    """1 / |k| (if of_key), g and beta (if of_head) of the new token into the ring."""
    n, part = tl.arange(0, KP)[None, :], tl.arange(0, PERP)[:, None]
    head_ok = (part < PER) & of_head
    gate = part * GW + n % GW if GW > 1 else part
    gate_ok = head_ok & (n < K) if GW > 1 else head_ok
    tl.store(ring_g + valid * (HV * GW) + gate, g, mask=gate_ok)
    tl.store(ring_beta + valid * HV + part, beta, mask=head_ok)
    one = tl.zeros([1, 1], tl.int32)
    tl.store(ring_rk + valid * HK + one, rk, mask=(one == 0) & of_key)


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
    scratch_ptr,  # see push_back
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
    first = i_k * PER
    head, head_ok = first + part, part < PER
    inputs = ask_inputs(
        i_b, i_k, first, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
        q_stride, k_stride, g_stride, beta_stride, K, KP, PER, PERP, GW, RAW_GATES,
    )  # fmt: skip
    if slot < 0:
        return
    ring_k = ring_k_ptr + slot * ring_k_stride + i_k * K
    ring_rk = ring_rk_ptr + slot * ring_rk_stride + i_k
    q, k, rk, g, beta = activate(inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS)
    if flush:
        key = k.to(tl.float32) * rk
        if ROTATE:
            q = rotate_rows(q, sign_ptr, 1, K, KP, True)
        tl.store(query_ptr + (i_b * HK + i_k) * K + n, q, mask=n_ok)
        gate = head * GW + n % GW if GW > 1 else head
        gate_ok = head_ok & n_ok if GW > 1 else head_ok
        tl.store(gate_ptr + i_b * (HV * GW) + gate, g, mask=gate_ok)
        tl.store(rate_ptr + i_b * HV + head, beta, mask=head_ok)
        if DOT:
            tl.debug_barrier()
            window = (i_b * HK + i_k) * (2 * LP * KP)
            of = i_b * HV + first
            window_system(
                key, valid, sign_ptr, ring_k, ring_rk,
                ring_g_ptr + slot * ring_g_stride + first,
                ring_beta_ptr + slot * ring_beta_stride + first, gate_ptr + of, rate_ptr + of,
                high_ptr + window, low_ptr + window, w_high_ptr + of * (LP * LP),
                w_low_ptr + of * (LP * LP), until_ptr + of * LP, total_ptr + of,
                HK, HV, K, KP, PER, ROTATE, LP, WARPS,
            )  # fmt: skip
        else:
            keys = keys_ptr + (i_b * HK + i_k) * (L * K) + n
            store_keys(keys, ring_k + n, ring_rk, sign_ptr, valid, n, HK, K, KP, ROTATE)
            if ROTATE:
                key = rotate_rows(key, sign_ptr, 1, K, KP, True)
            tl.store(keys + valid * K, key, mask=n_ok)
    else:
        ring_g = ring_g_ptr + slot * ring_g_stride + first * GW
        ring_beta = ring_beta_ptr + slot * ring_beta_stride + first
        tl.store(ring_k + valid * (HK * K) + n, k, mask=n_ok)
        append_scalars(
            rk, g, beta, valid, ring_rk, ring_g, ring_beta, True, True, HK, HV, K, KP, PER, PERP, GW
        )
        column = tl.arange(0, VP)[None, :]
        v_ok = head_ok & (column < V)
        v = tl.load(v_ptr + i_b * v_stride + head * V + column, mask=v_ok, other=0.0)
        ring_v = ring_v_ptr + slot * ring_v_stride + valid * (HV * V) + head * V + column
        tl.store(ring_v, v.to(ring_v_ptr.dtype.element_ty), mask=v_ok)
        row = i_b * HV + first
        push_back(
            q, k, rk, g, beta, valid, ring_k, ring_rk, ring_g, ring_beta, sign_ptr,
            scratch_ptr + (i_b * HK + i_k) * (LP * LP + PERP * (LP + KP)),
            c_ptr + row * K, top_ptr + row, w_ptr + row * L,
            HK, HV, K, L, KP, LP, PER, PERP, GW, OUTPUT, MATRIX, ROTATE,
        )  # fmt: skip
