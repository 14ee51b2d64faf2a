"""The randomised Hadamard rotation: orthogonal, an exact symmetry, and pinned signs."""

import pytest
import torch

from replayssm_quant.formats.codec import fake_quantize
from replayssm_quant.formats.rotation import block_of, matrix, rotate, signs, unrotate
from replayssm_quant.formats.spec import parse_format

SIZES = [1, 2, 16, 64, 96, 128, 256]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sylvester(n: int) -> torch.Tensor:
    """The Hadamard matrix by doubling, an n x n matrix of +-1."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h


@pytest.mark.parametrize("n", SIZES)
def test_equals_signs_times_sylvesters_matrix(n: int) -> None:
    block = block_of(n)
    assert n % block == 0 and block & (block - 1) == 0
    h = torch.block_diag(*[sylvester(block)] * (n // block))
    expected = torch.diag(signs(n).double()) @ h / block**0.5
    x = draw(3, 5, n)
    assert torch.allclose(rotate(x), x @ expected, rtol=0, atol=1e-13)
    assert torch.allclose(matrix(n).double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("n", SIZES)
def test_inverse_and_norm(n: int) -> None:
    x = draw(4, n)
    assert torch.allclose(unrotate(rotate(x)), x, rtol=0, atol=1e-13)
    assert torch.allclose(rotate(unrotate(x)), x, rtol=0, atol=1e-13)
    assert torch.allclose(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


def test_block_of_96_is_32() -> None:
    assert [block_of(n) for n in (96, 80, 128, 192)] == [32, 16, 128, 64]


def test_both_recurrences_are_invariant() -> None:
    """Mamba-2 and GDN steps with rotated B, C, k, q give the same outputs and a rotated state."""
    n, rows, steps = 64, 8, 20
    plain = torch.zeros(rows, n, dtype=torch.float64)
    turned = plain.clone()
    gdn, gdn_turned = plain.clone(), plain.clone()
    for t in range(steps):
        b, c, x = draw(n, seed=3 * t), draw(n, seed=3 * t + 1), draw(rows, seed=3 * t + 2)
        plain = 0.9 * plain + torch.outer(x, b)
        turned = 0.9 * turned + torch.outer(x, rotate(b))
        assert torch.allclose(plain @ c, turned @ rotate(c), atol=1e-11)
        k = b / b.norm()
        gdn = 0.9 * (gdn - 0.7 * torch.outer(gdn @ k, k)) + 0.7 * torch.outer(x, k)
        rk = rotate(k)
        gdn_turned = 0.9 * (gdn_turned - 0.7 * torch.outer(gdn_turned @ rk, rk))
        gdn_turned += 0.7 * torch.outer(x, rk)
        assert torch.allclose(gdn @ c, gdn_turned @ rotate(c), atol=1e-11)
    assert torch.allclose(rotate(plain), turned, atol=1e-11)
    assert torch.allclose(rotate(gdn), gdn_turned, atol=1e-11)


def test_signs_are_part_of_the_stored_format() -> None:
    """Pinned: other signs would make every stored rotated state unreadable."""
    assert "".join("+" if s > 0 else "-" for s in signs(32)) == PINNED
    assert torch.equal(signs(128)[:32], signs(32))
    assert 40 < int((signs(128) > 0).sum()) < 88


PINNED = "--+--+++-+------+--++++-+----+--"


def test_rotation_spreads_outlier_channels() -> None:
    x = draw(1, 64, 128).float()
    x[..., 5] *= 40
    fmt = parse_format("int8")
    plain = (fake_quantize(x, fmt) - x).norm()
    turned = (unrotate(fake_quantize(rotate(x), fmt)) - x).norm()
    assert turned < 0.3 * plain
