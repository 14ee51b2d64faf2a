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


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, for |x| < 2**22."""
    return (x + 12582912.0) - 12582912.0


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
def load_words(ptr, offs, mask, W: tl.constexpr, ELEM: tl.constexpr):
    """The int32 words of a row piece: a tuple of bits / 4 tensors at ``offs``, ``offs + W``, ..."""
    words = ()
    for h in tl.static_range(element_bits_of(ELEM) // 4):
        words = words + (tl.load(ptr + offs + h * W, mask=mask, other=0),)
    return words


@triton.jit
def code_values(words, ELEM: tl.constexpr, HAS_NAN: tl.constexpr):
    """Words of one row piece -> its eight planes as fp32 code values."""
    PER: tl.constexpr = 32 // element_bits_of(ELEM)
    values = ()
    for i in tl.static_range(8):
        values = values + (code_value(words[i // PER], i % PER, ELEM, HAS_NAN),)
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
                word = tl.load(wide + row * (COUNT // PER) + k // PER, mask=mask, other=0)
                word = word.to(tl.int32)
            stored = (word >> (8 * (k % PER))) & 0xFF
        else:
            at = scale_ptr + row * COUNT + k
            if GRAN == "head":
                at = scale_ptr + row * 0
            stored = tl.load(at, mask=mask, other=0)
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


@triton.jit
def floor_stochastic(t, r, BITS: tl.constexpr):
    """floor(t + (r + 0.5) / 2**BITS); 16 bits keep whole numbers whole (see the codec)."""
    if BITS == 8:
        return tl.floor(t + (r.to(tl.float32) + 0.5) * 2.0**-8)
    else:
        whole = tl.floor(t)
        return whole + tl.floor((t - whole) + (r.to(tl.float32) + 0.5) * 2.0**-16)


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
def float_code(
    x, r, ELEM: tl.constexpr, ROUND: tl.constexpr, BITS: tl.constexpr, HAS_NAN: tl.constexpr
):
    """Codes (int32) of fp32 values in a float element; ROUND is "sr", "rn" or "up".

    Multiplied by 2**(EMIN - 1 - -126), a magnitude's fp32 bits are its code followed by the bits
    that rounding drops, in the subnormal range too. The product is written as fma(a, b, 0), the
    same number: of a plain one whose bits are then shifted left, ptxas 12.8 makes 0.
    """
    FIELDS: tl.constexpr = float_fields(ELEM)
    M: tl.constexpr = FIELDS[0]
    EMIN: tl.constexpr = FIELDS[1]
    MAX: tl.constexpr = FIELDS[3]
    DROP: tl.constexpr = 23 - M
    WIDTH: tl.constexpr = element_bits_of(ELEM)
    SHIFT: tl.constexpr = 2.0 ** (-126 - EMIN)
    mag = tl.minimum(tl.abs(x), MAX)  # drops NaN, which gets its code below
    if ROUND == "rn":
        if ELEM == "bf16":
            field = as_bits(mag)
            code = (field + 0x7FFF + ((field >> 16) & 1)) >> 16
        else:
            code = as_bits(tl.fma(grid_even(mag, M, EMIN), SHIFT, 0.0)) >> DROP
    else:
        field = as_bits(tl.fma(mag, SHIFT, 0.0))
        if ROUND == "up":
            exponent = tl.maximum((as_bits(mag) >> 23) - 127, EMIN)
            steps = tl.ceil(mag * as_float((M - exponent + 127) << 23))
            code = tl.minimum(((exponent - EMIN) << M) + steps.to(tl.int32), FIELDS[2])
            code = tl.maximum(code, (mag > 0).to(tl.int32))  # a GPU's ceil flushes subnormals
        elif BITS == 8:
            code = (field + ((r << (DROP - 8)) | (1 << (DROP - 9)))) >> DROP
        elif DROP >= 17:
            code = (field + ((r << (DROP - 16)) | (1 << (DROP - 17)))) >> DROP
        else:
            code = (field + (r >> (16 - DROP))) >> DROP
    if HAS_NAN:
        code = tl.where(x != x, FIELDS[4], code)
    return code | (((as_bits(x) >> 31) & 1) << (WIDTH - 1))


@triton.jit
def int_code(t, r, TOP: tl.constexpr, SR: tl.constexpr, BITS: tl.constexpr):
    """Signed integer codes (int32) of scaled fp32 values."""
    q = floor_stochastic(t, r, BITS) if SR else round_even(t)
    return tl.minimum(tl.maximum(q, -TOP), TOP).to(tl.int32)


@triton.jit
def _magnitude(x):
    return as_bits(x) & 0x7FFFFFFF


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
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
    ``spec.kernel_format``.
    """
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    MAX_CODE: tl.constexpr = FORMAT[2]
    GRAN: tl.constexpr = FORMAT[3]
    BLOCK: tl.constexpr = FORMAT[4]
    SCALE: tl.constexpr = FORMAT[5]
    UP: tl.constexpr = FORMAT[6]
    W: tl.constexpr = N // 8
    COUNT: tl.constexpr = N // BLOCK if BLOCK > 0 else 1
    PER: tl.constexpr = 32 // element_bits_of(ELEM)
    SCALED: tl.constexpr = GRAN != "none"
    CODE_MASK: tl.constexpr = (1 << (32 // PER)) - 1 if PER > 1 else -1
    LOW_PER: tl.constexpr = 32 // LOW if LOW > 0 else 1
    LOW_MASK: tl.constexpr = 15 if LOW == 4 else 255
    tile = 0.0
    tile_inverse = 0.0
    if SCALED and SCALE == "e4m3":
        top = tl.abs(values[0])
        for e in tl.static_range(15):
            mag = tl.abs(values[e + 1])
            top = tl.maximum(top, mag, propagate_nan=tl.PropagateNan.ALL)
        tile_amax = as_float(tl.max(tl.max(as_bits(top), 1), 0))
        tile = floored_scale(divide(tile_amax, MAX_CODE * 448.0, 1.0 / (MAX_CODE * 448.0)))
        tile_inverse = reciprocal(tl.where(tile > 0, tile, 1.0))
        tl.store(tile_ptr + tl.min(pair, 0) // PAIRS, tile)
    back = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        scales = ()
        inverses = ()
        if SCALED:
            amaxes = group_amax(values, p, column, W, BLOCK, N)
            packed = row * 0
            for k in tl.static_range(COUNT):
                stored, s = make_scale(amaxes[k], tile, tile_inverse, SCALE, MAX_CODE, UP)
                good = s > 0
                inverse = tl.where(good, reciprocal(tl.where(good, s, 1.0)), 0.0)
                scales = scales + (s,)
                inverses = inverses + (inverse,)
                if SCALE == "fp32":
                    tl.store(scale_ptr + row * COUNT + k, as_float(stored), mask=row_ok[p])
                elif SCALE == "fp16":
                    half = stored.to(tl.int16).to(tl.float16, bitcast=True)
                    tl.store(scale_ptr + row * COUNT + k, half, mask=row_ok[p])
                elif COUNT % 4 == 0:  # four scale bytes a word
                    packed = packed | (stored << (8 * (k % 4)))
                    if k % 4 == 3:
                        wide = scale_ptr.to(tl.pointer_type(tl.int32))
                        tl.store(wide + row * (COUNT // 4) + k // 4, packed, mask=row_ok[p])
                        packed = row * 0
                else:
                    tl.store(scale_ptr + row * COUNT + k, stored.to(tl.uint8), mask=row_ok[p])
        mask = row_ok[p][:, None] & column_ok[None, :]
        word = (row * 0)[:, None] + (column * 0)[None, :]
        low_word = word
        for i in tl.static_range(8):
            x = values[p * 8 + i]
            r = word * 0
            if SR:
                r = random_of(words, p * 8 + i, BITS)
            if SCALED:
                inverse = spread(inverses, column, i, W, BLOCK, N)
                t = tl.where(inverse > 0, x * inverse, 0.0)
                t = tl.minimum(tl.maximum(t, -MAX_CODE), MAX_CODE)
            else:
                t = x
            if ELEM == "fp32":
                code = as_bits(x)
                value = x
            elif LOW > 0:
                q = int_code(t, r, MAX_CODE, SR, BITS)
                high = (q + (1 << (LOW - 1))) >> LOW
                low = q - (high << LOW)
                code = high + 8 if ELEM == "int4" else high
                value = q.to(tl.float32)
                low = low + 8 if LOW == 4 else low
                low_word = low_word | ((low & LOW_MASK) << (LOW * (i % LOW_PER)))
                if i % LOW_PER == LOW_PER - 1:
                    at = row[:, None] * (LOW // 4 * W) + (i // LOW_PER) * W + column[None, :]
                    tl.store(low_ptr + at, low_word, mask=mask)
                    low_word = low_word * 0
            elif ELEM == "int8" or ELEM == "int4":
                code = int_code(t, r, MAX_CODE, SR, BITS)
                value = code.to(tl.float32)
                code = code + 8 if ELEM == "int4" else code
            else:
                code = float_code(t, r, ELEM, "sr" if SR else "rn", BITS, not SCALED)
                value = code_value(code, 0, ELEM, not SCALED)
            if PER == 1:
                word = code
            else:
                word = word | ((code & CODE_MASK) << ((32 // PER) * (i % PER)))
            if i % PER == PER - 1:
                at = row[:, None] * (8 // PER * W) + (i // PER) * W + column[None, :]
                tl.store(code_ptr + at, word, mask=mask)
                word = word * 0
            if BACK:
                if SCALED:
                    value = value * spread(scales, column, i, W, BLOCK, N)
                back = back + (value,)
    return back


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
):
    """The checkpoint of a tile as sixteen fp32 [8, W] tensors; arguments as ``encode_tile``."""
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    GRAN: tl.constexpr = FORMAT[3]
    BLOCK: tl.constexpr = FORMAT[4]
    SCALE: tl.constexpr = FORMAT[5]
    W: tl.constexpr = N // 8
    WORDS: tl.constexpr = element_bits_of(ELEM) // 4
    LOW_ELEM: tl.constexpr = "int4" if LOW == 4 else "int8"
    SHIFT: tl.constexpr = 2.0**LOW
    tile = 0.0
    if GRAN == "block" and SCALE == "e4m3":
        tile = tl.load(tile_ptr + tl.min(pair, 0) // PAIRS)
    out = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        mask = row_ok[p][:, None] & column_ok[None, :]
        offs = row[:, None] * (WORDS * W) + column[None, :]
        values = code_values(load_words(code_ptr, offs, mask, W, ELEM), ELEM, GRAN == "none")
        if LOW > 0:
            low_offs = row[:, None] * (LOW // 4 * W) + column[None, :]
            lows = code_values(load_words(low_ptr, low_offs, mask, W, LOW_ELEM), LOW_ELEM, False)
        if GRAN != "none":
            scales = load_scales(scale_ptr, tile, row, row_ok[p], GRAN, SCALE, BLOCK, N)
        for i in tl.static_range(8):
            value = values[i]
            if LOW > 0:
                value = value * SHIFT + lows[i]
            if GRAN != "none":
                value = value * spread(scales, column, i, W, BLOCK, N)
            if R % 16 == 0 and column.shape[0] == W:
                out = out + (value,)
            else:  # what lies beyond the rows or columns is zero
                out = out + (tl.where(mask, value, 0.0),)
    return out
