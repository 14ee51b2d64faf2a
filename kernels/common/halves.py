"""The 4-bit copy of an fp16 checkpoint, made from its stored words: same bytes as ``encode_tile``.

For planes of sixteen columns that are one block each (d_state 128), one warp a tile. Lane 4 g + q
holds columns 4 q .. 4 q + 3 of row pair g, so its four lanes share the sixteen blocks of a pair of
rows: p * 8 + i for plane i of the row of parity p. Each lane makes the scales of four of them
(blocks 4 q .. 4 q + 3), where every lane would otherwise make all sixteen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .planes import (
    converts_fp4,
    half_pair_stochastic,
    share_maxima,
    shared_scales,
    shares_blocks,
)

_MAGIC = 0x4B400000  # 1.5 * 2**23: a sum with it is an integer in its low bits


@triton.constexpr_function
def takes_halves(update, output, rows, n, width, sr, bits):
    """True if a copy in ``output`` is made by ``encode_halves``; both are ``kernel_format``s."""
    stored = update[0] == "fp16" and update[3] == "none" and sr and bits == 8
    e2m1 = output[0] == "e2m1" and output[6] == 0
    return stored and e2m1 and shares_blocks(output, rows, n, width)


@triton.constexpr_function
def _amax_asm():
    """$0..$3: largest magnitudes of a lane's four blocks, fp32; $4..$35: words of two halves.

    Words 4 t .. 4 t + 3 are the four columns of planes 2 m, 2 m + 1 of parity p, t = p * 4 + m.
    """
    text = "{ .reg .b32 m<8>, lane, bit, send, got; .reg .b16 a, b; .reg .pred high, odd; "
    for t in range(8):
        w = 4 + 4 * t
        text += f"max.NaN.xorsign.abs.f16x2 m{t}, ${w}, ${w + 1}; "
        text += f"max.NaN.xorsign.abs.f16x2 m{t}, m{t}, ${w + 2}; "
        text += f"max.NaN.xorsign.abs.f16x2 m{t}, m{t}, ${w + 3}; "
        text += f"and.b32 m{t}, m{t}, 0x7fff7fff; "
    text += share_maxima(8, "b32", "max.NaN.f16x2")
    for m in range(2):
        text += f"mov.b32 {{a, b}}, m{m}; cvt.f32.f16 ${2 * m}, a; cvt.f32.f16 ${2 * m + 1}, b; "
    return text + "}"


@triton.constexpr_function
def _codes_asm(parity, convert):
    """$0..$3: words of eight e2m1 codes; $4..$19 words of halves, $20..$23 a lane's inverse scales.

    ``float_field`` rounds |x| inverse 2**-126, whose bits are those of a code and of what rounding
    drops. Here the same number is rounded three times, as codes are 2 t up to t = 2, t + 2 up to 4
    and t / 2 + 4 beyond, and at each t the least of the three: adding 1.5 * 2**23 rounds. Or, with
    ``convert``, by the conversion that a GPU has; to the same code.
    """
    text = "{ .reg .b32 i<8>, lane, from, acc, s, t, g1, g2, g3; .reg .b16 h<8>; .reg .f32 x, y; "
    text += ".reg .b8 c<4>; mov.u32 lane, %laneid; and.b32 lane, lane, 28; "
    for k in range(8):
        if k % 4 == 0:
            text += f"add.u32 from, lane, {2 * parity + k // 4}; "
        text += f"shfl.sync.idx.b32 i{k}, ${20 + k % 4}, from, 31, -1; "
    # codes are summed with the magic numbers on top; what those add up to is taken off at the end
    excess = sum(_MAGIC << (4 * k) for k in range(8)) % 2**32
    for c in range(4):
        words = [f"${4 + 4 * m + c}" for m in range(4)]
        for m in range(4):
            text += f"mov.b32 {{h{2 * m}, h{2 * m + 1}}}, {words[m]}; "
        if convert:
            for k in range(8):
                x = "y" if k % 2 else "x"
                text += f"cvt.f32.f16 {x}, h{k}; mul.rn.f32 {x}, {x}, i{k}; "
                text += f"mul.rn.f32 {x}, {x}, 0f00800000; mul.rn.f32 {x}, {x}, 0f7e800000; "
                if k % 2:
                    text += f"cvt.rn.satfinite.e2m1x2.f32 c{k // 2}, y, x; "
            text += f"mov.b32 ${c}, {{c0, c1, c2, c3}}; "
        else:
            for k in range(7, -1, -1):
                text += f"cvt.f32.f16 x, h{k}; abs.f32 x, x; mul.rn.f32 x, x, i{k}; "
                text += "mul.rn.f32 x, x, 0f00800000; "  # 2**-126
                for g in range(3):
                    factor, magic = (127 - g + 127) << 23, _MAGIC + 2 * g
                    text += f"fma.rn.f32 g{g + 1}, x, 0f{factor:08x}, 0f{magic:08x}; "
                text += f"min.u32 g1, g1, g2; min.u32 g1, g1, g3; min.u32 g1, g1, {_MAGIC + 7}; "
                text += "mov.b32 acc, g1; " if k == 7 else "mad.lo.u32 acc, acc, 16, g1; "
            text += f"prmt.b32 s, {words[0]}, {words[1]}, 0xfbd9; "  # signs as bytes: 0, 2, 1, 3
            text += f"prmt.b32 t, {words[2]}, {words[3]}, 0xfbd9; "
            text += "prmt.b32 g1, s, t, 0x5410; prmt.b32 g2, s, t, 0x7632; "
            text += "lop3.b32 s, g1, g2, 0x0f0f0f0f, 0xe4; and.b32 s, s, 0x88888888; "
            text += f"sub.u32 acc, acc, {excess}; add.u32 ${c}, acc, s; "
    return text + "}"


@triton.jit
def store_halves(values, random, pair, column, code_ptr, LOADED: tl.constexpr):
    """Round and store a tile in fp16; the stored words, as ``encode_halves`` wants them.

    Unless LOADED (``store.encode_state``) they are read back, which shares them out as it wants.
    """
    out = ()
    for p in tl.static_range(2):
        for m in tl.static_range(4):
            low, high = values[p * 8 + 2 * m], values[p * 8 + 2 * m + 1]
            word = half_pair_stochastic(low, high, random, p * 8 + 2 * m)
            at = (2 * pair + p)[:, None] * 64 + m * 16 + column[None, :]
            tl.store(code_ptr + at, word)
            out = out + (word,)
    if not LOADED:
        again = ()
        for p in tl.static_range(2):
            for m in tl.static_range(4):
                at = (2 * pair + p)[:, None] * 64 + m * 16 + column[None, :]
                again = again + (tl.load(code_ptr + at),)
        out = again
    return out


@triton.jit
def encode_halves(words, pair, column, code_ptr, scale_ptr, tile_ptr):
    """Store the nvfp4 copy of a tile: eight int32 [8, 16] of two fp16 numbers, row parity first.

    Pointers are at the head: code int32, scale uint8, tile fp32; pair int32 [8].
    """
    AMAX: tl.constexpr = _amax_asm()
    amax = tl.inline_asm_elementwise(
        AMAX, "=&r,=&r,=&r,=&r" + ",r" * 32, words, dtype=tl.float32, is_pure=True, pack=4
    )
    inverse = shared_scales(amax, pair, scale_ptr, tile_ptr, 6.0, False)
    EVEN: tl.constexpr = _codes_asm(0, converts_fp4())
    ODD: tl.constexpr = _codes_asm(1, converts_fp4())
    for p in tl.static_range(2):
        w = (words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3], inverse)
        word = tl.inline_asm_elementwise(
            EVEN if p == 0 else ODD, "=&r,=&r,=&r,=&r" + ",r" * 20, w, dtype=tl.int32,
            is_pure=True, pack=4,
        )  # fmt: skip
        tl.store(code_ptr + (2 * pair + p)[:, None] * 16 + column[None, :], word)
