"""Gated DeltaNet in plain torch: the per-step recurrence, and the replayed step over a split
state.

Recurrence of one value head, S [V, K]: S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, y_t
= S_t q_t, with a = exp(g), unit k and q, y scaled by K^-1/2 (Yang, Kautz and Hatamizadeh, "Gated
Delta Networks", 2024). The correction b (v - a S k) depends on a state read, so folding
corrections that were read from a low-precision copy would leak the copy's error into the
checkpoint. Here the ring keeps the raw k, v, g and beta, and a flush replays the exact recurrence
from the checkpoint: the copy never reaches it.

A non-flush step pushes the query back through the window. With S_t = a S_{t-1} (I - b k k^T) + b
v k^T,

    S_t r = S_{t-1} [a (r - b (k . r) k)] + b (k . r) v

so walking from the newest token to the oldest turns q into one effective query and a weight for
each v: y = O r + sum_j w_j v_j. That equals reading the same copy O for every S k and for S q,
with a single matrix-vector product and no stored correction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...config import StateConfig
from ...formats.rotation import rotate, unrotate
from ...state.cache import StepRows, read_checkpoint, read_copy, write_state
from ...state.layout import StateViews

NORM_EPS = 1e-6


def gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, beta) in fp32 from the raw projections a, b [b, HV]: g = -exp(A_log) softplus(a +
    dt_bias).

    beta = sigmoid(b), doubled with allow_neg_eigval (OLMo-hybrid). Neither is ever rounded to
    bf16.
    """
    g = -torch.exp(A_log.float()) * F.softplus(a.float() + dt_bias.float())
    beta = torch.sigmoid(b.float())
    return g, beta * 2.0 if allow_neg_eigval else beta


def split_packed(
    views: StateViews, mixed_qkv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k [..., HK, K], v [..., HV, V] as slices of mixed_qkv [..., 2 HK K + HV V].

    Raises ValueError for another width, and for a layer whose gate has a column a key channel.
    """
    if views.ring_k is None or views.ring_v is None or views.ring_g is None:
        raise ValueError("these views belong to a Mamba-2 layer; use mamba2_decode")
    hk, n = views.ring_k.shape[2:]
    hv, width = views.ring_v.shape[2:]
    if views.ring_g.shape[3] != 1:
        raise ValueError("a gate for each key channel has no packed form; give q, k, v, g and beta")
    if mixed_qkv.shape[-1] != 2 * hk * n + hv * width:
        raise ValueError(
            f"mixed_qkv has shape {tuple(mixed_qkv.shape)}; the last must be "
            f"{2 * hk * n + hv * width}"
        )
    q, k, v = mixed_qkv.split((hk * n, hk * n, hv * width), -1)
    return q.unflatten(-1, (hk, n)), k.unflatten(-1, (hk, n)), v.unflatten(-1, (hv, width))


def inverse_norm(x: torch.Tensor, eps: float = NORM_EPS) -> torch.Tensor:
    """1 / sqrt(|x|^2 + eps) over the last axis."""
    return torch.rsqrt((x * x).sum(-1) + eps)


def recurrent_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the plain recurrence: (S q [b, HV, V], new state [b, HV, V, K]).

    q and k [b, HV, K] normalised (and q scaled) by the caller, v [b, HV, V], g [b, HV, 1 or K],
    beta [b, HV].
    """
    state = state * torch.exp(g)[:, :, None]
    correction = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + correction[..., None] * k[:, :, None]
    return (state @ q[..., None])[..., 0], state


def check_inputs(
    views: StateViews,
    rows: StepRows,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """Raise ValueError unless the shapes of a step fit each other and the layer's views."""
    if views.ring_k is None or views.ring_v is None or views.ring_g is None:
        raise ValueError("these views belong to a Mamba-2 layer; use mamba2_decode")
    b = rows.slots.shape[0]
    keys, n = views.ring_k.shape[2:]
    heads, width = views.ring_v.shape[2:]
    wanted = {"q": (b, keys, n), "k": (b, keys, n), "v": (b, heads, width), "beta": (b, heads)}
    for (name, shape), t in zip(wanted.items(), (q, k, v, beta), strict=True):
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; rows and layer need {shape}")
    gate = (b, heads, views.ring_g.shape[3])
    if tuple(g.shape) != gate and not (g.ndim == 2 and (*g.shape, 1) == gate):
        raise ValueError(f"g has shape {tuple(g.shape)}; rows and layer need {gate}")


def _ring(views: StateViews) -> tuple[torch.Tensor, ...]:
    ring = (views.ring_k, views.ring_v, views.ring_g, views.ring_beta, views.ring_rk)
    assert all(t is not None for t in ring)
    return ring  # type: ignore[return-value]


def _window(
    views: StateViews, rows: StepRows, now: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """k, v, g, beta, rk of the ring followed by this token, zero elsewhere.

    Shapes [b, T, ...], T the longest window of these rows. Rows of zeros are exact no-ops below, so
    a row's result does not depend on T, hence not on its neighbours.
    """
    length = int(rows.valid.max()) + 1
    index = torch.arange(length, device=rows.slots.device)
    old, new = index < rows.valid[:, None], index == rows.valid[:, None]
    out = []
    for ring, t in zip(_ring(views), now, strict=True):
        shape = (*old.shape, *(1,) * (t.ndim - 1))
        kept = torch.where(old.view(shape), ring[rows.slots, :length].to(t.dtype), 0)
        out.append(torch.where(new.view(shape), t[:, None], kept))
    return tuple(out)


def _keys(k: torch.Tensor, rk: torch.Tensor, per_group: int, rotated: bool) -> torch.Tensor:
    """Normalised keys of every value head, [b, L, HV, K]."""
    k = k * rk[..., None]
    return (rotate(k) if rotated else k).repeat_interleave(per_group, -2)


def _fold(state: torch.Tensor, k: torch.Tensor, window: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Checkpoint and window -> state after the window, by the exact recurrence."""
    _, v, g, beta, _ = window
    for j in range(k.shape[1]):  # a zero row (beta 0, g 0) leaves the state as it is
        _, state = recurrent_step(state, k[:, j], k[:, j], v[:, j], g[:, j], beta[:, j])
    return state + 0.0  # turns -0 into 0, as a row of zeros would


def decode_step(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
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
    """One token for each row: read, append or flush; views are updated in place.

    Shapes: q and k [b, HK, K] raw (normalised here if l2norm), v [b, HV, V], g [b, HV] or
    [b, HV, 1 or K] log decay and beta [b, HV] (``gates``), scale K^-1/2 unless given. ``compute``
    float64 gives the exact step over the same stored bytes. Returns y [b, HV, V] in v's dtype;
    padding rows are zero. Cursors are the caller's to advance. Raises ValueError for shapes that do
    not fit.
    """
    check_inputs(views, rows, q, k, v, g, beta)
    out = torch.zeros_like(v)
    live = rows.live
    if live.numel() == 0:
        return out
    r = rows.take(live)
    ring_dtype = _ring(views)[0].dtype
    per_group = v.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k_in, v_in = (t[live].to(ring_dtype).to(compute) for t in (k, v))
    q_in = q[live].to(compute)
    g_in = g[live].to(torch.float32).to(compute)
    g_in = g_in[..., None] if g_in.ndim == 2 else g_in
    beta_in = beta[live].to(torch.float32).to(compute)
    rk = inverse_norm(k_in).float().to(compute) if l2norm else torch.ones_like(k_in[..., 0])
    if l2norm:
        q_in = q_in * inverse_norm(q_in)[..., None]
    q_in = q_in * scale
    if config.rotate:
        q_in = rotate(q_in)
    q_in = q_in.repeat_interleave(per_group, 1)
    now = (k_in, v_in, g_in, beta_in, rk)
    window = _window(views, r, now)
    keys = _keys(window[0], window[4], per_group, config.rotate)
    y = torch.zeros_like(v_in)

    f = r.flush.nonzero(as_tuple=True)[0]
    if f.numel():
        rf = r.take(f)
        state = read_checkpoint(views, config, rf.slots).to(compute)
        state = _fold(state, keys[f], tuple(t[f] for t in window))
        y[f] = (state @ q_in[f][..., None])[..., 0]
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
        query, y_n = q_in[n], torch.zeros_like(v_in[n])
        _, wv, wg, wbeta, _ = (t[n] for t in window)
        wk = keys[n]
        for j in reversed(range(wk.shape[1])):
            w = wbeta[:, j] * (wk[:, j] * query).sum(-1)
            y_n = y_n + w[..., None] * wv[:, j]
            query = torch.exp(wg[:, j]) * (query - w[..., None] * wk[:, j])
        copy = read_copy(views, config, rn.slots).to(compute)
        y[n] = y_n + (copy @ query[..., None])[..., 0]
        at = (rn.slots, rn.valid.long())
        for ring, t in zip(_ring(views), now, strict=True):
            ring[at] = t[n].to(ring.dtype)
    out[live] = y.to(v.dtype)
    return out


def load_state(
    views: StateViews,
    config: StateConfig,
    rows: StepRows,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The state of each row with its ring folded in, unrotated [b, HV, V, K]; nothing is
    written."""
    index = torch.arange(_ring(views)[0].shape[1], device=rows.slots.device)
    old = index < rows.valid[:, None]
    window = tuple(
        torch.where(old.view(*old.shape, *(1,) * (t.ndim - 2)), t[rows.slots].to(compute), 0)
        for t in _ring(views)
    )
    state = read_checkpoint(views, config, rows.slots).to(compute)
    keys = _keys(window[0], window[4], state.shape[1] // window[0].shape[2], config.rotate)
    state = _fold(state, keys, window)
    return unrotate(state) if config.rotate else state
