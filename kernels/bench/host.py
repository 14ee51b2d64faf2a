"""The host's part of an engine step in vLLM: what it costs, and a leaner one for every arm alike.

A step of 256 requests costs vLLM's scheduler and bookkeeping many milliseconds of one core. Where
that is more than the GPU needs, tokens a second say nothing about the state. The parts below change
no token and no kernel. They need the engine in the process that asks
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ...backends.vllm.blocks import shortcut

PARTS = {
    "blocks": "no look for new cache blocks in steps that need none",
    "spin": "waits for the GPU spin instead of sleeping",
    "gc": "no garbage collection while requests run",
    "hooks": "no calls of Triton's launch hooks while there are none",
    "answers": "no processing of outputs before a request ends",
}
"""What ``lean`` can change, and how it does."""


def _spinning(event: type) -> type:
    """``torch.cuda.Event`` whose ``blocking`` is never set."""

    class Spinning(event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **how: Any) -> Any:
            return super().__new__(cls, enable_timing=enable_timing, blocking=False, **how)

    return Spinning


def _of_ended(process: Callable) -> Callable:
    """``process_outputs`` of the requests alone that end; what they said before is lost."""

    def process_outputs(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        return process([o for o in outputs if o.finish_reason is not None], *args, **kwargs)

    return process_outputs


@contextlib.contextmanager
def lean(
    parts: Collection[str] = tuple(PARTS), runner: Any = None, processor: Any = None
) -> Iterator[None]:
    """Run the engine of this process with the named ``PARTS`` of a leaner host.

    runner: its model runner, whose own event for input copies (V1) then spins as well. processor:
    its output processor. Raises ValueError for an unknown part.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"unknown part '{part}'; known: {', '.join(PARTS)}")
    with contextlib.ExitStack() as undo:
        if "blocks" in parts:
            from vllm.v1.core.kv_cache_manager import KVCacheManager

            undo.callback(setattr, KVCacheManager, "allocate_slots", KVCacheManager.allocate_slots)
            KVCacheManager.allocate_slots = shortcut(KVCacheManager.allocate_slots)
        if "spin" in parts:
            import torch

            undo.callback(setattr, torch.cuda, "Event", torch.cuda.Event)
            torch.cuda.Event = _spinning(torch.cuda.Event)
            if getattr(runner, "prepare_inputs_event", None) is not None:
                undo.callback(setattr, runner, "prepare_inputs_event", runner.prepare_inputs_event)
                runner.prepare_inputs_event = torch.cuda.Event()
        if "hooks" in parts:
            runtime = None
            with contextlib.suppress(ImportError, AttributeError):  # no Triton, or one without
                import triton

                runtime = triton.knobs.runtime
            for name in ("launch_enter_hook", "launch_exit_hook"):
                hook = getattr(runtime, name, None)  # a list of calls, made at each launch
                if hook is not None and not getattr(hook, "calls", True):
                    undo.callback(setattr, runtime, name, hook)
                    setattr(runtime, name, None)
        if "answers" in parts and processor is not None:
            process = processor.process_outputs
            undo.callback(delattr, processor, "process_outputs")
            processor.process_outputs = _of_ended(process)
        if "gc" in parts and gc.isenabled():
            gc.collect()
            undo.callback(gc.enable)
            gc.disable()
        yield


def split_cores(count: int) -> tuple[set[int], set[int]]:
    """(cores to measure on, all others) of those this process may use.

    ``count`` to measure on; what shares a physical core with them is in neither. Both are all cores
    if that leaves none to others, or ``count`` is 0.
    """
    every = os.sched_getaffinity(0)
    quiet = set(sorted(every)[:count])
    near = set(quiet)
    for core in quiet:
        with contextlib.suppress(OSError, ValueError):
            topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            for part in topology.read_text().split(","):
                first, _, last = part.strip().partition("-")
                near.update(range(int(first), int(last or first) + 1))
    rest = every - near
    return (quiet, rest) if quiet and rest else (every, every)


def move_to(cores: set[int]) -> None:
    """Let every thread of this process run on these cores alone."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)


class Sampler:
    """Where the main thread spends its time, by a signal each millisecond.

    A sample counts the time since the one before, so a long call of C code, which a signal cannot
    interrupt, counts in full where it was made. Times are in seconds.
    """

    def __init__(self, every: float = 1e-3):
        self.every = every
        self.own: Counter[str] = Counter()
        """by file, function and line of what ran"""
        self.within: Counter[str] = Counter()
        """by file and function of what ran or was waiting for what it called"""
        self.total = 0.0
        self._last = 0.0

    def _note(self, _: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self.total += took
        if frame is not None:
            self.own[f"{_name(frame)}:{frame.f_lineno}"] += took
        seen = set()
        while frame is not None:
            seen.add(_name(frame))
            frame = frame.f_back
        for name in seen:
            self.within[name] += took

    def __enter__(self) -> Sampler:
        self._before = signal.signal(signal.SIGALRM, self._note)
        self._last = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self.every, self.every)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def table(self, steps: int, top: int = 60) -> dict[str, list[list[Any]]]:
        """The longest of both kinds, as [name, milliseconds a step]."""

        def longest(counts: Counter[str]) -> list[list[Any]]:
            return [[name, round(s / steps * 1e3, 4)] for name, s in counts.most_common(top)]

        return {"own": longest(self.own), "within": longest(self.within)}


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{getattr(code, 'co_qualname', code.co_name)}"


def thread_seconds() -> dict[str, float]:
    """Processor time of each thread of this process so far, by name and id; empty off Linux."""
    out = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            user, system = rest.split()[11:13]
            out[f"{name}-{task.name}"] = (int(user) + int(system)) / tick
    return out
