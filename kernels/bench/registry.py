"""What is timed: operations, geometries, designs, and their inputs, each stated once.

A ``Problem`` is one (geometry, design, batch): a pool larger than the L2 cache, shuffled slots, and
for every step of a phase the rows and inputs of one launch. Everything is made on the device from a
seed, before any timing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from ... import ops
from ...config import StateConfig
from ...state.cache import StepRows, write_state
from ...state.geometry import LayerGeometry
from ...state.layout import StateLayout, StateViews
from ..gdn import reference as gdn_reference
from ..mamba2 import reference as mamba2_reference

PHASES = ("readout", "flush", "mix")
BATCHES = (1, 8, 32, 64, 128, 256, 512)
BUFFER_LEN = 16


def _config(update: str, output: str | None = None, **kwargs: object) -> StateConfig:
    return StateConfig.from_flags(update, output, buffer_len=BUFFER_LEN, **kwargs)  # type: ignore[arg-type]


DESIGNS: dict[str, StateConfig] = {
    "nvfp4+fp16-sr": _config("fp16", "nvfp4"),
    "nvfp4+fp16-rn": _config("fp16", "nvfp4", rounding="rn"),
    "nvfp4+e4m3-sr": _config("e4m3", "nvfp4"),
    "P4+8-sr-rot": _config("P4+8", rotate=True),
    "P4+4-sr-rot": _config("P4+4", rotate=True),
    "P8+4-sr-rot": _config("P8+4", rotate=True),
    "e4m3+fp16-sr": _config("fp16", "e4m3"),
    "fp16-sr": _config("fp16", "same"),
    "int8-sr-rot": _config("int8", "same", rotate=True),
    "e4m3-sr": _config("e4m3", "same"),
    "fp32": _config("fp32"),
}
"""Name -> config; ``a+b`` is copy a beside checkpoint b, a single format is one shared state."""


@dataclass(frozen=True)
class Op:
    """One operation: its state family, geometries by name, and the one measured by default."""

    name: str
    kind: str
    geometries: dict[str, LayerGeometry]
    default: str
    designs: tuple[str, ...]
    natives: tuple[str, ...]

    def geometry(self, name: str) -> LayerGeometry:
        """Raises ValueError for an unknown name."""
        if name not in self.geometries:
            raise ValueError(
                f"unknown geometry '{name}' of {self.name}; known: {', '.join(self.geometries)}"
            )
        return self.geometries[name]


def _mamba2(heads: int, rows: int, n: int, groups: int) -> LayerGeometry:
    return LayerGeometry("mamba2", heads, rows, n, groups)


def _gdn(key_heads: int, heads: int, k: int, v: int) -> LayerGeometry:
    return LayerGeometry("gdn", heads, v, k, key_heads)


LEAKY = "qwen3.5-4b-leaky"
"""No Mamba-2 model: qwen3.5-4b's state under a fold without a solve. It is what a Gated DeltaNet
flush would cost that keeps each step's correction, as read from the output copy, and so folds the
copy's error into the checkpoint (kernels/README.md)."""

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "mamba2_decode",
            "mamba2",
            {
                "super": _mamba2(128, 64, 128, 8),  # Nemotron-3-Super-120B-A12B
                "nano-4b": _mamba2(96, 80, 128, 8),  # Nemotron-3-Nano-4B
                "nano-30b": _mamba2(64, 64, 128, 8),  # Nemotron-3-Nano-30B-A3B
                "falcon-h1-7b": _mamba2(24, 128, 256, 1),
                LEAKY: _mamba2(32, 128, 128, 16),
            },
            "super",
            tuple(DESIGNS),
            ("fp32", "fp16"),
        ),
        Op(
            "gdn_decode",
            "gdn",
            {
                "qwen3.5-4b": _gdn(16, 32, 128, 128),
                "qwen3.5-122b": _gdn(16, 64, 128, 128),
                "qwen3.6-27b": _gdn(16, 48, 128, 128),
                "olmo-hybrid-7b": _gdn(30, 30, 96, 192),
            },
            "qwen3.5-4b",
            tuple(DESIGNS),
            ("fp32", "bf16"),
        ),
    )
}


@dataclass(frozen=True)
class Inputs:
    """One step's inputs: what varies by step, and the layer's weights (the same for every step).

    Mamba-2: x, dt (raw), B, C and A, D, dt_bias. GDN: mixed_qkv with its slices q, k, v, the raw
    projections a, b with A_log, dt_bias, and the gates g, beta that follow from them.
    """

    step: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def __getattr__(self, name: str) -> torch.Tensor:
        for group in (self.step, self.weights):
            if name in group:
                return group[name]
        raise AttributeError(name)


def generator(seed: int, device: torch.device | str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _uniform(
    g: torch.Generator, low: float, high: float, *shape: int, device: torch.device
) -> torch.Tensor:
    return low + (high - low) * torch.rand(*shape, generator=g, device=device)


def make_weights(geometry: LayerGeometry, seed: int, device: torch.device) -> dict:
    """Per-head constants, with time constants from a few tokens to tens of thousands."""
    g, h = generator(seed, device), geometry.heads
    rate = torch.exp(_uniform(g, math.log(1e-5), math.log(0.5), h, device=device))
    if geometry.kind == "mamba2":
        step = torch.exp(_uniform(g, math.log(1e-3), math.log(0.1), h, device=device))
        return {
            "A": -(rate / step),
            "D": torch.randn(h, generator=g, device=device),
            "dt_bias": torch.log(torch.expm1(step)),  # softplus(dt_bias) = step
        }
    return {"A_log": torch.log(rate), "dt_bias": torch.full((h,), 0.5413, device=device)}


def make_step(
    geometry: LayerGeometry,
    batch: int,
    weights: dict[str, torch.Tensor],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    """Random inputs of one step, activations in ``dtype``."""
    g = generator(seed, device)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=g, device=device)).to(dtype)

    h, p, n, groups = geometry.heads, geometry.rows, geometry.n, geometry.groups
    if geometry.kind == "mamba2":
        step = {
            "x": normal(batch, h, p),
            "dt": normal(batch, h, scale=0.3),
            "B": normal(batch, groups, n),
            "C": normal(batch, groups, n),
        }
        return Inputs(step, weights)
    keys = groups * n
    mixed = normal(batch, 2 * keys + h * p)
    a, b = normal(batch, h, scale=0.3), normal(batch, h)
    decay, beta = gdn_reference.gates(a, b, weights["A_log"], weights["dt_bias"])
    step = {
        "mixed_qkv": mixed,
        "q": mixed[:, :keys].view(batch, groups, n),
        "k": mixed[:, keys : 2 * keys].view(batch, groups, n),
        "v": mixed[:, 2 * keys :].view(batch, h, p),
        "a": a,
        "b": b,
        "g": decay,
        "beta": beta,
    }
    return Inputs(step, weights)


def random_state(
    geometry: LayerGeometry, count: int, seed: int, device: torch.device
) -> torch.Tensor:
    """fp32 states [count, H, R, N] whose rows differ in size by two orders of magnitude."""
    g = generator(seed, device)
    shape = (count, geometry.heads, geometry.rows, geometry.n)
    size = torch.exp(_uniform(g, -3.0, 2.0, *shape[:3], 1, device=device))
    return size * torch.randn(*shape, generator=g, device=device)


def sets_needed(bytes_per_set: float, device: torch.device, factor: float = 3.0) -> int:
    """How many disjoint sets of slots one pass must rotate among to outgrow the L2 cache."""
    cache = 8 << 20
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(factor * cache / bytes_per_set))


def slot_sets(batch: int, sets: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Disjoint sets of ``batch`` shuffled slots, slot 0 left out (vLLM's null block)."""
    g = torch.Generator().manual_seed(seed)
    order = 1 + torch.randperm(batch * sets, generator=g)
    return [order[i * batch : (i + 1) * batch].to(device) for i in range(sets)]


def phase_rows(phase: str, step: int, batch: int, length: int) -> tuple[list[int], list[bool]]:
    """(valid, flush) of every row at one step: rows are out of step with each other, as served.

    readout: no row flushes; flush: all do; mix: 1 / length of them. Consecutive steps advance the
    cursors. Raises ValueError for a readout where every step flushes (length 1).
    """
    if phase == "flush":
        return [length - 1] * batch, [True] * batch
    if phase == "readout":
        if length == 1:
            raise ValueError("buffer_len 1 flushes every step: it has no readout phase")
        return [(i + step) % (length - 1) for i in range(batch)], [False] * batch
    if phase != "mix":
        raise ValueError(f"unknown phase '{phase}'; use {', '.join(PHASES)}")
    valid = [(i + step) % length for i in range(batch)]
    return valid, [v == length - 1 for v in valid]


def phase_steps(phase: str, length: int, sets: int) -> int:
    """Steps of one timed pass: every phase of the window, and every set of slots."""
    if phase == "flush":
        return max(4, sets)
    period = length if phase == "mix" else max(1, length - 1)
    return period * max(1, math.ceil(sets / period))


def step_bytes(layout: StateLayout, valid: list[int], flush: list[bool]) -> float:
    """Bytes of state and ring that one step moves; inputs and outputs are not counted.

    A readout loads the copy and its scales and the valid ring rows and writes one ring row; a flush
    loads checkpoint and ring and writes checkpoint and copy.
    """
    g, c = layout.geometry, layout.config
    readout = c.readout.readout_bytes(g.heads, g.rows, g.n)
    total = 0.0
    for n, f in zip(valid, flush, strict=True):
        total += layout.ring_row_bytes * (n if f else n + 1)
        total += 2 * layout.checkpoint_bytes + layout.copy_bytes if f else readout
    return total


@dataclass
class Step:
    """One launch: its rows, its inputs, and the bytes it must move."""

    rows: StepRows
    inputs: Inputs
    nbytes: float


@dataclass
class Problem:
    """A pool, and what each step of a phase is called with. ``dtype`` is that of activations."""

    op: Op
    geometry: LayerGeometry
    config: StateConfig
    batch: int
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    sets: int = 0
    layer: int = 3

    def __post_init__(self) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        self.layout = StateLayout(self.geometry, self.config, names[self.dtype])
        per_step = self.batch * self.layout.bytes_per_step
        self.sets = self.sets or sets_needed(per_step, self.device)
        self.slots = slot_sets(self.batch, self.sets, self.seed, self.device)
        count = self.batch * self.sets + 1
        self.pages = torch.zeros(
            count, self.layout.page_bytes, dtype=torch.uint8, device=self.device
        )
        self.views = self.layout.views(self.pages)
        self.weights = make_weights(self.geometry, self.seed, self.device)
        self.inputs = [
            make_step(
                self.geometry, self.batch, self.weights, self.seed + 1 + i, self.device, self.dtype
            )
            for i in range(min(self.sets, 4))
        ]
        self.key = torch.randint(
            -(2**63),
            2**63 - 1,
            (count,),
            generator=generator(self.seed, self.device),
            device=self.device,
        )
        self._fill(count)

    def _fill(self, count: int) -> None:
        """Random states and full rings in every slot; beyond 256 MiB of fp32 states they repeat."""
        nearest = dataclasses.replace(self.config, rounding="rn")
        some = min(count, max(1, (256 << 20) // (4 * self.geometry.elements)))
        slots = torch.arange(some, device=self.device)
        state = random_state(self.geometry, some, self.seed, self.device)
        write_state(self.views, nearest, slots, state, self.key[slots], slots.int())
        g = generator(self.seed + 7, self.device)
        for name, ring in self.views.tensors().items():
            if not name.startswith("ring"):
                continue
            low, high = {
                "ring_dt": (1e-3, 0.1),
                "ring_g": (-0.1, -1e-4),
                "ring_beta": (0.05, 0.95),
            }.get(name, (0.0, 0.0))
            part = ring[:some]
            if name == "ring_rk":
                assert self.views.ring_k is not None
                part.copy_(gdn_reference.inverse_norm(self.views.ring_k[:some].float()))
            elif high != low:
                part.copy_(_uniform(g, low, high, *part.shape, device=self.device))
            else:
                part.copy_(torch.randn(part.shape, generator=g, device=self.device))
        for start in range(some, count, some):
            self.pages[start : start + some] = self.pages[: min(some, count - start)]

    def rows(self, slots: torch.Tensor, valid: list[int], flush: list[bool]) -> StepRows:
        v = torch.tensor(valid, dtype=torch.int32, device=self.device)
        f = torch.tensor(flush, dtype=torch.bool, device=self.device)
        return StepRows(slots, v, f, v + 1001, self.key[slots])

    def steps(self, phase: str) -> list[Step]:
        """Every launch of one timed pass."""
        length = self.config.buffer_len
        out = []
        for i in range(phase_steps(phase, length, self.sets)):
            valid, flush = phase_rows(phase, i, self.batch, length)
            rows = self.rows(self.slots[i % self.sets], valid, flush)
            nbytes = step_bytes(self.layout, valid, flush)
            out.append(Step(rows, self.inputs[i % len(self.inputs)], nbytes))
        return out

    def run(self, step: Step, impl: str | None = None) -> torch.Tensor:
        """One launch of our kernels (``impl`` as in ``ops``); updates the pool."""
        return call(self.op.kind, self.views, self.config, step.rows, step.inputs, self.layer, impl)


def call(
    kind: str,
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    inputs: Inputs,
    layer: int,
    impl: str | None = None,
    plain: bool = False,
) -> torch.Tensor:
    """The public operation on these inputs; GDN's packed, as vLLM's baseline takes them.

    ``plain`` leaves out D and the bias of dt, and takes q, k, v, g and beta instead of packed ones.
    """
    i = inputs
    if kind == "mamba2":
        return ops.mamba2_decode(
            views,
            config,
            rows,
            i.x,
            i.dt,
            i.A,
            i.B,
            i.C,
            D=None if plain else i.D,
            dt_bias=None if plain else i.dt_bias,
            dt_softplus=True,
            layer=layer,
            impl=impl,
        )
    if plain:
        apart = (i.q, i.k, i.v, i.g, i.beta)
        return ops.gdn_decode(views, config, rows, *apart, layer=layer, impl=impl)
    packed = (i.mixed_qkv, i.a, i.b, i.A_log, i.dt_bias)
    return ops.gdn_decode_packed(views, config, rows, *packed, layer=layer, impl=impl)


def exact_call(
    kind: str,
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    inputs: Inputs,
    layer: int,
) -> torch.Tensor:
    """The torch reference in float64 over the same stored bytes."""
    i = inputs
    if kind == "mamba2":
        return mamba2_reference.decode_step(
            views,
            config,
            rows,
            i.x.double(),
            i.dt.double(),
            i.A,
            i.B.double(),
            i.C.double(),
            D=i.D,
            dt_bias=i.dt_bias,
            dt_softplus=True,
            layer=layer,
            compute=torch.float64,
        )
    return gdn_reference.decode_step(
        views,
        config,
        rows,
        i.q.double(),
        i.k.double(),
        i.v.double(),
        i.g,
        i.beta,
        layer=layer,
        compute=torch.float64,
    )
