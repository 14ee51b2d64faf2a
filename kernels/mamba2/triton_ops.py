"""Mamba-2 on Triton: ``decode_step`` and ``load_state`` with the signatures of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...config import StateConfig
from ...formats.rotation import signs
from ...state.cache import StepRows
from ...state.layout import StateViews
from ..common.check import check_rows, check_tensor, check_views
from ..common.store import (
    check_state_size,
    plane_arguments,
    read_state,
)
from .decode import readout_kernel
from .flush import flush_rows
from .reference import check_inputs, fold_ring


@dataclass(frozen=True)
class LaunchConfig:
    """heads a readout program (at most), rows of a block, warps."""

    heads: int
    rows: int
    warps: int


# NVIDIA H200, triton 3.6.0, Super geometry, batch 256, nvfp4 + fp16 SR, commit 260b7a6: this had
# the best step of seven tried (242 us; readout 104 us); other widths of the copy were not tried.
# key: bits of the readout's codes
_BEST = LaunchConfig(heads=4, rows=64, warps=2)
LAUNCH = {4: _BEST, 8: _BEST, 16: _BEST, 32: _BEST}


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
    check_inputs(views, rows, x, dt, A, B, C)
    batch, heads, p = x.shape
    groups, n = B.shape[1:]
    length = views.ring_x.shape[1]  # type: ignore[union-attr]
    check_state_size(p, n)
    device = views.ckpt.device
    check_rows(rows, device)
    check_views(views, views.ring_x, config)  # type: ignore[arg-type]
    per_head, per_row = ((heads,),), ((batch, heads, p),)
    for name, t in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C)):
        check_tensor(name, t, (tuple(t.shape),), device)
    if D is not None:
        check_tensor("D", D, (*per_head, (heads, p)), device)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, per_head, device)
    if z is not None:
        check_tensor("z", z, per_row, device)
    if out is not None:
        check_tensor("out", out, per_row, device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if batch == 0:
        return y
    x, dt, B, C = (_rows(t) for t in (x, dt, B, C))
    z = None if z is None else _rows(z)
    A, D, dt_bias = (None if t is None else t.contiguous() for t in (A, D, dt_bias))
    chosen = launch or LAUNCH[config.readout.bits]
    lp = triton.next_power_of_2(length)
    per_group = heads // groups
    planes, sizes = plane_arguments(views, config)
    ring = (views.ring_x, views.ring_dt, views.ring_B)
    inputs = {
        "x_ptr": x, "dt_ptr": dt, "B_ptr": B, "C_ptr": C, "z_ptr": x if z is None else z,
        "y_ptr": y, "A_ptr": A, "D_ptr": A if D is None else D,
        "bias_ptr": A if dt_bias is None else dt_bias,
        "sign_ptr": signs(n, device) if config.rotate else A,
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "weight_ptr": torch.empty(batch * heads * (lp + 1), dtype=torch.float32, device=device),
        "x_stride": x.stride(0), "dt_stride": dt.stride(0), "B_stride": B.stride(0),
        "C_stride": C.stride(0), "z_stride": 0 if z is None else z.stride(0),
        "y_stride": y.stride(0),
    }  # fmt: skip
    for name, t in zip(("ring_x", "ring_dt", "ring_B"), ring, strict=True):
        inputs |= {f"{name}_ptr": t, f"{name}_stride": t.stride(0)}  # type: ignore[union-attr]
    common = {
        "H": heads, "G": groups, "R": p, "N": n, "LP": lp,
        "NP": triton.next_power_of_2(n), "WP": triton.next_power_of_2(n // 8),
        "ROTATE": config.rotate, "SOFTPLUS": dt_softplus, "HAS_BIAS": dt_bias is not None,
        "D_ROWS": 0 if D is None else D.ndim, "HAS_Z": z is not None,
    }  # fmt: skip
    copy_names = ("copy", "copy_scale", "copy_tile")
    copy_planes = {f"{c}{e}": planes[f"{c}{e}"] for c in copy_names for e in ("_ptr", "_stride")}
    copy_sizes = ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES", "OUTPUT")

    def split(limit: int) -> tuple[int, int]:
        """(heads a unit, units a group) where a unit takes up to ``limit`` heads."""
        count = divisor_up_to(per_group, limit if lp <= 16 else max(1, 256 // lp))
        return count, per_group // count

    if length > 1:  # with L = 1 every row flushes
        count, parts = split(chosen.heads)
        vector = torch.empty(batch * groups * parts * n, dtype=torch.float32, device=device)
        readout_kernel[(parts, groups, batch)](
            vector_ptr=vector, HEADS=count, HEADS_P=triton.next_power_of_2(count),
            ROWS=chosen.rows, num_warps=chosen.warps,
            **inputs, **copy_planes, **common, **{k: sizes[k] for k in copy_sizes},
        )  # fmt: skip
    else:
        y.zero_()
    flush_rows(
        views, config, rows, x, dt, A, B, C, y,
        D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, layer=layer, head_offset=head_offset,
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
    check_rows(rows, views.ckpt.device)
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
