"""Everything of a GDN step that does not touch the state: norms, gates, the window.

For a row that does not flush a program a key head appends the input to the ring and pushes the
query back through the window (``reference``): the result is one weight for each v and one effective
query a value head (``prepare_kernel``). For a row that flushes, a program a value head makes of the
window what ``flush`` folds (``window_kernel``). ``step`` does either for one value head at a time.

With cumulative log decays G_i the corrections d_i = b_i (v_i - a_i S_{i-1} k_i) of a window over a
checkpoint U obey (I + A) d = b (v - e^G U k), A_ij = b_i e^(G_i - G_j) k_i . k_j for j < i, and the
state after it is e^(G_n) U + sum_i e^(G_n - G_i) d_i k_i^T. So with the matrix
W_ij = e^(G_n - G_i) [(I + A)^-1]_ij b_j a flush needs, a value head, W v, the keys
k'_i = sum_j W_ij e^(G_j) k_j and e^(G_n): the state is e^(G_n) U + sum_i (W v - U k')_i k_i^T. No
exponent is positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.activation import softplus
from ..common.fold import (
    bf16_terms,
    fragment_place,
    in_fragments,
    list_flushes,
    nth_flush,
    plane_order,
    row_place,
    store_fragments,
)
from ..common.hadamard import rotate_rows
from ..common.launch import dependents_may_start
from ..common.matrix import mma
from ..common.planes import PTX, rounded_product
from ..common.readout import store_vector


@triton.jit
def store_keys(
    keys, ring_k, ring_rk, sign_ptr, valid, n,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROTATE: tl.constexpr,
    LANES: tl.constexpr = True,
):  # fmt: skip
    """The ring's keys, normalised and rotated, to fp32 rows of K at ``keys``."""
    for j in range(valid):
        k = tl.load(ring_k + j * (HK * K), mask=n < K, other=0.0).to(tl.float32)
        k = k * tl.load(ring_rk + j * HK)
        if ROTATE:
            k = rotate_rows(k, sign_ptr, 1, K, KP, LANES)
        tl.store(keys + j * K, k, mask=n < K)


@triton.jit
def halves(x):
    """fp32 as a sum of two fp16 numbers: 22 bits of a value near 1."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.constexpr_function
def window_base(rows, lp):
    """Numbers that ``window_head`` leaves of W v: LP for each row, rows in blocks of 64."""
    return (rows + 63) // 64 * 64 * lp


@triton.jit
def _weighted_values(w, v):
    """w [LP, LP] in fp32 times v [LP, M] of a ring, to fp32."""
    if not PTX or v.dtype == tl.float32:
        return tl.dot(w, v.to(tl.float32), input_precision="ieee")
    elif v.dtype == tl.bfloat16:  # products of 16-bit numbers are exact
        terms = bf16_terms(w, 3)
        out = tl.dot(terms[2], v)
        out = tl.dot(terms[1], v, out)
        return tl.dot(terms[0], v, out)
    else:
        high, low = halves(w)
        return tl.dot(high, v, tl.dot(low, v))


@triton.constexpr_function
def _invert_asm(lp):
    """Column $2 of (I - A)^-1, A strictly lower triangular at $1, the inverse behind it; fp32."""
    text = "{ .reg .f32 a<4>; .reg .pred q; .reg .b64 p; mul.wide.s32 p, $2, 4; add.s64 p, p, $1; "
    text += f".reg .f32 x<{lp}>; mov.b32 $0, 0; "
    for r in range(lp):  # from the rows above
        text += f"setp.eq.s32 q, $2, {r}; selp.f32 x{r}, 0f3F800000, 0f00000000, q; "
        for start in range(0, r, 4):
            at = 4 * (r * lp + start)
            text += f"ld.global.v4.f32 {{a0, a1, a2, a3}}, [$1+{at}]; "
            for c in range(start, min(start + 4, r)):
                text += f"fma.rn.f32 x{r}, a{c - start}, x{c}, x{r}; "
        text += f"st.global.f32 [p+{4 * (lp * lp + r * lp)}], x{r}; "
    return text + "}"


@triton.jit
def _invert(base, token, LP: tl.constexpr):
    """(I - A)^-1 of the strictly lower triangular A [LP, LP] at base, to base + LP LP, fp32."""
    if PTX:
        ASM: tl.constexpr = _invert_asm(LP)
        tl.inline_asm_elementwise(
            ASM, "=r,l,r", [base.to(tl.int64), token], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        rows = ()
        for r in tl.static_range(LP):
            row = tl.where(token == r, 1.0, 0.0)
            for c in tl.static_range(r):
                row = tl.fma(tl.load(base + (r * LP + c) + token * 0), rows[c], row)
            rows = rows + (row,)
            tl.store(base + LP * LP + r * LP + token, row)


@triton.jit
def window_head(
    k, rk, g_now, beta_now, v_now, valid, sign_ptr,
    ring_k, ring_rk, ring_v, ring_g, ring_beta,
    left, right, base, total, of_key,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    ROTATE: tl.constexpr, LP: tl.constexpr, NEW: tl.constexpr = True, WARPS: tl.constexpr = 1,
    k_row=None, from_row=0, BLOCKS: tl.constexpr = 0,
):  # fmt: skip
    """What the fold of one value head needs of its window: ``flush._fold_dot``.

    k [1, KP] as the ring keeps it, rk, g_now, beta_now [1, 1] and v_now (pointer) of the new token
    (without NEW there is none); the rings at the slot's first token and the key head or value head.
    Written at left (fp16 [2, LP, KP], ``row_place``), right (fp16 [2, LP, KP], only if of_key),
    base (fp32 ``window_base``, of BLOCKS times 64 rows from ``from_row`` on, 0: all) and total;
    left and base also hold what it passes to itself.
    The bits do not depend on the number of warps; with several, k_row points at k.
    """
    token, n = tl.arange(0, LP), tl.arange(0, KP)
    old, now = token < valid, token == valid
    narrow = tl.multiple_of(n, 4)[None, :]  # no wider loads: four neighbours a lane
    ONCE: tl.constexpr = 4 * WARPS  # keys
    for first in range(0, LP, ONCE):
        some = first + tl.arange(0, ONCE)
        there = some < valid
        of_ring = tl.load(ring_rk + some * HK, mask=there, other=0.0)
        row = ring_k + some * (HK * K)
        if NEW and WARPS > 1:  # no vector beside the tile, whose layout that would become
            row = tl.where(some == valid, k_row, row)
            there = some <= valid
            of_ring = tl.where(some == valid, tl.sum(tl.sum(rk, 1), 0), of_ring)
        keys = tl.load(
            row[:, None] + narrow, mask=there[:, None] & (narrow < K), other=0.0
        ).to(tl.float32)  # fmt: skip
        # products are rounded apart: what a compiler fuses differs from kernel to kernel
        keys = rounded_product(keys, tl.broadcast_to(of_ring[:, None], [ONCE, KP]))
        if NEW and WARPS == 1:
            mine = rounded_product(k.to(tl.float32), tl.broadcast_to(rk, [1, KP]))
            keys = tl.where((some == valid)[:, None], mine, keys)
        if ROTATE:
            keys = rotate_rows(keys, sign_ptr, ONCE, K, KP, True)
        key_high, key_low = halves(keys)
        tl.store(left + some[:, None] * KP + narrow, key_high)
        tl.store(left + LP * KP + some[:, None] * KP + narrow, key_low)
    i, j = token[:, None], token[None, :]
    inside = old[:, None] & (n < K)[None, :]
    raw = tl.load(ring_k + i * (HK * K) + n[None, :], mask=inside, other=0.0)
    scale = tl.load(ring_rk + token * HK, mask=old, other=0.0)
    g = tl.load(ring_g + token * HV, mask=old, other=0.0)
    beta = tl.load(ring_beta + token * HV, mask=old, other=0.0)
    if NEW:
        raw = tl.where(now[:, None], k, raw)
        scale = tl.where(now, tl.sum(tl.sum(rk, 1), 0), scale)
        g = tl.where(now, tl.sum(tl.sum(g_now, 1), 0), g)
        beta = tl.where(now, tl.sum(tl.sum(beta_now, 1), 0), beta)
    wide = g.to(tl.float64)  # differences of long sums lose nothing
    cum = tl.cumsum(wide, 0)
    end = tl.sum(wide, 0)
    gap = tl.where(i > j, cum[:, None] - cum[None, :], 0.0).to(tl.float32)  # masked before exp
    gram = _key_products(raw) * (scale[:, None] * scale[None, :])
    system = tl.where(i > j, -gram * tl.exp(gap) * beta[:, None], 0.0)
    tl.store(base + i * LP + j, system)
    tl.debug_barrier()  # other lanes read what this program has just written
    _invert(base, token, LP)
    tl.debug_barrier()
    inverse = tl.load(base + LP * LP + i * LP + j)
    since = tl.exp((end - cum).to(tl.float32))
    across = tl.broadcast_to(beta[None, :], [LP, LP])
    w = rounded_product(inverse * since[:, None], across)
    across = tl.broadcast_to(-tl.exp(cum.to(tl.float32))[None, :], [LP, LP])
    moved, moved_low = halves(rounded_product(w, across))
    at = left + i * KP + n[None, :]
    high = tl.load(at)
    low = tl.load(at + LP * KP)
    pushed = tl.dot(moved, high)
    pushed = tl.dot(moved_low, high, pushed)
    pushed = tl.dot(moved, low, pushed)
    tl.debug_barrier()  # all of left and base is read
    if of_key:
        if in_fragments(K // 8, 1):
            store_fragments(right, high, n)
            store_fragments(right + LP * KP, low, n)
        elif PTX:
            place = fragment_place(i, n[None, :], K // 8)
            tl.store(right + place, high)
            tl.store(right + LP * KP + place, low)
        else:
            place = i * KP + plane_order(n, K // 8, KP // 8)[None, :]
            tl.store(right + place, high)
            tl.store(right + LP * KP + place, low)
    if K == KP:  # ``row_place`` in one permutation: plane pairs, planes, 4, 4
        pushed = tl.permute(tl.reshape(pushed, (LP, 4, 2, 4, 4)), (0, 1, 3, 2, 4))
        pushed = tl.reshape(pushed, (LP, KP))
        at = left + i * KP + n[None, :]
    else:
        at = left + i * KP + row_place(plane_order(n, K // 8, KP // 8))[None, :]
    high, low = halves(pushed)
    tl.store(at, high)
    tl.store(at + LP * KP, low)
    tl.store(total, tl.exp(end.to(tl.float32)))
    column = tl.arange(0, 64)
    EACH: tl.constexpr = BLOCKS if BLOCKS > 0 else (V + 63) // 64
    for block in range(EACH):
        start = from_row + 64 * block
        row_of = start + column
        there = old[:, None] & (row_of < V)[None, :]
        v = tl.load(ring_v + i * (HV * V) + row_of[None, :], mask=there, other=0.0)
        if NEW:
            new = tl.load(v_now + row_of, mask=row_of < V, other=0.0).to(v.dtype)
            v = tl.where(now[:, None], new[None, :], v)
        x = _weighted_values(w, v)
        # tokens: LP / 8, 4, 2; rows: 4 tiles, 8 pairs, 2 -> tile, eight tokens, pair, 4, 2 rows, 2
        x = tl.reshape(x, (LP // 8, 4, 2, 4, 8, 2))
        x = tl.reshape(tl.permute(x, (3, 0, 4, 1, 5, 2)), (LP * 64,))
        tl.store(base + start * LP + tl.arange(0, LP * 64), x)


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
    """(q, k as the ring keeps it, 1 / |k|, log decay, beta, factor) from ``ask_inputs``; q of norm
    ``scale``, which is ``factor`` [1, 1] times what came in."""
    q, k, g, beta, A_log, bias = inputs
    k = k.to(ring_k_ptr.dtype.element_ty)
    if RAW_GATES:
        g = -tl.exp(A_log) * softplus(g + bias)
        beta = 1.0 / (1.0 + tl.exp(-beta))
        if NEGATIVE:
            beta = beta * 2.0
    rk = tl.full([1, 1], 1.0, tl.float32)
    factor = rk * scale
    if L2NORM:
        wide = k.to(tl.float64)  # where no order of additions shows: the ring keeps this
        rk = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True).to(tl.float32) + EPS)
        factor = tl.rsqrt(tl.sum(q * q, 1, keep_dims=True) + EPS) * scale
    return q * factor, k, rk, g, beta, factor


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
def _walk_back(t, rate, scratch, LP: tl.constexpr, PERP: tl.constexpr):
    """t_i = t_i - sum_(j > i) (k_i . k_j) rate_j t_j of t, rate [PERP, LP], from the newest token
    back; the keys' products with each other [LP, LP] are at ``scratch``."""
    token = tl.arange(0, LP)
    products = ()
    for i in tl.static_range(LP):
        products = products + (tl.load(scratch + i * LP + token)[None, :],)
    for i in tl.static_range(1, LP):
        e = tl.gather(rate * t, tl.full([PERP, LP], LP - i, tl.int32), 1)
        t = t - tl.where((token < LP - i)[None, :], products[LP - i], 0.0) * e
    return t


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
    rate = beta * rk * rk
    t = _walk_back(t, rate, scratch, LP, PERP)
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


@triton.constexpr_function
def _products_asm(kind):
    """Keys times keys and times q, to memory: $52 fp32 [16, 16], and [16] behind it.

    $0-$3 nothing; $4.. the keys' words: tokens 0-7, then 8-15, four chunks of 32 elements each;
    $36.. the words of q in the same way.
    """
    text = "{ .reg .f32 a<4>, b<4>, c<4>; .reg .b32 l, g, q; .reg .b64 p; .reg .pred one; "
    text += "".join(f"mov.f32 {x}{i}, 0f00000000; " for x in "abc" for i in range(4))
    text += "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    for k in range(8):  # sixteen elements each
        low, high = (
            [f"${4 + 16 * half + 4 * (k // 2) + 2 * (k % 2) + w}" for w in range(2)]
            for half in range(2)
        )
        left = (low[0], high[0], low[1], high[1])
        query = [f"${36 + 4 * (k // 2) + 2 * (k % 2) + w}" for w in range(2)]
        for d, right in (("a", low), ("b", high), ("c", query)):
            text += mma(kind, [f"{d}{i}" for i in range(4)], left, right) + " "
    text += "mov.u32 l, %laneid; shr.u32 g, l, 2; and.b32 q, l, 3; setp.eq.u32 one, q, 0; "
    text += "mad.lo.u32 l, g, 8, q; mad.wide.u32 p, l, 8, $52; "
    for row in range(2):
        text += f"st.global.v2.f32 [p+{512 * row}], {{a{2 * row}, a{2 * row + 1}}}; "
        text += f"st.global.v2.f32 [p+{512 * row + 32}], {{b{2 * row}, b{2 * row + 1}}}; "
    text += "mad.wide.u32 p, g, 4, $52; "
    text += "@one st.global.f32 [p+1024], c0; @one st.global.f32 [p+1056], c2; }"
    return text


@triton.constexpr_function
def _pull_asm(per, kind, step):
    """q - sum_j e_j k_j for ``per`` heads: four neighbours of each, of which the rest follows.

    Then q (four neighbours), the new key (two words), where the ring's keys start, where the new
    key lies, where -e [per, 16] does (0 for the new token, whose lies 68 bytes a head on), the
    first neighbour's number and the new token's. step: bytes to the next token.
    """
    first = 4 * per
    ring, new, e, n, valid = (f"${first + i}" for i in (6, 10, 14, 18, 22))
    text = "{ .reg .b32 w<2>, l, last; .reg .f32 k<4>, e<16>; .reg .b64 p, a; .reg .b16 h<2>; "
    # what is not there has e = 0: the last token is read again, or the new one
    text += ".reg .pred any; " + f"setp.gt.s32 any, {valid}, 0; selp.b64 p, {ring}, {new}, any; "
    text += f"sub.s32 last, {valid}, 1; max.s32 last, last, 0; mad.wide.s32 p, {n}, 2, p; "
    text += "".join(f"mov.f32 ${4 * h + i}, ${first + i}; " for h in range(per) for i in range(4))

    def add(places):
        out = ""
        for w in range(2):
            if kind == "bf16":
                out += f"shl.b32 l, w{w}, 16; mov.b32 k{2 * w}, l; "
                out += f"and.b32 l, w{w}, 0xFFFF0000; mov.b32 k{2 * w + 1}, l; "
            else:
                out += f"mov.b32 {{h0, h1}}, w{w}; cvt.f32.f16 k{2 * w}, h0; "
                out += f"cvt.f32.f16 k{2 * w + 1}, h1; "
        for h, at in enumerate(places):
            out += "".join(
                f"fma.rn.f32 ${4 * h + i}, e{at}, k{i}, ${4 * h + i}; " for i in range(4)
            )
        return out

    for j in range(15):
        if j % 4 == 0:
            for h in range(per):
                four = ", ".join(f"e{4 * h + i}" for i in range(4))
                text += f"ld.global.v4.f32 {{{four}}}, [{e}+{64 * h + 4 * j}]; "
        text += f"min.s32 l, last, {j}; mad.wide.s32 a, l, {step}, p; "
        text += "ld.global.v2.b32 {w0, w1}, [a]; "
        text += add([4 * h + j % 4 for h in range(per)])
    padded = 1 if per == 1 else 2 if per == 2 else 4
    text += "".join(f"ld.global.f32 e{h}, [{e}+{68 * padded + 4 * h}]; " for h in range(per))
    text += f"mov.b32 w0, ${first + 4}; mov.b32 w1, ${first + 5}; "
    return text + add(range(per)) + "}"


@triton.constexpr_function
def _pull_constraints(per):
    return ",".join(["=&f"] * (4 * per) + ["f"] * 4 + ["r"] * 2 + ["l"] * 12 + ["r"] * 8)


@triton.jit
def _pull(
    q, k, valid, ring_k, k_row, e, n, STEP: tl.constexpr, PER: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """q - sum_j e_j k_j [1, 128] for PER heads, see ``_pull_asm``."""
    ASM: tl.constexpr = _pull_asm(PER, KIND, STEP)
    CONSTRAINTS: tl.constexpr = _pull_constraints(PER)
    args = (q, k, ring_k.to(tl.int64), k_row.to(tl.int64), e.to(tl.int64), n, valid)
    if PER == 1:
        out = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=tl.float32, is_pure=False, pack=4
        )
        return (out,)
    elif PER == 2:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=(tl.float32, tl.float32), is_pure=False, pack=4
        )
    elif PER == 3:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=(tl.float32, tl.float32, tl.float32), is_pure=False,
            pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, args, dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _solve_words(
    q, k, rk_now, g_now, beta_now, factor, q_row, k_row, valid,
    ring_k, ring_rk, ring_g, ring_beta, scratch, weight, n, head_ok,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, LP: tl.constexpr,
    PER: tl.constexpr, PERP: tl.constexpr,
):  # fmt: skip
    """``_solve_back`` for keys and queries of 16 bits, K = 128 and LP = 16: a tuple of PER r
    [1, 128].

    Words are loaded as ``mma.sync`` takes them, and no product is shared out anew; q_row and k_row
    point at the new token's, whose q is ``factor`` times that.
    """
    token = tl.arange(0, LP)
    old, now = token < valid, token == valid
    part = tl.arange(0, PERP)[:, None]
    inside = head_ok & old[None, :]
    at = token[None, :] * HV + part
    word, eight = tl.arange(0, 16)[None, :], tl.arange(0, 8)[:, None]
    row = ring_k + eight * (HK * K)
    keys = ()
    for half in tl.static_range(2):
        at_row = tl.where(eight + 8 * half == valid, k_row, row + 8 * half * (HK * K))
        at_row = at_row.to(tl.pointer_type(tl.int32)) + word
        for c in tl.static_range(4):
            keys = keys + (tl.load(at_row + 16 * c, mask=eight + 8 * half <= valid, other=0),)
    query = ()
    for c in tl.static_range(4):
        of = q_row.to(tl.pointer_type(tl.int32)) + (eight * 0 + word)
        query = query + (tl.load(of + 16 * c),)
    rk = tl.load(ring_rk + token * HK, mask=old, other=0.0)
    g = tl.load(ring_g + at, mask=inside, other=0.0)
    beta = tl.load(ring_beta + at, mask=inside, other=0.0)
    KIND: tl.constexpr = "bf16" if k.dtype == tl.bfloat16 else "f16"
    ASM: tl.constexpr = _products_asm(KIND)
    tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r" + ",r" * 48 + ",l,l,l,l",
        keys + query + (scratch.to(tl.int64),), dtype=tl.int32, is_pure=False, pack=4,
    )  # fmt: skip
    g = tl.where(now[None, :], g_now, g)
    beta = tl.where(now[None, :], beta_now, beta)
    rk = tl.where(now, tl.sum(tl.sum(rk_now, 1), 0), rk)[None, :]
    tl.debug_barrier()  # other lanes read what this program has just written
    t = tl.load(scratch + LP * LP + token)[None, :] * factor
    t = tl.broadcast_to(t, [PERP, LP])
    rate = beta * rk * rk
    t = _walk_back(t, rate, scratch, LP, PERP)
    wide = g.to(tl.float64)  # where no order of additions shows
    cum = tl.cumsum(wide, 1, reverse=True)
    after = tl.exp((cum - wide).to(tl.float32))
    known = head_ok & (token <= valid)[None, :]
    tl.store(weight + token[None, :], after * beta * rk * t, mask=known)
    moved = scratch + LP * LP + LP
    back = -rate * t  # the new token's apart
    tl.store(moved + part * LP + token[None, :], tl.where(now[None, :], 0.0, back), mask=head_ok)
    mine = moved + PERP * (LP + 1) + part + 0 * token[None, :]
    tl.store(mine, back, mask=head_ok & now[None, :])
    whole = moved + PERP * LP + part + 0 * token[None, :]
    tl.store(whole, tl.exp(cum.to(tl.float32)), mask=head_ok & (token == 0)[None, :])
    tl.debug_barrier()
    pulled = _pull(q, k, valid, ring_k, k_row, moved, n, HK * K * 2, PER, KIND)
    out = ()
    for h in tl.static_range(PER):
        out = out + (pulled[h] * tl.load(moved + PERP * LP + h),)
    return out


@triton.jit
def push_back(
    q, k, rk, g, beta, factor, q_row, k_row, valid,
    ring_k, ring_rk, ring_g, ring_beta,  # at the slot's first token, the key head or first head
    sign_ptr, scratch, c_ptr, top_ptr, w_ptr,  # at the key head or first head; see prepare_kernel
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, L: tl.constexpr, KP: tl.constexpr,
    LP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, ROTATE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The query pushed back through the window, for PER value heads of one key head.

    q, k, rk, g, beta, factor from ``activate``, whose raw q and k are at q_row and k_row; scratch
    fp32 [LP, LP] + [PERP, LP] + [PERP, KP]. WORDS: see ``_solve_words``.
    """
    n, part = tl.arange(0, KP)[None, :], tl.arange(0, PERP)[:, None]
    n_ok, head_ok = n < K, part < PER
    weight = w_ptr + part * L
    if WORDS:
        rs = _solve_words(
            q, k, rk, g, beta, factor, q_row, k_row, valid, ring_k, ring_rk, ring_g, ring_beta,
            scratch, weight, n, head_ok, HK, HV, K, LP, PER, PERP,
        )  # fmt: skip
        one = tl.zeros([1, 1], tl.int32)
        for h in tl.static_range(PER):
            r = rs[h]
            if ROTATE:
                r = rotate_rows(r, sign_ptr, 1, K, KP, True)
            top = tl.max(tl.abs(r), 1, keep_dims=True)
            tl.store(top_ptr + h + one, top)
            inverse = 1.0 / tl.where(top > 0, top, 1.0)
            store_vector(c_ptr + h * K + one, r, inverse, one == 0, K, KP, OUTPUT, MATRIX)
    else:
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
            # between lanes only where no other tile has this shape: [PERP, V] takes its own layout
            r = rotate_rows(r, sign_ptr, PERP, K, KP, PERP == 1)
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


@triton.jit(do_not_specialize_on_alignment=("slot_ptr", "valid_ptr", "flush_ptr"))
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,  # [b, ...], the row strides below
    A_log_ptr, dt_bias_ptr, sign_ptr,  # [HV], [HV], fp32 [K]
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,  # at slot 0
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    scratch_ptr,  # see push_back
    c_ptr, top_ptr, w_ptr,  # query int32 [b, HV, K] (store_vector), its max [b, HV], [b, HV, L]
    q_stride, k_stride, v_stride, g_stride, beta_stride,
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr, GW: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    ROTATE: tl.constexpr, LP: tl.constexpr,
    OUTPUT: tl.constexpr, MATRIX: tl.constexpr, WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid [b, HK], for rows that do not flush: appends to the ring, leaves c, top and w.

    EARLY: programs of the next launch may start.
    """
    if EARLY:
        dependents_may_start()
    i_b, i_k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # nothing that can be asked for waits for what was asked before
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
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
    if (slot < 0) | flush:
        return
    ring_k = ring_k_ptr + slot * ring_k_stride + i_k * K
    ring_rk = ring_rk_ptr + slot * ring_rk_stride + i_k
    q, k, rk, g, beta, factor = activate(
        inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS
    )
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
        q, k, rk, g, beta, factor, q_ptr + i_b * q_stride + i_k * K,
        k_ptr + i_b * k_stride + i_k * K, valid, ring_k, ring_rk, ring_g, ring_beta, sign_ptr,
        scratch_ptr + (i_b * HK + i_k) * (LP * LP + PERP * (LP + KP)),
        c_ptr + row * K, top_ptr + row, w_ptr + row * L,
        HK, HV, K, L, KP, LP, PER, PERP, GW, OUTPUT, MATRIX, ROTATE, WORDS,
    )  # fmt: skip


@triton.jit
def window_of(
    q, k, rk, g, beta, v_now, valid, sign_ptr,
    ring_k, ring_rk, ring_v, ring_g, ring_beta,
    keys, query, gate, rate, left, right, base, total, of_key,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    GW: tl.constexpr, ROTATE: tl.constexpr, DOT: tl.constexpr, LP: tl.constexpr,
    NEW: tl.constexpr, WARPS: tl.constexpr = 1, k_row=None, from_row=0, BLOCKS: tl.constexpr = 0,
):  # fmt: skip
    """All that the fold of one value head needs of its row: window, rotated query, gates.

    Pointers at the (row, head) or its key head, as ``window_kernel`` has them; q, k, rk, g, beta
    from ``activate``, of one head.
    """
    n = tl.arange(0, KP)[None, :]
    n_ok = n < K
    if NEW and of_key:
        turned = q
        if ROTATE:
            turned = rotate_rows(q, sign_ptr, 1, K, KP, WARPS == 1)
        tl.store(query + n, turned, mask=n_ok)
    if DOT:
        window_head(
            k, rk, g, beta, v_now, valid, sign_ptr, ring_k, ring_rk, ring_v, ring_g, ring_beta,
            left, right, base, total, of_key, HK, HV, K, KP, V, ROTATE, LP, NEW, WARPS, k_row,
            from_row, BLOCKS,
        )  # fmt: skip
    else:
        one = tl.zeros([1, 1], tl.int32)
        if NEW:
            at = one + n % GW if GW > 1 else one
            tl.store(gate + at, g, mask=n_ok if GW > 1 else one == 0)
            tl.store(rate + one, beta)
        if of_key:
            store_keys(
                keys + n, ring_k + n, ring_rk, sign_ptr, valid, n, HK, K, KP, ROTATE, WARPS == 1
            )
            if NEW:
                key = k.to(tl.float32) * rk
                if ROTATE:
                    key = rotate_rows(key, sign_ptr, 1, K, KP, WARPS == 1)
                tl.store(keys + valid * K + n, key, mask=n_ok)


@triton.jit(
    do_not_specialize=("batch",),
    do_not_specialize_on_alignment=("slot_ptr", "valid_ptr", "flush_ptr"),
)
def window_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,  # [b, ...], the row strides below
    A_log_ptr, dt_bias_ptr, sign_ptr,  # [HV], [HV], fp32 [K]
    ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,  # at slot 0
    slot_ptr, valid_ptr, flush_ptr,  # [b]
    list_ptr,  # int32 [b + 1]: count and numbers of the rows that flush
    keys_ptr, query_ptr,  # fp32 [b, HK, L, K] (without DOT), [b, HK, K]
    gate_ptr, rate_ptr,  # without DOT: fp32 g [b, HV, GW] and beta [b, HV] of the new token
    left_ptr, right_ptr,  # DOT: fp16 [b, HV, 2, LP, KP], [b, HK, 2, LP, KP], see window_head
    base_ptr, total_ptr,  # DOT: fp32 [b, HV, window_base], [b, HV]
    q_stride, k_stride, v_stride, g_stride, beta_stride,
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    scale, batch,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    KP: tl.constexpr, PER: tl.constexpr, GW: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    ROTATE: tl.constexpr, DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the value heads of the rows that flush; the last lists those."""
    programs = tl.num_programs(0) - 1
    if tl.program_id(0) == programs:
        list_flushes(slot_ptr, flush_ptr, list_ptr, batch, L == 1)
        return
    unit = tl.program_id(0)
    row = nth_flush(slot_ptr, flush_ptr, batch, unit // HV, L == 1)
    while row >= 0:
        i_b = row.to(tl.int64)
        i_h = unit % HV
        i_k = i_h // PER
        slot = tl.load(slot_ptr + i_b).to(tl.int64)
        inputs = ask_inputs(
            i_b, i_k, i_h, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
            q_stride, k_stride, g_stride, beta_stride, K, KP, 1, 1, GW, RAW_GATES,
        )  # fmt: skip
        q, k, rk, g, beta, factor = activate(
            inputs, ring_k_ptr, scale, RAW_GATES, NEGATIVE, L2NORM, EPS
        )
        head, key = i_b * HV + i_h, i_b * HK + i_k
        window_of(
            q, k, rk, g, beta, v_ptr + i_b * v_stride + i_h * V, tl.load(valid_ptr + i_b), sign_ptr,
            ring_k_ptr + slot * ring_k_stride + i_k * K,
            ring_rk_ptr + slot * ring_rk_stride + i_k,
            ring_v_ptr + slot * ring_v_stride + i_h * V,
            ring_g_ptr + slot * ring_g_stride + i_h * GW,
            ring_beta_ptr + slot * ring_beta_stride + i_h,
            keys_ptr + key * (L * K), query_ptr + key * K, gate_ptr + head * GW, rate_ptr + head,
            left_ptr + head * (2 * LP * KP), right_ptr + key * (2 * LP * KP),
            base_ptr + head * window_base(V, LP), total_ptr + head, i_h % PER == 0,
            HK, HV, K, KP, V, GW, ROTATE, DOT, LP, True, WARPS,
            k_ptr + i_b * k_stride + i_k * K,
        )  # fmt: skip
        unit += programs
        row = nth_flush(slot_ptr, flush_ptr, batch, unit // HV, L == 1)
