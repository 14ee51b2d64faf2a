"""Error of every design against float64 over tens of thousands of decode steps, by position.

``python -m replayssm_quant.kernels.bench.drift``: teacher-forced, both families, four classes of
heads from short to very long memory. Inputs are correlated in time and of low rank, as behind a
model's convolution; they are rounded to the activation dtype before anyone sees them, and the
float64 recurrence reads the same values. Errors are RMS over requests and heads of
|y - y64| / |y64|, each over the last ``CHUNK`` steps, for steps that read the copy and for steps
that flush; and of the stored checkpoint against the float64 state. y is stored in the activation
dtype, so no output error is below that rounding (1.7e-3 for bf16). Times nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._paths import drop_checkout
from ..._source import ROOT
from ...config import StateConfig
from ...formats.philox import request_key
from ...formats.rotation import unrotate
from ...state.cache import StepRows, read_checkpoint
from ...state.geometry import LayerGeometry
from ...state.layout import StateLayout
from ..gdn import reference as gdn_reference
from ..mamba2 import reference as mamba2_reference
from . import warm
from .registry import DESIGNS, Inputs, call, generator
from .run import gpu_slug, provenance, write_json

CHUNK = 256
POSITIONS = (256, 2048, 8192, 16384, 32000)
CLASSES = {
    "short": (0.1, 1.0),
    "medium": (1e-2, 0.1),
    "long": (1e-3, 1e-2),
    "very long": (1e-4, 3e-4),
}
"""Decay exponent a token of each class of heads; heads divide evenly into the classes, in order."""
GEOMETRIES = {
    "mamba2": LayerGeometry("mamba2", 16, 64, 128, 2),
    "gdn": LayerGeometry("gdn", 16, 128, 128, 8),
}


def decay_rates(heads: int, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [heads]: log-uniform within each class."""
    g = generator(seed, device)
    per = heads // len(CLASSES)
    low = torch.tensor([c[0] for c in CLASSES.values()], device=device).repeat_interleave(per)
    high = torch.tensor([c[1] for c in CLASSES.values()], device=device).repeat_interleave(per)
    return low * (high / low) ** torch.rand(heads, generator=g, device=device)


@dataclass
class Signals:
    """Inputs of one chunk after another: low-rank AR(1) latents, mixed, and passed through SiLU."""

    geometry: LayerGeometry
    batch: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    rank: int = 12
    memory: float = 0.9

    def __post_init__(self) -> None:
        self.g = generator(self.seed, self.device)
        self.rates = decay_rates(self.geometry.heads, self.seed + 1, self.device)
        self.A = -self.rates / 0.05
        self.widths = self._widths()
        self.mix = {
            name: self._normal(self.rank, *shape) * self.rank**-0.5
            for name, shape in self.widths.items()
        }
        self.mean = {name: 0.5 * self._normal(*shape) for name, shape in self.widths.items()}
        self.latent = {
            name: torch.zeros(self.batch, self.rank, device=self.device) for name in self.widths
        }
        step = torch.arange(CHUNK, device=self.device)
        lag = (step[:, None] - step[None]).float()
        self.power = torch.where(lag >= 0, self.memory**lag, 0.0)
        self.fade = self.memory ** (1.0 + step.float())
        self.buffers = self._buffers()

    def _widths(self) -> dict[str, tuple[int, int]]:
        g = self.geometry
        state, value = (g.groups, g.n), (g.heads, g.rows)
        if g.kind == "mamba2":
            return {"x": value, "B": state, "C": state}
        return {"q": state, "k": state, "v": value}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g, device=self.device)

    def _buffers(self) -> dict[str, torch.Tensor]:
        heads = (CHUNK, self.batch, self.geometry.heads)
        found = {
            name: torch.empty(CHUNK, self.batch, *shape, dtype=self.dtype, device=self.device)
            for name, shape in self.widths.items()
        }
        names = ("dt",) if self.geometry.kind == "mamba2" else ("g", "beta")
        return found | {name: torch.empty(heads, device=self.device) for name in names}

    def next_chunk(self) -> None:
        """Fill ``buffers`` with the next ``CHUNK`` steps."""
        for name, latent in self.latent.items():
            noise = self._normal(CHUNK, self.batch, self.rank) * (1 - self.memory**2) ** 0.5
            series = torch.einsum("ts,sbr->tbr", self.power, noise)
            series += self.fade[:, None, None] * latent
            latent.copy_(series[-1])
            mixed = torch.einsum("tbr,rij->tbij", series, self.mix[name]) + self.mean[name]
            mixed += 0.3 * self._normal(*mixed.shape)
            self.buffers[name].copy_(torch.nn.functional.silu(mixed))
        shape = (CHUNK, self.batch, self.geometry.heads)
        factor = torch.exp(0.3 * self._normal(*shape))
        if self.geometry.kind == "mamba2":
            self.buffers["dt"].copy_(torch.log(torch.expm1(0.05 * factor)))  # before softplus
        else:
            self.buffers["g"].copy_(-self.rates * factor)
            self.buffers["beta"].copy_(torch.sigmoid(self._normal(*shape)))

    def step(self, t: int) -> Inputs:
        """Inputs of step t of the chunk; A of Mamba-2 goes with a dt of about 0.05."""
        return Inputs({name: b[t] for name, b in self.buffers.items()}, {"A": self.A})


class Exact:
    """The plain recurrence in float64; ``state`` and ``y`` [CHUNK, b, H, R] change in place."""

    def __init__(self, signals: Signals):
        g = signals.geometry
        self.signals = signals
        shape = (signals.batch, g.heads, g.rows, g.n)
        self.state = torch.zeros(shape, dtype=torch.float64, device=signals.device)
        self.y = torch.zeros(
            CHUNK, signals.batch, g.heads, g.rows, dtype=torch.float64, device=signals.device
        )

    def step(self, t: int) -> None:
        i, g = self.signals.step(t), self.signals.geometry
        if g.kind == "mamba2":
            dt = mamba2_reference.time_step(i.dt, None, True, torch.float32).double()
            y, state = mamba2_reference.recurrent_step(
                self.state, i.x.double(), dt, i.A.double(), i.B.double(), i.C.double()
            )
        else:
            q, k = (x.double() for x in (i.q, i.k))
            q = q * gdn_reference.inverse_norm(q)[..., None] * g.n**-0.5
            k = k * gdn_reference.inverse_norm(k)[..., None]
            q, k = (x.repeat_interleave(g.heads_per_group, 1) for x in (q, k))
            y, state = gdn_reference.recurrent_step(
                self.state, q, k, i.v.double(), i.g.double()[..., None], i.beta.double()
            )
        self.state.copy_(state)
        self.y[t].copy_(y)


class Split:
    """One design's pool, stepped by the public op."""

    def __init__(self, config: StateConfig, signals: Signals, impl: str | None):
        g, self.impl, self.config, self.signals = signals.geometry, impl, config, signals
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        layout = StateLayout(g, config, names[signals.dtype])
        b, device = signals.batch, signals.device
        pages = torch.zeros(b, layout.page_bytes, dtype=torch.uint8, device=device)
        self.views = layout.views(pages)
        self.slots = torch.arange(b, device=device)
        key = torch.tensor([request_key(config.seed, r) for r in range(b)], device=device)
        self.position = torch.zeros(b, dtype=torch.int32, device=device)
        self.rows = []
        for v in range(config.buffer_len):
            valid = torch.full((b,), v, dtype=torch.int32, device=device)
            flush = torch.full((b,), v + 1 == config.buffer_len, device=device)
            self.rows.append(StepRows(self.slots, valid, flush, self.position, key))
        self.y = torch.zeros(CHUNK, b, g.heads, g.rows, dtype=signals.dtype, device=device)

    def step(self, t: int) -> None:
        self.position.add_(1)
        rows = self.rows[t % self.config.buffer_len]
        kind, inputs = self.signals.geometry.kind, self.signals.step(t)
        y = call(kind, self.views, self.config, rows, inputs, 0, self.impl, plain=True)
        self.y[t].copy_(y)

    def state(self) -> torch.Tensor:
        state = read_checkpoint(self.views, self.config, self.slots).double()
        return unrotate(state) if self.config.rotate else state


def head_errors(got: torch.Tensor, want: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """|got - want| / |want| for each head, norms over ``dims``, RMS over requests: [H]."""
    error = (got.double() - want).square().sum(dims) / want.square().sum(dims)
    return error.mean(0)


def _by_class(per_head: torch.Tensor) -> dict[str, float]:
    """RMS over all heads, and over those of each class."""
    out = {"all": float(per_head.mean().sqrt())}
    for name, part in zip(CLASSES, per_head.chunk(len(CLASSES)), strict=True):
        out[name] = float(part.mean().sqrt())
    return {k: float(f"{v:.4g}") for k, v in out.items()}


def measure(split: Split, exact: Exact) -> dict[str, dict[str, float]]:
    """Errors of a design over the chunk just taken."""
    length = split.config.buffer_len
    step = torch.arange(CHUNK, device=exact.y.device)
    flush = step % length == length - 1
    out = {"state": _by_class(head_errors(split.state(), exact.state, (2, 3)))}
    for name, rows in (("output_readout", ~flush), ("output_flush", flush)):
        if bool(rows.any()):
            got, want = split.y[rows].transpose(0, 1), exact.y[rows].transpose(0, 1)
            out[name] = _by_class(head_errors(got, want, (1, 3)))
    return out


def _runner(steps: list[Callable[[int], None]], device: torch.device) -> Callable[[], None]:
    """A function that takes ``CHUNK`` steps of everything: a CUDA graph, or a loop on the CPU."""

    def chunk() -> None:
        for t in range(CHUNK):
            for step in steps:
                step(t)

    if device.type != "cuda":
        return chunk
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        chunk()
    return graph.replay


def drift(
    kind: str,
    designs: list[str],
    positions: tuple[int, ...],
    *,
    geometry: LayerGeometry | None = None,
    batch: int = 4,
    seed: int = 0,
    device: torch.device,
    dtype: torch.dtype,
    impl: str | None = None,
) -> list[dict[str, Any]]:
    """One row a design and position: errors of state and output against float64.

    positions are multiples of ``CHUNK``, and ``CHUNK`` is a multiple of every buffer length. Raises
    ValueError otherwise.
    """
    if any(p % CHUNK or p < CHUNK for p in positions):
        raise ValueError(f"positions {positions} must be multiples of {CHUNK}")
    for name in designs:
        if CHUNK % DESIGNS[name].buffer_len:
            raise ValueError(f"{name}: {CHUNK} steps are no whole number of windows")
    signals = Signals(geometry or GEOMETRIES[kind], batch, seed, device, dtype)
    signals.next_chunk()
    exact = Exact(signals)
    splits = {name: Split(DESIGNS[name], signals, impl) for name in designs}
    if device.type == "cuda":  # run both kinds of step, on pools that are thrown away
        for name in designs:
            trial = Split(DESIGNS[name], signals, impl)
            for t in range(trial.config.buffer_len):
                trial.step(t)
        Exact(signals).step(0)
    chunk = _runner([exact.step, *(s.step for s in splits.values())], device)
    rows = []
    for position in range(CHUNK, max(positions) + 1, CHUNK):
        if position > CHUNK:
            signals.next_chunk()
        chunk()
        if position not in positions:
            continue
        for name, split in splits.items():
            errors = measure(split, exact)
            rows.append({"kind": kind, "design": name, "position": position, **errors})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: error by position, of all heads and of those with very long memory."""
    positions = sorted({r["position"] for r in rows})
    lines = ["# Drift against float64", "", *_preface(rows), ""]
    parts = (
        ("state", "checkpoint"),
        ("output_readout", "output of steps that read the copy"),
        ("output_flush", "output of steps that flush"),
    )
    for kind in dict.fromkeys(r["kind"] for r in rows):
        for part, title in parts:
            lines += [f"## {kind}: {title}, relative RMS (very-long-memory heads)", ""]
            lines.append("| design | " + " | ".join(str(p) for p in positions) + " |")
            lines.append("|---|" + "--:|" * len(positions))
            for design in dict.fromkeys(r["design"] for r in rows if r["kind"] == kind):
                cells = []
                for p in positions:
                    row = next(
                        r
                        for r in rows
                        if (r["kind"], r["design"], r["position"]) == (kind, design, p)
                    )
                    e = row.get(part)
                    cells.append("–" if e is None else f"{e['all']:.1e} ({e['very long']:.1e})")
                lines.append(f"| {design} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def _preface(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]
    return [
        f"{first['gpu']}, {first['date']}, commit {str(first['commit'] or 'unknown')[:12]}, torch "
        f"{first['torch']}, triton {first['triton']}. Generated by "
        "`python -m replayssm_quant.kernels.bench.drift`, which says what is measured.",
    ]


def main(argv: list[str] | None = None) -> int:
    drop_checkout()
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.kernels.bench.drift",
        description="Error of the state designs against float64 over 32,000 steps on a GPU.",
    )
    p.add_argument("--kind", default="mamba2,gdn", help="families separated by commas")
    p.add_argument("--design", default="all")
    p.add_argument("--positions", default=",".join(map(str, POSITIONS)))
    p.add_argument("--out", type=Path, default=ROOT / "evals" / "results")
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 2
    kinds = args.kind.split(",")
    designs = list(DESIGNS) if args.design == "all" else args.design.split(",")
    for name, known in ((kinds, GEOMETRIES), (designs, DESIGNS)):
        unknown = [n for n in name if n not in known]
        if unknown:
            raise SystemExit(f"unknown name '{unknown[0]}'; known: {', '.join(known)}")
    positions = tuple(int(t) for t in args.positions.split(","))
    common = provenance()
    tasks = [
        warm.Task(f"{kind}_decode", warm.geometry_key(GEOMETRIES[kind]), design, 4, plain=True)
        for kind in kinds
        for design in designs
    ]
    warm.compile_all(tasks)
    rows = []
    for kind in kinds:
        found = drift(kind, designs, positions, device=torch.device("cuda"), dtype=torch.bfloat16)
        rows += [{**r, **common} for r in found]
    path = args.out / f"drift-{gpu_slug(common['gpu'])}-{common['date']}.json"
    write_json(path, rows)
    text = table(rows)
    handle, name = tempfile.mkstemp(dir=args.out, prefix=".drift", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)
    os.replace(name, path.with_suffix(".md"))
    print(text)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
