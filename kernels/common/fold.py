"""Adding a window of rank-one terms to a tile of a state, on the matrix units.

The tile is sixteen tensors [8, W] (``planes``): plane i of all sixteen rows is one product
[16, L] x [L, W]. Its rows are stacked even rows first, and the columns of the right operand are
stored in the order in which a thread of ``mma.sync`` then owns the same W / 4 neighbours that it
owns of a loaded tile; so the sum meets the state in registers, and nothing is exchanged.

Operands are sums of bf16 numbers (``terms``): one term where a value has 8 bits, two for 16, three
for all 24. Where inline PTX is off, products are plain fp32.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...formats.rotation import matrix
from .matrix import mma
from .planes import PAIRS, PTX, as_float


@lru_cache(maxsize=32)
def rotation_table(n: int, device: torch.device) -> torch.Tensor:
    """The rotation of N elements without its 1 / sqrt(block): bf16 [NP, NP] of +-1 and 0."""
    padded = triton.next_power_of_2(n)
    table = torch.zeros(padded, padded, dtype=torch.bfloat16)
    table[:n, :n] = matrix(n).sign()
    return table.to(device)


@triton.jit
def list_flushes(slot_ptr, flush_ptr, list_ptr, batch, EVERY_STEP: tl.constexpr):
    """list[0] = number of rows that flush, list[1:] their numbers in order (one program)."""
    count = batch * 0
    for start in range(0, batch, 512):
        row = start + tl.arange(0, 512)
        live = tl.load(slot_ptr + row, mask=row < batch, other=-1) >= 0
        if EVERY_STEP:
            chosen = live.to(tl.int32)
        else:
            due = tl.load(flush_ptr + row, mask=row < batch, other=0).to(tl.int32) != 0
            chosen = (live & due).to(tl.int32)
        at = 1 + count + tl.cumsum(chosen, 0) - chosen
        tl.store(list_ptr + at, row, mask=chosen > 0)
        count += tl.sum(chosen, 0)
    tl.store(list_ptr, count)


@triton.jit
def nth_flush(slot_ptr, flush_ptr, batch, nth, EVERY_STEP: tl.constexpr):
    """The batch row that flushes as number nth, from 0 on; -1 where fewer do."""
    count = batch * 0
    found = count - 1
    start = batch * 0
    while (start < batch) & (found < 0):
        row = start + tl.arange(0, 256)
        chosen = tl.load(slot_ptr + row, mask=row < batch, other=-1) >= 0
        if not EVERY_STEP:
            chosen &= tl.load(flush_ptr + row, mask=row < batch, other=0).to(tl.int32) != 0
        at = count + tl.cumsum(chosen.to(tl.int32), 0)
        found = tl.max(tl.where(chosen & (at == nth + 1), row, -1), 0)
        count = tl.max(at, 0)
        start += 256
    return found


@triton.jit
def prefetch(ptr):
    """Ask for the cache lines of a pointer tensor ahead of use, into the L2."""
    if PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _plane_and_column(n, W: tl.constexpr, WP: tl.constexpr):
    """(plane, column) of element n of 8 WP; those beyond N = 8 W fill up the padded planes."""
    plane = n // W
    column = n % W
    if W != WP:
        rest = n - 8 * W
        plane = tl.where(rest >= 0, rest // (WP - W), plane)
        column = tl.where(rest >= 0, W + rest % (WP - W), column)
    return plane, column


@triton.jit
def plane_order(n, W: tl.constexpr, WP: tl.constexpr):
    """Place of element n where each plane of W is padded to WP."""
    plane, column = _plane_and_column(n, W, WP)
    return plane * WP + column


@triton.jit
def thread_order(n, W: tl.constexpr, WP: tl.constexpr, WARPS: tl.constexpr):
    """Where a right operand keeps element n of N = 8 W: plane n // W, then the order of threads.

    n is an int32 tensor below 8 WP; beyond N (W not a power of two) it counts the unused places.
    """
    MINE: tl.constexpr = WP // WARPS // 4  # neighbours that a thread owns
    plane, column = _plane_and_column(n, W, WP)
    place = column
    if MINE >= 2:  # see add_window
        warp = column // (4 * MINE)
        thread = column // MINE % 4
        place = (column % MINE // 2) * (8 * WARPS) + warp * 8 + thread * 2 + column % 2
    return plane * WP + place


@triton.constexpr_function
def in_fragments(width, warps):
    """True if windows are kept as ``mma.sync`` wants them: one warp, planes of sixteen columns (not
    fewer that are padded)."""
    return PTX.value and width == 16 and warps == 1


@triton.jit
def store_fragments(window, x, n):
    """Columns n (from a multiple of 16 on) of a window [LP, len(n)], 16-bit, in fragments.

    128 words a plane for each sixteen tokens, two tokens a word. Lane 4 g + q of a warp finds
    together the four words that are its part of two operands of sixteen tokens and eight columns:
    tokens 2 q, 2 q + 1 and those 8 later, for columns c and c + 2, c = g // 2 * 4 + g % 2.
    """
    STEPS: tl.constexpr = x.shape[0] // 16
    PLANES: tl.constexpr = x.shape[1] // 16
    # tokens: 16 steps, 8, 2, 1; columns: 16 planes, 4, 2, 1
    x = tl.reshape(x, (STEPS, 2, 4, 2, PLANES, 4, 2, 2))
    x = tl.permute(x, (0, 4, 5, 7, 2, 6, 1, 3))
    x = tl.reshape(x, (STEPS, PLANES * 256))
    step, place = tl.arange(0, STEPS)[:, None], tl.arange(0, PLANES * 256)[None, :]
    tl.store(window + step * 2048 + tl.min(n, 0) * 16 + place, x)


@triton.jit
def fragment_place(token, n, W: tl.constexpr):
    """Where ``store_fragments`` keeps element n of 8 W of a token; W 16, or less and padded."""
    plane, column = _plane_and_column(n, W, 16)
    a, b, d = column // 4, column // 2 % 2, column % 2
    step, h, q, e = token // 16, token // 8 % 2, token // 2 % 4, token % 2
    return step * 2048 + plane * 256 + a * 64 + d * 32 + q * 8 + b * 4 + h * 2 + e


@triton.jit
def token_of(place):
    """The first of two tokens that column ``place`` of ``left_operands`` stands for, of sixteen."""
    return place // 4 * 2 + place // 2 % 2 * 8


@triton.jit
def left_operands(first, second, TERMS: tl.constexpr):
    """fp32 [8, 16] -> TERMS operands of ``add_fragments``, int32 [8, 16] of two bf16 numbers.

    Column c stands for row 2 g + c % 2 of a tile, token ``token_of(c)`` (``first``) and the next.
    """
    out = ()
    for _ in tl.static_range(TERMS):
        both = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        out = out + (both,)
        first = first - as_float(both << 16)
        second = second - as_float(both & -65536)
    return out


@triton.constexpr_function
def _sums_asm(steps, left, right, kind):
    """$0..$3 even, $4..$7 odd rows; then left operands and right ones, four words each."""
    text = "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(8))
    for step in range(steps):
        for r in range(right):
            for k in range(left):
                if k + r >= max(left, right):  # below what the terms leave out
                    continue
                a = 8 + 4 * (step * left + k)
                b = 8 + 4 * (steps * left + step * right + r)
                for t in (0, 2):
                    d = (f"${t}", f"${t + 1}", f"${4 + t}", f"${5 + t}")
                    operand = tuple(f"${a + i}" for i in range(4))
                    text += mma(kind, d, operand, (f"${b + t}", f"${b + t + 1}")) + " "
    return text


@triton.constexpr_function
def _sums_constraints(steps, left, right):
    return ",".join(["=&f"] * 8 + ["r"] * (4 * steps * (left + right)))


@triton.jit
def fragment_sums(
    lefts, right_ptr, PLANE: tl.constexpr,
    LP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """left @ right of one plane where windows are ``in_fragments``: even and odd rows [8, 16].

    lefts: LEFT operands for each sixteen tokens, of KIND bf16 (``left_operands``) or f16
    (``halve_rows``). Lane 4 g + q of a warp owns columns 4 q .. 4 q + 3 of row pair g. Two
    instructions make them for both rows of eight pairs: instruction t those columns that are 2 t or
    2 t + 1 beyond 4 q.
    """
    STEPS: tl.constexpr = LP // 16
    ASM: tl.constexpr = _sums_asm(STEPS, LEFT, RIGHT, KIND)
    CONSTRAINTS: tl.constexpr = _sums_constraints(STEPS, LEFT, RIGHT)
    words = right_ptr.to(tl.pointer_type(tl.int32))
    place = tl.arange(0, PAIRS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    rights = ()
    for k in tl.static_range(STEPS):
        for r in tl.static_range(RIGHT):
            rights = rights + (tl.load(words + ((r * STEPS + k) * 8 + PLANE) * 128 + place),)
    return tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, lefts + rights,
        dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def add_fragments(
    values, factor, lefts, right_ptr,
    LP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """``add_window`` where windows are ``in_fragments``; lefts: LEFT ``left_operands`` for each
    sixteen tokens."""
    evens = ()
    odds = ()
    for i in tl.static_range(8):
        even, odd = fragment_sums(lefts, right_ptr, i, LP, LEFT, RIGHT, "bf16")
        evens = evens + (values[i] * factor + even,)
        odds = odds + (values[8 + i] * factor + odd,)
    return evens + odds


@triton.jit
def bf16_terms(x, TERMS: tl.constexpr):
    """fp32 as a sum of bf16 numbers, largest first."""
    out = ()
    for _ in tl.static_range(TERMS):
        term = x.to(tl.bfloat16)
        out = out + (term,)
        x = x - term.to(tl.float32)
    return out


@triton.jit
def load_rotation(rotation_ptr, NP: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of the ``rotation_table``, of which rotation_ptr points at the first."""
    row, column = tl.arange(0, NP)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.load(rotation_ptr + row * NP + column)


@triton.jit
def rotate_window(x, table):
    """x [M, NP] (activations, M >= 16) times columns of ``load_rotation``: fp32 [M, COLUMNS]."""
    if not PTX:
        return tl.dot(x.to(tl.float32), table.to(tl.float32), input_precision="ieee")
    elif x.dtype == table.dtype:
        return tl.dot(x, table)
    else:
        terms = bf16_terms(x.to(tl.float32), 3)
        out = tl.dot(terms[2], table)
        out = tl.dot(terms[1], table, out)
        return tl.dot(terms[0], table, out)


@triton.jit
def stack_rows(x, WIDTH: tl.constexpr):
    """[WIDTH, 16] of a tile's rows in order -> [16, WIDTH], the even rows first."""
    x = tl.reshape(x, (WIDTH, PAIRS, 2))
    return tl.reshape(tl.permute(x, (2, 1, 0)), (2 * PAIRS, WIDTH))


@triton.jit
def unstack_rows(x, WP: tl.constexpr, WARPS: tl.constexpr):
    """A product [16, WP] in thread order -> even and odd rows [8, WP] in their own order."""
    if WP >= 8 * WARPS:
        x = tl.reshape(x, (2, PAIRS, WP // WARPS // 8, WARPS, 4, 2))
        x = tl.permute(x, (1, 3, 4, 2, 5, 0))
    else:
        x = tl.permute(tl.reshape(x, (2, PAIRS, WP)), (1, 2, 0))
    return tl.split(tl.reshape(x, (PAIRS, WP, 2)))


@triton.constexpr_function
def _read_asm(tiles, terms):
    """Two planes of a tile times ``tiles`` groups of eight right vectors, each in two fp16 terms.

    $0..: sums, four for each group; then the left operand's words (for each term: even rows, odd
    rows of one plane, then of the other, two words each), for each group four words of the right
    operand's high and four of its low term, and the sums before.
    """
    left = 4 * tiles
    right = left + 8 * terms
    before = right + 8 * tiles
    text = "".join(f"mov.b32 ${i}, ${before + i}; " for i in range(4 * tiles))
    for plane in range(2):
        for term in range(terms):
            a = left + 8 * term + 4 * plane
            operand = (f"${a}", f"${a + 2}", f"${a + 1}", f"${a + 3}")
            for group in range(tiles):
                d = tuple(f"${4 * group + i}" for i in range(4))
                for low in range(2 if term == 0 else 1):
                    b = right + 8 * group + 4 * low + 2 * plane
                    text += mma("f16", d, operand, (f"${b}", f"${b + 1}")) + " "
    return text


@triton.constexpr_function
def _read_constraints(tiles, terms):
    return ",".join(["=&f"] * (4 * tiles) + ["r"] * (8 * terms + 8 * tiles) + ["f"] * (4 * tiles))


@triton.jit
def row_place(n):
    """Where a row of ``read_tile``'s right operand keeps element n of 128: plane n // 16."""
    return n // 32 * 32 + n % 16 // 4 * 8 + n // 16 % 2 * 4 + n % 4


@triton.jit
def read_tile(terms, right_ptr, LP: tl.constexpr):
    """Products of a tile's rows with LP vectors: a tuple of LP / 8 tensors fp32 [8, 16], of which
    element (g, 4 q + 2 p + c) is row 2 g + p of the tile, vector 2 q + c of eight.

    terms: a tuple of one or two fp16 terms of a tile, sixteen tensors [8, 16] each, as loaded tiles
    are shared out (lane 4 g + q has columns 4 q .. 4 q + 3 of row pair g); right_ptr: two terms,
    each fp16 [LP, 128] in ``row_place``.
    """
    TILES: tl.constexpr = LP // 8
    TERMS: tl.constexpr = len(terms)
    ASM: tl.constexpr = _read_asm(TILES, TERMS)
    CONSTRAINTS: tl.constexpr = _read_constraints(TILES, TERMS)
    words = right_ptr.to(tl.pointer_type(tl.int32))
    place = tl.arange(0, PAIRS)[:, None] * 64 + tl.arange(0, 16)[None, :]
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros([PAIRS, 16], tl.float32),)
    for i in tl.static_range(4):
        args = ()
        for t in tl.static_range(TERMS):
            part = terms[t]
            args = args + (part[2 * i], part[8 + 2 * i], part[2 * i + 1], part[9 + 2 * i])
        for j in tl.static_range(TILES):
            for low in tl.static_range(2):
                at = words + low * (LP * 64) + j * (PAIRS * 64) + i * 16 + place
                args = args + (tl.load(at),)
        if LP == 16:
            sums = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, args + sums, dtype=(tl.float32, tl.float32), is_pure=True, pack=4
            )
        else:
            tl.static_assert(LP == 32, "windows of up to 32 tokens")
            sums = tl.inline_asm_elementwise(
                ASM, CONSTRAINTS, args + sums,
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=4,
            )  # fmt: skip
    return sums


@triton.constexpr_function
def _halve_asm(steps):
    """$0..: for each sixteen vectors four words of the high and four of the low term, then four
    times each the scale of the even and of the odd row; then the sums, four for each eight."""
    high, scale = 0, 8 * steps
    first = scale + 8
    text = "{ .reg .f32 m0, m1, s, i0, i1, a, b, c, d; .reg .b32 e; .reg .b16 h, l; "
    for p in range(2):
        own = [f"${first + 4 * j + 2 * p + c}" for j in range(2 * steps) for c in range(2)]
        text += f"abs.f32 m{p}, {own[0]}; "
        for x in own[1:]:
            text += f"abs.f32 s, {x}; max.f32 m{p}, m{p}, s; "
        for lanes in (1, 2):
            text += f"shfl.sync.bfly.b32 s, m{p}, {lanes}, 31, -1; max.f32 m{p}, m{p}, s; "
        # the power of two below, and its inverse
        text += f"mov.b32 e, m{p}; and.b32 e, e, 0x7F800000; min.u32 e, e, 0x7E800000; "
        text += f"mov.b32 ${scale + 4 * p}, e; sub.u32 e, 0x7F000000, e; mov.b32 i{p}, e; "
        for k in range(1, 4):
            text += f"mov.b32 ${scale + 4 * p + k}, ${scale + 4 * p}; "
    for k in range(steps):
        for half in range(2):
            for p in range(2):
                x = first + 4 * (2 * k + half) + 2 * p
                at = high + 8 * k + 2 * half + p
                text += f"mul.rn.f32 a, ${x}, i{p}; mul.rn.f32 b, ${x + 1}, i{p}; "
                text += f"cvt.rn.f16x2.f32 ${at}, b, a; mov.b32 {{h, l}}, ${at}; "
                text += "cvt.f32.f16 c, h; cvt.f32.f16 d, l; "
                text += "sub.rn.f32 a, a, c; sub.rn.f32 b, b, d; "
                text += f"cvt.rn.f16x2.f32 ${at + 4}, b, a; "
    return text + "}"


@triton.constexpr_function
def _halve_constraints(steps):
    return ",".join(["=&r"] * (8 * steps) + ["=&f"] * 8 + ["f"] * (8 * steps))


@triton.jit
def halve_rows(sums, LP: tl.constexpr):
    """``read_tile`` sums as left operands of ``fragment_sums`` in fp16 terms, and their scale.

    Returns a tuple: for each sixteen vectors the high and the low term, int32 [8, 16], then what
    products must be multiplied by, fp32 [8, 16], the same in a row: of even and of odd rows. It is
    the power of two below the largest of a row, so that terms are below 2.
    """
    STEPS: tl.constexpr = LP // 16
    ASM: tl.constexpr = _halve_asm(STEPS)
    CONSTRAINTS: tl.constexpr = _halve_constraints(STEPS)
    if LP == 16:
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, sums,
            dtype=(tl.int32, tl.int32, tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        tl.static_assert(LP == 32, "windows of up to 32 tokens")
        return tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, sums,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.float32, tl.float32),
            is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def stack_tile(even, odd, WP: tl.constexpr):
    """Even and odd rows [8, WP] -> [16, WP], the even rows first."""
    return tl.reshape(tl.permute(tl.join(even, odd), (2, 0, 1)), (2 * PAIRS, WP))


@triton.jit
def add_window(
    values, factor, left, right_ptr,
    WP: tl.constexpr, LP: tl.constexpr, WARPS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """values * factor + left @ right, sixteen fp32 [8, WP].

    left fp32 [16, LP] (``stack_rows``); right_ptr: RIGHT terms, each bf16 [LP, 8 WP] in
    ``thread_order`` (fp32 and one term without PTX). LEFT terms are taken of ``left``.
    """
    token = tl.arange(0, LP)[:, None]
    place = tl.arange(0, WP)[None, :]
    MOST: tl.constexpr = LEFT if LEFT > RIGHT else RIGHT
    if PTX:
        lefts = bf16_terms(left, LEFT)
    evens = ()
    odds = ()
    for i in tl.static_range(8):
        at = right_ptr + token * (8 * WP) + i * WP + place
        if WP < 8:  # too narrow for a product
            right = tl.load(at).to(tl.float32)
            for r in tl.static_range(1, RIGHT):
                right += tl.load(at + r * (LP * 8 * WP)).to(tl.float32)
            total = tl.sum(left[:, :, None] * right[None, :, :], 1)
        elif PTX:
            total = tl.zeros([2 * PAIRS, WP], tl.float32)
            for r in tl.static_range(RIGHT):
                right = tl.load(at + r * (LP * 8 * WP))
                for k in tl.static_range(LEFT):
                    if k + r < MOST:  # smaller products are below what the terms leave out
                        total = tl.dot(lefts[k], right, total)
        else:
            total = tl.dot(left, tl.load(at), input_precision="ieee")
        even, odd = unstack_rows(total, WP, WARPS)
        evens = evens + (values[i] * factor + even,)
        odds = odds + (values[8 + i] * factor + odd,)
    return evens + odds
