"""Whole matrices of state formats, on the shipped models or on any other, within a time limit.

    python -m replayssm_quant.evals.matrix formats --out out/formats
    python -m replayssm_quant.evals.matrix long --model FOLDER --device cuda --out out/long
    python -m replayssm_quant.evals.matrix layers --out out/layers

``formats``: published pairs, one standard state, planar states, each rounded to nearest and
stochastically, with L = 8, 16 and 32. ``long``: recipes and shared states to 32,768 tokens.
``free``: responses that end by themselves, how long they are and where they first differ.
``layers``: one layer at a time in each format, the others in fp32. Tasks and arms that are not
finished when the time is up are left out of the result.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import models
from .._paths import drop_checkout
from ..config import StateConfig
from ..state.geometry import ModelGeometry, read_geometry
from . import gates, report, runner
from .arms import Arm, arm, parse_arm, reference_arms, slug, unique
from .files import write_text
from .schema import Role, RunRecord
from .store import UnitStore
from .suite import Suite, TaskSpec

PUBLISHED = ("fp16:nvfp4", "fp8:nvfp4")
STANDARD = (
    "fp16:same",
    "bf16:same",
    "fp8:same",
    "int8:same",
    "int8:same:rot",
    "nvfp4:same",
    "mxfp4:same",
)
PLANAR = ("P8+4", "P8+4:rot", "P4+8", "P4+8:rot", "P4+4", "P4+4:rot")
PER_STEP = ("e4m3/none:same:rn@1", "fp8:same:rn@1", "int8:same:rn@1", "nvfp4:same:rn@1")
LENGTHS = (16, 8, 32)

LONG = (
    "P8+4:rot",
    "P4+8:rot",
    "P4+4:rot",
    "fp16:nvfp4",
    "fp8:nvfp4",
    "fp8:same",
    "int8:same:rot",
    "fp8:nvfp4:rn",
    "fp8:same:rn",
    "fp16:same",
    "nvfp4:same",
    "bf16:same:rn@1",
    "fp8:same:rn@1",
)
FREE = (
    "P8+4:rot",
    "P4+8:rot",
    "fp16:nvfp4",
    "P4+4:rot",
    "fp8:nvfp4",
    "fp8:same",
    "nvfp4:same",
    "fp8:same:rn@1",
    "int8:same:rot",
    "fp16:same",
    "bf16:same:rn@1",
    "fp8:nvfp4:rn",
    "fp8:same:rn",
)
LAYER = (
    "fp16:nvfp4",
    "fp8:nvfp4",
    "fp8:same",
    "int8:same:rot",
    "nvfp4:same",
    "P4+8:rot",
    "P8+4:rot",
)

TASKS: dict[str, tuple[TaskSpec, ...]] = {
    "formats": (
        TaskSpec(task="count", documents=48),
        TaskSpec(task="recall", documents=24),
        TaskSpec(task="text", documents=24),
    ),
    "layers": (TaskSpec(task="count", documents=24), TaskSpec(task="text", documents=24)),
    "long": (
        TaskSpec(task="text", label="text-32k", documents=8, settings={"length": 32768}),
        TaskSpec(
            task="count",
            label="count-16k",
            documents=16,
            # about 170 events and 255 questions between fillers
            settings={"length": 16384, "p_query": 0.0156, "p_fill": [0.974, 0.974]},
        ),
        TaskSpec(
            task="recall",
            label="recall-16k",
            documents=8,
            # operations fill about 0.57 of the length: 16,400 updates
            settings={"length": 28672, "p_read": 0.06, "p_fill": 0.85},
        ),
        TaskSpec(task="count", label="count-512", documents=48),
        TaskSpec(task="tally", label="tally-free", documents=32, settings={"length": 640}),
    ),
    "free": (
        TaskSpec(
            task="write",
            documents=192,
            threshold=0.0,
            margin=0.05,
            settings={"length": 128, "limit": 512, "paragraphs": 2},
        ),
        TaskSpec(
            task="tally",
            label="tally-end",
            documents=192,
            settings={"length": 448, "decode": None, "whole": True},
        ),
    ),
}


class TimeUp(Exception):
    """The time limit has passed."""


def _role(config: StateConfig) -> Role:
    return "shared" if config.is_shared else "candidate"


def format_arms() -> list[Arm]:
    """Every format x rounding x L, most wanted first, and states rounded at every step."""
    texts = [
        f"{text}:{rounding}@{length}"
        for length in LENGTHS
        for rounding in ("sr", "rn")
        for text in (*PUBLISHED, *STANDARD, *PLANAR)
    ]
    return _arms([*texts[:15], *PER_STEP, *texts[15:]])


def _arms(texts: Sequence[str]) -> list[Arm]:
    configs = [parse_arm(t) for t in texts]
    return unique(arm(_role(c), c) for c in configs)


def layer_arms(geometry: ModelGeometry) -> list[Arm]:
    """One layer at a time in each format of ``LAYER``, every other layer in fp32."""
    out = []
    for text in LAYER:
        config = parse_arm(text)
        for index in geometry.layers:
            name = f"layer{index}_{slug(config)}"
            out.append(Arm(name, _role(config), config, {index: config}))
    return out


def arms_of(kind: str, geometry: ModelGeometry, batch_size: int) -> list[Arm]:
    """Reference, floor and the arms of a matrix on one model, without those that do not fit it."""
    known = {"formats": format_arms, "long": lambda: _arms(LONG), "free": lambda: _arms(FREE)}
    chosen = known.get(kind)
    arms = layer_arms(geometry) if chosen is None else chosen()

    def fits(one: Arm) -> bool:
        try:
            one.check(geometry)
        except ValueError:
            return False
        return True

    return [*reference_arms(batch_size), *filter(fits, arms)]


def _finished(store: UnitStore, plan: runner.Plan, model: str, one: Arm) -> bool:
    """True if every unit of an arm is on disk."""
    seeds = plan.request.seeds if one.rounds else plan.request.seeds[:1]
    return all(
        store.path(model, task.name, one.name, seed).is_file()
        for task in plan.tasks
        for seed in seeds
    )


def measure(plan: runner.Plan, folder: Path, until: float | None = None) -> RunRecord:
    """Run a plan in this process; past ``until`` (epoch) only arms that are complete are kept.

    Raises ValueError as ``runner.run`` does, and where not even the reference was finished.
    """
    began = time.perf_counter()
    store = UnitStore(folder)

    def tick(n: int) -> None:
        if until is not None and time.time() > until:
            raise TimeUp

    def ring(*_: Any) -> None:
        raise TimeUp

    def outcomes(seen: Any) -> list[Any]:
        return [runner.run_model(plan, i, folder, seen) for i in range(len(plan.request.models))]

    alarm = until is not None and threading.current_thread() is threading.main_thread()
    if alarm:  # one batch of an arm that rounds at every token may take minutes
        old = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(until - time.time(), 0.01))
    try:
        try:
            found = outcomes(tick)
        finally:
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, old)
    except TimeUp:
        for model, arms in plan.arms.items():
            kept = [a for a in arms or [] if _finished(store, plan, model, a)]
            if len(kept) < 3 or kept[0].role != "reference" or kept[1].role != "floor":
                raise ValueError(
                    f"{model}: the time was up before any arm was finished; allow more seconds, or "
                    "fewer tasks (--tasks)"
                ) from None
            plan.arms[model] = kept
        found = outcomes(lambda n: None)
    return runner._assemble(plan, found, store, 1, began)


def make_plan(args: argparse.Namespace, command: Sequence[str]) -> runner.Plan:
    """The plan that the arguments ask for. Raises ValueError."""
    tasks = TASKS[args.kind]
    if args.tasks:
        wanted = [t.strip() for t in args.tasks.split(",") if t.strip()]
        unknown = [t for t in wanted if t not in {s.name for s in tasks}]
        if unknown:
            known = ", ".join(s.name for s in tasks)
            raise ValueError(f"matrix {args.kind} has no task '{unknown[0]}'; tasks: {known}")
        tasks = tuple(s for s in tasks if s.name in wanted)
    named = [models.resolve(m) for m in args.model or []] or models.default_models()
    suite = Suite(schema=1, name=f"matrix-{args.kind}", description="", tasks=tasks)
    request = runner.Request(
        models=tuple(named),
        suite=suite,
        tasks=tasks,
        documents=args.limit,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        path=args.path,
        seeds=tuple(range(args.seeds)),
        jobs=1,
        command=tuple(command),
    )
    plan = runner.plan(request)
    for model in named:
        if model.config is None:
            raise ValueError(f"model {model.name}: give a folder; a matrix runs on local models")
        geometry = read_geometry(model.config)
        arms = arms_of(args.kind, geometry, args.batch_size)
        if args.arms:
            keep = {arm("candidate", parse_arm(t)).digest for t in args.arms.split(",")}
            arms = [*arms[:2], *(a for a in arms[2:] if a.digest in keep)]
        plan.arms[model.name] = arms
    return plan


def merge(runs: Sequence[RunRecord]) -> RunRecord:
    """One record of runs that share their settings: models, tasks, arms and comparisons joined,
    where one occurs twice the first.

    Raises ValueError where they were made with different versions or hardware.
    """
    first = runs[0]
    for other in runs[1:]:
        for field in ("toolkit", "commit", "packages", "hardware"):
            mine, theirs = getattr(first.environment, field), getattr(other.environment, field)
            if mine != theirs:
                raise ValueError(
                    f"these results differ in {field} ({mine}, {theirs}); merge only runs of one "
                    "machine and one version"
                )

    def joined(name: str, key: Any) -> list[Any]:
        found: dict[Any, Any] = {}
        for run in runs:
            for item in getattr(run, name):
                found.setdefault(key(item), item)
        return list(found.values())

    arms: dict[str, Any] = {}
    for run in runs:
        for one in run.arms:
            known = arms.setdefault(one.name, one.model_copy(deep=True))
            if known.digest != one.digest:
                raise ValueError(f"arm {one.name} means different settings in these results")
            known.bytes.update(one.bytes)
    comparisons = joined("comparisons", lambda c: (c.model, c.task, c.arm))
    return first.model_copy(
        update={
            "models": joined("models", lambda m: m.name),
            "tasks": joined("tasks", lambda t: t.name),
            "arms": list(arms.values()),
            "units": [u for run in runs for u in run.units],
            "comparisons": comparisons,
            "gates": [g for run in runs for g in run.gates],
            "verdict": report.worst_of(run.verdict for run in runs),
            "seconds": sum(r.seconds for r in runs),
            "limited": any(r.limited for r in runs),
        }
    )


def only(run: RunRecord, names: Sequence[str]) -> RunRecord:
    """The record without what other models say. Raises ValueError for one that it does not have."""
    known = [m.name for m in run.models]
    for name in names:
        if name not in known:
            raise ValueError(f"merge: no result of model '{name}'; models: {', '.join(known)}")
    comparisons = [c for c in run.comparisons if c.model in names]
    kept = [g for g in run.gates if g.model in names]
    asked = {c.task for c in comparisons}
    arms = []
    for one in run.arms:
        sizes = {k: v for k, v in one.bytes.items() if k in names}
        if sizes:
            arms.append(one.model_copy(update={"bytes": sizes}))
    return run.model_copy(
        update={
            "models": [m for m in run.models if m.name in names],
            "tasks": [t for t in run.tasks if t.name in asked],
            "arms": arms,
            "units": [u for u in run.units if u.model in names],
            "comparisons": comparisons,
            "gates": kept,
            "verdict": gates.verdict(kept) if kept else runner.overall(comparisons),
        }
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.evals.matrix",
        description="Measure a whole matrix of state formats.",
    )
    p.add_argument("kind", choices=(*TASKS, "merge"))
    p.add_argument("runs", nargs="*", type=Path, help="merge: result files or folders")
    p.add_argument(
        "--model",
        action="append",
        metavar="NAME|DIR",
        help="default: the shipped pair; of merge: keep these models alone",
    )
    p.add_argument("--tasks", metavar="A,B", help="only these tasks of the matrix")
    p.add_argument("--arms", metavar="A,B", help="only these arms of the matrix")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="fp32", help="of the model (fp32)")
    p.add_argument("--path", default="scan", help="scan, or decode token by token")
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--seeds", type=int, default=3, metavar="N", help="rounding seeds 0 to N - 1")
    p.add_argument("--limit", type=int, metavar="N", help="at most N documents a task")
    p.add_argument("--seconds", type=float, help="stop after this time, keep finished arms")
    p.add_argument("--until", type=float, metavar="EPOCH", help="the same as a point in time")
    p.add_argument("--out", type=Path, required=True, metavar="DIR")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 2 for bad input."""
    drop_checkout()
    command = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    until = args.until or (time.time() + args.seconds if args.seconds else None)
    try:
        if args.seeds < 1:
            raise ValueError(f"seeds {args.seeds}: use at least one")
        if args.kind == "merge":
            if not args.runs:
                raise ValueError("merge: name the result files or folders to merge")
            record = merge([report.load(r) for r in args.runs])
            if args.model:
                record = only(record, args.model)
        else:
            record = measure(make_plan(args, command), args.out, until)
        write_text(args.out / report.RESULTS, report.compact(record))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(report.summary_line(record), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
