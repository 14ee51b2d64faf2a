"""Every float element against ml_dtypes and torch: codes, values, nearest even, saturation."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.formats.codec import float_codes, float_values, int_codes
from replayssm_quant.formats.spec import ELEMENTS

OTHERS = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
FLOATS = list(OTHERS)


def other_values(name: str, code: torch.Tensor) -> torch.Tensor:
    wide = np.uint16 if ELEMENTS[name].bits == 16 else np.uint8
    return torch.from_numpy(code.numpy().astype(wide).view(OTHERS[name]).astype(np.float32))


def other_codes(name: str, x: torch.Tensor) -> torch.Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = x.numpy().astype(OTHERS[name])
    wide = np.uint16 if ELEMENTS[name].bits == 16 else np.uint8
    return torch.from_numpy(cast.view(wide).astype(np.int32))


def all_codes(name: str) -> torch.Tensor:
    return torch.arange(2 ** ELEMENTS[name].bits, dtype=torch.int32)


def hard_inputs(name: str) -> torch.Tensor:
    """Random bit patterns (denormals too), all grid points and ties, and their neighbours."""
    g = torch.Generator().manual_seed(len(name))
    bits = torch.randint(-(2**31), 2**31, (400_000,), generator=g).to(torch.int32)
    near = torch.randn(200_000, generator=g) * torch.exp2(
        torch.randint(-30, 18, (200_000,), generator=g).float()
    )
    values = other_values(name, all_codes(name))
    values = values[values.isfinite()].unique()
    ties = ((values[1:].double() + values[:-1].double()) / 2).float()
    points = torch.cat([values, ties])
    up = torch.nextafter(points, torch.full_like(points, torch.inf))
    down = torch.nextafter(points, torch.full_like(points, -torch.inf))
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4e38, -3.4e38])
    x = torch.cat([bits.view(torch.float32), near, points, up, down, special])
    return x[x.isfinite()]


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_has_the_value_of_ml_dtypes(name: str) -> None:
    codes = all_codes(name)
    mine, other = float_values(codes, ELEMENTS[name]), other_values(name, codes)
    assert torch.equal(mine.isnan(), other.isnan())
    known = ~other.isnan()
    assert torch.equal(mine[known], other[known])
    assert torch.equal(mine[known].signbit(), other[known].signbit())


@pytest.mark.parametrize("name", FLOATS)
def test_every_finite_code_round_trips(name: str) -> None:
    element = ELEMENTS[name]
    codes = all_codes(name)
    codes = codes[float_values(codes, element).isfinite()]
    assert int((codes & (2 ** (element.bits - 1) - 1)).max()) == element.max_magnitude_code
    values = float_values(codes, element)
    assert float(values.max()) == element.max
    assert torch.equal(float_codes(values, element), codes)
    assert torch.equal(float_codes(values, element, up=True), codes)


@pytest.mark.parametrize("name", FLOATS)
def test_nearest_even_is_that_of_ml_dtypes(name: str) -> None:
    x = hard_inputs(name)
    element = ELEMENTS[name]
    clamped = x.clamp(-element.max, element.max)  # out of range ml_dtypes gives Inf or NaN
    if name == "e2m1":  # what is within 2**-23 of a tie counts as one: see float_codes
        step = 2.0**-23
        clamped = torch.where(clamped.abs() < 1, torch.round(clamped / step) * step, clamped)
    assert torch.equal(float_codes(x, element), other_codes(name, clamped))


@pytest.mark.parametrize("name", TORCH)
def test_nearest_even_is_that_of_torch(name: str) -> None:
    x = hard_inputs(name)
    element = ELEMENTS[name]
    cast = x.clamp(-element.max, element.max).to(TORCH[name])
    wide = torch.int16 if element.bits == 16 else torch.uint8
    expected = cast.view(wide).to(torch.int32) & (2**element.bits - 1)
    assert torch.equal(float_codes(x, element), expected)


@pytest.mark.parametrize("name", FLOATS)
def test_saturation_nan_and_signed_zero(name: str) -> None:
    element = ELEMENTS[name]
    top = element.max_magnitude_code
    sign = 1 << (element.bits - 1)
    x = torch.tensor([torch.inf, -torch.inf, 3e38 if name != "bf16" else 3.4e38, 0.0, -0.0])
    for rand in (None, torch.zeros(5, dtype=torch.int32), torch.full((5,), 255)):
        codes = float_codes(x, element, rand)
        inf = 0x7C00 if name == "fp16" and rand is not None else top  # see float_codes
        assert codes.tolist() == [inf, inf | sign, top, 0, sign]
    nan = float_codes(torch.tensor([torch.nan]), element)
    if element.bits >= 8:
        assert float_values(nan, element).isnan().all()
    else:  # no NaN among the codes: the scale carries it
        assert int(nan) & ~sign == 0


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_rounding_up_is_the_next_value_of_the_grid(name: str) -> None:
    element = ELEMENTS[name]
    grid = float_values(torch.arange(element.max_magnitude_code + 1), element)
    x = hard_inputs(name).abs().clamp(max=element.max)
    expected = torch.searchsorted(grid, x)  # the first grid value that is not below x
    assert torch.equal(float_codes(x, element, up=True), expected.int())


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(FLOATS))
def test_rounding_is_odd_and_never_leaves_the_neighbours(x: float, name: str) -> None:
    element = ELEMENTS[name]
    v = torch.tensor([x], dtype=torch.float32)
    code, minus = float_codes(v, element), float_codes(-v, element)
    assert int(code ^ minus) == 1 << (element.bits - 1)
    rounded = float_values(code, element).double()
    grid = float_values(torch.arange(element.max_magnitude_code + 1), element).double()
    distance = (grid - v.abs().double()).abs().min()
    assert float((rounded - v.double().clamp(-element.max, element.max)).abs()) <= float(distance)


@pytest.mark.parametrize("max_code", [7.0, 112.0, 127.0, 1792.0, 2032.0])
def test_integers_round_like_numpy_and_clamp(max_code: float) -> None:
    g = torch.Generator().manual_seed(1)
    x = (torch.rand(100_000, generator=g) - 0.5) * 2.2 * max_code
    halves = torch.arange(-max_code, max_code, dtype=torch.float32) + 0.5
    x = torch.cat([x, halves, torch.nextafter(halves, halves * 2)])
    expected = np.clip(np.rint(x.numpy()), -max_code, max_code).astype(np.int32)
    assert torch.equal(int_codes(x, max_code), torch.from_numpy(expected))
    codes = torch.arange(-max_code, max_code + 1)
    for rand in (None, torch.zeros(len(codes)).int(), torch.full((len(codes),), 255)):
        assert torch.equal(int_codes(codes, max_code, rand), codes.int())
    assert int_codes(torch.tensor([torch.nan]), max_code).tolist() == [0]
