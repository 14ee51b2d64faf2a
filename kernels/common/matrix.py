"""Readout on matrix units, for d_state 128 or 256 and NVIDIA GPUs: inner products and window.

A row of 4-bit codes is 64 bytes: four lanes hold it in sixteen bytes each, eight rows a warp. That
is how ``mma.sync`` wants its left operand, if c takes the columns in the same order; so codes go to
the matrix units from the registers they were loaded into. c is two signed 7-bit digits in the
column of each scale block (4-bit codes), three digits in a column each (int8), or a pair of fp16
numbers (e4m3). Products of integers are exact; what c loses is at most 1 / 32512 of its largest
value (4-bit), 2**-21 of it (int8), 2**-22 of each element (e4m3).

What Triton sees is elementwise on [REP, 8, 4]: a block has 8 REP rows, lane 4 g + q owns rows g REP
+ j, j < REP, of them, and element (j, g, q) of a product is row g REP + j in column 2 q (or 2 q + 1
in a second tensor). That needs lane 4 g + q to hold the elements (., g, q), in the order of j,
which is what a coalesced load of [rows, 16] words gives; tests compile the kernels and check it.
The window's rows are loaded the same way, tokens t = q modulo 4 by lane, so that one sum over four
lanes ends both; nothing passes through shared memory. One warp a program.

d_state 256 is taken in halves: words 0-15 and 16-31 of each plane, each a row of 128 elements in
whose planes lies one scale block.
"""

import torch
import triton
import triton.language as tl

from ...formats.spec import Format

TOP2 = tl.constexpr(16256.0)  # 127 * 128: two digits, the upper one at most 127
# bytes of 12 + and 12 - twice the magnitudes of the codes 0..7
E2M1_TABLES = tl.constexpr((0x0F0E0D0C, 0x18141210, 0x090A0B0C, 0x00040608))
TOP3 = tl.constexpr(1048576.0)  # 2**20: three digits, the uppermost at most 64


@triton.constexpr_function
def matrix_path(ptx, n, output):
    """Which product serves a format: "e2m1", "int4", "int8", "e4m3", or "" for none."""
    elem, gran, block, scale = output[0], output[3], output[4], output[5]
    if not ptx or n not in (128, 256):
        return ""
    if elem in ("e2m1", "int4"):
        return elem if (gran, block, scale) == ("block", 16, "e4m3") else ""
    return elem if elem in ("int8", "e4m3") and gran == "row" else ""


@triton.constexpr_function
def mma(kind, d, a, b):
    """The instruction d += a b on registers named by d, a and b; kind: of the operands."""
    shape = {
        "u8": "m16n8k32.row.col.s32.u8.s8.s32",
        "s8": "m16n8k32.row.col.s32.s8.s8.s32",
        "f16": "m16n8k16.row.col.f32.f16.f16.f32",
        "bf16": "m16n8k16.row.col.f32.bf16.bf16.f32",
        "short": "m16n8k8.row.col.f32.bf16.bf16.f32",
    }[kind]
    d, a, b = ("{" + ", ".join(t) + "}" for t in (d, a, b))
    return f"mma.sync.aligned.{shape} {d}, {a}, {b}, {d};"


@triton.constexpr_function
def _matrix_asm(elem):
    """(instructions, constraints). Two rows a call: $0, $1 the even column of both, $2, $3 the odd.

    Inputs: the words of both rows (four, or eight of 8-bit codes), then the right operand, each
    twice (once a row, as Triton packs what it broadcasts).
    """
    words = 4 if elem in ("e2m1", "int4") else 8
    count = 8 if elem == "int8" else 16

    def word(j, row):
        return f"${4 + 2 * j + row}"

    def right(k):
        return f"${4 + 2 * words + 2 * k}"

    def four(name):
        return [f"{name}{i}" for i in range(4)]

    def zero(name, value="0"):
        return [f"mov.b32 {r}, {value};" for r in four(name)]

    a, out = four("a"), []
    if elem in ("e2m1", "int4"):  # biased codes; the lower digit's sums start at what takes it away
        out.append("{ .reg .b32 x, y, z, a<4>, h<4>, l<4>;")
        out += zero("h")
        out += [f"mov.b32 l{i}, {right(16 + i % 2)};" for i in range(4)]
        for j in range(4):
            for row in range(2):
                if elem == "int4":
                    out.append(f"and.b32 a{row}, {word(j, row)}, 0x0F0F0F0F;")
                    out.append(f"shr.u32 x, {word(j, row)}, 4;")
                    out.append(f"and.b32 a{row + 2}, x, 0x0F0F0F0F;")
                    continue
                # by table: a selector of bit 3 gives 0, so each of two looks up its own sign
                out.append(f"mov.b32 x, {word(j, row)};")
                for at in (row, row + 2):
                    out.append("xor.b32 y, x, 0x88888888;")
                    out.append(f"prmt.b32 z, {right(18)}, {right(19)}, x;")
                    out.append(f"prmt.b32 y, {right(20)}, {right(21)}, y;")
                    out.append(f"add.u32 a{at}, z, y;")  # no bit of both is set
                    if at == row:
                        out.append("shr.u32 x, x, 16;")
            for digit, name in enumerate("hl"):
                k = (digit * 4 + j) * 2
                out.append(mma("u8", four(name), a, [right(k), right(k + 1)]))
        for i, target in enumerate(("$0", "$2", "$1", "$3")):
            out.append(f"mad.lo.s32 l{i}, h{i}, 128, l{i};")
            out.append(f"add.rn.f32 {target}, l{i}, 0fCB400000;")  # - 1.5 * 2**23
    elif elem == "int8":
        out.append("{ .reg .b32 d<4>;")
        out += zero("d")
        for j in range(4):
            left = [word(j, 0), word(j, 1), word(4 + j, 0), word(4 + j, 1)]
            out.append(mma("s8", four("d"), left, [right(2 * j), right(2 * j + 1)]))
    else:
        out.append("{ .reg .b16 p, q; .reg .b32 a<4>; .reg .f32 d<4>;")
        out += [f"mov.f32 d{i}, 0f00000000;" for i in range(4)]
        for j in range(8):
            for row in range(2):
                out.append(f"mov.b32 {{p, q}}, {word(j, row)};")
                out.append(f"cvt.rn.f16x2.e4m3x2 a{row}, p;")
                out.append(f"cvt.rn.f16x2.e4m3x2 a{row + 2}, q;")
            out.append(mma("f16", four("d"), a, [right(2 * j), right(2 * j + 1)]))
    if elem == "int8":
        for i, target in enumerate(("$0", "$2", "$1", "$3")):
            out.append(f"cvt.rn.f32.s32 {target}, d{i};")
    elif elem == "e4m3":
        for i, target in enumerate(("$0", "$2", "$1", "$3")):
            out.append(f"mov.f32 {target}, d{i};")
    extra = {"e2m1": 6, "int4": 2}.get(elem, 0)
    constraints = ["=&f"] * 4 + ["r"] * (2 * (words + count + extra))
    return " ".join([*out, "}"]), ",".join(constraints)


_BLOCK_SCALES = tl.constexpr(
    "{ .reg .b16 p, q, x, y; .reg .b32 t; mov.b32 {p, q}, $2; cvt.rn.f16x2.e4m3x2 t, p; "
    "mov.b32 {x, y}, t; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }"
)


@triton.jit
def store_operand(c_ptr, x, inverse_top, ok, N: tl.constexpr, OUTPUT: tl.constexpr):
    """Store vectors x [ROWS, N] as ``load_operand`` wants them.

    c_ptr int32 [ROWS, 1]: N words a vector; inverse_top, ok [ROWS, 1] as in ``store_vector``.
    """
    ELEM: tl.constexpr = OUTPUT[0]
    ROWS: tl.constexpr = x.shape[0]
    x = x * inverse_top
    n = tl.arange(0, N)[None, :]
    plane, part, q, j = n // (N // 8), n % (N // 8) // 16, n % 16 // 4, n % 4
    if ELEM == "e4m3":
        s, u, v = plane // 4, plane // 2 % 2, plane % 2
        at = c_ptr.to(tl.pointer_type(tl.float16)) + part * 256
        at += ((s * 4 + j) * 8 + u * 4 + q) * 2 + v
        high = x.to(tl.float16)
        tl.store(at, high, mask=ok)
        tl.store(at + 128, (x - high.to(tl.float32)).to(tl.float16), mask=ok)
    else:
        DIGITS: tl.constexpr = 3 if ELEM == "int8" else 2
        TOP: tl.constexpr = TOP3 if ELEM == "int8" else TOP2
        fixed = tl.floor(x * TOP + 0.5).to(tl.int32)
        if ELEM == "int4":  # a word's bytes: planes s, s + 2, s + 4, s + 6
            s, u = plane % 2, plane // 2
        else:  # planes 4 s .. 4 s + 3
            s, u = plane // 4, plane % 4
        at = c_ptr.to(tl.pointer_type(tl.int8)) + part * 512 + ((j * 2 + s) * 4 + q) * 4 + u
        rest = fixed
        for d in tl.static_range(DIGITS):  # from the lowest; the uppermost takes all that is left
            upper = (rest + 64) >> 7 if d + 1 < DIGITS else rest * 0
            digit = rest - (upper << 7)
            rest = upper
            tl.store(at + (DIGITS - 1 - d) * 128, digit.to(tl.int8), mask=ok)
        if ELEM != "int8":
            BIAS: tl.constexpr = 12 if ELEM == "e2m1" else 8
            for h in tl.static_range(N // 128):
                mine = tl.where(part == h, fixed, 0)
                planes = tl.sum(tl.reshape(mine, [ROWS, 8, N // 8]), 2)
                eight = tl.arange(0, 8)[None, :]
                start = c_ptr + (h * 128 + 64) + eight
                tl.store(start, 0x4B400000 - BIAS * planes, mask=ok)
                if ELEM == "e2m1":
                    for k in tl.static_range(4):
                        table = tl.full([ROWS, 8], E2M1_TABLES[k], tl.int32)
                        tl.store(start + (8 + 8 * k), table, mask=ok)


@triton.constexpr_function
def _operands(elem):
    """Words of the right operand for 128 elements: what ``_matrix_asm`` takes."""
    return {"e2m1": 22, "int4": 18, "e4m3": 16, "int8": 8}[elem]


@triton.jit
def load_operand(c_ptr, N: tl.constexpr, OUTPUT: tl.constexpr):
    """The right operand from ``store_operand``'s words: a tuple of tensors [1, 8, 4], ``_operands``
    of them for each 128 elements."""
    ELEM: tl.constexpr = OUTPUT[0]
    COLUMNS: tl.constexpr = 2 if ELEM == "e4m3" else 3  # fp16 halves or digits
    COUNT: tl.constexpr = _operands(ELEM)
    g, q = tl.arange(0, 8)[:, None], tl.arange(0, 4)[None, :]
    out = ()
    for h in tl.static_range(N // 128):
        base = c_ptr + h * 128
        if ELEM == "e2m1" or ELEM == "int4":
            for k in tl.static_range(16):  # a column takes the bytes of its own plane
                word = tl.load(base + k * 4 + g * 0 + q)
                if ELEM == "e2m1":
                    own = (g // 4 == k % 2).to(tl.int32) * (0xFF << (8 * (g % 4)))
                else:
                    own = (g % 2 == k % 2).to(tl.int32) * (0xFF << (8 * (g // 2)))
                out = out + (tl.expand_dims(word & own, 0),)
        if ELEM == "e2m1" or ELEM == "int4":
            for k in tl.static_range(2):
                first = tl.load(base + 64 + k + 2 * q + g * 0)
                out = out + (tl.expand_dims(first, 0),)
        if ELEM == "e2m1":
            # tables from memory, a word a lane: a constant, or what it knows to be the same in all
            # lanes, the compiler would bring back into a register for each use
            for k in tl.static_range(4):
                table = tl.load(base + 72 + k * 8 + g + q * 0)
                out = out + (tl.expand_dims(table, 0),)
        elif ELEM != "int4":
            for k in tl.static_range(COUNT):
                at = base + g * (COUNT * 4) + k * 4 + q
                word = tl.load(at, mask=g < COLUMNS, other=0)
                out = out + (tl.expand_dims(word, 0),)
    return out


@triton.constexpr_function
def _sum_asm(rep):
    """Sums of ``rep`` values over four lanes; lane q keeps those from q rep / 4 on, the rest is 0.

    Each lane passes on the half that it does not keep: three quarters of the shuffles of a plain
    sum are saved. Of two values lanes 0 and 1 have the first sum, 2 and 3 the second. The order of
    additions is the same for any ``rep``.
    """
    out = ["{ .reg .pred p, r; .reg .b32 l, b; .reg .f32 s, t, k<8>; mov.u32 l, %laneid;"]
    out.append("and.b32 b, l, 2; setp.ne.u32 p, b, 0; and.b32 b, l, 1; setp.ne.u32 r, b, 0;")
    values = [f"${rep + i}" for i in range(rep)]
    for lanes, upper in ((2, "p"), (1, "r")):
        half, kept = len(values) // 2, []
        if half == 0:
            out.append(f"shfl.sync.bfly.b32 s, {values[0]}, {lanes}, 31, -1;")
            out.append(f"add.rn.f32 $0, {values[0]}, s;")
        for i in range(half):
            low, high = values[i], values[i + half]
            kept.append(f"k{i}" if lanes == 2 else f"${i}")
            out.append(f"selp.f32 s, {low}, {high}, {upper}; selp.f32 t, {high}, {low}, {upper};")
            out.append(f"shfl.sync.bfly.b32 s, s, {lanes}, 31, -1; add.rn.f32 {kept[-1]}, t, s;")
        values = kept
    out += [f"mov.f32 ${i}, 0f00000000;" for i in range(max(1, rep // 4), rep)]
    return " ".join([*out, "}"]), ",".join(["=&f"] * rep + ["f"] * rep)


@triton.jit
def _sum_lanes(part, REP: tl.constexpr):
    """Sums of part [REP, 8, 4] over its last axis: [8 REP] in natural order, REP 2, 4 or 8."""
    ASM: tl.constexpr = _sum_asm(REP)
    s = tl.inline_asm_elementwise(ASM[0], ASM[1], [part], dtype=tl.float32, is_pure=True, pack=REP)
    if REP == 8:
        s = tl.reshape(s, [2, 2, 2, 8, 4])
        s, _ = tl.split(tl.permute(s, (1, 2, 3, 4, 0)))
        s, _ = tl.split(tl.permute(s, (1, 2, 3, 0)))
        return tl.reshape(tl.permute(s, (1, 2, 0)), [64])
    elif REP == 2:
        s, _ = tl.split(tl.permute(tl.reshape(s, [2, 8, 2, 2]), (1, 2, 3, 0)))
        s, _ = tl.split(s)
        return tl.reshape(s, [16])
    else:
        s = tl.reshape(s, [2, 2, 8, 4])
        s, _ = tl.split(tl.permute(s, (1, 2, 3, 0)))
        s, _ = tl.split(tl.permute(s, (1, 2, 0)))
        return tl.reshape(s, [32])


@triton.jit
def _by_lane(x, REP: tl.constexpr):
    """[32, REP], lane by j, as [REP, 8, 4]."""
    return tl.permute(tl.reshape(x, [8, 4, REP]), (2, 0, 1))


def block_rows(rows: int, n: int, ring: torch.dtype, readout: Format) -> int:
    """Rows of a block that the kernels take for ``rows``: of four-byte elements or scales at most
    32, since a lane's own eight would be shared out between lanes; and of d_state ``n`` 256, whose
    codes fill the registers."""
    wide = ring.itemsize == 4 or (readout.scale.granularity == "row" and readout.bits == 8)
    return min(rows, 32) if wide or n > 128 else rows


@triton.jit
def _load_own(ptr, first, last, REP: tl.constexpr):
    """Elements first .. first + REP - 1 of each lane [32], if below ``last`` [32]: [32, REP]."""
    tl.static_assert(REP * ptr.dtype.element_ty.primitive_bitwidth <= 128, "see block_rows")
    # of three axes, lest Triton share it out as it does scales of two axes and the same size
    at = tl.expand_dims(first[:, None] + tl.arange(0, REP)[None, :], 0)
    x = tl.load(ptr + at, mask=at < tl.expand_dims(last[:, None], 0), other=0.0)
    return tl.reshape(x, [32, REP])


@triton.jit
def fetch_block(
    code, scale, tile, ring, base, limit, valid,
    R: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUT: tl.constexpr, APART: tl.constexpr = False,
):  # fmt: skip
    """(codes, scales, window) of rows base .. base + ROWS - 1, as far as below ``limit``.

    Rows count through the heads from the one the pointers are at; R rows a head, a multiple of
    ROWS / 8. ring: the window's vectors, token to token STEP elements; valid tokens are loaded, of
    the others nothing. No load waits for another. APART: the kernel has other loads of [ROWS, 16]
    elements.
    """
    ELEM: tl.constexpr = OUTPUT[0]
    REP: tl.constexpr = ROWS // 8
    WIDE: tl.constexpr = 2 if ELEM == "int8" or ELEM == "e4m3" else 1
    r = tl.arange(0, ROWS)
    row = base + (r % 8) * REP + r // 8
    ok = (row < limit)[:, None]
    HALVES: tl.constexpr = N // 128
    WORDS: tl.constexpr = 16 * HALVES * WIDE
    # what depends on the lane first, then constants: those become offsets of the instructions
    mine = (r % 8)[:, None] * (REP * WORDS) + tl.arange(0, 16)[None, :]
    behind = (r // 8)[:, None] * WORDS
    code = code + base * WORDS
    codes = ()
    for h in tl.static_range(HALVES * WIDE):
        if APART:  # of three axes, lest Triton share it out as other loads of the same size
            word = code + tl.expand_dims(mine, 0) + tl.expand_dims(behind + 16 * h, 0)
            word = tl.load(word, mask=tl.expand_dims(ok, 0), other=0)
            codes = codes + (tl.reshape(word, [ROWS, 16]),)
        else:
            codes = codes + (tl.load(code + mine + (behind + 16 * h), mask=ok, other=0),)
    lane = tl.arange(0, 32)
    first = base + (lane // 4) * REP
    if ELEM == "e2m1" or ELEM == "int4":
        q = tl.multiple_of(tl.arange(0, 4), 1)[None, :]  # keeps the loads narrow: a pair a lane
        own = tl.int16 if HALVES == 1 else tl.int32
        pair = scale.to(tl.pointer_type(own)) + base * 4
        pair = pair + ((r % 8)[:, None] * (REP * 4) + q) + (r // 8)[:, None] * 4
        tiles = tile + (first // R) * TILES + (first % R) // 16
        scales = (
            tl.load(pair, mask=ok & (q >= 0), other=0),
            tl.load(tiles, mask=first < limit, other=0.0),
        )
    else:
        scales = (_load_own(scale, first, first * 0 + limit, REP).to(tl.float32),)
    window = ()
    for t in tl.static_range(LP // 4):
        behind = lane % 4 * STEP
        last = tl.where(t * 4 + lane % 4 < valid, limit + behind, 0)
        x = _load_own(ring + t * (4 * STEP), first + behind, last, REP)
        window = window + (x,)
    return codes, scales, window


@triton.jit
def load_weights(weights, valid, LP: tl.constexpr):
    """The window's weights, lane by lane: a tuple of LP / 4 tensors [32], zero from ``valid`` on.

    weights: pointer to LP fp32, or one for each lane [32].
    """
    token = tl.arange(0, 32) % 4
    out = ()
    for t in tl.static_range(LP // 4):
        at = t * 4 + token
        out = out + (tl.load(weights + at, mask=at < valid, other=0.0),)
    return out


@triton.jit
def block_dot(
    codes, scales, window, c, weights, unit, N: tl.constexpr, LP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """unit O c + sum_t weights[t] window[t] of a block: fp32 [ROWS] in natural order.

    codes, scales, window from ``fetch_block``, c from ``load_operand``, weights from
    ``load_weights``; unit fp32 (or one for each lane [32]): the largest magnitude of the vector
    behind c, times what multiplies the product.
    """
    ELEM: tl.constexpr = OUTPUT[0]
    LOW: tl.constexpr = OUTPUT[1]
    REP: tl.constexpr = ROWS // 8
    ASM: tl.constexpr = _matrix_asm(ELEM)
    FOUR: tl.constexpr = ELEM == "e2m1" or ELEM == "int4"
    COUNT: tl.constexpr = _operands(ELEM)
    HALVES: tl.constexpr = N // 128
    WIDE: tl.constexpr = 1 if FOUR else 2
    pushed = window[0].to(tl.float32) * weights[0][:, None]
    for t in tl.static_range(LP // 4 - 1):
        pushed += window[t + 1].to(tl.float32) * weights[t + 1][:, None]
    if FOUR:
        stored = scales[0].to(tl.int32)
    for h in tl.static_range(HALVES):
        args = ()
        for k in tl.static_range(WIDE):
            even, odd = tl.split(tl.reshape(codes[k * HALVES + h], [REP, 8, 4, 2, 2]))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            args = args + (w0, w1, w2, w3)
        for k in tl.static_range(COUNT):
            args = args + (c[h * COUNT + k],)
        s0, s1 = tl.inline_asm_elementwise(
            ASM[0], ASM[1], args, dtype=(tl.float32, tl.float32), is_pure=True, pack=2
        )
        if FOUR:
            if HALVES == 1:
                pair = stored & 0xFFFF
            else:  # bytes h and h + 2
                pair = (stored >> (8 * h)) & 0xFF | (stored >> (8 * h + 8)) & 0xFF00
            f0, f1 = tl.inline_asm_elementwise(
                _BLOCK_SCALES,
                "=&f,=&f,r",
                [tl.reshape(pair, [REP, 8, 4])],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
            half = s0 * f0 + s1 * f1
        elif ELEM == "e4m3":
            half = s0 + s1
        else:
            q = tl.arange(0, 4)[None, None, :]
            half = s0 * tl.where(q == 0, 16384.0, 1.0) + s1 * 128.0
        if h == 0:
            part = half
        else:
            part += half
    if FOUR:
        STEPS: tl.constexpr = (0.5 if ELEM == "e2m1" else 1.0) * 2.0**LOW / TOP2
        factor = tl.broadcast_to((scales[1] * (unit * STEPS))[:, None], [32, REP])
    else:
        STEPS: tl.constexpr = 1.0 if ELEM == "e4m3" else 2.0**LOW / TOP3
        by_lane = unit * STEPS
        factor = scales[0] * tl.broadcast_to(by_lane, [32])[:, None]
    part = part * _by_lane(factor, REP) + _by_lane(pushed, REP)
    return _sum_lanes(part, REP)
