"""What the compiler made of the kernels: registers, spills and instructions, without a GPU.

``python -m replayssm_quant.kernels.bench.inspect_sass --op mamba2_decode --arch 90``. The public
operation is called on CPU tensors while every Triton launch is caught, compiled for the given
architecture with the ptxas that Triton carries, and not run; so what is compiled is exactly what a
GPU would launch. ``TRITON_INTERPRET`` must not be set. Instruction counts are static: a loop's body
counts once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._paths import drop_checkout
from ...config import StateConfig
from ...state.geometry import LayerGeometry
from .registry import DESIGNS, OPS, Op, Problem

ARCHITECTURES = (90, 100)


@dataclass
class Launch:
    """One caught launch: the kernel's name, its grid, its warps, its machine code and the text that
    says which lane holds what of a tensor (Triton's ttgir)."""

    name: str
    grid: tuple[int, ...]
    num_warps: int
    cubin: bytes
    ptx: str
    ttgir: str

    @property
    def programs(self) -> int:
        out = 1
        for size in self.grid:
            out *= size
        return out


class _Target:
    """Stands in for Triton's CUDA driver: it has a target, and no device."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches binaries by device: one an architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[Launch]]:
    """Within it Triton kernels compile for ``sm_<arch>`` and do not run; yields what was launched.

    Raises ValueError under the interpreter, which compiles nothing.
    """
    from triton.runtime import driver, jit

    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    found: list[Launch] = []
    run, before = jit.JITFunction.run, driver._active

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        meta = kernel.metadata
        texts = (kernel.asm[name] for name in ("cubin", "ptx", "ttgir"))
        found.append(Launch(meta.name, tuple(grid), meta.num_warps, *texts))
        return kernel

    jit.JITFunction.run = catch
    driver._active = _Target(arch)
    try:
        yield found
    finally:
        jit.JITFunction.run = run
        driver._active = before


def inline_assembly(ttgir: str) -> Iterator[tuple[str, list[str]]]:
    """Each line of a kernel that has inline PTX, with the layouts of its tensors."""
    layouts = dict(re.findall(r"^(#[a-z0-9]+) = (#ttg.*)$", ttgir, re.M))
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line:
            kinds = set(re.findall(r"tensor<[0-9x]+[a-z0-9]+, (#[a-z0-9]+)>", line))
            yield line, [layouts[kind] for kind in kinds]


class _Stopped(Exception):
    """Carries what a kernel was when its compilation was stopped."""


@contextlib.contextmanager
def ttgir_only(arch: int, kernels: Container[str] | None = None) -> Iterator[list[tuple[str, str]]]:
    """As ``compile_only``, up to where each tensor has its layout (Triton's ttgir), a third faster.

    kernels: names of those that count; others are not compiled. Yields (name, text) of each launch.
    """
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import jit

    found: list[tuple[str, str]] = []

    def stop(self: Any, src: Any, *args: Any) -> None:
        raise _Stopped(str(src))

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if kernels is not None and self.__name__ not in kernels:
            return
        try:
            text = compiled(self, *args, **kwargs).asm["ttgir"]  # whole, from Triton's cache
        except _Stopped as stopped:
            (text,) = stopped.args
        found.append((self.__name__, text))

    with compile_only(arch):
        compiled, lower = jit.JITFunction.run, CUDABackend.make_llir
        jit.JITFunction.run, CUDABackend.make_llir = launch, stop
        try:
            yield found
        finally:
            jit.JITFunction.run, CUDABackend.make_llir = compiled, lower


def compile_op(
    op: Op,
    geometry: LayerGeometry,
    config: StateConfig,
    arch: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 4,
) -> list[Launch]:
    """Every launch of one decode step of the operation, compiled for ``sm_<arch>``."""
    problem = Problem(op, geometry, config, batch, device=torch.device("cpu"), dtype=dtype, sets=1)
    step = problem.steps("mix")[0]
    with compile_only(arch) as found:
        problem.run(step, "triton")
    return found


def _tool(name: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (folder / name).is_file():
        raise ValueError(f"this Triton carries no {name}")
    return str(folder / name)


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


@dataclass
class Machine:
    """Resources of a kernel and its static instruction count by opcode."""

    registers: int
    stack: int
    shared: int
    opcodes: collections.Counter[str]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(n for op, n in self.opcodes.items() if op.split(".")[0] in ("LDL", "STL"))


def disassemble(launch: Launch) -> Machine:
    """Read a launch's machine code with Triton's cuobjdump and nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(launch.cubin)
        env = os.environ | {
            "PATH": f"{Path(_tool('nvdisasm')).parent}{os.pathsep}{os.environ['PATH']}"
        }

        def dump(*flags: str) -> str:
            done = subprocess.run(
                [_tool("cuobjdump"), *flags, str(path)],
                capture_output=True,
                text=True,
                check=True,
                env=env,
            )
            return done.stdout

        usage = dict(_RESOURCE.findall(dump("--dump-resource-usage")))
        opcodes: collections.Counter[str] = collections.Counter()
        for line in dump("--dump-sass").splitlines():
            match = _INSTRUCTION.match(line)
            if match and match[1] not in ("NOP", "BRA"):
                opcodes[match[1]] += 1
    return Machine(
        int(usage.get("REG", 0)), int(usage.get("STACK", 0)), int(usage.get("SHARED", 0)), opcodes
    )


def describe(launch: Launch, elements: int, top: int = 0) -> str:
    """One line: resources, instructions, and thread instructions for each state element.

    elements: state elements that the whole grid handles.
    """
    m = disassemble(launch)
    per_program = elements / launch.programs
    per_element = m.instructions * 32 * launch.num_warps / per_program
    line = (
        f"{launch.name:36s} warps {launch.num_warps:2d} regs {m.registers:3d} stack {m.stack:4d} "
        f"spill {m.spills:3d} shared {m.shared:6d} sass {m.instructions:5d} "
        f"per element {per_element:7.2f}"
    )
    if top:
        groups: collections.Counter[str] = collections.Counter()
        for opcode, count in m.opcodes.items():
            groups[opcode.split(".")[0]] += count
        line += "\n    " + " ".join(f"{name} {count}" for name, count in groups.most_common(top))
    return line


def main(argv: list[str] | None = None) -> int:
    drop_checkout()
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.kernels.bench.inspect_sass",
        description="Compile the decode kernels without a GPU; print registers, spills and SASS.",
    )
    p.add_argument("--op", choices=sorted(OPS), default="mamba2_decode")
    p.add_argument("--geometry", help="a name of the operation's geometries")
    p.add_argument("--design", default="all", help="names separated by commas, or all")
    p.add_argument("--arch", type=int, choices=ARCHITECTURES, default=90)
    p.add_argument("--buffer-len", type=int, help="another ring length")
    p.add_argument("--top", type=int, default=0, help="print so many of the commonest opcodes")
    p.add_argument("--sass", type=Path, help="folder for cubin and PTX files")
    args = p.parse_args(argv)
    op = OPS[args.op]
    try:
        geometry = op.geometry(args.geometry or op.default)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    designs = list(DESIGNS) if args.design == "all" else args.design.split(",")
    batch = 4
    for name in designs:
        if name not in DESIGNS:
            raise SystemExit(f"unknown design '{name}'; known: {', '.join(DESIGNS)}")
        config = DESIGNS[name]
        if args.buffer_len:
            config = dataclasses.replace(config, buffer_len=args.buffer_len)
        print(name)
        for i, launch in enumerate(compile_op(op, geometry, config, args.arch, batch=batch)):
            print("  " + describe(launch, geometry.elements * batch, args.top), flush=True)
            if args.sass:
                args.sass.mkdir(parents=True, exist_ok=True)
                stem = args.sass / f"{name}-{i}-{launch.name}"
                stem.with_suffix(".cubin").write_bytes(launch.cubin)
                stem.with_suffix(".ptx").write_text(launch.ptx)
    return 0


if __name__ == "__main__":
    sys.exit(main())
