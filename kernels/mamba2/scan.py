"""Mamba-2 over a whole text at once, with the state rounded exactly where decoding rounds it.

Replayed decoding is a chunked scan whose chunk is the window of L tokens: within a window outputs
are sums over its own inputs plus a read of the state that the last flush left, and the state moves
on once a window. So a teacher-forced text needs one pass instead of one step a token. The carried
state is rounded by the same codec with the same random bits at the same positions as in
``reference.decode_step``; sums run in another order, so values agree to fp32 precision and a code
differs only where that moves a value over a rounding boundary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...config import StateConfig
from ...formats.rotation import rotate
from ...state.replay import first_offset
from ..common.round_trip import RoundTrip
from .reference import time_step

FP32_CHUNK = 64
Record = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _chunked(t: torch.Tensor, chunk: int, shift: torch.Tensor, count: int) -> torch.Tensor:
    """[b, s, H, ...] -> contiguous [count, b, H, chunk, ...]: row r moved right by shift[r] < chunk
    tokens, zeros around."""
    b, s = t.shape[:2]
    out = t.new_zeros(b, count * chunk, *t.shape[2:])
    if int(shift.max()) == int(shift.min()):
        out[:, int(shift[0]) : int(shift[0]) + s] = t
    else:
        at = shift[:, None] + torch.arange(s, device=t.device)
        out[torch.arange(b, device=t.device)[:, None], at] = t
    out = out.unflatten(1, (count, chunk)).transpose(0, 1)
    return out.transpose(2, 3).contiguous()


def _unchunked(t: torch.Tensor, shift: torch.Tensor, s: int) -> torch.Tensor:
    """The inverse of ``_chunked``: [count, b, H, chunk, P] -> [b, s, H, P]."""
    t = t.permute(1, 0, 3, 2, 4).flatten(1, 2)
    if int(shift.max()) == int(shift.min()):
        return t[:, int(shift[0]) : int(shift[0]) + s]
    at = shift[:, None] + torch.arange(s, device=t.device)
    return t[torch.arange(t.shape[0], device=t.device)[:, None], at]


def _windows(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk: int,
    shift: torch.Tensor,
    store: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] | None,
    start: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [b, s, H, P] without D, state after the last window).

    store(state, i) rounds at the end of window i; without it the state stays fp32. start: the
    rounded (checkpoint, copy) of ``state``.
    """
    b, s, heads, p = x.shape
    groups, n = B.shape[2:]
    r = heads // groups
    count = -(-(s + int(shift.max())) // chunk)
    x, dt, B, C = (_chunked(t, chunk, shift, count) for t in (x, dt, B, C))
    # x [c, b, H, L, P], dt [c, b, H, L], B and C [c, b, G, L, N]
    cum = (dt * A[:, None]).cumsum(-1)
    x *= dt[..., None]
    # within a window
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    decay = cum[..., :, None] - cum[..., None, :]
    decay.masked_fill_(~causal, float("-inf")).exp_()
    decay.unflatten(2, (groups, r)).mul_((C @ B.transpose(-1, -2))[:, :, :, None])
    y = decay @ x
    del decay
    # from window to window
    since, keep = cum.exp()[..., None], cum[..., -1:, None].exp()
    into = x.mul_((cum[..., -1:] - cum).exp()[..., None]).transpose(-1, -2)  # [c, b, H, P, L]
    high, low = start if start is not None else (state, state)

    def read(stored: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
        out = C @ stored.view(b, groups, r * p, n).transpose(-1, -2)  # [b, G, L, r P]
        return out.unflatten(3, (r, p)).transpose(2, 3).flatten(1, 2)

    for i in range(count):
        # every token but the last of a window reads the copy; the flush reads the checkpoint
        out = read(low, C[i])
        if high is not low:
            out[:, :, -1:] = read(high, C[i, :, :, -1:])
        y[i].addcmul_(out, since[i])
        if i == count - 1 and store is not None:
            break  # a text that ends here reads no further state
        state = high * keep[i]
        flat = state.view(b * groups, r * p, n)
        moved = into[i].reshape(b * groups, r * p, chunk)
        torch.baddbmm(flat, moved, B[i].flatten(0, 1), out=flat)
        high, low = store(state, i) if store is not None else (state, state)
    return _unchunked(y, shift, s), state


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    config: StateConfig | None,
    *,
    prefill: int,
    keys: torch.Tensor,
    positions: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    layer: int = 0,
    head_offset: int = 0,
    record: Record | None = None,
) -> torch.Tensor:
    """Outputs fp32 [b, s, H, P] of ``s`` tokens, the first ``prefill`` of them by an exact prefill.

    x [b, s, H, P], dt [b, s, H] raw, A [H] negative, B and C [b, s, G, N], D [H], dt_bias [H].
    dt_limit clamps dt in the prefill only, as transformers does. config None keeps the state in
    fp32. keys int64 [b] and positions int [b] (real tokens in the prefill) determine the random
    bits. record(checkpoint, copy, positions) sees the state after each store; what it keeps it
    must clone.
    """
    b, s, heads, p = x.shape
    n = B.shape[3]
    xf, Bf, Cf = x.float(), B.float(), C.float()
    step = time_step(dt, dt_bias, dt_softplus, torch.float32)
    A = A.float()
    none = torch.zeros(b, dtype=torch.int64, device=x.device)
    state = torch.zeros(b, heads, p, n, device=x.device)
    first = step[:, :prefill].clamp(dt_limit[0], dt_limit[1])
    head = [t[:, :prefill] for t in (xf, Bf, Cf)]
    chunk = min(FP32_CHUNK, prefill)
    y, state = _windows(state, head[0], first, A, head[1], head[2], chunk, none, None, None)
    if prefill < s:
        rest = [t[:, prefill:] for t in (xf, step, Bf, Cf)]
        length, shift, store, start = FP32_CHUNK, none, None, None
        if config is not None:
            length = config.buffer_len
            if config.stagger:
                offsets = [first_offset(int(k), length) for k in keys]
                shift = torch.tensor(offsets, device=x.device)
            if config.rotate:
                state, rest[2], rest[3] = rotate(state), rotate(rest[2]), rotate(rest[3])
            trip = RoundTrip(config, heads, p, n, keys, layer=layer, head_offset=head_offset)

            def save(value: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                rounded = trip(value, at)
                if record is not None:
                    record(*rounded, at)
                return rounded

            def store(value: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
                return save(value, positions + (i + 1) * length - shift)

            start = save(state, positions)
        tail, _ = _windows(
            state, rest[0], rest[1], A, rest[2], rest[3], length, shift, store, start
        )
        y = torch.cat([y, tail], 1)
    if D is not None:
        y = y + D.float()[:, None] * xf
    if y.dtype != x.dtype:  # a decode step returns its activations' dtype, a prefill fp32
        y[:, prefill:] = y[:, prefill:].to(x.dtype).float()
    return y.contiguous()
