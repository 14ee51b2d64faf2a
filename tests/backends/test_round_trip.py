"""The fast rounding of the scan form against the codec that defines it."""

import itertools

import pytest
import torch

from replayssm_quant.config import StateConfig
from replayssm_quant.formats.codec import decode, encode
from replayssm_quant.formats.philox import element_bits, request_key
from replayssm_quant.formats.spec import FORMATS
from replayssm_quant.kernels.common import round_trip

HEADS, ROWS = 3, 20
VARIANTS = [
    *FORMATS,
    "e4m3/none",
    "e5m2/none",
    "e4m3/b32",
    "e4m3/b32/fp16",
    "e4m3/b16/e8m0",
    "int8/head",
    "int8/row/fp16",
    "int8/b16/e4m3",
    "P4+8/row",
    "P4+4/b32/e8m0",
]


def awkward_state(b, n):
    """Rows over 60 orders of magnitude, zeros, subnormals, halves of ulps, NaN and Inf."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(b, HEADS, ROWS, n, generator=g)
    x = x * torch.exp(3 * torch.randn(b, HEADS, ROWS, 1, generator=g))
    x = x * torch.exp(2 * torch.randn(b, HEADS, ROWS, n, generator=g))
    x[0, 0, 0] = 0
    x[0, 1, 3] = torch.arange(n) * 0.25 - 3  # ties
    x[1, 0] *= 1e-30
    x[1, 1] *= 1e-20
    x[1, 2] *= 1e9
    x[2, 0, :9] *= 1e-42
    x[2, 1, 2, 5] = float("nan")
    x[2, 2, 7, 1] = float("inf")
    x[3, 0, 1, 0] = -float("inf")
    return x


def by_codec(state, config, keys, positions, layer, head_offset):
    rand = None
    if config.uses_random_bits:
        rand = element_bits(
            keys,
            positions,
            layer,
            *state.shape[1:],
            head_offset=head_offset,
            bits=config.random_bits,
            rounds=config.philox_rounds,
        )
    enc = encode(state, config.update, rand, config.random_bits)
    checkpoint = decode(enc, config.update)
    if config.update.is_planar:
        return checkpoint, decode(enc, config.update, high_only=True)
    if config.output is None:
        return checkpoint, checkpoint
    return checkpoint, decode(encode(checkpoint, config.output), config.output)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5))


def configs(update):
    for rounding, output in itertools.product(("rn", "sr"), (None, "same", "nvfp4", "mxfp4")):
        try:
            yield StateConfig.from_flags(update, output, rounding=rounding)
        except ValueError:  # an output wider than its checkpoint, or one beside a planar format
            continue


@pytest.mark.parametrize("update", VARIANTS)
def test_equals_the_codec_bit_for_bit(update, monkeypatch):
    state = awkward_state(5, 32)
    monkeypatch.setattr(round_trip, "PIECE", 2 * state[0].numel())  # uneven pieces
    keys = torch.tensor([request_key(3, i) for i in range(5)])
    positions = torch.tensor([5, 17, 200, 2**20, 2], dtype=torch.int32)
    before = state.clone()
    for config in configs(update):
        trip = round_trip.RoundTrip(config, HEADS, ROWS, 32, keys, layer=3, head_offset=2)
        for at in (positions, positions + 1):  # the second call reuses the buffers
            got = trip(state, at)
            expected = by_codec(state, config, keys, at, 3, 2)
            assert same(got[0], expected[0]) and same(got[1], expected[1]), config.label
        assert same(state, before)


@pytest.mark.parametrize(
    "extra",
    [dict(random_bits=16), dict(philox_rounds=10), dict(output_dtype="int8/head")],
)
def test_other_settings_equal_the_codec(extra):
    config = StateConfig.from_flags("fp16", **extra)
    keys = torch.tensor([-(2**63), 2**63 - 1, 0, 77, -5])
    positions = torch.tensor([2**31 - 1, 0, 1, 2, 3])
    state = awkward_state(5, 64)
    got = round_trip.RoundTrip(config, HEADS, ROWS, 64, keys, layer=61)(state, positions)
    expected = by_codec(state, config, keys, positions, 61, 0)
    assert same(got[0], expected[0]) and same(got[1], expected[1])


@pytest.mark.parametrize("update", ["fp16", "bf16", "e4m3", "e4m3/none", "e5m2/none", "nvfp4"])
def test_subnormal_steps_round_as_in_the_codec(update):
    """Magnitudes spread evenly over 40 binades: many sums of a value and its random bits lie within
    an fp32 rounding of a whole step."""
    g = torch.Generator().manual_seed(2)
    state = torch.exp2(40 * torch.rand(4, HEADS, 128, 128, generator=g) - 32)
    config, keys = StateConfig.from_flags(update, "same"), torch.arange(4)
    got, _ = round_trip.RoundTrip(config, HEADS, 128, 128, keys)(state, keys)
    assert same(got, by_codec(state, config, keys, keys, 0, 0)[0])


def test_odd_rows_and_lengths():
    config = StateConfig.from_flags("fp8", "same")
    keys = torch.arange(2)
    for rows, n in ((7, 24), (1, 8), (6, 20)):
        state = torch.randn(2, HEADS, rows, n, generator=torch.Generator().manual_seed(0))
        got, _ = round_trip.RoundTrip(config, HEADS, rows, n, keys)(state, keys)
        assert same(got, by_codec(state, config, keys, keys, 0, 0)[0])


def test_a_format_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        round_trip.RoundTrip(StateConfig.from_flags("P8+4"), 1, 4, 12, torch.zeros(1).long())


@pytest.mark.parametrize(
    ("update", "output", "rounding"),
    [
        ("e4m3", "nvfp4", "sr"),
        ("P4+8", None, "sr"),
        ("fp16", "mxfp4", "rn"),
        ("int8", "same", "sr"),
    ],
)
def test_the_kernels_leave_the_same_values(update, output, rounding):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = torch.randn(2, 1, 16, 32, generator=torch.Generator().manual_seed(4)).to(device)
    state[0, 0, 3] = 0
    keys = torch.tensor([request_key(3, i) for i in range(2)], device=device)
    positions = torch.tensor([16, 2**20], device=device)
    config = StateConfig.from_flags(update, output, rounding=rounding)
    sizes = (config, 1, 16, 32, keys)
    plain = round_trip.RoundTrip(*sizes, layer=3, head_offset=2, impl="torch")
    stored = round_trip.RoundTrip(*sizes, layer=3, head_offset=2, impl="triton")
    for got, expected in zip(stored(state, positions), plain(state, positions), strict=True):
        assert same(got, expected)
    assert stored._stored is not None
