"""Empty, vanishing, huge and poisoned states: what each format stores, and that nothing leaks."""

import pytest
import torch

from replayssm_quant.formats.codec import Encoded, decode, encode, fake_quantize
from replayssm_quant.formats.spec import MIN_SCALE, parse_format

NAMES = [
    "fp32", "fp16", "bf16", "e4m3", "e4m3/none", "e4m3/head", "e4m3/b32", "e4m3/b32/fp16",
    "e5m2", "int8", "int8/head", "int8/row/e8m0", "int4", "int4/row", "nvfp4", "mxfp4", "mxfp8",
    "P4+4", "P4+4/row", "P4+8", "P8+4",
]  # fmt: skip
SCALED = [n for n in NAMES if parse_format(n).is_scaled]
EXACT = [n for n in SCALED if parse_format(n).scale.dtype == "fp32"]
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8,
         "i32": torch.int32}  # fmt: skip
DRAWS = [None, 0, 255]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def constant(value: int | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else torch.full(like.shape, value, dtype=torch.int32)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_state_has_zero_scales_and_decodes_to_zero(name: str, draws: int | None) -> None:
    fmt = parse_format(name)
    state = torch.zeros(2, 8, 64)
    enc = encode(state, fmt, constant(draws, state))
    assert torch.equal(decode(enc, fmt), state)
    if fmt.is_scaled and fmt.scale.dtype != "e8m0":  # e8m0 has no zero
        assert not enc.scale.float().any()


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_between_others_stay_zero(name: str) -> None:
    fmt = parse_format(name)
    state = draw(2, 8, 64)
    state[:, 1::2] = 0
    out = fake_quantize(state, fmt, constant(255, state))
    assert not out[:, 1::2].any() and out[:, ::2].abs().amax(-1).min() > 0
    assert out.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_cleared_page_decodes_to_zero(name: str) -> None:
    """Clearing writes zero bytes: 4-bit codes are offset by 8, so the scales must go too."""
    fmt = parse_format(name)
    planes = {p.name: torch.zeros(p.shape, dtype=TORCH[p.storage]) for p in fmt.planes(2, 8, 64)}
    assert not decode(Encoded(**planes), fmt).any()
    assert not decode(Encoded(**planes), fmt, high_only=True).any()


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("size", [1e-25, 1e-30, 1e-36, 1e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("name", NAMES)
def test_vanishing_states_stay_finite_and_small(name: str, size: float, draws: int | None) -> None:
    """448 / amax overflows below 1e-36; a scale of at least 2**-100 has a finite inverse."""
    fmt = parse_format(name)
    state = draw(2, 8, 64) * size
    enc = encode(state, fmt, constant(draws, state))
    out = decode(enc, fmt)
    assert out.isfinite().all()
    floor = {"fp32": 2.0**-100, "fp16": 2.0**-24, "e4m3": 448 * 2.0**-100, "e8m0": 2.0**-100}
    unscaled = {
        "fp32": 0.0,
        "fp16": 2.0**-24,
        "bf16": size * 2.0**-5 + 2.0**-133,
        "e4m3/none": 2.0**-9,
    }
    step = floor[fmt.scale.dtype] + 2 * size if fmt.is_scaled else unscaled[name]
    assert float((out - state).abs().max()) <= step
    if draws is None and name in EXACT and size > 1e-26:
        assert float((out - state).double().norm() / state.double().norm()) < 0.2


def test_the_scale_has_a_floor() -> None:
    fmt = parse_format("int8")
    state = torch.full((1, 1, 32), 1e-38)
    assert float(encode(state, fmt).scale) == MIN_SCALE == 2.0**-100
    state *= 127 * 2.0**-100 / 1e-38
    assert float(encode(state, fmt).scale) == pytest.approx(MIN_SCALE, rel=1e-6)
    assert float(fake_quantize(state, fmt)[0, 0, 0]) == pytest.approx(127 * MIN_SCALE, rel=1e-6)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", NAMES)
def test_huge_states_stay_finite(name: str, draws: int | None) -> None:
    """Scaled formats are as good at 3e38 as at 1; unscaled ones stop at their largest value.

    Power-of-two scales end at 2**127: there the grid point above the largest value is Inf, as in
    torchao, so that e8m0 formats reach 2**127 = 1.7e38 only.
    """
    fmt = parse_format(name)
    size = 2.0**127 if fmt.scale.dtype == "e8m0" else 3e38
    state = draw(2, 8, 64).clamp(-3, 3)
    state = state / state.abs().max() * size
    out = fake_quantize(state, fmt, constant(draws, state))
    assert out.isfinite().all()
    if fmt.is_scaled and fmt.scale.dtype != "fp16":
        usual = fake_quantize(state * 2.0**-120, fmt, constant(draws, state)) * 2.0**120
        assert torch.equal(out, usual)
    elif name in ("fp16", "e4m3/none"):
        assert bool((out.abs() == fmt.max_code).all())


# --- NaN and infinity --------------------------------------------------------


@pytest.mark.parametrize("draws", [None, 255])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_poison_stays_within_its_slot_and_head(name: str, poison: float, draws: int | None) -> None:
    fmt = parse_format(name)
    clean = draw(2, 3, 24, 64)
    state = clean.clone()
    state[1, 2, 4, 37] = poison
    rand = constant(draws, state)
    good, bad = encode(clean, fmt, rand), encode(state, fmt, rand)
    for field in ("codes", "low", "scale", "tile_scale"):
        a, b = getattr(good, field), getattr(bad, field)
        if a is None:
            continue
        outside = torch.ones(2, 3, dtype=torch.bool)
        outside[1, 2] = False
        assert torch.equal(a[outside], b[outside]), field
    out = decode(bad, fmt)
    if fmt.is_scaled:  # the whole group decodes to NaN, so that the damage shows
        assert out[1, 2, 4, 37].isnan()
        if fmt.scale.granularity == "row":
            assert out[1, 2, 4].isnan().all() and int(out.isnan().sum()) == 64
        if fmt.scale.has_tile_scale:
            assert out[1, 2, :16].isnan().all() and int(out.isnan().sum()) == 16 * 64
        rest = out[1, 2][~out[1, 2].isnan()]
        assert rest.isfinite().all()
    elif poison != poison:
        assert out[1, 2, 4, 37].isnan() and int(out.isnan().sum()) == 1
    elif name == "fp32" or (name == "fp16" and draws is not None):
        assert out[1, 2, 4, 37] == poison
    else:
        top = fmt.max_code
        assert float(out[1, 2, 4, 37]) == (top if poison > 0 else -top)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["int8", "e4m3", "nvfp4", "P4+8", "P8+4", "mxfp4"])
def test_a_poisoned_group_stores_zero_codes_and_a_nan_scale(name: str, poison: float) -> None:
    fmt = parse_format(name)
    state = draw(1, 8, 64)
    state[0, 3, 7] = poison
    enc = encode(state, fmt)
    width = fmt.scale.block or 64
    clean = torch.zeros(1, 8, 64)
    zeros = encode(clean, fmt)
    if fmt.bits == 4:
        codes, zero = enc.codes[0, 3], zeros.codes[0, 3]
        if width == 64:
            assert torch.equal(codes, zero)
    else:
        assert torch.equal(enc.codes[0, 3], zeros.codes[0, 3])
    if fmt.scale.has_tile_scale:
        assert enc.tile_scale.isnan().all()
        assert torch.equal(enc.codes, zeros.codes)
    elif fmt.scale.dtype == "e8m0":
        assert int(enc.scale[0, 3, 0]) == 255
    else:
        assert enc.scale[0, 3].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_written_again_after_poison_is_clean(name: str) -> None:
    fmt = parse_format(name)
    state = draw(1, 8, 64)
    assert fake_quantize(state, fmt).isfinite().all()
    poisoned = fake_quantize(torch.full_like(state, torch.nan), fmt)
    assert not poisoned.isfinite().any()
    assert torch.equal(fake_quantize(state, fmt), fake_quantize(state.clone(), fmt))


# --- ranges and overflow -----------------------------------------------------


def test_rows_ten_thousand_apart() -> None:
    """A row or block scale does not see the other rows; a head scale loses the small ones."""
    state = draw(1, 64, 128)
    state[:, 32:] *= 1e-4

    def error(name: str, low: bool) -> float:
        part = slice(32, 64) if low else slice(0, 32)
        x, y = state[:, part], fake_quantize(state, parse_format(name))[:, part]
        return float((x - y).norm() / x.norm())

    for name in ("int8", "e4m3", "int8/row/fp16", "P8+4", "int4/row", "mxfp4", "mxfp8"):
        assert error(name, True) == pytest.approx(error(name, False), rel=0.15), name
    assert error("int8/head", True) == 1.0
    assert 2 * error("e4m3/head", False) > error("e4m3/head", True) > 0.02
    assert error("nvfp4", True) < 1.1 * error("nvfp4", False)


@pytest.mark.parametrize(("ratio", "error"), [(1e-4, 0.097), (1e-5, 0.13), (1e-6, 1.0)])
def test_nvfp4_blocks_far_below_their_tile(ratio: float, error: float) -> None:
    """The block scale leaves e4m3's normal range at 3.5e-5 of the tile's largest, ends at 2e-6."""
    state = draw(1, 16, 128, seed=5).unflatten(-1, (-1, 16))
    state = (state / state.abs().amax(-1, keepdim=True)).flatten(-2)
    state[:, 1:] *= ratio
    x, y = state[:, 1:], fake_quantize(state, parse_format("nvfp4"))[:, 1:]
    assert float((x - y).norm() / x.norm()) == pytest.approx(error, rel=0.3)


def test_a_fifth_of_all_rows_exceeds_448_by_one_ulp_before_the_clamp() -> None:
    """amax * (1 / (amax / 448)) > 448; the largest draw would carry it to 480, the code of NaN."""
    fmt = parse_format("e4m3")
    state = draw(1, 4096, 128, seed=8)
    amax = state.abs().amax(-1)
    over = amax * (1 / (amax / 448)) > 448
    assert 0.15 < float(over.float().mean()) < 0.25
    for draws in (0, 128, 255):
        enc = encode(state, fmt, constant(draws, state))
        assert int((enc.codes & 0x7F).max()) == 0x7E
        out = decode(enc, fmt)
        assert bool((out.abs().amax(-1) == 448 * enc.scale).all())


@pytest.mark.parametrize("name", ["int8", "P4+4/row", "P8+4", "int4/row", "e5m2", "mxfp4", "mxfp8"])
def test_no_draw_carries_past_the_top_code(name: str) -> None:
    fmt = parse_format(name)
    state = draw(1, 4096, 64, seed=9)
    state[..., 0] = state.abs().amax(-1) * 1.5  # a clear maximum, in every other row negative
    state[:, ::2, 0] *= -1
    for draws in (0, 255):
        out = fake_quantize(state, fmt, constant(draws, state))
        assert out.isfinite().all()
        scale = encode(state, fmt).scale.float() if fmt.scale.dtype == "fp32" else None
        if scale is not None:
            peak = out[..., 0] / scale
            assert bool((peak.abs() - fmt.max_code).abs().max() <= 2**-22 * fmt.max_code)
            assert bool((peak.sign() == state[..., 0].sign()).all())


def test_fp16_stops_at_65504_for_every_draw() -> None:
    fmt = parse_format("fp16")
    x = torch.tensor([65504.0, 65505.0, 65519.9, 65520.0, 65535.9, 65536.0, 1e6, 3e38])
    state = torch.cat([x, -x]).expand(256, 1, 16).contiguous()
    rand = torch.arange(256).view(-1, 1, 1).expand(state.shape)
    for out in (fake_quantize(state, fmt, rand), fake_quantize(state, fmt)):
        assert torch.equal(out.abs(), torch.full_like(out, 65504.0))
        assert torch.equal(out.sign(), state.sign())


def test_fp16_subnormals_keep_their_mean() -> None:
    fmt = parse_format("fp16")
    x = torch.exp2(torch.linspace(-24, -14, 32)) * 1.37
    state = x.expand(65536, 1, 32).contiguous()
    rand = torch.arange(65536).view(-1, 1, 1).expand(state.shape)
    mean = fake_quantize(state, fmt, rand, 16).double().mean(0)
    assert float((mean / x.double() - 1).abs().max()) < 2e-5
    nearest = fake_quantize(x.view(1, 1, 32), fmt)
    assert torch.equal(nearest, x.view(1, 1, 32).half().float())


def test_e4m3_without_a_scale_saturates_and_vanishes() -> None:
    fmt = parse_format("e4m3/none")
    state = torch.tensor([448.0, 449, 464.1, 1e9, 2.0**-9, 2.0**-10, 2.0**-11, 0]).view(1, 1, 8)
    out = fake_quantize(state, fmt)
    assert out.flatten().tolist() == [448, 448, 448, 448, 2.0**-9, 0, 0, 0]


@pytest.mark.parametrize("raw", [6e4 * 127, 1e6 * 127])
def test_an_fp16_scale_stops_at_65504(raw: float) -> None:
    fmt = parse_format("int8/row/fp16")
    state = torch.full((1, 2, 32), raw)
    out = fake_quantize(state, fmt)
    assert out.isfinite().all()
    assert float(out.max()) == pytest.approx(min(raw, 65504 * 127), rel=1e-3)
