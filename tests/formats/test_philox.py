"""Philox against published vectors and Triton's; the bits of elements against a slow copy."""

import hashlib
import random

import pytest
import torch

from replayssm_quant.formats.philox import (
    DEFAULT_ROUNDS,
    element_bits,
    philox4x32,
    randint4x,
    request_key,
)

triton = pytest.importorskip("triton")
tl = triton.language
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # else the interpreter, see tests/conftest


def slow_philox(key: int, counter: tuple[int, int, int, int], rounds: int) -> list[int]:
    """Philox4x32 in Python integers, written from the paper's figure."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    a, b, c, d = (x & 0xFFFFFFFF for x in counter)
    for i in range(rounds):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        u = (k0 + i * 0x9E3779B9) & 0xFFFFFFFF
        v = (k1 + i * 0xBB67AE85) & 0xFFFFFFFF
        a, b = (right >> 32) ^ b ^ u, right & 0xFFFFFFFF
        c, d = (left >> 32) ^ d ^ v, left & 0xFFFFFFFF
    return [a, b, c, d]


# Random123's kat_vectors for philox4x32: rounds, counter, key, result.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
VECTORS = [
    (7, (0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (-1, -1, -1, -1), -1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, 0x299F31D0A4093822, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (-1, -1, -1, -1), -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_known_answers(rounds: int, counter: tuple[int, ...], key: int, expected: str) -> None:
    words = philox4x32(key, *counter, rounds=rounds)
    assert " ".join(f"{int(w):08x}" for w in words) == expected
    assert " ".join(f"{w:08x}" for w in slow_philox(key, counter, rounds)) == expected  # type: ignore[arg-type]


@triton.jit
def _randint_kernel(out_ptr, offset_ptr, seed, rounds: tl.constexpr, size: tl.constexpr):
    i = tl.arange(0, size)
    a, b, c, d = tl.randint4x(seed, tl.load(offset_ptr + i), rounds)
    tl.store(out_ptr + i, a.to(tl.int32, bitcast=True))
    tl.store(out_ptr + size + i, b.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * size + i, c.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * size + i, d.to(tl.int32, bitcast=True))


@triton.jit
def _philox_kernel(out_ptr, counter_ptr, key_ptr, rounds: tl.constexpr, size: tl.constexpr):
    i = tl.arange(0, size)
    c0 = tl.load(counter_ptr + i)
    c1 = tl.load(counter_ptr + size + i)
    c2 = tl.load(counter_ptr + 2 * size + i)
    c3 = tl.load(counter_ptr + 3 * size + i)
    a, b, c, d = tl.philox(tl.load(key_ptr), c0, c1, c2, c3, rounds)
    tl.store(out_ptr + i, a.to(tl.int32, bitcast=True))
    tl.store(out_ptr + size + i, b.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * size + i, c.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * size + i, d.to(tl.int32, bitcast=True))


def same(words: tuple[torch.Tensor, ...], stored: torch.Tensor) -> bool:
    return torch.equal(torch.stack(words), stored.cpu().to(torch.int64) & 0xFFFFFFFF)


@pytest.mark.parametrize("rounds", [1, 5, 6, 7, 10])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_randint4x_is_tritons_word_for_word(rounds: int, dtype: torch.dtype) -> None:
    size = 256
    g = torch.Generator().manual_seed(rounds)
    if dtype == torch.int64:
        offsets = torch.randint(-(2**62), 2**62, (size,), generator=g)
        offsets[:4] = torch.tensor([0, 2**32, 2**32 + 1, -1])
    else:
        offsets = torch.randint(0, 2**31, (size,), generator=g).to(torch.int32)
        offsets[:3] = torch.tensor([0, 1, 2**31 - 1])
    for seed in (0, 1234, 2**31 - 1, 2**62 + 12345):
        out = torch.empty(4, size, dtype=torch.int32, device=DEVICE)
        _randint_kernel[(1,)](out, offsets.to(DEVICE), seed, rounds, size)
        assert same(randint4x(seed, offsets, rounds), out), seed


@pytest.mark.parametrize("rounds", [5, 7, 10])
def test_philox_is_tritons_word_for_word(rounds: int) -> None:
    size = 128
    g = torch.Generator().manual_seed(rounds)
    counters = torch.randint(-(2**31), 2**31, (4, size), generator=g).to(torch.int32)
    for request in range(4):
        key = torch.tensor([request_key(7, request)], dtype=torch.int64)
        out = torch.empty(4, size, dtype=torch.int32, device=DEVICE)
        _philox_kernel[(1,)](out, counters.to(DEVICE), key.to(DEVICE), rounds, size)
        assert same(philox4x32(key, *counters, rounds=rounds), out)


def test_offsets_past_32_bits_draw_anew() -> None:
    near = torch.arange(1000, dtype=torch.int64)
    first, far = randint4x(5, near)[0], randint4x(5, near + 2**32)[0]
    assert int((first == far).sum()) == 0


def test_keys_of_requests() -> None:
    keys = [request_key(seed, request) for seed in range(8) for request in range(60)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= k < 2**63 for k in keys)
    words = slow_philox(3, (11, 0, 0x5253514B, 1), 10)
    assert request_key(3, 11) & (2**64 - 1) == words[0] | words[1] << 32
    assert request_key(3, "cmpl-1") == request_key(3, "cmpl-1") != request_key(3, "cmpl-2")
    digest = int.from_bytes(hashlib.blake2b(b"cmpl-1", digest_size=8).digest(), "little")
    assert request_key(3, "cmpl-1") == request_key(3, digest)


def slow_bits(key: int, at: int, layer: int, h: int, r: int, n: int, shape, bits, rounds) -> int:
    """One element's random bits, by one Philox call for this element alone."""
    rows, width = shape
    words = -(-width // 8)
    i, j = n // words, n % words
    c0 = (h * (-(-rows // 2)) + r // 2) * words + j
    if bits == 8:
        out = slow_philox(key, (c0, at, layer, 0), rounds)
        number = (r % 2) * 8 + i
        return out[number // 4] >> 8 * (number % 4) & 255
    out = slow_philox(key, (c0, at, layer, 1 + r % 2), rounds)
    return out[i // 2] >> 16 * (i % 2) & 0xFFFF


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("shape", [(4, 16), (64, 128), (5, 24), (3, 4), (80, 96)])
def test_element_bits_equal_one_call_an_element(bits: int, rounds: int, shape) -> None:
    rng = random.Random(bits * rounds)
    keys = torch.tensor([request_key(1, "a"), request_key(1, "b")])
    at = torch.tensor([16, 40_000], dtype=torch.int32)
    out = element_bits(keys, at, 9, 3, *shape, head_offset=5, bits=bits, rounds=rounds)
    assert out.shape == (2, 3, *shape) and out.dtype == torch.int32
    for _ in range(200):
        b, h = rng.randrange(2), rng.randrange(3)
        r, n = rng.randrange(shape[0]), rng.randrange(shape[1])
        expected = slow_bits(int(keys[b]), int(at[b]), 9, h + 5, r, n, shape, bits, rounds)
        assert int(out[b, h, r, n]) == expected


def draw(
    layer: int = 0, position: int = 16, request: int = 0, heads: int = 4, **more
) -> torch.Tensor:
    keys, at = torch.tensor([request_key(0, request)]), torch.tensor([position])
    return element_bits(keys, at, layer, heads, 64, 128, **more)[0]


def test_a_shard_of_the_heads_draws_its_slice() -> None:
    whole = draw(heads=8)
    for start in (0, 2, 4, 6):
        assert torch.equal(draw(heads=2, head_offset=start), whole[start : start + 2])


def test_the_order_of_the_batch_does_not_matter() -> None:
    keys = torch.tensor([request_key(0, r) for r in range(6)])
    at = torch.tensor([16, 32, 48, 17, 16, 1000])
    out = element_bits(keys, at, 2, 2, 8, 32)
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    assert torch.equal(element_bits(keys[order], at[order], 2, 2, 8, 32), out[order])
    for b in range(6):
        assert torch.equal(element_bits(keys[b : b + 1], at[b : b + 1], 2, 2, 8, 32)[0], out[b])


def test_every_coordinate_changes_the_draw() -> None:
    base = draw()
    assert torch.equal(base, draw())
    others = [
        draw(layer=1),
        draw(position=17),
        draw(request=1),
        draw(bits=16) >> 8,
        draw(rounds=10),
    ]
    for other in [*others, draw(head_offset=4)]:
        equal = (base == other).float().mean()
        assert abs(float(equal) - 1 / 256) < 5 * (1 / 256 / base.numel()) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two draws in standard errors."""
    a, b = a.double().flatten() - 127.5, b.double().flatten() - 127.5
    return float((a * b).sum() / (a.norm() * b.norm())) * a.numel() ** 0.5


def test_draws_are_uncorrelated() -> None:
    """Neighbouring heads, rows, columns, planes, layers, positions, requests: below 4 sigma."""
    base = draw()
    pairs = {
        "head": (base[:-1], base[1:]),
        "row of one call": (base[:, 0::2], base[:, 1::2]),
        "next call's row": (base[:, 1:-1:2], base[:, 2::2]),
        "column": (base[..., :-1], base[..., 1:]),
        "plane": (base[..., :-16], base[..., 16:]),
        "layer": (base, draw(layer=1)),
        "position": (base, draw(position=17)),
        "flush": (base, draw(position=32)),
        "request": (base, draw(request=1)),
    }
    for name, (a, b) in pairs.items():
        assert abs(correlation(a, b)) < 4, name


@pytest.mark.parametrize("bits", [8, 16])
def test_draws_are_uniform(bits: int) -> None:
    out = torch.cat([draw(position=p, bits=bits).flatten() for p in range(16, 16 * 9, 16)])
    assert int(out.min()) == 0 if bits == 8 else int(out.min()) >= 0
    assert int(out.max()) < 2**bits
    counts = torch.bincount(out >> (bits - 8), minlength=256).double()
    mean = out.numel() / 256
    chi2 = float(((counts - mean) ** 2 / mean).sum())
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5


def test_bad_arguments() -> None:
    keys, at = torch.tensor([1]), torch.tensor([1])
    with pytest.raises(ValueError, match="random bits 4: use 8 or 16"):
        element_bits(keys, at, 0, 1, 8, 16, bits=4)
    with pytest.raises(ValueError, match="rounds 0 must be at least 1"):
        philox4x32(0, 0, rounds=0)


def test_seven_rounds_are_the_default() -> None:
    assert DEFAULT_ROUNDS == 7
    assert torch.equal(draw(), draw(rounds=7))
