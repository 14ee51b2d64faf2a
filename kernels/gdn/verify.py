"""GDN verification of draft tokens on Triton. Reference: ``verify_reference.verify_step``.

A step is the fold of committed inputs for the rows that are due (``flush``), then
``verify_prepare_kernel`` (a program a row and key head: norms, gates, the append, and the walk that
pushes the queries of all tokens back through what they see) and ``verify_kernel`` (a program a row
and value head: the copy read once for all tokens). Nothing waits for the device; every result
depends on its row alone.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from ...config import StateConfig
from ...state.cache import VerifyRows
from ...state.layout import StateViews
from ..common.activation import softplus
from ..common.hadamard import rotate_rows
from ..common.keys import settle_keys
from ..common.launch import (
    dependents_may_start,
    early,
    register_limit,
    starts_early,
    wait_for_previous,
)
from ..common.planes import PTX
from ..common.store import check_state_size, launch_warps, plane_arguments, rounding_sizes
from ..common.verify import (
    TOKENS,
    LaunchConfig,
    aligned,
    check_devices,
    copy_product,
    copy_words,
    divisor_up_to,
    fold_and_read,
    in_part,
    output_of,
    query_scratch,
    rotation_signs,
    row_strided,
    seen_dot,
    sees,
    store_vectors,
    takes_matrix,
    window_dot,
    zero_token,
)
from ..common.verify_matrix import (
    QUERY_WORDS,
    add_seen,
    add_tokens,
    append_tokens,
    block_most,
    fetch_codes,
    fetch_tokens,
    lane_token,
    load_queries,
    not_finite,
    odd_sum,
    read_block,
    seen_words,
    store_outputs,
    store_queries,
    store_query,
    unit_queries,
    weight_terms,
    zero_outputs,
    zero_queries,
)
from .flush import flush_run
from .prepare import window_base, window_head
from .reference import NORM_EPS, split_packed
from .triton_ops import _ring_arguments, _sizes, decode_packed, decode_step
from .triton_ops import _run as step
from .triton_ops import launch_for as step_launch
from .verify_reference import check_verify


@triton.jit
def row_of(x, t, i):
    """Row i of x [TOKENS, M] as [1, M]."""
    return tl.sum(tl.where((t == i)[:, None], x, 0.0), 0, keep_dims=True)


@triton.jit
def _products(a, b):
    """a b^T in fp32; products of 16-bit numbers are exact."""
    if PTX and a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, tl.trans(b))
    else:
        wide = tl.trans(b.to(tl.float32))
        return tl.dot(a.to(tl.float32), wide, input_precision="tf32x3")


@triton.jit
def _walk(
    r, k, g, beta, paths, base, count, ring_k, ring_rk, ring_g, ring_beta, weight, n,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, LP: tl.constexpr, GW: tl.constexpr,
):  # fmt: skip
    """The queries r [T, KP] pushed back entry by entry, newest first: for a gate a key channel, or
    rings that ``_solve_paths`` does not take."""
    t = tl.arange(0, TOKENS)
    for back in range(count):
        j = count - 1 - back
        on = tl.max(tl.where((t == j)[:, None] & paths, 1, 0), 0) != 0
        k_j = row_of(k, t, j)
        beta_j = tl.sum(tl.where(t == j, beta, 0.0), 0)
        w = tl.where(on, beta_j * tl.sum(r * k_j, 1), 0.0)
        tl.store(weight + LP + j, w)
        r = tl.where(on[:, None], tl.exp(row_of(g, t, j)) * (r - w[:, None] * k_j), r)
    n_ok = n < K
    k_next = tl.load(ring_k + (base - 1) * (HK * K) + n, mask=n_ok & (base > 0), other=0.0)
    rk_next = tl.load(ring_rk + (base - 1) * HK, mask=base > 0, other=0.0)
    beta_next = tl.load(ring_beta + (base - 1) * HV, mask=base > 0, other=0.0)
    g_ok = n_ok[None, :] & (base > 0) if GW > 1 else tl.full([1, 1], 1, tl.int1) & (base > 0)
    g_next = tl.load(ring_g + (base - 1) * (HV * GW), mask=g_ok, other=0.0)
    for back in range(base):
        j = base - 1 - back
        k_j = (k_next.to(tl.float32) * rk_next)[None, :]
        g_j, beta_j = g_next, beta_next
        i = j - 1  # the next entry is on its way meanwhile
        k_next = tl.load(ring_k + i * (HK * K) + n, mask=n_ok & (i >= 0), other=0.0)
        rk_next = tl.load(ring_rk + i * HK, mask=i >= 0, other=0.0)
        beta_next = tl.load(ring_beta + i * HV, mask=i >= 0, other=0.0)
        g_next = tl.load(ring_g + i * (HV * GW), mask=g_ok & (i >= 0), other=0.0)
        w = beta_j * tl.sum(r * k_j, 1)
        tl.store(weight + j, w)
        r = tl.exp(g_j) * (r - w[:, None] * k_j)
    return r


@triton.jit
def _store_all(
    r, fade, c_ptr, top_ptr, row, sign_ptr,
    K: tl.constexpr, KP: tl.constexpr, ROTATE: tl.constexpr, OUTPUT: tl.constexpr,
    MATRIX: tl.constexpr,
):  # fmt: skip
    """Queries r [T, KP] and their largest magnitudes, times ``fade``, to where reads want them."""
    t = tl.arange(0, TOKENS)
    if ROTATE:
        r = rotate_rows(r, sign_ptr, TOKENS, K, KP)
    if MATRIX:
        r, top = unit_queries(r)
        low, high = tl.split(tl.permute(tl.reshape(r, [TOKENS, 2, 64]), (0, 2, 1)))
        store_queries(c_ptr + row * QUERY_WORDS, low, high, t, t >= 0, OUTPUT)
    else:
        top = store_vectors(c_ptr + row * (K * TOKENS), r, OUTPUT, K, KP)
    tl.store(top_ptr + row * TOKENS + t, top * fade)


@triton.jit
def _solve_paths(
    keys, start, products, strange, base, count, masks_ptr, rate_of_keys, ring_g, ring_beta, weight,
    HV: tl.constexpr, LP: tl.constexpr, LENGTH: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """The queries of all tokens pushed back at once, for one gate a head (``prepare``): what is to
    be taken from them [T, KP], and what the rest is then multiplied with [T]; the weights go to
    ``weight``.

    Entry i of the ring (committed, then the step's own) has a raw key k_i; with e_i = b_i /
    |k_i|^2 t_i of the entries that a token sees, t_i = k_i . q - sum_(j > i) (k_i . k_j) e_j, w_i =
    e^(G_t - G_i) |k_i| e_i and r = e^(G_t) (q - sum_i e_i k_i). start: k . q [T, LP]; products:
    pointer to k_i . k_j [LP, LP], zero unless j < i; keys [LP, KP]; rate_of_keys [LP]: 1 / |k|.
    strange [LP]: a draft that is not finite, with a key taken as zero; what sees it becomes NaN.
    """
    t, entry = tl.arange(0, TOKENS), tl.arange(0, LP)
    new = entry - base
    used = new < count
    old = entry < base
    path_bits = (2 << t) - 1
    if TREE:
        path_bits = tl.load(masks_ptr + t, mask=t < count, other=0)
    bit = (path_bits[:, None] >> tl.where(used & (new > 0), new, 0)[None, :]) & 1
    seen = (old[None, :] | (used[None, :] & (bit != 0))) & (t < count)[:, None]
    beta = tl.load(ring_beta + entry * HV, mask=used, other=0.0)
    strange = strange | ((beta - beta) != 0)
    beta = tl.where(strange, 0.0, beta)
    g = tl.load(ring_g + entry * HV, mask=used, other=0.0)
    later = tl.load(ring_g + (entry + 1) * HV, mask=entry + 1 < base, other=0.0)
    whole = tl.sum(tl.where(old, g, 0.0), 0)
    after = tl.cumsum(later, 0, reverse=True)
    rate = (beta * rate_of_keys * rate_of_keys)[None, :]
    x = tl.where(seen, start * rate, 0.0)  # e
    for i in tl.static_range(LENGTH - 1, 0, -1):
        row = tl.load(products + i * LP + entry[None, :]) * rate
        x = x - row * tl.gather(x, tl.full([TOKENS, LP], i, tl.int32), 1)
        if TREE:  # of a chain, nothing unseen comes before what is seen
            x = tl.where(seen, x, 0.0)
    # decays from the last committed entry to each token, and to each entry of the step
    mine = seen & (old == 0)[None, :]
    path = tl.sum(tl.where(mine, g[None, :], 0.0), 1)
    is_own = (new[None, :] == t[:, None]) & used[None, :]
    path_of = tl.sum(tl.where(is_own, path[:, None], 0.0), 0)
    gap = tl.where(seen, path[:, None] + tl.where(old, after, -path_of)[None, :], 0.0)
    inverse_rate = 1.0 / tl.where(rate_of_keys > 0, rate_of_keys, 1.0)  # |k|
    w = tl.where(seen, tl.exp(gap) * inverse_rate[None, :] * x, 0.0)
    at = weight + t[:, None] * (LP + TOKENS) + tl.where(old, entry, LP + new)[None, :]
    tl.store(at, w, mask=used[None, :] & (t >= 0)[:, None])
    moved = window_dot(tl.trans(keys), tl.trans(x))
    reached = tl.sum(tl.where(seen & strange[None, :], 1, 0), 1) != 0
    return tl.trans(moved), tl.where(reached, float("nan"), tl.exp(path + whole))


@triton.jit
def _some_queries(
    q, q_token, first, count, sign_ptr, moved, of_tokens, c_ptr, top_ptr,
    M: tl.constexpr, K: tl.constexpr, ROTATE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Queries first .. first + M - 1 of ``_rotate_queries``, of which ``count`` are a head."""
    some = first + tl.arange(0, M)
    head, t = some // count, some % count
    m = tl.multiple_of(tl.arange(0, K), 4)[None, :]  # four neighbours a lane
    x = tl.load(q + (t * q_token)[:, None] + m).to(tl.float32)
    x = x * tl.load(of_tokens + t)[:, None]
    x = x - tl.load(moved + ((head * TOKENS + t) * K)[:, None] + m)
    if ROTATE:
        x = rotate_rows(x, sign_ptr, M, K, K, True)
    x, top = unit_queries(x)
    store_query(c_ptr + (head * QUERY_WORDS)[:, None], x, t, OUTPUT)
    tl.store(top_ptr + head * TOKENS + t, top * tl.load(of_tokens + (1 + head) * TOKENS + t))


@triton.jit
def _rotate_queries(
    q, q_token, count, sign_ptr, moved, of_tokens, c_ptr, top_ptr,
    K: tl.constexpr, PER: tl.constexpr, ROTATE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """The queries of ``count`` tokens and PER heads for ``verify_matrix``, four at a time.

    q at the row and key head; moved fp32 [PER, T, K] is taken from them after they are multiplied
    with of_tokens[0]; of_tokens[1 + h] [T] is what the rest counts, and goes to ``top``.
    """
    whole = count * PER // 4 * 4
    for first in range(0, whole, 4):
        _some_queries(
            q, q_token, first, count, sign_ptr, moved, of_tokens, c_ptr, top_ptr,
            4, K, ROTATE, OUTPUT,
        )  # fmt: skip
    for first in range(whole, count * PER):
        _some_queries(
            q, q_token, first, count, sign_ptr, moved, of_tokens, c_ptr, top_ptr,
            1, K, ROTATE, OUTPUT,
        )  # fmt: skip
    t = tl.arange(0, TOKENS)
    for h in tl.static_range(PER):
        zero_queries(c_ptr + h * QUERY_WORDS, count)
        tl.store(top_ptr + h * TOKENS + t, 0.0, mask=t >= count)


@triton.jit
def verify_prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr,  # [b, T, ...], contiguous within a token
    A_log_ptr, dt_bias_ptr, sign_ptr,  # [HV], [HV], fp32 [K]
    ring_k_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr,  # [b]; ancestors [b, T]
    c_ptr, top_ptr, w_ptr,  # queries of [b, HV], fp32 [b, HV, T], fp32 [b, HV, T, LP + T]
    scratch_ptr,  # SOLVE: fp32 [b, HV / PER, LP LP + T (PER (KP + 1) + 2)]
    # FUSED: where rows that flush leave what joins the ring: [b, T, HK, K], [b, T, HV] twice,
    # [b, T, HK]
    new_k_ptr, new_g_ptr, new_beta_ptr, new_rk_ptr,
    q_stride, q_token, k_stride, k_token, g_stride, g_token, beta_stride, beta_token,
    ring_k_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    scale, width,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
    LENGTH: tl.constexpr, GW: tl.constexpr, SOLVE: tl.constexpr,
    RAW_GATES: tl.constexpr, NEGATIVE: tl.constexpr, L2NORM: tl.constexpr, EPS: tl.constexpr,
    ROTATE: tl.constexpr, TREE: tl.constexpr, OUTPUT: tl.constexpr, MATRIX: tl.constexpr,
    EARLY: tl.constexpr, PART: tl.constexpr, FUSED: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """What does not touch the state, of PER value heads of a key head and row; appends all but v.

    Pushes the queries of all tokens back through what each sees. The result is a query of the copy
    for each token, divided by its largest magnitude (``top``), and the weights of the committed v
    (entries below ``base``), then of the step's own. EARLY: programs of the next launch may start.
    FUSED: the launch before, ``verify_window_kernel``, may still read what rows that flush hold, so
    those append elsewhere, and no program ends before that launch has.
    """
    if EARLY:
        dependents_may_start()
    i_k, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    if (slot < 0) | (count <= 0) | (in_part(slot, flush, PART) == 0):
        if FUSED and EARLY:
            wait_for_previous()
        return
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    t, n = tl.arange(0, TOKENS), tl.arange(0, KP)
    n_ok, t_ok = (n < K)[None, :], t < count
    _, paths = sees(t, 0, count, ancestors_ptr + i_b * width, TREE)
    ok = t_ok[:, None] & n_ok
    q = q_ptr + i_b * q_stride + t[:, None] * q_token + i_k * K + n[None, :]
    q_raw = tl.load(q, mask=ok, other=0.0)
    q = q_raw.to(tl.float32)
    q_scale = tl.full([TOKENS], scale, tl.float32)
    k = k_ptr + i_b * k_stride + t[:, None] * k_token + i_k * K + n[None, :]
    k = tl.load(k, mask=ok, other=0.0).to(ring_k_ptr.dtype.element_ty)
    ring_k = ring_k_ptr + slot * ring_k_stride
    ring_rk = ring_rk_ptr + slot * ring_rk_stride
    ring_g_of = ring_g_ptr + slot * ring_g_stride
    ring_beta_of = ring_beta_ptr + slot * ring_beta_stride
    if FUSED:
        if flush != 0:
            ring_k = new_k_ptr + i_b * (TOKENS * HK * K)
            ring_rk = new_rk_ptr + i_b * (TOKENS * HK)
            ring_g_of = new_g_ptr + i_b * (TOKENS * HV)
            ring_beta_of = new_beta_ptr + i_b * (TOKENS * HV)
    ring_k += i_k * K
    ring_rk += i_k
    tl.store(ring_k + (base + t)[:, None] * (HK * K) + n[None, :], k, mask=ok)
    k = k.to(tl.float32)
    squares = tl.sum(k * k, 1)
    rk = tl.full([TOKENS], 1.0, tl.float32)
    if L2NORM:
        rk = tl.rsqrt(squares + EPS)
        q_scale = q_scale * tl.rsqrt(tl.sum(q * q, 1) + EPS)
    tl.store(ring_rk + (base + t) * HK, rk, mask=t_ok)
    PARTS: tl.constexpr = HV // HK // PER
    first = (i_k * PARTS + tl.program_id(2)) * PER
    for h in range(PER):
        head = first + h
        beta = tl.load(beta_ptr + i_b * beta_stride + t * beta_token + head, mask=t_ok, other=0.0)
        beta = beta.to(tl.float32)
        gate = n[None, :] % GW
        g_ok = ok if GW > 1 else t_ok[:, None]
        if GW == 1:
            gate = tl.zeros([1, 1], tl.int32)
        g = g_ptr + i_b * g_stride + t[:, None] * g_token + head * GW + gate
        g = tl.load(g, mask=g_ok, other=0.0).to(tl.float32)
        if RAW_GATES:
            bias = tl.load(dt_bias_ptr + head).to(tl.float32)
            g = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * softplus(g + bias)
            beta = 1.0 / (1.0 + tl.exp(-beta))
            if NEGATIVE:
                beta = beta * 2.0
        ring_g = ring_g_of + head * GW + gate
        ring_beta = ring_beta_of + head
        tl.store(ring_g + (base + t)[:, None] * (HV * GW), g, mask=g_ok)
        tl.store(ring_beta + (base + t) * HV, beta, mask=t_ok)
        if not SOLVE:
            row = i_b * HV + head
            r = _walk(
                q * q_scale[:, None], k * rk[:, None], g, beta, paths, base, count,
                ring_k, ring_rk, ring_g, ring_beta,
                w_ptr + (row * TOKENS + t) * (LP + TOKENS), n, HK, HV, K, LP, GW,
            )  # fmt: skip
            _store_all(r, 1.0, c_ptr, top_ptr, row, sign_ptr, K, KP, ROTATE, OUTPUT, MATRIX)
    if SOLVE:
        scratch = scratch_ptr + (i_b * HV + first) // PER * (
            LP * LP + TOKENS * (PER * (KP + 1) + 2)
        )
        of_tokens = scratch + LP * LP + TOKENS * PER * KP
        tl.store(of_tokens + t, squares)
        tl.store(of_tokens + TOKENS + t, q_scale)
        tl.debug_barrier()  # other lanes read what this program has just written, here and below
        entry = tl.arange(0, LP)
        new = entry - base
        used = new < count
        squares = tl.load(of_tokens + new, mask=used & (new >= 0), other=0.0)
        strange = (squares - squares) != 0  # keys that are taken as zero
        keys = tl.load(
            ring_k + entry[:, None] * (HK * K) + n[None, :],
            mask=(used & (strange == 0))[:, None] & n_ok, other=0.0,
        )  # fmt: skip
        rate_of_keys = tl.load(ring_rk + entry * HK, mask=used & (strange == 0), other=0.0)
        gram = tl.where(entry[None, :] < entry[:, None], _products(keys, keys), 0.0)
        tl.store(scratch + entry[:, None] * LP + entry[None, :], gram)
        start = tl.trans(_products(keys, q_raw)) * q_scale[:, None]
        for h in range(PER):
            head = first + h
            row = i_b * HV + head
            tl.debug_barrier()
            moved, fade = _solve_paths(
                keys, start, scratch, strange, base, count, ancestors_ptr + i_b * width,
                rate_of_keys, ring_g_of + head, ring_beta_of + head,
                w_ptr + row * (TOKENS * (LP + TOKENS)), HV, LP, LENGTH, TREE,
            )  # fmt: skip
            if MATRIX:
                at = scratch + LP * LP + h * (TOKENS * KP)
                tl.store(at + t[:, None] * KP + n[None, :], moved)
                tl.store(of_tokens + (2 + h) * TOKENS + t, fade)
            else:
                r = q_raw.to(tl.float32) * q_scale[:, None] - moved
                _store_all(r, fade, c_ptr, top_ptr, row, sign_ptr, K, KP, ROTATE, OUTPUT, MATRIX)
        if MATRIX:
            tl.debug_barrier()
            _rotate_queries(
                q_ptr + i_b * q_stride + i_k * K, q_token, count, sign_ptr, scratch + LP * LP,
                of_tokens + TOKENS, c_ptr + (i_b * HV + first) * QUERY_WORDS,
                top_ptr + (i_b * HV + first) * TOKENS, K, PER, ROTATE, OUTPUT,
            )  # fmt: skip
    if FUSED and EARLY:
        wait_for_previous()


@triton.jit
def verify_window_kernel(
    sign_ptr, ring_k_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,
    slot_ptr, valid_ptr, flush_ptr,
    left_ptr, right_ptr, base_ptr, total_ptr,  # see prepare.window_kernel
    ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    LPF: tl.constexpr, ROTATE: tl.constexpr, EARLY: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """What the fold of a value head needs of the committed inputs, one program a head and row.

    EARLY: programs of the next launch may start.
    """
    if EARLY:
        dependents_may_start()
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    if (slot < 0) | (flush == 0):
        return
    i_k = i_h // (HV // HK)
    head, key = i_b * HV + i_h, i_b * HK + i_k
    none = tl.zeros([1, 1], tl.float32)
    window_head(
        none, none, none, none, ring_v_ptr, tl.load(valid_ptr + i_b), sign_ptr,
        ring_k_ptr + slot * ring_k_stride + i_k * K,
        ring_rk_ptr + slot * ring_rk_stride + i_k,
        ring_v_ptr + slot * ring_v_stride + i_h * V,
        ring_g_ptr + slot * ring_g_stride + i_h,
        ring_beta_ptr + slot * ring_beta_stride + i_h,
        left_ptr + head * (2 * LPF * KP), right_ptr + key * (2 * LPF * KP),
        base_ptr + head * window_base(V, LPF), total_ptr + head, i_h % (HV // HK) == 0,
        HK, HV, K, KP, V, ROTATE, LPF, False, WARPS,
    )  # fmt: skip


@triton.jit
def verify_kernel(
    v_ptr, y_ptr,  # [b, T, HV, V]
    c_ptr, top_ptr, w_ptr,  # see verify_prepare_kernel
    ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    v_stride, v_token, y_stride, y_token,
    ring_v_stride, copy_stride, copy_scale_stride, copy_tile_stride, width,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr,
    TILES: tl.constexpr, OUTPUT: tl.constexpr, TREE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A block of ROWS rows of a value head of one row: y, and v joins the ring. Padding: zeros."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    if in_part(slot, flush, PART) == 0:
        return
    t = tl.arange(0, TOKENS)
    row = i_v * ROWS + tl.arange(0, ROWS)
    ok = row < V
    y = y_ptr + i_b * y_stride + i_h * V + row[:, None] + t[None, :] * y_token
    out_ok = ok[:, None] & (t < width)[None, :]
    if (slot < 0) | (count <= 0):
        tl.store(y, tl.zeros([ROWS, TOKENS], y_ptr.dtype.element_ty), mask=out_ok)
        return
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    copy = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
    words = copy_words(copy, row, ok, K, OUTPUT)
    entry, own = tl.arange(0, LP), tl.arange(0, 16)
    ring_v = ring_v_ptr + slot * ring_v_stride + i_h * V + row[:, None]
    past_ok = (entry < base)[None, :] & ok[:, None]
    past = tl.load(ring_v + entry[None, :] * (HV * V), mask=past_ok, other=0.0)
    own_ok = (own < count)[None, :] & ok[:, None]
    v_in = v_ptr + i_b * v_stride + i_h * V + row[:, None] + own[None, :] * v_token
    now = tl.load(v_in, mask=own_ok, other=0.0).to(ring_v_ptr.dtype.element_ty)
    tl.store(ring_v + (base + own)[None, :] * (HV * V), now, mask=own_ok)
    head = i_b * HV + i_h
    w = w_ptr + (head * TOKENS + t[None, :]) * (LP + TOKENS)
    w_past = tl.load(w + entry[:, None], mask=(entry < base)[:, None], other=0.0)
    w_now = tl.load(w + LP + own[:, None], mask=(own < count)[:, None], other=0.0)
    read = copy_product(
        words, copy, copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
        copy_tile_ptr + slot * copy_tile_stride + i_h * TILES,
        c_ptr + head * (K * TOKENS), row, ok, K, KP, OUTPUT,
    )  # fmt: skip
    out = read * tl.load(top_ptr + head * TOKENS + t)[None, :] + window_dot(past, w_past)
    seen, _ = sees(own, 0, count, ancestors_ptr + i_b * width, TREE)
    out += seen_dot(now, w_now, seen)
    out = tl.where((t < count)[None, :], out, 0.0)
    tl.store(y, out.to(y_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _weights(w, first: tl.constexpr, last, COUNT: tl.constexpr, LP: tl.constexpr):
    """Words of the weights of COUNT (8 or 16) inputs from entry ``first`` on, below ``last``."""
    g, q = lane_token()
    out = ()
    for i in tl.static_range(COUNT // 4):
        e = first + i * 4 + q
        out = out + (tl.load(w + g * (LP + TOKENS) + e, mask=(e < last) & (g >= 0), other=0.0),)
    high, low = weight_terms(out[0], out[1])
    if COUNT == 8:
        return high, low
    else:
        high_next, low_next = weight_terms(out[2], out[3])
        return high, high_next, low, low_next


@triton.jit
def _fetch(
    code, scale, tile, ring, v, k: tl.constexpr, base, count, v_token,
    HV: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Everything of block k that waits for nothing: codes, scales, committed and new inputs."""
    codes, scales = fetch_codes(code, scale, tile, k * ROWS, ROWS, OUTPUT)
    past = fetch_tokens(ring, HV * V, k * ROWS, 0, base, ROWS, 16)
    now = fetch_tokens(v, v_token, k * ROWS, 0, count, ROWS, TOKENS)
    return codes, scales, past, now


@triton.jit
def _verify_again(
    v, y, ring, masks, code, scale, tile, c_ptr, top, w, base, count, width, v_token, y_token,
    HV: tl.constexpr, V: tl.constexpr, LP: tl.constexpr, BLOCKS: tl.constexpr,
    OUTPUT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """y of ``_verify_unit`` where something is not finite, which then reaches the tokens that see
    it and no others: BLOCKS times sixteen rows, in a loop that stays one (see Mamba-2's)."""
    c = load_queries(c_ptr)
    even_token = top + tl.arange(0, 32) % 4 * 2
    even, odd = tl.load(even_token), tl.load(even_token + 1)
    w_now = _weights(w, LP, LP + count, TOKENS, LP)
    seen = seen_words(count, masks, TREE)
    for k in range(BLOCKS):
        codes, scales = fetch_codes(code, scale, tile, k * 16, 16, OUTPUT)
        y0, y1 = read_block(codes, scales, c, even, odd, 16, OUTPUT)
        for more in tl.static_range(LP // 16):
            if base > more * 16:
                past = fetch_tokens(ring, HV * V, k * 16, more * 16, base, 16, 16)
                y0, y1 = add_tokens(y0, y1, past, _weights(w, more * 16, base, 16, LP), 16)
        now = fetch_tokens(v, v_token, k * 16, 0, count, 16, TOKENS)
        y0, y1 = add_seen(y0, y1, now, w_now, seen, count, 16)
        store_outputs(y, y_token, k * 16, y0, y1, width, 16)


@triton.jit
def _verify_unit(
    v, y, ring, code, scale, tile, c_ptr, top, w, base, count, width, v_token, y_token,
    HV: tl.constexpr, V: tl.constexpr, LP: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, OUTPUT: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of BLOCKS blocks from the rows that the pointers are at; v joins the ring.

    Returns whether something was not finite; if so, the result of ``_verify_again`` is right.
    """
    codes, scales, past, now = _fetch(
        code, scale, tile, ring, v, 0, base, count, v_token, HV, V, ROWS, OUTPUT
    )
    if EARLY:
        wait_for_previous()
    c = load_queries(c_ptr)
    even_token = top + tl.arange(0, 32) % 4 * 2
    even, odd = tl.load(even_token), tl.load(even_token + 1)
    w_past = _weights(w, 0, base, 16, LP)
    w_now = _weights(w, LP, LP + count, TOKENS, LP)
    strange = tl.zeros([8, 4], tl.float32)
    for k in tl.static_range(BLOCKS):
        if k > 0 and not AHEAD:
            codes, scales, past, now = _fetch(
                code, scale, tile, ring, v, k, base, count, v_token, HV, V, ROWS, OUTPUT
            )
        if AHEAD and k + 1 < BLOCKS:  # the next block is on its way meanwhile
            codes_next, scales_next, past_next, now_next = _fetch(
                code, scale, tile, ring, v, k + 1, base, count, v_token, HV, V, ROWS, OUTPUT
            )
        y0, y1 = read_block(codes, scales, c, even, odd, ROWS, OUTPUT)
        y0, y1 = add_tokens(y0, y1, past, w_past, ROWS)
        for more in tl.static_range(1, LP // 16):
            if base > more * 16:
                rest = fetch_tokens(ring, HV * V, k * ROWS, more * 16, base, ROWS, 16)
                y0, y1 = add_tokens(y0, y1, rest, _weights(w, more * 16, base, 16, LP), ROWS)
        y0, y1 = add_tokens(y0, y1, now, w_now, ROWS)
        append_tokens(ring, HV * V, k * ROWS, base, count, now, ROWS, TOKENS)
        strange += odd_sum(y0, y1)
        store_outputs(y, y_token, k * ROWS, y0, y1, width, ROWS)
        if AHEAD and k + 1 < BLOCKS:
            codes, scales, past, now = codes_next, scales_next, past_next, now_next
    return not_finite(strange)


@triton.jit
def _append_new(
    first_ptr, second_ptr, first_ring, second_ring, i_b, i_h, mine, count,
    H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """K numbers and one number of head i_h of each new token to the front of a slot's rings.

    From [b, T, H, K] and [b, T, H], if ``mine``.
    """
    t, n = tl.arange(0, TOKENS), tl.arange(0, K)
    ok = (t < count) & mine
    at = (t * H + i_h)[:, None] * K + n[None, :]
    x = tl.load(first_ptr + i_b * (TOKENS * H * K) + at, mask=ok[:, None] & (n >= 0)[None, :])
    tl.store(first_ring + at, x, mask=ok[:, None] & (n >= 0)[None, :])
    x = tl.load(second_ptr + i_b * (TOKENS * H) + t * H + i_h, mask=ok)
    tl.store(second_ring + t * H + i_h, x, mask=ok)


@triton.jit(do_not_specialize=("layer", "head_offset"))
def verify_matrix_kernel(
    v_ptr, y_ptr, c_ptr, top_ptr, w_ptr,  # as verify_kernel
    ring_v_ptr, slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    # FUSED: what joins the ring of rows that flush, and what flush.flush_kernel takes
    new_k_ptr, new_g_ptr, new_beta_ptr, new_rk_ptr,
    ring_k_ptr, ring_g_ptr, ring_beta_ptr, ring_rk_ptr,
    position_ptr, key_ptr, left_ptr, right_ptr, base_ptr, total_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr,
    v_stride, v_token, y_stride, y_token,
    ring_v_stride, ring_k_stride, ring_g_stride, ring_beta_stride, ring_rk_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    code_stride, low_stride, scale_stride, tile_stride, width, layer, head_offset,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, TREE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PART: tl.constexpr,
    FUSED: tl.constexpr, LPF: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of ROWS rows of a value head of one row.

    Where something is not finite the work is done again, with an eye to which token sees it. AHEAD:
    a block is loaded while the one before is worked on. EARLY: the launch before may still run.
    FUSED: if the row flushes, its rows are folded first.
    """
    unit = tl.program_id(0)
    SPAN: tl.constexpr = ROWS * BLOCKS
    PARTS: tl.constexpr = V // SPAN
    i_v, i_h, i_b = unit % PARTS, unit // PARTS % HV, (unit // (PARTS * HV)).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    row, head = i_h * V + i_v * SPAN, i_b * HV + i_h
    v = v_ptr + i_b * v_stride + row
    y = y_ptr + i_b * y_stride + row
    ring = ring_v_ptr + slot * ring_v_stride + row
    code = copy_ptr + slot * copy_stride + i_h * COPY_HEAD + i_v * (COPY_HEAD // PARTS)
    scale = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
    scale += i_v * (COPY_SCALE_HEAD // PARTS)
    tile = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES + i_v * (SPAN // 16)
    masks = ancestors_ptr + i_b * width
    c = c_ptr + head * QUERY_WORDS
    top = top_ptr + head * TOKENS
    w = w_ptr + head * ((LP + TOKENS) * TOKENS)
    if FUSED:
        if (slot >= 0) & (flush != 0):
            if EARLY:
                wait_for_previous()
            PER: tl.constexpr = HV // HK
            if (i_v == 0) & (count > 0):
                _append_new(
                    new_k_ptr, new_rk_ptr, ring_k_ptr + slot * ring_k_stride,
                    ring_rk_ptr + slot * ring_rk_stride, i_b, i_h // PER, i_h % PER == 0, count,
                    HK, K,
                )  # fmt: skip
                _append_new(
                    new_g_ptr, new_beta_ptr, ring_g_ptr + slot * ring_g_stride,
                    ring_beta_ptr + slot * ring_beta_stride, i_b, i_h, True, count, HV, 1,
                )  # fmt: skip
            flush_run(
                i_b, i_h * TILES + i_v * (SPAN // 16), i_h * TILES + (i_v + 1) * (SPAN // 16) - 1,
                v_ptr, v_ptr, v_ptr, v_ptr, v_ptr, left_ptr, right_ptr, base_ptr, total_ptr,
                ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot_ptr, valid_ptr, position_ptr, key_ptr,
                y_ptr, code_ptr, low_ptr, scale_ptr, tile_ptr,
                copy_ptr, copy_scale_ptr, copy_tile_ptr,
                v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
                code_stride, low_stride, scale_stride, tile_stride,
                copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
                HK, HV, K, V, 0, K // 8, PER, 1,
                CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
                UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, True, LPF, WARPS, False,
            )  # fmt: skip
            tl.debug_barrier()  # other lanes read what this program has just written
    if in_part(slot, flush, PART) == 0:
        if EARLY:
            wait_for_previous()
    elif (slot < 0) | (count <= 0):
        if EARLY:
            wait_for_previous()
        zero_outputs(y, y_token, width, SPAN)
    else:
        strange = _verify_unit(
            v, y, ring, code, scale, tile, c, top, w, base, count, width,
            v_token, y_token, HV, V, LP, ROWS, BLOCKS, OUTPUT, AHEAD, EARLY,
        )  # fmt: skip
        if strange:
            _verify_again(
                v, y, ring, masks, code, scale, tile, c, top, w, base, count, width,
                v_token, y_token, HV, V, LP, SPAN // 16, OUTPUT, TREE,
            )  # fmt: skip


WINDOW_WARPS = 4
"""Of a program that makes a window: one would need more registers than a thread has."""

LAUNCH: tuple[tuple[int, LaunchConfig], ...] = (
    (1, LaunchConfig(heads=1)),
    (16, LaunchConfig(heads=8)),
)
"""(smallest batch, launch configuration), ascending. Mamba-2's choice; few sequences leave
room for a program a value head."""


def launch_for(batch: int) -> LaunchConfig:
    """What ``LAUNCH`` says for a batch."""
    return [c for least, c in LAUNCH if least <= max(batch, 1)][-1]


def fold_committed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    y: torch.Tensor,
    *,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    launch: LaunchConfig,
) -> None:
    """Fold the committed inputs of the rows that flush, with a token that changes nothing.

    Its g and beta are 0. y [b, HV, V] takes what it would read.
    """
    size = _sizes(views)
    assert views.ring_v is not None and views.ring_g is not None
    ring, batch = views.ring_v, rows.slots.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = ring.dtype) -> torch.Tensor:
        return zero_token(shape, dtype, ring.device).expand(batch, *(-1,) * len(shape))

    k, v = zeros(size["HK"], size["K"]), zeros(size["HV"], size["V"])
    g = zeros(*views.ring_g.shape[2:], dtype=torch.float32)
    beta = zeros(size["HV"], dtype=torch.float32)
    folding = dataclasses.replace(
        step_launch(config, batch), flush=launch.flush, flush_registers=launch.flush_registers
    )
    step(
        y, views, config, rows.folding(), k, k, v, g, beta, None, None, 1.0, l2norm, False,
        layer, head_offset, folding, readout=False,
    )  # fmt: skip


def _run(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    inputs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float | None,
    l2norm: bool,
    negative: bool,
    y: torch.Tensor,
    where: dict[str, int],
    launch: LaunchConfig | None,
) -> torch.Tensor:
    """A step of T > 1 tokens; g and beta are raw projections with ``weights``."""
    names = ("q", "k", "v", "g", "beta")
    q, k, v, g, beta = (row_strided(name, t) for name, t in zip(names, inputs, strict=True))
    assert views.ring_g is not None and views.ring_v is not None
    size, device = _sizes(views), views.ckpt.device
    batch, width = q.shape[:2]
    if batch == 0:
        return y
    hk, hv, n, values, length = size.values()
    check_state_size(values, n)
    padded, lp = max(16, triton.next_power_of_2(n)), max(16, triton.next_power_of_2(length))
    planes, sizes = plane_arguments(views, config)
    output, chosen = sizes["OUTPUT"], launch or launch_for(batch)
    matrix = takes_matrix(views, output, values, n, v) and aligned(y) and y.dtype == v.dtype
    start = matrix and starts_early(device)
    top = torch.empty(batch, hv, TOKENS.value, device=device)
    A_log, dt_bias = (top, top) if weights is None else weights
    gate_width = views.ring_g.shape[3]
    common = {
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "count_ptr": rows.count,
        "ancestors_ptr": rows.count if rows.ancestors is None else rows.ancestors,
        "c_ptr": query_scratch(batch, hv, n, output, matrix, device), "top_ptr": top,
        "w_ptr": torch.empty(batch, hv, TOKENS.value, lp + TOKENS.value, device=device),
        "width": width, "HV": hv, "K": n, "LP": lp, "OUTPUT": output,
        "TREE": rows.ancestors is not None,
    }  # fmt: skip
    solve = bool(chosen.solve) and gate_width == 1 and lp <= 32 and n >= 16
    per = divisor_up_to(hv // hk, chosen.heads)  # of a program that prepares
    owned = lp * lp + TOKENS.value * (per * (padded + 1) + 2)
    room = batch * hv // per * owned if solve else 1
    scratch = torch.empty(room, device=device)
    steps = {
        f"{name}_{of}": stride
        for name, x in (("q", q), ("k", k), ("g", g), ("beta", beta))
        for of, stride in (("stride", x.stride(0)), ("token", x.stride(1)))
    }
    copies = ("copy", "copy_scale", "copy_tile")
    reading = {
        "ring_v_ptr": views.ring_v, "ring_v_stride": views.ring_v.stride(0),
        "v_stride": v.stride(0), "v_token": v.stride(1), "y_stride": y.stride(0),
        "y_token": y.stride(1), "V": values, **common,
        **{name + end: planes[name + end] for name in copies for end in ("_ptr", "_stride")},
        **{s: sizes[s] for s in ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES")},
    }  # fmt: skip
    lpf = max(16, triton.next_power_of_2(length - 1))  # of committed inputs
    # fp16 halves need keys of norm 1
    fused = matrix and solve and l2norm and lpf <= 32 and bool(chosen.fused)
    late = {f"new_{name}_ptr": top for name in ("k", "g", "beta", "rk")}
    window = {f"{name}_ptr": top for name in ("left", "right", "base", "total")}
    if fused:
        new = (batch, TOKENS.value)
        late["new_k_ptr"] = torch.empty(*new, hk, n, dtype=views.ring_k.dtype, device=device)
        late["new_rk_ptr"] = torch.empty(*new, hk, device=device)
        for name in ("g", "beta"):
            late[f"new_{name}_ptr"] = torch.empty(*new, hv, device=device)
        half = {"dtype": torch.float16, "device": device}
        window["left_ptr"] = torch.empty(batch, hv, 2, lpf, n, **half)
        window["right_ptr"] = torch.empty(batch, hk, 2, lpf, n, **half)
        window["base_ptr"] = torch.empty(batch, hv, window_base(values, lpf), device=device)
        window["total_ptr"] = torch.empty(batch, hv, device=device)
    sign = rotation_signs(n, device) if config.rotate else top
    block = max(16, min(chosen.rows, triton.next_power_of_2(values)))
    if matrix:
        most = block_most(block, config.readout)
        block = next(r for r in (64, 32, 16) if r <= most and values % r == 0)
    blocks = divisor_up_to(triton.cdiv(values, block), chosen.blocks)

    def read(part: int) -> None:
        if fused:
            verify_window_kernel[(hv, batch)](
                sign, slot_ptr=rows.slots, valid_ptr=rows.valid, flush_ptr=rows.flush,
                HK=hk, HV=hv, K=n, KP=padded, V=values, LPF=lpf, ROTATE=config.rotate, EARLY=start,
                WARPS=WINDOW_WARPS, num_warps=WINDOW_WARPS, num_stages=1, **window,
                **_ring_arguments(views),
            )  # fmt: skip
        verify_prepare_kernel[(hk, batch, hv // hk // per)](
            q, k, g, beta, A_log, dt_bias, sign,
            scale=n**-0.5 if scale is None else float(scale), HK=hk, KP=padded, GW=gate_width,
            LENGTH=length, SOLVE=solve, scratch_ptr=scratch,
            RAW_GATES=weights is not None, NEGATIVE=negative, L2NORM=l2norm, EPS=NORM_EPS,
            ROTATE=config.rotate, MATRIX=matrix, EARLY=start, PART=part,
            FUSED=fused, PER=per, num_warps=1, num_stages=1, **register_limit(168),
            **early(start and fused), **late, **common, **steps,
            **_ring_arguments(views, ("ring_k", "ring_g", "ring_beta", "ring_rk")),
        )  # fmt: skip
        if matrix:
            verify_matrix_kernel[(batch * hv * values // (block * blocks),)](
                v, y, ROWS=block, BLOCKS=blocks, AHEAD=bool(chosen.ahead), EARLY=start, PART=part,
                FUSED=fused, LPF=lpf, HK=hk, WARPS=launch_warps(n), position_ptr=rows.position,
                key_ptr=rows.key, num_warps=1, num_stages=1, **where, **late, **window,
                **(reading | planes | sizes | _ring_arguments(views)), **rounding_sizes(config),
                **early(start),
                **register_limit(chosen.flush_registers if fused else chosen.registers),
            )  # fmt: skip
        else:
            verify_kernel[(triton.cdiv(values, block), hv, batch)](
                v, y, ROWS=block, KP=padded, PART=part, num_warps=chosen.warps, num_stages=1,
                **reading,
            )  # fmt: skip

    def fold() -> None:
        fold_committed(views, config, rows, y[:, 0], l2norm=l2norm, launch=chosen, **where)

    if fused:
        read(0)
    else:
        fold_and_read(fold, read, bool(chosen.beside), device)
    return y


def verify_step(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """Up to T tokens for each row, as ``verify_reference.verify_step``; inputs may be strided.

    ``out`` takes y if given ([b, T, HV, V]; what belongs to a token contiguous). Raises TypeError
    or ValueError before any launch.
    """
    check_verify(views, rows, q, k, v, g, beta)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out}
    check_devices(views.ckpt.device, rows, named, q.shape[1])
    where = {"layer": layer, "head_offset": head_offset}
    y = output_of(v, out)
    if q.shape[1] == 1 and q.shape[0]:
        fold_committed(
            views, config, rows, y[:, 0], launch=launch or launch_for(q.shape[0]), l2norm=l2norm,
            **where,
        )  # fmt: skip
        one = tuple(t[:, 0] for t in (q, k, v, g, beta))
        options = {"scale": scale, "l2norm": l2norm, "out": y[:, 0]}
        decode_step(views, config, rows.plain(), *one, **options, **where)
        return y
    inputs = (q, k, v, g, beta)
    return _run(views, config, rows, inputs, None, scale, l2norm, False, y, where, launch)


def verify_packed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    allow_neg_eigval: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """The same from what the layer's convolution and projections leave, as ``decode_packed``.

    mixed_qkv [b, T, 2 HK K + HV V], raw gates a, b [b, T, HV], A_log, dt_bias [HV].
    """
    q, k, v = split_packed(views, mixed_qkv)
    hv = v.shape[-2]
    if A_log.shape != (hv,) or dt_bias.shape != (hv,):
        raise ValueError(f"A_log {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)}: need {hv}")
    check_verify(views, rows, q, k, v, a, b)
    named = {"mixed_qkv": mixed_qkv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    check_devices(views.ckpt.device, rows, {**named, "out": out}, q.shape[1])
    where = {"layer": layer, "head_offset": head_offset}
    y = output_of(v, out)
    if q.shape[1] == 1 and q.shape[0]:
        fold_committed(
            views, config, rows, y[:, 0], launch=launch or launch_for(q.shape[0]), l2norm=l2norm,
            **where,
        )  # fmt: skip
        decode_packed(
            views, config, rows.plain(), mixed_qkv[:, 0], a[:, 0], b[:, 0], A_log, dt_bias,
            scale=scale, l2norm=l2norm, allow_neg_eigval=allow_neg_eigval, out=y[:, 0], **where,
        )  # fmt: skip
        return y
    weights = (A_log.contiguous(), dt_bias.contiguous())
    return _run(
        views, config, rows, (q, k, v, a, b), weights, scale, l2norm, allow_neg_eigval, y, where,
        launch,
    )  # fmt: skip


settle_keys(__name__)
