"""A run from gate to result file, with a stop-watch instead of a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from replayssm_quant.kernels.bench import registry, run
from replayssm_quant.kernels.bench.registry import OPS
from replayssm_quant.state.geometry import LayerGeometry

CPU = torch.device("cpu")


class Stopwatch:
    """Stands in for a timed CUDA graph: every step takes 2 us."""

    def __init__(self, launches) -> None:
        launches[0][0]()
        self.count, self.nbytes = len(launches), sum(n for _, n in launches)

    def replay(self) -> float:
        return 2.0

    gbps = run.Pass.gbps


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> run.Settings:
    monkeypatch.setattr(run, "Pass", Stopwatch)
    monkeypatch.setattr(run, "copy_gbps", lambda device: 4000.0)
    monkeypatch.setattr(registry, "sets_needed", lambda nbytes, device: 2)
    geometry = LayerGeometry("mamba2", 2, 16, 32, 1)
    op = dataclasses.replace(OPS["mamba2_decode"], geometries={"tiny": geometry}, default="tiny")
    monkeypatch.setitem(OPS, "mamba2_decode", op)
    points = [("tiny", 3), ("tiny", 1)]
    return run.Settings(op, points, ["fp32", "nvfp4+fp16-sr"], list(run.PHASES), 0.0, 1)


def test_rows_of_a_run(settings: run.Settings, tmp_path: Path) -> None:
    path, wrong = run.run(settings, None, tmp_path, CPU)
    assert wrong == []
    rows = json.loads(path.read_text())
    assert len(rows) == 2 * 2 * 3
    assert path.name.startswith("mamba2_decode-") and rows[0]["date"] in path.name
    for row in rows:
        assert (row["op"], row["geometry"], row["time_us"]) == ("mamba2_decode", "tiny", 2.0)
        assert row["copy_fraction"] == pytest.approx(row["gbps"] / 4000, abs=1e-4)
        assert row["ratio_native_fp32"] is None  # no baseline was given
        assert 2e-4 < row["output_error"] < 3e-3  # y rounded to bf16
    fp32 = next(r for r in rows if (r["batch"], r["design"], r["phase"]) == (3, "fp32", "flush"))
    ring_row = 2 * 2 * 16 + 4 * 2 + 2 * 32  # x, dt and B of one token
    nbytes = 3 * (2 * 4 * 2 * 16 * 32 + 15 * ring_row)
    assert fp32["gbps"] == pytest.approx(nbytes / 2.0 * 1e-3, abs=0.1)


def test_ratios_compare_with_the_same_phase(settings: run.Settings, monkeypatch, tmp_path) -> None:
    """Native in the mix serves every phase; replay is compared phase by phase."""

    times = {
        "native-fp32": 10.0,
        "native-fp16": 5.0,
        "replay-fp32": {"readout": 6.0, "flush": 9.0, "mix": 7.0},
        "replay-fp16": {"readout": 3.0, "flush": 4.0, "mix": 3.5},
    }

    class Baseline:
        def __init__(self, name: str):
            self.name = name

        def pinned(self, config):
            return contextlib.nullcontext()

        def launches(self, phase: str):
            value = times[self.name]
            return [(lambda: None, 100.0, value if isinstance(value, float) else value[phase])]

    class Timed(Stopwatch):
        def __init__(self, launches) -> None:
            self.value = launches[0][2] if len(launches[0]) == 3 else 2.0
            self.count, self.nbytes = len(launches), sum(x[1] for x in launches)

        def replay(self) -> float:
            return self.value

    monkeypatch.setattr(run, "Pass", Timed)
    monkeypatch.setattr(run.baselines, "make", lambda name, *args: Baseline(name))
    monkeypatch.setattr(
        run, "tuned", lambda baseline, phase: ((16, 4), Timed(baseline.launches(phase)))
    )
    monkeypatch.setattr(
        run.vllm_baselines, "load", lambda path: type("V", (), {"version": "0.33.0"})()
    )
    path, _ = run.run(settings, "somewhere", tmp_path, CPU)
    rows = {(r["design"], r["phase"]): r for r in json.loads(path.read_text()) if r["batch"] == 3}
    for phase, replay in (("readout", 3.0), ("flush", 4.5), ("mix", 3.5)):
        row = rows["nvfp4+fp16-sr", phase]
        assert (row["ratio_native_fp32"], row["ratio_native_fp16"]) == (5.0, 2.5)
        assert row["ratio_upstream_replay_fp32"] == replay
        assert row["vllm"] == "0.33.0"
    assert rows["vllm-native-fp32", "mix"]["launch"] == [16, 4]
    assert ("vllm-native-fp32", "flush") not in rows
    assert rows["vllm-replay-fp16", "mix"]["ratio_native_fp32"] == pytest.approx(10 / 3.5, abs=1e-3)


def test_baselines_may_be_chosen() -> None:
    given = run.parser().parse_args(["--baseline", "native-fp32"])
    assert run.settings(given).chosen_baselines == ["native-fp32"]
    assert len(run.settings(run.parser().parse_args([])).chosen_baselines) == 4
    with pytest.raises(SystemExit, match="unknown baseline 'native-int3'"):
        run.settings(run.parser().parse_args(["--baseline", "native-int3"]))


def test_slots_beyond_the_first_repeat_them() -> None:
    geometry = LayerGeometry("mamba2", 2, 64, 128, 1)
    op = OPS["mamba2_decode"]
    p = registry.Problem(op, geometry, registry.DESIGNS["fp32"], 700, device=CPU, sets=6)
    some = (256 << 20) // (4 * geometry.elements)
    assert some < len(p.pages)
    assert torch.equal(p.pages[some], p.pages[0]) and torch.equal(p.pages[-1], p.pages[104])
    assert not torch.equal(p.pages[1], p.pages[0])


def test_a_wrong_design_is_not_timed(settings: run.Settings, monkeypatch, tmp_path, capsys) -> None:
    real = run.Problem.run

    def spoiled(self, step, impl=None):
        out = real(self, step, impl)
        return out * 1.1 if self.config.has_copy else out

    monkeypatch.setattr(run.Problem, "run", spoiled)
    path, wrong = run.run(settings, None, tmp_path, CPU)
    assert {r["design"] for r in json.loads(path.read_text())} == {"fp32"}
    assert len(wrong) == 2 and "y differs" in wrong[0] and "nvfp4+fp16-sr" in wrong[0]
    assert "it is not timed" in capsys.readouterr().out


def test_passes_alternate_and_the_median_counts() -> None:
    order = []

    class Fake:
        def __init__(self, name: str, times: list[float]):
            self.name, self.times = name, iter([0.0, *times])

        def replay(self) -> float:
            order.append(self.name)
            return next(self.times)

    found = run.interleave({"a": Fake("a", [1, 9, 2]), "b": Fake("b", [5, 4, 6])}, 0.0, 3)
    assert found == {"a": 2, "b": 5}
    assert order == ["a", "b"] * 4


def test_points_are_measured_in_their_order() -> None:
    args = run.parser().parse_args(["--points", "nano-4b:8,super:256", "--design", "fp32"])
    assert run.settings(args).points == [("nano-4b", 8), ("super", 256)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("super", "--points 'super': give geometry:batch, such as super:256"),
        ("super:x", "--points 'super:x': give geometry:batch"),
        ("mega:8", "unknown geometry of mamba2_decode 'mega'"),
        ("super:0", "batch 0: a batch has at least one row"),
    ],
)
def test_bad_points_are_refused(text: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run.settings(run.parser().parse_args(["--points", text]))
