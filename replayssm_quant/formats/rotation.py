"""Randomised Hadamard rotation along d_state (K for GDN).

R = diag(signs) H / sqrt(block): an orthogonal matrix, so B, C (or k, q) and the state may all be
multiplied by it without changing any output: S C = (S R)(R^T C). It spreads outlier channels over a
whole row, which is worth up to 2.5x in an integer format's error. The signs are a fixed Philox
stream, the same for every layer and request.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .philox import philox4x32

_SIGN_KEY = 0x48414441  # any constant: the signs are part of the format


def block_of(n: int) -> int:
    """Hadamard block: the largest power of two that divides ``n`` (96 -> 32)."""
    return n & -n


@lru_cache(maxsize=32)
def _signs(n: int) -> torch.Tensor:
    words = philox4x32(_SIGN_KEY, torch.arange(n), rounds=10)[0]
    return 1.0 - 2.0 * (words & 1).to(torch.float32)


@lru_cache(maxsize=32)
def signs(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The fixed +-1 signs, fp32 [n]; one tensor a device, not to be written to.

    Copied to a GPU once, because a copy from the host cannot be captured in a CUDA graph.
    """
    return _signs(n).to(device)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of the blocks of the last axis."""
    n = x.shape[-1]
    block = block_of(n)
    y = x.reshape(-1, block)
    width = 1
    while width < block:
        pair = y.view(-1, block // (2 * width), 2, width)
        y = torch.stack((pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]), 2).reshape(
            -1, block
        )
        width *= 2
    return y.reshape(x.shape)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x R along the last axis, in x's dtype (use fp32 or float64)."""
    n = x.shape[-1]
    return _hadamard(x * signs(n, x.device).to(x.dtype)) * block_of(n) ** -0.5


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """x R^T along the last axis: the inverse of ``rotate``."""
    n = x.shape[-1]
    return _hadamard(x) * (block_of(n) ** -0.5 * signs(n, x.device).to(x.dtype))


def matrix(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """R as fp32 [n, n]: ``rotate(x) == x @ matrix(n)``."""
    return rotate(torch.eye(n, dtype=torch.float64)).to(torch.float32).to(device)
