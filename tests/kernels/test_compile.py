"""Every Triton kernel compiles for Hopper and Blackwell, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import replayssm_quant  # noqa: E402

ROOT = Path(replayssm_quant.__file__).resolve().parents[1]
SCRIPT = """
import importlib, json, pkgutil, sys
import torch
torch.set_num_threads(1)
import triton
from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels import common, gdn, mamba2
from replayssm_quant.kernels.bench.inspect_sass import compile_only, disassemble, inline_assembly
from replayssm_quant.kernels.bench.registry import OPS, Problem, call, random_state
from replayssm_quant.kernels.bench.tune import kernels_of, launcher
from replayssm_quant.state.cache import StatePool
from replayssm_quant.state.geometry import LayerGeometry

arch = int(sys.argv[1])
found, lanes = {}, []
mamba, delta = OPS["mamba2_decode"], OPS["gdn_decode"]
flags = StateConfig.from_flags
cases = {
    90: [
        (mamba, LayerGeometry("mamba2", 16, 64, 128, 1), flags("fp16", "nvfp4")),
        (mamba, LayerGeometry("mamba2", 2, 64, 16, 1), flags("fp32", buffer_len=1)),
        (delta, LayerGeometry("gdn", 2, 128, 128, 1), flags("P8+4", rotate=True)),
    ],
    100: [
        (mamba, LayerGeometry("mamba2", 12, 80, 128, 1), flags("P4+8", rotate=True)),
        (mamba, LayerGeometry("mamba2", 2, 64, 16, 1), flags("fp16", "same", buffer_len=1)),
        (delta, LayerGeometry("gdn", 2, 128, 128, 1), flags("e4m3", "same")),
    ],
}[arch]
for op, geometry, config in cases:
    problem = Problem(op, geometry, config, 2, device=torch.device("cpu"), sets=1)
    step = problem.steps("mix")[0]
    module = kernels_of(op.kind)
    with compile_only(arch) as launches:
        for batch in (2, 256):  # few sequences take another launch
            launcher(module, problem, module.launch_for(config, batch))(step)
        state = random_state(geometry, 2, 0, torch.device("cpu"))
        ops.store_state(problem.views, config, step.rows, state, impl="triton")
        if op.kind == "mamba2":
            ops.mamba2_load(problem.views, config, step.rows, problem.weights["A"], impl="triton")
        else:
            ops.gdn_load(problem.views, config, step.rows, impl="triton")
    with compile_only(arch) as more:  # a verify step, without the fold that decode has shown
        pool = StatePool({0: geometry}, config, 2, drafts=4)
        rows = pool.verify_rows(torch.arange(2), torch.full((2,), 5))
        wide = torch.zeros(2, 5, geometry.heads, geometry.rows, dtype=torch.bfloat16)
        narrow = torch.zeros(2, 5, geometry.groups, geometry.n, dtype=torch.bfloat16)
        gates = torch.zeros(2, 5, geometry.heads)
        if op.kind == "mamba2":
            rest = (problem.weights["A"], narrow, narrow)
            ops.mamba2_verify(pool.views[0], config, rows, wide, gates, *rest, impl="triton")
        else:
            inputs = (narrow, narrow, wide, gates, gates)
            ops.gdn_verify(pool.views[0], config, rows, *inputs, impl="triton")
        path = torch.zeros(2, 5, dtype=torch.int32)
        ops.compact(pool.views[0], rows, path, impl="triton")
    more = [launch for launch in more if launch.name.startswith("verify")]
    launches += more
    if any(launch.name == "verify_matrix_kernel" for launch in more):
        inline = [pair for launch in more for pair in inline_assembly(launch.ttgir)]
        inline = [(ptx, used) for ptx, used in inline if "mma.sync" in ptx or "shfl" in ptx]
        lanes.append([op.kind, config.rotate, [["mma.sync" in ptx, used] for ptx, used in inline]])
    for launch in launches:
        m = disassemble(launch)
        found.setdefault(launch.name, []).append([m.registers, m.spills, m.instructions])

kernels = set()
for package in (common, gdn, mamba2):
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        kernels |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, triton.runtime.jit.JITFunction) and name.endswith("_kernel")
        }
print(json.dumps({"found": found, "kernels": sorted(kernels), "lanes": lanes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_every_kernel_compiles(arch: int, tmp_path: Path) -> None:
    """The launches of both families' steps, stores and loads, for sm_90 and sm_100.

    None may be left out, and none may spill more than a value here and there. The matrix units of
    verify steps are given what they want.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(arch)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["found"]) == set(report["kernels"])
    for name, machines in report["found"].items():
        # for more programs at once; a GDN window takes all 255 registers there are, for a program
        # that runs once a flush: 43 of 3,824 instructions spill (e4m3, sm_100, Triton 3.7)
        bounded = name.startswith(("flush", "prepare", "verify", "window"))
        for registers, spills, instructions in machines:
            assert instructions > 20, name
            text = f"{name}: {spills} local loads and stores, {registers} registers"
            assert spills <= instructions // (20 if bounded else 100), text
    assert len(report["lanes"]) == 2
    for kind, rotated, seen in report["lanes"]:
        check_lanes(kind, rotated, seen)


def check_lanes(kind: str, rotated: bool, found: list) -> None:
    """A product of a read sees lane 4 g + q hold elements (., g, q), one of a fold (g, 4 q ...) as
    loads leave them, a query four neighbours a lane: what the PTX of these kernels counts on."""
    products = [layouts for mma, layouts in found if mma]
    loaded = "sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [1, 1], order = [1, 0]"
    folds = [layouts for layouts in products if len(layouts) == 1 and loaded in layouts[0]]
    reads = [layouts for layouts in products if layouts not in folds]
    assert len(reads) >= 8
    for layouts in reads:
        assert len(layouts) == 1
        order = r"PerWarp = \[1, 8, 4\].*order = \[(0, 2, 1|2, 1, 0|2, 0, 1)\]"
        lanes = "lane = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]" in layouts[0]
        assert lanes or re.search(order, layouts[0]), layouts
    turned = [layouts for mma, layouts in found if not mma]
    assert all(len(layouts) == 1 for layouts in turned)
    others = [layouts[0] for layouts in turned if loaded not in layouts[0]]  # not of the fold
    queries = [layout for layout in others if "[1, 4], threadsPerWarp = [1, 32]" in layout]
    keys = kind == "gdn" and rotated  # of the window
    # five tokens are prepared as four and one, each place turned once more where they are rotated
    assert others == queries and len(queries) == 2 * (1 + rotated) + keys


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm_quant.kernels.bench.inspect_sass import compile_only

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"), compile_only(90):
        pass
