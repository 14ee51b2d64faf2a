"""Plane order: how the elements of a row share 32-bit words.

With W = N / 8, word j of a row's 4-bit codes holds the elements n = i * W + j, i = 0..7; bytes and
half-words follow the same rule (``to_page``), so that in every format the word at index h * W + j
holds only elements that are congruent to j modulo W. A thread that owns one j then owns whole
words of every format, and the sixteen random bytes of one Philox call serve two rows of it.

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


def to_page(codes: torch.Tensor) -> torch.Tensor:
    """[..., N] codes of one or two bytes -> page order; other widths stay as they are.

    With s elements a word, element n = (h * s + t) * W + j moves to index (h * W + j) * s + t. A
    row whose length is not a multiple of 8 keeps its order.
    """
    n, per_word = codes.shape[-1], 4 // codes.element_size()
    if per_word < 2 or n % 8:
        return codes
    return codes.unflatten(-1, (8 // per_word, per_word, n // 8)).transpose(-1, -2).flatten(-3)


def from_page(stored: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_page``."""
    n, per_word = stored.shape[-1], 4 // stored.element_size()
    if per_word < 2 or n % 8:
        return stored
    return stored.unflatten(-1, (8 // per_word, n // 8, per_word)).transpose(-1, -2).flatten(-3)
