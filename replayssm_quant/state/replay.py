"""The flush rule and ring positions, in integers: no tensors, no formats.

A window is the run of tokens from one flush to the next. Before a step the ring holds ``valid``
inputs, 0 <= valid < L. The step flushes if it is the last of its window; then the ring is empty
again.
"""

from __future__ import annotations

from dataclasses import dataclass


def flushes(valid: int, buffer_len: int) -> bool:
    """True if the step that follows ``valid`` ring inputs completes a window of ``buffer_len``."""
    if not 0 <= valid < buffer_len:
        raise ValueError(
            f"ring holds {valid} inputs, but a window of {buffer_len} allows 0 to "
            f"{buffer_len - 1}; the cursor was not reset at a flush"
        )
    return valid + 1 == buffer_len


def first_offset(request_key: int, buffer_len: int) -> int:
    """How many tokens earlier than L the first flush of a staggered request comes, 0 to L - 1.

    A pure function of the request's key, so a request flushes at the same positions in any batch.
    """
    return ((request_key >> 17) & 0xFFFFFFFF) % buffer_len


@dataclass(frozen=True)
class Step:
    """One step of a request: ring index of the input (-1 at a flush), and whether it flushes."""

    position: int
    valid: int
    flush: bool


def schedule(prompt: int, steps: int, buffer_len: int, offset: int = 0) -> list[Step]:
    """The steps that follow a prompt of ``prompt`` tokens; the first window is ``offset`` shorter.

    ``position`` counts the tokens in the state after the step, as the random bits of a flush do.
    """
    if not 0 <= offset < buffer_len:
        raise ValueError(f"offset {offset} is outside 0 to {buffer_len - 1}")
    out, valid, shortened = [], 0, offset
    for i in range(steps):
        flush = flushes(valid + shortened, buffer_len)
        out.append(Step(prompt + i + 1, valid, flush))
        valid = 0 if flush else valid + 1
        shortened = 0 if flush else shortened
    return out
