"""NVFP4, MXFP4, MXFP8 against torchao's quantizers: bitwise where the definitions coincide."""

import pytest
import torch

from replayssm_quant.formats.codec import decode, encode
from replayssm_quant.formats.packing import unpack_nibbles
from replayssm_quant.formats.spec import TILE_ROWS, parse_format

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.kernels import unpack_uint4  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import (  # noqa: E402
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)


def state(kind: str, heads: int = 16) -> torch.Tensor:
    g = torch.Generator().manual_seed(heads)
    x = torch.randn(heads, 64, 128, generator=g)
    if kind == "outliers":
        x[..., ::40] *= 30
    elif kind == "ranges":  # blocks up to 2**20 apart
        x *= (
            torch.exp2(torch.randint(-10, 11, (heads, 64, 8, 1), generator=g).float())
            .expand(heads, 64, 8, 16)
            .reshape(heads, 64, 128)
        )
    return x


def tiles(x: torch.Tensor) -> torch.Tensor:
    """[H, R, N] -> [H * R / 16, 16, N]: each tile is a tensor of its own for torchao."""
    return x.reshape(-1, TILE_ROWS, x.shape[-1])


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_nvfp4_is_torchaos(kind: str) -> None:
    """Scales and codes of each tile are equal.

    torchao's inverse is (1 / tile) / block, here 1 / (tile * block): one ulp apart at times, which
    moves an element only within an ulp of a tie; none of these 2 x 131072 is.
    """
    x = state(kind)
    enc = encode(x, parse_format("nvfp4"))
    blocks, words = enc.scale.view(-1, TILE_ROWS, 8), tiles(unpack_nibbles(enc.codes))
    for i, part in enumerate(tiles(x)):
        tile = per_tensor_amax_to_scale(part.abs().max())
        scale, codes = nvfp4_quantize(part.contiguous(), 16, tile)
        assert float(enc.tile_scale.flatten()[i]) == float(tile)
        assert torch.equal(blocks[i], scale.view(torch.uint8))
        assert torch.equal(words[i], unpack_uint4(codes).view(TILE_ROWS, 128).int())


def test_nvfp4_differs_from_torchaos_only_below_its_floor() -> None:
    """torchao floors a block scale at the smallest *normal* e4m3, 2**-6; here subnormals are used.

    Blocks whose scale is 2**-6 or more agree to the last bit; below, ours is more accurate.
    """
    x = state("ranges")
    fmt = parse_format("nvfp4")
    enc = encode(x, fmt)
    mine, blocks = tiles(decode(enc, fmt)), enc.scale.view(-1, TILE_ROWS, 8)
    words = tiles(unpack_nibbles(enc.codes)).unflatten(-1, (8, 16))
    below, own, other = 0, 0.0, 0.0
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for i, part in enumerate(tiles(x)):
        tile = per_tensor_amax_to_scale(part.abs().max())
        scale, codes = nvfp4_quantize(part.contiguous(), 16, tile)
        theirs = unpack_uint4(codes).view(TILE_ROWS, 8, 16).int()
        normal = blocks[i].view(torch.float8_e4m3fn).float() >= 2.0**-6
        assert torch.equal(blocks[i][normal], scale.view(torch.uint8)[normal])
        assert torch.equal(words[i][normal], theirs[normal])
        value = torch.cat([grid, -grid])[theirs] * (scale.float() * tile)[..., None]
        split = part.unflatten(-1, (8, 16))
        below += int((~normal).sum())
        own += float((split - mine[i].unflatten(-1, (8, 16)))[~normal].square().sum())
        other += float((split - value)[~normal].square().sum())
    assert below > 100
    assert own < 0.7 * other


@pytest.mark.parametrize("kind", ["normal", "outliers", "ranges"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_mx_formats_are_torchaos_with_rceil(name: str, kind: str) -> None:
    x = state(kind)
    enc = encode(x, parse_format(name))
    dtype = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(enc.scale, scale.view(torch.uint8))
    if name == "mxfp4":
        assert torch.equal(unpack_nibbles(enc.codes), unpack_uint4(codes).view(x.shape).int())
    else:
        assert torch.equal(enc.codes, codes.view(torch.uint8))


@pytest.mark.parametrize(("name", "top"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
def test_rceil_saves_what_the_ocp_floor_rule_cuts_off(name: str, top: float) -> None:
    """The OCP rule takes floor(log2 amax) and clips a block whose maximum is past the top code."""
    x = state("normal")
    dtype = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    floor, _ = to_mx(x, dtype, 32, ScaleCalculationMode.FLOOR)
    enc = encode(x, parse_format(name))
    amax = x.abs().unflatten(-1, (-1, 32)).amax(-1)
    apart = enc.scale.int() - floor.view(torch.uint8).int()
    clipped = amax / torch.exp2(floor.view(torch.uint8).float() - 127) > top
    assert torch.equal(apart == 1, clipped) and int(apart.min()) == 0 and int(apart.max()) == 1
    assert 0.1 < float(clipped.float().mean()) < 0.5
