"""Compile what a run will launch, in parallel processes, ahead of it.

Triton compiles on one core and keeps the result in its cache on disk. So each process takes its
share of the tasks, launches each once on a small pool, and the run that follows finds everything
compiled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._paths import drop_checkout
from ...state.geometry import LayerGeometry
from . import baselines, registry, tune, vllm_baselines
from .registry import DESIGNS, OPS, Problem


@dataclass(frozen=True)
class Task:
    """One design (or baseline) of an operation on a geometry, at a batch.

    launch: values of a ``LaunchConfig``, or () for what the table says. plain: without D and the
    bias of dt. design: a name of ``DESIGNS``, or ``vllm-`` and the name of a baseline, all of whose
    configurations are compiled.
    """

    op: str
    geometry: tuple[str, int, int, int, int]
    design: str
    batch: int
    launch: tuple[tuple[str, int], ...] = ()
    plain: bool = False


def geometry_key(g: LayerGeometry) -> tuple[str, int, int, int, int]:
    return (g.kind, g.heads, g.rows, g.n, g.groups)


def small_batch(batch: int) -> int:
    """A batch whose kernels are those of ``batch``: Triton knows only 1 and multiples of 16."""
    return 16 if batch % 16 == 0 else min(batch, 9)


def shrink(task: Task) -> Task:
    """The task on a small batch, with the launch that the table has for its own batch."""
    launch = task.launch
    if not task.design.startswith("vllm-") and not task.plain:
        module = tune.kernels_of(OPS[task.op].kind)
        geometry = LayerGeometry(*task.geometry)
        chosen = module.launch_for(DESIGNS[task.design], task.batch, geometry)
        launch = tuple((dataclasses.asdict(chosen) | dict(launch)).items())
    return dataclasses.replace(task, batch=small_batch(task.batch), launch=launch)


def launch_fields(config: Any) -> tuple[tuple[str, int], ...]:
    """``Task.launch`` of a LaunchConfig, alike for those that no compiler tells apart."""
    return tuple((dataclasses.asdict(config) | {"flush": 16, "beside": 0}).items())


def launch_configs(baseline: Any) -> None:
    """A step of a baseline under each of its configurations."""
    for config in baseline.configs:
        with baseline.pinned(config):
            baseline.launches("mix")[0][0]()


def launch_once(
    task: Task, device: torch.device, vllm: vllm_baselines.Baselines | None = None
) -> None:
    """Launch everything of a task once; vllm: for a task that is a baseline."""
    op, geometry = OPS[task.op], LayerGeometry(*task.geometry)
    if task.design.startswith("vllm-"):
        assert vllm is not None
        name = task.design.removeprefix("vllm-")
        launch_configs(baselines.make(name, vllm, op, geometry, task.batch, device, sets=1))
        return
    problem = Problem(op, geometry, DESIGNS[task.design], task.batch, device=device, sets=1)
    module = tune.kernels_of(op.kind)
    for phase in ("readout", "flush"):
        if phase == "readout" and problem.config.buffer_len == 1:
            continue
        step = problem.steps(phase)[0]
        if task.plain:
            registry.call(
                op.kind, problem.views, problem.config, step.rows, step.inputs, 0, plain=True
            )
        else:
            tune.launcher(module, problem, module.LaunchConfig(**dict(task.launch)))(step)


def _work(text: str) -> None:
    """Read tasks as JSON, launch each, print one JSON line for each."""
    job = json.loads(text)
    device, path = torch.device("cuda"), job["vllm_path"]
    vllm = None if path is None else vllm_baselines.load(path)
    for number, fields in job["tasks"]:
        task = Task(
            fields["op"],
            tuple(fields["geometry"]),
            fields["design"],
            fields["batch"],
            tuple((k, v) for k, v in fields["launch"]),
            fields["plain"],
        )
        error = None
        try:
            launch_once(task, device, vllm)
            torch.cuda.synchronize()
        except Exception as problem:  # the run itself will meet it again and say so
            error = repr(problem)[:200]
        print(json.dumps([number, error]), flush=True)


def compile_all(
    tasks: Iterable[Task], vllm_path: str | None = None, workers: int | None = None
) -> dict[Task, str]:
    """Compile every task; returns the errors of those that failed.

    A batch is replaced by a small one with the same kernels. workers: processes, by default the
    cores of this machine but one, at most 24.
    """
    wanted = list(dict.fromkeys(shrink(t) for t in tasks))
    count = workers or max(1, min(24, len(os.sched_getaffinity(0)) - 1))
    count = min(count, len(wanted))
    processes = []
    for i in range(count):
        share = [(k, dataclasses.asdict(wanted[k])) for k in range(i, len(wanted), count)]
        job: dict[str, Any] = {"tasks": share, "vllm_path": vllm_path}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        processes.append(process)
    errors, done = {}, set()
    for process in processes:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("["):
                continue
            number, error = json.loads(line)
            done.add(number)
            if error is not None:
                errors[wanted[number]] = error
        process.wait()
    for number in set(range(len(wanted))) - done:
        errors[wanted[number]] = "its process ended before it"
    return errors


def tasks_of(
    op: registry.Op, points: Sequence[tuple[str, int]], designs: Sequence[str]
) -> list[Task]:
    """The tasks of a run over these (geometry, batch) and designs."""
    return [
        Task(op.name, geometry_key(op.geometry(g)), design, batch)
        for g, batch in points
        for design in designs
    ]


if __name__ == "__main__":
    drop_checkout()
    _work(sys.stdin.read())
