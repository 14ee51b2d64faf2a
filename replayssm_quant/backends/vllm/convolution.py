"""The convolution's rolling state where steps verify drafts. No vLLM here.

vLLM keeps kernel - 1 + drafts columns a slot. A step of ``count`` tokens drops the oldest column
and puts its tokens behind the others, and the next one reads from as many columns further on as it
finds tokens accepted beyond the first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def roll(state: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor, kernel: int) -> None:
    """Move the kernel - 1 columns that a prefill reads to the front, by ``columns`` int64 [b].

    state [slots, channels, columns], any strides; slots int64 [b], distinct.
    """
    index = columns[:, None] + torch.arange(kernel - 1, device=columns.device)
    rows = state[slots]
    index = index[:, None].expand(-1, state.shape[1], -1)
    state[slots, :, : kernel - 1] = rows.gather(2, index)


def update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor,
    shift: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """``causal_conv1d_update`` of vLLM's GPU build in torch: rows of several tokens each.

    x [tokens, channels], state [slots, channels, columns], weight [channels, kernel], shift [b]
    accepted tokens (at least 1), starts [b + 1]; slot -1 skips a row. Returns [tokens, channels].
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation '{activation}' is not supported; use silu")
    out, kernel = torch.empty_like(x), weight.shape[1]
    bounds = starts.tolist()
    for row, (slot, taken) in enumerate(zip(slots.tolist(), shift.tolist(), strict=True)):
        first, last = bounds[row], bounds[row + 1]
        if slot < 0 or first == last:
            continue
        past = state[slot, :, taken - 1 : taken + kernel - 2].to(weight.dtype)
        new = x[first:last].T.to(weight.dtype)
        y = F.conv1d(
            torch.cat((past, new), 1)[None], weight[:, None], bias, groups=weight.shape[0]
        )[0]
        y = y if activation is None else F.silu(y)
        out[first:last] = y.T.to(x.dtype)
        kept = torch.cat((past[:, 1:], new), 1).to(state.dtype)
        state[slot, :, : kept.shape[1]] = kept
    return out
