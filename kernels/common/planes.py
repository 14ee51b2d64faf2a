"""Device code of the formats: a tile of a state as sixteen tensors, decoded and encoded.

Bit for bit the arithmetic of ``formats/codec.py``. A tile is 16 rows of one head: row pairs [8] by
columns [W], W = N / 8 (padded to a power of two). Element (row 2 q + p, n = i * W + j) of the tile
is entry (q, j) of tensor number p * 8 + i. In plane order (``formats/packing.py``) a thread that
owns (q, j) then owns whole stored words in every format, and one Philox call serves exactly its
sixteen elements: no value ever moves between threads, except in the reductions of a row.
"""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Inline PTX may be used: not in the interpreter, not on AMD; both paths give the same bits."""
PAIRS = tl.constexpr(8)  # row pairs of a tile: 16 rows, formats.spec.TILE_ROWS
_MIN_SCALE = tl.constexpr(2.0**-100)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def as_float(bits):
    """Reinterpret int32 bits as fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(x):
    """Reinterpret fp32 as int32 bits."""
    return x.to(tl.int32, bitcast=True)


@triton.constexpr_function
def element_bits_of(elem):
    """Stored bits of an element name."""
    return {
        "fp32": 32,
        "fp16": 16,
        "bf16": 16,
        "e4m3": 8,
        "e5m2": 8,
        "int8": 8,
        "int4": 4,
        "e2m1": 4,
    }[elem]


@triton.constexpr_function
def float_fields(elem):
    """(mantissa bits, smallest normal exponent, top code, largest value, NaN code)."""
    return {
        "fp16": (10, -14, 0x7BFF, 65504.0, 0x7E00),
        "bf16": (7, -126, 0x7F7F, 3.3895313892515355e38, 0x7FC0),
        "e4m3": (3, -6, 0x7E, 448.0, 0x7F),
        "e5m2": (2, -14, 0x7B, 57344.0, 0x7F),
        "e2m1": (1, 0, 0x7, 6.0, 0),
    }[elem]


@triton.constexpr_function
def intersects(plane, width, block, index):
    """True if elements of plane number ``plane`` lie in block ``index``."""
    return plane * width < (index + 1) * block and (plane + 1) * width > index * block


@triton.constexpr_function
def contained(plane, width, block, index):
    """True if the whole plane lies in block ``index``."""
    return plane * width >= index * block and (plane + 1) * width <= (index + 1) * block


# --- decode ---------------------------------------------------------------------------------------


@triton.jit
def code_value(word, T: tl.constexpr, ELEM: tl.constexpr, HAS_NAN: tl.constexpr):
    """fp32 value, before its scale, of element T of int32 words; int4 words hold code + 8."""
    if ELEM == "fp32":
        value = as_float(word)
    elif ELEM == "fp16":
        half = ((word >> (16 * T)) & 0xFFFF).to(tl.int16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEM == "bf16":
        value = as_float(word << 16) if T == 0 else as_float(word & -65536)
    elif ELEM == "int8":
        value = ((word << (24 - 8 * T)) >> 24).to(tl.float32)
    elif ELEM == "int4":
        value = (((word >> (4 * T)) & 15) - 8).to(tl.float32)
    elif ELEM == "e2m1":
        code = word >> (4 * T)
        value = as_float(((code & 8) << 28) | ((code & 7) << 22)) * 2.0**126
    elif ELEM == "e4m3":
        code = word >> (8 * T)
        value = as_float(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * 2.0**120
        if HAS_NAN:
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        tl.static_assert(ELEM == "e5m2", "unknown element")
        code = word >> (8 * T)
        value = as_float(((code & 0x80) << 24) | ((code & 0x7F) << 21)) * 2.0**112
        if HAS_NAN:
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def load_words(ptr, offs, mask, W: tl.constexpr, ELEM: tl.constexpr, ALWAYS: tl.constexpr = False):
    """The int32 words of a row piece: a tuple of bits / 4 tensors at ``offs``, ``offs + W``, ..."""
    words = ()
    for h in tl.static_range(element_bits_of(ELEM) // 4):
        words = words + (load_if(ptr + offs + h * W, mask, ALWAYS),)
    return words


@triton.jit
def half_values(word):
    """Both fp16 numbers of int32 words, low half first, as fp32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return code_value(word, 0, "fp16", False), code_value(word, 1, "fp16", False)


@triton.jit
def shift(x, BY: tl.constexpr):
    """x << BY, or x >> -BY."""
    if BY >= 0:
        return x << BY
    else:
        return x >> -BY


@triton.constexpr_function
def integer_bias(bits, low):
    """What is added to an integer of ``low`` low bits so that its stored parts are unsigned."""
    return (1 << (bits - 1 + low)) + ((1 << (low - 1)) if low else 0)


@triton.jit
def integer_value(high, low, PLANE: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr):
    """fp32 value of integer number PLANE of a row piece; bytes with their sign bit flipped.

    Set below the exponent of 2**23, the bits of an integer and its bias read as 2**23 plus both.
    """
    PER: tl.constexpr = 32 // BITS
    WIDE: tl.constexpr = ((1 << BITS) - 1) << LOW
    bits = (shift(high, LOW - BITS * (PLANE % PER)) & WIDE) | 0x4B000000
    if LOW > 0:
        bits = bits | (shift(low, -LOW * (PLANE % (32 // LOW))) & ((1 << LOW) - 1))
    return as_float(bits) - (8388608.0 + integer_bias(BITS, LOW))


@triton.jit
def code_values(words, ELEM: tl.constexpr, HAS_NAN: tl.constexpr):
    """Words of one row piece -> its eight planes as fp32 code values."""
    PER: tl.constexpr = 32 // element_bits_of(ELEM)
    values = ()
    if ELEM == "fp16":
        for w in tl.static_range(4):
            low, high = half_values(words[w])
            values = values + (low, high)
    elif ELEM == "int8" or ELEM == "int4":
        FLIP: tl.constexpr = -0x7F7F7F80 if ELEM == "int8" else 0  # 0x80808080
        for i in tl.static_range(8):
            word = words[i // PER] ^ FLIP
            values = values + (integer_value(word, word, i, 32 // PER, 0),)
    else:
        for i in tl.static_range(8):
            values = values + (code_value(words[i // PER], i % PER, ELEM, HAS_NAN),)
    return values


@triton.jit
def planar_values(highs, lows, ELEM: tl.constexpr, LOW: tl.constexpr):
    """The eight planes of both parts of a planar format, as fp32 integers."""
    BITS: tl.constexpr = element_bits_of(ELEM)
    FLIP: tl.constexpr = -0x7F7F7F80 if BITS == 8 else 0
    FLIP_LOW: tl.constexpr = -0x7F7F7F80 if LOW == 8 else 0
    values = ()
    for i in tl.static_range(8):
        high = highs[i // (32 // BITS)] ^ FLIP
        low = lows[i // (32 // LOW)] ^ FLIP_LOW
        values = values + (integer_value(high, low, i, BITS, LOW),)
    return values


@triton.jit
def e4m3_scale(code):
    """fp32 value of non-negative e4m3 codes in int32."""
    return as_float(code << 20) * 2.0**120


@triton.jit
def e8m0_scale(code):
    """fp32 value of e8m0 codes in int32."""
    value = as_float(tl.where(code > 0, code << 23, 1 << 22))
    return tl.where(code == 255, float("nan"), value)


@triton.jit
def load_scales(
    scale_ptr,
    tile,
    row,
    mask,
    GRAN: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    ALWAYS: tl.constexpr = False,
):
    """fp32 scales of rows: a tuple of one tensor, or of one a block; ``tile`` fp32 [rows].

    ``scale_ptr`` is typed by the stored scale (fp32, fp16, uint8) and points at this head; ``row``
    counts within the head.
    """
    COUNT: tl.constexpr = N // BLOCK if GRAN == "block" else 1
    BYTES: tl.constexpr = SCALE == "e4m3" or SCALE == "e8m0"
    PER: tl.constexpr = 4 if COUNT % 4 == 0 else (2 if COUNT % 2 == 0 else 1)
    scales = ()
    word = row * 0
    for k in tl.static_range(COUNT):
        if GRAN == "block" and BYTES and PER > 1:
            # several bytes a load; and a product fed by 8-bit loads would take a wrong layout
            if k % PER == 0:
                wide = scale_ptr.to(tl.pointer_type(tl.int32 if PER == 4 else tl.int16))
                word = load_if(wide + row * (COUNT // PER) + k // PER, mask, ALWAYS)
                word = word.to(tl.int32)
            stored = (word >> (8 * (k % PER))) & 0xFF
        else:
            at = scale_ptr + row * COUNT + k
            if GRAN == "head":
                at = scale_ptr + row * 0
            stored = load_if(at, mask, ALWAYS)
        if SCALE == "e4m3":
            s = e4m3_scale(stored.to(tl.int32)) * tile
        elif SCALE == "e8m0":
            s = e8m0_scale(stored.to(tl.int32))
        else:
            s = stored.to(tl.float32)
        scales = scales + (s,)
    return scales


@triton.jit
def spread(
    scales, column, PLANE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """The scale of each element of a plane; broadcasts against [rows, W]."""
    if BLOCK == 0:
        return scales[0][:, None]
    else:
        FIRST: tl.constexpr = (PLANE * W) // BLOCK
        out = scales[FIRST][:, None]
        for k in tl.static_range(N // BLOCK):
            if k > FIRST and intersects(PLANE, W, BLOCK, k):
                out = tl.where((PLANE * W + column)[None, :] >= k * BLOCK, scales[k][:, None], out)
        return out


# --- random bits ----------------------------------------------------------------------------------


@triton.jit
def random_words(
    key,
    position,
    layer,
    head,
    pair,
    column,
    R: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Philox words of a tile as ``formats.philox.element_bits`` counts them: 4, or 8 for 16 bits.

    key int64, position, layer and (global) head int32 scalars; pair [8, 1] row pairs of the head,
    column [1, W].
    """
    count = (head * ((R + 1) // 2) + pair) * W + column
    zero = count * 0
    if BITS == 8:
        a, b, c, d = tl.philox(key, count, zero + position, zero + layer, zero, ROUNDS)
        return (a, b, c, d)
    else:
        a, b, c, d = tl.philox(key, count, zero + position, zero + layer, zero + 1, ROUNDS)
        e, f, g, h = tl.philox(key, count, zero + position, zero + layer, zero + 2, ROUNDS)
        return (a, b, c, d, e, f, g, h)


@triton.jit
def random_of(words, ENTRY: tl.constexpr, BITS: tl.constexpr):
    """The random number of tile entry p * 8 + i, int32 in 0..2**BITS - 1."""
    if BITS == 8:
        word = words[ENTRY // 4] >> (8 * (ENTRY % 4))
        return (word & 0xFF).to(tl.int32)
    else:
        word = words[ENTRY // 2] >> (16 * (ENTRY % 2))
        return (word & 0xFFFF).to(tl.int32)


@triton.constexpr_function
def _byte_asm(place, constant):
    return f"prmt.b32 $0, $1, {constant:#x}, {0x7604 + 16 * place:#x};"


@triton.jit
def random_fraction(words, ENTRY: tl.constexpr):
    """(r + 0.5) / 2**18 of the 8-bit random number of a tile entry, fp32."""
    if PTX:
        ASM: tl.constexpr = _byte_asm(ENTRY % 4, 0x3E000080)  # 1/8 + (r + 0.5) / 2**18
        bits = tl.inline_asm_elementwise(
            ASM, "=r,r", [words[ENTRY // 4]], dtype=tl.int32, is_pure=True, pack=1
        )
        return as_float(bits) - 0.125
    else:
        return (random_of(words, ENTRY, 8).to(tl.float32) + 0.5) * 2.0**-18


@triton.jit
def random_offset(words, ENTRY: tl.constexpr):
    """(r - 127.5) / 256 of the 8-bit random number of a tile entry, fp32."""
    if PTX:
        ASM: tl.constexpr = _byte_asm(ENTRY % 4, 0x43000000)  # 128 + r / 256
        bits = tl.inline_asm_elementwise(
            ASM, "=r,r", [words[ENTRY // 4]], dtype=tl.int32, is_pure=True, pack=1
        )
        return as_float(bits) - 128.498046875
    else:
        return (random_of(words, ENTRY, 8).to(tl.float32) - 127.5) * 2.0**-8


# --- encode ---------------------------------------------------------------------------------------


@triton.jit
def grid_even(x, M: tl.constexpr, EMIN: tl.constexpr):
    """x rounded to nearest even with M mantissa bits, smallest normal exponent EMIN; |x| < 2**100.

    Adding and subtracting 1.5 * 2**23 steps of the value's own binade rounds at that step.
    """
    exponent = tl.maximum(as_bits(x) & 0x7F800000, (EMIN + 127) << 23)
    magic = as_float(exponent + (((23 - M) << 23) | 0x400000))
    return (x + magic) - magic


@triton.jit
def float_field(
    x, words, ENTRY: tl.constexpr, ELEM: tl.constexpr, ROUND: tl.constexpr, BITS: tl.constexpr,
    HAS_NAN: tl.constexpr,
):  # fmt: skip
    """Rounded magnitudes as codes << DROP (DROP = 23 - mantissa bits); the bits below are noise.

    ROUND is "sr" (with the random ``words`` of a tile), "rn" or "up". Multiplied by
    2**(EMIN - 1 - -126), a magnitude's fp32 bits are its code followed by the bits that rounding
    drops, in the subnormal range too. The product is written as fma(a, b, 0), the same number: of a
    plain one whose bits are then shifted left, ptxas 12.8 makes 0.
    """
    FIELDS: tl.constexpr = float_fields(ELEM)
    M: tl.constexpr = FIELDS[0]
    EMIN: tl.constexpr = FIELDS[1]
    MAX: tl.constexpr = FIELDS[3]
    DROP: tl.constexpr = 23 - M
    SHIFT: tl.constexpr = 2.0 ** (-126 - EMIN)
    mag = tl.minimum(tl.abs(x), MAX)  # drops NaN, which gets its code below
    if ROUND == "rn" and ELEM == "bf16":
        field = as_bits(mag)
        field = field + 0x7FFF + ((field >> 16) & 1)
    elif ROUND == "rn" and ELEM == "e2m1":
        field = as_bits(tl.fma(mag, SHIFT, 0.0))
        field = field + ((1 << (DROP - 1)) - 1) + ((field >> DROP) & 1)
    elif ROUND == "rn":
        field = as_bits(tl.fma(grid_even(mag, M, EMIN), SHIFT, 0.0))
    elif ROUND == "up":
        exponent = tl.maximum((as_bits(mag) >> 23) - 127, EMIN)
        steps = tl.ceil(mag * as_float((M - exponent + 127) << 23))
        code = tl.minimum(((exponent - EMIN) << M) + steps.to(tl.int32), FIELDS[2])
        field = tl.maximum(code, (mag > 0).to(tl.int32)) << DROP  # a ceil flushes subnormals
    elif ELEM == "fp16" and BITS == 8:
        mag = tl.abs(x) + random_fraction(words, ENTRY) * half_step(x)
        field = as_bits(tl.fma(tl.minimum(mag, MAX), SHIFT, 0.0))
        field = tl.where(as_bits(tl.abs(x)) == _INF_BITS, 0x7C00 << DROP, field)
    else:
        field = as_bits(tl.fma(mag, SHIFT, 0.0))
        r = random_of(words, ENTRY, BITS)
        if BITS == 8:
            field = field + ((r << (DROP - 8)) | (1 << (DROP - 9)))
        elif DROP >= 17:
            field = field + ((r << (DROP - 16)) | (1 << (DROP - 17)))
        else:
            field = field + (r >> (16 - DROP))
    if HAS_NAN:
        field = tl.where(x != x, FIELDS[4] << DROP, field)
    return field


@triton.jit
def half_step(x):
    """2**10 times the step of fp16 at x: the power of two below |x|, at least 2**-14."""
    return as_float(tl.maximum(as_bits(x) & 0x7F800000, 113 << 23))


@triton.jit
def half_pair_stochastic(low, high, words, ENTRY: tl.constexpr):
    """Two values as an int32 word of fp16 numbers, rounded by the words of entries ENTRY, + 1.

    Less than one step is added away from zero, then the conversion truncates.
    """
    out = ()
    for e in tl.static_range(2):
        x = low if e == 0 else high
        step = as_float(as_bits(half_step(x)) | (as_bits(x) & -2147483648))
        out = out + (tl.fma(random_fraction(words, ENTRY + e), step, x),)
    return tl.inline_asm_elementwise(
        "cvt.rz.f16x2.f32 $0, $2, $1;", "=r,f,f", [out[0], out[1]], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def place_float(word, x, field, PLANE: tl.constexpr, ELEM: tl.constexpr):
    """OR the code of ``float_field`` and the sign of x into words, as element number PLANE."""
    WIDTH: tl.constexpr = element_bits_of(ELEM)
    AT: tl.constexpr = WIDTH * (PLANE % (32 // WIDTH))
    DROP: tl.constexpr = 23 - float_fields(ELEM)[0]
    MASK: tl.constexpr = ((1 << (WIDTH - 1)) - 1) << AT
    SIGN: tl.constexpr = -2147483648 if AT + WIDTH == 32 else 1 << (AT + WIDTH - 1)
    word = word | (shift(field, AT - DROP) & MASK)
    return word | (shift(as_bits(x), AT + WIDTH - 32) & SIGN)


@triton.jit
def float_code(
    x, r, ELEM: tl.constexpr, ROUND: tl.constexpr, BITS: tl.constexpr, HAS_NAN: tl.constexpr
):
    """Codes (int32) of fp32 values in a float element, given one random number each."""
    field = float_field(x, (r,), 0, ELEM, ROUND, BITS, HAS_NAN)
    return place_float(as_bits(x) & 0, x, field, 0, ELEM)


@triton.jit
def rounded_product(x, y):
    """x y in fp32, rounded before anything is added to it: a compiler would make one fma of both,
    and decide a tie otherwise than the codec.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * y


@triton.jit
def integer_bits(
    t, words, ENTRY: tl.constexpr, TOP: tl.constexpr, BIAS: tl.constexpr, SR: tl.constexpr,
    BITS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """fp32 bits whose low places hold the rounded integer of scaled values plus BIAS (even).

    CLAMP to +-TOP, unless no scale is below its group's largest value / TOP: values then exceed TOP
    by less than the 2 / 1024 that separate an 8-bit draw from the next integer.
    """
    if SR and BITS == 8:
        t = t + random_offset(words, ENTRY)
    elif SR:  # 16 bits: the fraction apart, or large values would leave the draw too few places
        u = (random_of(words, ENTRY, BITS).to(tl.float32) + 0.5) * 2.0**-16
        whole = tl.floor(t)
        t = whole + tl.floor((t - whole) + u)
    if CLAMP:
        t = tl.minimum(tl.maximum(t, -TOP), TOP)
    return as_bits(t + (12582912.0 + BIAS))


@triton.jit
def int_code(t, r, TOP: tl.constexpr, SR: tl.constexpr, BITS: tl.constexpr):
    """Signed integer codes (int32) of scaled fp32 values, given one random number each."""
    return integer_bits(t, (r,), 0, TOP, 0, SR, BITS, True) - 0x4B400000


@triton.jit
def _magnitude(x):
    return as_bits(x) & 0x7FFFFFFF


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded, for 2**-126 <= x <= 2**126: one Newton step is enough."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; "
            "neg.f32 e, e; fma.rn.f32 $0, r, e, r; }",
            "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def divide(x, y, inverse):
    """x / y, correctly rounded, given 1 / y correctly rounded (Markstein's correction)."""
    if PTX:
        q = x * inverse
        return tl.fma(tl.fma(-q, y, x), inverse, q)
    else:
        return tl.div_rn(x, y)


@triton.jit
def floored_scale(raw):
    """0, or at least 2**-100, or NaN for a group with NaN or Inf."""
    s = tl.where(raw > 0, tl.maximum(raw, _MIN_SCALE), raw)
    return tl.where(_magnitude(raw) >= _INF_BITS, float("nan"), s)


@triton.jit
def group_amax(
    values, P: tl.constexpr, column, W: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Largest magnitudes of the rows of parity P, one [8] a group; NaN and Inf survive."""
    COUNT: tl.constexpr = N // BLOCK if BLOCK > 0 else 1
    out = ()
    for k in tl.static_range(COUNT):
        top = tl.zeros(values[P * 8].shape, tl.float32)
        for i in tl.static_range(8):
            mag = tl.abs(values[P * 8 + i])
            if BLOCK == 0 or contained(i, W, BLOCK, k):
                top = tl.maximum(top, mag, propagate_nan=tl.PropagateNan.ALL)
            elif intersects(i, W, BLOCK, k):
                n = (i * W + column)[None, :]
                inside = (n >= k * BLOCK) & (n < (k + 1) * BLOCK)
                mag = tl.where(inside, mag, 0.0)
                top = tl.maximum(top, mag, propagate_nan=tl.PropagateNan.ALL)
        out = out + (as_float(tl.max(as_bits(top), 1)),)  # bits order NaN above Inf above numbers
    return out


@triton.jit
def make_scale(
    amax, tile, tile_inverse, SCALE: tl.constexpr, MAX_CODE: tl.constexpr, UP: tl.constexpr
):
    """(stored scale as int32 bits, fp32 scale) of a group; ``tile`` fp32, or 0 where unused."""
    raw = divide(amax, MAX_CODE, 1.0 / MAX_CODE)
    if SCALE == "fp32":
        s = floored_scale(raw)
        return as_bits(s), s
    elif SCALE == "fp16":
        finite = _magnitude(raw) < _INF_BITS
        low = float_code(raw, raw.to(tl.int32), "fp16", "rn", 8, False)
        value = code_value(low, 0, "fp16", False)
        low = tl.minimum(tl.where(value < raw, low + 1, low), 0x7BFF)
        low = tl.where(finite, low, 0x7E00)
        return low, code_value(low, 0, "fp16", False)
    elif SCALE == "e8m0":
        bits = as_bits(raw)
        exp = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        exp = tl.minimum(tl.maximum(exp, 27), 254)
        code = tl.where(bits < _INF_BITS, exp, 255)
        return code, e8m0_scale(code)
    else:
        ratio = tl.where(tile > 0, divide(raw, tile, tile_inverse), 0.0)
        code = float_code(ratio, ratio.to(tl.int32), "e4m3", "up" if UP else "rn", 8, False)
        return code, e4m3_scale(code) * tile


@triton.jit
def e4m3_pair(low, high):
    """(low code | high code << 8, low value, high value) of non-negative fp32, to nearest even."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 h, l, u; .reg .b32 f; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
        "cvt.u32.u16 $0, h; cvt.rn.f16x2.e4m3x2 f, h; mov.b32 {l, u}, f; "
        "cvt.f32.f16 $1, l; cvt.f32.f16 $2, u; }",
        "=r,=f,=f,f,f", [low, high], dtype=(tl.int32, tl.float32, tl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_pair_up(low, high):
    """``e4m3_pair`` rounded up, at most 448."""
    low = tl.minimum(low, 448.0)
    high = tl.minimum(high, 448.0)
    both, below, above = e4m3_pair(low, high)
    both += tl.where(below < low, 1, 0) + tl.where(above < high, 256, 0)
    below, above = tl.inline_asm_elementwise(
        "{ .reg .b16 h, l, u; .reg .b32 f; cvt.u16.u32 h, $2; cvt.rn.f16x2.e4m3x2 f, h; "
        "mov.b32 {l, u}, f; cvt.f32.f16 $0, l; cvt.f32.f16 $1, u; }",
        "=f,=f,r", [both], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return both, below, above


@triton.jit
def store_scales(
    amaxes, tile, tile_inverse, scale_ptr, row, row_ok,
    COUNT: tl.constexpr, SCALE: tl.constexpr, MAX_CODE: tl.constexpr, UP: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Make the scales of the groups of rows and store them; their fp32 values and inverses."""
    PACKED: tl.constexpr = SCALE == "e4m3" and PTX and COUNT % 4 == 0
    scales = ()
    inverses = ()
    word = row * 0
    for k in tl.static_range(COUNT):
        if PACKED:
            if k % 2 == 0:
                ratio = ()
                for e in tl.static_range(2):
                    raw = divide(amaxes[k + e], MAX_CODE, 1.0 / MAX_CODE)
                    ratio = ratio + (divide(raw, tile, tile_inverse),)
                if UP:
                    both, low, high = e4m3_pair_up(ratio[0], ratio[1])
                else:
                    both, low, high = e4m3_pair(ratio[0], ratio[1])
                word = word | (both << (8 * (k % 4)))
                scales = scales + (low * tile, high * tile)
            s = scales[k]
        else:
            stored, s = make_scale(amaxes[k], tile, tile_inverse, SCALE, MAX_CODE, UP)
            scales = scales + (s,)
            if SCALE == "fp32":
                store_if(scale_ptr + row * COUNT + k, as_float(stored), row_ok, FULL)
            elif SCALE == "fp16":
                half = stored.to(tl.int16).to(tl.float16, bitcast=True)
                store_if(scale_ptr + row * COUNT + k, half, row_ok, FULL)
            elif COUNT % 4 == 0:
                word = word | (stored << (8 * (k % 4)))
            else:
                store_if(scale_ptr + row * COUNT + k, stored.to(tl.uint8), row_ok, FULL)
        if (SCALE == "e4m3" or SCALE == "e8m0") and COUNT % 4 == 0 and k % 4 == 3:
            wide = scale_ptr.to(tl.pointer_type(tl.int32))  # four scale bytes a word
            store_if(wide + row * (COUNT // 4) + k // 4, word, row_ok, FULL)
            word = row * 0
        good = s > 0
        inverses = inverses + (tl.where(good, reciprocal(tl.where(good, s, 1.0)), 0.0),)
    return scales, inverses


@triton.jit
def store_if(ptr, value, mask, ALWAYS: tl.constexpr):
    """A store under a mask that may be known to be true."""
    if ALWAYS:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def load_if(ptr, mask, ALWAYS: tl.constexpr):
    """A load under a mask that may be known to be true; zero where it is not."""
    if ALWAYS:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=mask, other=0)


@triton.jit
def encode_tile(
    values,
    words,
    pair,
    column,
    row_ok,
    column_ok,
    code_ptr,
    low_ptr,
    scale_ptr,
    tile_ptr,
    FORMAT: tl.constexpr,
    SR: tl.constexpr,
    BITS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    BACK: tl.constexpr,
):
    """Encode a tile and store it; returns the decoded values if BACK (the copy is made from them).

    values: sixteen fp32 [8, W]; words: random words or an empty tuple; pair int32 [8] row pairs of
    the head, row_ok two masks [8] (even and odd rows), column int32 [W], column_ok [W]. Pointers
    are at this head: code and low int32, scale typed as stored, tile fp32. FORMAT is the tuple of
    ``spec.kernel_format``. The codes of a group whose scale is NaN mean nothing.
    """
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    MAX_CODE: tl.constexpr = FORMAT[2]
    GRAN: tl.constexpr = FORMAT[3]
    BLOCK: tl.constexpr = FORMAT[4]
    SCALE: tl.constexpr = FORMAT[5]
    UP: tl.constexpr = FORMAT[6]
    W: tl.constexpr = N // 8
    WIDTH: tl.constexpr = element_bits_of(ELEM)
    PER: tl.constexpr = 32 // WIDTH
    SCALED: tl.constexpr = GRAN != "none"
    LOW_PER: tl.constexpr = 32 // LOW if LOW > 0 else 1
    INTEGER: tl.constexpr = ELEM == "int8" or ELEM == "int4"
    BIAS: tl.constexpr = integer_bias(WIDTH, LOW) if INTEGER else 0
    FLIP: tl.constexpr = -0x7F7F7F80 if ELEM == "int8" else 0  # stored bytes are signed
    FLIP_LOW: tl.constexpr = -0x7F7F7F80 if LOW == 8 else 0
    FULL: tl.constexpr = R % 16 == 0 and column.shape[0] == W
    CLAMP: tl.constexpr = (SCALE == "e4m3" and not UP) or (SR and BITS == 16)
    HALVES: tl.constexpr = ELEM == "fp16" and SR and BITS == 8 and PTX and not SCALED
    tile = 0.0
    tile_inverse = 0.0
    amaxes = ()
    if SCALED:
        amaxes = (
            group_amax(values, 0, column, W, BLOCK, N),
            group_amax(values, 1, column, W, BLOCK, N),
        )
        if SCALE == "e4m3":
            top = amaxes[0][0]
            for p in tl.static_range(2):
                for k in tl.static_range(N // BLOCK):
                    top = tl.maximum(top, amaxes[p][k], propagate_nan=tl.PropagateNan.ALL)
            tile_amax = as_float(tl.max(as_bits(top), 0))
            tile = floored_scale(divide(tile_amax, MAX_CODE * 448.0, 1.0 / (MAX_CODE * 448.0)))
            tile_inverse = reciprocal(tl.where(tile > 0, tile, 1.0))
            tl.store(tile_ptr + tl.min(pair, 0) // PAIRS, tile)
    back = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        if SCALED:
            scales, inverses = store_scales(
                amaxes[p], tile, tile_inverse, scale_ptr, row, row_ok[p],
                N // BLOCK if BLOCK > 0 else 1, SCALE, MAX_CODE, UP, R % 16 == 0,
            )  # fmt: skip
        mask = row_ok[p][:, None] & column_ok[None, :]
        zero = (row * 0)[:, None] + (column * 0)[None, :]
        word = zero
        low_word = zero
        for i in tl.static_range(8):
            x = values[p * 8 + i]
            if INTEGER:
                x = rounded_product(x, spread(inverses, column, i, W, BLOCK, N))
            elif SCALED:
                x = x * spread(inverses, column, i, W, BLOCK, N)
            if ELEM == "fp32":
                word = as_bits(x)
                value = x
            elif HALVES:
                if i % 2 == 1:
                    word = half_pair_stochastic(values[p * 8 + i - 1], x, words, p * 8 + i - 1)
                    if BACK:
                        back = back + half_values(word)
            elif INTEGER:
                bits = integer_bits(x, words, p * 8 + i, MAX_CODE, BIAS, SR, BITS, CLAMP)
                word = word | (shift(bits, WIDTH * (i % PER) - LOW) & lane_mask(WIDTH, i % PER))
                value = as_float(bits) - (12582912.0 + BIAS)
                if LOW > 0:
                    low_word = low_word | (
                        shift(bits, LOW * (i % LOW_PER)) & lane_mask(LOW, i % LOW_PER)
                    )
                    if i % LOW_PER == LOW_PER - 1:
                        at = row[:, None] * (LOW // 4 * W) + (i // LOW_PER) * W + column[None, :]
                        store_if(low_ptr + at, low_word ^ FLIP_LOW, mask, FULL)
                        low_word = zero
            else:
                field = float_field(
                    x, words, p * 8 + i, ELEM, "sr" if SR else "rn", BITS, not SCALED
                )
                word = place_float(word, x, field, i, ELEM)
                if BACK:
                    if PER == 1 or i % PER == PER - 1:
                        for e in tl.static_range(PER):
                            value = code_value(word, e, ELEM, not SCALED)
                            if SCALED:
                                value = value * spread(scales, column, i - PER + 1 + e, W, BLOCK, N)
                            back = back + (value,)
            if i % PER == PER - 1:
                at = row[:, None] * (8 // PER * W) + (i // PER) * W + column[None, :]
                store_if(code_ptr + at, word ^ FLIP, mask, FULL)
                word = zero
            if BACK and (INTEGER or ELEM == "fp32"):
                if SCALED:
                    value = value * spread(scales, column, i, W, BLOCK, N)
                back = back + (value,)
    return back


@triton.constexpr_function
def lane_mask(width, index):
    """The places of field number ``index`` of an int32 word, as a signed number."""
    mask = ((1 << width) - 1) << (width * index)
    return mask - (1 << 32) if mask >> 31 else mask


@triton.jit
def decode_tile(
    pair,
    column,
    row_ok,
    column_ok,
    code_ptr,
    low_ptr,
    scale_ptr,
    tile_ptr,
    FORMAT: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    RAW: tl.constexpr = False,
):
    """The checkpoint of a tile as sixteen fp32 [8, W] tensors; arguments as ``encode_tile``.

    Masks count only where a tile may be cut (R % 16, or W not a power of two): all of a whole tile
    is read. RAW leaves out the scale of a row.
    """
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    GRAN: tl.constexpr = FORMAT[3]
    BLOCK: tl.constexpr = FORMAT[4]
    SCALE: tl.constexpr = FORMAT[5]
    W: tl.constexpr = N // 8
    WORDS: tl.constexpr = element_bits_of(ELEM) // 4
    LOW_ELEM: tl.constexpr = "int4" if LOW == 4 else "int8"
    FULL: tl.constexpr = R % 16 == 0 and column.shape[0] == W
    tile = 0.0
    if GRAN == "block" and SCALE == "e4m3":
        tile = tl.load(tile_ptr + tl.min(pair, 0) // PAIRS)
    out = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        mask = row_ok[p][:, None] & column_ok[None, :]
        offs = row[:, None] * (WORDS * W) + column[None, :]
        words = load_words(code_ptr, offs, mask, W, ELEM, FULL)
        if LOW > 0:
            low_offs = row[:, None] * (LOW // 4 * W) + column[None, :]
            lows = load_words(low_ptr, low_offs, mask, W, LOW_ELEM, FULL)
            values = planar_values(words, lows, ELEM, LOW)
        else:
            values = code_values(words, ELEM, GRAN == "none")
        if GRAN != "none" and not RAW:
            scales = load_scales(
                scale_ptr, tile, row, row_ok[p], GRAN, SCALE, BLOCK, N, R % 16 == 0
            )
        for i in tl.static_range(8):
            value = values[i]
            if GRAN != "none" and not RAW:
                value = value * spread(scales, column, i, W, BLOCK, N)
            if FULL:
                out = out + (value,)
            else:  # what lies beyond the rows or columns is zero
                out = out + (tl.where(mask, value, 0.0),)
    return out
