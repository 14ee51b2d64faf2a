"""Inner product of the rows of an output copy with one vector: what every non-flush step reads.

y[r] = sum_n O[r, n] c[n] for a block of rows, in every format. Four-bit and e4m3 codes are decoded
to pairs of fp16 numbers by packed instructions where inline PTX may be used; c is then scaled to a
largest magnitude of one, so that no sum of fp16 products can overflow. Sums over four words (4-bit)
or eight codes (e4m3) stay in fp16, everything after them is fp32: within 1e-3 of the exact product,
far below the error of the codes. The portable path is fp32 throughout and is the reference.
"""

import triton
import triton.language as tl

from .matrix import store_operand
from .planes import (
    PTX,
    as_bits,
    as_float,
    code_values,
    element_bits_of,
    load_scales,
    load_words,
    spread,
)


def _e2m1_asm():
    """Four words ($4..$7), c pairs $8 + 4 e + j -> half2 sums $0..$3 of planes (e, e + 4).

    A nibble's sign, exponent and mantissa move to their fp16 places, which reads as the value times
    2**-14 (subnormals included).
    """
    out = ["{ .reg .b32 a, s, f;"]
    for e in range(4):
        for j in range(4):
            for reg, place in (("a", 9 - 4 * e), ("s", 12 - 4 * e)):
                op = f"shl.b32 {reg}, ${4 + j}, {place};"
                out.append(op if place >= 0 else f"shr.b32 {reg}, ${4 + j}, {-place};")
            out.append("and.b32 a, a, 0x0E000E00;")
            out.append("lop3.b32 f, s, 0x80008000, a, 0xEA;")
            c = f"${8 + 4 * e + j}"
            fma = f"mul.rn.f16x2 ${e}, f, {c};" if j == 0 else f"fma.rn.f16x2 ${e}, f, {c}, ${e};"
            out.append(fma)
    return " ".join([*out, "}"])


def _int4_asm():
    """The same for nibbles of code + 8: 0x6400 | nibble reads as the fp16 number 1024 + nibble."""
    out = [
        "{ .reg .b32 t, f, one, sx, m0, m1; mov.b32 one, 0x3C003C00; mov.b32 sx, 0x2C002C00; "
        "mov.b32 m0, 0xE408E408; mov.b32 m1, 0xD480D480;"
    ]  # 1, 1/16, -1032, -72
    for j in range(4):
        for upper in range(2):
            word = f"${4 + j}"
            if upper:
                out.append(f"shr.u32 t, {word}, 8;")
                word = "t"
            for k, (mask, mul, add) in enumerate(
                (("0x000F000F", "one", "m0"), ("0x00F000F0", "sx", "m1"))
            ):
                e = 2 * upper + k
                c = f"${8 + 4 * e + j}"
                out.append(f"lop3.b32 f, {word}, {mask}, 0x64006400, 0xEA;")
                out.append(f"fma.rn.f16x2 f, f, {mul}, {add};")
                fma = f"mul.rn.f16x2 ${e}, f, {c};"
                out.append(fma if j == 0 else f"fma.rn.f16x2 ${e}, f, {c}, ${e};")
    return " ".join([*out, "}"])


@triton.constexpr_function
def _scale_pairs_asm(blocks_per_plane_inverse):
    """Two words of e4m3 block scales ($4, $5) -> half2 scales $0..$3 of planes (e, e + 4)."""
    out = ["{ .reg .b32 t; .reg .b16 p, q;"]
    for e in range(4):
        low, high = e // blocks_per_plane_inverse, (e + 4) // blocks_per_plane_inverse
        out.append(f"prmt.b32 t, $4, $5, {high * 16 + low};")
        out.append("mov.b32 {p, q}, t;")
        out.append(f"cvt.rn.f16x2.e4m3x2 ${e}, p;")
    return " ".join([*out, "}"])


_APPLY_SCALES = tl.constexpr(
    "mul.rn.f16x2 $0, $1, $5; fma.rn.f16x2 $0, $2, $6, $0; "
    "fma.rn.f16x2 $0, $3, $7, $0; fma.rn.f16x2 $0, $4, $8, $0;"
)
_E4M3_WORD = tl.constexpr(
    "{ .reg .b16 p, q; .reg .b32 f; mov.b32 {p, q}, $1; cvt.rn.f16x2.e4m3x2 f, p; "
    "mul.rn.f16x2 $0, f, $2; cvt.rn.f16x2.e4m3x2 f, q; fma.rn.f16x2 $0, f, $3, $0; }"
)
_INT8_WORD = tl.constexpr(
    "{ .reg .b32 b; xor.b32 b, $4, 0x80808080; "
    "prmt.b32 $0, b, 0x4B000000, 0x7440; prmt.b32 $1, b, 0x4B000000, 0x7441; "
    "prmt.b32 $2, b, 0x4B000000, 0x7442; prmt.b32 $3, b, 0x4B000000, 0x7443; }"
)
_E2M1 = tl.constexpr(_e2m1_asm())
_INT4 = tl.constexpr(_int4_asm())
_QUAD = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 20))


@triton.jit
def half_pair(low, high):
    """Two fp32 tensors as int32 words of fp16 pairs, ``low`` in the low half."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@triton.jit
def half_sum(pair):
    """low + high of fp16 pairs in int32 words, in fp32."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low + high


@triton.constexpr_function
def path_of(ptx, n, output):
    """Which packed decode serves a format: "4bit", "e4m3", "int8", or "" for the portable one."""
    elem, gran = output[0], output[3]
    if not ptx:
        return ""
    if elem in ("e2m1", "int4") and n % 32 == 0:
        return "4bit"
    if elem == "e4m3" and gran == "row":
        return "e4m3"
    if elem == "int8" and gran == "row":
        return "int8"
    return ""


@triton.constexpr_function
def scales_by_plane(n, block, scale):
    """True if each nibble plane lies in one block and whole words hold the e4m3 scales of a row."""
    return scale == "e4m3" and block % (n // 8) == 0 and n // block in (4, 8)


@triton.jit
def load_vector(c_ptr, inverse_top, N: tl.constexpr, WP: tl.constexpr, OUTPUT: tl.constexpr):
    """The vector c [N] (fp32 in memory) in the form that ``copy_dot`` wants, a tuple of tensors.

    inverse_top: 1 / max |c| (any positive number if c is zero).
    """
    W: tl.constexpr = N // 8
    PATH: tl.constexpr = path_of(PTX, N, OUTPUT)
    out = ()
    if PATH == "4bit":
        quad = tl.arange(0, WP // 4)
        ok = quad < W // 4
        for e in tl.static_range(4):
            for j in tl.static_range(4):
                at = c_ptr + e * W + 4 * quad + j
                low = tl.load(at, mask=ok, other=0.0) * inverse_top
                high = tl.load(at + 4 * W, mask=ok, other=0.0) * inverse_top
                out = out + (half_pair(low, high),)
    else:
        column = tl.arange(0, WP)
        ok = column < W
        for i in tl.static_range(8):
            out = out + (tl.load(c_ptr + i * W + column, mask=ok, other=0.0),)
        if PATH == "e4m3":
            pairs = ()
            for k in tl.static_range(4):
                pairs = pairs + (half_pair(out[2 * k] * inverse_top, out[2 * k + 1] * inverse_top),)
            out = pairs
    return out


@triton.jit
def store_vector(
    c_ptr, x, inverse_top, ok, N: tl.constexpr, NP: tl.constexpr, OUTPUT: tl.constexpr,
    MATRIX: tl.constexpr = False,
):  # fmt: skip
    """Store vectors x [ROWS, NP] (zero beyond N) so that ``load_stored`` reads them as they are.

    c_ptr int32 [ROWS, 1]: room for N words a vector; ok [ROWS, 1]; inverse_top [ROWS, 1]: 1 / max
    |x| (any positive number if x is zero). MATRIX: for ``matrix.load_operand`` instead.
    """
    W: tl.constexpr = N // 8
    PATH: tl.constexpr = path_of(PTX, N, OUTPUT)
    if MATRIX:
        store_operand(c_ptr, x, inverse_top, ok, N, OUTPUT)
    elif PATH == "4bit" or PATH == "e4m3":
        m = tl.arange(0, NP // 2)[None, :]
        if PATH == "4bit":  # pairs (m, m + N / 2), the same word of all quads side by side
            first = m
            second = m + N // 2
            in_plane = m % W
            at = (m // W * 4 + in_plane % 4) * (W // 4) + in_plane // 4
        else:  # pairs of neighbouring planes
            first = m // W * (2 * W) + m % W
            second = first + W
            at = m
        x = x * inverse_top
        low = tl.gather(x, tl.broadcast_to(tl.minimum(first, NP - 1), [x.shape[0], NP // 2]), 1)
        high = tl.gather(x, tl.broadcast_to(tl.minimum(second, NP - 1), [x.shape[0], NP // 2]), 1)
        tl.store(c_ptr + at, half_pair(low, high), mask=ok & (m < N // 2))
    else:
        n = tl.arange(0, NP)[None, :]
        tl.store(c_ptr + n, as_bits(x), mask=ok & (n < N))


@triton.jit
def load_stored(c_ptr, N: tl.constexpr, WP: tl.constexpr, OUTPUT: tl.constexpr):
    """What ``load_vector`` returns, from the int32 words of ``store_vector``."""
    W: tl.constexpr = N // 8
    PATH: tl.constexpr = path_of(PTX, N, OUTPUT)
    out = ()
    if PATH == "4bit":
        quad = tl.arange(0, WP // 4)
        for k in tl.static_range(16):
            word = tl.load(c_ptr + k * (W // 4) + quad, mask=quad < W // 4, other=0)
            out = out + (word,)
    else:
        column = tl.arange(0, WP)
        for k in tl.static_range(4 if PATH == "e4m3" else 8):
            word = tl.load(c_ptr + k * W + column, mask=column < W, other=0)
            out = out + (word if PATH == "e4m3" else as_float(word),)
    return out


@triton.jit
def copy_dot(
    code_ptr,
    scale_ptr,
    tile_ptr,
    c,
    top,
    row,
    row_ok,
    R: tl.constexpr,
    N: tl.constexpr,
    WP: tl.constexpr,
    TILES: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """sum_n O[row, n] c[n] as fp32 [rows].

    Pointers are at the first head; ``row`` int32 [rows] counts rows from there on, through one head
    into the next. c from ``load_vector``, top = max |c|. OUTPUT is a ``kernel_format``; of a planar
    one only the high plane is read.
    """
    ELEM: tl.constexpr = OUTPUT[0]
    LOW: tl.constexpr = OUTPUT[1]
    GRAN: tl.constexpr = OUTPUT[3]
    BLOCK: tl.constexpr = OUTPUT[4]
    SCALE: tl.constexpr = OUTPUT[5]
    W: tl.constexpr = N // 8
    WORDS: tl.constexpr = element_bits_of(ELEM) // 4
    PATH: tl.constexpr = path_of(PTX, N, OUTPUT)
    SHIFT: tl.constexpr = 2.0**LOW
    tile = 0.0
    if GRAN == "block" and SCALE == "e4m3":
        tile_of = (row // R) * TILES + (row % R) // 16
        tile = tl.load(tile_ptr + tile_of, mask=row_ok, other=0.0)
    if PATH == "4bit":
        QP: tl.constexpr = WP // 4
        quad = tl.arange(0, QP)
        word = tl.arange(0, WP)[None, :]
        # whole rows side by side: sixteen bytes a thread; the reshape moves nothing
        at = row[:, None] * W + word
        quads = tl.load(code_ptr + at, mask=row_ok[:, None] & (word < W), other=0)
        even, odd = tl.split(tl.reshape(quads, [row.shape[0], QP, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        args = (w0, w1, w2, w3)
        for k in tl.static_range(16):
            args = args + (c[k][None, :],)
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            _E2M1 if ELEM == "e2m1" else _INT4,
            _QUAD,
            args,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        UNIT: tl.constexpr = 2.0**14 if ELEM == "e2m1" else 1.0
        if GRAN == "block" and not scales_by_plane(N, BLOCK, SCALE):
            total = tl.zeros([row.shape[0], QP], tl.float32)
            sums = (s0, s1, s2, s3)
            for e in tl.static_range(4):
                low = (sums[e] & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
                high = (sums[e] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
                k0 = (e * W + 4 * quad) // BLOCK
                k1 = ((e + 4) * W + 4 * quad) // BLOCK
                base = scale_ptr + row[:, None] * (N // BLOCK)
                m = row_ok[:, None] & (quad < W // 4)[None, :]
                c0 = tl.load(base + k0[None, :], mask=m, other=0)
                c1 = tl.load(base + k1[None, :], mask=m, other=0)
                if SCALE == "e4m3":
                    f0 = as_float(c0.to(tl.int32) << 20) * 2.0**120
                    f1 = as_float(c1.to(tl.int32) << 20) * 2.0**120
                elif SCALE == "e8m0":
                    f0 = as_float(c0.to(tl.int32) << 23)
                    f1 = as_float(c1.to(tl.int32) << 23)
                    f0 = tl.where(c0 == 255, float("nan"), f0)
                    f1 = tl.where(c1 == 255, float("nan"), f1)
                else:
                    f0 = c0.to(tl.float32)
                    f1 = c1.to(tl.float32)
                total += low.to(tl.float32) * f0 + high.to(tl.float32) * f1
            y = tl.sum(total, 1) * (top * UNIT * SHIFT)
            if SCALE == "e4m3":
                y = y * tile
        else:
            if GRAN == "block":
                FIRST: tl.constexpr = N // BLOCK // 4
                word = scale_ptr.to(tl.pointer_type(tl.int32)) + row * FIRST
                a = tl.load(word, mask=row_ok, other=0)
                b = tl.load(word + FIRST - 1, mask=row_ok, other=0)
                f0, f1, f2, f3 = tl.inline_asm_elementwise(
                    _scale_pairs_asm(BLOCK // W),
                    "=&r,=&r,=&r,=&r,r,r",
                    [a, b],
                    dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
                f0, f1, f2, f3 = f0[:, None], f1[:, None], f2[:, None], f3[:, None]
            else:
                one = tl.full([1, 1], 0x3C003C00, tl.int32)
                f0, f1, f2, f3 = one, one, one, one
            both = tl.inline_asm_elementwise(
                _APPLY_SCALES,
                "=&r,r,r,r,r,r,r,r,r",
                [s0, s1, s2, s3, f0, f1, f2, f3],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
            y = tl.sum(half_sum(both), 1) * (top * UNIT * SHIFT)
            if GRAN == "block":
                y = y * tile
            elif GRAN == "row":
                y = y * tl.load(scale_ptr + row, mask=row_ok, other=0.0).to(tl.float32)
        return y
    else:
        column = tl.arange(0, WP)
        column_ok = column < W
        mask = row_ok[:, None] & column_ok[None, :]
        words = load_words(code_ptr, row[:, None] * (WORDS * W) + column[None, :], mask, W, ELEM)
        if PATH == "e4m3":
            total = tl.zeros([row.shape[0], WP], tl.float32)
            for h in tl.static_range(2):
                both = tl.inline_asm_elementwise(
                    _E4M3_WORD,
                    "=&r,r,r,r",
                    [words[h], c[2 * h][None, :], c[2 * h + 1][None, :]],
                    dtype=tl.int32,
                    is_pure=True,
                    pack=1,
                )
                total += half_sum(both)
            scale = tl.load(scale_ptr + row, mask=row_ok, other=0.0).to(tl.float32)
            return tl.sum(total, 1) * (scale * top)
        elif PATH == "int8":
            total = tl.zeros([row.shape[0], WP], tl.float32)
            for h in tl.static_range(2):
                b0, b1, b2, b3 = tl.inline_asm_elementwise(
                    _INT8_WORD,
                    "=&r,=&r,=&r,=&r,r",
                    [words[h]],
                    dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                    is_pure=True,
                    pack=1,
                )
                total += (as_float(b0) - 8388736.0) * c[4 * h][None, :]
                total += (as_float(b1) - 8388736.0) * c[4 * h + 1][None, :]
                total += (as_float(b2) - 8388736.0) * c[4 * h + 2][None, :]
                total += (as_float(b3) - 8388736.0) * c[4 * h + 3][None, :]
            scale = tl.load(scale_ptr + row, mask=row_ok, other=0.0).to(tl.float32)
            return tl.sum(total, 1) * (scale * SHIFT)
        else:
            values = code_values(words, ELEM, GRAN == "none")
            if GRAN != "none":
                scales = load_scales(scale_ptr, tile, row, row_ok, GRAN, SCALE, BLOCK, N)
            total = tl.zeros([row.shape[0], WP], tl.float32)
            for i in tl.static_range(8):
                part = values[i] * c[i][None, :]
                if GRAN != "none":
                    part = part * spread(scales, column, i, W, BLOCK, N)
                total += part
            return tl.sum(tl.where(mask, total, 0.0), 1) * SHIFT
