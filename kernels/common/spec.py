"""What a kernel needs to know of a format, as compile-time values."""

from __future__ import annotations

import torch

from ...formats.spec import Format

KernelFormat = tuple[str, int, float, str, int, str, int]


def kernel_format(fmt: Format) -> KernelFormat:
    """(element, low bits, largest code, granularity, block, scale dtype, round up) of a format.

    The element of a planar format is that of its high plane, ``int4`` or ``int8``. Raises
    ValueError for what no kernel stores.
    """
    if fmt.scale.granularity == "head":
        raise ValueError(
            f"{fmt.name}: one scale a head spans several tiles and has no kernel; use a row or "
            "block scale"
        )
    element = fmt.element if not fmt.is_planar else f"int{fmt.bits}"
    spec = fmt.scale
    return (
        element,
        fmt.lo_bits,
        fmt.max_code,
        spec.granularity,
        spec.block,
        spec.dtype,
        int(spec.round_up),
    )


def words(t: torch.Tensor | None) -> torch.Tensor | None:
    """A view [slots, words a slot] of a plane as int32; the slot stride may be anything."""
    if t is None:
        return None
    return t.flatten(1).view(torch.int32)


def slot_stride(t: torch.Tensor | None) -> int:
    """Elements from slot to slot, 0 for an absent plane."""
    return 0 if t is None else t.stride(0)
