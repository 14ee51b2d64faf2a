"""What the benchmark times: phases, bytes, slots; and the gate that must stop wrong kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from replayssm_quant.kernels.bench import registry, run
from replayssm_quant.kernels.bench.registry import DESIGNS, OPS, Problem, phase_rows
from replayssm_quant.state.cache import StepRows, read_checkpoint
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.layout import StateLayout

CPU = torch.device("cpu")
TINY = {
    "mamba2_decode": LayerGeometry("mamba2", 4, 16, 32, 2),
    "gdn_decode": LayerGeometry("gdn", 4, 16, 32, 2),
}


def problem(op: str, design: str = "nvfp4+fp16-sr", batch: int = 5, **kw: object) -> Problem:
    return Problem(
        OPS[op], TINY[op], DESIGNS[design], batch, device=CPU, dtype=torch.float32, sets=2, **kw
    )


def test_the_mix_flushes_one_row_in_length_at_every_step_and_advances() -> None:
    for step in range(20):
        valid, flush = phase_rows("mix", step, 32, 16)
        following, _ = phase_rows("mix", step + 1, 32, 16)
        assert sum(flush) == 2
        for v, f, after in zip(valid, flush, following, strict=True):
            assert f == (v == 15)
            assert after == (0 if f else v + 1)


def test_readout_never_flushes_and_flush_always_does() -> None:
    valid, flush = phase_rows("readout", 3, 40, 16)
    assert set(valid) == set(range(15)) and not any(flush)
    assert phase_rows("flush", 3, 4, 16) == ([15] * 4, [True] * 4)
    assert phase_rows("flush", 0, 2, 1) == ([0, 0], [True, True])


def test_unknown_phases_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown phase 'mixed'"):
        phase_rows("mixed", 0, 4, 16)
    with pytest.raises(ValueError, match="buffer_len 1"):
        phase_rows("readout", 0, 4, 1)


@pytest.mark.parametrize("design", ["nvfp4+fp16-sr", "P4+8-sr-rot", "e4m3-sr", "fp32"])
def test_bytes_of_a_pass_are_those_of_the_layout(design: str) -> None:
    """A pass over all phases of the window moves L times what ``plan`` counts a token."""
    layout = StateLayout(OPS["mamba2_decode"].geometry("super"), DESIGNS[design])
    total = sum(registry.step_bytes(layout, *phase_rows("mix", i, 1, 16)) for i in range(16))
    assert total == pytest.approx(16 * layout.bytes_per_step)


def test_slots_are_shuffled_disjoint_and_leave_out_slot_zero() -> None:
    sets = registry.slot_sets(8, 3, 0, CPU)
    flat = torch.cat(sets).tolist()
    assert sorted(flat) == list(range(1, 25))
    assert flat != sorted(flat)


def test_small_batches_rotate_among_enough_slots_to_outgrow_the_cache() -> None:
    assert registry.sets_needed(1e6, CPU) == 26  # 3 x 8 MiB
    assert registry.sets_needed(1e12, CPU) == 1
    for phase, steps in (("mix", 32), ("readout", 30), ("flush", 26)):
        assert registry.phase_steps(phase, 16, 26) == steps


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_gate_is_green_for_the_reference(op: str) -> None:
    for design in ("nvfp4+fp16-sr", "P8+4-sr-rot", "fp32"):
        result = run.gate(problem(op, design), "reference")
        assert result.output < 1e-6
        assert result.flips <= 2e-3


def _spoil(monkeypatch: pytest.MonkeyPatch, p: Problem, harm) -> None:
    real = p.run

    def spoiled(step: registry.Step, impl: str | None = None) -> torch.Tensor:
        out = real(step, "reference")
        return harm(p, step.rows, out)

    monkeypatch.setattr(p, "run", spoiled)


def _output(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    return out * 1.01


def _nan(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    out[0, 0, 0] = float("nan")
    return out


def _checkpoint(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    slots = rows.slots[rows.flush]
    p.views.ckpt[slots] = p.views.ckpt[slots] * 1.001
    return out


def _stale_copy(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    slots = rows.slots[rows.flush]
    p.views.copy[slots] ^= 1
    return out


def _lost_input(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    for ring in (p.views.ring_x, p.views.ring_v):
        if ring is not None:
            ring[rows.slots, rows.valid.long()] = 0
    return out


def _touched_checkpoint(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
    p.views.ckpt[rows.slots[~rows.flush]] += 1
    return out


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize(
    "harm, message",
    [
        (_output, "y differs"),
        (_nan, "y differs from float64 by inf"),
        (_checkpoint, "of the codes differ"),
        (_stale_copy, "of the codes differ|not the checkpoint rounded"),
        (_lost_input, "is not what came in"),
        (_touched_checkpoint, "that does not flush changed"),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else "",
)
def test_the_gate_is_red_for_a_wrong_kernel(
    op: str, harm, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(op)
    _spoil(monkeypatch, p, harm)
    with pytest.raises(run.Red, match=message):
        run.gate(p)


def test_the_gate_reads_fp32_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """tf32 products would leave an error of some 5e-4; the bound is 1e-5."""
    p = problem("mamba2_decode", "fp32")

    def harm(p: Problem, rows: StepRows, out: torch.Tensor) -> torch.Tensor:
        slots = rows.slots[rows.flush]
        p.views.ckpt[slots] = read_checkpoint(p.views, p.config, slots) * (1 + 5e-4)
        return out

    _spoil(monkeypatch, p, harm)
    with pytest.raises(run.Red, match="fp32 checkpoint differs"):
        run.gate(p)


def test_a_red_gate_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    op = dataclasses.replace(OPS["mamba2_decode"], geometries={"tiny": TINY["mamba2_decode"]})
    monkeypatch.setitem(OPS, "mamba2_decode", op)
    args = ["--check-only", "--device", "cpu", "--impl", "reference", "--batch", "2"]
    args += ["--design", "fp16-sr"]
    assert run.main(args) == 0
    monkeypatch.setitem(run.OUTPUT_BOUND, torch.float32, 0.0)
    assert run.main(args) == 1
    out = capsys.readouterr().out
    assert "green tiny batch 2 fp16-sr" in out and "RED   tiny batch 2 fp16-sr" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--geometry", "supper"], "unknown geometry of mamba2_decode 'supper'; known: super"),
        (["--design", "fp4"], "unknown design 'fp4'"),
        (["--phase", "all"], "unknown phase 'all'"),
        (["--batch", "0"], "at least one row"),
        (["--batch", "many"], "whole numbers"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run.main([*arguments, "--check-only"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_timing_needs_a_gpu(capsys) -> None:
    assert run.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
