"""The verify kernels against the float64 references over the same bytes, step by step."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant import ops  # noqa: E402
from replayssm_quant.config import StateConfig  # noqa: E402
from replayssm_quant.formats.spec import ELEMENTS  # noqa: E402
from replayssm_quant.kernels.gdn import reference as gdn_plain  # noqa: E402
from replayssm_quant.kernels.gdn import verify_reference as gdn_exact  # noqa: E402
from replayssm_quant.kernels.mamba2 import reference as mamba2_plain  # noqa: E402
from replayssm_quant.kernels.mamba2 import verify_reference as mamba2_exact  # noqa: E402
from replayssm_quant.state.cache import (  # noqa: E402
    PAD_SLOT,
    StatePool,
    VerifyRows,
    read_checkpoint,
    tree_ancestors,
)
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

RING = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
GAP, HEAD = 384, 128
"""Bytes between a slot's page and the next, of which so many lie before the first page."""


@dataclass
class Layer:
    """A layer whose rows verify drafts: a pool with NaN in every ring entry nobody wrote.

    Its pages lie apart, as in an engine's cache: 0xFF fills the bytes between them.
    """

    geometry: LayerGeometry
    config: StateConfig
    device: torch.device
    batch: int = 3
    drafts: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0
    accepted: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gen = torch.Generator().manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.pool = StatePool(
            {0: self.geometry}, self.config, self.batch + 1, ring_storage=RING[self.dtype],
            device=self.device, drafts=self.drafts,
        )  # fmt: skip
        b, g = self.batch, self.geometry
        layout = self.pool.layouts[0]
        self.buffer = torch.full(
            (b + 1, layout.page_bytes + GAP), 255, dtype=torch.uint8, device=self.device
        )
        pages = self.buffer[:, HEAD : HEAD + layout.page_bytes]
        pages.zero_()
        self.pool.pages[0], self.pool.views[0] = pages, layout.views(pages)
        slots = torch.randperm(b + 1, generator=self.gen)[:b].to(self.device)
        keys = torch.arange(b, device=self.device) * 7919 + 5
        self.pool.start(slots, keys, torch.full((b,), 9, device=self.device))
        state = torch.randn(b, g.heads, g.rows, g.n, generator=self.gen)
        self.pool.write(0, slots, state.to(self.device))
        for name, view in self.pool.views[0].tensors().items():
            if name.startswith("ring"):
                view.fill_(float("nan"))
        self.slots = slots
        self.accepted = torch.zeros(b, dtype=torch.int32, device=self.device)
        self.weights = {
            "A": -torch.exp(torch.randn(g.heads, generator=self.gen) - 2).to(self.device),
            "D": torch.randn(g.heads, generator=self.gen).to(self.device),
            "dt_bias": torch.randn(g.heads, generator=self.gen).to(self.device) - 2,
        }

    def inputs(self, count: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        """Inputs of a step, NaN beyond ``count``."""
        g, b = self.geometry, self.batch

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(b, width, *shape, generator=self.gen).to(self.device, self.dtype)

        def gates() -> torch.Tensor:
            return torch.rand(b, width, g.heads, generator=self.gen).to(self.device)

        if g.kind == "mamba2":
            x, z, dt = normal(g.heads, g.rows), normal(g.heads, g.rows), normal(g.heads)
            out = (x, dt, normal(g.groups, g.n), normal(g.groups, g.n), z)
        else:
            qk = (normal(g.groups, g.n), normal(g.groups, g.n) + 0.3)
            out = (*qk, normal(g.heads, g.rows), -0.2 * gates(), gates())
        beyond = torch.arange(width, device=self.device) >= count[:, None]
        for t in out:
            t[beyond] = float("nan")
        return out

    def call(self, views, rows: VerifyRows, inputs, exact: bool, impl: str = "triton"):
        """y of the step on ``views``, by the float64 reference if ``exact``."""
        config = self.config
        if exact:
            inputs = tuple(t.double() if t.dtype == self.dtype else t for t in inputs)
        wide = {"compute": torch.float64} if exact else {"impl": impl}
        if self.geometry.kind == "mamba2":
            x, dt, B, C, z = inputs
            step = mamba2_exact.verify_step if exact else ops.mamba2_verify
            return step(
                views, config, rows, x, dt.float(), self.weights["A"], B, C, z=z,
                D=self.weights["D"], dt_bias=self.weights["dt_bias"], dt_softplus=True,
                layer=3, **wide,
            )  # fmt: skip
        step = gdn_exact.verify_step if exact else ops.gdn_verify
        return step(views, config, rows, *inputs, layer=3, **wide)

    def decode(self, views, rows, inputs, impl: str = "triton"):
        """y of a plain step over token 0 of the inputs, by the decode kernels."""
        x = tuple(t[:, 0] for t in inputs)
        if self.geometry.kind == "gdn":
            return ops.gdn_decode(views, self.config, rows, *x, layer=3, impl=impl)
        w = self.weights
        return ops.mamba2_decode(
            views, self.config, rows, x[0], x[1].float(), w["A"], x[2], x[3], z=x[4], D=w["D"],
            dt_bias=w["dt_bias"], dt_softplus=True, layer=3, impl=impl,
        )  # fmt: skip

    def recurrence(self, state: torch.Tensor, inputs, t: int):
        """(y, state) of token t by the plain recurrence in float64; state [b, H, R, N]."""
        x = tuple(z[:, t].double() for z in inputs)
        if self.geometry.kind == "gdn":
            q, k = (z * gdn_plain.inverse_norm(z)[..., None] for z in x[:2])
            per = self.geometry.heads_per_group
            q, k = (z.repeat_interleave(per, 1) for z in (q * self.geometry.n**-0.5, k))
            return gdn_plain.recurrent_step(state, q, k, x[2], x[3][..., None], x[4])
        w = {name: v.double() for name, v in self.weights.items()}
        dt = torch.nn.functional.softplus(x[1] + w["dt_bias"])
        y, state = mamba2_plain.recurrent_step(state, x[0], dt, w["A"], x[2], x[3])
        return (y + w["D"][:, None] * x[0]) * torch.nn.functional.silu(x[4]), state

    def state(self) -> torch.Tensor:
        """The committed state of all rows, rings folded in, by the float64 reference."""
        views, rows = self.pool.views[0], self.pool.rows(self.slots)
        if self.geometry.kind == "gdn":
            return gdn_plain.load_state(views, self.config, rows, torch.float64)
        A = self.weights["A"]
        return mamba2_plain.load_state(views, self.config, rows, A, torch.float64)

    def stored(self, row: int = 0) -> list[torch.Tensor]:
        """Bytes of a row's checkpoint and copy."""
        views = self.pool.views[0].tensors().items()
        parts = [v[self.slots[row]] for n, v in views if not n.startswith("ring")]
        return [t.clone().contiguous().view(torch.uint8) for t in parts]

    def rings(self) -> list[torch.Tensor]:
        """All rows' rings [b, entries, ...]."""
        views = self.pool.views[0].tensors().items()
        return [v[self.slots] for n, v in views if n.startswith("ring")]

    def fold(self, views, rows: VerifyRows) -> None:
        """The committed inputs of the rows that flush, by the float64 reference."""
        wide = {"layer": 3, "compute": torch.float64}
        if self.geometry.kind == "mamba2":
            mamba2_exact.fold_committed(views, self.config, rows, self.weights["A"], **wide)
        else:
            gdn_exact.fold_committed(views, self.config, rows, **wide)

    def step(self, counts: list[int], keeps: list[int], width: int, ancestors=None, **changes):
        """One step by kernel and by reference from the same bytes: (rows, ours, exact y, bytes).

        Rows that flush read, in both, the copy that the kernel made: a code that rounds the other
        way is no error of the readout.
        """
        pool = self.pool
        pool.commit(self.slots, self.accepted)
        count = torch.tensor(counts, device=self.device)
        rows = pool.verify_rows(self.slots, count, ancestors)
        inputs = changes.get("inputs") or self.inputs(count, width)
        pages = pool.pages[0].clone()
        exact = pool.layouts[0].views(pages)
        got = self.call(pool.views[0], rows, inputs, False)
        self.fold(exact, rows)
        read = exact
        if bool(rows.flush.any()):
            read, slots = pool.layouts[0].views(pages.clone()), rows.slots[rows.flush]
            for name, view in read.tensors().items():
                if not name.startswith("ring"):
                    view[slots] = getattr(pool.views[0], name)[slots]
        still = torch.zeros_like(rows.flush)
        after = dataclasses.replace(rows, valid=rows.base, flush=still, fold_slots=None)
        want = self.call(read, after, inputs, True)
        for name, view in exact.tensors().items():
            if name.startswith("ring"):
                view.copy_(getattr(read, name))
        pool.advance_verify(rows)
        self.accepted = torch.tensor(keeps, dtype=torch.int32, device=self.device)
        return rows, got, want, exact


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    d = (got.double() - want.double()).square().mean().sqrt()
    return float(d / want.double().square().mean().sqrt().clamp(min=1e-30))


def bound_of(config: StateConfig, dtype: torch.dtype) -> float:
    """What y may differ by from float64, as relative RMS.

    The queries are rounded to fp16 (2**-12 of a vector's largest value each, spread over the
    products of a row: 3e-4 with a margin); beside bf16 copies a GPU takes tf32, whose rounding may
    be a truncation (2**-10); fp32 copies take three tf32 products, 1e-5. Storing y costs 2**-9
    (bf16) or 2**-12 (fp16).
    """
    read = {"fp32": 1e-5, "bf16": 1e-3}.get(config.readout.name, 4e-4)
    return read + {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(dtype, 0.0)


def step_of(config: StateConfig) -> float:
    """One rounding step of the checkpoint over the RMS of a row, at most; 0 if it is not rounded.

    A row's largest value is below five times its RMS.
    """
    fmt = config.update
    if not fmt.rounds:
        return 0.0
    return 2.0 ** -ELEMENTS[fmt.element].mantissa if fmt.kind == "float" else 5.0 / fmt.max_code


def fold_bounds(layer: Layer) -> dict[str, float]:
    """What a fold may differ by from the float64 fold with the same random bits.

    As in the decode tests, whose fold this is. The sums of a Mamba-2 fold are within 1e-7 of a
    row's RMS, of a GDN fold within 4e-7 of its largest value, below five times that. So many codes
    lie next to a rounding edge: of 12-bit integers 1e-3, or 4e-3 where a GPU takes operands of two
    bf16 numbers; of fp16, whose step shrinks with the value, 4e-3; of a GDN fold 5e-3. The state
    differs by that share of elements, a step each, with a margin of two, and by the sums.
    """
    gdn, fmt = layer.geometry.kind == "gdn", layer.config.update
    fine = fmt.name == "fp16" or (layer.device.type == "cuda" and fmt.kind == "planar")
    flips = 5e-3 if gdn else 4e-3 if fine else 1e-3
    state = 2 * flips**0.5 * step_of(layer.config) + (5e-6 if gdn else 3e-6)
    return {"flips": flips, "state": state, "slack": 1e-5 if gdn else 1e-6}


@pytest.fixture
def check(stored_check):
    """Take steps, each (counts, kept), and compare y, what a flush stored, the ring entries.

    Nothing else moves, in the pages and between them. Random steps, unless they are given.
    """

    def run(layer: Layer, steps=5, width: int | None = None) -> None:
        width = width or 1 + layer.drafts
        flushes = 0
        for step in range(steps) if isinstance(steps, int) else steps:
            if isinstance(step, int):
                counts = [layer.rng.randint(0, width) for _ in range(layer.batch)]
                counts[0] = width
                keeps = [layer.rng.randint(c // 2, c) for c in counts]
            else:
                counts, keeps = step
            before = layer.pool.pages[0].clone()
            rows, got, want, exact = layer.step(counts, keeps, width)
            flushes += int(rows.flush.sum())
            inside = torch.arange(width, device=got.device) < rows.count[:, None]
            assert torch.isfinite(got).all() and not got[~inside].any()
            error = relative(got[inside], want[inside])
            assert error <= bound_of(layer.config, layer.dtype), error
            f = rows.slots[rows.flush]
            views = layer.pool.views[0]
            if f.numel():
                stored_check(views, exact, layer.config, f, **fold_bounds(layer))
            row, t = inside.nonzero(as_tuple=True)
            at = (rows.slots[row], (rows.base[row] + t).long())
            old = layer.pool.layouts[0].views(before)
            for name, view in views.tensors().items():
                if name.startswith("ring"):
                    loose = name in ("ring_dt", "ring_rk")
                    limit = {"rtol": 5e-6, "atol": 1e-12} if loose else {"rtol": 0, "atol": 0}
                    torch.testing.assert_close(view[at], getattr(exact, name)[at], **limit)
                    same = view.clone()
                    same[at] = getattr(old, name)[at]
                    assert torch.equal(
                        same.contiguous().view(torch.uint8),
                        getattr(old, name).contiguous().view(torch.uint8),
                    )
                else:
                    kept = rows.slots[~rows.flush]
                    assert torch.equal(view[kept], getattr(old, name)[kept])
            end = HEAD + layer.pool.layouts[0].page_bytes
            assert (layer.buffer[:, :HEAD] == 255).all() and (layer.buffer[:, end:] == 255).all()
        assert flushes > 0, "no step flushed"

    return run


def flags(update: str, output: str | None = None, **kw: object) -> StateConfig:
    return StateConfig.from_flags(update, output, **kw)  # type: ignore[arg-type]


CASES = {
    "nvfp4+fp16": ((2, 16, 128, 1), flags("fp16", "nvfp4", buffer_len=4)),
    "nvfp4+e4m3-rows17": ((2, 17, 128, 2), flags("e4m3", "nvfp4", buffer_len=3)),
    "P4+8-rotated": ((2, 16, 128, 1), flags("P4+8", rotate=True, buffer_len=4)),
    "P8+4-state256": ((1, 16, 256, 1), flags("P8+4", buffer_len=2, rotate=True)),
    "nvfp4-state256": ((1, 16, 256, 1), flags("fp16", "nvfp4", buffer_len=4)),
    "fp32-state96": ((2, 16, 96, 1), flags("fp32", buffer_len=4, rotate=True)),
    "nvfp4-state64": ((2, 16, 64, 2), flags("e4m3", "nvfp4", buffer_len=4)),
    "mxfp4-state32": ((2, 16, 32, 1), flags("bf16", "mxfp4", buffer_len=4)),
    "e4m3-shared": ((2, 16, 128, 1), flags("e4m3", "same", buffer_len=4)),
    "int8-state16": ((2, 16, 16, 1), flags("int8", "same", buffer_len=4)),
    "fp16-shared": ((2, 16, 128, 1), flags("fp16", "same", buffer_len=4)),
    "bf16-shared": ((2, 16, 128, 1), flags("bf16", "same", buffer_len=4)),
    "e5m2+fp32": ((1, 16, 64, 1), flags("fp32", "e5m2", buffer_len=4)),
    "fp32": ((2, 16, 128, 1), flags("fp32", buffer_len=1)),
}


ONLY = {  # the families share the product; each takes one format of every path through it
    "mamba2": ("P4+8-rotated", "nvfp4-state256", "fp32-state96", "mxfp4-state32", "int8-state16",
               "fp16-shared", "nvfp4+e4m3-rows17"),
    "gdn": ("nvfp4+fp16", "P8+4-state256", "nvfp4-state64", "e4m3-shared", "bf16-shared",
            "e5m2+fp32", "fp32"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in ONLY.items() for n in names])
def test_steps(kind: str, name: str, check, device: torch.device) -> None:
    (heads, rows, n, groups), config = CASES[name]
    check(Layer(LayerGeometry(kind, heads, rows, n, groups), config, device, batch=2), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("name", CASES)
def test_all_formats_on_a_gpu(kind: str, name: str, check, device: torch.device) -> None:
    (heads, rows, n, groups), config = CASES[name]
    geometry = LayerGeometry(kind, 4 * heads, 4 * rows, n, groups)
    for dtype in (torch.float32, torch.bfloat16):
        check(Layer(geometry, config, device, batch=9, drafts=7, dtype=dtype), 8)


MATRIX = {
    "nvfp4": flags("fp16", "nvfp4", buffer_len=8),
    "P4+8": flags("P4+8", rotate=True, buffer_len=8),
    "P8+4": flags("P8+4", buffer_len=8),
    "e4m3": flags("e4m3", "same", buffer_len=8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("name", MATRIX)
def test_matrix_reads_on_a_gpu(kind: str, name: str, check, device: torch.device) -> None:
    """bf16, state 128: steps, trees, Inf and NaN; blocks of unequal size, a skip weight a row."""
    rows = 80 if kind == "mamba2" else 128
    geometry = LayerGeometry(kind, 4, rows, 128, 2)

    def fresh(drafts: int) -> Layer:
        layer = Layer(geometry, MATRIX[name], device, drafts=drafts, dtype=torch.bfloat16)
        if drafts % 2 == 0:
            layer.weights["D"] = torch.randn(4, rows, generator=layer.gen).to(device)
        return layer

    for drafts in (7, 4, 2):
        check(fresh(drafts), 8)
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, -1, 1, 0, 3], [-1, 0, 1, 2, 3]], device=device)
    layer = fresh(4)
    layer.step([5, 5, 5], [5, 3, 1], 5)
    _, got, want, _ = layer.step([5, 4, 5], [0, 0, 0], 5, tree_ancestors(parents))
    assert relative(got[want != 0], want[want != 0]) <= bound_of(layer.config, layer.dtype)
    layer.pool.commit(layer.slots, layer.accepted)
    rows_ = layer.pool.verify_rows(layer.slots, torch.full((3,), 5, device=device))
    clean, pages = layer.inputs(rows_.count, 5), layer.pool.pages[0].clone()
    good = layer.call(layer.pool.layouts[0].views(pages.clone()), rows_, clean, False)
    for poison in (float("nan"), float("inf")):
        bad = tuple(t.clone() for t in clean)
        for t in bad:
            t[:, 2] = poison
        got = layer.call(layer.pool.layouts[0].views(pages.clone()), rows_, bad, False)
        assert torch.equal(got[:, :2], good[:, :2])
        assert not torch.isfinite(got[:, 2:]).any()


SMALL = {
    "mamba2": LayerGeometry("mamba2", 2, 16, 128, 1),
    "gdn": LayerGeometry("gdn", 2, 16, 128, 1),
}


@pytest.fixture(params=["mamba2", "gdn"])
def small(request: pytest.FixtureRequest) -> LayerGeometry:
    return SMALL[request.param]


@pytest.fixture(params=["mamba2", "gdn"])
def tiny(request: pytest.FixtureRequest) -> LayerGeometry:
    return LayerGeometry(request.param, 1, 16, 16, 1)


ROUNDS = {
    "mamba2-8": (flags("P4+8", rotate=True, buffer_len=4), 8),
    "mamba2-3": (flags("fp32", buffer_len=2), 3),
    "gdn-5": (flags("fp16", "nvfp4", buffer_len=4), 5),
    "gdn-2": (flags("P8+4", rotate=True, buffer_len=2), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_every_accepted_count_in_each_window(name: str, check, device: torch.device) -> None:
    """T + 1 rows; in each of three windows each of them keeps another number, 0 to T."""
    config, width = ROUNDS[name]
    layer = Layer(
        LayerGeometry(name.split("-")[0], 1, 16, 16, 1), config, device, width + 1, width - 1
    )
    kept = [[(i * m + s) % (width + 1) for i in range(width + 1)]
            for m, s in ((1, 0), (1, width // 2), (width, 1))]  # fmt: skip
    assert all(sorted(k) == list(range(width + 1)) for k in kept)
    steps = [([layer.rng.randint(max(k, 1), width) for k in ks], ks) for ks in kept]
    check(layer, steps, width)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_activations(small, dtype, check, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter truncates to bf16")
    config = flags("e4m3", "nvfp4", buffer_len=2)
    check(Layer(small, config, device, batch=1, drafts=3, dtype=dtype), 3)


def started(small: LayerGeometry, device: torch.device, **kw) -> Layer:
    """A layer whose rows have committed inputs, and a flush due in row 0."""
    layer = Layer(small, flags("e4m3", "nvfp4", buffer_len=4), device, **kw)
    layer.step([4, 3, 2][: layer.batch], [4, 2, 1][: layer.batch], 4)
    layer.pool.commit(layer.slots, layer.accepted)
    layer.accepted.zero_()
    return layer


def test_overflowing_drafts_stay_behind_their_tokens(small, device: torch.device) -> None:
    """Inf and NaN from token 2 on: tokens 0 and 1 keep their bits, the others are not finite."""
    layer = started(small, device, batch=2)
    count = torch.tensor([4, 4], device=device)
    rows = layer.pool.verify_rows(layer.slots, count)
    clean = layer.inputs(count, 4)
    pages = layer.pool.pages[0].clone()
    want = layer.call(layer.pool.layouts[0].views(pages.clone()), rows, clean, False)
    for poison in (float("nan"), float("inf")):
        bad = tuple(t.clone() for t in clean)
        for t in bad:
            t[:, 2] = poison
        got = layer.call(layer.pool.layouts[0].views(pages.clone()), rows, bad, False)
        assert torch.equal(got[:, :2], want[:, :2])
        assert not torch.isfinite(got[:, 2:]).any()


def test_a_tree_and_its_chains(small, device: torch.device) -> None:
    """Tokens of a tree equal the float64 reference, and one path equals the same chain."""
    layer = started(small, device, batch=2)
    parents = torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 0]], device=device)
    tree = tree_ancestors(parents)
    rows, got, want, _ = layer.step([4, 4], [0, 0], 4, tree)
    assert relative(got, want) <= bound_of(layer.config, layer.dtype)
    layer = started(small, device, batch=2)
    count = torch.tensor([4, 4], device=device)
    inputs = layer.inputs(count, 4)
    rows = layer.pool.verify_rows(layer.slots, count, tree)
    pages = layer.pool.pages[0].clone()
    got = layer.call(layer.pool.layouts[0].views(pages.clone()), rows, inputs, False)
    path = tuple(t[:, [0, 2, 3, 3]] for t in inputs)
    rows = layer.pool.verify_rows(layer.slots, torch.tensor([3, 0], device=device))
    chain = layer.call(layer.pool.layouts[0].views(pages.clone()), rows, path, False)
    torch.testing.assert_close(got[0, [0, 2, 3]], chain[0, :3], rtol=1e-4, atol=1e-5)


def test_an_accepted_path_is_moved(small, device: torch.device) -> None:
    """By the kernel as by the reference, in every byte; padding rows move nothing."""
    layer = started(small, device, batch=3)
    count = torch.tensor([4, 4, 3], device=device)
    slots = layer.slots.clone()
    slots[2] = PAD_SLOT
    rows = layer.pool.verify_rows(slots, count)
    layer.call(layer.pool.views[0], rows, layer.inputs(count, 4), False)
    paths = torch.tensor([[1, 3, -1, -1], [0, 2, 3, -1], [1, 2, -1, -1]], device=device)
    pages = [layer.pool.pages[0].clone() for _ in range(2)]
    for page, impl in zip(pages, ("reference", "triton"), strict=True):
        ops.compact(layer.pool.layouts[0].views(page), rows, paths.int(), impl=impl)
    assert torch.equal(*pages) and not torch.equal(pages[0], layer.pool.pages[0])
    with pytest.raises(ValueError, match="path is torch.int64"):
        ops.compact(layer.pool.views[0], rows, paths, impl="triton")


def test_a_row_depends_on_nothing_beside_it(small, device: torch.device) -> None:
    """Alone, or in another row beside padding, or with rows to spare: y and bytes are the same."""
    layer = started(small, device, batch=3)
    count = torch.tensor([3, 4, 2], device=device)
    inputs = layer.inputs(count, 4)
    pages = layer.pool.pages[0].clone()
    outcomes = []
    for order in ([0, 1, 2], [2, -1, 0, 1], [0]):
        picked = torch.tensor([max(i, 0) for i in order], device=device)
        slots = torch.where(torch.tensor(order, device=device) < 0, PAD_SLOT, layer.slots[picked])
        rows = layer.pool.verify_rows(slots, count[picked])
        own = layer.pool.layouts[0].views(pages.clone())
        y = layer.call(own, rows, tuple(t[picked] for t in inputs), False)
        assert not y[slots == PAD_SLOT].any()
        slot = int(layer.slots[0])
        kept = [t[slot].clone().contiguous().view(torch.uint8) for t in own.tensors().values()]
        outcomes.append((y[order.index(0)], kept))
    for y, kept in outcomes[1:]:
        assert torch.equal(y, outcomes[0][0])
        assert all(torch.equal(a, b) for a, b in zip(kept, outcomes[0][1], strict=True))


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_one_token_a_row_through_two_flushes(tiny, device: torch.device) -> None:
    """As the reference: every bit but the last output of a window, whose fold is a step late."""
    config = flags("e4m3", "nvfp4", buffer_len=2)
    ours, plain = (Layer(tiny, config, device, batch=1, drafts=1) for _ in range(2))
    one, owed = torch.ones(1, dtype=torch.int32, device=device), None
    for _ in range(5):
        inputs = ours.inputs(one, 1)
        rows = ours.pool.verify_rows(ours.slots, one)
        got = ours.call(ours.pool.views[0], rows, inputs, False)[:, 0]
        ours.pool.advance_verify(rows)
        ours.pool.commit(ours.slots, one)
        taken = plain.pool.rows(plain.slots)
        want = plain.decode(plain.pool.views[0], taken, inputs)
        plain.pool.advance(taken)
        assert bool(rows.flush) == (owed is not None)
        if owed is not None:
            assert equal(ours.stored(), owed)
        if taken.flush:
            owed = plain.stored()
            assert not equal(ours.stored(), owed)
            assert 0 < relative(got, want) < 0.3  # of a read that meets the nvfp4 copy
        else:
            owed, live = None, slice(0, int(taken.valid) + 1)
            assert torch.equal(got, want)
            assert equal(ours.stored(), plain.stored())
            for x, y in zip(ours.rings(), plain.rings(), strict=True):
                assert torch.equal(x[:, live], y[:, live])


def test_a_plain_flush_of_a_full_ring(small, device: torch.device) -> None:
    """L - 1 + T committed inputs and a plain step's own token, folded by the decode kernels."""
    layer = Layer(small, flags("fp16", "nvfp4", buffer_len=2), device, batch=1)
    for kept in (1, 4):
        layer.step([4], [kept], 4)
    layer.pool.commit(layer.slots, layer.accepted)
    rows = layer.pool.rows(layer.slots)
    assert rows.valid.tolist() == [5] and rows.flush.tolist() == [True]
    x = [t[:, 0] for t in layer.inputs(torch.tensor([1], device=device), 1)]
    pages, found = layer.pool.pages[0].clone(), []
    for impl in ("reference", "triton"):
        views = layer.pool.layouts[0].views(pages.clone())
        if small.kind == "mamba2":
            w = layer.weights
            y = ops.mamba2_decode(views, layer.config, rows, *x[:2], w["A"], *x[2:4], impl=impl)
        else:
            y = ops.gdn_decode(views, layer.config, rows, *x, impl=impl)
        found.append((y, read_checkpoint(views, layer.config, rows.slots)))
    assert relative(found[1][0], found[0][0]) < 1e-5
    assert relative(found[1][1], found[0][1]) < 4e-3


def test_a_retried_flush_writes_the_same_bytes(tiny, device: torch.device) -> None:
    """A step taken back and tried with other drafts, other T, another slot and other neighbours."""
    split = flags("e4m3", "nvfp4", buffer_len=4)
    config = split if tiny.kind == "mamba2" else flags("P4+8", buffer_len=4)
    first = Layer(tiny, config, device, batch=2, drafts=7)
    first.step([4, 1], [4, 0], 8)
    first.pool.commit(first.slots, first.accepted)
    saved, before = first.pool.save(first.slots), first.stored()
    rows, *_ = first.step([8, 1], [1, 1], 8)
    assert rows.flush.tolist() == [True, False]
    again = Layer(tiny, config, device, batch=1, drafts=7, seed=1)
    again.weights, again.slots = first.weights, (first.slots[:1] + 1) % 2
    again.pool.restore(again.slots, {k: v[:1] if k != "layout" else v for k, v in saved.items()})
    assert equal(again.stored(), before)
    again.step([3], [0], 3)
    assert equal(again.stored(), first.stored())
    assert not equal(again.stored(), before)


def test_the_checkpoint_never_sees_the_copy(device: torch.device) -> None:
    """GDN, drafts and rollbacks over several flushes, with noise for a copy before each step."""
    layer = Layer(LayerGeometry("gdn", 1, 16, 16, 1), flags("fp16", "nvfp4", buffer_len=1), device,
                  batch=1, drafts=2)  # fmt: skip
    pages, gen, seen = layer.pool.pages[0].clone(), torch.Generator().manual_seed(6), []
    noisy = layer.pool.layouts[0].views(pages)
    for count, keep in ((3, 2), (3, 1), (2, 0), (3, 3), (1, 0)):
        noisy.copy.copy_(torch.randint(-(2**31), 2**31, noisy.copy.shape, generator=gen).int())
        layer.pool.commit(layer.slots, layer.accepted)
        counts = torch.tensor([count], device=device)
        rows, inputs = layer.pool.verify_rows(layer.slots, counts), layer.inputs(counts, 3)
        y, z = (layer.call(v, rows, inputs, False) for v in (layer.pool.views[0], noisy))
        assert torch.equal(y, z) == bool(rows.flush)  # the noise was read, or a new copy
        layer.pool.advance_verify(rows)
        layer.accepted = torch.tensor([keep], device=device)
        ours, other = layer.pool.views[0].ckpt[layer.slots], noisy.ckpt[layer.slots]
        assert torch.equal(ours, other)
        seen += [ours] if rows.flush else []
    assert len(seen) >= 3 and not torch.equal(seen[0], seen[-1])


@pytest.mark.slow
def test_drift_over_64_cycles(tiny, device: torch.device) -> None:
    """Draft and rollback beside the float64 recurrence, which never rounds: state and y.

    A store takes integers of 12 bits to a neighbour: a step is 5 / 2047 of a row's RMS at most, its
    error that over sqrt(6). Errors of stores are independent, and decay takes them and the state
    alike, so their squares add up. A read of the high plane, 16 times as coarse and nearest, adds
    16 * 5 / 2047 / sqrt(12), as RMS over all tokens. (A skip term and a gate scale both alike.)
    """
    layer = Layer(tiny, flags("P8+4", buffer_len=4), device, batch=1, drafts=2)
    pool, stores, step = layer.pool, 1, 5 / 2047
    gen = torch.Generator().manual_seed(11)
    state = torch.randn(1, 1, tiny.rows, tiny.n, generator=gen).to(device).double()
    pool.write(0, layer.slots, state.float())
    ours, exact = [], []
    for _ in range(64):
        keep = layer.rng.choice((0, 1, 1, 2, 3))
        rows = pool.verify_rows(layer.slots, torch.tensor([3], device=device))
        inputs = layer.inputs(rows.count, 3)
        y = layer.call(pool.views[0], rows, inputs, False)
        stores += int(rows.flush)
        for t in range(keep):
            want, state = layer.recurrence(state, inputs, t)
            ours.append(y[:, t])
            exact.append(want)
        pool.advance_verify(rows)
        pool.commit(layer.slots, torch.tensor([keep], device=device))
        error = stores**0.5 * step / 6**0.5
        assert relative(layer.state(), state) < error
    limit = (error**2 + (16 * step) ** 2 / 12) ** 0.5
    assert stores > 16 and relative(torch.stack(ours), torch.stack(exact)) < limit


def test_offsets_beyond_32_bits(tiny, device: torch.device) -> None:
    """A slot stride of 4.4 GB: byte and word offsets of slot 3 overflow int32."""
    layer = Layer(tiny, flags("e4m3", "nvfp4", buffer_len=2), device, batch=1, drafts=2)
    layout, slot, stride = layer.pool.layouts[0], int(layer.slots[0]), 4_400_000_000 // 128 * 128
    try:
        wide = torch.empty(3 * stride + (1 << 20), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # pages are touched only where slots lie
        pytest.skip(f"no address space for a pool that large: {error}")
    far = wide.as_strided((4, layout.page_bytes), (stride, 1), 128)
    count, path = torch.tensor([3], device=device), torch.tensor([[0, 2, -1]], device=device).int()
    for flush in (False, True):
        layer.pool.commit(layer.slots, layer.accepted)
        rows, inputs = layer.pool.verify_rows(layer.slots, count), layer.inputs(count, 3)
        assert bool(rows.flush) == flush
        far[3] = layer.pool.pages[0][slot]
        there = torch.full_like(rows.slots, 3)
        moved = dataclasses.replace(
            rows, slots=there, fold_slots=torch.where(rows.flush, there, PAD_SLOT)
        )
        found = []
        for views, at in ((layer.pool.views[0], rows), (layout.views(far), moved)):
            found.append(layer.call(views, at, inputs, False))
            ops.compact(views, at, path, impl="triton")
        assert torch.equal(*found)
        assert torch.equal(far[3], layer.pool.pages[0][slot])
        layer.pool.advance_verify(rows)
        layer.accepted = torch.tensor([2], dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_blocks_of_rows_change_nothing(kind: str, device: torch.device, monkeypatch) -> None:
    """40 rows a head in one block, or in three of which the last is half empty: the same bits."""
    from replayssm_quant.kernels.common.verify import LaunchConfig
    from replayssm_quant.kernels.gdn import verify as gdn
    from replayssm_quant.kernels.mamba2 import verify as mamba2

    layer = started(LayerGeometry(kind, 1, 40, 128, 1), device, batch=1)
    count = torch.tensor([4], device=device)
    inputs = layer.inputs(count, 4)
    rows = layer.pool.verify_rows(layer.slots, count)
    pages, found = layer.pool.pages[0].clone(), []
    for block in (64, 16):
        for module in (mamba2, gdn):
            monkeypatch.setattr(module, "LAUNCH", ((1, LaunchConfig(block, 1)),))
        views = layer.pool.layouts[0].views(pages.clone())
        found.append((layer.call(views, rows, inputs, False), views.ckpt.clone()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].any()
    assert torch.equal(found[0][1], found[1][1])


class Caught:
    """Stands in for a kernel: keeps what a launch gave it."""

    def __getitem__(self, grid: object):
        return self.launch

    def launch(self, *args: object, **kwargs: object) -> None:
        self.given = kwargs


@pytest.mark.parametrize("rotate", [False, True])
def test_queries_for_matrix_units(small, rotate: bool, device: torch.device, monkeypatch) -> None:
    """What is prepared for matrix units is what is prepared for other reads, in another order."""
    from replayssm_quant.kernels.gdn import verify as gdn
    from replayssm_quant.kernels.mamba2 import verify as mamba2

    module = mamba2 if small.kind == "mamba2" else gdn
    layer = Layer(small, flags("P4+8", rotate=rotate, buffer_len=4), device, batch=2)
    layer.step([4, 3], [3, 2], 4)
    layer.pool.commit(layer.slots, layer.accepted)
    rows = layer.pool.verify_rows(layer.slots, torch.tensor([4, 2], device=device))
    inputs, pages, given = layer.inputs(rows.count, 4), layer.pool.pages[0], []
    for matrix, name in ((False, "verify_kernel"), (True, "verify_matrix_kernel")):
        caught = Caught()
        monkeypatch.setattr(module, name, caught)
        monkeypatch.setattr(module, "takes_matrix", lambda *_, m=matrix: m)
        layer.call(layer.pool.layouts[0].views(pages.clone()), rows, inputs, False)
        given.append(caught.given)
    plain, words = (g["c_ptr"] for g in given)
    halves = words.cpu().view(torch.float16).unflatten(-1, (4, 4, 8, 4, 2))  # j, plane, t, q, half
    wide = halves.permute(0, 1, 6, 3, 5, 2, 4).flatten(2, 5)
    live = torch.arange(8) < torch.tensor([4, 2])[:, None, None, None]
    torch.testing.assert_close(wide.float() * live, plain.cpu().float() * live, rtol=0, atol=1e-3)
    assert not wide[~live.expand_as(wide)].any()
    for key in ("dots_ptr", "head_ptr") if small.kind == "mamba2" else ("top_ptr",):
        torch.testing.assert_close(given[0][key], given[1][key], rtol=1e-5, atol=1e-5)


def test_packed_gdn_inputs(device: torch.device) -> None:
    """q, k, v in one buffer and raw gates: the same step as with separate tensors."""
    from replayssm_quant.kernels.gdn.reference import gates
    from replayssm_quant.kernels.gdn.verify import verify_packed, verify_step

    layer = started(SMALL["gdn"], device, batch=2)
    count = torch.tensor([4, 3], device=device)
    q, k, v, _, _ = layer.inputs(count, 4)
    gen = torch.Generator().manual_seed(2)
    a, b = (torch.randn(2, 4, 2, generator=gen).to(device) for _ in range(2))
    A_log, bias = (torch.randn(2, generator=gen).to(device) for _ in range(2))
    g, beta = gates(a, b, A_log, bias)
    rows = layer.pool.verify_rows(layer.slots, count)
    pages = [layer.pool.pages[0].clone() for _ in range(2)]
    first, second = (layer.pool.layouts[0].views(p) for p in pages)
    want = verify_step(first, layer.config, rows, q, k, v, g, beta)
    mixed = torch.cat([t.flatten(2) for t in (q, k, v)], 2)
    got = verify_packed(second, layer.config, rows, mixed, a, b, A_log, bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_refused_before_a_launch(small, device: torch.device) -> None:
    layer = started(small, device, batch=2)
    rows = layer.pool.verify_rows(layer.slots, torch.tensor([2, 2], device=device))
    inputs = layer.inputs(rows.count, 2)
    with pytest.raises(ValueError, match="has shape"):
        layer.call(layer.pool.views[0], rows, (inputs[0][:, :1], *inputs[1:]), False)
    wrong = dataclasses.replace(rows, ancestors=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="rows.ancestors"):
        layer.call(layer.pool.views[0], wrong, inputs, False)
    strided = dataclasses.replace(rows, valid=torch.zeros(4, dtype=torch.int32)[::2])
    with pytest.raises(ValueError, match="rows.valid has strides"):
        layer.call(layer.pool.views[0], strided, inputs, False)
