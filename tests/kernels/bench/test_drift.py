"""The drift study on a small layer: what is exact stays exact, what rounds stays bounded."""

from __future__ import annotations

import pytest
import torch

from replayssm_quant.config import StateConfig
from replayssm_quant.kernels.bench import drift
from replayssm_quant.kernels.bench.run import provenance
from replayssm_quant.state.geometry import LayerGeometry

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_errors_of_exact_and_rounded_states(kind: str) -> None:
    """fp32 inputs, so y has no storage error: fp32 state 1e-6, and each design in its place."""
    geometry = LayerGeometry(kind, 4, 8, 32, 2)
    rows = drift.drift(
        kind,
        ["fp32", "nvfp4+fp16-sr", "P8+4-sr-rot"],
        (256,),
        geometry=geometry,
        batch=1,
        device=CPU,
        dtype=torch.float32,
        impl="reference",
    )
    found = {r["design"]: r for r in rows}
    for part in ("state", "output_readout", "output_flush"):
        assert set(found["fp32"][part]) == {"all", *drift.CLASSES}
        assert found["fp32"][part]["all"] < 2e-6  # 256 steps of fp32 sums
    split = found["nvfp4+fp16-sr"]
    assert 1e-4 < split["state"]["all"] < 3e-3  # fp16: half an ulp is 2.4e-4 to 4.9e-4 a flush
    assert split["output_flush"]["all"] < 3e-3  # a flush reads the fp32 fold of the checkpoint
    assert 1e-2 < split["output_readout"]["all"] < 0.3  # e2m1 has one mantissa bit
    assert found["P8+4-sr-rot"]["output_readout"]["all"] < split["output_readout"]["all"] / 4
    text = drift.table([{**r, **provenance()} for r in rows])
    assert f"## {kind}: checkpoint" in text and text.count("| P8+4-sr-rot |") == 3


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_kernels_take_the_steps(kind: str) -> None:
    pytest.importorskip("triton")
    signals = drift.Signals(LayerGeometry(kind, 4, 8, 32, 2), 1, 5, DEVICE, torch.float32)
    signals.next_chunk()
    config = StateConfig.from_flags("fp32", buffer_len=2)
    ours, wanted = (drift.Split(config, signals, impl) for impl in ("triton", "reference"))
    for t in range(3):
        for split in (ours, wanted):
            split.step(t)
    torch.testing.assert_close(ours.y[:3], wanted.y[:3], rtol=1e-4, atol=1e-6)
    assert ours.y[:3].any()


def test_positions_are_whole_chunks() -> None:
    with pytest.raises(ValueError, match="multiples of 256"):
        drift.drift("gdn", ["fp32"], (100,), device=CPU, dtype=torch.float32)


def test_chunks_continue_one_another() -> None:
    """The latents run on from chunk to chunk; a second generator of the same seed agrees."""
    geometry = LayerGeometry("mamba2", 4, 8, 32, 2)
    a, b = (drift.Signals(geometry, 2, 5, CPU, torch.float32) for _ in range(2))
    a.next_chunk()
    first = a.buffers["x"].clone()
    a.next_chunk()
    assert not torch.equal(first, a.buffers["x"])
    b.next_chunk()
    assert torch.equal(first, b.buffers["x"])
    b.next_chunk()
    assert torch.equal(a.buffers["x"], b.buffers["x"])
    jump = (a.buffers["x"][0] - first[-1]).square().mean()
    apart = (a.buffers["x"][200] - first[-1]).square().mean()
    assert jump < 0.6 * apart  # neighbours in time resemble one another across the border


def test_decay_classes_are_ordered() -> None:
    rates = drift.decay_rates(16, 1, CPU).view(4, 4)
    for part, (low, high) in zip(rates, drift.CLASSES.values(), strict=True):
        assert (part >= low).all() and (part <= high).all()
