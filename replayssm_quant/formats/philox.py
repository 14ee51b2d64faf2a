"""Philox4x32 counter-based random numbers in torch, word for word those of Triton's ``tl.philox``.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Seven rounds are the fewest that pass their BigCrush runs; ten is their default with a margin.

The random bits of an element of the state are a pure function of (seed, request, layer, head,
element, flush position): never of batch row, slot, grid or launch.
"""

from __future__ import annotations

import hashlib

import torch

DEFAULT_ROUNDS = 7
_MASK = 0xFFFFFFFF
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_REQUEST_STREAM = 0x5253514B  # keys of requests and bits of elements never share a counter


def _mulhi(a: int, b: torch.Tensor) -> torch.Tensor:
    """High 32 bits of a 32 x 32-bit product, in int64 without overflow."""
    high, low = a >> 16, a & 0xFFFF
    return (b * high + ((b * low) >> 16)) >> 16


def philox4x32(
    key: torch.Tensor | int,
    c0: torch.Tensor | int,
    c1: torch.Tensor | int = 0,
    c2: torch.Tensor | int = 0,
    c3: torch.Tensor | int = 0,
    rounds: int = DEFAULT_ROUNDS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words (as int64 in 0..2**32 - 1) of the counter (c0, c1, c2, c3) under a 64-bit
    key.

    Tensors are int64 or int32 and broadcast; only the low 32 bits of a counter and the low 64 of
    the key count.
    """
    if rounds < 1:
        raise ValueError(f"philox rounds {rounds} must be at least 1 (7 or 10 are sound)")
    device = next((t.device for t in (key, c0, c1, c2, c3) if isinstance(t, torch.Tensor)), None)

    def word(x: torch.Tensor | int) -> torch.Tensor:
        if isinstance(x, int):
            x &= 2**64 - 1  # python integers may be negative or exceed int64
            return torch.tensor(x - 2**64 if x >= 2**63 else x, dtype=torch.int64, device=device)
        return x.to(torch.int64)

    wide = word(key)
    k0, k1 = wide & _MASK, (wide >> 32) & _MASK
    w0, w1, w2, w3 = (word(c) & _MASK for c in (c0, c1, c2, c3))
    for _ in range(rounds):
        w0, w1, w2, w3 = (
            _mulhi(_ROUND_B, w2) ^ w1 ^ k0,
            (w2 * _ROUND_B) & _MASK,
            _mulhi(_ROUND_A, w0) ^ w3 ^ k1,
            (w0 * _ROUND_A) & _MASK,
        )
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    out = torch.broadcast_tensors(w0, w1, w2, w3)
    return out[0], out[1], out[2], out[3]


def randint4x(
    seed: int, offset: torch.Tensor, rounds: int = 10
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``tl.randint4x(seed, offset, rounds)`` as int64 words; offsets int32 or int64."""
    wide = offset.to(torch.int64)
    high = (wide >> 32) & _MASK if offset.dtype == torch.int64 else 0
    return philox4x32(seed, wide & _MASK, high, 0, 0, rounds)


def request_key(seed: int, request: int | str) -> int:
    """The 64-bit key (as a signed int64) of a request: a Philox output of (seed, request).

    A string id enters by its BLAKE2b digest, so keys do not depend on Python's hash seed.
    """
    if isinstance(request, str):
        digest = hashlib.blake2b(request.encode(), digest_size=8).digest()
        request = int.from_bytes(digest, "little")
    low, high = request & _MASK, (request >> 32) & _MASK
    w0, w1, _, _ = philox4x32(seed, low, high, _REQUEST_STREAM, 1, 10)
    value = int(w0) | int(w1) << 32
    return value - 2**64 if value >= 2**63 else value


def element_bits(
    keys: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    heads: int,
    rows: int,
    n: int,
    *,
    head_offset: int = 0,
    bits: int = 8,
    rounds: int = DEFAULT_ROUNDS,
) -> torch.Tensor:
    """Random bits for each element of [heads, rows, n] states: int32 [batch, heads, rows, n].

    keys int64 [batch] (``request_key``), positions int [batch] (tokens folded into the state at
    this flush), layer and head_offset in global numbering (a tensor-parallel shard passes its first
    head). bits 8: one Philox call serves two rows and the eight elements n = i * (N / 8) + j of one
    j: byte ``(r % 2) * 8 + i``. bits 16: one call a row, half-word i, counter word 3 = 1 + r % 2.
    Where n is not a multiple of 8 the counter runs over ceil(n / 8) words and spare bits are
    dropped.
    """
    if bits not in (8, 16):
        raise ValueError(f"random bits {bits}: use 8 or 16")
    device = keys.device
    words = -(-n // 8)
    pairs = -(-rows // 2)
    head = torch.arange(heads, device=device, dtype=torch.int64) + head_offset
    row = torch.arange(rows, device=device, dtype=torch.int64)
    column = torch.arange(words, device=device, dtype=torch.int64)
    key, position = keys.view(-1, 1, 1, 1), positions.view(-1, 1, 1, 1)
    if bits == 8:
        pair = torch.arange(pairs, device=device, dtype=torch.int64)
        c0 = (head[:, None, None] * pairs + pair[:, None]) * words + column
        out = torch.stack(
            philox4x32(key, c0, position, layer, 0, rounds), -1
        )  # [b, H, pairs, W, 4]
        shift = torch.arange(0, 32, 8, device=device)
        byte = ((out[..., None] >> shift) & 255).flatten(-2)  # [b, H, pairs, W, 16]
        byte = byte.unflatten(-1, (2, 8)).permute(0, 1, 2, 4, 5, 3)  # [b, H, pairs, 2, 8, W]
        byte = byte.flatten(4).flatten(2, 3)[:, :, :rows]
        return byte[..., :n].to(torch.int32)
    c0 = (head[:, None, None] * pairs + row[:, None] // 2) * words + column
    c3 = (1 + row % 2)[:, None]
    out = torch.stack(philox4x32(key, c0, position, layer, c3, rounds), -1)
    shift = torch.arange(0, 32, 16, device=device)
    half = ((out[..., None] >> shift) & 0xFFFF).flatten(-2)  # [b, H, rows, W, 8]
    return half.transpose(-1, -2).flatten(-2)[..., :n].to(torch.int32)
