"""What every kernel asks of its arguments, raised by name before any launch; never waits for the
device."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...config import StateConfig
from ...state.cache import StepRows
from ...state.layout import StateViews

_ROW_DTYPES = {
    "valid": torch.int32,
    "flush": torch.bool,
    "position": torch.int32,
    "key": torch.int64,
}


LEAST_CAPABILITY = (8, 9)
"""Compute capability that converts fp8 in hardware, as the kernels' inline PTX does."""


@lru_cache(maxsize=32)
def check_gpu(device: torch.device) -> None:
    """Raise ValueError for an NVIDIA GPU that the kernels do not run on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; "
            f"the kernels need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later: use "
            "impl='reference'"
        )


def check_rows(rows: StepRows, device: torch.device) -> None:
    """Raise TypeError or ValueError unless the control rows have the dtypes and shapes needed."""
    slots = rows.slots
    if slots.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"rows.slots is {slots.dtype}; it must be int64 (or int32)")
    if slots.device != device:
        raise ValueError(f"rows are on {slots.device}, the state on {device}; move them there")
    for name, dtype in _ROW_DTYPES.items():
        if getattr(rows, name).dtype != dtype:
            raise TypeError(f"rows.{name} is {getattr(rows, name).dtype}; it must be {dtype}")
    for name in ("slots", *_ROW_DTYPES):
        value = getattr(rows, name)
        if value.ndim != 1 or value.shape != slots.shape or not value.is_contiguous():
            raise ValueError(
                f"rows.{name} has shape {tuple(value.shape)} and strides {value.stride()}; every "
                f"vector needs one entry a row, contiguous, as slots {tuple(slots.shape)}"
            )


def _contiguous_slot(t: torch.Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def check_views(views: StateViews, ring: torch.Tensor, config: StateConfig) -> None:
    """Raise ValueError unless the views fit the config's window and each slot is contiguous."""
    views.check_ring(ring, config.buffer_len)
    for name, view in views.tensors().items():
        if not _contiguous_slot(view):
            raise ValueError(
                f"{name} has strides {view.stride()}; a slot must be contiguous, only the stride "
                "from slot to slot is free"
            )


def check_tensor(
    name: str, t: torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    """Raise unless ``t`` is a floating-point tensor of one of the shapes on the device."""
    if not t.is_floating_point():
        raise TypeError(f"{name} is {t.dtype}; it must be a floating-point tensor")
    if tuple(t.shape) not in shapes:
        wanted = " or ".join(str(s) for s in shapes)
        raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {wanted}")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}, the state on {device}; move it there")
