"""NVFP4, MXFP4, MXFP8 against torchao's quantizers: bitwise where the definitions coincide."""

import pytest
import torch

from replayssm_quant.formats.codec import decode, encode
from replayssm_quant.formats.packing import unpack_nibbles
from replayssm_quant.formats.spec import parse_format

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


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_nvfp4_is_torchaos(kind: str) -> None:
    """Scales and codes are equal; torchao divides (1 / head) / block, here 1 / (head * block).

    The two inverses differ by one ulp at times, which moves an element only when it lies within an
    ulp of a tie: none in these 2 x 131072 elements.
    """
    x = state(kind)
    enc = encode(x, parse_format("nvfp4"))
    for h in range(len(x)):
        head = per_tensor_amax_to_scale(x[h].abs().max())
        scale, codes = nvfp4_quantize(x[h].contiguous(), 16, head)
        assert float(enc.tile_scale[h]) == float(head)
        assert torch.equal(enc.scale[h], scale.view(torch.uint8))
        assert torch.equal(unpack_nibbles(enc.codes)[h], unpack_uint4(codes).view(64, 128).int())


def test_nvfp4_differs_from_torchaos_only_below_its_floor() -> None:
    """torchao floors a block scale at the smallest *normal* e4m3, 2**-6; here subnormals are used.

    Blocks whose scale is 2**-6 or more agree to the last bit; below it ours is never less accurate.
    """
    x = state("ranges")
    fmt = parse_format("nvfp4")
    enc = encode(x, fmt)
    mine = decode(enc, fmt)
    below = 0
    for h in range(len(x)):
        head = per_tensor_amax_to_scale(x[h].abs().max())
        scale, codes = nvfp4_quantize(x[h].contiguous(), 16, head)
        normal = enc.scale[h].view(torch.float8_e4m3fn).float() >= 2.0**-6
        assert torch.equal(enc.scale[h][normal], scale.view(torch.uint8)[normal])
        pairs = unpack_nibbles(enc.codes)[h].unflatten(-1, (-1, 16))
        theirs = unpack_uint4(codes).view(64, 8, 16).int()
        assert torch.equal(pairs[normal], theirs[normal])
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        value = torch.cat([grid, -grid])[theirs] * (scale.float() * head)[..., None]
        error = (x[h].unflatten(-1, (-1, 16)) - value).norm(dim=-1)
        own = (x[h] - mine[h]).unflatten(-1, (-1, 16)).norm(dim=-1)
        below += int((~normal).sum())
        assert float(own[~normal].square().sum()) <= float(error[~normal].square().sum())
    assert below > 100


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
