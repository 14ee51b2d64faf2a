"""Gated DeltaNet over a whole text at once, with the state rounded where decoding rounds it.

Within a window of L tokens the corrections solve a unit lower triangular system: with T the matrix
of b_i (k_i . k_j) a_i / a_j, they are U - W S for the state S at the window's start, where
T U = b v and T W = b a k. Outputs read the copy, U - W O and q O; the next checkpoint is made from
U - W S with the checkpoint S itself, so the copy never reaches it: the rule of
``reference.decode_step``, which replays raw inputs. See ``kernels.mamba2.scan`` for what agrees
with decoding and how closely.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...config import StateConfig
from ...formats.rotation import rotate
from ...state.replay import first_offset
from ..common.round_trip import RoundTrip
from ..mamba2.scan import FP32_CHUNK, Record, _chunked, _unchunked
from .reference import inverse_norm


def _windows(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int,
    shift: torch.Tensor,
    store: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None,
    start: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [b, s, HV, V], state [b, HV, V, K] after the last window); see the Mamba-2 scan.

    q and k normalised (q scaled) [b, s, HV, K].
    """
    s = v.shape[1]
    count = -(-(s + int(shift.max())) // chunk)
    q, k, v, g, beta = (_chunked(t, chunk, shift, count) for t in (q, k, v, g, beta))
    # q and k [c, b, HV, L, K], v [c, b, HV, L, V], g and beta [c, b, HV, L]
    cum = g.cumsum(-1)
    strict = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu_(1)
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill_(strict, float("-inf")).exp_()
    kb = k * beta[..., None]
    system = (kb @ k.transpose(-1, -2)).mul_(decay)
    since = cum.exp()[..., None]
    attend = (q @ k.transpose(-1, -2)).mul_(decay)
    del decay
    right = torch.cat([v * beta[..., None], kb.mul_(since)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    U, W = solved.split([v.shape[-1], k.shape[-1]], -1)
    del right, system
    q *= since
    k *= (cum[..., -1:] - cum).exp()[..., None]
    keep = cum[..., -1].exp()[..., None, None]
    high, low = start if start is not None else (state, state)
    out = []
    for i in range(count):
        exact = U[i] - W[i] @ high.transpose(-1, -2)  # corrections from the checkpoint
        read = exact if low is high else U[i] - W[i] @ low.transpose(-1, -2)
        y = q[i] @ low.transpose(-1, -2) + attend[i] @ read
        if low is not high:  # the flush reads the checkpoint
            y[:, :, -1:] = q[i, :, :, -1:] @ high.transpose(-1, -2) + attend[i, :, :, -1:] @ exact
        out.append(y)
        if i == count - 1 and store is not None:
            break  # a text that ends here reads no further state
        state = high * keep[i]
        flat = state.flatten(0, 1)
        torch.baddbmm(flat, exact.transpose(-1, -2).flatten(0, 1), k[i].flatten(0, 1), out=flat)
        high, low = store(state, i) if store is not None else (state, state)
    return _unchunked(torch.stack(out), shift, s), state


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    config: StateConfig | None,
    *,
    prefill: int,
    keys: torch.Tensor,
    positions: torch.Tensor,
    scale: float | None = None,
    l2norm: bool = True,
    layer: int = 0,
    head_offset: int = 0,
    record: Record | None = None,
) -> torch.Tensor:
    """Outputs [b, s, HV, V] in v's dtype of ``s`` tokens, the first ``prefill`` exact.

    q and k [b, s, HK, K] raw, v [b, s, HV, V], g (log decay) and beta [b, s, HV]. The other
    arguments are those of ``kernels.mamba2.scan.scan``.
    """
    b, s, heads, width = v.shape
    n = k.shape[-1]
    qf, kf, vf, gf, betaf = (t.float() for t in (q, k, v, g, beta))
    if l2norm:
        qf, kf = qf * inverse_norm(qf)[..., None], kf * inverse_norm(kf)[..., None]
    qf = qf * (n**-0.5 if scale is None else scale)
    per_group = heads // k.shape[2]

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(per_group, 2)

    none = torch.zeros(b, dtype=torch.int64, device=v.device)
    state = torch.zeros(b, heads, width, n, device=v.device)
    chunk = min(FP32_CHUNK, prefill)
    head = [t[:, :prefill] for t in (spread(qf), spread(kf), vf, gf, betaf)]
    y, state = _windows(state, *head, chunk, none, None, None)
    if prefill < s:
        length, shift, store, start = FP32_CHUNK, none, None, None
        qf, kf = qf[:, prefill:], kf[:, prefill:]
        if config is not None:
            length = config.buffer_len
            if config.stagger:
                offsets = [first_offset(int(key), length) for key in keys]
                shift = torch.tensor(offsets, device=v.device)
            if config.rotate:
                state, qf, kf = rotate(state), rotate(qf), rotate(kf)
            trip = RoundTrip(config, heads, width, n, keys, layer=layer, head_offset=head_offset)

            def save(value: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                rounded = trip(value, at)
                if record is not None:
                    record(*rounded, at)
                return rounded

            def store(value: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
                return save(value, positions + (i + 1) * length - shift)

            start = save(state, positions)
        rest = [spread(qf), spread(kf), *(t[:, prefill:] for t in (vf, gf, betaf))]
        tail, _ = _windows(state, *rest, length, shift, store, start)
        y = torch.cat([y, tail], 1)
    return y.to(v.dtype)
