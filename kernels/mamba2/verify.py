"""Mamba-2 verification of draft tokens on Triton. Reference: ``verify_reference.verify_step``.

A step is the fold of committed inputs for the rows that are due (``flush``), then
``verify_prepare_kernel`` (a program a row and group: weights of the window, queries for the copy,
dt and B into the ring) and ``verify_kernel`` (a program a row and head: the copy read once for all
tokens, x into the ring). Nothing waits for the device; every result depends on its row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...config import StateConfig
from ...formats.rotation import block_of
from ...state.cache import StepRows, VerifyRows
from ...state.layout import StateViews
from ..common.activation import softplus
from ..common.fold import load_rotation, rotate_window, rotation_table
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
from ..common.store import launch_warps, plane_arguments, rounding_sizes
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
    block_count,
    block_most,
    block_size,
    block_start,
    fetch_codes,
    fetch_tokens,
    lane_token,
    load_pair,
    load_queries,
    load_rows,
    not_finite,
    odd_sum,
    own_seen,
    read_block,
    seen_words,
    store_outputs,
    store_query,
    unit_queries,
    weight_terms,
    zero_outputs,
    zero_queries,
)
from .flush import flush_rows, flush_run, window_rows, window_terms
from .triton_ops import decode_step
from .verify_reference import check_verify


@triton.jit
def _some_queries(
    C, C_token, first, sign_ptr, c, top_ptr,
    M: tl.constexpr, N: tl.constexpr, ROTATE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    t = first + tl.arange(0, M)
    n = tl.multiple_of(tl.arange(0, N), 4)[None, :]  # four neighbours a lane
    x = tl.load(C + (t * C_token)[:, None] + n).to(tl.float32)
    if ROTATE:
        x = rotate_rows(x, sign_ptr, M, N, N, True)
    x, top = unit_queries(x)
    store_query(c, x, t, OUTPUT)
    tl.store(top_ptr + t, top)


@triton.jit
def _prepare_queries(
    C, C_token, count, sign_ptr, c, top_ptr, N: tl.constexpr, ROTATE: tl.constexpr,
    OUTPUT: tl.constexpr,
):  # fmt: skip
    """The queries of a row and group for ``verify_matrix``, four at a time; pointers are there."""
    whole = count // 4 * 4
    for first in range(0, whole, 4):
        _some_queries(C, C_token, first, sign_ptr, c, top_ptr, 4, N, ROTATE, OUTPUT)
    for first in range(whole, count):
        _some_queries(C, C_token, first, sign_ptr, c, top_ptr, 1, N, ROTATE, OUTPUT)
    zero_queries(c, count)
    t = tl.arange(0, TOKENS)
    tl.store(top_ptr + t, 0.0, mask=t >= count)


@triton.jit
def verify_prepare_kernel(
    # inputs [b, T, ...]: a stride from row to row and one from token to token, the rest contiguous
    dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr,
    rotation_ptr,  # +-1 [NP, NP] (fold.rotation_table)
    ring_dt_ptr, ring_B_ptr,
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr,  # [b]; ancestors [b, T]
    sign_ptr,  # fp32 [N]
    dots_ptr, head_ptr,  # fp32 [b, G, T, LP + T], [b, H, LP + 3 T]
    c_ptr, top_ptr,  # queries of [b, G], fp32 [b, G, T]
    weight_ptr, decay_ptr, window_ptr,  # FOLD: of rows that flush, see flush.window_kernel
    dt_stride, dt_token, B_stride, B_token, C_stride, C_token, ring_dt_stride, ring_B_stride, width,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LP: tl.constexpr,
    PER: tl.constexpr, PERP: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROTATE: tl.constexpr, BLOCK: tl.constexpr, TREE: tl.constexpr, OUTPUT: tl.constexpr,
    MATRIX: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr, PART: tl.constexpr,
    FOLD: tl.constexpr, LPF: tl.constexpr, WP: tl.constexpr, TERMS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """What does not touch the state, one program a group and row; appends dt and B.

    With a the log decay from the last committed input to a token (along its path), dots holds
    B_j . C_t of committed inputs j (zero beyond them), then of the step's own; head holds
    e^(a_0 - a_j) dt_j of committed inputs, then a_t, dt_t and e^(a_t) times the whole decay before;
    top the largest magnitude of C_t, by which the query is divided. With MATRIX a second program
    makes the queries (grid [G, b, 2], one warp). PER = H / G heads, PERP padded.
    NATIVE: B and C are of one 16-bit type, whose products are exact in fp32. BLOCK: size of the
    rotation's blocks. EARLY: programs of the next launch may start. FOLD: leave the window of a row
    that flushes, padded to LPF, before its entries are written over.
    """
    if EARLY:
        dependents_may_start()
    i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    group = i_b * G + i_g
    if FOLD:
        if (slot >= 0) & (flush != 0) & (tl.program_id(2) == 0):
            first = i_g * PER
            window_rows(
                i_b, slot, tl.load(valid_ptr + i_b), i_g, first,
                dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, rotation_ptr, ring_dt_ptr, ring_B_ptr,
                weight_ptr + (i_b * H + first) * LPF, decay_ptr + i_b * H + first,
                window_ptr + group * (TERMS * LPF * 8 * WP), top_ptr,
                dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
                H, G, N, NP, WP, LPF, PER, PERP, TERMS, WARPS, ROTATE, BLOCK, False, False, False,
            )  # fmt: skip
            tl.debug_barrier()  # all lanes have read what is written over below
    if (slot < 0) | (count <= 0) | (in_part(slot, flush, PART) == 0):
        return
    if MATRIX:
        if tl.program_id(2) == 1:
            _prepare_queries(
                C_ptr + i_b * C_stride + i_g * N, C_token, count, sign_ptr,
                c_ptr + group * QUERY_WORDS, top_ptr + group * TOKENS, N, ROTATE, OUTPUT,
            )  # fmt: skip
            return
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    entry, n, t = tl.arange(0, LP), tl.arange(0, NP), tl.arange(0, TOKENS)
    wide = tl.arange(0, 16)  # of a product's rows there are at least as many
    n_ok = (n < N)[None, :]
    ring = ring_B_ptr + slot * ring_B_stride + i_g * N + n[None, :]
    past = tl.load(ring + entry[:, None] * (G * N), mask=(entry < base)[:, None] & n_ok, other=0.0)
    own_ok = (wide < count)[:, None] & n_ok
    own = tl.load(
        B_ptr + i_b * B_stride + wide[:, None] * B_token + i_g * N + n[None, :],
        mask=own_ok, other=0.0,
    ).to(ring_B_ptr.dtype.element_ty)  # fmt: skip
    C_in = C_ptr + i_b * C_stride + i_g * N
    C = tl.load(
        C_in + t[:, None] * C_token + n[None, :], mask=(t < count)[:, None] & n_ok, other=0.0
    )
    head = tl.arange(0, PERP)
    head_ok = (head < PER)[:, None]
    head = i_g * PER + head[:, None]
    ring_dt = ring_dt_ptr + slot * ring_dt_stride + head
    dt = tl.load(ring_dt + entry[None, :] * H, mask=(entry < base)[None, :] & head_ok, other=0.0)
    later = tl.load(
        ring_dt + (entry + 1)[None, :] * H, mask=(entry + 1 < base)[None, :] & head_ok, other=0.0
    )
    t_ok = (t < count)[None, :] & head_ok
    now = tl.load(dt_ptr + i_b * dt_stride + t[None, :] * dt_token + head, mask=t_ok, other=0.0)
    now = now.to(tl.float32)
    if HAS_BIAS:
        now += tl.load(bias_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
    if SOFTPLUS:
        now = softplus(now)
    now = tl.where(t_ok, now, 0.0)
    rate = tl.load(A_ptr + head, mask=head_ok, other=0.0).to(tl.float32)
    tl.store(ring + (base + wide)[:, None] * (G * N), own, mask=own_ok)
    tl.store(ring_dt + (base + t)[None, :] * H, now, mask=t_ok)

    if NATIVE:
        dots = tl.dot(past, tl.trans(C))
        dots_own = tl.dot(own, tl.trans(C))
    else:
        turned = tl.trans(C.to(tl.float32))
        dots = tl.dot(past.to(tl.float32), turned, input_precision="tf32x3")
        dots_own = tl.dot(own.to(tl.float32), turned, input_precision="tf32x3")
    out = dots_ptr + (group * TOKENS + t[None, :]) * (LP + TOKENS)
    tl.store(out + entry[:, None], dots)
    tl.store(out + LP + wide[:, None], dots_own, mask=(wide < TOKENS)[:, None])

    # sums of what comes after an input, none a difference: no exponent is positive
    after = tl.exp(tl.cumsum(later * rate, 1, reverse=True)) * dt
    decay = now * rate
    if TREE:
        _, paths = sees(t, 0, count, ancestors_ptr + i_b * width, TREE)
        path = tl.sum(tl.where(paths[None, :, :], decay[:, :, None], 0.0), 1)
    else:
        path = tl.cumsum(decay, 1)
    factor = tl.exp(path + tl.sum(dt * rate, 1, keep_dims=True))
    out = head_ptr + (i_b * H + head) * (LP + 3 * TOKENS)
    tl.store(out + entry[None, :], after, mask=head_ok)
    tl.store(out + LP + t[None, :], path, mask=head_ok)
    tl.store(out + LP + TOKENS + t[None, :], now, mask=head_ok)

    tl.store(out + LP + 2 * TOKENS + t[None, :], factor, mask=head_ok)
    if not MATRIX:
        M: tl.constexpr = 16 if ROTATE else TOKENS
        token = tl.arange(0, M)
        C = tl.load(
            C_in + token[:, None] * C_token + n[None, :],
            mask=(token < count)[:, None] & n_ok, other=0.0,
        )  # fmt: skip
        if ROTATE:
            C = rotate_window(C, load_rotation(rotation_ptr, NP, NP)) * (BLOCK**-0.5)
        top = store_vectors(c_ptr + group * (N * TOKENS), C.to(tl.float32), OUTPUT, N, NP)
        tl.store(top_ptr + group * TOKENS + token, top, mask=token < TOKENS)


@triton.jit
def verify_kernel(
    x_ptr, z_ptr, y_ptr, D_ptr,  # [b, T, H, P], strides as above; D [H] or [H, P]
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr, ring_x_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    dots_ptr, head_ptr, c_ptr, top_ptr,  # see verify_prepare_kernel
    x_stride, x_token, z_stride, z_token, y_stride, y_token,
    ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, width,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, LP: tl.constexpr, ROWS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, TREE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One head of one row, in blocks of ROWS rows; D_ROWS: D is absent (0), [H] (1), [H, P] (2)."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    if in_part(slot, flush, PART) == 0:
        return
    t = tl.arange(0, TOKENS)
    row = tl.arange(0, ROWS)
    y = y_ptr + i_b * y_stride + i_h * R + row[:, None] + t[None, :] * y_token
    if (slot < 0) | (count <= 0):
        for start in range(0, R, ROWS):
            mask = (start + row < R)[:, None] & (t < width)[None, :]
            tl.store(y + start, tl.zeros([ROWS, TOKENS], y_ptr.dtype.element_ty), mask=mask)
        return
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    copy = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
    scale = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
    tile = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
    words = copy_words(copy, row, row < R, N, OUTPUT)  # under way before all else
    entry, own = tl.arange(0, LP), tl.arange(0, 16)
    group = i_b * G + i_h // (H // G)
    of = head_ptr + (i_b * H + i_h) * (LP + 3 * TOKENS)
    dots = dots_ptr + (group * TOKENS + t[None, :]) * (LP + TOKENS)
    path = tl.load(of + LP + t)
    factor = tl.load(of + LP + 2 * TOKENS + t) * tl.load(top_ptr + group * TOKENS + t)
    weight = tl.load(of + entry)[:, None] * tl.load(dots + entry[:, None])
    weight *= tl.exp(path)[None, :]
    in_step = own < count
    seen, _ = sees(own, 0, count, ancestors_ptr + i_b * width, TREE)
    path_own = tl.load(of + LP + own, mask=in_step, other=0.0)
    dt_own = tl.load(of + LP + TOKENS + own, mask=in_step, other=0.0)
    dots_own = tl.load(dots + LP + own[:, None], mask=in_step[:, None], other=0.0)
    gap = tl.where(seen, path[None, :] - path_own[:, None], 0.0)
    weight_own = tl.where(seen, tl.exp(gap) * dt_own[:, None] * dots_own, 0.0)
    c = c_ptr + group * (N * TOKENS)
    for start in range(0, R, ROWS):
        at = start + row
        ok = at < R
        if start > 0:
            words = copy_words(copy, at, ok, N, OUTPUT)
        ring_x = ring_x_ptr + slot * ring_x_stride + i_h * R + at[:, None]
        x_in = x_ptr + i_b * x_stride + i_h * R + at[:, None]
        past_ok = ok[:, None] & (entry < base)[None, :]
        past = tl.load(ring_x + entry[None, :] * (H * R), mask=past_ok, other=0.0)
        own_ok = ok[:, None] & in_step[None, :]
        now = tl.load(x_in + own[None, :] * x_token, mask=own_ok, other=0.0)
        now = now.to(ring_x_ptr.dtype.element_ty)
        tl.store(ring_x + (base + own)[None, :] * (H * R), now, mask=own_ok)
        read = copy_product(words, copy, scale, tile, c, at, ok, N, NP, OUTPUT)
        out = read * factor[None, :] + window_dot(past, weight)
        out += seen_dot(now, weight_own, seen)
        if D_ROWS > 0:
            x = tl.load(x_in + t[None, :] * x_token, mask=ok[:, None] & (t < count)[None, :])
            x = x.to(ring_x_ptr.dtype.element_ty).to(tl.float32)
            if D_ROWS == 1:
                out += tl.load(D_ptr + i_h).to(tl.float32) * x
            else:
                D = tl.load(D_ptr + i_h * R + at, mask=ok, other=0.0).to(tl.float32)
                out += D[:, None] * x
        if HAS_Z:
            z = z_ptr + i_b * z_stride + i_h * R + at[:, None] + t[None, :] * z_token
            z = tl.load(z, mask=ok[:, None] & (t < count)[None, :], other=0.0).to(tl.float32)
            out *= z / (1.0 + tl.exp(-z))
        out = tl.where((t < count)[None, :], out, 0.0)
        tl.store(y + start, out.to(y_ptr.dtype.element_ty), mask=ok[:, None] & (t < width)[None, :])


@triton.jit
def _own_weights(
    dots, of, D, count, masks_ptr, LP: tl.constexpr, HAS_D: tl.constexpr, TREE: tl.constexpr
):  # fmt: skip
    """Weights of the step's tokens, for ``add_tokens``; ``of`` at the head, D its skip weight."""
    g, q = lane_token()
    token = g + q * 0
    path = tl.load(of + LP + token)
    out = ()
    for i in tl.static_range(2):
        e = i * 4 + q + g * 0
        w = tl.load(dots + token * (LP + TOKENS) + LP + e) * tl.load(of + LP + TOKENS + e)
        gap = path - tl.load(of + LP + e)
        seen = own_seen(e, token, count, masks_ptr, TREE)
        w = tl.where(seen, tl.exp(tl.where(seen, gap, 0.0)) * w, 0.0)
        if HAS_D:
            w += tl.where((e == token) & seen, D, 0.0)
        out = out + (w,)
    return weight_terms(out[0], out[1])


@triton.jit
def _past_weights(dots, of, first: tl.constexpr, LP: tl.constexpr):
    """Weights of committed inputs first .. first + 15, for ``add_tokens``."""
    g, q = lane_token()
    token = g + q * 0
    decay = tl.exp(tl.load(of + LP + token))
    out = ()
    for i in tl.static_range(4):
        e = first + i * 4 + q + g * 0
        out = out + (tl.load(dots + token * (LP + TOKENS) + e) * tl.load(of + e) * decay,)
    high, low = weight_terms(out[0], out[1])
    high_next, low_next = weight_terms(out[2], out[3])
    return high, high_next, low, low_next


@triton.jit
def _fetch(
    code, scale, tile, ring, x, k: tl.constexpr, base, count, x_token,
    H: tl.constexpr, R: tl.constexpr, MOST: tl.constexpr, COPY_HEAD: tl.constexpr,
    COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Everything of block k that waits for nothing: codes, scales, committed and new inputs."""
    BLOCKS: tl.constexpr = block_count(R, MOST)
    HEAD: tl.constexpr = k // BLOCKS
    ROWS: tl.constexpr = block_size(k % BLOCKS, R, MOST)
    START: tl.constexpr = block_start(k % BLOCKS, R, MOST)
    codes, scales = fetch_codes(
        code + HEAD * COPY_HEAD, scale + HEAD * COPY_SCALE_HEAD, tile + HEAD * TILES,
        START, ROWS, OUTPUT,
    )  # fmt: skip
    AT: tl.constexpr = HEAD * R + START
    past = fetch_tokens(ring, H * R, AT, 0, base, ROWS, 16)
    now = fetch_tokens(x, x_token, AT, 0, count, ROWS, TOKENS)
    return codes, scales, past, now


@triton.jit
def _store_block(
    y0, y1, x, z, y, D_ptr, at, count, width, x_token, z_token, y_token,
    ROWS: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """y0, y1 (``read_block``) of rows ``at`` and on, with D of each row and gated, to the output;
    what was stored, as ``odd_sum``. D_ptr at the first head."""
    if D_ROWS == 2:
        skip = load_rows(D_ptr, at, ROWS)
        x0, x1 = load_pair(x, x_token, at, count, ROWS)
        y0 += skip * x0
        y1 += skip * x1
    if HAS_Z:
        z0, z1 = load_pair(z, z_token, at, count, ROWS)
        y0 *= z0 / (1.0 + tl.exp(-z0))
        y1 *= z1 / (1.0 + tl.exp(-z1))
    store_outputs(y, y_token, at, y0, y1, width, ROWS)
    return odd_sum(y0, y1)


@triton.jit
def _verify_block(
    k: tl.constexpr, codes, scales, past, now, c, even, odd, w_past, w_now,
    x, z, y, D_ptr, ring, dots, of, first, base, count, width, x_token, z_token, y_token,
    H: tl.constexpr, R: tl.constexpr, LP: tl.constexpr, MOST: tl.constexpr,
    OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """y of block k, from what ``_fetch`` loaded; returns ``odd_sum`` of it."""
    BLOCKS: tl.constexpr = block_count(R, MOST)
    HEAD: tl.constexpr = k // BLOCKS
    ROWS: tl.constexpr = block_size(k % BLOCKS, R, MOST)
    AT: tl.constexpr = HEAD * R + block_start(k % BLOCKS, R, MOST)
    y0, y1 = read_block(codes, scales, c, even[HEAD], odd[HEAD], ROWS, OUTPUT)
    y0, y1 = add_tokens(y0, y1, past, w_past[HEAD], ROWS)
    for more in tl.static_range(1, LP // 16):
        if base > more * 16:
            rest = fetch_tokens(ring, H * R, AT, more * 16, base, ROWS, 16)
            weights = _past_weights(dots, of + HEAD * (LP + 3 * TOKENS), more * 16, LP)
            y0, y1 = add_tokens(y0, y1, rest, weights, ROWS)
    y0, y1 = add_tokens(y0, y1, now, w_now[HEAD], ROWS)
    append_tokens(ring, H * R, AT, base, count, now, ROWS, TOKENS)
    return _store_block(
        y0, y1, x, z, y, D_ptr + first * R, AT, count, width, x_token, z_token, y_token,
        ROWS, D_ROWS, HAS_Z,
    )  # fmt: skip


@triton.jit
def _verify_again(
    x, z, y, D_ptr, ring, masks, code, scale, tile, dots, of, c_ptr, top_ptr,
    first, base, count, width, x_token, z_token, y_token,
    H: tl.constexpr, R: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """y of ``_verify_unit`` where something is not finite, which then reaches the tokens that see
    it and no others.

    Sixteen rows at a time, in a loop that stays one: unrolled, it takes a compiler longer than all
    the rest (Triton's pass that chooses how memory is accessed looks, for each access, at all that
    is connected with it).
    """
    c = load_queries(c_ptr)
    even_token = tl.arange(0, 32) % 4 * 2
    top_even = tl.load(top_ptr + even_token)
    top_odd = tl.load(top_ptr + even_token + 1)
    seen = seen_words(count, masks, TREE)
    for k in range(HEADS * R // 16):
        head = k // (R // 16)
        start = k % (R // 16) * 16
        at = head * R + start
        mine = of + head * (LP + 3 * TOKENS)
        factor = mine + LP + 2 * TOKENS + even_token
        codes, scales = fetch_codes(
            code + head * COPY_HEAD, scale + head * COPY_SCALE_HEAD, tile + head * TILES,
            start, 16, OUTPUT,
        )  # fmt: skip
        even, odd = tl.load(factor) * top_even, tl.load(factor + 1) * top_odd
        y0, y1 = read_block(codes, scales, c, even, odd, 16, OUTPUT)
        for more in tl.static_range(LP // 16):
            if base > more * 16:
                past = fetch_tokens(ring, H * R, at, more * 16, base, 16, 16)
                y0, y1 = add_tokens(y0, y1, past, _past_weights(dots, mine, more * 16, LP), 16)
        D = tl.load(D_ptr + first + head).to(tl.float32) if D_ROWS == 1 else 0.0
        weights = _own_weights(dots, mine, D, count, masks, LP, D_ROWS == 1, TREE)
        now = fetch_tokens(x, x_token, at, 0, count, 16, TOKENS)
        y0, y1 = add_seen(y0, y1, now, weights, seen, count, 16)
        _store_block(
            y0, y1, x, z, y, D_ptr + first * R, at, count, width, x_token, z_token, y_token,
            16, D_ROWS, HAS_Z,
        )  # fmt: skip


@triton.jit
def _verify_unit(
    x, z, y, D_ptr, ring, masks, code, scale, tile, dots, of, c_ptr, top_ptr,
    first, base, count, width, x_token, z_token, y_token,
    H: tl.constexpr, R: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, TREE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of HEADS heads from ``first`` on, where the pointers are; x joins the ring.

    Returns whether something was not finite; if so, the result of ``_verify_again`` is right.
    """
    BLOCKS: tl.constexpr = HEADS * block_count(R, MOST)
    codes, scales, past, now = _fetch(
        code, scale, tile, ring, x, 0, base, count, x_token, H, R, MOST,
        COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT,
    )  # fmt: skip
    if EARLY:
        wait_for_previous()
    c = load_queries(c_ptr)
    even_token = tl.arange(0, 32) % 4 * 2
    top_even = tl.load(top_ptr + even_token)
    top_odd = tl.load(top_ptr + even_token + 1)
    w_past = ()
    w_now = ()
    even = ()
    odd = ()
    for h in tl.static_range(HEADS):
        mine = of + h * (LP + 3 * TOKENS)
        factor = mine + LP + 2 * TOKENS + even_token
        even = even + (tl.load(factor) * top_even,)
        odd = odd + (tl.load(factor + 1) * top_odd,)
        D = tl.load(D_ptr + first + h).to(tl.float32) if D_ROWS == 1 else 0.0
        w_past = w_past + (_past_weights(dots, mine, 0, LP),)
        w_now = w_now + (_own_weights(dots, mine, D, count, masks, LP, D_ROWS == 1, TREE),)
    strange = tl.zeros([8, 4], tl.float32)
    for k in tl.static_range(BLOCKS):
        if k > 0 and not AHEAD:
            codes, scales, past, now = _fetch(
                code, scale, tile, ring, x, k, base, count, x_token, H, R, MOST,
                COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT,
            )  # fmt: skip
        if AHEAD and k + 1 < BLOCKS:  # the next block is on its way meanwhile
            codes_next, scales_next, past_next, now_next = _fetch(
                code, scale, tile, ring, x, k + 1, base, count, x_token, H, R, MOST,
                COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT,
            )  # fmt: skip
        strange += _verify_block(
            k, codes, scales, past, now, c, even, odd, w_past, w_now,
            x, z, y, D_ptr, ring, dots, of, first, base, count, width,
            x_token, z_token, y_token, H, R, LP, MOST, OUTPUT, D_ROWS, HAS_Z,
        )  # fmt: skip
        if AHEAD and k + 1 < BLOCKS:
            codes, scales, past, now = codes_next, scales_next, past_next, now_next
    return not_finite(strange)


@triton.jit(do_not_specialize=("layer", "head_offset"))
def verify_matrix_kernel(
    x_ptr, z_ptr, y_ptr, D_ptr,  # as verify_kernel
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr, ring_x_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    dots_ptr, head_ptr, c_ptr, top_ptr,
    # FOLD: what flush.flush_kernel takes
    position_ptr, key_ptr, weight_ptr, decay_ptr, window_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr,
    x_stride, x_token, z_stride, z_token, y_stride, y_token,
    ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride,
    code_stride, low_stride, scale_stride, tile_stride, width, layer, head_offset,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LP: tl.constexpr,
    HEADS: tl.constexpr, MOST: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, TREE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PART: tl.constexpr,
    FOLD: tl.constexpr, LPF: tl.constexpr, TERMS: tl.constexpr, LEFT: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one group of one row, MOST rows at a time; D_ROWS as in ``verify_kernel``.

    Where something is not finite the work is done again, with an eye to which token sees it. AHEAD:
    a block is loaded while the one before is worked on. EARLY: the launch before may still run.
    FOLD: if the row flushes, its heads are folded first.
    """
    unit = tl.program_id(0)
    PARTS: tl.constexpr = H // HEADS
    first, i_b = unit % PARTS * HEADS, (unit // PARTS).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    flush = tl.load(flush_ptr + i_b).to(tl.int32)
    base = tl.where(flush != 0, 0, tl.load(valid_ptr + i_b))
    x = x_ptr + i_b * x_stride + first * R
    y = y_ptr + i_b * y_stride + first * R
    z = z_ptr + i_b * z_stride + first * R
    ring = ring_x_ptr + slot * ring_x_stride + first * R
    code = copy_ptr + slot * copy_stride + first * COPY_HEAD
    scale = copy_scale_ptr + slot * copy_scale_stride + first * COPY_SCALE_HEAD
    tile = copy_tile_ptr + slot * copy_tile_stride + first * TILES
    masks = ancestors_ptr + i_b * width
    group = i_b * G + first // (H // G)
    dots = dots_ptr + group * ((LP + TOKENS) * TOKENS)
    of = head_ptr + (i_b * H + first) * (LP + 3 * TOKENS)
    c = c_ptr + group * QUERY_WORDS
    top = top_ptr + group * TOKENS
    if FOLD:
        if (slot >= 0) & (flush != 0):
            if EARLY:
                wait_for_previous()
            flush_run(
                i_b, first * TILES, (first + HEADS) * TILES - 1,
                x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, position_ptr, key_ptr,
                ring_x_ptr, weight_ptr, decay_ptr, window_ptr, top_ptr,
                code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
                x_stride, z_stride, y_stride, ring_x_stride,
                code_stride, low_stride, scale_stride, tile_stride,
                copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
                H, G, R, N, N // 8, LPF, TERMS, LEFT, WARPS,
                CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
                UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, 0, False, False,
            )  # fmt: skip
            tl.debug_barrier()  # other lanes read what this program has just written
    if in_part(slot, flush, PART) == 0:
        if EARLY:
            wait_for_previous()
    elif (slot < 0) | (count <= 0):
        if EARLY:
            wait_for_previous()
        zero_outputs(y, y_token, width, HEADS * R)
    else:
        strange = _verify_unit(
            x, z, y, D_ptr, ring, masks, code, scale, tile, dots, of, c, top,
            first, base, count, width, x_token, z_token, y_token, H, R, LP, HEADS, MOST,
            COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT, D_ROWS, HAS_Z, TREE, AHEAD, EARLY,
        )  # fmt: skip
        if strange:
            _verify_again(
                x, z, y, D_ptr, ring, masks, code, scale, tile, dots, of, c, top,
                first, base, count, width, x_token, z_token, y_token, H, R, LP, HEADS,
                COPY_HEAD, COPY_SCALE_HEAD, TILES, OUTPUT, D_ROWS, HAS_Z, TREE,
            )  # fmt: skip


LAUNCH: tuple[tuple[int, LaunchConfig], ...] = ((1, LaunchConfig(heads=1)),)
"""(smallest batch, launch configuration), ascending.

One head of 64 rows in 128 registers was, of six launches, the fastest read at batch 256, T = 5, or
within 4 % of it (NVIDIA H200, triton 3.6.0, Super geometry, nvfp4 + fp16 and P4+8, commit f8bf9a4).
A fold compiles nearly without spills from 168 registers on; neither that nor ``beside`` was timed
with today's kernels.
"""


def launch_for(batch: int) -> LaunchConfig:
    """What ``LAUNCH`` says for a batch."""
    return [c for least, c in LAUNCH if least <= max(batch, 1)][-1]


def fold_committed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    A: torch.Tensor,
    y: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
    launch: LaunchConfig,
) -> None:
    """Fold the committed inputs of the rows that flush, with a token that adds nothing.

    dt is 0 for it, so it neither decays nor writes. y [b, H, P] takes what it would read.
    """
    assert views.ring_x is not None and views.ring_B is not None
    ring, batch = views.ring_x, rows.slots.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = ring.dtype) -> torch.Tensor:
        return zero_token(shape, dtype, ring.device).expand(batch, *(-1,) * len(shape))

    x, B = zeros(*ring.shape[2:]), zeros(*views.ring_B.shape[2:])
    dt = zeros(ring.shape[2], dtype=torch.float32)
    due = StepRows(rows.slots, rows.valid, rows.flush, rows.position, rows.key)
    flush_rows(
        views, config, due, x, dt, A, B, B, y, D=None, z=None, dt_bias=None, dt_softplus=False,
        layer=layer, head_offset=head_offset, per_multiprocessor=launch.flush,
        registers=launch.flush_registers,
    )  # fmt: skip


def verify_step(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """Up to T tokens for each row, as ``verify_reference.verify_step``; inputs may be strided.

    ``out`` takes y if given ([b, T, H, P]; what belongs to a token contiguous). Raises TypeError or
    ValueError before any launch.
    """
    check_verify(views, rows, x, dt, A, B, C)
    device, where = views.ckpt.device, {"layer": layer, "head_offset": head_offset}
    named = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    batch, width, heads, p = x.shape
    check_devices(device, rows, {**named, "out": out}, width)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)}; it must be {tuple(x.shape)} as x")
    y = output_of(x, out)
    if batch == 0:
        return y
    D, dt_bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
    A = A.contiguous()
    chosen = launch or launch_for(batch)

    def fold() -> None:
        fold_committed(views, config, rows, A, y[:, 0], launch=chosen, **where)

    if width == 1:
        fold()  # y is overwritten below
        gate = None if z is None else z[:, 0]
        decode_step(
            views, config, rows.plain(), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D=D, z=gate,
            dt_bias=dt_bias, dt_softplus=dt_softplus, out=y[:, 0], **where,
        )  # fmt: skip
        return y
    x, dt, B, C = (row_strided(name, named[name]) for name in ("x", "dt", "B", "C"))  # type: ignore[arg-type]
    z = None if z is None else row_strided("z", z)
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    groups, n = B.shape[2:]
    per_group = heads // groups
    planes, sizes = plane_arguments(views, config)
    output = sizes["OUTPUT"]
    lp = max(16, triton.next_power_of_2(views.ring_x.shape[1]))
    matrix = takes_matrix(views, output, p, n, x) and aligned(y, z) and y.dtype == x.dtype
    matrix = matrix and (z is None or z.dtype == x.dtype)
    start = matrix and starts_early(device)
    common = {
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "count_ptr": rows.count,
        "ancestors_ptr": rows.count if rows.ancestors is None else rows.ancestors,
        "dots_ptr": torch.empty(batch, groups, TOKENS.value, lp + TOKENS.value, device=device),
        "head_ptr": torch.empty(batch, heads, lp + 3 * TOKENS.value, device=device),
        "c_ptr": query_scratch(batch, groups, n, output, matrix, device),
        "top_ptr": torch.empty(batch, groups, TOKENS.value, device=device),
        "width": width, "H": heads, "G": groups, "LP": lp, "OUTPUT": output,
        "TREE": rows.ancestors is not None,
    }  # fmt: skip
    shape = {"N": n, "NP": max(16, triton.next_power_of_2(n))}
    names = ("copy", "copy_scale", "copy_tile")
    copy = {name + end: planes[name + end] for name in names for end in ("_ptr", "_stride")}
    reading = {
        "ring_x_ptr": views.ring_x, "x_stride": x.stride(0), "x_token": x.stride(1),
        "z_stride": 0 if z is None else z.stride(0), "z_token": 0 if z is None else z.stride(1),
        "y_stride": y.stride(0), "y_token": y.stride(1), "ring_x_stride": views.ring_x.stride(0),
        "R": p, "D_ROWS": 0 if D is None else D.ndim, "HAS_Z": z is not None,
        **{s: sizes[s] for s in ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES")}, **copy, **common,
    }  # fmt: skip
    args = (x, x if z is None else z, y, A if D is None else D)
    fused = matrix and bool(chosen.fused)
    precise, terms = window_terms(config, views.ring_B.dtype)
    folding = {
        "FOLD": fused, "LPF": max(16, triton.next_power_of_2(views.ring_x.shape[1] - 1)),
        "TERMS": terms, "WARPS": launch_warps(n), "weight_ptr": A, "decay_ptr": A, "window_ptr": A,
    }  # fmt: skip
    if fused:
        lpf = folding["LPF"]
        folding |= {
            "weight_ptr": torch.empty(batch, heads, lpf, device=device),
            "decay_ptr": torch.empty(batch, heads, device=device),
            "window_ptr": torch.empty(
                batch, groups, terms, lpf, n, device=device, dtype=torch.bfloat16
            ),
        }
    block = max(16, min(chosen.rows, triton.next_power_of_2(p)))
    count = divisor_up_to(per_group, chosen.heads)

    def read(part: int) -> None:
        verify_prepare_kernel[(groups, batch, 2 if matrix else 1)](
            dt, B, C, A, A if dt_bias is None else dt_bias,
            rotation_table(n, device) if config.rotate else A, views.ring_dt, views.ring_B,
            sign_ptr=rotation_signs(n, device) if config.rotate else A,
            dt_stride=dt.stride(0), dt_token=dt.stride(1), B_stride=B.stride(0),
            B_token=B.stride(1), C_stride=C.stride(0), C_token=C.stride(1),
            ring_dt_stride=views.ring_dt.stride(0), ring_B_stride=views.ring_B.stride(0),
            PER=per_group, PERP=triton.next_power_of_2(per_group),
            SOFTPLUS=dt_softplus, HAS_BIAS=dt_bias is not None, ROTATE=config.rotate,
            BLOCK=block_of(n), MATRIX=matrix, EARLY=start, PART=part,
            NATIVE=PTX.value and C.dtype == views.ring_B.dtype and C.dtype.itemsize == 2,
            WP=triton.next_power_of_2(n // 8), num_warps=1, num_stages=1,
            **shape, **common, **folding, **register_limit(168),
        )  # fmt: skip
        if matrix:
            verify_matrix_kernel[(batch * heads // count,)](
                *args, HEADS=count, MOST=block_most(block, config.readout), N=n, LEFT=precise,
                AHEAD=bool(chosen.ahead), EARLY=start, PART=part,
                position_ptr=rows.position, key_ptr=rows.key, **where, **folding,
                num_warps=1, num_stages=1, **(reading | planes | sizes), **rounding_sizes(config),
                **early(start),
                **register_limit(chosen.flush_registers if fused else chosen.registers),
            )  # fmt: skip
        else:
            verify_kernel[(heads, batch)](
                *args, ROWS=block, PART=part, num_warps=chosen.warps, num_stages=1, **shape,
                **reading,
            )  # fmt: skip

    if fused:
        read(0)
    else:
        fold_and_read(fold, read, bool(chosen.beside), device)
    return y


settle_keys(__name__)
