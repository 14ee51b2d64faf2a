"""A Gated DeltaNet layer in the middle of a run: poisoned pool, control rows, one step's inputs."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch

from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.codec import decode, encode
from replayssm_quant.formats.philox import request_key
from replayssm_quant.kernels.gdn import reference
from replayssm_quant.state.cache import (
    PAD_SLOT,
    StepRows,
    read_checkpoint,
    read_copy,
    write_state,
)
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import StateLayout, StateViews

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RING = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
RINGS = ("ring_k", "ring_v", "ring_g", "ring_beta", "ring_rk")


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter():
    """Triton's interpreter spends a quarter of its time on overflow checks; leave them out."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    before = builder.options
    builder.options = dataclasses.replace(before, sanitize_overflow=False)
    yield
    builder.options = before


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a few rows: in separate launches, as those of many are, or ``single`` as the tables
    have them."""
    if getattr(request, "param", "separate") == "separate":
        module = pytest.importorskip("replayssm_quant.kernels.gdn.triton_ops", exc_type=ImportError)
        table = module.launch_for
        monkeypatch.setattr(
            module, "launch_for", lambda c, batch, geometry=None: table(c, max(batch, 32))
        )


@dataclass
class GdnCase:
    """One step of a layer: every byte that the step must not read is 0xFF, a NaN where it can be.

    ``rows``: a letter a row, f flushes at the end of its window, e is forced to flush early, p is
    padding, r reads. valid counts of rows that do not end a window differ. beta lies in
    (0, beta_max), log decays in (-decay, 0).
    """

    geometry: LayerGeometry
    config: StateConfig
    kinds: str = "frpe"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    decay: float = 0.2
    beta_max: float = 1.0
    layer: int = 2
    head_offset: int = 0
    extra: int = 384
    state_scale: float = 1.0

    def __post_init__(self) -> None:
        g, c, b = self.geometry, self.config, len(self.kinds)
        gen = torch.Generator().manual_seed(1000 + self.seed)
        self.layout = StateLayout(g, c, RING[self.dtype])
        self.slots = b + 2
        wide = self.layout.page_bytes + self.extra
        self.buffer = torch.full((self.slots, wide), 255, dtype=torch.uint8, device=DEVICE)
        length = c.buffer_len
        valid = [length - 1 if k == "f" else (3 * i + 1) % max(1, length - 1) for i, k in
                 enumerate(self.kinds)]  # fmt: skip
        flush = [k in "fe" or (length == 1 and k != "p") for k in self.kinds]
        slots = torch.randperm(self.slots, generator=gen)[:b]
        slots[[i for i, k in enumerate(self.kinds) if k == "p"]] = PAD_SLOT
        self.rows = StepRows(
            slots.to(DEVICE),
            torch.tensor(valid, dtype=torch.int32, device=DEVICE),
            torch.tensor(flush, device=DEVICE),
            torch.arange(b, dtype=torch.int32, device=DEVICE) * 37 + 100,
            torch.tensor([request_key(c.seed, i) for i in range(b)], device=DEVICE),
        )
        live = self.rows.take(self.rows.live)
        state = torch.randn(len(live.slots), g.heads, g.rows, g.n, generator=gen)
        self.write(self.state_scale * state)
        for slot, count in zip(slots.tolist(), valid, strict=True):
            if slot != PAD_SLOT:
                for name, value in zip(RINGS, self.window(gen, count), strict=True):
                    getattr(self.views, name)[slot, :count] = value
        self.poison()
        self.inputs = self.token(gen)

    def write(self, state: torch.Tensor) -> None:
        """Store stored-domain states [live rows, HV, V, K] into the live slots."""
        live = self.rows.take(self.rows.live)
        state = state.to(DEVICE, torch.float32)
        write_state(self.views, self.config, live.slots, state, live.key, live.position)

    def token(self, gen: torch.Generator) -> dict[str, torch.Tensor]:
        """Inputs of one step: q, k, v in the ring's dtype, g and beta in fp32."""
        g, b = self.geometry, len(self.kinds)
        q, k = torch.randn(2, b, g.groups, g.n, generator=gen).to(DEVICE, self.dtype)
        v = torch.randn(b, g.heads, g.rows, generator=gen).to(DEVICE, self.dtype)
        gate = (b, g.heads) if g.gate_width == 1 else (b, g.heads, g.gate_width)
        decay = -self.decay * torch.rand(gate, generator=gen).to(DEVICE)
        beta = self.beta_max * torch.rand(b, g.heads, generator=gen).to(DEVICE)
        return {"q": q, "k": k, "v": v, "g": decay, "beta": beta}

    def window(self, gen: torch.Generator, count: int) -> tuple[torch.Tensor, ...]:
        """``count`` ring rows: k, v, g, beta, 1 / |k|."""
        g = self.geometry
        k = torch.randn(count, g.groups, g.n, generator=gen).to(DEVICE, self.dtype)
        v = torch.randn(count, g.heads, g.rows, generator=gen).to(DEVICE, self.dtype)
        decay = -self.decay * torch.rand(count, g.heads, g.gate_width, generator=gen).to(DEVICE)
        beta = self.beta_max * torch.rand(count, g.heads, generator=gen).to(DEVICE)
        return k, v, decay, beta, reference.inverse_norm(k.float())

    def poison(self) -> None:
        """Rows that flush have no readable copy; of the others only the copy can be read."""
        live = self.rows.take(self.rows.live)
        flushing, reading = live.slots[live.flush], live.slots[~live.flush]
        for name, view in self.views.tensors().items():
            bad = float("nan") if view.is_floating_point() else -1
            bad = 255 if view.dtype == torch.uint8 else bad
            if name.startswith("copy") and self.config.has_copy:
                view[flushing] = bad
            elif name == "ckpt_low" or (name.startswith("ckpt") and self.config.has_copy):
                view[reading] = bad

    @property
    def pages(self) -> torch.Tensor:
        """A strided slice of a wider buffer, as inside an engine's page."""
        return self.buffer[:, 128 : 128 + self.layout.page_bytes]

    @property
    def views(self) -> StateViews:
        return self.layout.views(self.pages)

    def twin(self, **changes: object) -> GdnCase:
        """A copy with its own bytes."""
        other = copy.copy(self)
        other.buffer = self.buffer.clone()
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def take(self, order: list[int]) -> GdnCase:
        """The same requests in another order of rows."""
        rows = torch.tensor(order, dtype=torch.int64, device=DEVICE)
        inputs = {name: t[rows] for name, t in self.inputs.items()}
        kinds = "".join(self.kinds[i] for i in order)
        return self.twin(rows=self.rows.take(rows), inputs=inputs, kinds=kinds)

    def step(self, impl: str = "triton", **overrides: object) -> torch.Tensor:
        """Call the public op; ``overrides`` replace inputs."""
        i = {**self.inputs, **overrides}
        return ops.gdn_decode(
            self.views, self.config, self.rows, i["q"], i["k"], i["v"], i["g"], i["beta"],
            layer=self.layer, head_offset=self.head_offset, impl=impl,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """The float64 reference over the same bytes, which it updates; y in float64."""
        i = self.inputs
        return reference.decode_step(
            self.views, self.config, self.rows, i["q"].double(), i["k"].double(), i["v"].double(),
            i["g"], i["beta"], layer=self.layer, head_offset=self.head_offset,
            compute=torch.float64,
        )  # fmt: skip

    def advance(self, gen: torch.Generator) -> None:
        """Move on to the next step of every row, with new inputs."""
        r, length = self.rows, self.config.buffer_len
        valid = torch.where(r.flush, 0, r.valid + 1).to(torch.int32)
        flush = (valid + 1 == length) & (r.slots != PAD_SLOT)
        self.rows = dataclasses.replace(r, valid=valid, flush=flush, position=r.position + 1)
        self.inputs = self.token(gen)

    @property
    def flushed(self) -> torch.Tensor:
        """Slots of the live rows that flush."""
        live = self.rows.take(self.rows.live)
        return live.slots[live.flush]

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the live rows that do not flush, and where each appends its input."""
        live = self.rows.take(self.rows.live)
        return live.slots[~live.flush], live.valid[~live.flush].long()


@pytest.fixture
def gdn_case() -> type[GdnCase]:
    return GdnCase


@pytest.fixture
def gdn_check(codes_of, scales_agree, rms):
    """Take a step with Triton and with the float64 reference, and compare everything.

    y by relative RMS, apart for rows that read and rows that flush; checkpoint codes by how many
    differ, each by one step, where the scales of their blocks agree; the copy bit for bit with the
    checkpoint that the kernel itself wrote;
    the ring's new row; every other byte of the pool bit for bit.
    """

    def check(case: GdnCase, *, read: float, fold: float, flips: float, state: float) -> None:
        ours, exact = case.twin(), case.twin()
        want, got = exact.exact(), ours.step()
        assert not got[case.rows.slots == PAD_SLOT].any()
        for flush, bound in ((False, read), (True, fold)):
            at = case.rows.live[case.rows.flush[case.rows.live] == flush]
            if at.numel():
                assert torch.isfinite(got[at]).all()
                assert rms(got[at], want[at]) <= bound, f"flush {flush}"
        flushed = case.flushed
        if flushed.numel():
            stored = read_checkpoint(ours.views, case.config, flushed)
            expected = read_checkpoint(exact.views, case.config, flushed)
            if case.config.update.rounds:
                a = codes_of(ours.views, case.config, flushed)
                b = codes_of(exact.views, case.config, flushed)
                # far below a row's largest value a float's step is smaller than the sums' error
                far = (stored - expected).abs() > 2e-6 * expected.abs().amax(-1, keepdim=True)
                same = scales_agree(ours.views, exact.views, case.config, flushed, a.shape)
                assert int((~same).sum()) <= max(64, 1e-3 * a.numel())
                assert not ((a - b).abs() > 1)[far & same].any()
                assert int(((a != b) & same).sum()) <= max(2, flips * a.numel())
            assert torch.isfinite(stored).all()
            assert rms(stored, expected) <= state
            if case.config.output is not None:
                remade = decode(encode(stored, case.config.output), case.config.output)
                assert torch.equal(read_copy(ours.views, case.config, flushed), remade)
        kept, at = case.kept
        for name in RINGS:
            a, b = (getattr(c.views, name)[kept, at] for c in (ours, exact))
            if name == "ring_rk":
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
            else:
                assert torch.equal(a, b), name
        for one in (ours, exact):  # what was compared above takes the old value again
            for name, view in one.views.tensors().items():
                before = getattr(case.views, name)
                if name.startswith("ring"):
                    view[kept, at] = before[kept, at]
                else:
                    view[flushed] = before[flushed]
        assert torch.equal(ours.buffer, case.buffer)
        assert torch.equal(exact.buffer, case.buffer)

    return check
