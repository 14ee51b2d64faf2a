"""Mamba-2 verification of draft tokens in plain torch; see ``reference`` for the recurrence.

A step takes T tokens a row, of which the first ``count`` are real. They are appended to the ring
behind the committed inputs and read causally over the same output copy O:

    y_t = O (e^(a_t) C_t) + sum over committed and path of w_tj x_j,  w_tj = e^(a_t - a_j) dt_j
    (B_j . C_t)

with a_t the sum of dt A over the committed inputs and the token's path: the tokens before it in a
chain of drafts, its ancestors in a tree. Nothing of the step enters the checkpoint. A row whose
committed inputs fill a window folds those alone first, with random bits of the committed position:
folding them again, beside other drafts, writes the same bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...config import StateConfig
from ...state.cache import VerifyRows, read_checkpoint, read_copy, write_state
from ...state.layout import StateViews
from .reference import _fold, decode_step, rotate, time_step


def check_verify(
    views: StateViews,
    rows: VerifyRows,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> None:
    """Raise ValueError unless the shapes of a step fit each other and the layer's views."""
    if views.ring_x is None or views.ring_B is None:
        raise ValueError("these views belong to a Gated DeltaNet layer; use gdn_verify")
    b, width = rows.slots.shape[0], x.shape[1] if x.ndim > 1 else 0
    length, heads, rows_ = views.ring_x.shape[1:]
    groups, n = views.ring_B.shape[2:]
    wanted = {"x": (b, width, heads, rows_), "dt": (b, width, heads), "A": (heads,)}
    wanted |= dict.fromkeys("BC", (b, width, groups, n))
    for (name, shape), t in zip(wanted.items(), (x, dt, A, B, C), strict=True):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {shape}")
    if not 1 <= width < max(2, length):
        raise ValueError(f"{width} tokens a row do not fit a ring of {length}; make it with drafts")


def fold_committed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    A: torch.Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
    compute: torch.dtype = torch.float32,
) -> None:
    """Fold the committed inputs of the rows that flush into checkpoint and copy."""
    f = rows.take((rows.flush & (rows.slots >= 0)).nonzero(as_tuple=True)[0])
    if f.slots.numel() == 0:
        return
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    old = torch.arange(views.ring_x.shape[1], device=f.slots.device) < f.valid[:, None]
    x, B = (
        torch.where(old[..., None, None], ring[f.slots].to(compute), 0)
        for ring in (views.ring_x, views.ring_B)
    )
    dt = torch.where(old[..., None], views.ring_dt[f.slots].to(compute), 0)
    state = read_checkpoint(views, config, f.slots).to(compute)
    state = _fold(state, x, dt, A.to(compute), rotate(B) if config.rotate else B)
    write_state(
        views,
        config,
        f.slots,
        state.to(torch.float32),
        f.key,
        f.position,
        layer=layer,
        head_offset=head_offset,
    )


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
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Up to T tokens for each row: flush if due, read, append; views are updated in place.

    Shapes: x and z [b, T, H, P], dt [b, T, H] raw, B and C [b, T, G, N]; the others, and
    ``compute``, as in ``reference.decode_step``. Returns y [b, T, H, P] in x's dtype, zero for
    padding rows and beyond ``rows.count``. T = 1 is a plain step that does not flush, bit for bit,
    after the fold. Cursors are the caller's to move. Raises ValueError for shapes that do not fit.
    """
    check_verify(views, rows, x, dt, A, B, C)
    fold_committed(views, config, rows, A, layer=layer, head_offset=head_offset, compute=compute)
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "compute": compute}
    if x.shape[1] == 1:
        plain = rows.plain()
        gate = None if z is None else z[:, 0]
        y = decode_step(
            views, config, plain, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], z=gate, **options
        )
        return y[:, None]
    out = torch.zeros_like(x)
    live = rows.live
    if live.numel() == 0:
        return out
    assert views.ring_x is not None and views.ring_dt is not None and views.ring_B is not None
    r, width = rows.take(live), x.shape[1]
    ring_dtype, length = views.ring_x.dtype, views.ring_x.shape[1]
    x_in, B_in = (t[live].to(ring_dtype).to(compute) for t in (x, B))
    C_in = C[live].to(compute)
    step = time_step(dt[live], dt_bias, dt_softplus, torch.float32).to(compute)
    A = A.to(compute)
    index = torch.arange(length, device=x.device)
    token = torch.arange(width, device=x.device)
    inside = token < r.count[:, None]
    row, t = inside.nonzero(as_tuple=True)
    at = (r.slots[row], (r.base[row] + t).long())
    rings = (views.ring_x, views.ring_dt, views.ring_B)
    for ring, now in zip(rings, (x_in, step, B_in), strict=True):
        ring[at] = now[row, t].to(ring.dtype)
    used = index < (r.base + r.count)[:, None]
    wx, wdt, wB = (
        torch.where(used.view(*used.shape, *(1,) * (ring.ndim - 2)), ring[r.slots].to(compute), 0)
        for ring in rings
    )

    # which ring entries each token sees [b, T, length]; what it does not see may be anything
    old = (index < r.base[:, None])[:, None].expand(-1, width, -1)
    seen = (old | r.own(width, length))[..., None]
    since = torch.where(seen, (wdt * A)[:, None], 0).flip(2).cumsum(2).flip(2)
    after = torch.cat((since[:, :, 1:], torch.zeros_like(since[:, :, :1])), 2)
    per_group = x.shape[2] // B.shape[2]
    dots = torch.einsum("blgn,btgn->btlg", wB, C_in).repeat_interleave(per_group, 3)
    w = torch.exp(after) * wdt[:, None] * dots
    y = torch.zeros_like(x_in)
    for j in range(length):
        y = y + torch.where(seen[:, :, j, :, None], w[:, :, j, :, None] * wx[:, None, j], 0)
    copy = read_copy(views, config, r.slots).to(compute)
    c = rotate(C_in) if config.rotate else C_in
    c = c.repeat_interleave(per_group, 2) * torch.exp(since[:, :, 0])[..., None]
    y = y + torch.einsum("bhpn,bthn->bthp", copy, c)
    if D is not None:
        y = y + (D.to(compute)[:, None] if D.ndim == 1 else D.to(compute)) * x_in
    if z is not None:
        y = y * F.silu(z[live].to(compute))
    out[live] = torch.where(inside[..., None, None], y, 0).to(x.dtype)
    return out
