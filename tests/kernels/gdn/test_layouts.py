"""What the compilers make of the kernels, and what those take for granted; needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import replayssm_quant  # noqa: E402

ROOT = Path(replayssm_quant.__file__).resolve().parents[1]
SCRIPT = """
import json, re, sys
import torch
torch.set_num_threads(1)
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.inspect_sass import ttgir_only
from replayssm_quant.kernels.bench.registry import OPS, Problem
from replayssm_quant.kernels.bench.tune import kernels_of, launcher
from replayssm_quant.state.geometry import LayerGeometry

geometry = LayerGeometry("gdn", 1, 16, 96, 1)
config = StateConfig.from_flags(sys.argv[1], buffer_len=16)
problem = Problem(OPS["gdn_decode"], geometry, config, 2, device=torch.device("cpu"), sets=1)
module = kernels_of("gdn")
run = launcher(module, problem, module.launch_for(config, 256))
with ttgir_only(90, {"flush_kernel"}) as found:
    run(problem.steps("mix")[0])
((_, text),) = found
layouts = dict(re.findall(r"^(#\\w+) = (.*)$", text, re.M))
inline = [line for line in text.splitlines() if "mma.sync" in line]
operands = {name for line in inline for name in re.findall(r"tensor<8x16xf?i?\\d+, (#\\w+)>", line)}
print(json.dumps({
    "inline": len(inline), "layouts": [layouts[n] for n in operands], "dots": text.count("tt.dot "),
    "converts": len(re.findall(r"convert_layout .*tensor<8x16x", text)),
}))
"""


def compiled(script: str, update: str, cache: Path) -> dict:
    """What a script prints of the kernels that it compiles for an update format."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, update], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("update", ["P4+8", "P8+4", "fp16", "e4m3/b32/e8m0"])
def test_a_flush_leaves_every_value_in_its_lane(update: str, tmp_path: Path) -> None:
    """The instructions of a fold count on loaded tiles: four neighbours of a row pair a lane.

    Triton may give a tensor another layout, and a product that it makes itself would.
    """
    report = compiled(SCRIPT, update, tmp_path)
    assert report["dots"] == 0 and report["converts"] == 0
    assert report["inline"] >= 12  # four pairs of planes that are read, eight that are folded
    for layout in report["layouts"]:
        assert "sizePerThread = [1, 4], threadsPerWarp = [8, 4]" in layout


STORE = """
import json, sys
import torch
torch.set_num_threads(1)
from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.inspect_sass import compile_only, disassemble
from replayssm_quant.kernels.bench.registry import OPS, Problem
from replayssm_quant.state.geometry import LayerGeometry

config = StateConfig.from_flags(sys.argv[1], "same")
geometry = LayerGeometry("gdn", 1, 16, 128, 1)
problem = Problem(OPS["gdn_decode"], geometry, config, 2, device=torch.device("cpu"), sets=1)
with compile_only(90) as launches:
    ops.store_state(
        problem.views, config, problem.steps("flush")[0].rows, torch.zeros(2, 1, 16, 128),
        impl="triton",
    )
counts = {"FMUL": 0, "FFMA": 0}
for op, n in disassemble(launches[0]).opcodes.items():
    if op.split(".")[0] in counts:
        counts[op.split(".")[0]] += n
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_no_element_of_a_shared_fp16_state_is_dropped(tmp_path: Path) -> None:
    """A thread rounds 64 elements, each with one product; ptxas 12.8 once left out every fourth.

    It made 0 of a product with 2**-112 whose bits were then shifted left, and with it zeroed a
    quarter of the state; the interpreter cannot show that.
    """
    assert sum(compiled(STORE, "fp16", tmp_path).values()) >= 64


@pytest.mark.slow
def test_integers_are_scaled_before_they_are_rounded(tmp_path: Path) -> None:
    """A product that became one fma with the rounding addition would decide ties by its lost bits.

    The codec rounds the product first; where the two differ is one value in 100,000, and far more
    of a checkpoint with few bits.
    """
    counts = compiled(STORE, "int8", tmp_path)
    assert counts["FMUL"] >= 64 and counts["FFMA"] < 32
