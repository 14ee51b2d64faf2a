"""Mamba-2 in plain torch: the per-step recurrence, and the replayed step over a split state.

Recurrence of one head, S [P, N]: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t
(Dao and Gu, "Transformers are SSMs", 2024). The replayed step keeps a checkpoint and a ring of
inputs:

    non-flush   y = O (e^a C) + sum_j w_j x_j,   w_j = e^(a - a_j) dt_j (B_j . C)
    flush       U' = e^a U + sum_j e^(a - a_j) dt_j x_j B_j^T,   y = U' C

with a the sum of dt A over the window, a_j the same up to token j, O the output copy and U the
checkpoint. O never enters U'. Kernels of this folder are checked against this file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...config import StateConfig
from ...formats.rotation import rotate, unrotate
from ...state.cache import StepRows, read_checkpoint, read_copy, write_state
from ...state.layout import StateViews


def time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, softplus: bool, compute: torch.dtype
) -> torch.Tensor:
    """dt after bias and softplus, which returns large arguments unchanged."""
    dt = dt.to(compute)
    if dt_bias is not None:
        dt = dt + dt_bias.to(compute)
    return F.softplus(dt) if softplus else dt


def recurrent_step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the plain recurrence: (y [b, H, P] without D and z, new state [b, H, P, N]).

    state [b, H, P, N], x [b, H, P], dt [b, H] after softplus, A [H], B and C [b, G, N].
    """
    per_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    decay = torch.exp(dt * A)
    state = state * decay[..., None, None] + (dt[..., None] * x)[..., None] * B[:, :, None]
    return (state @ C[..., None])[..., 0], state


def _window(
    views: StateViews, rows: StepRows, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [b, L, H, P], dt [b, L, H], B [b, L, G, N]) of the ring and this token, zero
    elsewhere."""
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    length = views.ring_x.shape[1]
    index = torch.arange(length, device=x.device)
    old = index < rows.valid[:, None]
    new = index == rows.valid[:, None]
    out = []
    for ring, now in ((views.ring_x, x), (views.ring_dt, dt), (views.ring_B, B)):
        shape = (*old.shape, *(1,) * (now.ndim - 1))
        kept = torch.where(old.view(shape), ring[rows.slots].to(now.dtype), 0)
        out.append(torch.where(new.view(shape), now[:, None], kept))
    return out[0], out[1], out[2]


def check_inputs(
    views: StateViews,
    rows: StepRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> None:
    """Raise ValueError unless the shapes of a step fit each other and the layer's views."""
    if views.ring_x is None or views.ring_B is None:
        raise ValueError("these views belong to a Gated DeltaNet layer; use gdn_decode")
    b = rows.slots.shape[0]
    heads, rows_ = views.ring_x.shape[2:]
    groups, n = views.ring_B.shape[2:]
    wanted = {"x": (b, heads, rows_), "dt": (b, heads), "B": (b, groups, n), "C": (b, groups, n)}
    wanted["A"] = (heads,)
    for (name, shape), t in zip(wanted.items(), (x, dt, B, C, A), strict=True):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {shape}")


def _append(
    views: StateViews, rows: StepRows, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor
) -> None:
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    at = (rows.slots, rows.valid.long())
    views.ring_x[at] = x.to(views.ring_x.dtype)
    views.ring_dt[at] = dt.to(views.ring_dt.dtype)
    views.ring_B[at] = B.to(views.ring_B.dtype)


def _decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay of the whole window [b, H], decay after each token [b, L, H]) of dt A [b, L, H].

    Sums run from the newest token back, so a token's own factor never passes through a difference
    of large sums, and no exponent is ever positive.
    """
    since = log_decay.flip(1).cumsum(1).flip(1)  # of the token and all that follow it
    after = torch.cat((since[:, 1:], torch.zeros_like(since[:, :1])), 1)
    return torch.exp(since[:, 0]), torch.exp(after)


def _fold(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> torch.Tensor:
    """Checkpoint and window -> state after the window, all in one precision."""
    total, after = _decays(dt * A)
    weight = after * dt
    per_group = x.shape[2] // B.shape[2]
    wx = (weight[..., None] * x).unflatten(2, (-1, per_group))
    update = torch.einsum("blgkp,blgn->bgkpn", wx, B).flatten(1, 2)
    return total[..., None, None] * state + update


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
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One token for each row: read, append or flush; views are updated in place.

    Shapes: x [b, H, P], dt [b, H] raw (bias and softplus are applied here), A [H] negative, B and
    C [b, G, N], D [H] or [H, P] or None, z [b, H, P] or None, dt_bias [H] or None. ``compute``
    float64 gives the exact step over the same stored bytes. Returns y [b, H, P] in x's dtype;
    padding rows are zero. Cursors are the caller's to advance. Raises ValueError for shapes that do
    not fit.
    """
    check_inputs(views, rows, x, dt, A, B, C)
    out = torch.zeros_like(x)
    live = rows.live
    if live.numel() == 0:
        return out
    keep, r = x.dtype, rows.take(live)
    ring_dtype = views.ring_x.dtype if views.ring_x is not None else x.dtype
    x_in = x[live].to(ring_dtype).to(compute)  # what the ring can hold, whether it flushes or not
    B_in, C_in = B[live].to(ring_dtype).to(compute), C[live].to(compute)
    step = time_step(dt[live], dt_bias, dt_softplus, torch.float32).to(compute)
    A = A.to(compute)
    wx, wdt, wB = _window(views, r, x_in, step, B_in)
    if config.rotate:
        wB, C_in = rotate(wB), rotate(C_in)
    per_group = x.shape[1] // B.shape[1]
    y = torch.zeros_like(x_in)

    f = r.flush.nonzero(as_tuple=True)[0]
    if f.numel():
        rf = r.take(f)
        state = read_checkpoint(views, config, rf.slots).to(compute)
        state = _fold(state, wx[f], wdt[f], A, wB[f])
        y[f] = (state @ C_in[f].repeat_interleave(per_group, 1)[..., None])[..., 0]
        write_state(
            views,
            config,
            rf.slots,
            state.to(torch.float32),
            rf.key,
            rf.position,
            layer=layer,
            head_offset=head_offset,
        )
    n = (~r.flush).nonzero(as_tuple=True)[0]
    if n.numel():
        rn = r.take(n)
        copy = read_copy(views, config, rn.slots).to(compute)
        total, after = _decays(wdt[n] * A)
        dots = torch.einsum("blgn,bgn->blg", wB[n], C_in[n]).repeat_interleave(per_group, 2)
        w = after * wdt[n] * dots
        c = C_in[n].repeat_interleave(per_group, 1) * total[..., None]
        y[n] = (copy @ c[..., None])[..., 0] + torch.einsum("blh,blhp->bhp", w, wx[n])
        _append(views, rn, x_in[n], step[n], B_in[n])
    if D is not None:
        y = y + (D.to(compute)[:, None] if D.ndim == 1 else D.to(compute)) * x_in
    if z is not None:
        y = y * F.silu(z[live].to(compute))
    out[live] = y.to(keep)
    return out


def load_state(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    A: torch.Tensor,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The state of each row with its ring folded in, unrotated [b, H, P, N]; nothing is written.

    For a prefill that continues a request: ``rows.valid`` ring inputs are folded into the
    checkpoint.
    """
    return fold_ring(views, config, rows, A, read_checkpoint(views, config, rows.slots), compute)


def fold_ring(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    A: torch.Tensor,
    checkpoint: torch.Tensor,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``load_state`` for a checkpoint [b, H, P, N] that is already decoded."""
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    length = views.ring_x.shape[1]
    old = torch.arange(length, device=rows.slots.device) < rows.valid[:, None]
    x = torch.where(old[..., None, None], views.ring_x[rows.slots].to(compute), 0)
    dt = torch.where(old[..., None], views.ring_dt[rows.slots].to(compute), 0)
    B = torch.where(old[..., None, None], views.ring_B[rows.slots].to(compute), 0)
    if config.rotate:
        B = rotate(B)
    state = _fold(checkpoint.to(compute), x, dt, A.to(compute), B)
    return unrotate(state) if config.rotate else state
