"""Stochastic rounding where it is used: unbiased, fresh at every flush, the same in every batch."""

import pytest
import torch

from replayssm_quant.formats.philox import element_bits, request_key
from replayssm_quant.kernels.mamba2 import reference as mamba2
from replayssm_quant.state.cache import StatePool, read_checkpoint, write_state
from replayssm_quant.state.geometry import LayerGeometry


def stored_many(lab, update: str, state: torch.Tensor, keys: torch.Tensor, **kw) -> torch.Tensor:
    """The checkpoint of the same state [1, H, R, N] under every key: fp32 [len(keys), ...]."""
    g = LayerGeometry("mamba2", *state.shape[1:], 1)
    config = lab.config(update, "same" if not update.startswith("P") else None, **kw)
    pool = StatePool({0: g}, config, len(keys))
    slots = torch.arange(len(keys))
    positions = torch.full((len(keys),), 9, dtype=torch.int32)
    many = state.expand(len(keys), -1, -1, -1).contiguous()
    write_state(pool.views[0], config, slots, many, keys, positions)
    return read_checkpoint(pool.views[0], config, slots)


@pytest.fixture
def lab2(make_lab):
    return make_lab("mamba2", LayerGeometry("mamba2", 1, 4, 32, 1))


KEYS = torch.tensor([request_key(0, r) for r in range(1024)])


@pytest.mark.parametrize(
    "update", ["fp16", "bf16", "fp8", "e5m2", "int8", "int4/row", "P4+4", "P4+8"]
)
def test_mean_over_requests_is_the_state(lab2, update):
    """Each element within 5 standard errors, and z < 4.5 for the sum of 128 elements.

    Scales that may round down (e4m3 under nvfp4 and int4) clip the largest of a block, hence int4
    with a row scale here.
    """
    gen = torch.Generator().manual_seed(1)
    state = torch.randn(1, 1, 4, 32, generator=gen)
    got = stored_many(lab2, update, state, KEYS).double()
    error = got - state.double()
    spread = got.std(0, correction=0)
    assert (spread > 0).double().mean() > 0.8
    # 8 random bits: 1 / 512 of a step of bias at most, beside the spread of 1,024 draws
    bound = 5 * spread / 32 + spread.amax() / 128 + 1e-6
    assert (error.mean(0).abs() < bound).all()
    z = error.sum((1, 2, 3)).mean() / (error.sum((1, 2, 3)).std() / 32)
    assert abs(z) < 4.5


@pytest.mark.parametrize("exponent", range(-24, -13))
def test_fp16_subnormals_keep_their_mean(lab2, exponent):
    """Half a step above 2**exponent, down to the smallest subnormal."""
    step = max(2.0**-24, 2.0 ** (exponent - 10))
    value = 2.0**exponent + 0.5 * step
    state = torch.full((1, 1, 4, 32), value)
    got = stored_many(lab2, "fp16", state, KEYS[:64]).double()
    assert set(got.unique().tolist()) == {2.0**exponent, 2.0**exponent + step}
    n = got.numel()
    assert abs(got.mean() - value) < 4 * 0.5 * step / n**0.5


def test_a_tiny_constant_input_stalls_under_nearest_and_not_under_stochastic(lab2):
    """Each step adds 1 / 64 of fp16's step at 1: nearest never moves, SR follows within 3 sigma."""
    g, steps = lab2.geometry, 1024
    ulp = 2.0**-10
    final = {}
    for rounding in ("rn", "sr"):
        config = lab2.config("fp16", "same", buffer_len=1, rounding=rounding)
        pool = lab2.pool(config, 1)
        at = torch.tensor([0])
        pool.start(at, torch.tensor([request_key(1, 1)]), torch.tensor([0]))
        pool.write(0, at, torch.ones(1, g.heads, g.rows, g.n))
        ones = torch.ones(1, g.heads, g.rows), torch.full((1, 1), ulp / 64), torch.ones(1, 1, g.n)
        for _ in range(steps):
            rows = pool.rows(at)
            x, dt, B = ones
            mamba2.decode_step(pool.views[0], config, rows, x, dt, torch.zeros(1), B, B)
            pool.advance(rows)
        final[rounding] = read_checkpoint(pool.views[0], config, at).double()
    assert bool((final["rn"] == 1).all())
    sigma = ulp * (steps / 64 * 63 / 64) ** 0.5 / (g.heads * g.rows * g.n) ** 0.5
    assert abs(final["sr"].mean() - (1 + steps * ulp / 64)) < 3 * sigma


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson correlation in standard errors of independent draws."""
    a, b = (t.double().flatten() - t.double().mean() for t in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()) * a.numel() ** 0.5)


@pytest.mark.parametrize("bits", [8, 16])
def test_draws_do_not_repeat_anywhere(bits):
    """Heads, rows, elements, layers, flushes, requests and seeds: uncorrelated below 4 sigma."""

    def draw(seed=0, request=1, position=16, layer=0, head_offset=0):
        key = torch.tensor([request_key(seed, request)])
        at = torch.tensor([position])
        return element_bits(key, at, layer, 8, 16, 64, head_offset=head_offset, bits=bits)[0]

    base = draw()
    assert torch.equal(base, draw()) and torch.equal(draw(head_offset=4)[:4], base[4:])
    others = {
        "layer": draw(layer=1),
        "flush": draw(position=32),
        "request": draw(request=2),
        "request above 2**32": draw(request=1 + 2**32),
        "string": draw(request="1"),
        "seed": draw(seed=1),
        "heads": base.roll(1, 0),
        "rows": base.roll(1, 1),
        "row pairs": base.roll(2, 1),
        "elements": base.roll(1, 2),
        "planes": base.roll(8, 2),
        "16 planes": base.roll(16, 2),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 4, name
        assert (base == other).float().mean() < 0.02, name


def test_far_slots_positions_and_layers_have_their_own_draws():
    """Counters near the ends of their 32 bits do not collide with small ones."""
    key = torch.tensor([request_key(0, 0)])
    seen = []
    for position, layer, head in ((1, 0, 0), (2**31 - 1, 0, 0), (1, 2**20, 0), (1, 0, 2**20)):
        at = torch.tensor([position], dtype=torch.int32)
        seen.append(element_bits(key, at, layer, 2, 4, 64, head_offset=head))
    for i in range(4):
        for j in range(i):
            assert (seen[i] == seen[j]).float().mean() < 0.05


def test_retry_of_a_flush_repeats_its_bits(lab, bytes_of, equal_bytes):
    """Replaying a step from a saved state gives the same bytes; the next flush draws anew."""
    config = lab.config("fp8", buffer_len=2)
    pool = lab.pool(config, 1)
    lab.start(pool, [0], [3])
    lab.run(pool, [0], [3], 3)
    saved = pool.save(torch.tensor([0]))
    tries = []
    for _ in range(2):
        pool.restore(torch.tensor([0]), saved)
        lab.run(pool, [0], [3], 1)
        tries.append(bytes_of(pool, [0]))
    assert equal_bytes(*tries)
