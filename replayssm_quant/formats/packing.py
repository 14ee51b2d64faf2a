"""Packing of 4-bit codes, eight to a 32-bit word, in plane order.

Nibble ``i`` (bits 4i to 4i + 3) of word ``j`` of a row is element ``n = i * (N / 8) + j``. With
d_state 128 each nibble plane is 16 consecutive elements, one NVFP4 block, and nibbles i and i + 4
sit 16 bits apart, so that one 32-bit operation decodes two elements into a pair of fp16 numbers.
"""

from __future__ import annotations

import torch


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., N] integers in 0..15 -> [..., N / 8] int32 words. Raises ValueError if N % 8."""
    n = codes.shape[-1]
    if n % 8:
        raise ValueError(f"last axis {n} is not a multiple of 8; 4-bit codes pack eight to a word")
    planes = codes.to(torch.int32).unflatten(-1, (8, n // 8))
    shift = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    return (planes << shift[:, None]).sum(-2, dtype=torch.int32)


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """[..., W] int32 words -> [..., 8 W] int32 codes in 0..15, the inverse of ``pack_nibbles``."""
    shift = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words.to(torch.int32).unsqueeze(-2) >> shift[:, None]) & 15).flatten(-2)
