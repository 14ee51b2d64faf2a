"""``store_state`` against the codec: every byte of the pool, in every format."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant import ops  # noqa: E402
from replayssm_quant.config import StateConfig  # noqa: E402
from replayssm_quant.state.cache import StepRows, read_checkpoint  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402
from replayssm_quant.state.layout import StateLayout  # noqa: E402


def case(update: str, output: str | None, rows: int, n: int, **kw: object):
    config = StateConfig.from_flags(update, output, **kw)
    return pytest.param(config, rows, n, id=f"{config.label}-{rows}x{n}")


CASES = [
    case("fp16", "nvfp4", 18, 64),
    case("fp16", "nvfp4", 16, 96, rounding="rn"),
    case("e4m3", "nvfp4", 17, 128),
    case("e4m3/b32", "mxfp4", 5, 64, random_bits=16),
    case("e5m2", "same", 16, 16),
    case("int8", "same", 16, 32, rotate=True),
    case("int4", "same", 16, 64),
    case("int8/b32/fp16", "int4", 16, 64, rounding="rn"),
    case("P4+8", None, 18, 128, rotate=True),
    case("P4+8", None, 16, 64, random_bits=16, philox_rounds=10),
    case("P4+4", None, 16, 96),
    case("P8+4", None, 16, 256),
    case("P8+4/b16", None, 16, 64, rounding="rn"),
    case("bf16", "e4m3/b16", 16, 64),
    case("mxfp8", "e5m2/row/fp16", 16, 64),
    case("fp32", "int4/row/fp16", 16, 64),
]


def awkward_state(batch: int, heads: int, rows: int, n: int) -> torch.Tensor:
    """Rows of all sizes, with a zero, a vanishing, a huge, a NaN and an infinite one."""
    gen = torch.Generator().manual_seed(3)
    shape = (batch, heads, rows, n)
    state = torch.randn(shape, generator=gen)
    state *= torch.exp(3 * torch.randn(*shape[:3], 1, generator=gen))
    state[0, 0, 1] = 0.0
    state[0, 0, 2] = 1e-39
    state[0, 0, 3] *= 1e-33
    state[0, 0, 4, n // 2] = 3e4
    state[0, 1, 3, n - 1] = float("nan")
    state[0, 1, 4, 0] = float("-inf")
    state[0, 1, 0] *= 1e6  # beyond the largest fp16 number
    return state


@pytest.mark.parametrize("config, rows, n", CASES)
def test_store_is_the_codec(config: StateConfig, rows: int, n: int, device: torch.device) -> None:
    """Same bytes as the torch store, in a strided pool; the slots beside are left alone."""
    geometry = LayerGeometry("mamba2", 2, rows, n, 1)
    layout = StateLayout(geometry, config, "fp32")
    gen = torch.Generator().manual_seed(1)
    before = torch.randint(0, 256, (4, layout.page_bytes + 128), dtype=torch.uint8, generator=gen)
    before = before.to(device)
    ours, theirs = before.clone(), before.clone()
    state = awkward_state(1, 2, rows, n).to(device)
    step = StepRows(
        torch.tensor([2]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool),
        torch.tensor([2**30 + 7], dtype=torch.int32), torch.tensor([-(2**62) + 12345]),
    )  # fmt: skip
    step = StepRows(*(getattr(step, k).to(device) for k in StepRows.__dataclass_fields__))
    for pages, impl in ((ours, "triton"), (theirs, "reference")):
        views = layout.views(pages)
        ops.store_state(views, config, step, state, layer=7, head_offset=3, impl=impl)
    a, b = layout.views(ours), layout.views(theirs)
    # the codes of a row with NaN or Inf mean nothing where a scale says so; all else is equal
    sound = state.isfinite().all(-1)
    for fmt, planes in (
        (config.update, ("ckpt", "ckpt_low", "ckpt_scale", "ckpt_tile_scale")),
        (config.readout, ("copy", "copy_scale", "copy_tile_scale")),
    ):
        keep = sound
        if fmt.scale.has_tile_scale:
            keep = torch.zeros_like(sound)
            for t in range(0, rows, 16):
                keep[:, :, t : t + 16] = sound[:, :, t : t + 16].all(-1, keepdim=True)
        for name in planes:
            x, y = getattr(a, name), getattr(b, name)
            if x is None:
                continue
            if x.shape[2] == rows:  # by row; NaN scales have no one bit pattern
                x, y = x[2][keep[0]], y[2][keep[0]]
            else:
                x, y = x[2].nan_to_num(-1.0), y[2].nan_to_num(-1.0)
            assert torch.equal(
                x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
            ), name
    back = [read_checkpoint(v, config, step.slots) for v in (a, b)]
    assert torch.equal(back[0].nan_to_num(7e30), back[1].nan_to_num(7e30))
    beside = torch.ones_like(ours, dtype=torch.bool)
    beside[2, : layout.page_bytes] = False
    assert torch.equal(ours[beside], before[beside])
    assert not torch.equal(ours, before)


def test_padding_rows_are_skipped(device: torch.device) -> None:
    config = StateConfig.from_flags("fp16", "nvfp4")
    layout = StateLayout(LayerGeometry("mamba2", 1, 16, 16, 1), config, "fp32")
    pages = torch.full((2, layout.page_bytes), 7, dtype=torch.uint8, device=device)
    state = torch.ones(2, 1, 16, 16, device=device)
    step = StepRows(
        torch.tensor([-1, 1], device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.bool, device=device),
        torch.ones(2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    ops.store_state(layout.views(pages), config, step, state, impl="triton")
    assert (pages[0] == 7).all()
    assert (layout.views(pages).ckpt[1] == 1).all()


def test_bad_states_are_refused(device: torch.device) -> None:
    """By name, before anything is launched."""
    config = StateConfig.from_flags("fp16", "nvfp4")
    layout = StateLayout(LayerGeometry("mamba2", 1, 16, 16, 1), config, "fp32")
    views = layout.views(torch.zeros(2, layout.page_bytes, dtype=torch.uint8, device=device))
    step = StepRows(
        torch.tensor([1], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.bool, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    good = torch.ones(1, 1, 16, 16, device=device)
    with pytest.raises(TypeError, match="float16"):
        ops.store_state(views, config, step, good.half(), impl="triton")
    with pytest.raises(ValueError, match=r"\(1, 1, 8, 16\)"):
        ops.store_state(views, config, step, good[:, :, :8], impl="triton")
    head = StateConfig.from_flags("int8/head", "same")
    head_layout = StateLayout(LayerGeometry("mamba2", 1, 16, 16, 1), head, "fp32")
    head_views = head_layout.views(
        torch.zeros(2, head_layout.page_bytes, dtype=torch.uint8, device=device)
    )
    with pytest.raises(ValueError, match="int8/head"):
        ops.store_state(head_views, head, step, good, impl="triton")
