"""Mamba-2 decode over a split state: the rows that flush. Reference: ``reference.decode_step``.

``window_kernel`` lists those rows and leaves, for each group of one, what all its heads share: the
B of the window (rotated if the state is) as an operand of matrix products, C, and each head's
weights. ``flush_kernel`` then takes the tiles of all flushing rows in turn: it folds the window
into the decoded checkpoint, reads y from the fp32 state and stores checkpoint and copy. Its
programs are as many as the device holds, whatever the number of rows that flush, and no result
depends on which of them does what.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...config import StateConfig
from ...formats.rotation import block_of
from ...state.cache import StepRows
from ...state.layout import StateViews
from ..common.activation import softplus
from ..common.fold import (
    add_fragments,
    add_window,
    bf16_terms,
    in_fragments,
    left_operands,
    list_flushes,
    load_rotation,
    prefetch,
    rotate_window,
    rotation_table,
    stack_rows,
    store_fragments,
    thread_order,
    token_of,
)
from ..common.launch import multiprocessors, register_limit
from ..common.planes import PAIRS, PTX, decode_words, fetch_tile, fetch_tile_scale
from ..common.store import encode_state, launch_warps, plane_arguments, rounding_sizes
from .decode import finish


@triton.jit
def window_rows(
    i_b, slot, valid, i_g, first,
    dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, rotation_ptr, ring_dt_ptr, ring_B_ptr,
    weight_ptr, decay_ptr, window_ptr, vector_ptr,
    dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr,
    TERMS: tl.constexpr, WARPS: tl.constexpr,
    ROTATE: tl.constexpr, BLOCK: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEW: tl.constexpr = True,
):  # fmt: skip
    """What PER heads from ``first`` on, of group i_g, share in the flush of row i_b.

    Written at weight_ptr [PER, LP], decay_ptr [PER], window_ptr [TERMS, LP, 8 WP] and vector_ptr
    [N]; inputs as in ``window_kernel``. Any number of warps writes the same bits. Without NEW the
    window is the ring's alone: no token of the step, and no vector.
    """
    token, n = tl.arange(0, LP), tl.arange(0, NP)
    # every load before the first use: the group's B and C are on their way during the sums of dt
    ring_B = ring_B_ptr + slot * ring_B_stride + i_g * N
    inside = (n < N)[None, :]
    B = tl.load(
        ring_B + token[:, None] * (G * N) + n[None, :],
        mask=(token < valid)[:, None] & inside, other=0.0,
    )  # fmt: skip
    if NEW:
        B_now = tl.load(B_ptr + i_b * B_stride + i_g * N + n, mask=n < N, other=0.0)
        C = tl.load(C_ptr + i_b * C_stride + i_g * N + n, mask=n < N, other=0.0)
    # each head's dt, decays and weights: exp(a - a_j) dt_j, and exp(a) of the whole window
    head = tl.arange(0, PERP)
    head_ok = head < PER
    ring_dt = ring_dt_ptr + slot * ring_dt_stride + first
    at = ring_dt + token[None, :] * H + head[:, None]
    dt = tl.load(at, mask=(token < valid)[None, :] & head_ok[:, None], other=0.0)
    later = tl.load(at + H, mask=(token + 1 < valid)[None, :] & head_ok[:, None], other=0.0)
    if NEW:
        dt_now = tl.load(dt_ptr + i_b * dt_stride + first + head, mask=head_ok, other=0.0)
        dt_now = dt_now.to(tl.float32)
        if HAS_BIAS:
            dt_now += tl.load(bias_ptr + first + head, mask=head_ok, other=0.0).to(tl.float32)
        if SOFTPLUS:
            dt_now = softplus(dt_now)
        dt = tl.where((token == valid)[None, :] & head_ok[:, None], dt_now[:, None], dt)
        later = tl.where((token + 1 == valid)[None, :] & head_ok[:, None], dt_now[:, None], later)
    A = tl.load(A_ptr + first + head, mask=head_ok, other=0.0).to(tl.float32)[:, None]
    decay = dt * A
    # sums of what comes after a token, none a difference: no exponent is positive
    # and in fp64, where no order of additions shows
    after = tl.cumsum((later * A).to(tl.float64), 1, reverse=True).to(tl.float32)
    weight = tl.exp(after) * dt
    at = head[:, None] * LP + token[None, :]
    tl.store(weight_ptr + at, weight, mask=head_ok[:, None])
    tl.store(decay_ptr + head, tl.exp(tl.sum(decay.to(tl.float64), 1).to(tl.float32)), mask=head_ok)
    if NEW:
        if not ROTATE:
            tl.store(vector_ptr + n, C.to(tl.float32), mask=n < N)
        B = tl.where((token == valid)[:, None], B_now.to(B.dtype)[None, :], B)
    if ROTATE:
        CHUNK: tl.constexpr = NP if NP < 64 else 64
        if NEW:
            C = tl.where((token == 0)[:, None], C[None, :], 0.0).to(C_ptr.dtype.element_ty)
        for start in range(0, NP, CHUNK):
            mine = start + tl.arange(0, CHUNK)
            table = load_rotation(rotation_ptr + start, NP, CHUNK)
            if NEW:
                turned = rotate_window(C, table) * (BLOCK**-0.5)
                tl.store(vector_ptr + mine, tl.sum(turned, 0), mask=mine < N)
            part = rotate_window(B, table) * (BLOCK**-0.5)
            store_terms(window_ptr, part, mine, N, WP, LP, TERMS, WARPS)
    else:
        store_terms(window_ptr, B.to(tl.float32), n, N, WP, LP, TERMS, WARPS)


@triton.jit(do_not_specialize=("batch",))
def window_kernel(
    dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr,
    rotation_ptr,  # +-1 [NP, NP] (fold.rotation_table)
    slot_ptr, valid_ptr, flush_ptr, ring_dt_ptr, ring_B_ptr,
    list_ptr,  # int32 [b + 1]: count and numbers of the rows that flush
    weight_ptr, decay_ptr,  # fp32 [b, H, LP], [b, H]
    window_ptr, vector_ptr,  # [b, G, TERMS, LP, 8 WP] (common.fold), fp32 [b, G, N]
    dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
    batch,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, WP: tl.constexpr,
    L: tl.constexpr, LP: tl.constexpr, PER: tl.constexpr, PERP: tl.constexpr,
    TERMS: tl.constexpr, WARPS: tl.constexpr,
    ROTATE: tl.constexpr, BLOCK: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program a (group, row): what the heads of a group share in the flush of the row.

    PER = H / G heads, PERP and LP padded (LP >= 16). BLOCK: size of the rotation's blocks.
    """
    i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if i_b == batch:  # a program of its own, since it is slow
        if i_g == 0:
            list_flushes(slot_ptr, flush_ptr, list_ptr, batch, L == 1)
        return
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    if slot < 0:
        return
    if L > 1:
        if tl.load(flush_ptr + i_b).to(tl.int32) == 0:
            return
    first = i_g * PER
    window_rows(
        i_b, slot, tl.load(valid_ptr + i_b), i_g, first,
        dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, rotation_ptr, ring_dt_ptr, ring_B_ptr,
        weight_ptr + (i_b * H + first) * LP, decay_ptr + i_b * H + first,
        window_ptr + (i_b * G + i_g) * (TERMS * LP * 8 * WP), vector_ptr + (i_b * G + i_g) * N,
        dt_stride, B_stride, C_stride, ring_dt_stride, ring_B_stride,
        H, G, N, NP, WP, LP, PER, PERP, TERMS, WARPS, ROTATE, BLOCK, SOFTPLUS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def store_terms(
    window, B, n, N: tl.constexpr, WP: tl.constexpr, LP: tl.constexpr, TERMS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Columns n of the window's B [LP, len(n)], zero beyond N: operand of ``fold.add_window``."""
    at = window + tl.arange(0, LP)[:, None] * (8 * WP) + thread_order(n, N // 8, WP, WARPS)[None, :]
    if PTX:
        terms = bf16_terms(B, TERMS)
        for k in tl.static_range(TERMS):
            if in_fragments(N // 8, WARPS):
                store_fragments(window + k * (LP * 8 * WP), terms[k], n)
            else:
                tl.store(at + k * (LP * 8 * WP), terms[k])
    else:
        tl.store(at, B)


@triton.jit
def ask_pairs(
    ring_x, x_now, weight_ptr, valid, i_t, LP: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    """What ``weighted_pairs`` is made of: (pointer, mask) pairs of x, and pointers of weights."""
    place = tl.arange(0, 16)
    row = 2 * tl.arange(0, PAIRS)[:, None] + (place % 2)[None, :] + i_t * (2 * PAIRS)
    row_ok = row < R
    xs = ()
    weights = ()
    for k in tl.static_range(LP // 8):
        token = k // 2 * 16 + token_of(place) + k % 2
        inside = (token < valid)[None, :] & row_ok
        xs = xs + ((ring_x + token[None, :] * (H * R) + row, inside),)
        if NEW:
            now = x_now + row + token[None, :] * 0
            xs = xs + ((now, (token == valid)[None, :] & row_ok),)
        weights = weights + (weight_ptr + token,)
    return xs, weights


@triton.jit
def load_pairs(xs, weights):
    """What is at the pointers of ``ask_pairs``, a tuple."""
    out = ()
    for k in tl.static_range(len(xs)):
        out = out + (tl.load(xs[k][0], mask=xs[k][1], other=0),)
    for k in tl.static_range(len(weights)):
        out = out + (tl.load(weights[k]),)
    return out


@triton.jit
def weighted_pairs(loaded, valid, STEP: tl.constexpr, LP: tl.constexpr, NEW: tl.constexpr):
    """Weighted x of tokens 16 STEP and on, as ``fold.left_operands`` wants it, from what was loaded
    at the pointers of ``ask_pairs``."""
    place = tl.arange(0, 16)
    EACH: tl.constexpr = 2 if NEW else 1
    out = ()
    for e in tl.static_range(2):
        x = loaded[(2 * STEP + e) * EACH]
        if NEW:
            token = STEP * 16 + token_of(place) + e
            now = loaded[(2 * STEP + e) * EACH + 1].to(x.dtype)
            x = tl.where((token == valid)[None, :], now, x)
        weight = loaded[LP // 8 * EACH + 2 * STEP + e]
        out = out + (x.to(tl.float32) * weight[None, :],)
    return out


@triton.jit
def fold_tile(
    words, tile, inputs_at, factor, following,
    i_b, i_h, i_t, key, position, valid, ring_x, inputs,
    x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr,
    weight_ptr, window_ptr, vector_ptr,  # at this head and its group
    code, low, scales, tiles, copy, copy_scale, copy_tile,  # at this head
    z_stride, y_stride, layer, head_offset,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, NEW: tl.constexpr = True,
):  # fmt: skip
    """Fold the window into a fetched tile, store it and its y; what ``encode_state`` fetches.

    inputs_at: of windows in fragments what ``load_pairs`` gives; factor: the decay of the window.
    Without NEW the step brings no token, and there is no y.
    """
    W: tl.constexpr = N // 8
    column, token = tl.arange(0, WP), tl.arange(0, LP)
    column_ok = column < W
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < R, 2 * pair + 1 < R)
    values = decode_words(words, tile, column, row_ok, column_ok, UPDATE, R, N)
    if in_fragments(N // 8, WARPS):
        lefts = ()
        for k in tl.static_range(LP // 16):
            first, second = weighted_pairs(inputs_at, valid, k, LP, NEW)
            lefts = lefts + left_operands(first, second, LEFT)
        values = add_fragments(values, factor, lefts, window_ptr, LP, LEFT, TERMS)
    else:
        row = tl.arange(0, 2 * PAIRS) + i_t * (2 * PAIRS)
        x = tl.load(
            ring_x + token[:, None] * (H * R) + row[None, :],
            mask=(token < valid)[:, None] & (row < R)[None, :], other=0.0,
        )  # fmt: skip
        if NEW:
            x_now = tl.load(x_ptr + inputs + row, mask=row < R, other=0.0).to(x.dtype)
            x = tl.where((token == valid)[:, None], x_now[None, :], x)
        left = stack_rows(x.to(tl.float32) * tl.load(weight_ptr + token)[:, None], LP)
        values = add_window(values, factor, left, window_ptr, WP, LP, WARPS, LEFT, TERMS)
    if NEW:
        ys = (values[0] * 0.0, values[8] * 0.0)
        for i in tl.static_range(8):
            c = vector_ptr + i * W + column
            c = tl.load(c) if W == WP else tl.load(c, mask=column_ok, other=0.0)
            ys = (ys[0] + values[i] * c[None, :], ys[1] + values[8 + i] * c[None, :])
        for p in tl.static_range(2):
            finish(
                tl.sum(ys[p], 1), i_b, i_h, 2 * pair + p, row_ok[p], inputs,
                x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, z_stride, y_stride,
                R, D_ROWS, HAS_Z,
            )  # fmt: skip
    return encode_state(
        values, key, position, layer,
        i_h + head_offset, pair, column, row_ok, column_ok, code, low, scales, tiles,
        copy, copy_scale, copy_tile, following,
        UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, R, N, in_fragments(N // 8, WARPS),
    )  # fmt: skip


@triton.jit
def flush_tile(
    i_b, i_h, i_t, slot, valid,
    x_ptr, z_ptr, y_ptr, D_ptr, position_ptr, key_ptr, ring_x_ptr,
    weight_ptr, decay_ptr, window_ptr, vector_ptr,  # at this head and its group
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    x_stride, z_stride, y_stride, ring_x_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Fold the window into tile i_t (16 rows) of a head, store it and its y."""
    column = tl.arange(0, WP)
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < R, 2 * pair + 1 < R)
    code = code_ptr + slot * code_stride + i_h * CODE_HEAD
    low = low_ptr + slot * low_stride + i_h * LOW_HEAD
    scales = scale_ptr + slot * scale_stride + i_h * SCALE_HEAD
    tiles = tile_ptr + slot * tile_stride + i_h * TILES
    words = fetch_tile(pair, column, row_ok, column < N // 8, code, low, scales, UPDATE, R, N)
    ring_x = ring_x_ptr + slot * ring_x_stride + i_h * R
    loaded = ()
    if in_fragments(N // 8, WARPS):
        xs, weights = ask_pairs(
            ring_x, x_ptr + i_b * x_stride + i_h * R, weight_ptr, valid, i_t, LP, H, R, True
        )
        loaded = load_pairs(xs, weights)
    fold_tile(
        words, fetch_tile_scale(pair, tiles, UPDATE), loaded, tl.load(decay_ptr), (),
        i_b, i_h, i_t, tl.load(key_ptr + i_b), tl.load(position_ptr + i_b), valid,
        ring_x, i_b * x_stride + i_h * R,
        x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, weight_ptr, window_ptr, vector_ptr,
        code, low, scales, tiles,
        copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
        copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
        copy_tile_ptr + slot * copy_tile_stride + i_h * TILES,
        z_stride, y_stride, layer, head_offset, H, R, N, WP, LP, TERMS, LEFT, WARPS,
        UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, D_ROWS, HAS_Z,
    )  # fmt: skip


@triton.jit
def flush_run(
    i_b, start, last,
    x_ptr, z_ptr, y_ptr, D_ptr,
    slot_ptr, valid_ptr, position_ptr, key_ptr,
    ring_x_ptr, weight_ptr, decay_ptr, window_ptr, vector_ptr,  # see window_kernel
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    x_stride, z_stride, y_stride, ring_x_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Fold tiles start .. last (each 16 rows of a head) of batch row i_b.

    The next tile is loaded while one is stored. Without NEW the step brings no token.
    """
    column = tl.arange(0, WP)
    column_ok = column < N // 8
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    valid = tl.load(valid_ptr + i_b)
    key = tl.load(key_ptr + i_b)
    position = tl.load(position_ptr + i_b)
    code = code_ptr + slot * code_stride
    low = low_ptr + slot * low_stride
    scales = scale_ptr + slot * scale_stride
    tiles = tile_ptr + slot * tile_stride
    copy = copy_ptr + slot * copy_stride
    copy_scale = copy_scale_ptr + slot * copy_scale_stride
    copy_tile = copy_tile_ptr + slot * copy_tile_stride
    ring_x = ring_x_ptr + slot * ring_x_stride
    weights = weight_ptr + i_b * (H * LP)
    decays = decay_ptr + i_b * H
    windows = window_ptr + i_b * (G * TERMS * LP * 8 * WP)
    vectors = vector_ptr + i_b * (G * N)
    i_h, i_t = start // TILES, start % TILES
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < R, 2 * pair + 1 < R)
    words = fetch_tile(
        pair, column, row_ok, column_ok, code + i_h * CODE_HEAD, low + i_h * LOW_HEAD,
        scales + i_h * SCALE_HEAD, UPDATE, R, N,
    )  # fmt: skip
    tile = fetch_tile_scale(pair, tiles + i_h * TILES, UPDATE)
    factor = tl.load(decays + i_h)
    FRAGMENTS: tl.constexpr = in_fragments(N // 8, WARPS)
    TILED: tl.constexpr = UPDATE[3] == "block" and UPDATE[5] == "e4m3"
    COUNT: tl.constexpr = len(words)
    inputs = x_ptr + i_b * x_stride
    loaded = ()
    if FRAGMENTS:
        xs, at = ask_pairs(
            ring_x + i_h * R, inputs + i_h * R, weights + i_h * LP, valid, i_t, LP, H, R, NEW
        )
        loaded = load_pairs(xs, at)
    INPUTS: tl.constexpr = len(loaded)
    for unit in range(start, last + 1):
        i_h, i_t = unit // TILES, unit % TILES
        after = tl.minimum(unit + 1, last)
        n_h, n_t = after // TILES, after % TILES
        next_pair = n_t * PAIRS + tl.arange(0, PAIRS)
        following = (
            next_pair, (2 * next_pair < R, 2 * next_pair + 1 < R),
            code + n_h * CODE_HEAD, low + n_h * LOW_HEAD, scales + n_h * SCALE_HEAD,
        )  # fmt: skip
        if FRAGMENTS:  # next, too
            xs, at = ask_pairs(
                ring_x + n_h * R, inputs + n_h * R, weights + n_h * LP, valid, n_t, LP, H, R, NEW
            )
        else:
            xs, at = (), ()
        if TILED:
            following = following + (xs, at + (decays + n_h, tiles + n_h * TILES + n_t))
        else:
            following = following + (xs, at + (decays + n_h,))
        past = tl.minimum(tl.arange(0, LP), tl.maximum(valid - 1, 0))
        row = n_h * R + n_t * (2 * PAIRS)
        prefetch(ring_x + row + past * (H * R))
        if NEW:
            prefetch(inputs + row + tl.arange(0, 1))
        i_g = i_h // (H // G)
        fetched = fold_tile(
            words, tile, loaded, factor, following, i_b, i_h, i_t, key, position, valid,
            ring_x + i_h * R, i_b * x_stride + i_h * R,
            x_ptr, z_ptr, y_ptr, D_ptr, ring_x_ptr, weights + i_h * LP,
            windows + i_g * (TERMS * LP * 8 * WP), vectors + i_g * N,
            code + i_h * CODE_HEAD, low + i_h * LOW_HEAD, scales + i_h * SCALE_HEAD,
            tiles + i_h * TILES, copy + i_h * COPY_HEAD, copy_scale + i_h * COPY_SCALE_HEAD,
            copy_tile + i_h * TILES,
            z_stride, y_stride, layer, head_offset, H, R, N, WP, LP, TERMS, LEFT, WARPS,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, D_ROWS, HAS_Z, NEW,
        )  # fmt: skip
        words = ()
        for k in tl.static_range(COUNT):
            words = words + (fetched[k],)
        loaded = ()
        for k in tl.static_range(INPUTS):
            loaded = loaded + (fetched[COUNT + k],)
        factor = fetched[COUNT + INPUTS]
        if TILED:
            tile = fetched[COUNT + INPUTS + 1]


@triton.jit(do_not_specialize=("layer", "head_offset"))
def flush_kernel(
    x_ptr, z_ptr, y_ptr, D_ptr,
    slot_ptr, valid_ptr, position_ptr, key_ptr, list_ptr,
    ring_x_ptr, weight_ptr, decay_ptr, window_ptr, vector_ptr,  # see window_kernel
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    x_stride, z_stride, y_stride, ring_x_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride,
    layer, head_offset,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
    LP: tl.constexpr, TERMS: tl.constexpr, LEFT: tl.constexpr, WARPS: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    D_ROWS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the tiles (row, head, 16 rows of the head) that flush.

    Each takes a run of neighbours, a few of them of one batch row: they read the same window, and
    the next tile is loaded while this one is stored.
    """
    mine, programs = tl.program_id(0), tl.num_programs(0)
    EACH: tl.constexpr = H * TILES
    units = tl.load(list_ptr) * EACH
    run = tl.cdiv(units, programs)
    first, end = mine * run, tl.minimum((mine + 1) * run, units)
    for number in range(first // EACH, tl.cdiv(end, EACH)):  # of the listed batch rows
        flush_run(
            tl.load(list_ptr + 1 + number).to(tl.int64),
            tl.maximum(first - number * EACH, 0), tl.minimum(end - number * EACH, EACH) - 1,
            x_ptr, z_ptr, y_ptr, D_ptr, slot_ptr, valid_ptr, position_ptr, key_ptr,
            ring_x_ptr, weight_ptr, decay_ptr, window_ptr, vector_ptr,
            code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
            x_stride, z_stride, y_stride, ring_x_stride,
            code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
            H, G, R, N, WP, LP, TERMS, LEFT, WARPS,
            CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, D_ROWS, HAS_Z, True,
        )  # fmt: skip


FLUSH_PROGRAMS_PER_SM = 16
"""Programs of a flush: they share the tiles of all flushing rows, none is started for nothing."""

FLUSH_REGISTERS = 128
"""Registers of a thread, so that sixteen programs fit a multiprocessor: of 96 to 168 the fastest on
an H200 (triton 3.6.0, Super geometry, batch 256; nvfp4 + fp16 and P4+8)."""


def window_terms(config: StateConfig, ring: torch.dtype) -> tuple[int, int]:
    """bf16 terms of the weighted x and of B, as exact as the checkpoint can tell."""
    precise = 2 if config.update.is_scaled else 3  # terms of an operand: 16 bits, or all 24
    exact = ring == torch.bfloat16 and not config.rotate
    return precise, 1 if exact or not PTX.value else precise


def flush_rows(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    y: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    layer: int,
    head_offset: int,
    per_multiprocessor: int = FLUSH_PROGRAMS_PER_SM,
    registers: int = FLUSH_REGISTERS,
) -> None:
    """Launch the flush of the rows whose flag is set: their y, checkpoint and copy.

    Arguments as ``reference.decode_step``, checked, each contiguous within a row; y takes the
    result of flushing rows and keeps the others. per_multiprocessor: programs of the flush.
    """
    batch, heads, p = x.shape
    groups, n = B.shape[1:]
    device = x.device
    ring_x, ring_dt, ring_B = views.ring_x, views.ring_dt, views.ring_B
    assert ring_x is not None and ring_dt is not None and ring_B is not None
    length = ring_x.shape[1]
    lp = max(16, triton.next_power_of_2(length))
    wp = triton.next_power_of_2(n // 8)
    warps = launch_warps(n)
    precise, terms = window_terms(config, ring_B.dtype)
    scratch = {"dtype": torch.float32, "device": device}
    listed = torch.empty(batch + 1, dtype=torch.int32, device=device)
    weight = torch.empty(batch, heads, lp, **scratch)  # type: ignore[call-overload]
    decay = torch.empty(batch, heads, **scratch)  # type: ignore[call-overload]
    vector = torch.empty(batch, groups, n, **scratch)  # type: ignore[call-overload]
    window = torch.empty(
        batch, groups, terms, lp, 8 * wp, device=device,
        dtype=torch.bfloat16 if PTX.value else torch.float32,
    )  # fmt: skip
    per_group = heads // groups
    window_kernel[(groups, batch + 1)](
        dt, B, C, A, A if dt_bias is None else dt_bias,
        rotation_table(n, device) if config.rotate else A,
        rows.slots, rows.valid, rows.flush, ring_dt, ring_B,
        listed, weight, decay, window, vector,
        dt.stride(0), B.stride(0), C.stride(0), ring_dt.stride(0), ring_B.stride(0), batch,
        H=heads, G=groups, N=n, NP=triton.next_power_of_2(n), WP=wp, L=length, LP=lp,
        PER=per_group, PERP=triton.next_power_of_2(per_group), TERMS=terms, WARPS=warps,
        ROTATE=config.rotate, BLOCK=block_of(n), SOFTPLUS=dt_softplus,
        HAS_BIAS=dt_bias is not None, num_warps=4,
    )  # fmt: skip
    planes, sizes = plane_arguments(views, config)
    programs = min(batch * heads * sizes["TILES"], per_multiprocessor * multiprocessors(device))
    flush_kernel[(programs,)](
        x, x if z is None else z, y, A if D is None else D,
        rows.slots, rows.valid, rows.position, rows.key, listed,
        ring_x, weight, decay, window, vector,
        x_stride=x.stride(0), z_stride=0 if z is None else z.stride(0), y_stride=y.stride(0),
        ring_x_stride=ring_x.stride(0), layer=layer, head_offset=head_offset,
        H=heads, G=groups, R=p, N=n, WP=wp, LP=lp, TERMS=terms, LEFT=precise, WARPS=warps,
        D_ROWS=0 if D is None else D.ndim, HAS_Z=z is not None,
        num_warps=warps, num_stages=1, **register_limit(registers), **planes, **sizes,
        **rounding_sizes(config),
    )  # fmt: skip
