"""Encode and decode recurrent states in plain torch: nearest even, or stochastic from given bits.

This file fixes the arithmetic that the kernels reproduce bit for bit: every step is one fp32
operation. Shapes: a state is [..., H, R, N] fp32 (H heads; R = head_dim, or V for GDN; N = d_state,
or K for GDN), N is the contracted axis and scales run along it.

Stochastic rounding adds u = (r + 0.5) / 2**bits to the scaled magnitude in units of the format's
own ulp and takes the floor; for integers it adds u - 0.5 and rounds to nearest, which is the same
but where a sum hits an integer exactly. The half-step offset centres the draw; without it
long-memory states lose mass. Values are clamped before and after rounding: ``amax * (1 / (amax /
448))`` exceeds 448 by one ulp for about a fifth of all rows, and a carry would reach the NaN code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .packing import pack_nibbles, unpack_nibbles
from .spec import ELEMENTS, MIN_SCALE, TILE_ROWS, Element, Format

E4M3 = ELEMENTS["e4m3"]
_TORCH_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass
class Encoded:
    """The stored planes of a state; which are present follows ``Format.planes``.

    codes [..., H, R, N] (fp32, fp16, bf16, uint8) or [..., H, R, N / 8] int32 words of eight 4-bit
    codes; low the low plane of a planar format, stored alike; scale fp32, fp16 or uint8 bits, [...,
    H, R], [..., H, R, N / block] or [..., H]; tile_scale fp32 [...,
    H, ceil(R / 16)], one for each 16 rows of a head.
    """

    codes: torch.Tensor
    low: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    tile_scale: torch.Tensor | None = None


# --- elements -------------------------------------------------------------------------------------


def _round_stochastic(t: torch.Tensor, rand: torch.Tensor, bits: int) -> torch.Tensor:
    """``t`` (in units of the format's step) to one of the two integers beside it, in fp32.

    With 8 bits one fp32 addition of (rand - 127.5) / 256 and a round to nearest. With 16 bits a
    ``t`` of 1024 or more (the 12-bit planar integers) leaves the draw too few places and would lift
    even whole numbers; the fraction is then split off first.
    """
    if bits == 8:
        return torch.round(t + (rand.to(torch.float32) - 127.5) * 2.0**-8)
    whole = torch.floor(t)
    return whole + torch.floor((t - whole) + (rand.to(torch.float32) + 0.5) * 2.0**-bits)


def float_codes(
    x: torch.Tensor,
    element: Element,
    rand: torch.Tensor | None = None,
    bits: int = 8,
    up: bool = False,
) -> torch.Tensor:
    """Codes (int32, sign bit on top) of fp32 values in a float element of at most 16 bits.

    Saturates at the largest finite value, keeps NaN where the element has one (and, in fp16 rounded
    by 8 bits, Inf). ``rand`` None rounds to nearest even, else stochastically; ``up`` rounds
    magnitudes up.
    """
    m, emin = element.mantissa, element.emin
    drop = 23 - m
    mag = x.abs().clamp(max=element.max)
    # scaled by this power of two, the fp32 bits of a magnitude are its code and then the bits that
    # rounding drops, in the subnormal range too
    align = 2.0 ** (-126 - emin)
    field = (mag * align).view(torch.int32)
    if rand is not None:
        if element.name == "fp16" and bits == 8:
            # the draw is added in fp32, as one instruction of a kernel does
            power = (mag.view(torch.int32) & 0x7F800000).clamp(min=113 << 23).view(torch.float32)
            drawn = mag + (rand.to(torch.float32) + 0.5) * 2.0**-18 * power
            field = (drawn.clamp(max=element.max) * align).view(torch.int32)
            step = torch.zeros_like(rand)
        elif bits == 8:
            step = (rand << (drop - 8)) + (1 << (drop - 9))
        elif drop >= 17:
            step = (rand << (drop - 16)) + (1 << (drop - 17))
        else:
            step = rand >> (16 - drop)  # floor(fraction + (rand + 0.5) / 2**16) in whole steps
        code = (field + step) >> drop
    elif element.name == "bf16":
        field = mag.view(torch.int32)
        code = (field + 0x7FFF + ((field >> 16) & 1)) >> 16
    elif element.name == "e2m1" and not up:
        # below 1 the product above has rounded at 2**-23: what lies that near to a tie is one
        code = (field + ((1 << (drop - 1)) - 1) + ((field >> drop) & 1)) >> drop
    else:
        exp = ((mag.view(torch.int32) >> 23) - 127).clamp(min=emin)
        steps = mag * ((m - exp + 127) << 23).view(torch.float32)  # exact: a power of two
        steps = torch.ceil(steps) if up else torch.round(steps)
        code = ((exp - emin) << m) + torch.where(steps.isfinite(), steps, 0.0).to(torch.int32)
    code = code.clamp(max=element.max_magnitude_code)
    if element.name == "fp16" and rand is not None and bits == 8:
        code = torch.where(x.isinf(), 0x7C00, code)
    nan_code = {"fp16": 0x7E00, "bf16": 0x7FC0, "e4m3": 0x7F, "e5m2": 0x7F}.get(element.name)
    code = torch.where(x.isnan(), nan_code if nan_code is not None else 0, code)
    sign = (x.view(torch.int32) < 0).to(torch.int32) << (element.bits - 1)
    return code | sign


def float_values(code: torch.Tensor, element: Element) -> torch.Tensor:
    """fp32 values of integer codes of a float element (the inverse of ``float_codes``)."""
    if element.name == "fp16":
        return code.to(torch.int16).view(torch.float16).to(torch.float32)
    if element.name == "bf16":
        return (code.to(torch.int32) << 16).view(torch.float32)
    if element.name in _TORCH_FLOAT8:
        return code.to(torch.uint8).view(_TORCH_FLOAT8[element.name]).to(torch.float32)
    m, emin = element.mantissa, element.emin
    mag = code & ((1 << (element.bits - 1)) - 1)
    exp = (mag >> m).clamp(min=1)
    value = (mag - ((exp - 1) << m)).to(torch.float32) * torch.exp2(
        (exp - 1 + emin - m).to(torch.float32)
    )
    return torch.where(code >> (element.bits - 1) != 0, -value, value)


def int_codes(
    t: torch.Tensor, max_code: float, rand: torch.Tensor | None = None, bits: int = 8
) -> torch.Tensor:
    """Signed integer codes (int32) of scaled values, clamped to +-max_code; NaN gives 0."""
    q = torch.round(t) if rand is None else _round_stochastic(t, rand, bits)
    return torch.nan_to_num(q.clamp(-max_code, max_code), nan=0.0).to(torch.int32)


# --- scales ---------------------------------------------------------------------------------------


def _floored(s: torch.Tensor) -> torch.Tensor:
    """Scales are 0, or at least MIN_SCALE, or NaN where the group holds NaN or Inf."""
    s = torch.where(s > 0, s.clamp(min=MIN_SCALE), s)
    return torch.where(s.isfinite(), s, float("nan"))


def _encode_scale(
    amax: torch.Tensor, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(stored scale, tile scale or None, fp32 scale) of the groups' largest magnitudes."""
    spec = fmt.scale
    # tensors as divisors: by a Python number torch multiplies with its reciprocal on a GPU
    raw = amax / torch.full_like(amax[..., :1], fmt.max_code)
    if spec.dtype == "fp32":
        s = _floored(raw)
        return s, None, s
    if spec.dtype == "fp16":
        s = raw.clamp(max=65504.0).to(torch.float16)
        low = s.to(torch.float32) < raw
        up = (s.view(torch.int16) + low.to(torch.int16)).view(torch.float16)
        s = torch.where(up.isinf() & raw.isfinite(), torch.full_like(s, 65504.0), up)
        s = torch.where(raw.isfinite(), s, float("nan"))
        return s, None, s.to(torch.float32)
    if spec.dtype == "e8m0":
        bits = raw.view(torch.int32)
        exp = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        code = torch.where(raw.isfinite(), exp.clamp(27, 254), 255)
        s = decode_scale(code.to(torch.uint8), None, fmt)
        return code.to(torch.uint8), None, s
    rows = amax.shape[-2]
    tiles = -(-rows // TILE_ROWS)
    largest = torch.nn.functional.pad(amax.amax(-1), (0, tiles * TILE_ROWS - rows))
    largest = largest.unflatten(-1, (tiles, TILE_ROWS)).amax(-1)
    tile = _floored(
        largest / torch.full_like(largest, fmt.max_code * 448.0)
    )  # so the largest block of a tile has 448
    wide = _tile_rows(tile, rows)
    ratio = torch.where(wide > 0, raw / wide, 0.0)
    ratio = torch.where(wide.isnan(), 0.0, ratio)
    code = float_codes(ratio, E4M3, up=spec.round_up).to(torch.uint8)
    return code, tile, decode_scale(code, tile, fmt)


def _tile_rows(tile: torch.Tensor, rows: int) -> torch.Tensor:
    """Tile scales [..., H, tiles] -> [..., H, rows, 1]."""
    return tile.repeat_interleave(TILE_ROWS, -1)[..., :rows, None]


def decode_scale(scale: torch.Tensor, tile_scale: torch.Tensor | None, fmt: Format) -> torch.Tensor:
    """Stored scales -> fp32 scales of the same shape."""
    dtype = fmt.scale.dtype
    if dtype == "e8m0":
        code = scale.to(torch.int32)
        value = torch.where(code > 0, code << 23, 1 << 22).view(torch.float32)
        return torch.where(code == 255, float("nan"), value)
    if dtype == "e4m3":
        assert tile_scale is not None
        return float_values(scale, E4M3) * _tile_rows(tile_scale, scale.shape[-2])
    return scale.to(torch.float32)


def _expand(scale: torch.Tensor, fmt: Format, n: int) -> torch.Tensor:
    """fp32 scales -> a tensor that broadcasts against [..., H, R, N]."""
    if fmt.scale.granularity == "block":
        return scale.repeat_interleave(fmt.scale.block, -1)
    return scale[..., None] if fmt.scale.granularity == "row" else scale[..., None, None]


# --- states ---------------------------------------------------------------------------------------


def encode(
    state: torch.Tensor, fmt: Format, rand: torch.Tensor | None = None, bits: int = 8
) -> Encoded:
    """Round an fp32 state [..., H, R, N] to ``fmt``.

    rand None rounds to nearest even; else an integer tensor of the state's shape in 0..2**bits - 1
    (``philox.element_bits``) rounds stochastically, bits 8 or 16. Raises ValueError where a shape
    does not fit.
    """
    if state.dtype != torch.float32:
        raise TypeError(f"encode needs an fp32 state, not {state.dtype}; convert it with .float()")
    rows, n = state.shape[-2:]
    fmt.check(rows, n)
    if bits not in (8, 16):
        raise ValueError(f"random bits {bits}: use 8 or 16")
    if rand is not None:
        if rand.shape != state.shape:
            raise ValueError(
                f"rand {tuple(rand.shape)} must have the state's shape {tuple(state.shape)}: "
                "one random number an element"
            )
        rand = rand.to(torch.int32)
    if not fmt.rounds:
        return Encoded(state.clone())
    scale = head = None
    t = state
    if fmt.is_scaled:
        mag = state.abs()
        if fmt.scale.granularity == "block":
            amax = mag.unflatten(-1, (-1, fmt.scale.block)).amax(-1)
        else:
            amax = mag.amax(-1) if fmt.scale.granularity == "row" else mag.amax((-1, -2))
        scale, head, s = _encode_scale(amax, fmt)
        t = state * _expand(torch.where(s == 0, 0.0, 1.0 / s), fmt, n)
        t = torch.where(t.isnan(), 0.0, t).clamp(-fmt.max_code, fmt.max_code)
    if fmt.kind == "float":
        element = ELEMENTS[fmt.element]
        code = float_codes(t, element, rand, bits)
        if element.bits == 16:
            dtype = torch.float16 if element.name == "fp16" else torch.bfloat16
            codes = code.to(torch.int16).view(dtype)
        else:
            codes = pack_nibbles(code) if element.bits == 4 else code.to(torch.uint8)
        return Encoded(codes, None, scale, head)
    q = int_codes(t, fmt.max_code, rand, bits)
    if not fmt.is_planar:
        codes = pack_nibbles(q + 8) if fmt.bits == 4 else q.to(torch.int8).view(torch.uint8)
        return Encoded(codes, None, scale, head)
    high = (q + (1 << (fmt.lo_bits - 1))) >> fmt.lo_bits
    low = q - (high << fmt.lo_bits)
    codes = pack_nibbles(high + 8) if fmt.bits == 4 else high.to(torch.int8).view(torch.uint8)
    lows = pack_nibbles(low + 8) if fmt.lo_bits == 4 else low.to(torch.int8).view(torch.uint8)
    return Encoded(codes, lows, scale, head)


def _integers(plane: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        return unpack_nibbles(plane) - 8
    return plane.view(torch.int8).to(torch.int32)


def decode(enc: Encoded, fmt: Format, *, high_only: bool = False) -> torch.Tensor:
    """Stored planes -> fp32 state [..., H, R, N].

    high_only decodes the high plane of a planar format alone: the output copy. The scale multiplies
    last, as one fp32 product of the exact code value and the fp32 scale.
    """
    if fmt.name in ("fp32", "fp16", "bf16"):
        return enc.codes.to(torch.float32)
    if fmt.kind == "float":
        element = ELEMENTS[fmt.element]
        codes = unpack_nibbles(enc.codes) if element.bits == 4 else enc.codes
        value = float_values(codes, element)
    else:
        value_int = _integers(enc.codes, fmt.bits)
        if fmt.is_planar:
            value_int = value_int << fmt.lo_bits
            if not high_only:
                assert enc.low is not None
                value_int = value_int + _integers(enc.low, fmt.lo_bits)
        value = value_int.to(torch.float32)
    if not fmt.is_scaled:
        return value
    assert enc.scale is not None
    s = decode_scale(enc.scale, enc.tile_scale, fmt)
    return value * _expand(s, fmt, value.shape[-1])


def fake_quantize(
    state: torch.Tensor, fmt: Format, rand: torch.Tensor | None = None, bits: int = 8
) -> torch.Tensor:
    """decode(encode(state)): what a store in ``fmt`` leaves of the state."""
    return decode(encode(state, fmt, rand, bits), fmt)
