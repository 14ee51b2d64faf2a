"""Reads of a verify step on matrix units, for d_state 128, bf16 rings and NVIDIA GPUs.

As ``matrix`` does for one query, codes go to ``mma.sync`` from the registers they were loaded into;
here the eight columns of the right operand are the tokens of the step. 4-bit codes times their
block's scale, and e4m3 codes, are exact in fp16, and so are the products' left operands; int8 codes
stay integers. What is rounded are the queries, of largest magnitude one: to fp16 (within 2**-11 of
each element), beside int8 codes to two 7-bit digits (within 2**-15). The window is a product of the
same shape: inputs of the ring, exact in bf16, times weights as sums of two bf16 numbers.

What Triton sees is elementwise on [REP, 8, 4], as in ``matrix``: a block is 8 REP rows of one head,
lane 4 g + q holds rows g REP + j, j < REP, and of a result the tokens 2 q and 2 q + 1 of these
rows. So no sum crosses lanes. Of the inputs lane 4 g + q holds tokens q, q + 4, q + 8, ..., of the
right operands the token g. One warp a program; tests compile the kernels and check the layouts.
"""

import triton
import triton.language as tl

from ...formats.spec import Format
from .matrix import TOP2, mma
from .planes import PTX
from .readout import half_pair

QUERY_WORDS = tl.constexpr(512)
"""int32 words of the queries of a row and group (or head): [16, TOKENS, 4]."""


@triton.constexpr_function
def read_scale(output):
    """What the sums of ``read_block``'s instructions are to be multiplied with."""
    elem, low = output[0], output[1]
    return {"e2m1": 2.0**14, "int4": 8.0, "int8": 1.0 / 16256.0, "e4m3": 1.0}[elem] * 2.0**low


@triton.constexpr_function
def _read_asm(elem):
    """(instructions, constraints). Two rows a call: $0, $1 the even token of both, $2, $3 the odd.

    Inputs: the words of both rows (four, or eight of 8-bit codes), two words of block scales of
    both rows (4-bit codes), then the right operand, each twice (once a row, as Triton packs what it
    broadcasts).
    """
    four = elem in ("e2m1", "int4")
    words = 4 if four else 8
    first = 4 + 2 * words
    start = first + (4 if four else 0)

    def word(j, row):
        return f"${4 + 2 * j + row}"

    def right(k):
        return f"${start + 2 * k}"

    d = [f"d{i}" for i in range(4)]
    if four:
        out = ["{ .reg .b16 p, q; .reg .b32 t, x, s, f<4>, o<4>, a<4>; .reg .f32 d<4>;"]
        out += [f"mov.f32 {r}, 0f00000000;" for r in d]
        for half in range(2):  # planes e and e + 4 for e = 0, 1, then for e = 2, 3
            for row in range(2):
                for k in range(2):
                    e, f, o = 2 * half + k, f"f{2 * row + k}", f"o{2 * row + k}"
                    pick = (4 + e) * 16 + e
                    out.append(f"prmt.b32 t, ${first + row}, ${first + 2 + row}, {pick};")
                    out.append(f"mov.b32 {{p, q}}, t; cvt.rn.f16x2.e4m3x2 {f}, p;")
                    if elem == "int4":  # an eighth of it, and what takes away a code's offset
                        offset = "0xD808D808" if k == 0 else "0xC880C880"  # -1032 / 8, -72 / 8
                        out.append(f"mov.b32 t, {offset}; mul.rn.f16x2 {o}, {f}, t;")
                        out.append(f"mov.b32 t, 0x30003000; mul.rn.f16x2 {f}, {f}, t;")
            for j in range(4):
                for row in range(2):
                    w = word(j, row)
                    if elem == "int4" and half == 1:
                        out.append(f"shr.u32 x, {w}, 8;")
                        w = "x"
                    for k in range(2):
                        e, f, o = 2 * half + k, f"f{2 * row + k}", f"o{2 * row + k}"
                        a = f"a{row + 2 * k}"
                        if elem == "int4":  # 1024 + code + 8, or 64 + code + 8
                            mask = "0x000F000F" if k == 0 else "0x00F000F0"
                            one = "0x64006400" if k == 0 else "0x54005400"
                            out.append(f"lop3.b32 t, {w}, {mask}, {one}, 0xEA;")
                            out.append(f"fma.rn.f16x2 {a}, t, {f}, {o};")
                        else:  # reads as the value times 2**-14
                            for reg, place in (("t", 9 - 4 * e), ("s", 12 - 4 * e)):
                                op = f"shl.b32 {reg}, {w}, {place};"
                                out.append(op if place >= 0 else f"shr.u32 {reg}, {w}, {-place};")
                            out.append("and.b32 t, t, 0x0E000E00;")
                            out.append("lop3.b32 t, s, 0x80008000, t, 0xEA;")
                            out.append(f"mul.rn.f16x2 {a}, t, {f};")
                k = 4 * j + 2 * half
                left = ["a0", "a1", "a2", "a3"]
                out.append(mma("f16", d, left, [right(k), right(k + 1)]))
    elif elem == "int8":
        out = ["{ .reg .b32 h<4>, l<4>;"]
        out += [f"mov.b32 {n}{i}, 0;" for n in "hl" for i in range(4)]
        for j in range(4):
            left = [word(j, 0), word(j, 1), word(4 + j, 0), word(4 + j, 1)]
            for digit, name in enumerate("hl"):
                k = 8 * digit + 2 * j
                sums = [f"{name}{i}" for i in range(4)]
                out.append(mma("s8", sums, left, [right(k), right(k + 1)]))
        for i, target in enumerate(("$0", "$2", "$1", "$3")):
            out.append(f"mad.lo.s32 l{i}, h{i}, 128, l{i}; cvt.rn.f32.s32 {target}, l{i};")
    else:
        out = ["{ .reg .b16 p, q; .reg .b32 a<4>; .reg .f32 d<4>;"]
        out += [f"mov.f32 {r}, 0f00000000;" for r in d]
        for j in range(8):
            for row in range(2):
                out.append(f"mov.b32 {{p, q}}, {word(j, row)};")
                out.append(f"cvt.rn.f16x2.e4m3x2 a{row}, p;")
                out.append(f"cvt.rn.f16x2.e4m3x2 a{row + 2}, q;")
            left = [f"a{i}" for i in range(4)]
            out.append(mma("f16", d, left, [right(2 * j), right(2 * j + 1)]))
    if elem != "int8":
        for i, target in enumerate(("$0", "$2", "$1", "$3")):
            out.append(f"mov.f32 {target}, d{i};")
    count = start - 4 + 32
    return " ".join([*out, "}"]), ",".join(["=&f"] * 4 + ["r"] * count)


@triton.constexpr_function
def _window_asm(tokens):
    """Sums plus inputs times weights, of two rows a call, ``tokens`` 16 or 8 inputs.

    $0..$3 as in ``_read_asm``; $4..$7 the sums so far; then the inputs (a token each: both rows in
    a word), then the weights' words, each twice: the larger terms of all tokens, the smaller ones.
    """
    loaded = tokens // 4
    pairs = loaded // 2
    start = 8 + loaded
    out = ["{ .reg .b32 a<4>; .reg .f32 d<4>;"]
    out += [f"mov.f32 d{i}, ${source};" for i, source in enumerate((4, 6, 5, 7))]
    for k in range(pairs):
        for row, selector in enumerate(("0x5410", "0x7632")):
            first, second = f"${8 + 2 * k}", f"${9 + 2 * k}"
            out.append(f"prmt.b32 a{2 * k + row}, {first}, {second}, {selector};")
    for term in (1, 0):
        right = [f"${start + 2 * (term * pairs + k)}" for k in range(pairs)]
        left = [f"a{i}" for i in range(2 * pairs)]
        out.append(mma("bf16" if pairs == 2 else "short", ("d0", "d1", "d2", "d3"), left, right))
    out += [f"mov.f32 {target}, d{i};" for i, target in enumerate(("$0", "$2", "$1", "$3"))]
    constraints = ["=&f"] * 4 + ["f"] * 4 + ["r"] * (loaded + 4 * pairs)
    return " ".join([*out, "}"]), ",".join(constraints)


_TERMS = tl.constexpr(
    "{ .reg .b32 t; .reg .f32 x, y; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 t, $0, 16; "
    "sub.rn.f32 x, $2, t; and.b32 t, $0, 0xFFFF0000; sub.rn.f32 y, $3, t; "
    "cvt.rn.bf16x2.f32 $1, y, x; }"
)
"""$0, $1: larger and smaller bf16 terms of $2 (low halves) and $3 (high halves)."""


@triton.jit
def lane_token():
    """(token g, quarter q) of the lanes, [8, 1] and [1, 4]."""
    return tl.arange(0, 8)[:, None], tl.arange(0, 4)[None, :]


@triton.jit
def store_queries(c_ptr, low, high, token, ok, OUTPUT: tl.constexpr):
    """Store queries of largest magnitude one, fp32 halves low, high [M, 64], for ``load_queries``.

    c_ptr int32, QUERY_WORDS (one pointer, or [M, 1]); token [M], below TOKENS; ok bool [M].
    """
    ELEM: tl.constexpr = OUTPUT[0]
    M: tl.constexpr = low.shape[0]
    mine = c_ptr + token[:, None] * 4
    if ELEM == "e2m1" or ELEM == "int4":
        m = tl.arange(0, 64)[None, :]
        plane, column = m // 16, m % 16
        k = column % 4 * 4 + plane
        tl.store(mine + (k * 32 + column // 4), half_pair(low, high), mask=ok[:, None])
    elif ELEM == "e4m3":
        u = tl.arange(0, 2)[None, :, None]
        column = tl.arange(0, 16)[None, None, :]
        for s in tl.static_range(2):
            half = low if s == 0 else high
            pair = tl.permute(tl.reshape(half, [M, 2, 2, 16]), (0, 1, 3, 2))
            first, second = tl.split(pair)
            k = (s * 4 + column % 4) * 2 + u
            at = mine[:, :, None] + (k * 32 + column // 4)
            tl.store(at, half_pair(first, second), mask=ok[:, None, None])
    else:
        column = tl.arange(0, 16)[None, :]
        shift = tl.arange(0, 4)[None, :, None] * 8
        for s in tl.static_range(2):
            fixed = tl.floor((low if s == 0 else high) * TOP2 + 0.5).to(tl.int32)
            upper = (fixed + 64) >> 7
            for d in tl.static_range(2):
                digit = upper if d == 0 else fixed - (upper << 7)
                word = tl.sum(tl.reshape(digit & 0xFF, [M, 4, 16]) << shift, 1)
                k = d * 8 + 2 * (column % 4) + s
                tl.store(mine + (k * 32 + column // 4), word, mask=ok[:, None])


@triton.constexpr_function
def _query_asm(elem):
    """(instructions, constraints): a query of 128, four neighbours a lane ($4..$7), to the words
    that ``store_query`` stores ($0..$3)."""
    out = ["{ .reg .pred p; .reg .b32 l, b, s, t, u<4>; .reg .f32 f; mov.u32 l, %laneid;"]
    if elem != "int8":  # each with its partner, half the query or a plane away
        apart = 4 if elem == "e4m3" else 16
        for i in range(4):
            out.append(f"shfl.sync.bfly.b32 f, ${4 + i}, {apart}, 31, -1;")
            out.append(f"cvt.rn.f16x2.f32 ${i}, f, ${4 + i};")
    else:
        for i in range(4):
            out.append(f"fma.rn.f32 f, ${4 + i}, 0f467E0000, 0f3F000000;")  # * 16256 + 0.5
            out.append(f"cvt.rmi.s32.f32 u{i}, f;")
        for digit in range(2):
            for i in range(4):
                if digit == 0:
                    out.append(f"add.s32 t, u{i}, 64; shr.s32 ${i}, t, 7;")
                    out.append(f"shl.b32 t, ${i}, 7; sub.s32 u{i}, u{i}, t;")
            part = [f"${i}" if digit == 0 else f"u{i}" for i in range(4)]
            word = "b" if digit == 0 else "s"
            out.append(f"prmt.b32 t, {part[0]}, {part[1]}, 0x0040;")
            out.append(f"prmt.b32 {word}, {part[2]}, {part[3]}, 0x0040;")
            out.append(f"prmt.b32 {word}, t, {word}, 0x5410;")
        # four planes of a column in a word: bytes change places between four lanes, in two steps
        for apart, even, odd in ((4, "0x6240", "0x3715"), (8, "0x5410", "0x3276")):
            out.append(f"and.b32 t, l, {apart}; setp.ne.u32 p, t, 0;")
            out.append(f"selp.b32 u0, {odd}, {even}, p;")
            for word in "bs":
                out.append(f"shfl.sync.bfly.b32 t, {word}, {apart}, 31, -1;")
                out.append(f"prmt.b32 {word}, {word}, t, u0;")
        out.append("mov.b32 $0, b; mov.b32 $1, s; mov.b32 $2, 0; mov.b32 $3, 0;")
    return " ".join([*out, "}"]), ",".join(["=&r"] * 4 + ["f"] * 4)


@triton.jit
def store_words(c_ptr, word, t, OUTPUT: tl.constexpr):
    """The words [M, 128] that ``_query_asm`` makes of tokens t [M] to their places."""
    ELEM: tl.constexpr = OUTPUT[0]
    n, t = tl.arange(0, 128)[None, :], t[:, None]
    plane, q, j = n // 16, n % 16 // 4, n % 4
    if ELEM == "int8":
        k = j * 8 + 2 * (plane % 4) + plane // 4
        mine = j < 2
    elif ELEM == "e4m3":
        k = (plane // 4 * 4 + j) * 2 + plane % 4 // 2
        mine = plane % 2 == 0
    else:
        k = j * 4 + plane
        mine = n < 64
    tl.store(c_ptr + k * 32 + t * 4 + q, word, mask=mine & (t >= 0))


@triton.jit
def store_query(c_ptr, x, t, OUTPUT: tl.constexpr):
    """``store_queries`` of tokens t [M]: x fp32 [M, 128], of largest magnitude one.

    c_ptr one pointer, or [M, 1], one a token. The program is one warp and a lane holds four
    neighbours of a row of x, as loads of four elements leave them.
    """
    if PTX:
        ASM: tl.constexpr = _query_asm(OUTPUT[0])
        word = tl.inline_asm_elementwise(ASM[0], ASM[1], [x], dtype=tl.int32, is_pure=True, pack=4)
        store_words(c_ptr, word, t, OUTPUT)
    else:
        M: tl.constexpr = x.shape[0]
        low, high = tl.split(tl.permute(tl.reshape(x, [M, 2, 64]), (0, 2, 1)))
        store_queries(c_ptr, low, high, t, t >= 0, OUTPUT)


@triton.jit
def unit_queries(x):
    """(x of largest magnitude one, that magnitude [M]) of fp32 x [M, 128]; zero stays zero.

    The magnitude is NaN where x holds one (integer digits hold none), and Inf where it holds that.
    """
    # as integers magnitudes have the same order, and NaN comes last
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    return x * (1.0 / tl.where(top > 0, top, 1.0))[:, None], top


@triton.jit
def zero_queries(c_ptr, first):
    """Zeros as the queries of tokens from ``first`` on."""
    at = tl.arange(0, 512)
    tl.store(c_ptr + at, tl.zeros([512], tl.int32), mask=at // 4 % 8 >= first)


@triton.jit
def load_queries(c_ptr):
    """The right operand of ``read_block`` from ``store_queries``'s words: 16 tensors [1, 8, 4]."""
    g, q = lane_token()
    out = ()
    for k in tl.static_range(16):
        out = out + (tl.expand_dims(tl.load(c_ptr + k * 32 + g * 4 + q), 0),)
    return out


@triton.jit
def _by_lane(x, REP: tl.constexpr):
    """[32, REP], lane by j, as [REP, 8, 4]."""
    return tl.permute(tl.reshape(x, [8, 4, REP]), (2, 0, 1))


@triton.jit
def _load_own(ptr, first, ok, REP: tl.constexpr):
    """Elements first .. first + REP - 1 of each lane [32], zero where not ok [32]: [32, REP]."""
    tl.static_assert(REP * ptr.dtype.element_ty.primitive_bitwidth <= 128, "sixteen bytes a lane")
    # of three axes, lest Triton share it out otherwise
    at = tl.expand_dims(first[:, None] + tl.arange(0, REP)[None, :], 0)
    x = tl.load(ptr + at, mask=tl.expand_dims(ok[:, None], 0), other=0.0)
    return tl.reshape(x, [32, REP])


@triton.jit
def _load_eight(ptr, first, REP: tl.constexpr):
    """Eight bytes of each of the rows first .. first + REP - 1 of each lane: int64 [32, REP]."""
    ptr = ptr.to(tl.pointer_type(tl.int64))
    pairs = ()
    for i in tl.static_range(REP // 2):
        pairs = pairs + (_load_own(ptr, first + 2 * i, first >= 0, 2),)
    if REP == 2:
        return pairs[0]
    elif REP == 4:
        both = tl.permute(tl.join(pairs[0], pairs[1]), (0, 2, 1))
        return tl.reshape(both, [32, 4])
    else:
        tl.static_assert(REP == 8, "blocks of 16, 32 or 64 rows")
        all = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
        return tl.reshape(tl.permute(all, (0, 2, 3, 1)), [32, 8])


@triton.jit
def _store_own(ptr, x, first, ok, REP: tl.constexpr):
    """x [32, REP] to where ``_load_own`` would load it from."""
    at = tl.expand_dims(first[:, None] + tl.arange(0, REP)[None, :], 0)
    tl.store(ptr + at, tl.reshape(x, [1, 32, REP]), mask=tl.expand_dims(ok[:, None], 0))


@triton.jit
def fetch_codes(code, scale, tile, base, ROWS: tl.constexpr, OUTPUT: tl.constexpr):
    """(codes, scales) of rows base .. base + ROWS - 1 of the head that the pointers are at."""
    ELEM: tl.constexpr = OUTPUT[0]
    REP: tl.constexpr = ROWS // 8
    WIDE: tl.constexpr = 2 if ELEM == "int8" or ELEM == "e4m3" else 1
    r = tl.arange(0, ROWS)
    row = base + (r % 8) * REP + r // 8
    at = row[:, None] * (16 * WIDE) + tl.arange(0, 16)[None, :]
    codes = ()
    for h in tl.static_range(WIDE):
        codes = codes + (tl.load(code + at + 16 * h),)
    lane = tl.arange(0, 32)
    first = base + (lane // 4) * REP
    if ELEM == "e2m1" or ELEM == "int4":
        scales = (_load_eight(scale, first, REP), tl.load(tile + first // 16))
    else:
        scales = (_load_own(scale, first, lane >= 0, REP).to(tl.float32),)
    return codes, scales


@triton.jit
def fetch_tokens(ptr, step, base, token, count, ROWS: tl.constexpr, TOKENS_: tl.constexpr):
    """Inputs of tokens ``token`` .. ``token + TOKENS_ - 1`` (below ``count``) of ROWS rows.

    ptr at the head, ``step`` from token to token. A tuple of TOKENS_ / 4 tensors [32, ROWS / 8]:
    lane 4 g + q has token q of each four.
    """
    REP: tl.constexpr = ROWS // 8
    lane = tl.arange(0, 32)
    out = ()
    for i in tl.static_range(TOKENS_ // 4):
        mine = token + i * 4 + lane % 4
        first = mine * step + base + (lane // 4) * REP
        out = out + (_load_own(ptr, first, mine < count, REP),)
    return out


@triton.jit
def append_tokens(
    ring, step, base, token, count, inputs, ROWS: tl.constexpr, TOKENS_: tl.constexpr
):  # fmt: skip
    """Store what ``fetch_tokens`` loaded into the ring's entries from ``token`` on."""
    REP: tl.constexpr = ROWS // 8
    lane = tl.arange(0, 32)
    for i in tl.static_range(TOKENS_ // 4):
        mine = i * 4 + lane % 4
        first = (token + mine) * step + base + (lane // 4) * REP
        _store_own(ring, inputs[i], first, mine < count, REP)


@triton.jit
def read_block(codes, scales, c, even, odd, ROWS: tl.constexpr, OUTPUT: tl.constexpr):
    """O c of a block times ``even``, ``odd`` [32], what each lane's tokens 2 q and 2 q + 1 are to
    be multiplied with: two fp32 [REP, 8, 4]."""
    ELEM: tl.constexpr = OUTPUT[0]
    REP: tl.constexpr = ROWS // 8
    ASM: tl.constexpr = _read_asm(ELEM)
    FOUR: tl.constexpr = ELEM == "e2m1" or ELEM == "int4"
    STEPS: tl.constexpr = read_scale(OUTPUT)
    args = ()
    for h in tl.static_range(1 if FOUR else 2):
        first, second = tl.split(tl.reshape(codes[h], [REP, 8, 4, 2, 2]))
        w0, w2 = tl.split(first)
        w1, w3 = tl.split(second)
        args = args + (w0, w1, w2, w3)
    if FOUR:
        both = _by_lane(scales[0], REP)
        args = args + (both.to(tl.int32), (both >> 32).to(tl.int32))
    for k in tl.static_range(16):
        args = args + (c[k],)
    s0, s1 = tl.inline_asm_elementwise(
        ASM[0], ASM[1], args, dtype=(tl.float32, tl.float32), is_pure=True, pack=2
    )
    if FOUR:
        row = tl.broadcast_to((scales[1] * STEPS)[:, None], [32, REP])
    else:
        row = scales[0] * STEPS
    row = _by_lane(row, REP)
    even = _by_lane(tl.broadcast_to(even[:, None], [32, REP]), REP)
    odd = _by_lane(tl.broadcast_to(odd[:, None], [32, REP]), REP)
    return s0 * (row * even), s1 * (row * odd)


@triton.jit
def weight_terms(first, second):
    """Weights of two tokens, fp32 [8, 4], as words of a right operand: larger, smaller terms."""
    high, low = tl.inline_asm_elementwise(
        _TERMS, "=&r,=&r,f,f", [first, second], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return tl.expand_dims(high, 0), tl.expand_dims(low, 0)


@triton.jit
def add_tokens(y0, y1, inputs, weights, ROWS: tl.constexpr):
    """y0, y1 (``read_block``) plus inputs (``fetch_tokens``, bf16) times weights.

    weights: of 16 tokens four words (``weight_terms`` of tokens q and q + 4, of q + 8 and q + 12:
    both larger terms, then both smaller ones), of 8 tokens two.
    """
    REP: tl.constexpr = ROWS // 8
    COUNT: tl.constexpr = len(inputs)
    ASM: tl.constexpr = _window_asm(4 * COUNT)
    args = (y0, y1)
    for i in tl.static_range(COUNT):
        args = args + (_by_lane(inputs[i], REP),)
    for k in tl.static_range(COUNT):
        args = args + (weights[k],)
    y0, y1 = tl.inline_asm_elementwise(
        ASM[0], ASM[1], args, dtype=(tl.float32, tl.float32), is_pure=True, pack=2
    )
    return y0, y1


@triton.jit
def store_outputs(
    y_ptr, y_token, base, y0, y1, width, ROWS: tl.constexpr
):  # fmt: skip
    """y0, y1 (``read_block``) of a block to tokens below ``width``; y_ptr at the row and head."""
    REP: tl.constexpr = ROWS // 8
    lane = tl.arange(0, 32)
    for i in tl.static_range(2):
        y = tl.reshape(tl.permute(y0 if i == 0 else y1, (1, 2, 0)), [32, REP])
        token = lane % 4 * 2 + i
        first = token * y_token + base + (lane // 4) * REP
        _store_own(y_ptr, y.to(y_ptr.dtype.element_ty), first, token < width, REP)


@triton.jit
def own_seen(e, g, count, ancestors_ptr, TREE: tl.constexpr):
    """True where token g of the step sees token e of it; both are below ``count``."""
    inside = (e < count) & (g < count)
    if TREE:
        mask = tl.load(ancestors_ptr + g, mask=g < count, other=0)
        return inside & (((mask >> e) & 1) != 0)
    else:
        return inside & (e <= g)


@triton.jit
def seen_words(count, ancestors_ptr, TREE: tl.constexpr):
    """Words of weights that are one where a token of the step sees another, for ``add_seen``."""
    g, q = lane_token()
    first = own_seen(q + g * 0, g + q * 0, count, ancestors_ptr, TREE)
    second = own_seen(q + 4 + g * 0, g + q * 0, count, ancestors_ptr, TREE)
    return weight_terms(first.to(tl.float32), second.to(tl.float32))


@triton.jit
def add_seen(y0, y1, inputs, weights, seen, count, ROWS: tl.constexpr):
    """``add_tokens`` of the step's own inputs where one of them, or y, may be Inf or NaN.

    Such an input reaches the tokens that see it (``seen_words``) and no others, although a product
    takes every token. Tokens from ``count`` on become zero.
    """
    REP: tl.constexpr = ROWS // 8
    clean = ()
    bad = ()
    for i in tl.static_range(2):
        wide = inputs[i].to(tl.float32)
        strange = (wide - wide) != 0
        clean = clean + (tl.where(strange, 0.0, wide).to(inputs[i].dtype),)
        bad = bad + (strange.to(tl.float32).to(inputs[i].dtype),)
    y0, y1 = add_tokens(y0, y1, clean, weights, ROWS)
    none = tl.zeros([REP, 8, 4], tl.float32)
    hit0, hit1 = add_tokens(none, none, bad, seen, ROWS)
    token = tl.arange(0, 4)[None, None, :] * 2
    y0 = tl.where(hit0 > 0, float("nan"), y0)
    y1 = tl.where(hit1 > 0, float("nan"), y1)
    return tl.where(token < count, y0, 0.0), tl.where(token + 1 < count, y1, 0.0)


@triton.jit
def zero_outputs(y_ptr, y_token, width, COUNT: tl.constexpr):
    """Zeros for a row that verifies nothing: COUNT numbers of each token below ``width``."""
    column = tl.arange(0, 64)
    for t in range(width):
        for start in range(0, COUNT, 64):
            at = start + column
            zero = tl.zeros([64], y_ptr.dtype.element_ty)
            tl.store(y_ptr + t * y_token + at, zero, mask=at < COUNT)


@triton.constexpr_function
def block_count(rows, most):
    """Blocks that ``rows`` of a head fall into: of ``most`` as many as fit, then smaller ones."""
    return rows // most + bin(rows % most).count("1")


@triton.constexpr_function
def block_size(k, rows, most):
    """Rows of block k, a power of two from 16 on (rows of a head: a multiple of 16)."""
    sizes = [most] * (rows // most)
    sizes += [1 << i for i in range(10, -1, -1) if rows % most & (1 << i)]
    return sizes[k]


@triton.constexpr_function
def block_start(k, rows, most):
    """First row of block k."""
    whole = rows // most
    if k <= whole:
        return k * most
    sizes = [1 << i for i in range(10, -1, -1) if rows % most & (1 << i)]
    return whole * most + sum(sizes[: k - whole])


def block_most(rows: int, readout: Format) -> int:
    """Rows of a block that the kernels take for ``rows``: of row scales at most 32, since a lane
    loads those of its rows at once."""
    return min(rows, 32) if readout.scale.granularity == "row" else rows


@triton.jit
def odd_sum(y0, y1):
    """[8, 4]: not finite where one of y0, y1 [REP, 8, 4] is not."""
    return tl.sum(y0 + y1, 0)


@triton.jit
def not_finite(x):
    """True if an element of x [8, 4] is Inf or NaN."""
    return tl.max(tl.max(((x - x) != 0).to(tl.int32), 1), 0) != 0


@triton.jit
def load_pair(ptr, step, base, count, ROWS: tl.constexpr):
    """A step's vectors (bf16, [T, R] at ``ptr``) at tokens 2 q and 2 q + 1: two [REP, 8, 4], fp32.

    Zero from token ``count`` on.
    """
    REP: tl.constexpr = ROWS // 8
    lane = tl.arange(0, 32)
    out = ()
    for i in tl.static_range(2):
        token = lane % 4 * 2 + i
        x = _load_own(ptr, token * step + base + lane // 4 * REP, token < count, REP)
        out = out + (_by_lane(x, REP).to(tl.float32),)
    return out


@triton.jit
def load_rows(ptr, base, ROWS: tl.constexpr):
    """Numbers of rows base .. base + ROWS - 1 (two or four bytes each): fp32 [REP, 8, 4]."""
    REP: tl.constexpr = ROWS // 8
    lane = tl.arange(0, 32)
    first = base + lane // 4 * REP
    HALF: tl.constexpr = 4 if ptr.dtype.element_ty.primitive_bitwidth == 32 and REP == 8 else REP
    x = _load_own(ptr, first, lane >= 0, HALF).to(tl.float32)
    if HALF == REP:
        return _by_lane(x, REP)
    else:
        rest = _load_own(ptr, first + HALF, lane >= 0, HALF).to(tl.float32)
        both = tl.reshape(tl.permute(tl.join(x, rest), (0, 2, 1)), [32, REP])
        return _by_lane(both, REP)
