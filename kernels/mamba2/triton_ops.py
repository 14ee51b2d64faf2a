"""Mamba-2 on Triton: ``decode_step`` and ``load_state`` with the signatures of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...config import StateConfig
from ...formats.rotation import signs
from ...state.cache import StepRows
from ...state.layout import StateViews
from ..common.store import (
    check_state_size,
    launch_warps,
    plane_arguments,
    read_state,
    rounding_sizes,
)
from .decode import step_kernel
from .reference import fold_ring


@dataclass(frozen=True)
class LaunchConfig:
    """heads a program (at most), rows a readout block, warps of readout and of flush programs."""

    heads: int
    rows: int
    warps: int
    flush_heads: int


# provisional until the bench table is committed; key: bits of the readout's codes
LAUNCH = {
    4: LaunchConfig(8, 64, 4, 2),
    8: LaunchConfig(8, 64, 4, 2),
    16: LaunchConfig(8, 64, 4, 2),
    32: LaunchConfig(8, 64, 4, 2),
}


def divisor_up_to(total: int, limit: int) -> int:
    """The largest divisor of ``total`` that is at most ``limit``."""
    return next(d for d in range(min(total, limit), 0, -1) if total % d == 0)


def decode_step(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    layer: int = 0,
    head_offset: int = 0,
    out: torch.Tensor | None = None,
    launch: LaunchConfig | None = None,
) -> torch.Tensor:
    """One token for each row, as ``reference.decode_step``; inputs may be strided by row.

    ``out`` takes y if given ([b, H, P], rows contiguous). No synchronisation, so that a CUDA graph
    can capture it; flush flags, cursors, slots and keys are read on the device.
    """
    batch, heads, p = x.shape
    groups, n = B.shape[1:]
    length = views.ring_x.shape[1]  # type: ignore[union-attr]
    check_state_size(p, n)
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if batch == 0:
        return y
    tensors = [_rows(t) for t in (x, dt, B, C)]
    z_rows = None if z is None else _rows(z)
    config_of = launch or LAUNCH[config.readout.bits]
    lp = triton.next_power_of_2(length)
    per_group = heads // groups
    args, sizes = plane_arguments(views, config)
    common = {
        "H": heads, "G": groups, "R": p, "N": n,
        "NP": triton.next_power_of_2(n), "WP": triton.next_power_of_2(n // 8),
        "L": length, "LP": lp,
        "ROTATE": config.rotate, "SOFTPLUS": dt_softplus, "HAS_BIAS": dt_bias is not None,
        "D_ROWS": 0 if D is None else D.ndim, "HAS_Z": z is not None,
    }  # fmt: skip
    device = x.device
    sign = signs(n, device) if config.rotate else tensors[0]
    weight = torch.empty(batch * heads * (lp + 1), dtype=torch.float32, device=device)
    for readout, flush in ((True, False), (False, True)):
        per_program = divisor_up_to(
            per_group, config_of.heads if readout else config_of.flush_heads
        )
        if lp > 16:
            per_program = divisor_up_to(per_group, max(1, 256 // lp))
        parts = per_group // per_program
        scratch = batch * groups * parts * n
        vector = torch.empty(scratch, dtype=torch.float32, device=device)
        window = torch.empty(scratch * length if flush else 1, dtype=torch.float32, device=device)
        step_kernel[(parts, groups, batch)](
            *tensors, tensors[0] if z_rows is None else z_rows, y,
            A, A if D is None else D, A if dt_bias is None else dt_bias, sign,
            rows.slots, rows.valid, rows.flush, rows.position, rows.key,
            views.ring_x, views.ring_dt, views.ring_B,
            weight_ptr=weight, vector_ptr=vector, window_ptr=window,
            x_stride=x.stride(0), dt_stride=dt.stride(0), B_stride=B.stride(0),
            C_stride=C.stride(0), z_stride=0 if z is None else z.stride(0), y_stride=y.stride(0),
            ring_x_stride=views.ring_x.stride(0), ring_dt_stride=views.ring_dt.stride(0),
            ring_B_stride=views.ring_B.stride(0),
            layer=layer, head_offset=head_offset,
            HEADS=per_program, HEADS_P=triton.next_power_of_2(per_program), ROWS=config_of.rows,
            READOUT=readout, FLUSH=flush,
            num_warps=config_of.warps if readout else launch_warps(n),
            **args, **common, **sizes, **rounding_sizes(config),
        )  # fmt: skip
    return y


def _rows(t: torch.Tensor) -> torch.Tensor:
    """``t`` as it is if each row is contiguous, else a contiguous copy."""
    return t if t[0].is_contiguous() else t.contiguous()


def load_state(
    views: StateViews, config: StateConfig, rows: StepRows, A: torch.Tensor
) -> torch.Tensor:
    """The state of each row with its ring folded in, as ``reference.load_state``.

    The checkpoint is decoded by a kernel; the fold of a few rows before a prefill is plain torch.
    Padding rows give zeros.
    """
    checkpoint = read_state(views, config, rows.slots)
    live = rows.slots >= 0
    safe = StepRows(
        torch.where(live, rows.slots, 0),
        torch.where(live, rows.valid, 0),
        rows.flush,
        rows.position,
        rows.key,
    )
    return fold_ring(views, config, safe, A, checkpoint)
