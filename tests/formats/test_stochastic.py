"""Stochastic rounding: exhaustive over the draws, unbiased everywhere, never off the grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.formats.codec import decode, encode, float_codes, float_values, int_codes
from replayssm_quant.formats.philox import element_bits, request_key
from replayssm_quant.formats.spec import ELEMENTS, Element, parse_format

FLOATS = ["fp16", "bf16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
INTS = [7.0, 112.0, 127.0, 1792.0, 2032.0]
STATES = [
    "fp16", "bf16", "e4m3", "e4m3/none", "e4m3/head", "e4m3/b32", "e4m3/b32/fp16", "e4m3/b32/e8m0",
    "e5m2", "int8", "int8/head", "int8/row/fp16", "int4", "int4/row", "nvfp4", "mxfp4", "mxfp8",
    "P4+4", "P4+8", "P8+4", "P4+8/row",
]  # fmt: skip


def bases(element: Element) -> dict[str, int]:
    """Codes to start from, by where they lie: the step above each goes to the next code."""
    one = 1 << element.mantissa
    return {
        "zero": 0,
        "subnormal": max(one // 2, 1) - 1,
        "largest subnormal": one - 1,
        "smallest normal": one,
        "last of a binade": 2 * one - 1,
        "normal": one + one // 2,
        "last step": element.max_magnitude_code - 1,
    }


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", FLOATS)
def test_each_fraction_rounds_up_exactly_as_often_as_it_says(
    name: str, bits: int, sign: int
) -> None:
    """A fraction j / 2**bits of a step goes up for exactly j of the 2**bits random numbers."""
    element = ELEMENTS[name]
    draws = torch.arange(2**bits, dtype=torch.int32)
    # 16 bits: fp32 holds a tenth of the fractions between two fp16 numbers
    count = 256 if bits == 8 else 24
    for where, base in bases(element).items():
        low, high = float_values(torch.tensor([base, base + 1]), element).double()
        j = torch.arange(count) * (1 if bits == 8 else 2728 if name != "fp16" else 2720)
        x = low + j.double() / 2**bits * (high - low)
        assert torch.equal(x.float().double(), x), where  # exact in fp32, so is the fraction
        codes = float_codes(
            (sign * x.float())[:, None].expand(-1, len(draws)).contiguous(),
            element,
            draws.expand(count, -1).contiguous(),
            bits,
        )
        magnitudes = codes & ((1 << (element.bits - 1)) - 1)
        assert torch.equal(
            ((magnitudes == base) | (magnitudes == base + 1)).all(), torch.tensor(True)
        )
        assert torch.equal((magnitudes == base + 1).sum(-1), j), where


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("max_code", INTS)
def test_integers_round_up_exactly_as_often_as_they_say(max_code: float, bits: int) -> None:
    draws = torch.arange(2**bits, dtype=torch.int32)
    j = torch.arange(256) if bits == 8 else torch.arange(0, 65536, 65536 // 16)
    for base in (0, 1, int(max_code) - 1, -1, -2, -int(max_code)):
        t = (base + j.double() / 2**bits).float()
        q = int_codes(t[:, None].expand(-1, len(draws)), max_code, draws.expand(len(j), -1), bits)
        assert int(q.min()) == base and int(q.max()) == base + 1
        assert torch.equal((q == base + 1).sum(-1), j), base


def test_the_half_step_centres_fractions_between_two_draws() -> None:
    """Any fraction is matched within 1/512, as often above as below; truncation is 1/512 low."""
    g = torch.Generator().manual_seed(0)
    fraction = torch.rand(2000, generator=g)
    draws = torch.arange(256, dtype=torch.int32)
    up = int_codes((5 + fraction)[:, None].expand(-1, 256), 127.0, draws.expand(2000, -1)) - 5
    miss = up.double().mean(-1) - fraction.double()
    assert float(miss.abs().max()) <= 1 / 512 + 1e-6
    assert abs(float(miss.mean())) < 5 * (1 / 256 / 12**0.5) / 2000**0.5


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", FLOATS)
def test_grid_points_stay_for_every_draw(name: str, bits: int) -> None:
    element = ELEMENTS[name]
    codes = torch.arange(2**element.bits, dtype=torch.int32)
    values = float_values(codes, element)
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    for r in (0, 1, 2 ** (bits - 1), 2**bits - 2, 2**bits - 1):
        rand = torch.full(values.shape, r, dtype=torch.int32)
        assert torch.equal(float_codes(values, element, rand, bits), codes), r


@settings(max_examples=300, deadline=None)
@given(
    st.floats(width=32, allow_nan=False, allow_infinity=True),
    st.integers(0, 65535),
    st.sampled_from(FLOATS),
    st.sampled_from([8, 16]),
)
def test_the_result_is_one_of_the_two_neighbours(x: float, r: int, name: str, bits: int) -> None:
    element = ELEMENTS[name]
    v = torch.tensor([x], dtype=torch.float32)
    rand = torch.tensor([r & (2**bits - 1)], dtype=torch.int32)
    if v.isinf() and name == "fp16" and bits == 8:  # kept, see float_codes
        v = v.clamp(-element.max, element.max)
    result = float_values(float_codes(v, element, rand, bits), element).abs().double()
    grid = float_values(torch.arange(element.max_magnitude_code + 1), element).double()
    mag = v.abs().double().clamp(max=element.max)
    floor, ceil = grid[grid <= mag].max(), grid[grid >= mag].min()
    assert float(result) in (float(floor), float(ceil))
    assert float(result) <= element.max


def z_score(error: torch.Tensor, step: torch.Tensor, fraction: torch.Tensor) -> float:
    """Mean error in standard errors of a fair draw; ``step`` is the grid's at each element."""
    variance = (fraction * (1 - fraction) * step**2).sum()
    return float(error.sum() / variance.sqrt())


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("region", ["normal", "subnormal", "saturating"])
@pytest.mark.parametrize("name", FLOATS)
def test_elements_are_unbiased(name: str, region: str, bits: int) -> None:
    """|mean error| < 5 standard errors over a million Philox draws, next to the top value too."""
    element = ELEMENTS[name]
    g = torch.Generator().manual_seed(3)
    smallest, step = 2.0**element.emin, 2.0 ** (element.emin - element.mantissa)
    top = element.max
    last = top - float(float_values(torch.tensor([element.max_magnitude_code - 1]), element))
    u = torch.rand(2**20, generator=g)
    x = {
        "normal": smallest * (1 + u * 2),
        "subnormal": u * smallest if name != "bf16" else u * step * 100,
        "saturating": top - 3 * last * u,
    }[region]
    x = torch.where(torch.rand(x.shape, generator=g) < 0.5, -x, x)
    rand = element_bits(
        torch.tensor([request_key(5, name)]), torch.tensor([16]), 0, 128, 64, 128, bits=bits
    ).flatten()
    rounded = float_values(float_codes(x, element, rand, bits), element).double()
    grid = float_values(torch.arange(element.max_magnitude_code + 1), element).double()
    mag = x.abs().double()
    i = torch.searchsorted(grid, mag, right=True).clamp(max=len(grid) - 1) - 1
    width = grid[i + 1] - grid[i]
    fraction = ((mag - grid[i]) / width).clamp(0, 1)
    error = (rounded - x.double()) * x.sign().double()
    assert abs(z_score(error, width, fraction)) < 5
    assert float(error.abs().max()) > 0


@pytest.mark.parametrize("name", ["fp16", "e4m3", "e5m2"])
def test_tiny_values_keep_their_mean(name: str) -> None:
    """Below the smallest normal and far below the smallest step, where a bit trick returns 0."""
    element = ELEMENTS[name]
    step = 2.0 ** (element.emin - element.mantissa)
    draws = torch.arange(65536, dtype=torch.int32)
    for share in (0.9 * 2**element.mantissa, 3.3, 1.0, 0.4, 0.01, 3e-4):
        x = torch.full((65536,), share * step)
        mean = float_values(float_codes(x, element, draws, 16), element).double().mean()
        # 16 random bits, a fraction of 23 - mantissa bits that was rounded to nearest, x in fp32
        bound = (2**-16 + 2 ** -(24 - element.mantissa)) / share + 2**-22
        assert abs(float(mean) / (share * step) - 1) < bound


@pytest.mark.parametrize("name", STATES)
def test_states_are_unbiased_on_the_grid_and_within_range(name: str) -> None:
    """The mean of 2048 flushes of one state, against the state; rows 2**-6 to 1 times as large."""
    fmt = parse_format(name)
    g = torch.Generator().manual_seed(9)
    state = torch.randn(2, 4, 64, generator=g) * torch.exp2(-2.0 * torch.arange(4))[:, None]
    flushes = 2048
    rand = element_bits(
        torch.full((flushes,), request_key(0, name)), torch.arange(flushes) * 16, 0, 2, 4, 64
    )
    wide = state.expand(flushes, -1, -1, -1).contiguous()
    out = decode(encode(wide, fmt, rand), fmt).double()
    low, high = out.amin(0), out.amax(0)
    x = state.double()
    # two neighbouring grid points at most, x between them; an element past the top code is clamped
    assert bool(((out == low) | (out == high)).all())
    clamped = x.abs() > out.abs().amax(0) * (1 + 2**-20)
    inside = (low <= x * (1 + 2**-22 * x.sign())) & (x * (1 - 2**-22 * x.sign()) <= high)
    assert bool((inside | clamped | (low == high)).all())
    assert float(clamped.double().mean()) < (0.25 if name in ("nvfp4", "int4") else 0.02)
    free = ~clamped & (low < high)
    width = (high - low)[free]
    fraction = ((x - low)[free] / width).clamp(0, 1)
    error = (out.mean(0) - x)[free]
    variance = fraction * (1 - fraction) / flushes * width**2
    assert float(free.double().mean()) > 0.5
    assert abs(float(error.sum() / variance.sum().sqrt())) < 5
    scaled = error / width
    assert abs(float(scaled.sum() / (variance / width**2).sum().sqrt())) < 5
    # element by element: 1/512 of a step from the 256 draws, and 5.5 standard errors
    assert bool((error.abs() <= width / 512 + 5.5 * variance.sqrt() + 1e-6 * x[free].abs()).all())


@pytest.mark.parametrize("name", ["e4m3", "int8", "P4+8", "fp16"])
def test_two_flushes_of_one_state_draw_differently(name: str) -> None:
    fmt = parse_format(name)
    state = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(1))
    key = torch.tensor([request_key(0, 0)])
    first, second, again = (
        decode(encode(state, fmt, element_bits(key, torch.tensor([p]), 0, 4, 64, 128)[0]), fmt)
        for p in (16, 32, 16)
    )
    assert torch.equal(first, again)
    assert float((first != second).float().mean()) > 0.2


def test_long_memory_survives_a_constant_input_where_nearest_stalls() -> None:
    """1/64 of a step added 2000 times: nearest even never moves, the stochastic mean is right."""
    fmt = parse_format("int8")
    state = torch.zeros(1, 16, 64)
    state[..., 0] = 127.0  # the amax, so that the step stays 1
    nearest, drawn = state.clone(), state.clone()
    add = torch.full_like(state, 1 / 64)
    add[..., 0] = 0
    key = torch.tensor([request_key(0, 0)])
    steps, chunk = 2000, 100  # 2000 / 64 = 31 steps up
    for start in range(0, steps, chunk):
        rand = element_bits(key.expand(chunk), torch.arange(start, start + chunk), 0, 1, 16, 64)
        for r in rand:
            nearest = decode(encode(nearest + add, fmt), fmt)
            drawn = decode(encode(drawn + add, fmt, r), fmt)
    assert float(nearest[..., 1:].abs().max()) == 0
    rise = drawn[..., 1:].double()
    sigma = (steps * 1 / 64 * 63 / 64) ** 0.5
    assert abs(float(rise.mean()) - steps / 64) < 4 * sigma / rise.numel() ** 0.5


def test_bad_random_numbers() -> None:
    state, fmt = torch.zeros(1, 4, 32), parse_format("int8")
    with pytest.raises(ValueError, match="random bits 12: use 8 or 16"):
        encode(state, fmt, torch.zeros(1, 4, 32), bits=12)
    with pytest.raises(
        ValueError, match=r"rand \(4, 32\) must have the state's shape \(1, 4, 32\)"
    ):
        encode(state, fmt, torch.zeros(4, 32))
