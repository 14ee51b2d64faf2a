"""Launch configurations tried against each other; what is best is printed, nothing is changed.

Without ``--launch`` or ``--variants`` each field of ``LaunchConfig`` is varied in turn, the others
at the best values so far. Candidates are compiled in parallel processes, and pass the correctness
gate before they are timed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .registry import DESIGNS, Inputs, Problem, Step
from .run import Pass, Red, Settings, gate, interleave

GRID: dict[str, tuple[int, ...]] = {
    "heads": (1, 2, 4, 8),
    "blocks": (1, 2, 4),
    "rows": (32, 64),
    "warps": (1, 2, 4),
    "prepare_warps": (1, 2, 4),
}
"""Values tried for a field of ``LaunchConfig`` that is named here."""


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


class Trial:
    """Times of configurations on one problem, each measured once and remembered."""

    def __init__(self, s: Settings, module: Any, problem: Problem, design: str):
        self.s, self.module, self.problem, self.design = s, module, problem, design
        self.times: dict[Any, dict[str, float]] = {}
        self.failed: dict[Any, str] = {}

    def _compile(self, configs: list[Any]) -> None:
        from . import warm  # which imports this module

        p = self.problem
        key, design = warm.geometry_key(p.geometry), self.design
        tasks = {
            warm.Task(p.op.name, key, design, p.batch, tuple(dataclasses.asdict(c).items())): c
            for c in configs
        }
        failed = warm.compile_all(tasks)
        for task, config in tasks.items():
            error = failed.get(warm.shrink(task))
            if error is not None:
                self.failed[config] = error

    def _right(self, config: Any) -> None:
        run, step = self.problem.run, launcher(self.module, self.problem, config)
        self.problem.run = lambda s, impl=None: step(s)  # type: ignore[method-assign]
        try:
            gate(self.problem)
        finally:
            self.problem.run = run  # type: ignore[method-assign]

    def measure(self, configs: Iterable[Any]) -> None:
        new = [c for c in dict.fromkeys(configs) if c not in self.times and c not in self.failed]
        self._compile(new)
        good = []
        for config in new:
            if config in self.failed:
                continue
            try:
                self._right(config)
                good.append(config)
            except Red as red:
                self.failed[config] = str(red)
        for phase in self.s.phases:
            steps = self.problem.steps(phase)
            passes = {}
            for config in good:
                step = launcher(self.module, self.problem, config)
                passes[repr(config)] = Pass([(lambda s=s, f=step: f(s), s.nbytes) for s in steps])  # type: ignore[misc]
            found = interleave(passes, 0.1 if self.s.quick else 0.5, 3) if passes else {}
            for config in good:
                self.times.setdefault(config, {})[phase] = found[repr(config)]

    def best(self, phase: str) -> Any:
        return min(self.times, key=lambda c: self.times[c][phase])


def _show(config: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items())


def run(s: Settings, device: torch.device, given: list[str] | None = None) -> None:
    """Tune every geometry, batch and design of the settings; print all tries, the best last."""
    module = kernels_of(s.op.kind)
    for geometry in s.geometries:
        for batch in s.batches:
            for design in s.designs:
                config = DESIGNS[design]
                problem = Problem(s.op, s.op.geometry(geometry), config, batch, device=device)
                default = module.launch_for(config, batch)
                trial = Trial(s, module, problem, design)
                trial.measure([default, *(parse(text, default) for text in given or ())])
                goal = "mix" if "mix" in s.phases else s.phases[0]
                if not given:
                    best = default
                    for f in dataclasses.fields(default):
                        values = GRID.get(f.name, ())
                        trial.measure(dataclasses.replace(best, **{f.name: v}) for v in values)
                        if trial.times:
                            best = trial.best(goal)
                print(f"{geometry} batch {batch} {design}: {', '.join(s.phases)} in us")
                order = sorted(trial.times, key=lambda c: -trial.times[c][goal])
                for config_ in order:
                    t = "  ".join(f"{trial.times[config_][p]:8.1f}" for p in s.phases)
                    mark = " (table)" if config_ == default else ""
                    print(f"  {t}  {_show(config_)}{mark}")
                for config_, why in trial.failed.items():
                    print(f"  failed {_show(config_)}: {why}")
                for phase in s.phases:
                    if trial.times:
                        print(f"  best {phase}: {_show(trial.best(phase))}", flush=True)
