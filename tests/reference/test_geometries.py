"""Real shapes, tensor-parallel shards, strided pages, and inputs at their extremes."""

import pytest
import torch

from replayssm_quant.kernels.gdn import reference as gdn
from replayssm_quant.kernels.mamba2 import reference as mamba2
from replayssm_quant.state.cache import PAD_SLOT, StepRows
from replayssm_quant.state.geometry import LayerGeometry

SHAPES = {  # heads, rows, n, groups; head counts cut where only the ratio to the groups matters
    "nemotron-3-nano-4b": ("mamba2", 12, 80, 128, 1),
    "nemotron-3-super": ("mamba2", 16, 64, 128, 1),
    "falcon-h1-1.5b": ("mamba2", 48, 64, 256, 1),
    "falcon-h1-7b": ("mamba2", 24, 128, 256, 1),
    "granite-4.0-h-small": ("mamba2", 128, 64, 128, 1),
    "n 96": ("mamba2", 8, 64, 96, 2),
    "n 64": ("mamba2", 24, 32, 64, 1),
    "n 16": ("mamba2", 4, 64, 16, 1),
    "qwen3.5-4b": ("gdn", 32, 128, 128, 16),
    "qwen3.5-122b, ratio 4": ("gdn", 8, 128, 128, 2),
    "qwen3.6-27b, ratio 3": ("gdn", 6, 128, 128, 2),
    "olmo-hybrid": ("gdn", 30, 192, 96, 30),
    "small": ("gdn", 4, 64, 64, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_follow_the_recurrence(make_lab, distance, name):
    """One window and a half in fp32 at 2e-6, and once through the quantised pair, all finite."""
    kind, heads, rows, n, groups = SHAPES[name]
    lab = make_lab(kind, LayerGeometry(kind, heads, rows, n, groups), beta_max=1.999)
    pool = lab.pool(lab.config("fp32", "fp32", buffer_len=4, rotate=True), 1)
    state = lab.start(pool, [0], [3]).double()
    for t in range(6):
        y, _ = lab.step(pool, [0], [3])
        want, state = lab.exact(state, lab.inputs([3], [6 + t]))
        assert distance(y, want) < 2e-6
    assert distance(lab.load(pool, [0]), state) < 2e-6
    for pair in (("fp8", "nvfp4"), ("P4+8/row", None)):
        pool = lab.pool(lab.config(*pair, buffer_len=2, rotate=True), 1)
        lab.start(pool, [0], [3])
        assert lab.run(pool, [0], [3], 3).isfinite().all()


@pytest.mark.parametrize("update", ["fp16", "fp8", "int8/head", "P4+8", "P8+4"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_hold_the_bytes_of_the_whole(
    make_lab, kind, bytes_of, equal_bytes, update, ranks, monkeypatch
):
    """Heads split over ranks, each with its head_offset: together the very bytes of one rank."""
    geometry = LayerGeometry(kind, 8, 6, 32, 4)
    lab = make_lab(kind, geometry)
    config = lab.config(update, buffer_len=3)
    whole = lab.pool(config, 1)
    lab.start(whole, [0], [3])
    y = lab.run(whole, [0], [3], 8)
    parts, outputs = [], []
    for rank in range(ranks):
        shard = make_lab(kind, geometry.shard(ranks))
        heads = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        groups = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        shard.A = lab.A[heads]
        pool = shard.pool(config, 1)
        at = torch.tensor([0])
        pool.start(at, torch.tensor([lab.key(3)]), torch.tensor([5]))
        pool.write(0, at, lab.state(3)[None, heads], head_offset=heads.start)
        ys = []
        for t in range(8):
            rows = pool.rows(at)
            by_group = {2, 3} if kind == "mamba2" else {0, 1}
            full = lab.inputs([3], [6 + t])
            mine = [x[:, groups if i in by_group else heads] for i, x in enumerate(full)]
            ys.append(shard.decode(pool, rows, mine, head_offset=heads.start))
            pool.advance(rows)
        outputs.append(torch.stack(ys))
        parts.append(bytes_of(pool, [0]))
    joined = {name: torch.cat([p[name] for p in parts], 1) for name in parts[0]}
    assert equal_bytes(joined, bytes_of(whole, [0]))
    assert torch.equal(torch.cat(outputs, 2), y)


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_group_is_replicated_over_ranks(make_lab, bytes_of, equal_bytes, ranks):
    geometry = LayerGeometry("mamba2", 6, 4, 32, 1)
    lab = make_lab("mamba2", geometry)
    config = lab.config("fp8", buffer_len=2)
    whole = lab.pool(config, 1)
    lab.start(whole, [0], [3])
    lab.run(whole, [0], [3], 4)
    parts = []
    for rank in range(ranks):
        shard = make_lab("mamba2", geometry.shard(ranks))
        heads = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)
        shard.A = lab.A[heads]
        pool = shard.pool(config, 1)
        at = torch.tensor([0])
        pool.start(at, torch.tensor([lab.key(3)]), torch.tensor([5]))
        pool.write(0, at, lab.state(3)[None, heads], head_offset=heads.start)
        for t in range(4):
            rows = pool.rows(at)
            x, dt, B, C = lab.inputs([3], [6 + t])
            shard.decode(pool, rows, (x[:, heads], dt[:, heads], B, C), head_offset=heads.start)
            pool.advance(rows)
        parts.append(bytes_of(pool, [0]))
    joined = {name: torch.cat([p[name] for p in parts], 1) for name in parts[0]}
    assert equal_bytes(joined, bytes_of(whole, [0]))


def test_views_strided_inside_an_engines_page(lab):
    """Layer state inside wider pages full of NaN: same outputs, and not one gap byte changes."""
    config = lab.config("fp8", "nvfp4", buffer_len=3)
    plain = lab.pool(config, 3)
    lab.start(plain, [2], [3])
    layout = plain.layouts[0]
    pages = torch.full((3, layout.page_bytes + 640), 0xFF, dtype=torch.uint8)
    inner = lab.pool(config, 3)
    inner.views[0] = layout.views(pages)
    inner.pages[0] = pages[:, : layout.page_bytes]
    lab.start(inner, [2], [3])
    assert torch.equal(lab.run(inner, [2], [3], 10), lab.run(plain, [2], [3], 10))
    assert bool((pages[:, layout.page_bytes :] == 0xFF).all()) and bool((pages[:2] == 0xFF).all())


@pytest.mark.parametrize("decay", [6.0, 30.0, 200.0])
def test_strong_decay_neither_overflows_nor_cancels(make_lab, kind, distance, decay):
    """-6 nats a token for 16 tokens, and far beyond: no positive exponent, no lost digits."""
    lab = make_lab(kind, LayerGeometry(kind, 4, 6, 32, 2), decay)
    pool = lab.pool(lab.config("fp32", "fp32"), 1)
    state = lab.start(pool, [0], [3]).double()
    for t in range(35):
        y, _ = lab.step(pool, [0], [3])
        want, state = lab.exact(state, lab.inputs([3], [6 + t]))
        assert y.isfinite().all() and distance(y, want) < 5e-6
    assert distance(lab.load(pool, [0]), state) < 5e-6


def test_softplus_of_large_arguments_is_the_argument():
    dt = torch.tensor([-50.0, 0.0, 20.0, 88.0, 1e4])
    got = mamba2.time_step(dt, torch.zeros(5), True, torch.float32)
    want = torch.log1p(torch.exp(-dt.double().abs())) + dt.double().clamp(min=0)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-30)
    assert got[2:].tolist() == [20.0, 88.0, 1e4] and got[0] > 0
    shifted = mamba2.time_step(dt.bfloat16(), torch.full((5,), 0.5), True, torch.float32)
    assert shifted.dtype == torch.float32 and float(shifted[3]) == 88.5
    assert torch.equal(mamba2.time_step(dt, None, False, torch.float32), dt)


def test_gates_stay_in_fp32():
    """beta is the fp32 sigmoid even of bf16 input; g has the fp32 softplus; beta doubles for
    negative eigenvalues."""
    b = torch.tensor([[-0.5, 0.5, 3.0]]).bfloat16()
    a = torch.tensor([[-40.0, 0.25, 90.0]]).bfloat16()
    A_log, bias = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.1, 0.2, 0.3])
    g, beta = gdn.gates(a, b, A_log, bias)
    assert g.dtype == beta.dtype == torch.float32
    assert torch.allclose(beta.double(), torch.sigmoid(b.double()), atol=1e-7)
    want = -torch.exp(A_log.double()) * torch.nn.functional.softplus(a.double() + bias.double())
    assert torch.allclose(g.double(), want, rtol=1e-6)
    assert torch.equal(gdn.gates(a, b, A_log, bias, allow_neg_eigval=True)[1], 2 * beta)


def test_mamba2_skip_gate_and_bias(make_lab, distance):
    """D x and the silu gate act on the fresh input; dt_bias and softplus on the raw dt."""
    lab = make_lab("mamba2", LayerGeometry("mamba2", 4, 6, 32, 2))
    gen = torch.Generator().manual_seed(0)
    D, bias = torch.randn(4, generator=gen), torch.randn(4, generator=gen)
    for wide in (False, True):
        pool = lab.pool(lab.config("fp32", "fp32", buffer_len=3), 1)
        state = lab.start(pool, [0], [3]).double()
        for t in range(7):
            rows = pool.rows(torch.tensor([0]))
            x, dt, B, C = lab.inputs([3], [6 + t])
            z = torch.randn(x.shape, generator=gen)
            skip = D[:, None].expand(4, 6).contiguous() if wide else D
            extra = dict(D=skip, z=z, dt_bias=bias, dt_softplus=True)
            y = lab.decode(pool, rows, (x, dt, B, C), **extra)
            pool.advance(rows)
            step = torch.nn.functional.softplus(dt.double() + bias.double())
            args = (x.double(), step, lab.A.double(), B.double(), C.double())
            want, state = mamba2.recurrent_step(state, *args)
            want = (want + D.double()[:, None] * x.double()) * torch.nn.functional.silu(z.double())
            assert distance(y, want) < 2e-6


def test_gdn_scale_and_norm_are_optional(make_lab, distance):
    lab = make_lab("gdn", LayerGeometry("gdn", 4, 6, 32, 2))
    pool = lab.pool(lab.config("fp32", "fp32", buffer_len=3), 1)
    state = lab.start(pool, [0], [3]).double()
    for t in range(7):
        rows = pool.rows(torch.tensor([0]))
        q, k, v, g, beta = lab.inputs([3], [6 + t])
        k = k * 0.2
        y = lab.decode(pool, rows, (q, k, v, g, beta), scale=0.7, l2norm=False)
        pool.advance(rows)
        wide = [t.double().repeat_interleave(2, 1) for t in (q * 0.7, k)]
        want, state = gdn.recurrent_step(state, *wide, v.double(), g.double()[..., None], beta)
        assert distance(y, want) < 3e-6


def test_float64_step_over_stored_bytes(lab, distance):
    """compute=float64 reads the same copy: fp32 differs from it by fp32 rounding alone."""
    config = lab.config("fp8", "nvfp4", buffer_len=4)
    pool = lab.pool(config, 1)
    lab.start(pool, [0], [3])
    for t in range(8):
        rows = pool.rows(torch.tensor([0]))
        inputs = lab.inputs([3], [6 + t])
        saved = pool.save(torch.tensor([0]))
        exact = lab.decode(pool, rows, inputs, compute=torch.float64)
        pool.restore(torch.tensor([0]), saved)
        assert distance(lab.decode(pool, rows, inputs), exact) < 2e-6
        pool.advance(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations(lab, dtype, distance):
    pool = lab.pool(lab.config("fp32", "fp32", buffer_len=3), 1, ring_storage="bf16")
    lab.start(pool, [0], [3])
    rows = pool.rows(torch.tensor([0]))
    inputs = lab.inputs([3], [6])
    y = lab.decode(pool, rows, [t.to(dtype) for t in inputs])
    want, _ = lab.exact(lab.state(3)[None].double(), inputs)
    assert y.dtype == dtype and distance(y, want) < 2e-2


def test_views_of_the_other_family_are_refused(make_lab):
    shape = (4, 6, 32, 2)
    a, b = (make_lab(k, LayerGeometry(k, *shape)) for k in ("mamba2", "gdn"))
    for one, other, words in ((a, b, "gdn_decode"), (b, a, "mamba2_decode")):
        pool = other.pool(other.config("fp32"), 1)
        other.start(pool, [0], [3])
        with pytest.raises(ValueError, match=words):
            one.decode(pool, pool.rows(torch.tensor([0])), one.inputs([3], [6]))


def test_rows_may_be_made_by_hand(lab):
    """An engine's own control vectors: slots int32, a padding row that holds garbage."""
    pool = lab.pool(lab.config("fp8", buffer_len=4), 2)
    lab.start(pool, [1], [3])
    rows = StepRows(
        torch.tensor([PAD_SLOT, 1], dtype=torch.int32),
        torch.tensor([99, 0], dtype=torch.int32),
        torch.tensor([True, False]),
        torch.tensor([-7, 6], dtype=torch.int32),
        torch.tensor([-1, lab.key(3)]),
    )
    y = lab.decode(pool, rows, lab.inputs([0, 3], [0, 6]))
    other = lab.pool(lab.config("fp8", buffer_len=4), 1)
    lab.start(other, [0], [3])
    assert torch.equal(y[1:], lab.step(other, [0], [3])[0]) and not y[0].any()
