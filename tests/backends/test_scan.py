"""The scan form against token-by-token decoding on the same stored state."""

import copy

import pytest
import torch

from replayssm_quant import ops
from replayssm_quant.backends import hf
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.philox import request_key
from replayssm_quant.kernels.gdn import scan as gdn
from replayssm_quant.kernels.mamba2 import scan as mamba2
from replayssm_quant.state.cache import StatePool, read_checkpoint, read_copy
from replayssm_quant.state.geometry import LayerGeometry

# Sums of some hundred fp32 products in another order, relative to the largest output.
SAME = 1e-5
B, T, PREFILL = 3, 45, 5
GEOMETRY = {
    "mamba2": LayerGeometry("mamba2", 4, 16, 32, 2),
    "gdn": LayerGeometry("gdn", 4, 16, 32, 2),
}
CONFIGS = [
    StateConfig.from_flags("fp32", buffer_len=8),
    StateConfig.from_flags("fp32", "nvfp4", buffer_len=8),
    StateConfig.from_flags("fp16", buffer_len=16),
    StateConfig.from_flags("fp8", buffer_len=8, stagger=True),
    StateConfig.from_flags("int8", "same", buffer_len=1),
    StateConfig.from_flags("P4+8", buffer_len=4, rotate=True),
    StateConfig.from_flags("P8+4", buffer_len=40, rounding="rn"),
]


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def make_inputs(kind, seed=0):
    """Inputs of T tokens with memories from a few tokens to some hundred."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    geo = GEOMETRY[kind]
    if kind == "mamba2":
        return dict(
            x=normal(B, T, geo.heads, geo.rows),
            dt=normal(B, T, geo.heads) - 1,
            A=-torch.exp(torch.linspace(-4, 0, geo.heads)),
            B=normal(B, T, geo.groups, geo.n),
            C=normal(B, T, geo.groups, geo.n),
            D=normal(geo.heads),
            dt_bias=normal(geo.heads) * 0.1,
            dt_softplus=True,
        )
    return dict(
        q=normal(B, T, geo.groups, geo.n),
        k=normal(B, T, geo.groups, geo.n),
        v=normal(B, T, geo.heads, geo.rows),
        g=-torch.exp(normal(B, T, geo.heads) - 3),
        beta=torch.sigmoid(normal(B, T, geo.heads)),
    )


PER_LAYER = ("A", "D", "dt_bias", "dt_softplus")


def decode(kind, inputs, config, keys, prefill=PREFILL):
    """Outputs after the prefill and, for each flush, (row, position, checkpoint, copy).

    The prefill is a split state in fp32 with windows of one token: the plain recurrence.
    """
    geo = GEOMETRY[kind]
    step = ops.mamba2_decode if kind == "mamba2" else ops.gdn_decode
    exact = StatePool(
        {7: geo}, StateConfig.from_flags("fp32", buffer_len=1), B, ring_storage="fp32"
    )
    pool = StatePool({7: geo}, config, B, ring_storage="fp32")
    slots, out, flushed = torch.arange(B), [], []
    exact.start(slots, keys, torch.zeros(B, dtype=torch.int64))

    def run(pool, t):
        now = {n: v if n in PER_LAYER else v[:, t] for n, v in inputs.items()}
        rows = pool.rows(slots)
        y = step(pool.views[7], pool.configs[7], rows, **now, layer=7)
        pool.advance(rows)
        return rows, y

    def note(which):
        for r in which.tolist():
            at, view, one = int(pool.position[r]), pool.views[7], slots[r : r + 1]
            checkpoint = read_checkpoint(view, config, one)[0].clone()
            flushed.append((r, at, checkpoint, read_copy(view, config, one)[0].clone()))

    for t in range(prefill):
        run(exact, t)
    pool.start(slots, keys, torch.full((B,), prefill))
    pool.write(7, slots, read_checkpoint(exact.views[7], exact.configs[7], slots))
    note(slots)
    for t in range(prefill, T):
        rows, y = run(pool, t)
        out.append(y)
        note(rows.flush.nonzero()[:, 0])
    return torch.stack(out, 1), flushed


def scan(kind, inputs, config, keys, prefill=PREFILL):
    stored = []

    def record(checkpoint, copy_, positions):
        for r, at in enumerate(positions.tolist()):
            stored.append((r, at, checkpoint[r].clone(), copy_[r].clone()))

    function = mamba2.scan if kind == "mamba2" else gdn.scan
    y = function(
        **inputs,
        config=config,
        prefill=prefill,
        keys=keys,
        positions=torch.full((B,), prefill),
        layer=7,
        record=record,
    )
    return y[:, prefill:], stored


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
def test_stores_the_same_states_as_decoding(kind, config):
    """At every flush: the same rows at the same positions, and the same values but for roundings
    that the order of the fp32 sums flips. Sums differ by about 1e-6 of a group's largest value and
    a format has at most 2048 steps of it, so some 2e-3 of the first roundings flip (and ties, which
    are common where a copy is made from few bits); each flip is an input of the next flush. With
    other random bits about half would differ at once."""
    inputs, keys = make_inputs(kind), torch.tensor([request_key(1, i) for i in range(B)])
    expected, flushed = decode(kind, inputs, config, keys)
    got, stored = scan(kind, inputs, config, keys)
    by_place = {(r, at): (a, b) for r, at, a, b in stored}
    last = {r: max(at for row, at, _, _ in flushed if row == r) for r in range(B)}
    limit, compared = {}, 0
    for r, at, checkpoint, copy_ in flushed:
        if at == last[r] and (r, at) not in by_place:
            continue  # the text ends here: nobody would read that store
        a, b = by_place[r, at]
        limit[r] = 5e-3 if r not in limit else limit[r] + 2e-3
        if not config.update.rounds:
            assert relative(a, checkpoint) < SAME
        else:
            steps = (a - checkpoint).abs() > 1e-4 * checkpoint.abs().amax(-1, keepdim=True)
            assert steps.float().mean() < limit[r]
        moved = (b - copy_).abs() > 1e-4 * copy_.abs().amax(-1, keepdim=True)
        assert moved.float().mean() < limit[r]
        compared += 1
    assert compared >= B * ((T - PREFILL) // config.buffer_len)
    # one flip in a 4-bit copy moves one value of 32 by a sixth of its block's largest
    assert relative(got, expected) < (SAME if not config.readout.rounds else 8e-2)


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_first_window_equals_decoding_in_every_format(kind):
    """After a prefill of one token both sides store the same bits, so nothing can flip before the
    first flush: the readout of the copy, the ring and the exact output of the flush must agree."""
    inputs, keys = make_inputs(kind), torch.tensor([request_key(1, i) for i in range(B)])
    if kind == "mamba2":  # softplus itself differs by an ulp between long and short tensors
        inputs.update(
            dt=torch.nn.functional.softplus(inputs["dt"]), dt_bias=None, dt_softplus=False
        )
    for config in CONFIGS:
        expected, flushed = decode(kind, inputs, config, keys, prefill=1)
        got, stored = scan(kind, inputs, config, keys, prefill=1)
        for (_, _, a, b), (_, _, c, d) in zip(flushed[:B], stored[:B], strict=True):
            assert torch.equal(a, c) and torch.equal(b, d)
        n = min(at for r, at, _, _ in flushed[B:]) - 1 if config.stagger else config.buffer_len
        assert relative(got[:, :n], expected[:, :n]) < SAME, config.label


def test_clamp_of_dt_ends_with_the_prefill():
    inputs = make_inputs("mamba2")
    kwargs = dict(
        config=None, prefill=PREFILL, keys=torch.zeros(B).long(), positions=torch.zeros(B).long()
    )
    free = mamba2.scan(**inputs, **kwargs)
    clamped = mamba2.scan(**inputs, **kwargs, dt_limit=(0.5, 1.0))
    dt = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    dt[:, :PREFILL] = dt[:, :PREFILL].clamp(0.5, 1.0)
    plain = {**inputs, "dt": dt, "dt_bias": None, "dt_softplus": False}
    assert relative(clamped, mamba2.scan(**plain, **kwargs)) < SAME
    assert relative(clamped, free) > 1e-2


# --- whole models ---------------------------------------------------------------------------------


def divergence(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture
def batch(make_ids):
    """Ids, mask (padded left within the prefill, and right) and the real positions."""
    ids = make_ids(3, 44)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 38:] = 0
    return ids, mask, mask.bool()


def test_fp32_scan_equals_decoding(model, batch):
    ids, mask, real = batch
    kwargs = dict(attention_mask=mask, prefill=6)
    expected = hf.score(model, ids, None, path="decode", **kwargs)[real]
    for config in (
        None,
        StateConfig.from_flags("fp32"),
        StateConfig.from_flags("fp32", buffer_len=3, rotate=True, stagger=True),
    ):
        assert relative(hf.score(model, ids, config, **kwargs)[real], expected) < SAME
    whole = hf.score(model, ids[:, :6], StateConfig.from_flags("fp8"), prefill=6)
    assert relative(whole, hf.score(model, ids[:, :6], None, path="decode", prefill=6)) < SAME


def test_quantised_scan_is_decoding_up_to_flipped_roundings(model, batch):
    """The scan must lie much closer to decoding than either lies to fp32. Random bits that differ
    would put it as far away as the format itself does: KLD ratio about 1 instead of 1/20."""
    ids, mask, real = batch
    kwargs = dict(attention_mask=mask, prefill=6, requests=["a", "b", "c"], seed=5)
    fp32 = hf.score(model, ids, None, **kwargs)[real]
    for config in (
        StateConfig.from_flags("fp8", "same", buffer_len=4),
        StateConfig.from_flags("fp16", buffer_len=8),
    ):
        counts, expected_counts = {}, {}
        decoded = hf.score(model, ids, config, path="decode", stats=expected_counts, **kwargs)[real]
        scanned = hf.score(model, ids, config, stats=counts, **kwargs)[real]
        assert counts == expected_counts
        assert divergence(fp32, decoded) > 1e-7
        assert divergence(decoded, scanned) < 0.05 * divergence(fp32, decoded) + 1e-9


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_half_precision_scan_follows_decoding(build, family, make_ids):
    model = copy.deepcopy(build(family)).to(torch.bfloat16)
    ids, config = make_ids(2, 24), StateConfig.from_flags("fp32")
    decoded = hf.score(model, ids, config, path="decode", prefill=4).float()
    scanned = hf.score(model, ids, config, prefill=4).float()
    assert scanned.dtype == decoded.dtype
    assert relative(scanned, decoded) < 32 * torch.finfo(torch.bfloat16).eps


def test_scan_detaches_and_layers_may_be_left_out(build, batch):
    model = build("zamba2")
    ids, _, _ = batch
    found = hf.find_layers(model)
    file = found.modules[0]
    before = dict(vars(file)), [len(m._forward_pre_hooks) for m in found.mixers.values()]
    first = min(found.layers)
    only = {first: StateConfig.from_flags("int8", "same", buffer_len=1)}
    part = hf.score(model, ids, only, prefill=2)
    decoded = hf.score(model, ids, only, prefill=2, path="decode")
    assert relative(part, decoded) < 2e-3
    with pytest.raises(IndexError):
        hf.score(model, ids + 10_000, only)
    after = dict(vars(file)), [len(m._forward_pre_hooks) for m in found.mixers.values()]
    assert after == before
    with hf.split_state(model, only), pytest.raises(RuntimeError, match="already attached"):
        hf.score(model, ids, only)
