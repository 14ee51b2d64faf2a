"""Compile the kernels of a benchmark run for a GPU that is not here, into Triton's cache.

    export TRITON_CACHE_DIR=/tmp/cache PYTHONPATH=tools/same_triton:.
    python tools/compile_for_gpu.py --arch 90 \
        --run 'mamba2_decode|nvfp4+fp16-sr,P4+8-sr-rot|super:256,super:1' \
        --run 'gdn_verify|nvfp4+fp16-sr|qwen3.5-4b:256:5' --vllm-path vllm.whl --part 1/2

A run is op|designs|points[|launches], where a point is geometry:batch, of a verify step
geometry:batch:T, and launches are field=value,... separated by ';' (default: the tables). With
--vllm-path its baselines are compiled, too. --part i/n: every n-th task, for processes side by
side. Binaries, metadata and launchers (*.cubin, *.json, *.so) of the cache are what another machine
needs: in the same folder, under the same versions of Triton and Python, with ``same_triton`` first
on PYTHONPATH there as well. Nothing runs; Triton 3.6 needs gcc, for a launcher a signature.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from replayssm_quant._paths import drop_checkout

drop_checkout()
from replayssm_quant.kernels.bench import (  # noqa: E402
    baselines,
    inspect_sass,
    tune,
    verify,
    vllm_baselines,
    warm,
)
from replayssm_quant.kernels.bench.registry import DESIGNS, OPS  # noqa: E402
from replayssm_quant.kernels.common import launch as launching  # noqa: E402

CPU = torch.device("cpu")
MULTIPROCESSORS = 132
"""Of the GPU; kernels do not depend on it, grids do."""

Task = tuple[str, Callable[[], None]]


def has_launchers() -> bool:
    """Whether this Triton compiles a launcher for each signature; later ones have one for all."""
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


def stub_driver(folder: Path) -> None:
    """Let launchers be linked and loaded here: a libcuda.so.1 of empty functions."""
    import triton

    sources = Path(triton.__file__).parent / "backends/nvidia"
    text = "".join((sources / name).read_text() for name in ("driver.py", "driver.c"))
    names = sorted(set(re.findall(r"\bcu[A-Z][A-Za-z]+(?=\()", text)))
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in names))
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", soname, "-o", library, source], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Launches have the options that they have on a GPU with compute capability 9.0 or later."""
    known = {"starts_early": lambda device: True, "multiprocessors": lambda device: MULTIPROCESSORS}
    before = []
    for name, value in known.items():
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is getattr(launching, name) and module is not launching:
                before.append((module, name, getattr(module, name)))
                setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[set[str]]:
    """Within it kernels are compiled for ``sm_<arch>`` and not run; yields their hashes."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import jit

    seen: set[str] = set()
    launchers = has_launchers()
    with as_on_a_gpu(), inspect_sass.compile_only(arch):
        run = jit.JITFunction.run

        def with_launcher(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = run(self, *args, **kwargs)
            if kernel.hash not in seen and launchers:
                CudaLauncher(kernel.src, kernel.metadata)
            seen.add(kernel.hash)
            return kernel

        jit.JITFunction.run = with_launcher
        yield seen  # compile_only puts the original back


def _decode_task(task: warm.Task, vllm: vllm_baselines.Baselines | None) -> Task:
    label = f"{task.op} {task.geometry} {task.design} batch {task.batch} {dict(task.launch)}"
    return label, lambda: warm.launch_once(task, CPU, vllm)


def _verify_task(name: str, geometry: str, design: str, batch: int, tokens: int) -> Task:
    def compile_it() -> None:
        op = verify.OPS[name]
        problem = verify.VerifyProblem(
            op, op.geometry(geometry), DESIGNS[design], batch, device=CPU, sets=1, tokens=tokens
        )
        problem.verify(problem.verify_steps("mix")[0], "triton")

    return f"{name} {geometry} {design} batch {batch} T {tokens}", compile_it


def _native_verify_task(
    vllm: Any, update: Any, name: str, geometry: str, storage: str, batch: int, tokens: int
) -> Task:
    def compile_it() -> None:
        op = verify.OPS[name]
        warm.launch_configs(
            verify.NativeVerify(
                vllm, update, op, op.geometry(geometry), batch, tokens, storage, CPU, sets=1
            )
        )

    return f"{name} {geometry} vLLM {storage} batch {batch} T {tokens}", compile_it


def tasks_of(text: str, vllm: vllm_baselines.Baselines | None, path: str | None) -> list[Task]:
    """The tasks of one --run, without repetitions. Raises SystemExit for one not understood."""
    name, designs, points, *more = text.split("|")
    ops = OPS | verify.OPS
    if name not in ops:
        raise SystemExit(f"--run '{text}': unknown op '{name}'; known: {', '.join(sorted(ops))}")
    op = ops[name]
    chosen = list(op.designs) if designs == "all" else [d for d in designs.split(",") if d]
    for design in chosen:
        if design not in DESIGNS:
            raise SystemExit(f"--run '{text}': unknown design '{design}'")
    launches = more[0].split(";") if more else [""]
    found: dict[str, Task] = {}
    for point in points.split(","):
        geometry, batch, *rest = point.split(":")
        if geometry not in op.geometries or not batch.isdigit():
            raise SystemExit(f"--run '{text}': '{point}' is no geometry:batch of {name}")
        if name.endswith("_verify"):
            tokens, small = int(rest[0]) if rest else 5, warm.small_batch(int(batch))
            made = [_verify_task(name, geometry, d, small, tokens) for d in chosen]
            if vllm is not None:
                update = verify.load_gdn_spec(path) if op.kind == "gdn" else None
                made += [
                    _native_verify_task(vllm, update, name, geometry, s, small, tokens)
                    for s in op.natives
                ]
        else:
            key, module = warm.geometry_key(op.geometry(geometry)), tune.kernels_of(op.kind)
            tasks = []
            for design in chosen:
                table = module.launch_for(DESIGNS[design], int(batch), op.geometry(geometry))
                for launch in launches:
                    config = tune.parse(launch, table) if launch else table
                    fields = warm.launch_fields(config)
                    tasks.append(warm.Task(name, key, design, int(batch), fields))
            if vllm is not None:
                tasks += [
                    warm.Task(name, key, f"vllm-{b}", int(batch)) for b in baselines.names(op)
                ]
            made = [_decode_task(warm.shrink(task), vllm) for task in tasks]
        found |= {label: (label, f) for label, f in made}
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--arch", type=int, choices=inspect_sass.ARCHITECTURES, default=90)
    p.add_argument("--run", action="append", required=True, help="op|designs|points[|launches]")
    p.add_argument("--vllm-path", help="vLLM's wheel or the folder that holds vllm/: baselines")
    p.add_argument("--part", default="1/1", help="i/n: this process's share")
    args = p.parse_args(argv)
    mine, _, parts = args.part.partition("/")
    if not (mine.isdigit() and parts.isdigit() and 1 <= int(mine) <= int(parts)):
        raise SystemExit(f"--part '{args.part}': write i/n, such as 1/2")
    vllm = vllm_baselines.load(args.vllm_path) if args.vllm_path else None
    tasks = [t for text in args.run for t in tasks_of(text, vllm, args.vllm_path)]
    tasks = tasks[int(mine) - 1 :: int(parts)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if has_launchers():
            stub_driver(Path(folder))
        for i, (label, compile_it) in enumerate(tasks):
            began = time.monotonic()
            try:
                with compiling(args.arch) as kernels:
                    compile_it()
            except Exception as error:
                failed += 1
                print(f"{label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                continue
            took = time.monotonic() - began
            print(f"{i + 1}/{len(tasks)} {label[:70]}: {len(kernels)} kernels, {took:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
