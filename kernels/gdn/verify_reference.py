"""Gated DeltaNet verification of draft tokens in plain torch; see ``reference`` for the recurrence.

A step takes T tokens a row, of which the first ``count`` are real. They are appended raw to the
ring behind the committed inputs. Each token's query is pushed back through what it sees, its own
path (the tokens before it in a chain of drafts, its ancestors in a tree) and the committed inputs,
so that all T queries meet the same output copy in one matrix product. Nothing of the step enters
the checkpoint: a row whose committed inputs fill a window folds those alone first, by the exact
recurrence and with random bits of the committed position.
"""

from __future__ import annotations

import torch

from ...config import StateConfig
from ...state.cache import VerifyRows, read_checkpoint, read_copy, write_state
from ...state.layout import StateViews
from .reference import _fold, _keys, _ring, decode_step, inverse_norm, rotate


def check_verify(
    views: StateViews,
    rows: VerifyRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """Raise ValueError unless the shapes of a step fit each other and the layer's views."""
    if views.ring_k is None or views.ring_v is None or views.ring_g is None:
        raise ValueError("these views belong to a Mamba-2 layer; use mamba2_verify")
    b, width = rows.slots.shape[0], q.shape[1] if q.ndim > 1 else 0
    length, keys, n = views.ring_k.shape[1:]
    heads, values = views.ring_v.shape[2:]
    wanted = dict.fromkeys("qk", (b, width, keys, n))
    wanted |= {"v": (b, width, heads, values), "beta": (b, width, heads)}
    for (name, shape), t in zip(wanted.items(), (q, k, v, beta), strict=True):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {shape}")
    gate = (b, width, heads, views.ring_g.shape[3])
    if tuple(g.shape) != gate and not (g.ndim == 3 and (*g.shape, 1) == gate):
        raise ValueError(f"g has shape {tuple(g.shape)}; rows and layer need {gate}")
    if not 1 <= width < max(2, length):
        raise ValueError(f"{width} tokens a row do not fit a ring of {length}; make it with drafts")


def fold_committed(
    views: StateViews,
    config: StateConfig,
    rows: VerifyRows,
    *,
    layer: int = 0,
    head_offset: int = 0,
    compute: torch.dtype = torch.float32,
) -> None:
    """Fold the committed inputs of the rows that flush into checkpoint and copy."""
    f = rows.take((rows.flush & (rows.slots >= 0)).nonzero(as_tuple=True)[0])
    if f.slots.numel() == 0:
        return
    length = int(f.valid.max())  # rows of zeros are exact no-ops, so neighbours do not matter
    old = torch.arange(length, device=f.slots.device) < f.valid[:, None]
    window = tuple(
        torch.where(old.view(*old.shape, *(1,) * (t.ndim - 2)), t[f.slots, :length].to(compute), 0)
        for t in _ring(views)
    )
    state = read_checkpoint(views, config, f.slots).to(compute)
    keys = _keys(window[0], window[4], state.shape[1] // window[0].shape[2], config.rotate)
    state = _fold(state, keys, window)
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Up to T tokens for each row: flush if due, read, append; views are updated in place.

    Shapes: q and k [b, T, HK, K] raw, v [b, T, HV, V], g [b, T, HV] or [b, T, HV, 1 or K] and beta
    [b, T, HV]; the others, and ``compute``, as in ``reference.decode_step``. Returns y
    [b, T, HV, V] in v's dtype, zero for padding rows and beyond ``rows.count``. T = 1 is a plain
    step that does not flush, bit for bit, after the fold. Cursors are the caller's to move. Raises
    ValueError for shapes that do not fit.
    """
    check_verify(views, rows, q, k, v, g, beta)
    where = {"layer": layer, "head_offset": head_offset}
    fold_committed(views, config, rows, compute=compute, **where)
    width = q.shape[1]
    if width == 1:
        inputs = (t[:, 0] for t in (q, k, v, g, beta))
        options = {"scale": scale, "l2norm": l2norm, "compute": compute}
        return decode_step(views, config, rows.plain(), *inputs, **options)[:, None]
    out = torch.zeros_like(v)
    live = rows.live
    if live.numel() == 0:
        return out
    r, rings = rows.take(live), _ring(views)
    ring_dtype, length = rings[0].dtype, rings[0].shape[1]
    per_group = v.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k_in, v_in = (t[live].to(ring_dtype).to(compute) for t in (k, v))
    q_in = q[live].to(compute)
    g_in = g[live].to(torch.float32).to(compute)
    g_in = g_in[..., None] if g_in.ndim == 3 else g_in
    beta_in = beta[live].to(torch.float32).to(compute)
    rk = inverse_norm(k_in).float().to(compute) if l2norm else torch.ones_like(k_in[..., 0])
    if l2norm:
        q_in = q_in * inverse_norm(q_in)[..., None]
    q_in = q_in * scale
    if config.rotate:
        q_in = rotate(q_in)
    query = q_in.repeat_interleave(per_group, 2)  # [b, T, HV, K]
    token = torch.arange(width, device=v.device)
    inside = token < r.count[:, None]
    row, t = inside.nonzero(as_tuple=True)
    at = (r.slots[row], (r.base[row] + t).long())
    for ring, now in zip(rings, (k_in, v_in, g_in, beta_in, rk), strict=True):
        ring[at] = now[row, t].to(ring.dtype)
    used = torch.arange(length, device=v.device) < (r.base + r.count)[:, None]
    wk, wv, wg, wbeta, wrk = (
        torch.where(used.view(*used.shape, *(1,) * (ring.ndim - 2)), ring[r.slots].to(compute), 0)
        for ring in rings
    )
    keys = _keys(wk, wrk, per_group, config.rotate)  # [b, length, HV, K]
    seen = torch.arange(length, device=v.device) < r.base[:, None]
    seen = (seen[:, None] | r.own(width, length)) & used[:, None]  # [b, T, length]
    y = torch.zeros_like(v_in)
    for j in reversed(range(length)):
        sees = seen[:, :, j, None, None]
        w = wbeta[:, None, j] * (keys[:, None, j] * query).sum(-1)
        y = y + torch.where(sees, w[..., None] * wv[:, None, j], 0)
        back = torch.exp(wg[:, None, j]) * (query - w[..., None] * keys[:, None, j])
        query = torch.where(sees, back, query)
    copy = read_copy(views, config, r.slots).to(compute)
    y = y + torch.einsum("bhvn,bthn->bthv", copy, query)
    out[live] = torch.where(inside[..., None, None], y, 0).to(v.dtype)
    return out
