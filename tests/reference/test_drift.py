"""Long runs: which errors accumulate, and the leak that the exact GDN fold does not have."""

import pytest
import torch

from replayssm_quant.config import StateConfig
from replayssm_quant.formats import parse_format
from replayssm_quant.formats.codec import fake_quantize
from replayssm_quant.formats.philox import element_bits
from replayssm_quant.kernels.gdn import reference as gdn
from replayssm_quant.kernels.mamba2 import reference as mamba2
from replayssm_quant.state.cache import StatePool, read_checkpoint, write_state
from replayssm_quant.state.geometry import LayerGeometry

# --- plateau --------------------------------------------------------------------------------------


def flush_errors(update: str, decay: float, marks: tuple[int, ...], length: int = 16):
    """Relative state errors after so many flushes of a window with incoherent writes.

    What a flush does to the checkpoint, S <- round(g S + W) with g = exp(-L decay), through the
    pool's own write; W is the sum of a window of unit writes. Also the one-shot rounding error.
    """
    fmt = parse_format(update)
    config = StateConfig(fmt, None, length)
    geometry = LayerGeometry("mamba2", 4, 16, 64, 1)
    pool = StatePool({0: geometry}, config, 1)
    gen = torch.Generator().manual_seed(3)
    slot, key = torch.tensor([0]), torch.tensor([77])
    g = torch.exp(torch.tensor(-length * decay, dtype=torch.float64))
    window = length**0.5
    exact = torch.zeros(1, 4, 16, 64, dtype=torch.float64)
    errors, state = [], exact.float()
    for i in range(1, max(marks) + 1):
        write = torch.randn(exact.shape, generator=gen, dtype=torch.float64) * window
        exact = g * exact + write
        state = (g * state.double() + write).float()
        at = torch.tensor([i * length])
        write_state(pool.views[0], config, slot, state, key, at)
        state = read_checkpoint(pool.views[0], config, slot)
        if i in marks:
            errors.append(((state.double() - exact).norm() / exact.norm()).item())
    bits = element_bits(key, torch.tensor([1]), 5, 4, 16, 64)
    once = fake_quantize(exact.float(), fmt, bits).double()
    return errors, ((once - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("update", ["fp16", "e4m3", "int8", "P4+8/row"])
def test_error_plateaus(update):
    """decay 2e-3, error time constant 16 flushes: flat from 4k to 16k steps, and as predicted.

    sigma / sqrt(1 - g^2 - sigma^2), because rounding noise is multiplicative; within [0.4, 1.5].
    """
    (early, late), sigma = flush_errors(update, 2e-3, (256, 1024))
    g = torch.exp(torch.tensor(-32e-3)).item()
    predicted = sigma / (1 - g * g - sigma * sigma) ** 0.5
    assert late <= 1.4 * early
    assert 0.4 < late / predicted < 1.5


def test_error_grows_as_a_root_without_decay():
    """No forgetting: four times the flushes, twice the error (each within 20 %)."""
    (a, b, c), _ = flush_errors("int8", 0.0, (64, 256, 1024))
    assert 1.6 < b / a < 2.4 and 1.6 < c / b < 2.4


def test_nearest_is_biased_where_stochastic_is_not(make_lab):
    """Slow writes with a mean, bf16: RN loses or gains mass that SR keeps (replayed, L = 4)."""
    lab = make_lab("mamba2", LayerGeometry("mamba2", 1, 8, 32, 1))
    gain = {}
    for rounding in ("rn", "sr"):
        config = lab.config("bf16", "same", buffer_len=4, rounding=rounding)
        pool = lab.pool(config, 1)
        at = torch.tensor([0])
        pool.start(at, torch.tensor([5]), torch.tensor([0]))
        gen = torch.Generator().manual_seed(8)
        x, B = 0.5 + torch.rand(1, 1, 8, generator=gen), 0.5 + torch.rand(1, 1, 32, generator=gen)
        A, dt = torch.tensor([-2e-4]), torch.ones(1, 1)
        exact = torch.zeros(1, 1, 8, 32, dtype=torch.float64)
        for _ in range(1000):
            rows = pool.rows(at)
            mamba2.decode_step(pool.views[0], config, rows, x, dt, A, B, B)
            pool.advance(rows)
            args = (t.double() for t in (x, dt, A, B, B))
            exact = mamba2.recurrent_step(exact, *args)[1]
        got = read_checkpoint(pool.views[0], config, at).double()
        gain[rounding] = float((got * exact).sum() / exact.square().sum()) - 1
    assert abs(gain["rn"]) > 0.03 and abs(gain["sr"]) < 0.01
    assert abs(gain["rn"]) > 5 * abs(gain["sr"])


# --- the delta rule -------------------------------------------------------------------------------


def leaky_window(update, copy, keys, values, g, beta):
    """A fold whose corrections come from reads of the copy: (new update, new copy, P, decay).

    update and copy [V, K], keys [L, K], values [L, V]; float64. The copy is carried through the
    window and every d read from it is added to both, which is what buffering d amounts to.
    """
    product = torch.eye(keys.shape[1], dtype=torch.float64)
    decay = torch.ones((), dtype=torch.float64)
    for k, v, log_a, b in zip(keys, values, g, beta, strict=True):
        a = torch.exp(log_a)
        d = b * (v - a * copy @ k)
        update, copy = a * update + torch.outer(d, k), a * copy + torch.outer(d, k)
        product = a * product @ (torch.eye(len(k), dtype=torch.float64) - b * torch.outer(k, k))
        decay = decay * a
    return update, copy, product, decay


def test_leaky_fold_obeys_its_identity_and_ours_does_not_leak():
    """z' = z P + (E' - g E), z = O - S: the copy's error E enters a leaky update and stays.

    The same windows through ``decode_step`` with the same copies keep the update exact.
    """
    torch.manual_seed(4)
    V, K, length, flushes = 6, 32, 8, 6
    geometry = LayerGeometry("gdn", 1, V, K, 1)
    config = StateConfig(parse_format("fp32"), parse_format("nvfp4"), length)
    pool = StatePool({0: geometry}, config, 1, ring_storage="fp32")
    at = torch.tensor([0])
    start = torch.randn(1, 1, V, K)
    pool.start(at, torch.tensor([5]), torch.tensor([3]))
    pool.write(0, at, start)
    exact = start[0, 0].double()
    leaky = exact.clone()

    def copy_of(state):
        return fake_quantize(state.float()[None], parse_format("nvfp4"))[0].double()

    for _ in range(flushes):
        raw_k, values = torch.randn(length, K), torch.randn(length, V)
        g, beta = -0.05 * torch.rand(length), torch.rand(length) * 1.9
        inverse = gdn.inverse_norm(raw_k)
        keys = (raw_k * inverse[:, None]).double()
        copy = copy_of(leaky)
        error, z = copy - leaky, copy - exact
        args = (keys, values.double(), g.double(), beta.double())
        leaky, _, product, decay = leaky_window(leaky, copy, *args)
        exact = leaky_window(exact, exact, *args)[0]
        new_copy = copy_of(leaky)
        new_error = new_copy - leaky
        identity = z @ product + (new_error - decay * error)
        assert torch.allclose(new_copy - exact, identity, rtol=0, atol=1e-12)
        assert (leaky - exact).norm() > 1e-3 * exact.norm()  # the leak is there
        for i in range(length):
            rows = pool.rows(at)
            one = (raw_k[i], raw_k[i], values[i])
            q, k, v = (t[None, None] for t in one)
            args32 = (q, k, v, g[i].view(1, 1), beta[i].view(1, 1))
            gdn.decode_step(pool.views[0], config, rows, *args32)
            pool.advance(rows)
        ours = read_checkpoint(pool.views[0], config, at)[0, 0].double()
        assert (ours - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("ring", ["fp32", "bf16"])
def test_state_and_output_over_sixteen_cycles(make_lab, distance, ring):
    """Mild decay, 16 windows of 8: the state itself stays at fp32, or at one rounding of inputs.

    A bf16 ring rounds k and v once, 2**-9 relative each, so 2.5e-3 bounds it.
    """
    lab = make_lab("gdn", LayerGeometry("gdn", 4, 128, 128, 2), 1e-3)
    pool = lab.pool(lab.config("fp32", "nvfp4", buffer_len=8), 1, ring_storage=ring)
    state = lab.start(pool, [0], [3]).double()
    bound = 2e-6 if ring == "fp32" else 2.5e-3
    for t in range(128):
        y, rows = lab.step(pool, [0], [3])
        want, state = lab.exact(state, lab.inputs([3], [6 + t]))
        if bool(rows.flush[0]):
            assert distance(lab.load(pool, [0]), state) < bound
            assert distance(y, want) < 4 * bound


def test_identical_keys_at_the_edge_of_stability(make_lab, distance):
    """The same key 64 times at beta 1.999: the fold does not amplify rounding.

    1 / |k| is stored in fp32, so |k|^2 is off by up to 2 * 2**-24 and each of 64 factors
    1 - beta |k|^2 by twice that: 1.5e-5, and as much again for the arithmetic.
    """
    lab = make_lab("gdn", LayerGeometry("gdn", 1, 8, 32, 1))
    pool = lab.pool(lab.config("fp32", "nvfp4", buffer_len=64), 1)
    state = lab.start(pool, [0], [3]).double()
    _, k, *_ = lab.inputs([3], [0])
    at = torch.tensor([0])
    for t in range(64):
        q, _, v, _, _ = lab.inputs([3], [6 + t])
        inputs = (q, k, v, torch.zeros(1, 1), torch.full((1, 1), 1.999))
        rows = pool.rows(at)
        lab.decode(pool, rows, inputs)
        pool.advance(rows)
        state = lab.exact(state, inputs)[1]
    assert distance(lab.load(pool, [0]), state) < 3e-5
