"""Overlapping launches: the programs of one start before those of the launch before have ended.

With programmatic dependent launch (compute capability 9.0 and later) a kernel may load what does
not depend on its predecessor while that one runs, and then waits for it. Every program of such a
kernel must wait before it ends, also one that has nothing to do: the launch after it counts on all
that came before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .planes import PTX


@triton.jit
def dependents_may_start():
    """Let programs of the next launch start, if it asks for that."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the launch before has ended and its writes are seen."""
    gdc_wait()


@lru_cache(maxsize=32)
def starts_early(device: torch.device) -> bool:
    """True if launches on this device may overlap."""
    if device.type != "cuda" or not PTX.value:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def early(start: bool) -> dict[str, bool]:
    """Launch options of a kernel that starts early."""
    return {"launch_pdl": True} if start else {}


@lru_cache(maxsize=32)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=32)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launches within run beside those that follow, until ``rejoin``."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def rejoin(device: torch.device) -> None:
    """Wait for what was launched ``beside``."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


def register_limit(most: int) -> dict[str, int]:
    """Launch options of a kernel that may use so many registers a thread (255: any number)."""
    return {} if torch.version.hip or most >= 255 else {"maxnreg": most}
