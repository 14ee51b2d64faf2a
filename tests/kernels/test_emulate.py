"""Compiled kernels, run by the PTX emulator: stored bytes and steps against codec and float64."""

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
STORE = """
import dataclasses, json, sys
import torch
torch.set_num_threads(1)
from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.emulate import emulated
from replayssm_quant.state.cache import StepRows
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import StateLayout

arch, cases = json.loads(sys.argv[1])
for update, output, rows, n, large in cases:
    config = StateConfig.from_flags(update, output)
    layout = StateLayout(LayerGeometry("mamba2", 1, rows, n, 1), config, "fp32")
    gen = torch.Generator().manual_seed(1)
    before = torch.randint(0, 256, (2, layout.page_bytes), dtype=torch.uint8, generator=gen)
    state = torch.randn(1, 1, rows, n, generator=gen)
    state *= torch.exp(3 * torch.randn(1, 1, rows, 1, generator=gen))
    state[0, 0, 1] = 0.0
    state[0, 0, 2] = -1e-39
    if large:
        state[0, 0, 3] *= 2.0**-20  # subnormal in fp16
        state[0, 0, 4, n // 2] = 3e4
        state[0, 0, 5, : n // 2] *= 1e-5  # small beside the rest of its row and tile
        state[0, 0, 6, 5] = 1e6
    else:
        state = state.sign() * state.abs().clamp(min=2.0**-13)
    step = StepRows(
        torch.tensor([1]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool),
        torch.tensor([2**30 + 7], dtype=torch.int32), torch.tensor([-(2**62) + 12345]),
    )
    ours, theirs = layout.views(before.clone()), layout.views(before.clone())
    at = dict(layer=7, head_offset=3)
    with emulated(arch) as ran:
        ops.store_state(ours, config, step, state, **at, impl="triton")
    ops.store_state(theirs, config, step, state, **at, impl="reference")
    raw = lambda t: t.contiguous().view(torch.uint8)
    a, b, start = (v.tensors() for v in (ours, theirs, layout.views(before)))
    differ = {name: int((raw(a[name]) != raw(b[name])).sum()) for name in a}
    untouched = all(torch.equal(raw(a[name]), raw(start[name])) for name in a)
    print(json.dumps({"ran": ran, "differ": differ, "untouched": untouched}))
"""
STEP = """
import json, sys
import torch
torch.set_num_threads(1)
from replayssm_quant.kernels.bench.emulate import emulated
from replayssm_quant.kernels.bench.registry import DESIGNS, OPS, Problem
from replayssm_quant.kernels.bench.run import gate_step
from replayssm_quant.kernels.bench.tune import kernels_of
from replayssm_quant.state.geometry import LayerGeometry

arch, op, design, shape, dtype = json.loads(sys.argv[1])
kind = "mamba2" if op.startswith("mamba2") else "gdn"
problem = Problem(
    OPS[op], LayerGeometry(kind, *shape), DESIGNS[design], 33, device=torch.device("cpu"), sets=1,
    dtype=getattr(torch, dtype),
)
step = problem.steps("flush")[0]
step.rows.slots[4:] = -1  # few live rows, launched as a large batch is
kernels, table = kernels_of(kind), kernels_of(kind).launch_for
kernels.launch_for = lambda config, batch, geometry: table(config, 256)
with emulated(arch) as ran:
    result = gate_step(problem, step, samples=1, impl="triton")
print(json.dumps({"ran": ran, "flips": result.flips}))
"""


def emulate(script: str, case: list[object], cache: Path, **env: str) -> list[dict]:
    """What a script prints of its emulated launches, a line a case."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    kept |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(case)], env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


STORED = [
    ("fp16", "nvfp4", 16, 128, True),
    ("P4+8", None, 16, 128, True),
    ("P8+4", None, 16, 128, True),
    ("e4m3", "same", 16, 128, True),
    ("e5m2", "nvfp4", 18, 64, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_stored_bytes_are_the_codecs(arch: int, tmp_path: Path) -> None:
    """The inline PTX of either architecture, which no interpreter runs, gives the codec's bytes."""
    for case, report in zip(STORED, emulate(STORE, [arch, STORED], tmp_path), strict=True):
        assert report["ran"] == ["_store_kernel"] and not report["untouched"], case
        assert set(report["differ"].values()) == {0}, (case, report["differ"])


@pytest.mark.slow
def test_hardware_rounding_differs_only_below_the_normal_numbers(tmp_path: Path) -> None:
    """``cvt.rs``, given the same random bits, rounds normal fp16 numbers as the codec does."""
    env = {"REPLAYSSM_HARDWARE_ROUNDING": "1"}
    (report,) = emulate(STORE, [100, [("fp16", "nvfp4", 16, 128, False)]], tmp_path, **env)
    assert set(report["differ"].values()) == {0}, report["differ"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, design, shape",
    [
        ("mamba2_decode", "P4+8-sr-rot", [1, 32, 128, 1]),
        ("gdn_decode", "nvfp4+fp16-sr", [1, 32, 128, 1]),
    ],
)
def test_a_flush_agrees_with_float64(
    op: str, design: str, shape: list[int], tmp_path: Path
) -> None:
    """y, checkpoint and copy of rows that flush, within the gate of the benchmark on a GPU."""
    (report,) = emulate(STEP, [90, op, design, shape, "bfloat16"], tmp_path)
    assert "flush_kernel" in report["ran"] and report["flips"] < 5e-3


@pytest.mark.slow
def test_a_read_of_32_tokens_agrees_with_float64(tmp_path: Path) -> None:
    """Two value heads a key: their v have the shape of the queries, which a rotation turns."""
    script = STEP.replace(
        "DESIGNS[design], 33", "dataclasses.replace(DESIGNS[design], buffer_len=32), 33"
    )
    script = script.replace('problem.steps("flush")[0]', 'problem.steps("readout")[9]')
    script = script.replace("import json, sys", "import dataclasses, json, sys")
    case = [90, "gdn_decode", "P8+4-sr-rot", [2, 128, 128, 1], "bfloat16"]
    (report,) = emulate(script, case, tmp_path)  # which raises where y is wrong
    assert {"prepare_kernel", "readout_kernel"} <= set(report["ran"])


CONVERSIONS = """
import json
import torch
from replayssm_quant import ops
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.inspect_sass import compile_only
from replayssm_quant.kernels.bench.registry import OPS, Problem
from replayssm_quant.state.geometry import LayerGeometry

config, found = StateConfig.from_flags("fp16", "nvfp4"), {}
geometry = LayerGeometry("mamba2", 1, 16, 128, 1)
problem = Problem(OPS["mamba2_decode"], geometry, config, 1, device=torch.device("cpu"), sets=1)
rows = problem.steps("flush")[0].rows
for arch in (90, 100):
    with compile_only(arch) as launches:
        ops.store_state(problem.views, config, rows, torch.zeros(1, 1, 16, 128), impl="triton")
    names = ("cvt.rs.satfinite.f16x2.f32", "cvt.rn.satfinite.e2m1x2")
    found[arch] = {k: k in launches[0].ptx for k in names}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_conversions_are_used_where_a_gpu_has_them(asked: bool, tmp_path: Path) -> None:
    """FP4 conversions on sm_100 and not on sm_90; rounding by chance only where it is asked for."""
    env = {"REPLAYSSM_HARDWARE_ROUNDING": "1"} if asked else {}
    (report,) = emulate(CONVERSIONS, [], tmp_path, **env)
    assert report["90"] == {k: False for k in report["90"]}
    assert report["100"] == {
        "cvt.rs.satfinite.f16x2.f32": asked,
        "cvt.rn.satfinite.e2m1x2": True,
    }


VERIFY = """
import dataclasses, json, sys
import torch
torch.set_num_threads(1)
from replayssm_quant.kernels.bench import verify
from replayssm_quant.kernels.bench.emulate import emulated
from replayssm_quant.kernels.bench.registry import DESIGNS
from replayssm_quant.kernels.gdn import verify as gdn
from replayssm_quant.kernels.mamba2 import verify as mamba2
from replayssm_quant.state.geometry import LayerGeometry

kind, design, shape, launches = json.loads(sys.argv[1])
module = mamba2 if kind == "mamba2" else gdn
problem = verify.VerifyProblem(
    verify.OPS[f"{kind}_verify"], LayerGeometry(kind, *shape), DESIGNS[design], 2,
    device=torch.device("cpu"), tokens=5, sets=1,
)
start, found, ran = problem.pages.clone(), [], []
for launch in launches:
    module.LAUNCH = ((1, dataclasses.replace(module.LAUNCH[0][1], **launch)),)
    problem.pages.copy_(start)
    step = problem.verify_steps("mix")[0]
    with emulated(90) as names:
        verify._gate_step(problem, step, "mix", "triton")
    ran.append(names)
    found.append(problem.pages.clone())

# an input that is not finite: the work is done again, and reaches the tokens that see it alone
module.LAUNCH = ((1, dataclasses.replace(module.LAUNCH[0][1], **launches[0])),)
step = problem.verify_steps("mix")[0]
wide = step.inputs.x if kind == "mamba2" else step.inputs.v
wide[:, 2, 1, 5], wide[:, 3, 0, 20] = float("inf"), float("nan")
problem.pages.copy_(start)
with emulated(90):
    got = problem.verify(step, "triton").float()
problem.pages.copy_(start)
want = problem.verify(step, "reference").float()
fine = want.isfinite()
print(json.dumps({
    "ran": ran, "flush": step.rows.flush.tolist(),
    "differ": [int((f != found[0]).sum()) for f in found],
    "untouched": torch.equal(found[0], start),
    "fine": [torch.equal(got.isfinite(), fine), int(fine.sum()), fine.numel()],
    "error": float((got - want)[fine].norm() / want[fine].norm()),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, design, shape, launches",
    [
        ("mamba2", "e4m3-sr", [2, 32, 128, 1], [{"fused": 1}, {"fused": 0}]),
        ("gdn", "P8+4-sr-rot", [2, 32, 128, 1], [{"heads": 2}, {"heads": 1}, {"fused": 0}]),
    ],
)
def test_a_verify_step_folds_where_it_reads(
    kind: str, design: str, shape: list[int], launches: list[dict], tmp_path: Path
) -> None:
    """One launch that folds and reads: y and state by float64, and the bytes of other launches."""
    (report,) = emulate(VERIFY, [kind, design, shape, launches], tmp_path)
    assert report["flush"] == [True, False] and not report["untouched"]
    for launch, ran in zip(launches, report["ran"], strict=True):
        assert ran[-1] == "verify_matrix_kernel"
        assert ("flush_kernel" in ran) == (launch.get("fused") == 0)
    assert not any(report["differ"])
    same, finite, total = report["fine"]
    assert same and total - finite == 2 * (3 + 2)  # of two rows: tokens 2 to 4, and 3 and 4
    assert report["error"] < 3e-3  # as of a step without them
