"""Launch configurations tried against each other; what is best is printed and may be saved.

Without ``--launch`` or ``--variants`` the stages of ``SEARCH`` follow each other, each from the
best of the one before. The candidates of a stage are compiled in parallel processes, and each takes
a step in which some rows flush through the correctness gate before it is timed. ``--save`` writes
the winners; the benchmark takes them with ``--launches``, and the tables in ``triton_ops`` are made
from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...config import StateConfig
from .registry import DESIGNS, OPS, Inputs, Op, Problem, Step
from .run import Pass, Red, Settings, gate_step, interleave, write_json

_FLUSH = (
    "beside=0,flush=12,flush_registers=168",
    *(f"beside=1,flush={n},flush_registers=128" for n in (4, 8, 12, 16)),
    *(f"beside=1,flush={n},flush_registers=168" for n in (8, 12)),
)
SEARCH: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "mamba2": (
        (
            "readout",
            (
                "heads=0,rows=64,registers=128",
                "heads=0,rows=64,registers=96",
                "heads=0,rows=32,registers=80",
                "heads=1,rows=64,registers=128",
                "heads=2,rows=64,registers=128",
                "heads=2,rows=64,registers=255",
                "heads=4,rows=64,registers=255",
                "single=1,rows=16",
                "single=1,rows=32",
            ),
        ),
        ("mix", _FLUSH),
    ),
    "gdn": (
        (
            "readout",
            (
                "rows=64,blocks=1",
                "rows=64,blocks=1,prepare_registers=64",  # at batch 256 all are resident at once
                "rows=32,blocks=1",
                "rows=64,blocks=2",
                "rows=64,blocks=2,ahead=1",
                "rows=32,blocks=2,ahead=1",
                "rows=32,blocks=4,ahead=1",
                "single=1,rows=16",
                "single=1,rows=32",
            ),
        ),
        ("mix", _FLUSH),
    ),
}
"""Of each family: what is compared, by the time of which phase."""


def parse(text: str, default: Any) -> Any:
    """``field=value,...`` over the default configuration. Raises SystemExit naming the error."""
    known = [f.name for f in dataclasses.fields(default)]
    changes = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known or not value.lstrip("-").isdigit():
            raise SystemExit(f"--launch '{part}': write field=number with {', '.join(known)}")
        changes[name] = int(value)
    return dataclasses.replace(default, **changes)


def kernels_of(kind: str) -> Any:
    """The module of a family's Triton operations: LaunchConfig, launch_for and the steps."""
    return importlib.import_module(f"replayssm_quant.kernels.{kind}.triton_ops")


def read_variants(path: Path) -> list[str]:
    """The lines of a file of variants, each ``field=value,...``; '#' starts a comment.

    Raises SystemExit naming the file if there is none.
    """
    if not path.is_file():
        raise SystemExit(f"--variants {path}: there is no such file")
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def launcher(module: Any, problem: Problem, config: Any) -> Callable[[Step], torch.Tensor]:
    """One step of the problem under a launch configuration."""

    def step(s: Step) -> torch.Tensor:
        i: Inputs = s.inputs
        if problem.op.kind == "gdn":
            return module.decode_packed(
                problem.views, problem.config, s.rows, i.mixed_qkv, i.a, i.b, i.A_log, i.dt_bias,
                layer=problem.layer, launch=config,
            )  # fmt: skip
        return module.decode_step(
            problem.views, problem.config, s.rows, i.x, i.dt, i.A, i.B, i.C,
            D=i.D, dt_bias=i.dt_bias, dt_softplus=True, layer=problem.layer, launch=config,
        )  # fmt: skip

    return step


@dataclass
class Trial:
    """Times of configurations at one geometry, batch and design, each measured once."""

    op: Op
    geometry: str
    batch: int
    design: str
    default: Any
    times: dict[Any, dict[str, float]] = field(default_factory=dict)
    failed: dict[Any, str] = field(default_factory=dict)
    best: Any = None

    def __post_init__(self) -> None:
        self.best = self.default

    @property
    def name(self) -> str:
        return f"{self.geometry} batch {self.batch} {self.design}"

    def measure(self, configs: list[Any], phases: list[str], goal: str, seconds: float) -> None:
        """Gate and time the configurations; ``best`` becomes the fastest in the phase ``goal``."""
        module = kernels_of(self.op.kind)
        geometry, device = self.op.geometry(self.geometry), torch.device("cuda")
        problem = Problem(self.op, geometry, DESIGNS[self.design], self.batch, device=device)
        mixed = problem.steps("mix")
        for config in configs:
            if config in self.failed or config in self.times:
                continue
            step = launcher(module, problem, config)
            problem.run = lambda s, impl=None, f=step: f(s)  # type: ignore[method-assign,misc]
            try:
                gate_step(problem, mixed[len(mixed) // 2])
                self.times[config] = {}
            except Red as red:
                self.failed[config] = str(red)
            except Exception as error:  # more registers or shared memory than the GPU has
                self.failed[config] = repr(error)[:200]
        good = [c for c in configs if c in self.times]
        for phase in phases:
            steps = problem.steps(phase)
            passes = {}
            for config in good:
                step = launcher(module, problem, config)
                launches = [(lambda s=s, f=step: f(s), s.nbytes) for s in steps]
                passes[repr(config)] = Pass(launches)  # type: ignore[arg-type]
            found = interleave(passes, seconds, 3) if passes else {}
            for config in good:
                self.times[config][phase] = found[repr(config)]
        if good:
            self.best = min(good, key=lambda c: self.times[c][goal])


def _show(config: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items())


def _print(trial: Trial, phases: list[str], goal: str) -> None:
    print(f"{trial.name}: {', '.join(phases)} in us")
    timed = [c for c, t in trial.times.items() if goal in t]
    for config in sorted(timed, key=lambda c: -trial.times[c][goal]):
        cells = (trial.times[config].get(p) for p in phases)
        text = "  ".join("       -" if t is None else f"{t:8.1f}" for t in cells)
        print(f"  {text}  {_show(config)}{' (table)' if config == trial.default else ''}")
    for config, why in trial.failed.items():
        print(f"  failed {_show(config)}: {why}")
    print(f"  best {goal}: {_show(trial.best)}", flush=True)


def run(
    s: Settings, device: torch.device, given: list[str] | None = None, save: Path | None = None
) -> None:
    """Tune every geometry, batch and design of the settings; print all tries, the best last."""
    from . import warm  # which imports this module

    module = kernels_of(s.op.kind)

    def trial_of(geometry: str, batch: int, design: str) -> Trial:
        table = module.launch_for(DESIGNS[design], batch, s.op.geometry(geometry))
        return Trial(s.op, geometry, batch, design, table)

    trials = [trial_of(g, batch, design) for g, batch in s.points for design in s.designs]
    last = "mix" if "mix" in s.phases else s.phases[0]
    stages = SEARCH[s.op.kind] if given is None else ((last, tuple(given)),)
    for goal, texts in stages:
        phases = [goal] if given is None else s.phases
        wanted: dict[int, list[Any]] = {}
        tasks = []
        for i, trial in enumerate(trials):
            wanted[i] = list(dict.fromkeys([trial.best, *(parse(t, trial.best) for t in texts)]))
            key = warm.geometry_key(s.op.geometry(trial.geometry))
            for config in wanted[i]:
                launch = warm.launch_fields(config)
                tasks.append(warm.Task(s.op.name, key, trial.design, trial.batch, launch))
        if not s.compiled:
            warm.compile_all(tasks)  # what fails here fails again where it is measured
        for i, trial in enumerate(trials):
            trial.measure(wanted[i], phases, goal, 0.15 if s.quick else 0.5)
            _print(trial, phases, goal)
            torch.cuda.empty_cache()
        if save is not None:
            write_json(save, [_row(trial) for trial in trials])


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "op": trial.op.name,
        "geometry": trial.geometry,
        "batch": trial.batch,
        "design": trial.design,
        "launch": dataclasses.asdict(trial.best),
        "times_us": {p: round(t, 2) for p, t in trial.times.get(trial.best, {}).items()},
        "tried": [
            {"launch": _show(c), **{p: round(t, 2) for p, t in times.items()}}
            for c, times in trial.times.items()
        ],
    }


@contextlib.contextmanager
def launches_from(path: Path | None) -> Iterator[None]:
    """Within it the kernels are launched as a file of ``--save`` says.

    A design that it lacks is launched as one whose readout has as many bits, if there is one. Of a
    design's batches the largest that is not above the step's counts, else the smallest. Raises
    SystemExit for a file that is none.
    """
    if path is None:
        yield
        return
    try:
        rows = json.loads(path.read_text("utf-8"))
        found = [(OPS[r["op"]].kind, DESIGNS[r["design"]], r["batch"], r["launch"]) for r in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--launches {path}: not a file that --save wrote ({error})") from None
    before = {}
    for kind in {kind for kind, *_ in found}:
        module = kernels_of(kind)
        before[module] = module.launch_for
        module.launch_for = _lookup(module, [row[1:] for row in found if row[0] == kind])
    try:
        yield
    finally:
        for module, function in before.items():
            module.launch_for = function


def _lookup(module: Any, rows: list[tuple[StateConfig, int, dict]]) -> Callable[..., Any]:
    table = module.launch_for

    def launch_for(config: StateConfig, batch: int, geometry: Any = None) -> Any:
        like = [row for row in rows if row[0] == config]
        like = like or [row for row in rows if row[0].readout.bits == config.readout.bits]
        own = sorted(((b, x) for _, b, x in like), key=lambda pair: pair[0])
        if not own:
            return table(config, batch, geometry)
        below = [launch for b, launch in own if b <= batch]
        return module.LaunchConfig(**(below[-1] if below else own[0][1]))

    return launch_for
