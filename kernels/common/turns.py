"""The rows of a batch in two halves: the second is prepared while the first is read.

Preparation computes and reads move bytes, so each hides behind the other; by itself a preparation
leaves the memory idle for as long as one of its programs takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .launch import beside, rejoin


def in_turn(
    device: torch.device,
    batch: int,
    halves: bool,
    prepare: Callable[[slice], None],
    read: Callable[[slice], None],
) -> None:
    """Prepare and read the rows of a batch, by halves or all at once."""
    middle = batch // 2
    if middle > 16:
        middle -= middle % 16  # where pointers stay aligned
    if not halves or middle == 0:
        prepare(slice(0, batch))
        read(slice(0, batch))
        return
    first, second = slice(0, middle), slice(middle, batch)
    prepare(first)
    with beside(device, 1):
        prepare(second)
        read(second)
    read(first)
    rejoin(device, 1)


def rows_of(arguments: Mapping[str, Any], names: Iterable[str], part: slice) -> dict[str, Any]:
    """Launch arguments of which those named, tensors with a row first, are cut to some rows."""
    return {**arguments, **{name: arguments[name][part] for name in names}}
