"""A Mamba-2 layer in the middle of a run: a poisoned pool, control rows and inputs of one step."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch

from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.codec import encode
from replayssm_quant.formats.packing import from_page, to_page, unpack_nibbles
from replayssm_quant.formats.philox import request_key
from replayssm_quant.formats.spec import ELEMENTS
from replayssm_quant.kernels.mamba2 import reference
from replayssm_quant.state.cache import (
    PAD_SLOT,
    StepRows,
    read_checkpoint,
    write_state,
)
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import StateLayout, StateViews

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RING = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.double() - want.double()).square().mean().sqrt()
    return float(difference / want.double().square().mean().sqrt().clamp(min=1e-30))


@dataclass
class Mamba2Case:
    """One step of a layer: every byte that the step must not read is 0xFF, a NaN where it can be.

    Rows: the first flushes at the end of its window, the second (if any) is forced to flush early,
    the third is padding, the others read with different numbers of valid ring inputs. That is, as
    far as ``batch`` reaches and L allows.
    """

    geometry: LayerGeometry
    config: StateConfig
    batch: int = 5
    dtype: torch.dtype = torch.float32
    seed: int = 0
    scale: float = 1.0
    layer: int = 2
    head_offset: int = 0
    extra: int = 384

    def __post_init__(self) -> None:
        g, c, b = self.geometry, self.config, self.batch
        gen = torch.Generator().manual_seed(1000 + self.seed)
        self.layout = StateLayout(g, c, RING[self.dtype])
        self.slots = b + 2
        wide = self.layout.page_bytes + self.extra
        self.buffer = torch.full((self.slots, wide), 255, dtype=torch.uint8, device=DEVICE)
        length = c.buffer_len
        valid = torch.tensor([(5 * i) % max(1, length - 1) for i in range(b)], dtype=torch.int32)
        flush = torch.zeros(b, dtype=torch.bool)
        slots = torch.randperm(self.slots, generator=gen)[:b]
        valid[0], flush[0] = length - 1, True
        if b > 1:
            flush[1] = True
        if b > 2:
            slots[2] = PAD_SLOT
        if length == 1:
            flush[:] = slots != PAD_SLOT
        key = torch.tensor([request_key(c.seed, i) for i in range(b)])
        position = torch.tensor([100 + 37 * i for i in range(b)], dtype=torch.int32)
        self.rows = StepRows(*(t.to(DEVICE) for t in (slots, valid, flush, position, key)))
        live = self.rows.take(self.rows.live)
        state = self.scale * torch.randn(len(live.slots), g.heads, g.rows, g.n, generator=gen)
        write_state(self.views, c, live.slots, state.to(DEVICE), live.key, live.position)
        self._fill_rings(gen)
        self._poison(live)
        self.inputs = self._inputs(gen)

    def _inputs(self, gen: torch.Generator) -> dict[str, torch.Tensor]:
        g, b = self.geometry, self.batch

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

        return {
            "x": normal(b, g.heads, g.rows),
            "dt": normal(b, g.heads),
            "A": -torch.exp(normal(g.heads, dtype=torch.float32) - 2),
            "B": normal(b, g.groups, g.n),
            "C": normal(b, g.groups, g.n),
            "D": normal(g.heads, dtype=torch.float32),
            "z": normal(b, g.heads, g.rows),
            "dt_bias": normal(g.heads, dtype=torch.float32) - 2,
        }

    def _fill_rings(self, gen: torch.Generator) -> None:
        """Inputs in the valid part of each live ring; the rest keeps its poison."""
        views = self.views
        assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
        for slot, valid in zip(self.rows.slots.tolist(), self.rows.valid.tolist(), strict=True):
            if slot == PAD_SLOT:
                continue
            for ring in (views.ring_x, views.ring_B):
                part = ring[slot, :valid]
                part.copy_(torch.randn(part.shape, generator=gen).to(part.dtype))
            part = views.ring_dt[slot, :valid]
            part.copy_(0.3 * torch.rand(part.shape, generator=gen))

    def _poison(self, live: StepRows) -> None:
        """Rows that flush have no readable copy; of the others only the copy can be read."""
        flushing, reading = live.slots[live.flush], live.slots[~live.flush]
        for name, view in self.views.tensors().items():
            byte = view.view(torch.uint8) if view.element_size() == 1 else view
            if name.startswith("copy") and self.config.has_copy:
                byte[flushing] = _nan(byte)
            elif name == "ckpt_low" or (name.startswith("ckpt") and self.config.has_copy):
                byte[reading] = _nan(byte)

    @property
    def pages(self) -> torch.Tensor:
        return self.buffer[:, 128 : 128 + self.layout.page_bytes]

    @property
    def views(self) -> StateViews:
        return self.layout.views(self.pages)

    def twin(self, **changes: object) -> Mamba2Case:
        """A copy with its own bytes."""
        other = copy.copy(self)
        other.buffer = self.buffer.clone()
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def take(self, order: list[int]) -> Mamba2Case:
        """The same requests in another order of rows."""
        rows = torch.tensor(order, dtype=torch.int64, device=DEVICE)
        inputs = {
            name: t if name in ("A", "D", "dt_bias") else t[rows] for name, t in self.inputs.items()
        }
        return self.twin(rows=self.rows.take(rows), inputs=inputs, batch=len(order))

    def step(self, impl: str = "triton", **overrides: object) -> torch.Tensor:
        """Call the public op; ``overrides`` replace inputs."""
        i = {**self.inputs, **overrides}
        keywords = {k: i.pop(k) for k in ("D", "z", "dt_bias")}
        return ops.mamba2_decode(
            self.views,
            self.config,
            self.rows,
            *(i[k] for k in ("x", "dt", "A", "B", "C")),
            **keywords,
            dt_softplus=True,
            layer=self.layer,
            head_offset=self.head_offset,
            impl=impl,
        )

    def exact(self) -> torch.Tensor:
        """The float64 reference over the same bytes, which it updates; y in float64."""
        i = dict(self.inputs)
        wide = {k: i[k].double() for k in ("x", "B", "C", "z")}
        return reference.decode_step(
            self.views,
            self.config,
            self.rows,
            wide["x"],
            i["dt"],
            i["A"],
            wide["B"],
            wide["C"],
            D=i["D"],
            z=wide["z"],
            dt_bias=i["dt_bias"],
            dt_softplus=True,
            layer=self.layer,
            head_offset=self.head_offset,
            compute=torch.float64,
        )

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


def _nan(t: torch.Tensor) -> float | int:
    return float("nan") if t.is_floating_point() else (255 if t.dtype == torch.uint8 else -1)


def integer_codes(views: StateViews, config: StateConfig, slots: torch.Tensor) -> torch.Tensor:
    """The checkpoint of the slots as integers whose neighbours are one rounding step apart."""
    fmt, codes = config.update, views.ckpt[slots]
    if fmt.kind == "float":
        element = ELEMENTS[fmt.element]
        if codes.dtype == torch.int32:
            code = unpack_nibbles(codes)
        elif codes.element_size() == 1:
            code = from_page(codes).to(torch.int32)
        else:
            code = from_page(codes).view(torch.int16).to(torch.int32) & 0xFFFF
        top = 1 << (element.bits - 1)
        magnitude = code & (top - 1)
        return torch.where(code & top != 0, -magnitude, magnitude)

    def plane(stored: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == 4:
            return unpack_nibbles(stored) - 8
        return from_page(stored).view(torch.int8).to(torch.int32)

    code = plane(codes, fmt.bits)
    if views.ckpt_low is not None:
        code = (code << fmt.lo_bits) + plane(views.ckpt_low[slots], fmt.lo_bits)
    return code


def same_scales(
    ours: StateViews, exact: StateViews, config: StateConfig, slots: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """Where both states have the same stored scale, of ``shape``.

    An e4m3 or e8m0 scale next to a step is rounded the other way by an error of the last bit, and
    takes the codes of its whole block along. Steps of an fp32 or fp16 scale are too fine to move a
    code by more than one, which is for the bound on codes.
    """
    scale = config.update.scale
    if scale.granularity != "block" or scale.dtype not in ("e4m3", "e8m0"):
        return torch.ones(shape, dtype=torch.bool, device=slots.device)
    assert ours.ckpt_scale is not None and exact.ckpt_scale is not None
    equal = ours.ckpt_scale[slots] == exact.ckpt_scale[slots]
    return equal.repeat_interleave(shape[-1] // equal.shape[-1], -1)


def check_copy(views: StateViews, config: StateConfig, slots: torch.Tensor) -> None:
    """The stored copy has the bytes that its checkpoint asks for; an alias has them anyway."""
    if config.output is None:
        return
    enc = encode(read_checkpoint(views, config, slots), config.output)
    parts = {"copy": to_page(enc.codes), "copy_scale": enc.scale, "copy_tile_scale": enc.tile_scale}
    for name, want in parts.items():
        if want is not None:
            got = getattr(views, name)[slots].contiguous().view(torch.uint8)
            assert torch.equal(got, want.contiguous().view(torch.uint8)), name


def check_stored(
    ours: StateViews,
    exact: StateViews,
    config: StateConfig,
    slots: torch.Tensor,
    *,
    flips: float,
    state: float,
    slack: float = 1e-6,
) -> None:
    """Compare what a flush left in the slots with what the float64 fold left, same random bits.

    Checkpoint codes by the share of elements that differ (``flips``), each by one rounding step,
    both planes together; their values by relative RMS (``state``); the copy byte by byte with the
    checkpoint that the kernel itself wrote. slack: in units of a row's RMS, what an element may
    differ by whatever its step is: a float next to zero has steps below the error of fp32 sums.
    """
    stored, expected = (read_checkpoint(v, config, slots) for v in (ours, exact))
    if config.update.rounds:
        a, b = (integer_codes(v, config, slots) for v in (ours, exact))
        same = same_scales(ours, exact, config, slots, a.shape)
        assert int((~same).sum()) <= max(64, 1e-3 * a.numel())
        assert int(((a != b) & same).sum()) <= max(2, flips * a.numel())
        least = slack * expected.square().mean(-1, keepdim=True).sqrt()
        close = ((a - b).abs() <= 1) | ((stored - expected).abs() <= least)
        assert (close | ~same).all()
    assert torch.isfinite(stored).all()
    assert relative_rms(stored, expected) <= state
    check_copy(ours, config, slots)


@dataclass(frozen=True)
class Bounds:
    """What two correct implementations may differ by; the tests derive each value."""

    output: float
    flips: float
    state: float


def check_step(case: Mamba2Case, bounds: Bounds) -> None:
    """Take the step with Triton and with the float64 reference, and compare everything.

    The output by relative RMS; checkpoint codes by how many differ, each by one step; the copy bit
    for bit with the checkpoint that the kernel itself wrote; the ring's new row; every other byte
    of the pool bit for bit.
    """
    ours, exact = case.twin(), case.twin()
    want = exact.exact()
    got = ours.step()
    live = case.rows.live
    assert torch.isfinite(got[live]).all()
    assert relative_rms(got[live], want[live]) <= bounds.output
    assert not got[case.rows.slots == PAD_SLOT].any()

    flushed = case.flushed
    if flushed.numel():
        check_stored(
            ours.views, exact.views, case.config, flushed, flips=bounds.flips, state=bounds.state
        )

    kept, at = case.kept
    for name in ("ring_x", "ring_B", "ring_dt"):
        a = getattr(ours.views, name)[kept, at]
        b = getattr(exact.views, name)[kept, at]
        if name == "ring_dt":  # softplus in fp32, a few ulp by whoever computes it
            torch.testing.assert_close(a, b, rtol=5e-6, atol=1e-12)
        else:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    changed = [(kept, at)]
    for one in (ours, exact):  # what was compared above takes the old value again
        for name, view in one.views.tensors().items():
            before = getattr(case.views, name)
            if name.startswith("ring"):
                for slots, index in changed:
                    view[slots, index] = before[slots, index]
            else:
                view[flushed] = before[flushed]
    assert torch.equal(ours.buffer, case.buffer)
    assert torch.equal(exact.buffer, case.buffer)


@pytest.fixture
def mamba2_case() -> type[Mamba2Case]:
    return Mamba2Case


@pytest.fixture
def bounds() -> type[Bounds]:
    return Bounds


@pytest.fixture
def step_check():
    return check_step


@pytest.fixture
def stored_check():
    return check_stored


@pytest.fixture
def rms():
    return relative_rms


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU and Triton's interpreter."""
    return DEVICE


@pytest.fixture
def codes_of():
    return integer_codes


@pytest.fixture
def scales_agree():
    return same_scales


@pytest.fixture
def replaced():
    return dataclasses.replace
