"""Encoding of whole states: planes, scales, the planar integers, and what decoding gives back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.formats.codec import Encoded, decode, decode_scale, encode, fake_quantize
from replayssm_quant.formats.packing import unpack_nibbles
from replayssm_quant.formats.spec import ELEMENTS, TILE_ROWS, Format, parse_format

NAMES = [
    "fp32", "fp16", "bf16", "e4m3", "e4m3/none", "e4m3/head", "e4m3/b32", "e4m3/b32/fp16",
    "e4m3/b16/e4m3", "e5m2", "int8", "int8/head", "int8/b16/e4m3", "int8/row/e8m0", "int8/row/fp16",
    "int4", "int4/row", "nvfp4", "mxfp4", "mxfp8", "P4+4", "P4+4/row", "P4+8", "P8+4", "P8+4/b32",
]  # fmt: skip
SCALED = [n for n in NAMES if parse_format(n).is_scaled]
PLANAR = ["P4+4", "P4+4/row", "P4+8", "P8+4", "P8+4/b32"]
# fp32 scales a group: the decoded state encodes to the same codes and nearly the same scale
STABLE = ["e4m3", "e4m3/head", "e4m3/b32", "e5m2", "int8", "int8/head", "int8/b32", "int4/row",
          "P4+4/row", "P4+8/row", "P8+4"]  # fmt: skip
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8,
         "i32": torch.int32}  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(enc: Encoded, fmt: Format) -> torch.Tensor:
    """The scaled integers of an integer or planar state, from its stored bytes alone."""

    def plane(p: torch.Tensor, bits: int) -> torch.Tensor:
        return unpack_nibbles(p) - 8 if bits == 4 else p.view(torch.int8).int()

    q = plane(enc.codes, fmt.bits)
    return q if enc.low is None else (q << fmt.lo_bits) + plane(enc.low, fmt.lo_bits)


def widen(scale: torch.Tensor, fmt: Format, like: torch.Tensor) -> torch.Tensor:
    if fmt.scale.granularity == "block":
        return scale.repeat_interleave(fmt.scale.block, -1)
    extra = {"row": 1, "head": 2}[fmt.scale.granularity]
    return scale.reshape(*scale.shape, *[1] * extra).expand_as(like)


def fp32_scale(enc: Encoded, fmt: Format, like: torch.Tensor) -> torch.Tensor:
    assert enc.scale is not None
    return widen(decode_scale(enc.scale, enc.tile_scale, fmt), fmt, like)


@pytest.mark.parametrize("shape", [(3, 8, 64), (2, 5, 96), (1, 4, 128), (2, 20, 32)])
@pytest.mark.parametrize("name", NAMES)
def test_the_stored_planes_are_those_of_the_table(name: str, shape: tuple[int, ...]) -> None:
    fmt = parse_format(name)
    enc = encode(draw(2, *shape), fmt)
    planes = {p.name: p for p in fmt.planes(*shape)}
    for field in ("codes", "low", "scale", "tile_scale"):
        tensor = getattr(enc, field)
        if field not in planes:
            assert tensor is None
            continue
        assert tensor.shape == (2, *planes[field].shape)
        assert tensor.dtype == TORCH[planes[field].storage]
        assert tensor[0].numel() * tensor.element_size() == planes[field].nbytes


@pytest.mark.parametrize("name", NAMES)
def test_heads_and_slots_are_encoded_by_themselves(name: str) -> None:
    fmt = parse_format(name)
    state = draw(3, 4, 8, 64) * torch.exp2(torch.arange(12.0)).view(3, 4, 1, 1)
    whole = decode(encode(state, fmt), fmt)
    for s in range(3):
        for h in range(4):
            assert torch.equal(fake_quantize(state[s, h : h + 1], fmt), whole[s, h : h + 1])


@pytest.mark.parametrize(
    ("name", "error"),
    [  # rms error of N(0, 1) rows of 128, about a step / sqrt(12)
        ("fp16", 2.1e-4), ("bf16", 1.65e-3), ("e4m3", 2.7e-2), ("e5m2", 5.3e-2), ("int8", 7.5e-3),
        ("nvfp4", 0.1), ("int4", 0.105), ("mxfp4", 0.135), ("mxfp8", 2.8e-2), ("P4+4", 7e-3),
        ("P4+8", 4.4e-4), ("P8+4", 4.2e-4),
    ],
)  # fmt: skip
def test_error_of_a_gaussian_state(name: str, error: float) -> None:
    state = draw(4, 64, 128)
    fmt = parse_format(name)
    measured = float((fake_quantize(state, fmt) - state).norm() / state.norm())
    assert 0.7 * error < measured < 1.1 * error


@pytest.mark.parametrize("name", SCALED)
def test_the_error_stays_below_half_a_step_of_the_group(name: str) -> None:
    fmt = parse_format(name)
    state = draw(2, 16, 64, seed=1)
    enc = encode(state, fmt)
    scale = fp32_scale(enc, fmt, state)
    out = decode(enc, fmt)
    if fmt.kind == "float":
        element = ELEMENTS[fmt.element]
        mag = (state / scale).abs().clamp(2.0**element.emin)
        step = torch.exp2(mag.log2().floor() - element.mantissa)
    else:
        step = torch.ones_like(state)
    clipped = state.abs() > fmt.max_code * scale * (1 + 2**-20)
    error = (out - state).abs() / scale
    assert bool((error[~clipped] <= 0.5 * step[~clipped] * (1 + 1e-5) + 1e-3).all())
    if fmt.scale.round_up or fmt.scale.dtype in ("fp32", "fp16", "e8m0"):
        assert not clipped.any()
    else:  # an e4m3 scale rounded to nearest is up to 1/17 too small
        assert bool((error[clipped] <= fmt.max_code / 16).all())


# --- scales ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "int8", "int8/head", "e4m3/b32", "P8+4", "P4+8/row"])
def test_an_fp32_scale_is_one_division(name: str) -> None:
    fmt = parse_format(name)
    state = draw(2, 8, 64)
    groups = {
        "row": state.abs().amax(-1),
        "head": state.abs().amax((-1, -2)),
        "block": state.abs().unflatten(-1, (-1, 32)).amax(-1),
    }
    enc = encode(state, fmt)
    assert torch.equal(enc.scale, groups[fmt.scale.granularity] / fmt.max_code)


@pytest.mark.parametrize("rows", [5, 16, 64, 80])
@pytest.mark.parametrize("name", ["nvfp4", "int4", "P4+4", "P4+8", "e4m3/b16/e4m3"])
def test_the_largest_block_of_a_tile_has_the_scale_448(name: str, rows: int) -> None:
    """A tile is 16 rows of a head, the last one maybe fewer; tiles do not see one another."""
    fmt = parse_format(name)
    state = draw(5, rows, 128, seed=4) * torch.exp2(torch.arange(5.0) * 7 - 14).view(5, 1, 1)
    state[:, :16] *= 1000
    enc = encode(state, fmt)
    count = -(-rows // TILE_ROWS)
    assert enc.tile_scale.shape == (5, count)
    for i in range(count):
        span = slice(i * TILE_ROWS, (i + 1) * TILE_ROWS)
        part = state[:, span]
        assert torch.equal(enc.tile_scale[:, i], part.abs().amax((1, 2)) / (fmt.max_code * 448))
        top = enc.scale[:, span].int().flatten(1).amax(1)
        assert torch.equal(top, torch.full_like(top, 0x7E))
        alone = encode(part.contiguous(), fmt)
        assert torch.equal(alone.codes, enc.codes[:, span])
        assert torch.equal(alone.scale, enc.scale[:, span])
        assert torch.equal(decode(alone, fmt), decode(enc, fmt)[:, span])


def test_a_rounded_up_block_scale_covers_its_block_and_is_the_smallest_that_does() -> None:
    fmt = parse_format("P4+8")
    state = draw(8, 32, 128, seed=2)
    enc = encode(state, fmt)
    raw = state.abs().unflatten(-1, (-1, 16)).amax(-1) / fmt.max_code
    scale = decode_scale(enc.scale, enc.tile_scale, fmt)
    assert bool((scale >= raw * (1 - 2**-22)).all())
    below = decode_scale(enc.scale - 1, enc.tile_scale, fmt)
    assert bool((below < raw).all())
    nearest = encode(state, parse_format("int4"))  # rounds to nearest: some are too small
    small = decode_scale(nearest.scale, nearest.tile_scale, parse_format("int4"))
    assert float((small < raw * fmt.max_code / 7 * (1 - 2**-20)).float().mean()) > 0.3


def test_an_fp16_scale_is_the_smallest_that_does_not_saturate() -> None:
    fmt = parse_format("int8/row/fp16")
    state = draw(4, 256, 64, seed=3)
    raw = state.abs().amax(-1) / 127
    scale = encode(state, fmt).scale
    assert scale.dtype == torch.float16
    assert bool((scale.float() >= raw).all())
    before = torch.nextafter(scale, torch.zeros_like(scale)).float()
    assert bool((before < raw).all())


@settings(max_examples=200, deadline=None)
@given(
    st.floats(2.0**-90, 2.0**120, width=32),
    st.sampled_from(["mxfp4", "mxfp8", "int8/row/e8m0", "P8+4/row/e8m0"]),
)
def test_rceil_is_the_smallest_power_of_two_that_never_saturates(amax: float, name: str) -> None:
    fmt = parse_format(name)
    state = torch.zeros(1, 1, 64)
    state[0, 0, 3] = amax
    enc = encode(state, fmt)
    code = int(enc.scale.flatten()[0])
    assert amax / 2.0 ** (code - 127) <= fmt.max_code * (1 + 2**-23)  # one rounding of amax / max
    assert amax / 2.0 ** (code - 128) > fmt.max_code * (1 - 2**-23)
    assert float(decode(enc, fmt).max()) <= fmt.max_code * 2.0 ** (code - 127)


@pytest.mark.parametrize("k", [-60, -1, 0, 1, 40])
def test_rceil_at_exactly_the_top_code(k: int) -> None:
    """amax = 448 * 2**k keeps the scale 2**k; one ulp more doubles it."""
    fmt = parse_format("mxfp8")
    top = torch.tensor(448.0 * 2.0**k)
    more = torch.nextafter(top, torch.tensor(torch.inf))
    for amax, code in ((top, 127 + k), (more, 128 + k)):
        state = amax.expand(1, 1, 32).contiguous()
        assert int(encode(state, fmt).scale) == code
    assert float(fake_quantize(top.expand(1, 1, 32).contiguous(), fmt)[0, 0, 0]) == float(top)


@pytest.mark.parametrize("name", SCALED)
def test_the_largest_element_decodes_exactly_up_to_the_rounding_of_its_scale(name: str) -> None:
    fmt = parse_format(name)
    state = draw(4, 16, 128, seed=6)
    out = decode(encode(state, fmt), fmt)
    peak = state.abs().flatten(1).argmax(1, keepdim=True)
    x, y = (t.flatten(1).gather(1, peak) for t in (state, out))
    tolerance = {"fp32": 2**-22, "fp16": 2**-9, "e4m3": 2**-22, "e8m0": 2**-3}[fmt.scale.dtype]
    if name == "mxfp4":
        tolerance = 2**-2  # the top of e2m1 has steps of 4 to 6
    assert bool(((y - x).abs() <= tolerance * x.abs()).all())


# --- planar integers ---------------------------------------------------------


@pytest.mark.parametrize("name", PLANAR)
@pytest.mark.parametrize("drawn", [False, True])
def test_planes_split_one_integer(name: str, drawn: bool) -> None:
    fmt = parse_format(name)
    state = draw(2, 16, 64, seed=7)
    rand = torch.randint(0, 256, state.shape) if drawn else None
    enc = encode(state, fmt, rand)
    q = integers(enc, fmt)
    high = (q + (1 << (fmt.lo_bits - 1))) >> fmt.lo_bits
    low = q - (high << fmt.lo_bits)
    half = 1 << (fmt.lo_bits - 1)
    assert int(q.abs().max()) == fmt.max_code
    assert int(low.min()) >= -half and int(low.max()) <= half - 1
    assert int(high.abs().max()) == (1 << (fmt.bits - 1)) - 1
    scale = fp32_scale(enc, fmt, state)
    assert torch.equal(decode(enc, fmt), q.float() * scale)
    assert torch.equal(decode(enc, fmt, high_only=True), (high << fmt.lo_bits).float() * scale)


@pytest.mark.parametrize("name", PLANAR)
def test_the_copy_depends_on_the_high_plane_alone(name: str) -> None:
    fmt = parse_format(name)
    enc = encode(draw(2, 16, 64), fmt)
    copy = decode(enc, fmt, high_only=True)
    noise = Encoded(enc.codes, torch.zeros_like(enc.low), enc.scale, enc.tile_scale)
    assert torch.equal(decode(noise, fmt, high_only=True), copy)
    assert not torch.equal(decode(noise, fmt), decode(enc, fmt))
    gone = Encoded(enc.codes, None, enc.scale, enc.tile_scale)
    assert torch.equal(decode(gone, fmt, high_only=True), copy)


@pytest.mark.parametrize("name", PLANAR)
def test_every_integer_of_a_planar_format_round_trips(name: str) -> None:
    fmt = parse_format(name)
    top = int(fmt.max_code)
    q = torch.arange(-top, top + 1, dtype=torch.float32)
    q = torch.cat([q, torch.zeros(-len(q) % 31)]).view(1, -1, 31)
    state = torch.cat([torch.full((1, q.shape[1], 1), float(top)), q], -1) * 0.25
    if fmt.scale.granularity == "block":  # every block needs the top code
        state = state.reshape(1, -1, 32)
        state[..., 16] = top * 0.25
    enc = encode(state, fmt)
    assert torch.equal(integers(enc, fmt).float(), state * 4)
    assert torch.equal(decode(enc, fmt), state)


# --- what a second store does ------------------------------------------------


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([2.0**-60, 1e-9, 1.0, 3.7, 1e9]))
def test_encoding_the_decoded_state_gives_the_same_codes(name: str, seed: int, size: float) -> None:
    fmt = parse_format(name)
    first = encode(draw(2, 8, 64, seed=seed) * size, fmt)
    second = encode(decode(first, fmt), fmt)
    assert torch.equal(first.codes, second.codes)
    if fmt.is_planar:
        assert torch.equal(first.low, second.low)
    apart = (first.scale.view(torch.int32) - second.scale.view(torch.int32)).abs()
    assert int(apart.max()) <= 1


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(-40, 40))
def test_a_power_of_two_moves_into_the_scale(name: str, seed: int, k: int) -> None:
    """So a decaying state that nothing writes to keeps its codes: pure decay is free."""
    fmt = parse_format(name)
    state = draw(2, 8, 64, seed=seed)
    first, second = encode(state, fmt), encode(state * 2.0**k, fmt)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale * 2.0**k, second.scale)
    again = encode(decode(first, fmt) * 2.0**k, fmt)
    assert torch.equal(again.codes, first.codes)


@pytest.mark.parametrize("name", STABLE)
def test_pure_decay_keeps_the_codes(name: str) -> None:
    fmt = parse_format(name)
    first = enc = encode(draw(2, 8, 64), fmt)
    start = decode(first, fmt)
    for _ in range(300):
        enc = encode(decode(enc, fmt) * 0.9984, fmt)
    assert torch.equal(enc.codes, first.codes)
    gain = decode(enc, fmt).double() / (start.double() * 0.9984**300)
    assert float((gain[start != 0] - 1).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["bf16", "int8/row/e8m0", "mxfp8"])
def test_pure_decay_stalls_without_an_exact_scale(name: str) -> None:
    """The trap behind the fp32 scales: nearest even on a coarse grid never decays at all."""
    fmt = parse_format(name)
    state = start = fake_quantize(draw(2, 8, 64), fmt)
    for _ in range(300):
        state = fake_quantize(state * 0.9984, fmt)
    assert float(state.norm() / start.norm()) > 1.3 * 0.9984**300


@pytest.mark.parametrize("name", NAMES)
def test_sign_symmetry(name: str) -> None:
    fmt = parse_format(name)
    state = draw(2, 8, 64)
    assert torch.equal(fake_quantize(-state, fmt), -fake_quantize(state, fmt))


def test_fp32_keeps_every_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (1, 8, 64)).to(torch.int32)
    state = bits.view(torch.float32)
    enc = encode(state, parse_format("fp32"))
    assert torch.equal(enc.codes.view(torch.int32), bits)
    assert enc.codes.data_ptr() != state.data_ptr()
    assert torch.equal(decode(enc, parse_format("fp32")).view(torch.int32), bits)


@pytest.mark.parametrize("name", NAMES)
def test_strided_states_encode_like_contiguous_ones(name: str) -> None:
    fmt = parse_format(name)
    wide = draw(2, 8, 128)
    view = wide[..., ::2]
    assert torch.equal(fake_quantize(view, fmt), fake_quantize(view.contiguous(), fmt))
    turned = draw(2, 64, 8).transpose(1, 2)
    assert torch.equal(fake_quantize(turned, fmt), fake_quantize(turned.contiguous(), fmt))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch.float64; convert it with .float"):
        encode(torch.zeros(1, 4, 32, dtype=torch.float64), parse_format("int8"))
    with pytest.raises(ValueError, match="d_state 24"):
        encode(torch.zeros(1, 4, 24), parse_format("nvfp4"))
