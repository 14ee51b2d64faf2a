"""Compile many kernels at once, ahead of their first launch.

Triton compiles a kernel when it is first launched, one after the other, and a kernel of this
package takes up to twenty seconds of one core. Nearly all of that is spent in compiler passes that
hold no Python lock, so threads compile side by side.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

OURS = __name__.split(".")[0] + "."
MOST = 32
"""Threads, at most."""


@dataclass
class Ahead:
    """What was compiled, or loaded from Triton's cache: filled when the block ends.

    errors: of kernels that do not compile; the launch itself raises them again.
    """

    threads: int
    kernels: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


def can_compile_ahead() -> bool:
    """False under Triton's interpreter, and where Triton has no asynchronous compilation."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return False
    try:
        from triton.runtime._async_compile import AsyncCompileMode  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def first_alone(name: str) -> Iterator[bool]:
    """Let one process compile for all that need the same, as ranks of one engine do.

    Of the processes that share Triton's cache and come with the same name, the first goes on (True)
    and the others wait until it is through, to find its kernels there. Nobody waits where files
    cannot be locked.
    """
    from triton import knobs

    path, alone = Path(knobs.cache.dir) / f"replayssm_quant-{name}.lock", False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                fcntl.flock(file, fcntl.LOCK_SH)
        yield alone


def _load(kernel: Any) -> None:
    """Compile a kernel's launcher, and load its binary on the current device."""
    with contextlib.suppress(Exception):  # its launch fails in the same way
        kernel.run  # noqa: B018  (a property that does it)


@contextlib.contextmanager
def compile_ahead(threads: int | None = None) -> Iterator[Ahead]:
    """Within it kernels of this package are compiled and not run; all are loaded when it ends.

    Others run as ever. threads: by default the cores of this process but one, at most ``MOST``.
    Raises RuntimeError where ``can_compile_ahead`` is False.
    """
    if not can_compile_ahead():
        raise RuntimeError("this Triton compiles no kernel ahead; see can_compile_ahead")
    from triton.runtime import jit
    from triton.runtime._async_compile import AsyncCompileMode

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = Ahead(threads or max(1, min(MOST, (cores or 2) - 1)))
    run, start = jit.JITFunction.run, time.perf_counter()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        ours = self.fn.__module__.startswith(OURS)
        return run(self, *args, grid=grid, warmup=warmup or ours, **kwargs)

    # a thread has a current device of its own
    device = (torch.cuda.current_device(),) if torch.cuda.is_initialized() else ()
    begin = torch.cuda.set_device if device else None
    with ThreadPoolExecutor(found.threads, initializer=begin, initargs=device) as pool:
        mode = AsyncCompileMode(pool, ignore_errors=True)
        jit.JITFunction.run = compile_only
        try:
            with mode:
                yield found
        finally:
            jit.JITFunction.run = run
        problems = [future.exception() for future in mode.raw_futures]
        done = zip(mode.raw_futures, problems, strict=True)
        list(pool.map(_load, [future.result() for future, problem in done if problem is None]))
    found.errors = [f"{type(e).__name__}: {e}" for e in problems if e is not None]
    found.kernels, found.seconds = len(problems), time.perf_counter() - start
