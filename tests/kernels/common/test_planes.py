"""Device functions of the formats, bit for bit against ``formats``, given the same random words."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from replayssm_quant.formats.codec import (  # noqa: E402
    _encode_scale,
    float_codes,
    float_values,
    int_codes,
)
from replayssm_quant.formats.philox import element_bits  # noqa: E402
from replayssm_quant.formats.spec import ELEMENTS, parse_format  # noqa: E402
from replayssm_quant.kernels.common import planes  # noqa: E402

SIZE = 1 << 14


@triton.jit
def _float_code(
    x_ptr, r_ptr, out_ptr, SIZE: tl.constexpr, ELEM: tl.constexpr, ROUND: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    x, r = tl.load(x_ptr + i), tl.load(r_ptr + i)
    tl.store(out_ptr + i, planes.float_code(x, r, ELEM, ROUND, BITS, ELEM != "e2m1"))


@triton.jit
def _int_code(
    x_ptr, r_ptr, out_ptr, SIZE: tl.constexpr, TOP: tl.constexpr, SR: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    x, r = tl.load(x_ptr + i), tl.load(r_ptr + i)
    words = (r,) + planes.byte_places(r < 0)  # a random number each
    bits = planes.integer_bits(x, words, 0, TOP, 0, SR, BITS, True)
    tl.store(out_ptr + i, bits - 0x4B400000)


@triton.jit
def _code_value(
    word_ptr, out_ptr, SIZE: tl.constexpr, T: tl.constexpr, ELEM: tl.constexpr, NAN: tl.constexpr
):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, planes.code_value(tl.load(word_ptr + i), T, ELEM, NAN))


@triton.jit
def _scale(
    amax_ptr, tile_ptr, stored_ptr, value_ptr, SIZE: tl.constexpr, SCALE: tl.constexpr,
    MAX: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    tile = tl.load(tile_ptr)
    inverse = planes.reciprocal(tile)
    stored, value = planes.make_scale(tl.load(amax_ptr + i), tile, inverse, SCALE, MAX, UP)
    tl.store(stored_ptr + i, stored)
    tl.store(value_ptr + i, value)


@triton.jit
def _bits(
    key_ptr, position, layer, head, out_ptr, R: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    BITS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * 8 + tl.arange(0, 8)[:, None]
    column = tl.arange(0, WP)[None, :]
    words = planes.random_words(
        tl.load(key_ptr), position, layer, head, pair, column, R, W, BITS, ROUNDS
    )
    for p in tl.static_range(2):
        for i in tl.static_range(8):
            row = 2 * pair + p
            at = out_ptr + row * (8 * W) + i * W + column
            value = planes.random_of(words, p * 8 + i, BITS)
            tl.store(at, value, mask=(row < R) & (column < W))


def any_floats(device: torch.device, seed: int = 0) -> torch.Tensor:
    """fp32 values of every kind: random bit patterns, NaN, Inf, subnormals, ties, format edges."""
    gen = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (SIZE // 4,), generator=gen).to(torch.int32)
    exponent = torch.randint(-28, 18, (SIZE // 2,), generator=gen).float()
    # few significant bits, so that many lie half-way between two codes
    coarse = torch.randint(-64, 65, (SIZE // 2,), generator=gen) / 16 * torch.exp2(exponent)
    fine = torch.randn(SIZE // 4 - 16, generator=gen) * 8
    edges = [0.0, -0.0, 448.0, 464.0, 480.0, 6.0, 5.0, 7.0, 57344.0, 61440.0, 65504.0, 65520.0]
    edges += [1e-45, -1e-45, float("inf"), float("nan")]
    return torch.cat((patterns.view(torch.float32), coarse, fine, torch.tensor(edges))).to(device)


def numbers(bits: int, device: torch.device) -> torch.Tensor:
    gen = torch.Generator().manual_seed(1)
    r = torch.randint(0, 1 << bits, (SIZE,), generator=gen)
    r[:64], r[64:128] = 0, (1 << bits) - 1
    return r.to(device, torch.int32)


ELEMENT_NAMES = ("e2m1", "e4m3", "e5m2", "fp16", "bf16")
ROUNDINGS = [(e, r, b) for e in ELEMENT_NAMES for r, b in (("rn", 8), ("sr", 8), ("sr", 16))]


@pytest.mark.parametrize("element, rounding, bits", [*ROUNDINGS, ("e4m3", "up", 8)])
def test_float_codes(element: str, rounding: str, bits: int, device: torch.device) -> None:
    x, r = any_floats(device), numbers(bits, device)
    got = torch.empty(SIZE, dtype=torch.int32, device=device)
    _float_code[(1,)](x, r, got, SIZE, element, rounding, bits)
    rand = r if rounding == "sr" else None
    want = float_codes(x, ELEMENTS[element], rand, bits, up=rounding == "up")
    if element == "e2m1":  # it has no NaN: NaN never reaches it, codes are 0 where a scale is NaN
        got, want = got[~x.isnan()], want[~x.isnan()]
    assert torch.equal(got, want)


@pytest.mark.parametrize("top", [7, 127, 112, 1792, 2032])
@pytest.mark.parametrize("bits", [0, 8, 16])
def test_int_codes(top: int, bits: int, device: torch.device) -> None:
    """Whole numbers and halves included; every store clamps to the range first."""
    x = any_floats(device).nan_to_num(0.0).clamp(-top, top)
    r = numbers(bits or 8, device)
    got = torch.empty(SIZE, dtype=torch.int32, device=device)
    _int_code[(1,)](x, r, got, SIZE, top, bits > 0, bits or 8)
    assert torch.equal(got, int_codes(x, top, r if bits else None, bits or 8))


@pytest.mark.parametrize("element", ["e2m1", "int4", "e4m3", "e5m2", "int8", "fp16", "bf16"])
def test_code_values(element: str, device: torch.device) -> None:
    """Every code that a store writes, NaN included, at every place of a word."""
    e = ELEMENTS[element]
    width = e.bits
    codes = torch.arange(1 << width)
    if e.kind == "float":
        magnitude = codes & ((1 << (width - 1)) - 1)
        nan = {"fp16": 0x7E00, "bf16": 0x7FC0, "e2m1": -1}.get(element, 0x7F)
        codes = codes[(magnitude <= e.max_magnitude_code) | (magnitude == nan)]
    size, per = 1 << max(8, width), 32 // width
    codes = codes.repeat(-(-size // codes.numel()))[:size]
    for place in range(per):
        rest = 0x5A5A5A5A & ~(((1 << width) - 1) << (width * place))  # what the neighbours hold
        word = ((codes << (width * place)) | rest).to(torch.int32).to(device)
        got = torch.empty(size, device=device)
        _code_value[(1,)](word, got, size, place, element, True)
        if element == "int4":
            want = (codes - 8).float()
        elif element == "int8":
            want = codes.to(torch.int8).float()
        else:
            want = float_values(codes, e)
        assert torch.equal(got.cpu().nan_to_num(nan=1234.0), want.nan_to_num(nan=1234.0))


@pytest.mark.parametrize(
    "name", ["e4m3", "int8", "P8+4", "int8/row/fp16", "mxfp4", "mxfp8", "nvfp4", "int4", "P4+8"]
)
def test_scales(name: str, device: torch.device) -> None:
    """Zero, vanishing, huge and non-finite groups among ordinary ones."""
    fmt = parse_format(name)
    size = 256
    amax = any_floats(device).abs()[: size - 8]
    if fmt.scale.has_tile_scale:  # one NaN or Inf would make the whole tile's scale NaN
        amax = amax.nan_to_num(1.0, posinf=2.0).clamp(max=1e30)
    special = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-100, 1.0, 448.0, 6.0, 1e30], device=device)
    amax = torch.cat((amax, special))
    tile = torch.ones(1, device=device)  # unused by the others
    shaped = amax[:, None]
    if fmt.scale.has_tile_scale:
        shaped = amax.view(1, 16, size // 16)  # one tile of 16 rows
    stored, head, value = _encode_scale(shaped, fmt)
    if head is not None:
        tile = head.flatten()[:1].clone()
    got_stored = torch.empty(size, dtype=torch.int32, device=device)
    got_value = torch.empty(size, device=device)
    s = fmt.scale
    _scale[(1,)](amax, tile, got_stored, got_value, size, s.dtype, fmt.max_code, s.round_up)
    stored = stored.flatten()
    if stored.dtype == torch.float32:
        stored = stored.view(torch.int32)
    elif stored.dtype == torch.float16:
        stored = stored.view(torch.int16).to(torch.int32)
    finite = value.flatten().isfinite()
    assert torch.equal(got_stored[finite], stored.to(torch.int32)[finite])
    assert torch.equal(got_value[finite], value.flatten()[finite])
    assert got_value[~finite].isnan().all()


@pytest.mark.parametrize(
    "rows, n, bits, rounds", [(32, 128, 8, 7), (17, 96, 8, 10), (20, 64, 16, 7)]
)
def test_random_bits(rows: int, n: int, bits: int, rounds: int, device: torch.device) -> None:
    """The bytes of an element are those that ``philox.element_bits`` gives it."""
    key = torch.tensor([-0x123456789ABCDEF], device=device)
    position, layer, head = 2**31 - 5, 11, 77
    got = torch.full((rows, n), -1, dtype=torch.int32, device=device)
    w = n // 8
    grid = (-(-rows // 16),)
    _bits[grid](key, position, layer, head, got, rows, w, triton.next_power_of_2(w), bits, rounds)
    want = element_bits(
        key,
        torch.tensor([position], device=device),
        layer,
        1,
        rows,
        n,
        head_offset=head,
        bits=bits,
        rounds=rounds,
    )
    assert torch.equal(got.cpu(), want[0, 0].cpu())
