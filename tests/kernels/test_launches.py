"""However a step is launched, the same bytes are stored and the same output comes out.

On a GPU the compiler may fuse the products of an output differently, so there y may differ by a
rounding; what is stored may not.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench.registry import DESIGNS, OPS, Problem
from replayssm_quant.kernels.bench.tune import kernels_of, launcher
from replayssm_quant.state.geometry import LayerGeometry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHANGES = {
    "mamba2": (
        {"heads": 1, "rows": 32},
        {"heads": 4, "rows": 64, "ahead": 1},
        {"registers": 255},
        {"heads": 0, "registers": 128},
        {"heads": 2, "rows": 32, "across": 1},
        {"beside": 1, "flush": 3},
        {"flush_registers": 255},
        {"single": 1, "rows": 16},
        {"single": 1, "rows": 64},
        {"heads": 1, "rows": 16, "warps": 1},
    ),
    "gdn": (
        {"rows": 32, "blocks": 2},
        {"rows": 32, "blocks": 2, "ahead": 1},
        {"rows": 64, "registers": 112},
        {"window": 2},
        {"window": 4},
        {"beside": 1, "flush": 3},
        {"flush_registers": 255},
        {"single": 1, "rows": 16},
        {"single": 1, "rows": 64},
    ),
}


def problem(kind: str, config: StateConfig, large: bool) -> Problem:
    size = (8, 64, 128, 2) if kind == "mamba2" else (4, 128, 128, 2)
    geometry = LayerGeometry(kind, *(size if large else (4, 16, 16, 2)))
    dtype = torch.bfloat16 if large else torch.float32
    batch = 9 if large else 3
    made = Problem(
        OPS[f"{kind}_decode"], geometry, config, batch, device=DEVICE, dtype=dtype, sets=1
    )
    slots = made.slots[0].clone()
    slots[1] = -1
    flush = [i % 3 == 0 for i in range(batch)]
    valid = [made.config.buffer_len - 1 if f else (5 * i) % 3 for i, f in enumerate(flush)]
    step = made.steps("mix")[0]
    made.taken = dataclasses.replace(step, rows=made.rows(slots, valid, flush))  # type: ignore[attr-defined]
    return made


def check(kind: str, config: StateConfig, large: bool, changes) -> None:
    made = problem(kind, config, large)
    module = kernels_of(kind)
    default = dataclasses.replace(module.launch_for(config, 256), beside=0)
    before = made.pages.clone()
    want, pages = None, None
    for change in ({}, *changes):
        made.pages.copy_(before)
        got = launcher(module, made, dataclasses.replace(default, **change))(made.taken)
        assert not torch.equal(made.pages, before)
        assert not got[1].any()
        if want is None:
            want, pages = got, made.pages.clone()
            assert torch.isfinite(want).all()
        assert torch.equal(made.pages, pages), change
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error <= (1e-3 if large else 0.0), change


@pytest.mark.parametrize("kind", CHANGES)
def test_launches_change_no_bit(kind: str) -> None:
    check(kind, StateConfig.from_flags("fp16", "nvfp4", buffer_len=4), False, CHANGES[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    "formats",
    [("fp16", "nvfp4"), ("P4+8", None), ("P8+4", None), ("e4m3", "same"), ("fp32", "same")],
)
def test_launches_change_no_bit_on_a_gpu(kind: str, formats: tuple[str, str | None]) -> None:
    rotate = formats[0].startswith("P")
    config = StateConfig.from_flags(*formats, buffer_len=16, rotate=rotate)
    check(kind, config, True, CHANGES[kind])


@pytest.mark.parametrize("design", ["nvfp4+fp16-sr", "P8+4-sr-rot", "e4m3-sr", "fp32"])
def test_few_sequences_take_one_launch_until_they_fill_a_gpu(design: str) -> None:
    """What counts is the state of all of them, so a shard of a layer is launched like a smaller
    layer; a head of d_state 256 prepares too much for one launch of several sequences."""
    config, integers = DESIGNS[design], design.startswith("P")
    for kind, size, last in (
        ("mamba2", (128, 64, 128, 8), 4 - integers),
        ("mamba2", (64, 64, 128, 4), 8 - integers),
        ("mamba2", (24, 128, 256, 1), 5 if design == "fp32" else 1),
        ("gdn", (32, 128, 128, 16), 16),
        ("gdn", (16, 128, 128, 8), 33),
    ):
        geometry = LayerGeometry(kind, *size)  # type: ignore[arg-type]
        launch_for = kernels_of(kind).launch_for
        one = [launch_for(config, batch, geometry).single for batch in range(1, 257)]
        assert one == [1] * last + [0] * (256 - last)


def test_many_fp32_states_go_by_rows_but_where_a_row_is_long() -> None:
    from replayssm_quant.kernels.mamba2.triton_ops import launch_for

    config = DESIGNS["fp32"]
    for size, rows in (((128, 64, 128, 8), 16), ((24, 128, 256, 1), 64)):
        assert launch_for(config, 256, LayerGeometry("mamba2", *size)).rows == rows


@pytest.mark.parametrize("kind", CHANGES)
def test_compiled_code_takes_the_step(kind: str) -> None:
    """The planes of a page share a storage and change: the step stays out of the graph."""
    config = StateConfig.from_flags("fp16", "nvfp4", buffer_len=4)
    made = problem(kind, config, False)
    module = kernels_of(kind)
    before = made.pages.clone()
    step = launcher(module, made, module.launch_for(config, 1))
    want = 2.0 * step(made.taken)
    after = made.pages.clone()
    made.pages.copy_(before)
    twice = torch.compile(lambda: 2.0 * step(made.taken), backend="aot_eager")
    assert torch.equal(twice(), want)
    assert torch.equal(made.pages, after)
