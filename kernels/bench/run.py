"""Gate on correctness, then time: CUDA-graph replay, interleaved variants, one JSON file a run.

Every design is checked against the float64 reference first; one that is wrong is not timed, and
the run fails. A timed pass is a graph of consecutive steps over more slots than the L2 cache holds,
with the cursors of the rows out of step and advancing; passes of all variants alternate, and the
median pass counts. Bytes are those of state and ring (``registry.step_bytes``).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import replayssm_quant

from ..._source import source_commit
from ...formats.codec import decode, encode
from ...formats.packing import unpack_nibbles
from ...state.cache import StepRows, read_checkpoint, read_copy
from ...state.layout import StateViews
from . import baselines, registry, vllm_baselines
from .registry import DESIGNS, OPS, PHASES, Inputs, Op, Problem, Step

RESULTS = Path(__file__).resolve().parent / "results"


class Red(Exception):
    """A kernel's result is wrong; it may not be timed."""


# --- gate -----------------------------------------------------------------------------------------

OUTPUT_BOUND = {torch.bfloat16: 3e-3, torch.float16: 1.5e-3, torch.float32: 1e-3}
"""Relative RMS of y. Storing y in bf16 costs 1.7e-3 (at most 2**-8 a value), in fp16 2e-4; reading
a 4-bit copy through fp16 pairs costs 4e-4 (C in fp16, sums of four products), more where outputs
are small."""
FLIP_BOUND = 5e-3
"""Share of codes that may differ by rounding the other way: sums of 16 products in another order
differ by some 4e-7 of a row's largest value, and the widest codes have 2,032 steps below it."""
FP32_BOUND = 1e-5
"""Relative RMS of an fp32 checkpoint: tf32x3 or IEEE products; plain tf32 would give 5e-4."""


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS(got - want) / RMS(want) in float64; inf where ``got`` is not finite."""
    difference = got.double() - want.double()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    scale = want.double().square().mean().sqrt().clamp(min=1e-30)
    return float(difference.square().mean().sqrt() / scale)


@dataclass
class GateResult:
    """Errors of one checked step: y, share of differing codes, fp32 checkpoint."""

    output: float = 0.0
    flips: float = 0.0
    state: float = 0.0

    def worst(self, other: GateResult) -> GateResult:
        return GateResult(
            max(self.output, other.output),
            max(self.flips, other.flips),
            max(self.state, other.state),
        )


def _codes(t: torch.Tensor) -> torch.Tensor:
    """Stored codes one by one: nibbles of words, bytes, or the bits of 16-bit values."""
    if t.dtype == torch.int32:
        return unpack_nibbles(t)
    return t.view(torch.int16) if t.dtype in (torch.float16, torch.bfloat16) else t


def _flips(ours: StateViews, slots: torch.Tensor, exact: StateViews, rows: torch.Tensor) -> float:
    worst = 0.0
    for name in ("ckpt", "ckpt_low", "copy"):
        a, b = getattr(ours, name), getattr(exact, name)
        if a is not None and a.dtype != torch.float32:
            different = _codes(a[slots[rows]]) != _codes(b[rows])
            worst = max(worst, float(different.float().mean()))
    return worst


def gate_step(
    problem: Problem, step: Step, samples: int = 3, impl: str | None = None
) -> GateResult:
    """Run one step and compare a few of its rows with the float64 reference: y, stored state, ring.

    Raises Red with what differs and by how much.
    """
    batch = problem.batch
    picked = sorted({i * (batch - 1) // max(1, samples - 1) for i in range(samples)})
    flushing = step.rows.flush.nonzero()[:1, 0].tolist()
    rows = torch.tensor(sorted({*picked, *flushing}), device=problem.device)
    taken = step.rows.take(rows)
    slots = taken.slots
    pages = problem.pages[slots].clone()
    exact = problem.layout.views(pages)
    local = StepRows(
        torch.arange(len(rows), device=slots.device, dtype=slots.dtype),
        taken.valid,
        taken.flush,
        taken.position,
        taken.key,
    )
    inputs = Inputs({k: v[rows] for k, v in step.inputs.step.items()}, step.inputs.weights)
    want = registry.exact_call(problem.op.kind, exact, problem.config, local, inputs, problem.layer)
    got = problem.run(step, impl)[rows]
    result = GateResult(output=relative_rms(got, want))
    where = f"{problem.op.name}, {problem.config.label}, batch {batch}"
    if result.output > OUTPUT_BOUND[problem.dtype]:
        raise Red(
            f"{where}: y differs from float64 by {result.output:.2e} (relative RMS), more than "
            f"{OUTPUT_BOUND[problem.dtype]:.1e}; valid {taken.valid.tolist()}, flush "
            f"{taken.flush.tolist()}"
        )
    flushed = taken.flush.nonzero(as_tuple=True)[0]
    if flushed.numel():
        result.flips = _flips(problem.views, slots, exact, flushed)
        if result.flips > FLIP_BOUND:
            raise Red(
                f"{where}: {result.flips:.2%} of the codes differ, more than {FLIP_BOUND:.2%}"
            )
        config, flushed_slots = problem.config, slots[flushed]
        if config.output is not None:  # nearest even of the checkpoint that the kernel itself wrote
            checkpoint = read_checkpoint(problem.views, config, flushed_slots)
            remade = decode(encode(checkpoint, config.output), config.output)
            if not torch.equal(read_copy(problem.views, config, flushed_slots), remade):
                raise Red(f"{where}: the output copy is not the checkpoint rounded to nearest")
        if not config.update.rounds:
            result.state = relative_rms(
                read_checkpoint(problem.views, config, flushed_slots),
                read_checkpoint(exact, config, local.slots[flushed]),
            )
            if result.state > FP32_BOUND:
                raise Red(f"{where}: the fp32 checkpoint differs by {result.state:.2e}")
    kept = (~taken.flush).nonzero(as_tuple=True)[0]
    for name, ring in problem.views.tensors().items():
        if name.startswith("ring") and kept.numel():
            valid = taken.valid[kept].long()
            ours = ring[slots[kept], valid].double()
            theirs = getattr(exact, name)[local.slots[kept], valid].double()
            if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-30):
                raise Red(f"{where}: {name} of a row that does not flush is not what came in")
        elif name.startswith(("ckpt", "copy")) and kept.numel():
            same = ring[slots[kept]].view(torch.uint8) == getattr(exact, name)[kept].view(
                torch.uint8
            )
            if not bool(same.all()):
                raise Red(f"{where}: {name} of a row that does not flush changed")
    return result


def gate(problem: Problem, impl: str | None = None) -> GateResult:
    """Check one step of every phase. Raises Red."""
    result = GateResult()
    for phase in PHASES:
        if phase == "readout" and problem.config.buffer_len == 1:
            continue
        steps = problem.steps(phase)
        middle = len(steps) // 2  # a ring that is half full, also at batch 1
        result = result.worst(gate_step(problem, steps[middle], impl=impl))
    return result


# --- time -----------------------------------------------------------------------------------------


class Pass:
    """A CUDA graph of launches, with the bytes that they move."""

    def __init__(self, launches: list[tuple[Callable[[], object], float]]):
        self.launches = launches  # the graph reads tensors that nothing else holds
        self.count = len(launches)
        self.nbytes = sum(n for _, n in launches)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launches[0][0]()  # compile outside the capture
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for launch, _ in launches:
                launch()

    def replay(self) -> float:
        """Microseconds of one step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / self.count

    def gbps(self, time_us: float) -> float:
        return self.nbytes / self.count / time_us * 1e-3


def interleave(passes: dict[str, Pass], seconds: float, least: int) -> dict[str, float]:
    """Median microseconds of a step of each pass; the passes take turns."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for item in passes.values():
        item.replay()
    stop = time.monotonic() + seconds
    rounds = 0
    while rounds < least or (time.monotonic() < stop and rounds < 200):
        for name, item in passes.items():
            times[name].append(item.replay())
        rounds += 1
    return {name: statistics.median(t) for name, t in times.items()}


def copy_gbps(device: torch.device, nbytes: int = 4 << 30) -> float:
    """Device-to-device copy bandwidth in GB/s, bytes read and written both counted.

    The better of torch's copy and of a kernel that doubles fp32 numbers. A copy within a CUDA graph
    would not do: it goes to the copy engines, which reached 2.7 of 4.2 TB/s on an H200.
    """
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    item = Pass([(lambda: torch.mul(source, 2.0, out=target), 2.0 * nbytes)] * 4)
    kernel = item.gbps(interleave({"copy": item}, 0.2, 10)["copy"])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(12):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return max(kernel, 2e-6 * nbytes / statistics.median(times))


def tuned(baseline: baselines.Baseline, phase: str) -> tuple[tuple[int, ...], Pass]:
    """(best configuration, its pass) over the baseline's small grid."""
    passes: dict[str, Pass] = {}
    by_name = {str(c): c for c in baseline.configs}
    for name, config in by_name.items():
        with baseline.pinned(config):
            try:
                passes[name] = Pass(baseline.launches(phase))
            except RuntimeError as error:  # more shared memory or registers than the GPU has
                print(f"  {type(baseline).__name__} {name}: {str(error)[:100]}")
    if not passes:
        raise RuntimeError(f"no configuration of {type(baseline).__name__} runs on this GPU")
    if len(passes) == 1:
        name = next(iter(passes))
    else:
        times = interleave(passes, 0.05, 3)
        name = min(times, key=times.__getitem__)
    return by_name[name], passes[name]


def _launch_of(problem: Problem) -> dict[str, int]:
    """The launch configuration that the kernels choose for the problem."""
    from . import tune  # which imports this module

    module = tune.kernels_of(problem.op.kind)
    return dataclasses.asdict(module.launch_for(problem.config, problem.batch, problem.geometry))


def our_pass(problem: Problem, phase: str) -> Pass:
    steps = problem.steps(phase)
    return Pass([(lambda s=s: problem.run(s), s.nbytes) for s in steps])  # type: ignore[misc]


# --- rows -----------------------------------------------------------------------------------------


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def provenance(vllm: str | None = None) -> dict[str, Any]:
    """GPU, versions, commit and date, as every result row carries them."""
    commit, dirty = source_commit()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": _package("triton"),
        "vllm": vllm,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "toolkit": replayssm_quant.__version__,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def gpu_slug(gpu: str) -> str:
    """``NVIDIA H200`` -> ``h200``: a file name's part."""
    text = re.sub(r"^nvidia\s+", "", gpu.strip().lower())
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def write_json(path: Path, value: object) -> None:
    """Write through a temporary file, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.chmod(name, 0o644)
    os.replace(name, path)


def _ratio(other: float | None, ours: float) -> float | None:
    return None if other is None else round(other / ours, 4)


@dataclass
class Settings:
    """What a run covers. points: (geometry, batch) in the order measured; seconds: time spent on
    one group of alternating passes; baselines: of vLLM's, None for all."""

    op: Op
    points: list[tuple[str, int]]
    designs: list[str]
    phases: list[str]
    seconds: float = 0.6
    least: int = 10
    quick: bool = False
    compiled: bool = False
    baselines: list[str] | None = None

    @property
    def chosen_baselines(self) -> list[str]:
        return baselines.names(self.op) if self.baselines is None else self.baselines


def measure_point(
    s: Settings,
    geometry_name: str,
    batch: int,
    vllm: vllm_baselines.Baselines | None,
    copy: float,
    device: torch.device,
    common: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Gate, then time every design, phase and baseline of one geometry and batch.

    Returns the rows, and what was wrong with designs that were left out.
    """
    op, geometry = s.op, s.op.geometry(geometry_name)
    passes: dict[tuple[str, str], Pass] = {}
    notes: dict[str, Any] = {}
    gates: dict[str, GateResult] = {}
    launches: dict[str, dict[str, int]] = {}
    keep: list[object] = []  # graphs hold no reference to the tensors they write
    wrong: list[str] = []
    for design in s.designs:
        problem = Problem(op, geometry, DESIGNS[design], batch, device=device)
        try:
            gates[design] = gate(problem)
        except Red as red:
            wrong.append(f"{geometry_name}, {design}: {red}")
            print(f"RED {wrong[-1]}; it is not timed", flush=True)
            continue
        keep.append(problem)
        launches[design] = _launch_of(problem)
        for phase in s.phases:
            passes[design, phase] = our_pass(problem, phase)
    if vllm is not None:
        for name in s.chosen_baselines:
            baseline = baselines.make(name, vllm, op, geometry, batch, device)
            keep.append(baseline)
            config, best = tuned(baseline, "mix")
            notes[name] = list(config)
            if name.startswith("native"):
                passes[name, "mix"] = best
                continue
            with baseline.pinned(config):
                for phase in s.phases:
                    passes[name, phase] = best if phase == "mix" else Pass(baseline.launches(phase))
    times: dict[tuple[str, str], float] = {}
    for phase in s.phases:
        group = {n: p for (n, ph), p in passes.items() if ph == phase}
        for name, value in interleave(group, s.seconds, s.least).items():
            times[name, phase] = value
    if "mix" not in s.phases:
        group = {n: p for (n, ph), p in passes.items() if ph == "mix"}
        for name, value in interleave(group, s.seconds, s.least).items():
            times[name, "mix"] = value
    narrow = f"native-{op.natives[1]}"
    out = []
    for (name, phase), time_us in sorted(times.items()):
        p = passes[name, phase]
        row = {
            "op": op.name,
            "geometry": geometry_name,
            "batch": batch,
            "design": name if name in DESIGNS else f"vllm-{name}",
            "phase": phase,
            "time_us": round(time_us, 3),
            "gbps": round(p.gbps(time_us), 1),
            "copy_fraction": round(p.gbps(time_us) / copy, 4),
            "ratio_native_fp32": _ratio(times.get(("native-fp32", "mix")), time_us),
            "ratio_native_fp16": _ratio(times.get((narrow, "mix")), time_us),
            "ratio_upstream_replay_fp32": _ratio(times.get(("replay-fp32", phase)), time_us),
            "native_16bit": op.natives[1],
            "buffer_len": registry.BUFFER_LEN,
            "copy_gbps": round(copy, 1),
        }
        if name in notes:
            row["launch"] = notes[name]
        if name in gates:
            row["launch"] = launches[name]
            row["output_error"] = float(f"{gates[name].output:.3g}")
            row["code_flips"] = float(f"{gates[name].flips:.3g}")
        out.append({**row, **common})
    return out, wrong


def _line(row: dict[str, Any]) -> str:
    def show(value: float | None) -> str:
        return "    -" if value is None else f"{value:5.2f}"

    return (
        f"{row['geometry']:14s} {row['batch']:4d} {row['design']:18s} {row['phase']:8s}"
        f"{row['time_us']:10.1f} us {row['gbps']:7.0f} GB/s {row['copy_fraction']:5.2f}  "
        f"{show(row['ratio_native_fp32'])} {show(row['ratio_native_fp16'])} "
        f"{show(row['ratio_upstream_replay_fp32'])}"
    )


def compile_ahead(s: Settings, vllm_path: str | None) -> None:
    """Compile in parallel what the run will launch; prints what failed (the run meets it again)."""
    from . import warm  # which imports this module

    names = list(s.designs)
    if vllm_path is not None:
        names += [f"vllm-{name}" for name in s.chosen_baselines]
    tasks = warm.tasks_of(s.op, s.points, names)
    for task, error in warm.compile_all(tasks, vllm_path).items():
        print(f"  {task.design}, batch {task.batch}: {error[:120]}")


def run(
    s: Settings, vllm_path: str | None, out: Path, device: torch.device
) -> tuple[Path, list[str]]:
    """Measure everything in ``s``: the result file, rewritten after every point, and what was
    wrong."""
    vllm = None if vllm_path is None else vllm_baselines.load(vllm_path)
    common = provenance(None if vllm is None else vllm.version)
    copy = copy_gbps(device)
    print(
        f"{common['gpu']}, torch {common['torch']}, triton {common['triton']}, copy {copy:.0f} GB/s"
    )
    print("columns: time, bandwidth, share of copy, x native fp32, x native 16-bit, x replay fp32")
    path = out / f"{s.op.name}-{gpu_slug(common['gpu'])}-{common['date']}.json"
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    if not s.compiled:
        began = time.monotonic()
        compile_ahead(s, vllm_path)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for geometry, batch in s.points:
        began = time.monotonic()
        found, red = measure_point(s, geometry, batch, vllm, copy, device, common)
        rows += found
        wrong += red
        write_json(path, rows)
        for row in found:
            print(_line(row))
        print(f"  {time.monotonic() - began:.1f} s", flush=True)
        torch.cuda.empty_cache()
    return path, wrong


def check_only(s: Settings, device: torch.device, impl: str | None = None) -> bool:
    """Gate every geometry, batch and design; prints one line each. True if all are right."""
    good = True
    for geometry, batch in s.points:
        for design in s.designs:
            label = f"{geometry} batch {batch} {design}"
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            problem = Problem(
                s.op,
                s.op.geometry(geometry),
                DESIGNS[design],
                batch,
                device=device,
                dtype=dtype,
                sets=1,
            )
            try:
                r = gate(problem, impl)
            except Red as red:
                good = False
                print(f"RED   {label}: {red}", flush=True)
                continue
            print(
                f"green {label}: y {r.output:.1e}, codes {r.flips:.1e}, fp32 {r.state:.1e}",
                flush=True,
            )
    return good


# --- command --------------------------------------------------------------------------------------


def _names(text: str, known: list[str], what: str) -> list[str]:
    names = [t.strip() for t in text.split(",") if t.strip()]
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown {what} '{name}'; known: {', '.join(known)}")
    return names


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.kernels.bench",
        description="Check the decode kernels against float64, then time them (CUDA-graph replay).",
    )
    p.add_argument("--op", choices=sorted(OPS), default="mamba2_decode")
    p.add_argument("--geometry", default="all", help="names separated by commas, or all")
    p.add_argument("--batch", default=",".join(map(str, registry.BATCHES)))
    p.add_argument("--points", help="instead of both: geometry:batch,..., measured in this order")
    p.add_argument("--design", default="all", help="names separated by commas, or all")
    p.add_argument("--phase", default=",".join(PHASES))
    p.add_argument("--baseline", default="all", help="vLLM's, names separated by commas, or all")
    p.add_argument("--vllm-path", help="vLLM's wheel or the folder that holds vllm/: baselines")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    p.add_argument("--quick", action="store_true", help="less time a measurement")
    p.add_argument("--check-only", action="store_true", help="the correctness gate, no timing")
    p.add_argument("--tune", action="store_true", help="try launch configurations, print the best")
    p.add_argument(
        "--launch", action="append", help="with --tune: field=value,... instead of the grid"
    )
    p.add_argument(
        "--variants", type=Path, help="with --tune: a file of such lines, all compiled at once"
    )
    p.add_argument("--compiled", action="store_true", help="do not compile ahead in parallel")
    p.add_argument("--save", type=Path, help="with --tune: a JSON file for the best launches")
    p.add_argument("--launches", type=Path, help="such a file: launch the designs as it says")
    p.add_argument("--report", action="store_true", help="RESULTS.md and plots from --out")
    p.add_argument("--impl", choices=("reference", "triton"), help="for --check-only")
    p.add_argument("--device", help="for --check-only; CUDA where there is one")
    return p


def _point(text: str, op: Op) -> tuple[str, int]:
    """``super:256`` -> (super, 256)."""
    name, _, batch = text.strip().partition(":")
    _names(name, list(op.geometries), f"geometry of {op.name}")
    if not name or not batch.isdigit():
        raise SystemExit(f"--points '{text}': give geometry:batch, such as {op.default}:256")
    return name, int(batch)


def settings(args: argparse.Namespace) -> Settings:
    op = OPS[args.op]
    geometries = list(op.geometries)
    if args.geometry != "all":
        geometries = _names(args.geometry, geometries, f"geometry of {op.name}")
    designs = list(op.designs)
    if args.design != "all":
        designs = _names(args.design, designs, "design")
    try:
        batches = [int(t) for t in args.batch.split(",")]
    except ValueError:
        raise SystemExit(f"--batch '{args.batch}': give whole numbers, such as 1,8,256") from None
    points = [(g, b) for g in geometries for b in batches]
    if args.points:
        points = [_point(text, op) for text in args.points.split(",")]
    for _, batch in points:
        if batch < 1:
            raise SystemExit(f"batch {batch}: a batch has at least one row")
    s = Settings(op, points, designs, _names(args.phase, list(PHASES), "phase"))
    if args.baseline != "all":
        s.baselines = _names(args.baseline, baselines.names(op), "baseline")
    if args.quick:
        s.seconds, s.least, s.quick = 0.15, 5, True
    s.compiled = args.compiled
    return s


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.report:
        from . import report

        for path in report.write(args.out):
            print(path)
        return 0
    s = settings(args)
    cuda = torch.cuda.is_available()
    device = torch.device(args.device or ("cuda" if cuda else "cpu"))
    if args.check_only:
        return 0 if check_only(s, device, args.impl) else 1
    if not cuda:
        print(
            "timing needs a CUDA GPU and torch sees none; --check-only works without",
            file=sys.stderr,
        )
        return 2
    if args.tune:
        from . import tune

        given = list(args.launch or ())
        if args.variants is not None:
            given += tune.read_variants(args.variants)
        tune.run(s, device, given or None, args.save)
        return 0
    from . import tune

    with tune.launches_from(args.launches):
        path, wrong = run(s, args.vllm_path, args.out, device)
    for text in wrong:
        print(f"RED {text}; it was not timed", file=sys.stderr)
    print(path)
    return 1 if wrong else 0
