"""Mamba-2 verification of draft tokens on Triton. Reference: ``verify_reference.verify_step``.

A step is the fold of committed inputs for the rows that are due (``flush``), then
``verify_prepare_kernel`` (a program a row and group: weights of the window, queries for the copy,
dt and B into the ring) and ``verify_kernel`` (a program a row and head: the copy read once for all
tokens, x into the ring). Nothing waits for the device; every result depends on its row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...config import StateConfig
from ...state.cache import StepRows, VerifyRows
from ...state.layout import StateViews
from ..common.activation import softplus
from ..common.planes import PTX
from ..common.store import plane_arguments
from ..common.verify import (
    TOKENS,
    LaunchConfig,
    check_devices,
    copy_product,
    copy_words,
    operand_dtype,
    operand_of,
    rotation_signs,
    row_strided,
    seen_dot,
    sees,
    store_vectors,
    zero_token,
)
from ..gdn.prepare import rotate_rows
from .flush import flush_rows
from .triton_ops import decode_step
from .verify_reference import check_verify


@triton.jit
def verify_prepare_kernel(
    # inputs [b, T, ...]: a stride from row to row and one from token to token, the rest contiguous
    dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, sign_ptr, ring_dt_ptr, ring_B_ptr,
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr,  # [b]; ancestors [b, T]
    weight_ptr, factor_ptr, c_ptr,  # fp32 [b, H, LP, T], fp32 [b, H, T], operand [b, G, N, T]
    dt_stride, dt_token, B_stride, B_token, C_stride, C_token, ring_dt_stride, ring_B_stride, width,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, LP: tl.constexpr,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROTATE: tl.constexpr, TREE: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What does not touch the state: weights of the window, factors and queries of the copy.

    NATIVE: B and C are of one 16-bit type, whose products are exact in fp32. HEADS heads at a time.
    """
    i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    if (slot < 0) | (count <= 0):
        return
    base = tl.where(tl.load(flush_ptr + i_b).to(tl.int32) != 0, 0, tl.load(valid_ptr + i_b))
    entry, n, t = tl.arange(0, LP), tl.arange(0, NP), tl.arange(0, TOKENS)
    new = entry - base
    own = (new >= 0) & (new < count)
    n_ok = (n < N)[None, :]
    ring = ring_B_ptr + slot * ring_B_stride + i_g * N + entry[:, None] * (G * N) + n[None, :]
    past = tl.load(ring, mask=(entry < base)[:, None] & n_ok, other=0.0)
    B = tl.load(
        B_ptr + i_b * B_stride + new[:, None] * B_token + i_g * N + n[None, :],
        mask=own[:, None] & n_ok,
        other=0.0,
    ).to(ring_B_ptr.dtype.element_ty)
    tl.store(ring, B, mask=own[:, None] & n_ok)
    B = tl.where(own[:, None], B, past)
    C = tl.load(
        C_ptr + i_b * C_stride + t[:, None] * C_token + i_g * N + n[None, :],
        mask=(t < count)[:, None] & n_ok,
        other=0.0,
    )
    if NATIVE:
        dots = tl.dot(B, tl.trans(C))
    else:
        dots = tl.dot(B.to(tl.float32), tl.trans(C.to(tl.float32)), input_precision="tf32x3")
    C = C.to(tl.float32)
    if ROTATE:
        C = rotate_rows(C, sign_ptr, TOKENS, N, NP)
    top = store_vectors(c_ptr + (i_b * G + i_g) * (N * TOKENS), C, True, KIND, N, NP)

    seen, paths = sees(entry, base, count, ancestors_ptr + i_b * width, TREE)
    PER: tl.constexpr = H // G
    for first in range(0, PER, HEADS):
        head = i_g * PER + first + tl.arange(0, HEADS)[:, None]
        rate = tl.load(A_ptr + head).to(tl.float32)
        dt_in = dt_ptr + i_b * dt_stride + head
        fresh = tl.load(dt_in + t[None, :] * dt_token, mask=(t < count)[None, :], other=0.0)
        again = tl.load(dt_in + new[None, :] * dt_token, mask=own[None, :], other=0.0)
        fresh, again = fresh.to(tl.float32), again.to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + head).to(tl.float32)
            fresh += bias
            again += bias
        if SOFTPLUS:
            fresh = softplus(fresh)
            again = softplus(again)
        ring_dt = ring_dt_ptr + slot * ring_dt_stride + head
        dt = tl.load(ring_dt + entry[None, :] * H, mask=(entry < base)[None, :], other=0.0)
        dt = tl.where(own[None, :], again, dt)
        tl.store(ring_dt + (base + t)[None, :] * H, fresh, mask=(t < count)[None, :])
        # log decays in fp64: differences of long sums lose nothing
        fresh = tl.where((t < count)[None, :], fresh * rate, 0.0).to(tl.float64)
        decay = (dt * rate).to(tl.float64)
        total = tl.sum(tl.where((entry < base)[None, :], decay, 0.0), 1, keep_dims=True)
        if TREE:
            path = total + tl.sum(tl.where(paths[None, :, :], fresh[:, :, None], 0.0), 1)
            mine = (new[:, None] == t[None, :])[None, :, :]
            of_own = tl.sum(tl.where(mine, path[:, None, :], 0.0), 2)
            until = tl.cumsum(tl.where((entry < base)[None, :], decay, 0.0), 1)
            until = tl.where(own[None, :], of_own, until)
        else:  # up to and with each token, and each entry
            path = total + tl.cumsum(fresh, 1)
            until = tl.cumsum(decay, 1)
        gap = tl.where(seen[None, :, :], path[:, None, :] - until[:, :, None], 0.0).to(tl.float32)
        weight = tl.exp(gap) * dt[:, :, None] * dots[None, :, :]
        at = (i_b * H + head) * LP + entry[None, :]
        tl.store(
            weight_ptr + at[:, :, None] * TOKENS + t[None, None, :],
            tl.where(seen[None, :, :], weight, 0.0),
        )
        factor = tl.exp(path.to(tl.float32)) * top[None, :]
        tl.store(factor_ptr + (i_b * H + head) * TOKENS + t[None, :], factor)


@triton.jit
def verify_kernel(
    x_ptr, z_ptr, y_ptr, D_ptr,  # [b, T, H, P], strides as above; D [H] or [H, P]
    slot_ptr, valid_ptr, flush_ptr, count_ptr, ancestors_ptr, ring_x_ptr,
    copy_ptr, copy_scale_ptr, copy_tile_ptr,
    weight_ptr, factor_ptr, c_ptr,  # see verify_prepare_kernel
    x_stride, x_token, z_stride, z_token, y_stride, y_token,
    ring_x_stride, copy_stride, copy_scale_stride, copy_tile_stride, width,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, LP: tl.constexpr, ROWS: tl.constexpr,
    COPY_HEAD: tl.constexpr, COPY_SCALE_HEAD: tl.constexpr, TILES: tl.constexpr,
    OUTPUT: tl.constexpr, D_ROWS: tl.constexpr, HAS_Z: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One head of one row, in blocks of ROWS rows; D_ROWS: D is absent (0), [H] (1), [H, P] (2)."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + i_b).to(tl.int64)
    count = tl.load(count_ptr + i_b)
    t = tl.arange(0, TOKENS)
    row = tl.arange(0, ROWS)
    y = y_ptr + i_b * y_stride + i_h * R + row[:, None] + t[None, :] * y_token
    if (slot < 0) | (count <= 0):
        for start in range(0, R, ROWS):
            mask = (start + row < R)[:, None] & (t < width)[None, :]
            tl.store(y + start, tl.zeros([ROWS, TOKENS], y_ptr.dtype.element_ty), mask=mask)
        return
    base = tl.where(tl.load(flush_ptr + i_b).to(tl.int32) != 0, 0, tl.load(valid_ptr + i_b))
    copy = copy_ptr + slot * copy_stride + i_h * COPY_HEAD
    scale = copy_scale_ptr + slot * copy_scale_stride + i_h * COPY_SCALE_HEAD
    tile = copy_tile_ptr + slot * copy_tile_stride + i_h * TILES
    words = copy_words(copy, row, row < R, N, OUTPUT)  # under way before all else
    entry = tl.arange(0, LP)
    new = entry - base
    own = (new >= 0) & (new < count)
    of = i_b * H + i_h
    weight = tl.load(weight_ptr + of * (LP * TOKENS) + entry[:, None] * TOKENS + t[None, :])
    factor = tl.load(factor_ptr + of * TOKENS + t)
    c = c_ptr + (i_b * G + i_h // (H // G)) * (N * TOKENS)
    for start in range(0, R, ROWS):
        at = start + row
        ok = at < R
        if start > 0:
            words = copy_words(copy, at, ok, N, OUTPUT)
        ring_x = ring_x_ptr + slot * ring_x_stride + i_h * R + at[:, None]
        x_in = x_ptr + i_b * x_stride + i_h * R + at[:, None]
        old_ok = ok[:, None] & (entry < base)[None, :]
        x = tl.load(ring_x + entry[None, :] * (H * R), mask=old_ok, other=0.0)
        x_new = tl.load(
            x_in + new[None, :] * x_token, mask=ok[:, None] & own[None, :], other=0.0
        ).to(ring_x_ptr.dtype.element_ty)
        x = tl.where(own[None, :], x_new, x)
        now_ok = ok[:, None] & (t < count)[None, :]
        now = tl.load(x_in + t[None, :] * x_token, mask=now_ok, other=0.0)
        now = now.to(ring_x_ptr.dtype.element_ty)
        tl.store(ring_x + (base + t)[None, :] * (H * R), now, mask=now_ok)
        read = copy_product(words, copy, scale, tile, c, at, ok, N, NP, OUTPUT)
        out = read * factor[None, :] + seen_dot(
            x, now, weight, base, count, ancestors_ptr + i_b * width, TREE
        )
        if D_ROWS == 1:
            out += tl.load(D_ptr + i_h).to(tl.float32) * now.to(tl.float32)
        elif D_ROWS == 2:
            skip = tl.load(D_ptr + i_h * R + at, mask=ok, other=0.0).to(tl.float32)
            out += skip[:, None] * now.to(tl.float32)
        if HAS_Z:
            z = z_ptr + i_b * z_stride + i_h * R + at[:, None] + t[None, :] * z_token
            z = tl.load(z, mask=now_ok, other=0.0).to(tl.float32)
            out *= z / (1.0 + tl.exp(-z))
        out = tl.where((t < count)[None, :], out, 0.0)
        tl.store(y + start, out.to(y_ptr.dtype.element_ty), mask=ok[:, None] & (t < width)[None, :])


LAUNCH = LaunchConfig(rows=64, warps=2)
"""The launch whose results were checked on an H200 (triton 3.6.0, Super geometry, commit 1ff25ad).
There a step of 5 tokens at batch 256 without a flush took 344 us with nvfp4 and 287 us with P4+8;
one warp took 293 us and 295 us, its results unchecked."""


def fold_committed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    A: torch.Tensor,
    y: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
) -> None:
    """Fold the committed inputs of the rows that flush, with a token that adds nothing.

    dt is 0 for it, so it neither decays nor writes. y [b, H, P] takes what it would read.
    """
    assert views.ring_x is not None and views.ring_B is not None
    ring, batch = views.ring_x, rows.slots.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = ring.dtype) -> torch.Tensor:
        return zero_token(shape, dtype, ring.device).expand(batch, *(-1,) * len(shape))

    x, B = zeros(*ring.shape[2:]), zeros(*views.ring_B.shape[2:])
    dt = zeros(ring.shape[2], dtype=torch.float32)
    due = StepRows(rows.slots, rows.valid, rows.flush, rows.position, rows.key)
    flush_rows(
        views, config, due, x, dt, A, B, B, y, D=None, z=None, dt_bias=None, dt_softplus=False,
        layer=layer, head_offset=head_offset,
    )  # fmt: skip


def verify_step(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
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
    """Up to T tokens for each row, as ``verify_reference.verify_step``; inputs may be strided.

    ``out`` takes y if given ([b, T, H, P]; what belongs to a token contiguous). Raises TypeError or
    ValueError before any launch.
    """
    check_verify(views, rows, x, dt, A, B, C)
    device, where = views.ckpt.device, {"layer": layer, "head_offset": head_offset}
    named = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    batch, width, heads, p = x.shape
    check_devices(device, rows, {**named, "out": out}, width)
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z has shape {tuple(z.shape)}; it must be {tuple(x.shape)} as x")
    if out is not None and (out.shape != x.shape or not out[:1, :1].is_contiguous()):
        raise ValueError(f"out has shape {tuple(out.shape)}; the step writes {tuple(x.shape)}")
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if batch == 0:
        return y
    D, dt_bias = (None if t is None else t.contiguous() for t in (D, dt_bias))
    A = A.contiguous()
    fold_committed(views, config, rows, A, y[:, 0], **where)  # y is overwritten below
    if width == 1:
        gate = None if z is None else z[:, 0]
        decode_step(
            views, config, rows.plain(), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D=D, z=gate,
            dt_bias=dt_bias, dt_softplus=dt_softplus, out=y[:, 0], **where,
        )  # fmt: skip
        return y
    x, dt, B, C = (row_strided(name, named[name]) for name in ("x", "dt", "B", "C"))  # type: ignore[arg-type]
    z = None if z is None else row_strided("z", z)
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    groups, n = B.shape[2:]
    padded, lp = triton.next_power_of_2(n), max(16, triton.next_power_of_2(views.ring_x.shape[1]))
    planes, sizes = plane_arguments(views, config)
    kind = operand_of(sizes["OUTPUT"])
    queries = (batch, groups, n, TOKENS.value)
    made = {
        "weight_ptr": torch.empty(batch, heads, lp, TOKENS.value, device=device),
        "factor_ptr": torch.empty(batch, heads, TOKENS.value, device=device),
        "c_ptr": torch.empty(*queries, dtype=operand_dtype(kind), device=device),
    }
    common = {
        "slot_ptr": rows.slots, "valid_ptr": rows.valid, "flush_ptr": rows.flush,
        "count_ptr": rows.count,
        "ancestors_ptr": rows.count if rows.ancestors is None else rows.ancestors,
        "width": width, "H": heads, "G": groups, "N": n, "NP": max(16, padded), "LP": lp,
        "TREE": rows.ancestors is not None, **made,
    }  # fmt: skip
    verify_prepare_kernel[(groups, batch)](
        dt, B, C, A, A if dt_bias is None else dt_bias,
        rotation_signs(n, device) if config.rotate else A, views.ring_dt, views.ring_B,
        dt_stride=dt.stride(0), dt_token=dt.stride(1), B_stride=B.stride(0), B_token=B.stride(1),
        C_stride=C.stride(0), C_token=C.stride(1),
        ring_dt_stride=views.ring_dt.stride(0), ring_B_stride=views.ring_B.stride(0),
        HEADS=2 if heads // groups % 2 == 0 else 1,
        SOFTPLUS=dt_softplus, HAS_BIAS=dt_bias is not None, ROTATE=config.rotate, KIND=kind,
        NATIVE=PTX.value and C.dtype == views.ring_B.dtype and C.dtype.itemsize == 2,
        num_warps=1, num_stages=1, **common,
    )  # fmt: skip
    chosen = launch or LAUNCH
    block = max(16, min(chosen.rows, triton.next_power_of_2(p)))
    names = ("copy", "copy_scale", "copy_tile")
    copy = {name + end: planes[name + end] for name in names for end in ("_ptr", "_stride")}
    verify_kernel[(heads, batch)](
        x, x if z is None else z, y, A if D is None else D,
        ring_x_ptr=views.ring_x, x_stride=x.stride(0), x_token=x.stride(1),
        z_stride=0 if z is None else z.stride(0), z_token=0 if z is None else z.stride(1),
        y_stride=y.stride(0), y_token=y.stride(1), ring_x_stride=views.ring_x.stride(0),
        R=p, ROWS=block, D_ROWS=0 if D is None else D.ndim, HAS_Z=z is not None,
        num_warps=chosen.warps, num_stages=1, **common, **copy,
        **{s: sizes[s] for s in ("COPY_HEAD", "COPY_SCALE_HEAD", "TILES", "OUTPUT")},
    )  # fmt: skip
    return y
