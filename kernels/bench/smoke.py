"""One small step of every kernel: what a memory or race checker runs.

``python -m replayssm_quant.kernels.bench.smoke --ahead`` compiles everything in parallel processes,
then ``compute-sanitizer --tool racecheck python -m replayssm_quant.kernels.bench.smoke`` checks
(``sanitize`` does so for each operation, design and tool).
Each design of each family stores a state, takes one step in which some rows flush and some do not,
and loads the state back; and verifies drafts, a chain and a tree of them, whose accepted paths are
moved.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from ... import ops
from ..._paths import drop_checkout
from ...state.cache import PAD_SLOT, VerifyRows, tree_ancestors
from ...state.geometry import LayerGeometry
from . import tune
from .registry import DESIGNS, OPS, Problem, random_state
from .verify import OPS as VERIFY
from .verify import Step, VerifyProblem

GEOMETRIES = {
    "mamba2_decode": (
        LayerGeometry("mamba2", 4, 64, 128, 2),
        LayerGeometry("mamba2", 2, 80, 96, 1),
    ),
    "gdn_decode": (LayerGeometry("gdn", 4, 128, 128, 2), LayerGeometry("gdn", 2, 48, 96, 2)),
}
"""Of each operation: one that matrix units serve, one that they do not."""
GEOMETRIES |= {name.replace("_decode", "_verify"): both for name, both in GEOMETRIES.items()}
SMOKE = ("nvfp4+fp16-sr", "P4+8-sr-rot", "P8+4-sr-rot", "e4m3-sr", "fp32")


def label(op: str, geometry: LayerGeometry, design: str) -> str:
    """The line that says that a case came to its end."""
    return f"{op} {geometry.rows}x{geometry.n} {design}"


def step(op: str, geometry: LayerGeometry, design: str, device: torch.device) -> None:
    """Store, step and load five rows of a small pool, of which two flush; the step is launched as
    for one sequence, for some and for many."""
    problem = Problem(OPS[op], geometry, DESIGNS[design], 5, device=device, sets=1)
    length = problem.config.buffer_len
    slots = problem.slots[0].clone()
    slots[3] = -1  # a padding row
    rows = problem.rows(slots, [length - 1, 3, 0, 1, 7], [True, False, False, False, True])
    state = random_state(geometry, 5, 0, device)
    ops.store_state(problem.views, problem.config, rows, state)
    now = problem.steps("mix")[0]
    now.rows = rows
    module = tune.kernels_of(problem.op.kind)
    for batch in (1, 5, 256):
        tune.launcher(module, problem, module.launch_for(problem.config, batch))(now)
    rows = problem.rows(slots, [0, 4, 1, 0, 0], [False] * 5)
    if problem.op.kind == "mamba2":
        ops.mamba2_load(problem.views, problem.config, rows, problem.weights["A"])
    else:
        ops.gdn_load(problem.views, problem.config, rows)
    if device.type == "cuda":
        torch.cuda.synchronize()


def verify(
    op: str,
    geometry: LayerGeometry,
    design: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> VerifyProblem:
    """Verify five tokens for each of five rows, of which two flush, and move what was accepted.

    As a chain and as a tree; launched as for a few sequences, as for many, and with the fold in
    launches of its own on a stream beside. Returns the pool.
    """
    problem = VerifyProblem(
        VERIFY[op], geometry, DESIGNS[design], 5, device=device, dtype=dtype, sets=1
    )
    length, width = problem.config.buffer_len, problem.tokens

    def vector(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = problem.slots[0].clone()
    slots[3] = PAD_SLOT
    valid = vector(length - 1 + width, 3, 0, 1, length)
    flush = (valid >= length) & (slots != PAD_SLOT)
    rows = VerifyRows(
        slots, valid, flush, vector(5, 4, 5, 5, 0), valid + 1000, problem.key[slots.clamp(min=0)],
        fold_slots=torch.where(flush, slots, PAD_SLOT),
    )  # fmt: skip
    parents = torch.tensor([[-1, 0, 0, 2, 2]], device=device).expand(5, -1)
    tree = dataclasses.replace(rows, ancestors=tree_ancestors(parents))
    path = vector(0, 2, 4, -1, -1).expand(5, -1)
    module = importlib.import_module(f"replayssm_quant.kernels.{problem.op.kind}.verify")
    many = module.launch_for(256)
    for launch in (module.launch_for(5), many, dataclasses.replace(many, fused=0, beside=1)):
        for control in (rows, tree):
            problem.verify(Step(control, problem.inputs[0], 0.0), launch=launch)
            ops.compact(problem.views, control, path, impl="triton")
    if device.type == "cuda":
        torch.cuda.synchronize()
    return problem


def _ahead(cases: list[tuple[str, str]]) -> int:
    """Run each case in its own process; the exit code is the worst of them."""

    def one(case: tuple[str, str]) -> int:
        command = [sys.executable, "-m", "replayssm_quant.kernels.bench.smoke"]
        done = subprocess.run(
            [*command, "--op", case[0], "--design", case[1]],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return done.returncode

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return max(pool.map(one, cases))


def main(argv: list[str] | None = None) -> int:
    drop_checkout()
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.kernels.bench.smoke",
        description="Run every kernel once on a small pool, for compute-sanitizer.",
    )
    p.add_argument("--op", choices=sorted(GEOMETRIES), help="one operation instead of all")
    p.add_argument("--design", default=",".join(SMOKE), help="names separated by commas")
    p.add_argument("--ahead", action="store_true", help="a process for each design, all at once")
    args = p.parse_args(argv)
    designs = args.design.split(",")
    for name in designs:
        if name not in DESIGNS:
            raise SystemExit(f"unknown design '{name}'; known: {', '.join(DESIGNS)}")
    if not torch.cuda.is_available():
        print("needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 2
    chosen = [args.op] if args.op else list(GEOMETRIES)
    if args.ahead:
        return _ahead([(op, design) for op in chosen for design in designs])
    for op in chosen:
        for geometry in GEOMETRIES[op]:
            for design in designs:
                (verify if op in VERIFY else step)(op, geometry, design, torch.device("cuda"))
                print(label(op, geometry, design), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
