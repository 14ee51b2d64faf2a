"""Per-token signals against the reference: KL divergence, top-1 agreement, loss. In nats, float64.

The divergence is KL(reference || candidate) over the whole vocabulary. Where the vocabulary is
large, only the reference's ``SUPPORT`` likeliest tokens are kept and the rest of both distributions
is lumped into one event; merging events never raises a divergence, so that is a lower bound, and
the results say which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

FULL_VOCABULARY = 4096
SUPPORT = 256
_CHUNK = 4_000_000  # logits in float64 at a time


@dataclass
class TokenSignals:
    """Arrays [n, T - 1] over predictions t -> t + 1; kld and agree are None for the reference."""

    loss: np.ndarray
    right: np.ndarray
    finite: np.ndarray
    predicted: np.ndarray
    kld: np.ndarray | None
    agree: np.ndarray | None


@dataclass
class Reference:
    """What the reference said about every token of a set of streams, in the order added."""

    logits: list[torch.Tensor] = field(default_factory=list)
    top: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    argmax: list[torch.Tensor] = field(default_factory=list)
    vocabulary: int = 0

    @property
    def support(self) -> str:
        """How much of the vocabulary the divergence covers."""
        full = self.vocabulary <= FULL_VOCABULARY
        return "full vocabulary" if full else f"top {SUPPORT} and the rest as one"

    def add(self, logits: torch.Tensor) -> None:
        """Keep one stream's logits [T - 1, V]."""
        self.vocabulary = logits.shape[-1]
        self.argmax.append(logits.argmax(-1).to("cpu", torch.int32))
        if self.vocabulary <= FULL_VOCABULARY:
            self.logits.append(logits.float().cpu())
            return
        values, index, rest = [], [], []
        for part in _split(logits):
            logp = part.double().log_softmax(-1)
            best, at = logp.topk(SUPPORT, -1)
            values.append(best.cpu())
            index.append(at.to("cpu", torch.int32))
            rest.append(torch.log1p(-best.exp().sum(-1).clamp(max=1 - 1e-15)).cpu())
        self.top.append((torch.cat(values), torch.cat(index), torch.cat(rest)))

    def divergence(self, row: int, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(KL [T - 1] in nats, agreement of the likeliest token) of stream ``row``."""
        device = logits.device
        agree = logits.argmax(-1).cpu() == self.argmax[row]
        out = []
        start = 0
        for part in _split(logits):
            stop = start + len(part)
            q = part.double().log_softmax(-1)
            if self.vocabulary <= FULL_VOCABULARY:
                p = self.logits[row][start:stop].to(device).double().log_softmax(-1)
                kld = (p.exp() * (p - q)).sum(-1)
            else:
                best, at, rest = (t[start:stop].to(device) for t in self.top[row])
                q_best = q.gather(-1, at.long())
                q_rest = torch.log1p(-q_best.exp().sum(-1).clamp(max=1 - 1e-15))
                kld = (best.exp() * (best - q_best)).sum(-1) + rest.exp() * (rest - q_rest)
            out.append(kld.cpu())
            start = stop
        return torch.cat(out).clamp(min=0).numpy(), agree.numpy()


def _split(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits.split(max(1, _CHUNK // logits.shape[-1]))


def signals(
    logits: torch.Tensor, ids: torch.Tensor, first_row: int, reference: Reference | None
) -> TokenSignals:
    """Signals of a batch: logits [b, T, V], ids [b, T]; row b is stream ``first_row + b``.

    A token whose logits are not all finite counts as wrong, with infinite loss and divergence.
    """
    logits, target = logits[:, :-1], ids[:, 1:].to(logits.device)
    finite = torch.isfinite(logits).all(-1)
    predicted = logits.argmax(-1)
    right = (predicted == target) & finite
    losses, klds, agrees = [], [], []
    for b, row in enumerate(logits):
        parts = zip(_split(row), target[b].split(max(1, _CHUNK // row.shape[-1])), strict=True)
        losses.append(
            torch.cat([-p.double().log_softmax(-1).gather(-1, t[:, None])[:, 0] for p, t in parts])
        )
        if reference is not None:
            kld, agree = reference.divergence(first_row + b, row)
            klds.append(kld)
            agrees.append(agree)
    ok = finite.cpu().numpy()
    loss = torch.stack(losses).cpu().numpy()
    loss[~ok] = np.inf
    kld = agree = None
    if reference is not None:
        kld, agree = np.stack(klds), np.stack(agrees) & ok
        kld[~ok] = np.inf
    return TokenSignals(loss, right.cpu().numpy(), ok, predicted.cpu().numpy(), kld, agree)


def join(parts: list[TokenSignals]) -> TokenSignals:
    """Batches of one arm, in order, as one."""

    def stack(name: str) -> np.ndarray | None:
        values = [getattr(p, name) for p in parts]
        return None if values[0] is None else np.concatenate(values)

    return TokenSignals(
        *(stack(n) for n in ("loss", "right", "finite", "predicted", "kld", "agree"))
    )
