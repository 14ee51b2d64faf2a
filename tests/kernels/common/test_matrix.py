"""The matrix-unit readout: its PTX run by a small emulator of 32 lanes against float64."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import replayssm_quant
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.codec import float_values
from replayssm_quant.formats.packing import pack_nibbles, to_page
from replayssm_quant.formats.spec import ELEMENTS
from replayssm_quant.kernels.common import matrix
from replayssm_quant.kernels.common.spec import kernel_format

ROOT = Path(replayssm_quant.__file__).resolve().parents[1]
LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4


def _plain(value):
    """The value of a compile-time function's result."""
    return getattr(value, "value", value)


def _i8(word: np.ndarray, signed: bool) -> np.ndarray:
    """Bytes of words [..., 32] as numbers [..., 32, 4]."""
    out = word.astype(np.uint32)[..., None] >> np.array([0, 8, 16, 24], np.uint32) & 255
    return out.astype(np.uint8).view(np.int8).astype(np.int64) if signed else out.astype(np.int64)


def _f16(word: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(word, np.uint32).view(np.float16).reshape(32, 2).astype(float)


def _mma(kind: str, d: list, a: list, b: list) -> list:
    """One m16n8k32 (u8, s8) or m16n8k16 (f16) product as the PTX ISA lays out its fragments."""
    if kind == "f16":
        left, right, per = [_f16(t) for t in a], [_f16(t) for t in b], 2
    else:
        left, right, per = [_i8(t, kind == "s8") for t in a], [_i8(t, True) for t in b], 4
    depth = 8 * per
    A, B = np.zeros((16, depth)), np.zeros((depth, 8))
    for i in range(4):
        for e in range(per):
            A[G + 8 * (i % 2), Q * per + e + 4 * per * (i // 2)] = left[i][:, e]
    for i in range(2):
        for e in range(per):
            B[Q * per + e + 4 * per * i, G] = right[i][:, e]
    D = A @ B
    new = []
    for i in range(4):
        value = D[G + 8 * (i // 2), 2 * Q + i % 2]
        if kind == "f16":
            new.append((d[i].view(np.float32) + value.astype(np.float32)).view(np.uint32))
        else:
            new.append((d[i].view(np.int32) + value.astype(np.int32)).view(np.uint32))
    return new


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.concatenate([_i8(a, False), _i8(b, False)], 1)
    out = np.zeros(32, np.uint32)
    for i in range(4):
        nibble = (selector.astype(np.uint32) >> np.uint32(4 * i)) & 15
        byte = pool[LANE, nibble & 7]
        byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def emulate(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the instructions; registers are uint32 [32], a word a lane."""
    regs = dict(operands)
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
    e4m3 = e4m3.numpy().view(np.uint16)

    def value(name: str) -> np.ndarray:
        if name == "%laneid":
            return LANE.astype(np.uint32)
        if name.startswith("0f"):
            return np.full(32, int(name[2:], 16), np.uint32)
        if name[0].isdigit() or name[0] == "-":
            return np.full(32, int(name, 0) & 0xFFFFFFFF, np.uint32)
        return regs[name]

    for line in text.strip("{} ").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        if name.startswith("mma"):
            kind = "f16" if "f16" in name else name.split(".")[-3]
            groups = [[t.strip() for t in g.split(",")] for g in re.findall(r"{(.*?)}", rest)]
            new = _mma(kind, *([value(t) for t in g] for g in groups[:3]))
            regs.update(zip(groups[3], new, strict=True))
            assert groups[0] == groups[3]
            continue
        args = [t.strip(" {}") for t in rest.split(",")]
        v = [value(t) for t in args[1:] if t != "q"]
        if name == "mov.b32" and "{" in rest:
            regs["p"], regs["q"] = v[0] & 0xFFFF, v[0] >> np.uint32(16)
        elif name in ("mov.b32", "mov.f32", "mov.u32"):
            regs[args[0]] = v[0].copy()
        elif name == "xor.b32":
            regs[args[0]] = v[0] ^ v[1]
        elif name == "and.b32":
            regs[args[0]] = v[0] & v[1]
        elif name == "add.u32":
            regs[args[0]] = v[0] + v[1]
        elif name == "shr.u32":
            regs[args[0]] = v[0] >> v[1]
        elif name == "prmt.b32":
            regs[args[0]] = _prmt(*v)
        elif name == "sub.s32":
            regs[args[0]] = v[0] - v[1]
        elif name == "setp.ne.u32":
            regs[args[0]] = (v[0] != v[1]).astype(np.uint32)
        elif name == "selp.f32":
            regs[args[0]] = np.where(v[2] != 0, v[0], v[1])
        elif name == "shfl.sync.bfly.b32":
            regs[args[0]] = v[0][LANE ^ int(v[1][0])]
        elif name == "mad.lo.s32":
            regs[args[0]] = v[0] * v[1] + v[2]
        elif name == "add.rn.f32":
            regs[args[0]] = (v[0].view(np.float32) + v[1].view(np.float32)).view(np.uint32)
        elif name == "cvt.rn.f32.s32":
            regs[args[0]] = v[0].view(np.int32).astype(np.float32).view(np.uint32)
        else:
            assert name == "cvt.rn.f16x2.e4m3x2", name
            half = value(args[1])
            low, high = e4m3[half & 255], e4m3[(half >> np.uint32(8)) & 255]
            regs[args[0]] = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
    return regs


@triton.jit
def _words_kernel(c_ptr, x_ptr, out_ptr, top, COUNT: tl.constexpr, OUTPUT: tl.constexpr):
    """Operand words of x [1, 128], then what ``load_operand`` makes of them: [COUNT, 8, 4]."""
    row, n = tl.arange(0, 1)[:, None], tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + n + row)
    matrix.store_operand(c_ptr + row, x, 1.0 / top + row, row == 0, 128, OUTPUT)
    c = matrix.load_operand(c_ptr, 128, OUTPUT)
    at = tl.arange(0, 8)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    for k in tl.static_range(COUNT):
        tl.store(out_ptr + k * 32 + at, c[k])


CONFIGS = {"e2m1": ("fp16", "nvfp4"), "int4": ("P4+8", None), "int8": ("P8+4", None),
           "e4m3": ("e4m3", "same")}  # fmt: skip
WORDS = {"e2m1": 22, "int4": 18, "int8": 8, "e4m3": 16}


def _random_codes(elem: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored words int32 [16, W], values float64 [16, 128]) of sixteen rows of random codes."""
    if elem in ("e2m1", "int4"):
        codes = torch.randint(0, 16, (16, 128), generator=generator)
        values = codes - 8 if elem == "int4" else float_values(codes, ELEMENTS["e2m1"])
        return pack_nibbles(codes), values.double()
    codes = torch.randint(0, 256, (16, 128), generator=generator).to(torch.uint8)
    if elem == "int8":
        values = codes.view(torch.int8)
    else:
        codes = torch.where(codes & 127 == 127, 0, codes)
        values = float_values(codes, ELEMENTS["e4m3"])
    return to_page(codes).view(torch.int32), values.double()


@pytest.mark.parametrize("elem", CONFIGS)
def test_product(elem):
    """The PTX, emulated, gives what float64 does: per block of 4-bit codes, per row of the others.

    Bounds: c is rounded to 1 / 16256 of its largest value (4-bit) or 2**-20 of it (int8), or
    relatively to 2**-22 (e4m3); sums are exact (integers) or fp32.
    """
    kernel = kernel_format(StateConfig.from_flags(*CONFIGS[elem], buffer_len=4).readout)
    assert _plain(matrix.matrix_path(True, 128, kernel)) == elem
    assert not _plain(matrix.matrix_path(True, 96, kernel))
    assert not _plain(matrix.matrix_path(False, 128, kernel))
    generator = torch.Generator().manual_seed(5)
    stored, values = _random_codes(elem, generator)
    raw = stored.numpy().view(np.uint32)
    c = torch.randn(128, generator=generator)
    top = float(c.abs().max())
    scratch = torch.full((128,), -7, dtype=torch.int32)
    count = WORDS[elem]
    right = torch.empty(count, 8, 4, dtype=torch.int32)
    _words_kernel[(1,)](scratch, c, right, top, COUNT=count, OUTPUT=kernel)
    text, constraints = (_plain(t) for t in matrix._matrix_asm(elem))
    wide = raw.shape[1] // 16
    operands = {}
    for h in range(wide):
        for j in range(4):
            for row in range(2):  # lane 4 g + q holds words 4 q .. 4 q + 3 of rows g and g + 8
                operands[f"${4 + 2 * (4 * h + j) + row}"] = raw[G + 8 * row, 16 * h + 4 * Q + j]
    for k in range(count):
        for twice in range(2):
            at = 4 + 8 * wide + 2 * k + twice
            operands[f"${at}"] = right[k].numpy().view(np.uint32)[G, Q]
    assert len(constraints.split(",")) == 4 + len(operands)
    regs = emulate(text, operands)
    part = np.zeros((16, 8))
    for i in range(4):  # $0, $1 the even columns of both rows, $2, $3 the odd ones
        part[G + 8 * (i % 2), 2 * Q + i // 2] = regs[f"${i}"].view(np.float32)
    product = (values * c.double()).numpy()
    if elem in ("e2m1", "int4"):
        unit = top / (32512.0 if elem == "e2m1" else 16256.0)
        got, want, bound = part * unit, product.reshape(16, 8, 16).sum(-1), 2e-4
    else:
        want, bound = product.sum(-1), 1e-5
        if elem == "e4m3":
            got = part.sum(-1) * top
        else:
            got = part @ np.array([16384.0, 128.0, 1.0, 0, 0, 0, 0, 0]) / 2**20 * top
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) < bound


@pytest.mark.parametrize("rep", [2, 4, 8])
def test_sum_over_lanes(rep):
    """Lane q ends with the sums of values q rep / 4 and on, the rest is zero."""
    values = np.random.default_rng(3).normal(size=(rep, 8, 4)).astype(np.float32)
    text, constraints = (_plain(t) for t in matrix._sum_asm(rep))
    operands = {f"${rep + j}": values[j, G, Q].view(np.uint32) for j in range(rep)}
    assert len(constraints.split(",")) == 2 * rep
    regs = emulate(text, operands)
    got = np.stack([regs[f"${j}"].view(np.float32) for j in range(rep)])
    sums, keep = values.sum(-1), max(1, rep // 4)
    for j in range(keep):
        np.testing.assert_allclose(got[j], sums[Q * rep // 4 + j, G], rtol=1e-5, atol=1e-6)
    assert not got[keep:].any()


LAYOUTS = """
import dataclasses, json, sys
import torch
torch.set_num_threads(1)
from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.inspect_sass import inline_assembly, ttgir_only
from replayssm_quant.kernels.bench.registry import OPS, Problem
from replayssm_quant.kernels.bench.tune import kernels_of, launcher
from replayssm_quant.state.geometry import LayerGeometry

class Left:  # folds have tests of their own, and take most of the time
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **kwargs):
        pass
kind, cases = json.loads(sys.argv[1])
module = kernels_of(kind)
for name in ("flush_rows", "window_kernel", "flush_kernel"):
    if hasattr(module, name):
        setattr(module, name, Left())
for size, update, output, dtype, changes in cases:
    length = changes.pop("buffer_len", 16)
    config = StateConfig.from_flags(
        update, output, rotate=update.startswith("P"), buffer_len=length
    )
    geometry, cpu = LayerGeometry(kind, *size), torch.device("cpu")
    dtype = getattr(torch, dtype)
    problem = Problem(OPS[f"{kind}_decode"], geometry, config, 2, device=cpu, sets=1, dtype=dtype)
    launch = dataclasses.replace(module.launch_for(config, 256), **changes)
    with ttgir_only(90, ("readout_kernel", "step_kernel", "prepare_kernel")) as kernels:
        launcher(module, problem, launch)(problem.steps("mix")[0])
    found = []
    for _, text in kernels:
        for line, layouts in inline_assembly(text):
            if "tensor<8x16x" in line:
                continue  # of a fold's tile
            what = "sum" if "shfl" in line else "product" if "mma.sync" in line else ""
            what = "rotation" if "fma.rn.f32 $0, $0, f, v" in line else what
            if what:
                found.append([what, layouts])
    print(json.dumps(found))
"""


_M, _G, _WIDE, _HALF = (8, 64, 128, 1), (2, 128, 128, 1), "float32", "bfloat16"
LAYOUT_CASES = {
    "mamba2": [
        [_M, "fp16", "nvfp4", _HALF, {"heads": 2, "rows": 64}],
        [_M, "fp16", "nvfp4", _WIDE, {"heads": 4, "rows": 32, "ahead": 1}],
        [(4, 80, 128, 2), "P4+8", None, _WIDE, {"heads": 2, "rows": 64}],
        [_M, "P8+4", None, _WIDE, {"heads": 2, "rows": 64}],
        [_M, "e4m3", "same", _HALF, {"heads": 2, "rows": 64}],
        [(4, 128, 256, 1), "fp16", "nvfp4", _HALF, {"rows": 32}],
        [_M, "fp16", "nvfp4", _HALF, {"single": 1, "rows": 16}],
        [_M, "e4m3", "same", _HALF, {"single": 1, "rows": 32}],
    ],
    "gdn": [
        [_G, "P8+4", None, _HALF, {"rows": 64}],
        [_G, "P8+4", None, _WIDE, {"rows": 64}],
        [_G, "e4m3", "same", _WIDE, {"rows": 32, "blocks": 2, "ahead": 1}],
        [_G, "fp16", "nvfp4", _HALF, {"rows": 32, "blocks": 4, "ahead": 1}],
        [_G, "P8+4", None, _HALF, {"single": 1, "rows": 16}],
        [_G, "P8+4", None, _HALF, {"single": 1, "rows": 32, "buffer_len": 32}],
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYOUT_CASES)
def test_lanes_hold_what_the_matrix_units_want(kind: str, tmp_path: Path) -> None:
    """Both kinds of inline PTX see lane 4 g + q hold elements (., g, q), in their order."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    cases = LAYOUT_CASES[kind]
    done = subprocess.run(
        [sys.executable, "-c", LAYOUTS, json.dumps([kind, cases])],
        capture_output=True, text=True, cwd=ROOT, env=env, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for case, found in zip(cases, reports, strict=True):
        check_lanes(found, f"{kind} {case}")


def check_lanes(found: list, case: str) -> None:
    assert {kind for kind, _ in found} >= {"product", "sum"}, case
    lanes = "lane = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], warp = [], block = []"
    for kind, layouts in found:
        assert len(layouts) == 1, case
        if kind == "rotation":
            assert "sizePerThread = [1, 4], threadsPerWarp = [1, 32]" in layouts[0], case
        elif "linear" in layouts[0]:
            registers = layouts[0].split("register = ")[1].split(", lane")[0]
            steps = ["[1, 0, 0]", "[2, 0, 0]", "[4, 0, 0]"]
            wanted = [f"[{', '.join(steps[:count])}]" for count in (1, 2, 3)]
            assert lanes in layouts[0] and registers in wanted, case
        else:
            assert "threadsPerWarp = [1, 8, 4]" in layouts[0], case
            assert "warpsPerCTA = [1, 1, 1]" in layouts[0], case
            assert re.search(r"sizePerThread = \[\d, 1, 1\]", layouts[0]), case
