"""Mamba-2 on Triton: ``decode_step`` and ``load_state`` with the signatures of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...config import StateConfig
from ...formats.rotation import block_of
from ...state.cache import StepRows
from ...state.geometry import LayerGeometry
from ...state.layout import StateViews
from ..common.check import check_gpu, check_rows, check_tensor, check_views
from ..common.fold import rotation_table
from ..common.hadamard import rotation_signs
from ..common.keys import settle_keys
from ..common.launch import beside, early, register_limit, rejoin, starts_early
from ..common.matrix import block_rows, matrix_path
from ..common.planes import PTX
from ..common.store import (
    check_state_size,
    fold_warps,
    launch_warps,
    plane_arguments,
    read_state,
    rounding_sizes,
)
from .decode import readout_kernel
from .flush import flush_rows, window_terms
from .prepare import prepare_kernel
from .reference import check_inputs, fold_ring
from .step import step_kernel


@dataclass(frozen=True)
class LaunchConfig:
    """How a step is launched.

    heads: of a readout program, at most, or 0: it takes one block of a group's rows, of whatever
    heads (matrix units only); across: 1 to take 0 where a head is no whole number of blocks; rows:
    of a block; ahead: 1 to load the next block while one is worked on; warps: of a readout program
    without matrix units; registers: of a thread of one with them, at most (255: any number), where
    d_state is at most 128.

    flush: programs that flush for each multiprocessor (half as many of two warps where d_state is
    256); flush_registers: of one, at most; beside: 1 to flush on a stream beside the reads, 0 after
    them.

    single: 1 to do all of that in one launch whose programs prepare for themselves and read
    ``rows`` rows of a head each, or fold 16; only ``rows`` counts then.
    """

    heads: int
    rows: int
    ahead: int = 0
    warps: int = 1
    flush: int = 16
    flush_registers: int = 128
    beside: int = 0
    single: int = 0
    registers: int = 255
    across: int = 0


_FEW = ((1, LaunchConfig(1, 32, single=1)), (1024, LaunchConfig(1, 64, single=1)))
_SOME = LaunchConfig(0, 64, flush=12, flush_registers=168, beside=1)
_FEW_WIDE = (
    (1, LaunchConfig(1, 16, single=1)),
    (1024, LaunchConfig(1, 32, single=1)),
    (2113, LaunchConfig(1, 16, flush=12, flush_registers=168, beside=1)),
)
_E2M1 = LaunchConfig(2, 64, flush=12, flush_registers=168, beside=1, registers=128, across=1)
_E4M3 = LaunchConfig(0, 64, flush=8, beside=1, registers=96)
_INTEGER = LaunchConfig(2, 64, flush=8, flush_registers=168, beside=1, registers=128)
_WIDE = LaunchConfig(4, 64, warps=2, flush=12, beside=1)
LAUNCH: dict[str, tuple[tuple[int, LaunchConfig], ...]] = {
    "float4": (*_FEW, (2113, _SOME), (12288, _E2M1)),
    "int4": ((1, LaunchConfig(1, 64, single=1)), (2048, _SOME), (12288, _INTEGER)),
    "float8": (*_FEW, (2113, _SOME), (12288, _E4M3)),
    "int8": (*_FEW, (2048, _SOME), (12288, _INTEGER)),
    "float16": (*_FEW_WIDE, (16385, _WIDE)),
    "float32": _FEW_WIDE,
}
"""Kind of the readout's elements -> (smallest ``fold_warps`` of the batch, launch configuration),
ascending. A multiprocessor of the H200 holds 16 warps of the kernels that fold, the GPU 2,112.

The registers of a multiprocessor belong to its four schedulers, 16,384 each: a scheduler holds four
one-warp programs of up to 128 registers, three of up to 168, five of up to 96. What was timed in
the mix at batch 256 (NVIDIA H200, triton 3.6.0), in microseconds:

- nvfp4 + fp16 (commit 1c6323e): Super 94 as here, 96 with one block a program or 8 flush programs;
  Nano-4B (80 rows a head) 92 as here, 93 with 8 flush programs, 101 by heads.
- P4+8 (commit effcc5a): Super 98 as here, 101 with at most 112 registers, 99 with one block a
  program and 96 registers, 109 with 128, 100 with 6 flush programs. P8+4 and int8 are taken over.
- e4m3: Super 102 as here (commit 1c6323e); 101 with two heads a program (commit d0d926b).
- Falcon-H1 (d_state 256, commit d0d926b): 111 with 6 flush programs of 168 registers, 128 with 12
  of 128.

Few sequences (commits 7a0a659, 7b87599; ``kernels/bench/results/variants-*`` have all). One launch
prepares for each head and 32 or 64 rows anew, so it loses where the GPU is full: nvfp4 + fp16 takes
6.6 in one launch and 7.5 in four on Super at batch 4 (2,048 warps), 11.1 and 11.0 at 8, 19.1 and
15.0 at 16. Flushing after the reads instead of beside them cost most of what small batches lost
before: 15.3 on Super at 8. Where d_state is 256 it takes 8.7 and 7.5 on Falcon-H1 at 2, 12.8 and
9.4 at 4. Alone P4+8 takes 4.8 with 64 rows a program and 4.9 with 32, P8+4 5.1 and 5.0. fp32 states
take 9.8 in one launch and 13.3 in four on Nano-30B at 8 (2,048 warps), on Falcon-H1 at 8 (3,072)
21.9 and 17.0; alone 5.3 with 16 rows a program and 6.3 with 32; on Super at 32 46.9, and 51.1 as
``_WIDE``, at 64 85 and 92, at 256 301 and 331 (commit d001aef). P8+4 takes 9.9 in one launch and
8.0 in four on Super at 4 (2,048 warps), P4+8 7.8 and 7.5, and each the same on Nano-30B at 8.
"""
LARGE = {"float32": ((16385, _WIDE),)}
"""More rows of ``LAUNCH``, where d_state is above 128."""


def launch_for(
    config: StateConfig, batch: int, geometry: LayerGeometry | None = None
) -> LaunchConfig:
    """What ``LAUNCH`` says for a readout format and a batch (default: of Nemotron-3-Super)."""
    kind = "int" if config.readout.element.startswith("int") else "float"
    name = f"{kind}{config.readout.bits}"
    large = geometry is not None and geometry.n > 128
    table = LAUNCH[name] + (LARGE.get(name, ()) if large else ())
    warps = max(batch, 1) * (512 if geometry is None else fold_warps(geometry))
    chosen = [c for least, c in table if least <= warps][-1]
    if chosen.single and large and config.readout.bits <= 8 and batch > 1:
        # each program would prepare 256 columns
        return next(c for _, c in table if not c.single)
    return chosen


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
    check_state_size(p, n)
    device = views.ckpt.device
    check_gpu(device)
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
    _run(
        y, views, config, rows, x, dt, A, B, C, D, z, dt_bias, dt_softplus, layer, head_offset,
        launch,
    )  # fmt: skip
    return y


# compiled code calls the operators of ``ops``; a direct call stays out of its graph
@torch.compiler.disable
def _run(
    y: torch.Tensor,
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    layer: int,
    head_offset: int,
    launch: LaunchConfig | None = None,
) -> None:
    """One step into y [b, H, P]; arguments are checked."""
    ring_x, ring_dt, ring_B = views.ring_x, views.ring_dt, views.ring_B
    assert ring_x is not None and ring_dt is not None and ring_B is not None
    length = ring_x.shape[1]
    if length == 1:  # every row flushes
        y.zero_()
        flush_rows(
            views, config, rows, x, dt, A, B, C, y, D=D, z=z, dt_bias=dt_bias,
            dt_softplus=dt_softplus, layer=layer, head_offset=head_offset,
        )  # fmt: skip
        return
    batch, heads, p = x.shape
    groups, n = B.shape[1:]
    device, per_group = x.device, heads // groups
    launch = launch or launch_for(config, batch, LayerGeometry("mamba2", heads, p, n, groups))
    planes, sizes = plane_arguments(views, config)
    matrix = matrix_path(PTX.value, n, sizes["OUTPUT"]) != "" and p % 8 == 0
    start = starts_early(device)
    lp = max(4, triton.next_power_of_2(length))
    padded, wp = triton.next_power_of_2(n), triton.next_power_of_2(n // 8)
    if launch.single:
        window = max(16, lp)
        left, terms = window_terms(config, ring_B.dtype)
        block = min(launch.rows, max(16, triton.next_power_of_2(p)))
        warps = 1 if matrix else launch_warps(n)
        block = block_rows(block, n, ring_x.dtype, config.readout) if matrix else block
        sizes_of = [batch * heads * k for k in (lp + 4, n, 4, window, 4, n, lp)]  # each aligned
        columns = torch.empty(sum(sizes_of), device=device).split(sizes_of)
        step_kernel[(batch * heads * sizes["TILES"],)](
            x, x if z is None else z, y, dt, B, C, A, A if D is None else D,
            A if dt_bias is None else dt_bias,
            rotation_signs(n, device) if config.rotate else A,
            rotation_table(n, device) if config.rotate else A,
            rows.slots, rows.valid, rows.flush, rows.position, rows.key,
            ring_x, ring_dt, ring_B,
            weight_ptr=columns[0], c_ptr=columns[1].view(torch.int32), top_ptr=columns[2],
            fold_ptr=columns[3], decay_ptr=columns[4], vector_ptr=columns[5], dot_ptr=columns[6],
            window_ptr=torch.empty(
                batch * heads * terms * window * 8 * wp, device=device,
                dtype=torch.bfloat16 if PTX.value else torch.float32,
            ),
            x_stride=x.stride(0), z_stride=0 if z is None else z.stride(0), y_stride=y.stride(0),
            dt_stride=dt.stride(0), B_stride=B.stride(0), C_stride=C.stride(0),
            ring_x_stride=ring_x.stride(0), ring_dt_stride=ring_dt.stride(0),
            ring_B_stride=ring_B.stride(0), layer=layer, head_offset=head_offset,
            H=heads, G=groups, R=p, N=n, NP=padded, WP=wp, LP=lp, LPW=window, ROWS=block,
            TERMS=terms, LEFT=left, WARPS=warps, MATRIX=matrix, ROTATE=config.rotate,
            BLOCK=block_of(n), SOFTPLUS=dt_softplus, HAS_BIAS=dt_bias is not None,
            D_ROWS=0 if D is None else D.ndim, HAS_Z=z is not None,
            num_warps=warps, num_stages=1, **planes, **sizes, **rounding_sizes(config),
        )  # fmt: skip
        return

    def fold() -> None:
        flush_rows(
            views, config, rows, x, dt, A, B, C, y, D=D, z=z, dt_bias=dt_bias,
            dt_softplus=dt_softplus, layer=layer, head_offset=head_offset,
            per_multiprocessor=max(1, launch.flush // launch_warps(n)),
            registers=launch.flush_registers,
        )  # fmt: skip

    if launch.beside:
        with beside(device):
            fold()
    reading = {
        "weight_ptr": torch.empty(batch, heads, lp + 2, device=device),
        "c_ptr": torch.empty(batch, groups, n, dtype=torch.int32, device=device),
        "top_ptr": torch.empty(batch, groups, device=device),
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "H": heads, "G": groups, "N": n, "LP": lp, "OUTPUT": sizes["OUTPUT"], "EARLY": start,
    }  # fmt: skip
    prepare_kernel[(groups, batch)](
        dt, B, C, A, A if D is None else D, A if dt_bias is None else dt_bias,
        rotation_signs(n, device) if config.rotate else A,
        ring_dt_ptr=ring_dt, ring_B_ptr=ring_B,
        dot_ptr=torch.empty(batch, groups, lp, device=device),
        dt_stride=dt.stride(0), B_stride=B.stride(0), C_stride=C.stride(0),
        ring_dt_stride=ring_dt.stride(0), ring_B_stride=ring_B.stride(0),
        NP=padded, PER=per_group, PERP=triton.next_power_of_2(per_group),
        MATRIX=matrix, ROTATE=config.rotate, SOFTPLUS=dt_softplus, HAS_BIAS=dt_bias is not None,
        HAS_D=D is not None and D.ndim == 1, num_warps=1, **reading,
    )  # fmt: skip
    block = block_rows(launch.rows, n, ring_x.dtype, config.readout) if matrix else launch.rows
    shared = launch.heads == 0 or (launch.across == 1 and p % block != 0)
    shared = shared and matrix and p % 16 == 0 and per_group * p % block == 0
    count = divisor_up_to(per_group, max(1, launch.heads))
    span = block if shared else count * p
    names = ("copy", "copy_scale", "copy_tile")
    copy = {name + end: planes[name + end] for name in names for end in ("_ptr", "_stride")}
    readout_kernel[(batch * heads * p // span,)](
        x, x if z is None else z, y, A if D is None else D, ring_x_ptr=ring_x,
        x_stride=x.stride(0), z_stride=0 if z is None else z.stride(0), y_stride=y.stride(0),
        ring_x_stride=ring_x.stride(0), R=p, WP=wp, HEADS=count,
        ROWS=block, AHEAD=bool(launch.ahead) and matrix, SHARED=shared, MATRIX=matrix,
        D_ROWS=0 if D is None else D.ndim, HAS_Z=z is not None,
        num_warps=1 if matrix else launch.warps, **copy, **reading, **early(start),
        **register_limit(launch.registers if matrix and n <= 128 else 255),
        **{s: sizes[s] for s in ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES")},
    )  # fmt: skip
    if launch.beside:
        rejoin(device)
    else:
        fold()


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


settle_keys(*(f"{__package__}.{name}" for name in ("decode", "flush", "prepare", "step")))
