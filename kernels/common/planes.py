"""Device code of the formats: a tile of a state as sixteen tensors, decoded and encoded.

Bit for bit the arithmetic of ``formats/codec.py``. A tile is 16 rows of one head: row pairs [8] by
columns [W], W = N / 8 (padded to a power of two). Element (row 2 q + p, n = i * W + j) of the tile
is entry (q, j) of tensor number p * 8 + i. In plane order (``formats/packing.py``) a thread that
owns (q, j) then owns whole stored words in every format, and one Philox call serves exactly its
sixteen elements: no value ever moves between threads, except in the reductions of a row.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, current_target

PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
"""Inline PTX may be used: not in the interpreter, not on AMD; both paths give the same bits."""
HARDWARE_ROUNDING = tl.constexpr(os.environ.get("REPLAYSSM_HARDWARE_ROUNDING", "0") == "1")
"""Round to fp16 by ``cvt.rs`` where a GPU has it (sm_100, sm_103); set by an environment variable.

Off, since stored bytes would depend on the GPU. It is given the same random bits and rounds the
exact sum down, where the codec's sum is in fp32: that moves at most one in 2**14 of the values
below 2**-14 by one step of 2**-24, and none of the larger ones. And Inf becomes 65504.
"""
PAIRS = tl.constexpr(8)  # row pairs of a tile: 16 rows, formats.spec.TILE_ROWS
_MIN_SCALE = tl.constexpr(2.0**-100)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.constexpr_function
def converts_fp4():
    """True if the GPU that is compiled for has conversions to e2m1."""
    return cuda_capability_geq(10)


@triton.constexpr_function
def rounds_by_chance():
    """True if the GPU that is compiled for has ``cvt.rs``."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch in (100, 103)


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


@triton.constexpr_function
def _permute_asm(selector):
    return f"prmt.b32 $0, $1, $2, {selector:#x};"


@triton.jit
def permute(a, b, SELECTOR: tl.constexpr):
    """Four of the eight bytes of int32 words a and b (a first), a hexadecimal digit each. PTX."""
    ASM: tl.constexpr = _permute_asm(SELECTOR)
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def fp8_values(word, ELEM: tl.constexpr):
    """The four e4m3 or e5m2 numbers of int32 words as fp32."""
    X2: tl.constexpr = "cvt.rn.f16x2." + ELEM + "x2 f, "
    HALVES: tl.constexpr = X2 + "a; mov.b32 {l, h}, f; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; "
    REST: tl.constexpr = X2 + "b; mov.b32 {l, h}, f; cvt.f32.f16 $2, l; cvt.f32.f16 $3, h; }"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b, l, h; .reg .b32 f; mov.b32 {a, b}, $4; " + HALVES + REST,
        "=&f,=&f,=&f,=&f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def code_values(words, ELEM: tl.constexpr, HAS_NAN: tl.constexpr):
    """Words of one row piece -> its eight planes as fp32 code values."""
    PER: tl.constexpr = 32 // element_bits_of(ELEM)
    values = ()
    if ELEM == "fp16":
        for w in tl.static_range(4):
            low, high = half_values(words[w])
            values = values + (low, high)
    elif (ELEM == "e4m3" or ELEM == "e5m2") and PTX:
        for w in tl.static_range(2):
            values = values + fp8_values(words[w], ELEM)
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
    if PTX and BITS + LOW == 12:
        # one of the two parts in bytes, beside the other's nibbles as bytes: 12 bits side by side
        nibbles = highs[0] if BITS == 4 else lows[0]
        if BITS == 4:
            even = nibbles & 0x0F0F0F0F
            odd = (nibbles >> 4) & 0x0F0F0F0F
        else:  # the low part in the upper half of a byte: sixteen times the integer
            even = (nibbles << 4) & -0x0F0F0F10
            odd = nibbles & -0x0F0F0F10
        for i in tl.static_range(8):
            nibble = even if i % 2 == 0 else odd
            if BITS == 4:
                both = permute(lows[i // 4] ^ FLIP_LOW, nibble, 16 * (4 + i // 2) + i % 4)
                x = as_float((both & 0xFFFF) | 0x4B000000) - (8388608.0 + integer_bias(BITS, LOW))
            else:
                both = permute(nibble, highs[i // 4] ^ FLIP, 16 * (4 + i % 4) + i // 2)
                x = as_float((both & 0xFFFF) | 0x4B000000)
                x = tl.fma(x, 0.0625, -524288.0 - integer_bias(BITS, LOW))
            values = values + (x,)
    else:
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


@triton.constexpr_function
def scales_a_load(fmt, n):
    """(scales of a row, how many of them one load takes) of a ``kernel_format``."""
    count = n // fmt[4] if fmt[3] == "block" else 1
    if fmt[3] != "block" or fmt[5] not in ("e4m3", "e8m0"):
        return count, 1
    return count, 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


@triton.jit
def fetch_scales(
    scale_ptr, row, mask, FORMAT: tl.constexpr, N: tl.constexpr, ALWAYS: tl.constexpr = False
):
    """The stored scales of rows as loaded: fp32, fp16, or bytes in words; see ``decode_scales``."""
    COUNT: tl.constexpr = scales_a_load(FORMAT, N)[0]
    PER: tl.constexpr = scales_a_load(FORMAT, N)[1]
    out = ()
    for k in tl.static_range(0, COUNT, PER):
        if PER > 1:
            # several bytes a load; and a product fed by 8-bit loads would take a wrong layout
            wide = scale_ptr.to(tl.pointer_type(tl.int32 if PER == 4 else tl.int16))
            stored = load_if(wide + row * (COUNT // PER) + k // PER, mask, ALWAYS)
        else:
            at = scale_ptr + row * COUNT + k
            if FORMAT[3] == "head":
                at = scale_ptr + row * 0
            stored = load_if(at, mask, ALWAYS)
        out = out + (stored,)
    return out


@triton.jit
def decode_scales(stored, tile, FORMAT: tl.constexpr, N: tl.constexpr):
    """fp32 scales of what ``fetch_scales`` has loaded: one tensor, or one a block; tile fp32."""
    COUNT: tl.constexpr = scales_a_load(FORMAT, N)[0]
    PER: tl.constexpr = scales_a_load(FORMAT, N)[1]
    SCALE: tl.constexpr = FORMAT[5]
    scales = ()
    for k in tl.static_range(COUNT):
        code = stored[k // PER]
        if SCALE == "e4m3" or SCALE == "e8m0":
            code = code.to(tl.int32)
            if PER > 1:
                code = (code >> (8 * (k % PER))) & 0xFF
            s = e4m3_scale(code) * tile if SCALE == "e4m3" else e8m0_scale(code)
        else:
            s = code.to(tl.float32)
        scales = scales + (s,)
    return scales


@triton.jit
def load_scales(
    scale_ptr, tile, row, mask, GRAN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """fp32 scales of rows: a tuple of one tensor, or of one a block; ``tile`` fp32 [rows].

    ``scale_ptr`` is typed by the stored scale (fp32, fp16, uint8) and points at this head; ``row``
    counts within the head.
    """
    FORMAT: tl.constexpr = ("", 0, 0.0, GRAN, BLOCK, SCALE, 0)
    return decode_scales(fetch_scales(scale_ptr, row, mask, FORMAT, N), tile, FORMAT, N)


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
def wide_product(x, FACTOR: tl.constexpr):
    """(high, low) 32 bits of x times a constant, uint32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$1, $0}, t; }", "=r,=r,r,r",
            [x, tl.full([], FACTOR, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.umulhi(x, tl.full([], FACTOR, tl.uint32)), x * FACTOR


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
    count = ((head * ((R + 1) // 2) + pair) * W + column).to(tl.uint32)
    first = (count * 0 + position).to(tl.uint32)
    second = (count * 0 + layer).to(tl.uint32)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    out = ()
    for call in tl.static_range(1 if BITS == 8 else 2):
        c0, c1, c2, c3 = count, first, second, count * 0 + (0 if BITS == 8 else call + 1)
        for k in tl.static_range(ROUNDS):
            high, next1 = wide_product(c2, 0xCD9E8D57)
            low, next3 = wide_product(c0, 0xD2511F53)
            c0 = high ^ c1 ^ (k0 + tl.full([], k * 0x9E3779B9 % 2**32, tl.uint32))
            c2 = low ^ c3 ^ (k1 + tl.full([], k * 0xBB67AE85 % 2**32, tl.uint32))
            c1 = next1
            c3 = next3
        out = out + (c0, c1, c2, c3)
    return out + byte_places(position < -1 - pair)


@triton.jit
def byte_places(never):
    """Numbers with a byte left open: integer 2**15, fp32 1/8 + 1/2**19 and 128.

    For ``drawn_byte``, ``random_fraction`` and ``random_offset``.

    ``never``: something false, which keeps a compiler from copying a number it knows before each
    use, as one instruction has no room for it; not the same in all lanes, for the same reason.
    """
    return (
        tl.where(never, 0, 0x8000), tl.where(never, 0, 0x3E000080), tl.where(never, 0, 0x43000000)
    )  # fmt: skip


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
def _byte_asm(place):
    return f"prmt.b32 $0, $1, $2, {0x7604 + 16 * place:#x};"


@triton.jit
def place_byte(words, ENTRY: tl.constexpr, INTO: tl.constexpr):
    """The 8-bit random number of a tile entry in byte 1 of one of the ``byte_places``, as fp32."""
    ASM: tl.constexpr = _byte_asm(ENTRY % 4)
    bits = tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words[ENTRY // 4], words[len(words) - INTO]], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return as_float(bits)


@triton.jit
def random_fraction(words, ENTRY: tl.constexpr):
    """(r + 0.5) / 2**18 of the 8-bit random number of a tile entry, fp32."""
    if PTX:
        return place_byte(words, ENTRY, 2) - 0.125
    else:
        return (random_of(words, ENTRY, 8).to(tl.float32) + 0.5) * 2.0**-18


@triton.jit
def random_offset(words, ENTRY: tl.constexpr):
    """(r - 127.5) / 256 of the 8-bit random number of a tile entry, fp32."""
    if PTX:
        return place_byte(words, ENTRY, 1) - 128.498046875
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


@triton.constexpr_function
def _draw_asm(entry):
    return f"prmt.b32 $0, $1, $2, {0x4054 + 256 * (entry % 4):#x};"


@triton.jit
def drawn_byte(x, words, ENTRY: tl.constexpr, ELEM: tl.constexpr, CLAMP: tl.constexpr):
    """int32 whose upper byte is the code of |x| in e4m3 or e5m2, rounded by an 8-bit number. PTX.

    CLAMP to the largest value, unless x exceeds it by no more than a row's fp32 scale lets it: less
    than what separates the largest draw from the next code.
    """
    FIELDS: tl.constexpr = float_fields(ELEM)
    if CLAMP:
        x = tl.minimum(tl.abs(x), FIELDS[3])
    field = as_bits(tl.fma(x, 2.0 ** (-126 - FIELDS[1]), 0.0)) << (FIELDS[0] + 1)
    ASM: tl.constexpr = _draw_asm(ENTRY)
    draw = tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words[ENTRY // 4], words[len(words) - 3]], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return field + draw


@triton.jit
def top_bytes(a, b, c, d):
    """The upper bytes of four int32 words, a's lowest. PTX."""
    return permute(permute(a, b, 0x0073), permute(c, d, 0x7300), 0x7610)


@triton.jit
def half_step(x):
    """2**10 times the step of fp16 at x: the power of two below |x|, at least 2**-14."""
    return as_float(tl.maximum(as_bits(x) & 0x7F800000, 113 << 23))


@triton.constexpr_function
def _round_by_chance_asm(byte):
    """The thirteen random bits of each of two numbers are (r << 5) + 16, as (r << 8 | 128) >> 3."""
    selector = 0x0404 + (byte << 4) + ((byte + 1) << 12)
    return (
        f"{{ .reg .b32 t; prmt.b32 t, $3, 128, {selector:#x}; shr.u32 t, t, 3; "
        "cvt.rs.satfinite.f16x2.f32 $0, $2, $1, t; }"
    )


@triton.jit
def half_pair_stochastic(low, high, words, ENTRY: tl.constexpr):
    """Two values as an int32 word of fp16 numbers, rounded by the words of entries ENTRY, + 1.

    Less than one step is added away from zero, then the conversion truncates.
    """
    if HARDWARE_ROUNDING and rounds_by_chance():
        ASM: tl.constexpr = _round_by_chance_asm(ENTRY % 4)
        return tl.inline_asm_elementwise(
            ASM, "=r,f,f,r", [low, high, words[ENTRY // 4]], dtype=tl.int32, is_pure=True, pack=1
        )
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
    field = float_field(x, (r,) + byte_places(r < 0), 0, ELEM, ROUND, BITS, HAS_NAN)
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


# --- one block a plane: sixteen blocks a row pair, four lanes to share them -----------------------


@triton.constexpr_function
def shares_blocks(fmt, rows, n, width):
    """True if the four lanes of a row pair each make the scales of four of its sixteen blocks.

    With planes of sixteen columns that are one block each (d_state 128) and one warp a tile, lane
    4 g + q holds columns 4 q .. 4 q + 3 of row pair g. Its blocks are numbers 4 q .. 4 q + 3, where
    p * 8 + i is plane i of the row of parity p.
    """
    blocks = fmt[3] == "block" and fmt[4] == 16 and fmt[5] == "e4m3"  # no slice of a tuple here
    return PTX.value and blocks and n == 128 and width == 16 and rows % 16 == 0


@triton.constexpr_function
def share_maxima(count, word, largest):
    """Instructions: of a lane's ``count`` maxima m0, m1, ... the four lanes' of a row pair, a
    quarter each in m0, ...; ``word`` of a register, ``largest`` the instruction. Needs registers
    lane, bit, send, got and predicates high, odd."""
    text = "mov.u32 lane, %laneid; and.b32 bit, lane, 2; setp.ne.u32 high, bit, 0; "
    text += "and.b32 bit, lane, 1; setp.ne.u32 odd, bit, 0; "
    for half, which, lanes in ((count // 2, "high", 2), (count // 4, "odd", 1)):
        for t in range(half):  # give away half of them, and receive those of the other half
            x, y = f"m{t}", f"m{t + half}"
            text += f"selp.{word} send, {x}, {y}, {which}; selp.{word} {x}, {y}, {x}, {which}; "
            text += f"shfl.sync.bfly.b32 got, send, {lanes}, 31, -1; {largest} {x}, {x}, got; "
    return text


@triton.constexpr_function
def _shared_amax_asm():
    text = "{ .reg .f32 m<16>, send, got, x; .reg .b32 lane, bit; .reg .pred high, odd; "
    for t in range(16):
        w = 4 + 4 * t
        text += f"abs.f32 m{t}, ${w}; "
        for c in range(1, 4):
            text += f"abs.f32 x, ${w + c}; max.NaN.f32 m{t}, m{t}, x; "
    text += share_maxima(16, "f32", "max.NaN.f32")
    return text + "mov.f32 $0, m0; mov.f32 $1, m1; mov.f32 $2, m2; mov.f32 $3, m3; }"


@triton.constexpr_function
def _shared_scales_asm(up):
    """Round $4..$7 (not negative) to e4m3: $0..$3 their values, the codes to $8.

    Stored here, since a lane's four places may be the columns 4 q + (0, 2, 1, 3) of a tensor, after
    a product; the first is 4 q always.
    """
    ratios = ["$4", "$5", "$6", "$7"]
    text = "{ .reg .b16 l, h, a, b; .reg .b32 f, g, one; .reg .f32 r<4>; .reg .pred p; "
    if up:
        for i in range(4):
            text += f"min.f32 r{i}, {ratios[i]}, 0f43e00000; "  # 448
        ratios = ["r0", "r1", "r2", "r3"]
    text += f"cvt.rn.satfinite.e4m3x2.f32 l, {ratios[1]}, {ratios[0]}; "
    text += f"cvt.rn.satfinite.e4m3x2.f32 h, {ratios[3]}, {ratios[2]}; mov.b32 f, {{l, h}}; "
    values = "cvt.rn.f16x2.e4m3x2 g, l; mov.b32 {a, b}, g; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; "
    values += "cvt.rn.f16x2.e4m3x2 g, h; mov.b32 {a, b}, g; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; "
    text += values
    if up:
        for i in range(4):
            text += f"setp.lt.f32 p, ${i}, r{i}; selp.b32 one, {1 << (8 * i)}, 0, p; "
            text += "add.u32 f, f, one; "
        text += "mov.b32 {l, h}, f; " + values
    return text + "st.global.b32 [$8], f; }"


@triton.jit
def shared_scales(amax, pair, scale_ptr, tile_ptr, MAX_CODE: tl.constexpr, UP: tl.constexpr):
    """Store the scales of blocks from their largest magnitudes; the inverses, fp32 [8, 16]."""
    tile_amax = as_float(tl.max(as_bits(amax)))
    tile = floored_scale(divide(tile_amax, MAX_CODE * 448.0, 1.0 / (MAX_CODE * 448.0)))
    tile_inverse = reciprocal(tl.where(tile > 0, tile, 1.0))
    tl.store(tile_ptr + tl.min(pair, 0) // PAIRS, tile)
    ratio = divide(divide(amax, MAX_CODE, 1.0 / MAX_CODE), tile, tile_inverse)
    place = scale_ptr + pair[:, None] * 16 + tl.arange(0, 16)[None, :]
    ASM: tl.constexpr = _shared_scales_asm(UP)
    scale = tl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f,f,f,f,f,l,l,l,l", [ratio, place.to(tl.int64)],
        dtype=tl.float32, is_pure=False, pack=4,
    )  # fmt: skip
    scale = scale * tile
    good = scale > 0
    return tl.where(good, reciprocal(tl.where(good, scale, 1.0)), 0.0)


@triton.constexpr_function
def _shared_product_asm(block):
    text = "{ .reg .b32 lane, s; mov.u32 lane, %laneid; and.b32 lane, lane, 28; "
    text += f"add.u32 lane, lane, {block // 4}; "
    text += f"shfl.sync.idx.b32 s, ${8 + block % 4}, lane, 31, -1; "
    for c in range(4):
        text += f"mul.rn.f32 ${c}, ${4 + c}, s; "
    return text + "}"


@triton.jit
def shared_product(x, inverses, BLOCK: tl.constexpr):
    """Block number BLOCK, fp32 [8, 16], times its number of ``shared_scales``."""
    ASM: tl.constexpr = _shared_product_asm(BLOCK)
    return tl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f" + ",f" * 8, [x, inverses], dtype=tl.float32, is_pure=True, pack=4
    )


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
    LOADED: tl.constexpr,
):
    """Encode a tile and store it; returns the decoded values if BACK (the copy is made from them).

    values: sixteen fp32 [8, W]; words: random words or an empty tuple; pair int32 [8] row pairs of
    the head, row_ok two masks [8] (even and odd rows), column int32 [W], column_ok [W]. Pointers
    are at this head: code and low int32, scale typed as stored, tile fp32. FORMAT is the tuple of
    ``spec.kernel_format``, LOADED as in ``store.encode_state``. The codes of a group whose scale is
    NaN mean nothing.
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
    INTEGER: tl.constexpr = ELEM == "int8" or ELEM == "int4"
    BIAS: tl.constexpr = integer_bias(WIDTH, LOW) if INTEGER else 0
    FLIP: tl.constexpr = -0x7F7F7F80 if ELEM == "int8" else 0  # stored bytes are signed
    FLIP_LOW: tl.constexpr = -0x7F7F7F80 if LOW == 8 else 0
    FULL: tl.constexpr = R % 16 == 0 and column.shape[0] == W
    CLAMP: tl.constexpr = (SCALE == "e4m3" and not UP) or (SR and BITS == 16)
    HALVES: tl.constexpr = ELEM == "fp16" and SR and BITS == 8 and PTX and not SCALED
    BYTES: tl.constexpr = WIDTH == 8 and not INTEGER and SR and BITS == 8 and SCALED and PTX
    MAY_SHARE: tl.constexpr = INTEGER and not BACK and LOADED
    SHARED: tl.constexpr = MAY_SHARE and shares_blocks(FORMAT, R, N, column.shape[0])
    tile = 0.0
    tile_inverse = 0.0
    amaxes = ()
    if SHARED:
        AMAX: tl.constexpr = _shared_amax_asm()
        amax = tl.inline_asm_elementwise(
            AMAX, "=&f,=&f,=&f,=&f" + ",f" * 64, values, dtype=tl.float32, is_pure=True, pack=4
        )
        shared = shared_scales(amax, pair, scale_ptr, tile_ptr, MAX_CODE, UP)
    elif SCALED:
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
        if SCALED and not SHARED:
            scales, inverses = store_scales(
                amaxes[p], tile, tile_inverse, scale_ptr, row, row_ok[p],
                N // BLOCK if BLOCK > 0 else 1, SCALE, MAX_CODE, UP, R % 16 == 0,
            )  # fmt: skip
        mask = row_ok[p][:, None] & column_ok[None, :]
        zero = (row * 0)[:, None] + (column * 0)[None, :]
        word = zero
        integers = ()
        drawn = ()
        for i in tl.static_range(8):
            x = values[p * 8 + i]
            if SHARED:
                x = shared_product(x, shared, p * 8 + i)
            elif INTEGER:
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
                integers = integers + (bits,)
                value = as_float(bits) - (12582912.0 + BIAS)
            elif BYTES:
                drawn = drawn + (drawn_byte(x, words, p * 8 + i, ELEM, SCALE != "fp32"),)
                if i % 4 == 3:
                    codes = top_bytes(drawn[i - 3], drawn[i - 2], drawn[i - 1], drawn[i])
                    signs = top_bytes(
                        as_bits(values[p * 8 + i - 3]), as_bits(values[p * 8 + i - 2]),
                        as_bits(values[p * 8 + i - 1]), as_bits(values[p * 8 + i]),
                    )  # fmt: skip
                    word = (codes & 0x7F7F7F7F) | (signs & -0x7F7F7F80)
            else:
                field = float_field(
                    x, words, p * 8 + i, ELEM, "sr" if SR else "rn", BITS, not SCALED
                )
                word = place_float(word, x, field, i, ELEM)
            if BACK and not INTEGER and ELEM != "fp32" and not HALVES and i % PER == PER - 1:
                for e in tl.static_range(PER):
                    value = code_value(word, e, ELEM, not SCALED)
                    if SCALED:
                        value = value * spread(scales, column, i - PER + 1 + e, W, BLOCK, N)
                    back = back + (value,)
            if i % PER == PER - 1 and not INTEGER:
                at = row[:, None] * (8 // PER * W) + (i // PER) * W + column[None, :]
                store_if(code_ptr + at, word, mask, FULL)
                word = zero
            if BACK and (INTEGER or ELEM == "fp32"):
                if SCALED:
                    value = value * spread(scales, column, i, W, BLOCK, N)
                back = back + (value,)
        if INTEGER:
            codes, lows = pack_integers(integers, WIDTH, LOW)
            for k in tl.static_range(8 // PER):
                at = row[:, None] * (8 // PER * W) + k * W + column[None, :]
                store_if(code_ptr + at, codes[k] ^ FLIP, mask, FULL)
            for k in tl.static_range(LOW // 4):
                at = row[:, None] * (LOW // 4 * W) + k * W + column[None, :]
                store_if(low_ptr + at, lows[k] ^ FLIP_LOW, mask, FULL)
    return back


@triton.jit
def gather_bytes(a, b, c, d):
    """(the lowest bytes of four int32 words, their second bytes), a's lowest. PTX."""
    first = permute(a, b, 0x5140)
    second = permute(c, d, 0x5140)
    return permute(first, second, 0x5410), permute(first, second, 0x7632)


@triton.jit
def pack_integers(bits, WIDTH: tl.constexpr, LOW: tl.constexpr):
    """Integers of WIDTH + LOW bits in the low places of eight int32 -> words of both parts."""
    PER: tl.constexpr = 32 // WIDTH
    codes = ()
    lows = ()
    if PTX and WIDTH + LOW == 12:
        SHIFT: tl.constexpr = 0 if WIDTH == 4 else 4
        one = gather_bytes(bits[0] << SHIFT, bits[1] << SHIFT, bits[2] << SHIFT, bits[3] << SHIFT)
        two = gather_bytes(bits[4] << SHIFT, bits[5] << SHIFT, bits[6] << SHIFT, bits[7] << SHIFT)
        PART: tl.constexpr = 1 if WIDTH == 4 else 0  # which of the parts has four bits
        even = permute(one[PART], two[PART], 0x6420)
        odd = permute(one[PART], two[PART], 0x7531)
        if WIDTH == 4:
            codes = ((odd << 4) | even,)
            lows = (one[0], two[0])
        else:  # its bits are the upper half of each byte
            codes = (one[1], two[1])
            lows = (odd | ((even >> 4) & 0x0F0F0F0F),)
    else:
        for k in tl.static_range(8 // PER):
            word = bits[0] & 0
            for i in tl.static_range(PER):
                word = word | (shift(bits[k * PER + i], WIDTH * i - LOW) & lane_mask(WIDTH, i))
            codes = codes + (word,)
        if LOW > 0:
            LOW_PER: tl.constexpr = 32 // LOW
            for k in tl.static_range(LOW // 4):
                word = bits[0] & 0
                for i in tl.static_range(LOW_PER):
                    word = word | (shift(bits[k * LOW_PER + i], LOW * i) & lane_mask(LOW, i))
                lows = lows + (word,)
    return codes, lows


@triton.constexpr_function
def lane_mask(width, index):
    """The places of field number ``index`` of an int32 word, as a signed number."""
    mask = ((1 << width) - 1) << (width * index)
    return mask - (1 << 32) if mask >> 31 else mask


@triton.jit
def fetch_tile(
    pair, column, row_ok, column_ok, code_ptr, low_ptr, scale_ptr,
    FORMAT: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What ``decode_words`` makes a tile of, as loaded: codes, low parts and scales of its rows.

    Masks count only where a tile may be cut (R % 16, or W not a power of two): all of a whole tile
    is read. Arguments as ``encode_tile``.
    """
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    W: tl.constexpr = N // 8
    WORDS: tl.constexpr = element_bits_of(ELEM) // 4
    FULL: tl.constexpr = R % 16 == 0 and column.shape[0] == W
    LOW_ELEM: tl.constexpr = "int4" if LOW == 4 else "int8"
    out = ()
    for p in tl.static_range(2):
        row = 2 * pair + p
        mask = row_ok[p][:, None] & column_ok[None, :]
        offs = row[:, None] * (WORDS * W) + column[None, :]
        out = out + load_words(code_ptr, offs, mask, W, ELEM, FULL)
        if LOW > 0:
            offs = row[:, None] * (LOW // 4 * W) + column[None, :]
            out = out + load_words(low_ptr, offs, mask, W, LOW_ELEM, FULL)
        if FORMAT[3] != "none":
            out = out + fetch_scales(scale_ptr, row, row_ok[p], FORMAT, N, R % 16 == 0)
    return out


@triton.constexpr_function
def fetched(fmt, n):
    """(code words, low words, scale loads) of a row in what ``fetch_tile`` returns."""
    count, per = scales_a_load(fmt, n)
    return element_bits_of(fmt[0]) // 4, fmt[1] // 4, 0 if fmt[3] == "none" else count // per


@triton.jit
def fetched_scales(words, P: tl.constexpr, FORMAT: tl.constexpr, N: tl.constexpr):
    """The stored scales of the rows of parity P in what ``fetch_tile`` returned."""
    CODES: tl.constexpr = fetched(FORMAT, N)[0]
    LOWS: tl.constexpr = fetched(FORMAT, N)[1]
    SCALES: tl.constexpr = fetched(FORMAT, N)[2]
    out = ()
    for k in tl.static_range(SCALES):
        out = out + (words[P * (CODES + LOWS + SCALES) + CODES + LOWS + k],)
    return out


@triton.jit
def decode_words(
    words, tile, column, row_ok, column_ok,
    FORMAT: tl.constexpr, R: tl.constexpr, N: tl.constexpr, RAW: tl.constexpr = False,
):  # fmt: skip
    """What ``fetch_tile`` returned as sixteen fp32 [8, W] tensors; tile: its fp32 scale, or 0.

    RAW leaves out the scale of a row.
    """
    ELEM: tl.constexpr = FORMAT[0]
    LOW: tl.constexpr = FORMAT[1]
    GRAN: tl.constexpr = FORMAT[3]
    W: tl.constexpr = N // 8
    FULL: tl.constexpr = R % 16 == 0 and column.shape[0] == W
    CODES: tl.constexpr = fetched(FORMAT, N)[0]
    LOWS: tl.constexpr = fetched(FORMAT, N)[1]
    EACH: tl.constexpr = CODES + LOWS + fetched(FORMAT, N)[2]
    out = ()
    for p in tl.static_range(2):
        codes = ()
        for k in tl.static_range(CODES):
            codes = codes + (words[p * EACH + k],)
        if LOW > 0:
            lows = ()
            for k in tl.static_range(LOWS):
                lows = lows + (words[p * EACH + CODES + k],)
            values = planar_values(codes, lows, ELEM, LOW)
        else:
            values = code_values(codes, ELEM, GRAN == "none")
        if GRAN != "none" and not RAW:
            scales = decode_scales(fetched_scales(words, p, FORMAT, N), tile, FORMAT, N)
        for i in tl.static_range(8):
            value = values[i]
            if GRAN != "none" and not RAW:
                value = value * spread(scales, column, i, W, FORMAT[4], N)
            if FULL:
                out = out + (value,)
            else:  # what lies beyond the rows or columns is zero
                mask = row_ok[p][:, None] & column_ok[None, :]
                out = out + (tl.where(mask, value, 0.0),)
    return out


@triton.jit
def fetch_tile_scale(pair, tile_ptr, FORMAT: tl.constexpr):
    """The fp32 scale of a tile, 0 where the format has none."""
    if FORMAT[3] == "block" and FORMAT[5] == "e4m3":
        return tl.load(tile_ptr + tl.min(pair, 0) // PAIRS)
    else:
        return 0.0


@triton.jit
def decode_tile(
    pair, column, row_ok, column_ok, code_ptr, low_ptr, scale_ptr, tile_ptr,
    FORMAT: tl.constexpr, R: tl.constexpr, N: tl.constexpr, RAW: tl.constexpr = False,
):  # fmt: skip
    """The checkpoint of a tile as sixteen fp32 [8, W] tensors; arguments as ``encode_tile``."""
    words = fetch_tile(pair, column, row_ok, column_ok, code_ptr, low_ptr, scale_ptr, FORMAT, R, N)
    tile = fetch_tile_scale(pair, tile_ptr, FORMAT)
    return decode_words(words, tile, column, row_ok, column_ok, FORMAT, R, N, RAW)
