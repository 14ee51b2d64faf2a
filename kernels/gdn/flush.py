"""GDN flush: fold the window into the checkpoint by the exact recurrence; the copy is never read.

One program owns 16 rows of a value head (``common.planes``); their whole fold happens in registers.
Every correction b (v - a S k) is made from the checkpoint itself, so no low-precision read enters
it. There are two ways: token by token in fp32 (``_fold_token``, the reference's own order), or for
longer windows by two matrix products with what ``prepare`` leaves (``_fold_dot``), whose operands
are sums of two fp16 numbers and keep 22 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.fold import (
    fragment_sums,
    halve_rows,
    in_fragments,
    prefetch,
    read_tile,
    row_place,
    stack_tile,
)
from ..common.planes import (
    PAIRS,
    PTX,
    decode_tile,
    decode_words,
    fetch_tile,
    fetch_tile_scale,
    fetched_scales,
    reciprocal,
    rounded_product,
)
from ..common.store import encode_state
from .prepare import halves, window_base


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


@triton.constexpr_function
def operand_of(fmt):
    """How a checkpoint of this ``kernel_format`` enters a product: see ``_fold_dot``."""
    if fmt[0] == "fp16" and fmt[3] == "none":
        return "plain"
    whole = fmt[0] in ("int8", "int4") and fmt[2] <= 2048.0
    codes_are_fp16 = whole or fmt[0] in ("e4m3", "e5m2")
    return "row" if codes_are_fp16 and fmt[3] == "row" and fmt[5] != "e8m0" else "split"


@triton.jit
def _largest(values, P: tl.constexpr):
    """Largest magnitude of each row of parity P, [8, 1]."""
    top = tl.abs(values[P * 8])
    for i in tl.static_range(1, 8):
        top = tl.maximum(top, tl.abs(values[P * 8 + i]))
    return tl.max(top, 1, keep_dims=True)


@triton.jit
def _inverse(top):
    held = tl.minimum(tl.maximum(top, 2.0**-100), 2.0**126)  # what ``reciprocal`` takes
    return tl.where(top > 0, reciprocal(held), 0.0)


@triton.jit
def _both(x_ptr, at, STEP: tl.constexpr):
    """fp32 sum of two fp16 terms, STEP apart."""
    return tl.load(x_ptr + at).to(tl.float32) + tl.load(x_ptr + STEP + at).to(tl.float32)


@triton.jit
def _fold_plain(
    values, factor, even_total, odd_total, even_top, odd_top, left, right, base, LP: tl.constexpr
):
    """``_fold_dot`` without inline instructions, in fp32."""
    token, column = tl.arange(0, LP), tl.arange(0, 16)
    place = tl.arange(0, 2 * PAIRS)[:, None]
    TERM: tl.constexpr = LP * 128
    total = tl.zeros([2 * PAIRS, LP], tl.float32)
    for i in tl.static_range(8):
        key = _both(left, token[:, None] * 128 + row_place(i * 16 + column)[None, :], TERM)
        tile = stack_tile(values[i] * factor[0], values[8 + i] * factor[1], 16)
        total = tl.dot(tile, tl.trans(key), total, input_precision="ieee")
    t = token[None, :]
    at = t // 8 * 128 + place % PAIRS * 16 + t % 8 // 2 * 4 + place // PAIRS * 2 + t % 2
    update = total * stack_tile(even_top, odd_top, 1) + tl.load(base + at)
    evens = ()
    odds = ()
    for i in tl.static_range(8):
        key = _both(right, token[:, None] * 128 + i * 16 + column[None, :], TERM)
        change = tl.dot(update, key, input_precision="ieee")
        even, odd = tl.split(tl.permute(tl.reshape(change, (2, PAIRS, 16)), (1, 2, 0)))
        evens = evens + (values[i] * even_total + even,)
        odds = odds + (values[8 + i] * odd_total + odd,)
    return evens + odds


@triton.jit
def _fold_dot(values, tops, total, left, right, base, LP: tl.constexpr, OPERAND: tl.constexpr):
    """The whole window at once: e^(G_n) U + (W v - U k') k; see ``prepare``.

    left: -k', right: k, two fp16 terms of [LP, 128] each; base: W v of the tile, [LP / 8, 8, 16].
    OPERAND says how the checkpoint becomes fp16 numbers: "plain" if it is fp16, "row" if its codes
    are and have one scale a row (``values`` are then the codes, tops the scales of the even and of
    the odd rows, [8]), else "split" into two, after division by the row's largest value. No value
    leaves the lane that loaded it.
    """
    even_total = total
    odd_total = total
    even_top = tl.full([PAIRS, 1], 1.0, tl.float32)
    odd_top = even_top
    factor = (1.0, 1.0)
    if OPERAND == "row":
        even_top = tops[0].to(tl.float32)[:, None]
        odd_top = tops[1].to(tl.float32)[:, None]
        even_total = even_top * total
        odd_total = odd_top * total
    elif OPERAND == "split":
        even_top = _largest(values, 0)
        odd_top = _largest(values, 1)
        factor = (_inverse(even_top), _inverse(odd_top))
    if not PTX:
        return _fold_plain(
            values, factor, even_total, odd_total, even_top, odd_top, left, right, base, LP
        )
    else:
        highs = ()
        lows = ()
        for i in tl.static_range(16):
            x = values[i]
            if OPERAND == "split":
                x = rounded_product(x, tl.broadcast_to(factor[i // 8], [PAIRS, 16]))
            high, low = halves(x)
            highs = highs + (high,)
            lows = lows + (low,)
        if OPERAND == "split":
            sums = read_tile((highs, lows), left, LP)
        else:
            sums = read_tile((highs,), left, LP)
        row, place = tl.arange(0, PAIRS)[:, None], tl.arange(0, 16)[None, :]
        update = ()
        for j in tl.static_range(LP // 8):
            start = tl.load(base + j * (PAIRS * 16) + row * 16 + place)
            if OPERAND == "plain":
                update = update + (start + sums[j],)
            else:
                # as one fma, and below too: what a compiler fuses differs from kernel to kernel
                top = tl.where(place // 2 % 2 == 0, even_top, odd_top)
                update = update + (tl.fma(sums[j], top, start),)
        halved = halve_rows(update, LP)
        if LP == 16:
            lefts = (halved[0], halved[1])
        else:
            lefts = (halved[0], halved[1], halved[2], halved[3])
        even_scale, odd_scale = halved[LP // 8], halved[LP // 8 + 1]
        evens = ()
        odds = ()
        for i in tl.static_range(8):
            even, odd = fragment_sums(lefts, right, i, LP, 2, 2, "f16")
            # scales are powers of two, so these products are exact
            evens = evens + (tl.fma(values[i], even_total, even * even_scale),)
            odds = odds + (tl.fma(values[8 + i], odd_total, odd * odd_scale),)
        return evens + odds


@triton.jit
def _fold_tile(
    words, tile, following, key, position,
    i_b, i_h, i_t, slot, valid,
    # of prepare_kernel, at this head or its key head
    keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,
    left_ptr, right_ptr, base_ptr, total_ptr,
    ring_v_ptr, ring_g_ptr, ring_beta_ptr, y_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WP: tl.constexpr, GW: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr, NEW: tl.constexpr = True,
):  # fmt: skip
    """Fold the window into a fetched tile, store it and its y; what ``encode_state`` fetches.

    Without NEW the step brings no token, and there is no y.
    """
    W: tl.constexpr = K // 8
    OPERAND: tl.constexpr = operand_of(UPDATE)
    RAW: tl.constexpr = DOT and OPERAND == "row"
    column = tl.arange(0, WP)
    column_ok = column < W
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < V, 2 * pair + 1 < V)
    code = code_ptr + slot * code_stride + i_h * CODE_HEAD
    low = low_ptr + slot * low_stride + i_h * LOW_HEAD
    scales = scale_ptr + slot * scale_stride + i_h * SCALE_HEAD
    tiles = tile_ptr + slot * tile_stride + i_h * TILES
    values = decode_words(words, tile, column, row_ok, column_ok, UPDATE, V, K, RAW)
    tops = ()
    if RAW:
        tops = fetched_scales(words, 0, UPDATE, K) + fetched_scales(words, 1, UPDATE, K)
    ring_v = ring_v_ptr + slot * ring_v_stride + i_h * V
    v_now = v_ptr + i_b * v_stride + i_h * V
    if DOT:
        values = _fold_dot(
            values, tops, tl.load(total_ptr), left_ptr, right_ptr,
            base_ptr + i_t * (2 * PAIRS * LP), LP, OPERAND,
        )  # fmt: skip
    else:
        values = _fold_ring(
            values, keys_ptr, ring_v,
            ring_g_ptr + slot * ring_g_stride + i_h * GW,
            ring_beta_ptr + slot * ring_beta_stride + i_h,
            valid, pair, column, row_ok, column_ok, HV, V, K, GW,
        )  # fmt: skip
        if NEW:
            even, odd = _load_rows(v_now, pair, row_ok)
            held = ring_v_ptr.dtype.element_ty  # a flush sees what a ring would have kept
            v = (even.to(held).to(tl.float32), odd.to(held).to(tl.float32))
            k = _load_planes(keys_ptr + valid * K, column, column_ok, W)
            decay = _decays(gate_ptr, column, column_ok, W, GW)
            values = _fold_token(values, k, decay, tl.load(rate_ptr), v, GW)
    if NEW:
        q = _load_planes(query_ptr, column, column_ok, W)
        for p in tl.static_range(2):
            dot = values[p * 8] * q[0]
            for e in tl.static_range(1, 8):
                dot += values[p * 8 + e] * q[e]
            y = y_ptr + i_b * y_stride + i_h * V + 2 * pair + p
            tl.store(y, tl.sum(dot, 1).to(y_ptr.dtype.element_ty), mask=row_ok[p])
    return encode_state(
        values, key, position, layer,
        i_h + head_offset, pair, column, row_ok, column_ok, code, low, scales, tiles,
        copy_ptr + slot * copy_stride + i_h * COPY_HEAD,
        copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD,
        copy_tile_ptr + slot * copy_tile_stride + i_h * TILES, following,
        UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, V, K, DOT and in_fragments(W, WARPS),
    )  # fmt: skip


@triton.jit
def flush_tile(
    i_b, i_h, i_t, slot, valid,
    # of prepare_kernel, at this head or its key head
    keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,
    left_ptr, right_ptr, base_ptr, total_ptr,
    ring_v_ptr, ring_g_ptr, ring_beta_ptr, position_ptr, key_ptr, y_ptr,
    code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
    v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
    code_stride, low_stride, scale_stride, tile_stride,
    copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WP: tl.constexpr, GW: tl.constexpr,
    CODE_HEAD: tl.constexpr, LOW_HEAD: tl.constexpr, SCALE_HEAD: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    UPDATE: tl.constexpr, OUTPUT: tl.constexpr, HAS_COPY: tl.constexpr,
    SR: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr,
    DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fold the window into tile i_t (16 rows) of a value head, store it and its y."""
    W: tl.constexpr = K // 8
    column = tl.arange(0, WP)
    column_ok = column < W
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < V, 2 * pair + 1 < V)
    code = code_ptr + slot * code_stride + i_h * CODE_HEAD
    low = low_ptr + slot * low_stride + i_h * LOW_HEAD
    scales = scale_ptr + slot * scale_stride + i_h * SCALE_HEAD
    tiles = tile_ptr + slot * tile_stride + i_h * TILES
    words = fetch_tile(pair, column, row_ok, column_ok, code, low, scales, UPDATE, V, K)
    _fold_tile(
        words, fetch_tile_scale(pair, tiles, UPDATE), (),
        tl.load(key_ptr + i_b), tl.load(position_ptr + i_b),
        i_b, i_h, i_t, slot, valid, keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,
        left_ptr, right_ptr, base_ptr, total_ptr,
        ring_v_ptr, ring_g_ptr, ring_beta_ptr, y_ptr,
        code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
        v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
        code_stride, low_stride, scale_stride, tile_stride,
        copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
        HV, K, V, WP, GW, CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
        UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, DOT, LP, WARPS,
    )  # fmt: skip


@triton.jit
def flush_run(
    i_b, start, last,
    keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,  # see prepare_kernel
    left_ptr, right_ptr, base_ptr, total_ptr,  # with DOT
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
    DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Fold tiles start .. last (each 16 rows of a value head) of batch row i_b.

    The next tile is asked for while one is worked on. Without NEW the step brings no token.
    """
    column = tl.arange(0, WP)
    column_ok = column < K // 8
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    valid = tl.load(valid_ptr + i_b)
    key = tl.load(key_ptr + i_b)
    position = tl.load(position_ptr + i_b)
    i_h, i_t = start // TILES, start % TILES
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
    row_ok = (2 * pair < V, 2 * pair + 1 < V)
    words = fetch_tile(
        pair, column, row_ok, column_ok, code_ptr + slot * code_stride + i_h * CODE_HEAD,
        low_ptr + slot * low_stride + i_h * LOW_HEAD,
        scale_ptr + slot * scale_stride + i_h * SCALE_HEAD, UPDATE, V, K,
    )  # fmt: skip
    tile = fetch_tile_scale(pair, tile_ptr + slot * tile_stride + i_h * TILES, UPDATE)
    for unit in range(start, last + 1):
        i_h, i_t = unit // TILES, unit % TILES
        after = tl.minimum(unit + 1, last)
        n_h = after // TILES
        next_pair = after % TILES * PAIRS + tl.arange(0, PAIRS)
        following = (
            next_pair, (2 * next_pair < V, 2 * next_pair + 1 < V),
            code_ptr + slot * code_stride + n_h * CODE_HEAD,
            low_ptr + slot * low_stride + n_h * LOW_HEAD,
            scale_ptr + slot * scale_stride + n_h * SCALE_HEAD,
        )  # fmt: skip
        if not DOT:
            past = tl.minimum(tl.arange(0, LP), tl.maximum(valid - 1, 0))
            row = n_h * V + after % TILES * (2 * PAIRS)
            prefetch(ring_v_ptr + slot * ring_v_stride + row + past * (HV * V))
            if NEW:
                prefetch(v_ptr + i_b * v_stride + row + tl.arange(0, 1))
        head = i_b * HV + i_h
        key_head = i_b * HK + i_h // PER
        words = _fold_tile(
            words, tile, following, key, position, i_b, i_h, i_t, slot, valid,
            keys_ptr + key_head * (L * K), query_ptr + key_head * K,
            gate_ptr + head * GW, rate_ptr + head, v_ptr,
            left_ptr + head * (2 * LP * 8 * WP), right_ptr + key_head * (2 * LP * 8 * WP),
            base_ptr + head * window_base(V, LP), total_ptr + head,
            ring_v_ptr, ring_g_ptr, ring_beta_ptr, y_ptr,
            code_ptr, low_ptr, scale_ptr, tile_ptr, copy_ptr, copy_scale_ptr, copy_tile_ptr,
            v_stride, y_stride, ring_v_stride, ring_g_stride, ring_beta_stride,
            code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset,
            HV, K, V, WP, GW,
            CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, DOT, LP, WARPS, NEW,
        )  # fmt: skip
        tile = fetch_tile_scale(next_pair, tile_ptr + slot * tile_stride + n_h * TILES, UPDATE)


@triton.jit(
    do_not_specialize=("layer", "head_offset"),
    do_not_specialize_on_alignment=("slot_ptr", "valid_ptr", "position_ptr", "key_ptr"),
)
def flush_kernel(
    list_ptr, keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr,  # see prepare_kernel
    left_ptr, right_ptr, base_ptr, total_ptr,  # with DOT
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
    DOT: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Any number of programs share the tiles (row, head, 16 rows of the head) that flush.

    Each takes a run of neighbours: they read the same window, and the next tile is asked for while
    this one is worked on.
    """
    mine, programs = tl.program_id(0), tl.num_programs(0)
    EACH: tl.constexpr = HV * TILES
    units = tl.load(list_ptr) * EACH
    run = tl.cdiv(units, programs)
    first, end = mine * run, tl.minimum((mine + 1) * run, units)
    for number in range(first // EACH, tl.cdiv(end, EACH)):  # of the listed batch rows
        flush_run(
            tl.load(list_ptr + 1 + number).to(tl.int64),
            tl.maximum(first - number * EACH, 0), tl.minimum(end - number * EACH, EACH) - 1,
            keys_ptr, query_ptr, gate_ptr, rate_ptr, v_ptr, left_ptr, right_ptr, base_ptr,
            total_ptr, ring_v_ptr, ring_g_ptr, ring_beta_ptr, slot_ptr,
            valid_ptr, position_ptr, key_ptr, y_ptr, code_ptr, low_ptr, scale_ptr, tile_ptr,
            copy_ptr, copy_scale_ptr, copy_tile_ptr, v_stride, y_stride, ring_v_stride,
            ring_g_stride, ring_beta_stride, code_stride, low_stride, scale_stride, tile_stride,
            copy_stride, copy_scale_stride, copy_tile_stride, layer, head_offset, HK, HV, K, V, L,
            WP, PER, GW, CODE_HEAD, LOW_HEAD, SCALE_HEAD, COPY_HEAD, COPY_SCALE_HEAD, TILES,
            UPDATE, OUTPUT, HAS_COPY, SR, BITS, ROUNDS, DOT, LP, WARPS, True,
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
    pair = tl.arange(0, PAIRS) + i_t * PAIRS
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
