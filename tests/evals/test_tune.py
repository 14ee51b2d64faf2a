"""The search for formats by layer: exact parts alone, then the whole command on tiny models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from replayssm_quant import recipe as recipes
from replayssm_quant import tune as door
from replayssm_quant.config import StateConfig
from replayssm_quant.evals import measure, tune
from replayssm_quant.evals.arms import parse_arm
from replayssm_quant.evals.schema import IntervalRecord
from replayssm_quant.state.geometry import read_geometry

RESULTS = Path(tune.__file__).resolve().parent / "results"


def test_the_frontier_holds_what_no_assignment_beats() -> None:
    rng = np.random.default_rng(0)
    options = [
        [(int(b), float(k)) for b, k in zip(rng.integers(1, 30, 4), rng.random(4), strict=True)]
        for _ in range(5)
    ]
    found = {(p.bytes, round(p.kld, 12)) for p in tune.frontier(options)}
    every = []
    for choice in itertools.product(range(4), repeat=5):
        cells = [options[g][c] for g, c in enumerate(choice)]
        every.append((sum(c[0] for c in cells), sum(c[1] for c in cells)))
    best = {
        (b, round(k, 12))
        for b, k in every
        if not any(x <= b and y <= k and (x, y) != (b, k) for x, y in every)
    }
    assert found == best and len(best) > 5


def test_a_narrow_frontier_still_meets_every_choice() -> None:
    options = [[(1, 3.0), (2, 2.0), (5, 0.5)]] * 6
    points = tune.frontier(options, width=5)
    assert points[0].bytes == 6 and points[-1].kld == pytest.approx(3.0)
    for p in points:
        assert p.bytes == sum(options[0][c][0] for c in p.choice)
        assert p.kld == pytest.approx(sum(options[0][c][1] for c in p.choice))


@pytest.mark.parametrize(
    "texts",
    [
        ["P4+8:rot", "P4+8:rot", "P8+4:rot"],
        ["fp16:same", "fp16:nvfp4", "fp32", "fp16:same"],
        ["e4m3:nvfp4", "e4m3/b32/fp16:nvfp4", "e4m3/none:same:rn"],
        ["int8/b16:same:rot", "int8:same", "P4+4/row:rot", "nvfp4:same"],
    ],
)
def test_recipes_written_from_configs_read_back_as_them(texts, tmp_path: Path) -> None:
    layer = {"model_type": "mamba2", "num_heads": 2, "head_dim": 32, "state_size": 32}
    layer |= {"num_hidden_layers": len(texts), "n_groups": 1, "hidden_size": 32, "expand": 2}
    geometry = read_geometry(layer)
    configs = {i: parse_arm(t, {"buffer_len": 8}) for i, t in enumerate(texts)}
    assert set(configs) == set(geometry.layers)
    data = {"schema": 1, "name": "x", "description": "x", "settings": tune.settings_of(configs)}
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(data))
    assert recipes.resolve(str(path)).configs(geometry) == configs


def test_bytes_are_read_with_their_units() -> None:
    texts = ("300000", "300k", "1.5MB", "2Ki", "7b")
    assert [tune.parse_bytes(t) for t in texts] == [300_000, 300_000, 1_500_000, 2048, 7]
    for bad in ("", "many", "-3", "0", "3x", "inf"):
        with pytest.raises(tune.TuneError, match="bytes"):
            tune.parse_bytes(bad)


def _whole(value: float) -> tune.Whole:
    interval = IntervalRecord(
        value=value, low=value, high=value, lower=value, upper=value, level=0.95, n=2
    )
    return tune.Whole(
        name=str(value), bytes=1, per_step=1, predicted=0, kld=interval, top1=1, layers={}
    )


@pytest.mark.parametrize("start", [0.1, 1.0, 10.0])
def test_the_smallest_point_under_a_limit_is_found(start: float) -> None:
    """Predictions off by a constant factor move where the bisection starts, not where it ends."""
    points = [tune.Point(i, start * 2.0**-i, (i,)) for i in range(20)]
    calls = []

    def at(point):
        calls.append(point.bytes)
        return _whole(2.0**-point.bytes)

    found = tune.near_target(points, at, 2.0**-7)
    assert found is not None and found.kld.value == 2.0**-7
    assert len(calls) == len(set(calls)) <= 7
    assert tune.near_target(points, at, 1e-9) is None


def _run(*args: str | Path) -> int:
    return door.main([str(a) for a in ("--quiet", "--device", "cpu", *args)])


SMALL = ["--documents", "2", "--verify", "3", "--seeds", "0,1", "--formats"]


def test_a_budget_gives_a_recipe_with_its_evidence(tiny_gdn, tmp_path: Path, capsys) -> None:
    out = tmp_path / "mine.yaml"
    formats = "nvfp4:same,P4+4:rot,P8+4:rot,fp16:nvfp4"
    assert _run("--model", tiny_gdn, "--budget-bytes", "4.4k", "--out", out, *SMALL, formats) == 0
    record = tune.TuneRecord.model_validate_json((tmp_path / "mine.json").read_text())
    chosen = next(w for w in record.measured if w.name == record.chosen)
    assert chosen.bytes <= 4400 and record.target == {"bytes": 4400.0}
    inside = [w for w in record.measured if w.bytes <= 4400]
    assert len(inside) >= 2 and chosen.kld.value == min(w.kld.value for w in inside)
    # the one recurrent layer: alone is whole, and what was predicted is what was measured
    assert chosen.predicted == pytest.approx(chosen.kld.value, rel=1e-9)
    by_label = {s.label: s for s in record.sensitivity}
    assert (
        by_label["P8+4 SR rot"].kld < by_label["P4+4 SR rot"].kld < by_label["nvfp4 SR shared"].kld
    )
    # one nibble wide copies of the same kind of state: their errors lie close together
    assert by_label["P8+4 SR rot"].copy_ < by_label["P4+4 SR rot"].copy_ / 4
    assert by_label["fp16 SR + nvfp4"].checkpoint < by_label["nvfp4 SR shared"].checkpoint / 50
    fresh = {v.name for v in record.verified}
    assert fresh == {"fp32-again", record.chosen, "qwen3.5"} and record.verified[0].floor < 1e-10
    resolved = recipes.resolve(str(out))
    assert [e.result for e in resolved.evidence] == ["mine.json"]
    assert resolved.gates[0].metric == "kld_mean" and resolved.has_evidence("tiny-gdn")
    assert list(chosen.layers.values()) == [resolved.config().label]
    assert recipes.main(["validate", str(out)]) == 0
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["mine.json", "mine.yaml"]
    text = out.read_text()
    capsys.readouterr()
    for change, said in (
        (text.replace("mine.json", "theirs.json"), "no such file beside the recipe"),
        (text.replace("result: mine.json", "result: mine.yaml"), "is not a result file"),
        (text.replace("model: tiny-gdn", "model: another"), "about tiny-gdn, not about another"),
    ):
        out.write_text(change)
        assert recipes.main(["validate", str(out)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_a_limit_gives_the_smallest_state_that_keeps_it(tiny_mamba2: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    formats = "nvfp4:same,P4+4:rot,P8+4:rot,fp16:same"
    args = ["--model", tiny_mamba2, "--out", out, *SMALL, formats]
    assert _run(*args, "--max-kld", "1e-12", "--formats", "P4+4:rot,P8+4:rot") == 2
    assert not out.exists()
    assert _run(*args, "--max-kld", "1e-6") == 0
    record = tune.TuneRecord.model_validate_json((tmp_path / "mine.json").read_text())
    chosen = next(w for w in record.measured if w.name == record.chosen)
    assert chosen.kld.upper <= 1e-6
    smaller = [w for w in record.measured if w.bytes < chosen.bytes]
    assert smaller and all(w.kld.upper > 1e-6 for w in smaller)


def test_an_interrupted_search_resumes_and_leaves_no_recipe(
    tiny_gdn: Path, tmp_path: Path, monkeypatch
) -> None:
    out, work = tmp_path / "mine.yaml", tmp_path / "work"
    args = ["--model", tiny_gdn, "--budget-like", "auto", "--out", out, "--work", work, *SMALL]
    args.append("P4+4:rot,P8+4:rot")
    calls: list[tuple[str, int]] = []
    real = measure.measure_streams

    def until(most: int):
        def spy(loaded, docs, arm, seed, *rest):
            if len(calls) == most:
                raise KeyboardInterrupt
            calls.append((arm.name, seed))
            return real(loaded, docs, arm, seed, *rest)

        return spy

    monkeypatch.setattr(measure, "measure_streams", until(4))
    assert _run(*args) == 130
    assert not out.exists() and not out.with_suffix(".json").exists()
    before = list(calls)
    monkeypatch.setattr(measure, "measure_streams", until(10**6))
    assert _run(*args) == 0 and out.exists()
    again = calls[len(before) :]
    assert len(before) == 4 and set(before) & set(again) == {("fp32", 0)}  # for its logits
    calls.clear()
    assert _run(*args) == 0
    assert set(calls) == {("fp32", 0)} and len(calls) <= 3


@pytest.mark.parametrize(
    "args, message",
    [
        (["--budget-bytes", "lots"], "write a number"),
        (["--budget-bytes", "10"], "below the smallest state"),
        (["--max-kld", "-1"], "no divergence"),
        (["--budget-like", "nemotron-33"], "did you mean 'nemotron-3'"),
        (["--budget-bytes", "2k", "--task", "tally"], "not teacher-forced"),
        (["--budget-bytes", "2k", "--formats", "fp8@8"], "--buffer-len"),
        (["--budget-bytes", "2k", "--formats", "fp9"], "unknown state format 'fp9'"),
        (["--budget-bytes", "2k", "--documents", "1"], "too small"),
        (["--budget-bytes", "2k", "--out", "x.txt"], "ending in .yaml"),
        (["--budget-bytes", "2k", "--device", "cuda:7"], "no CUDA GPU"),
    ],
)
def test_bad_input_is_one_line_and_two(args, message, tiny_gdn, tmp_path, capsys) -> None:
    if message == "no CUDA GPU":
        pytest.importorskip("torch").cuda.is_available() and pytest.skip("there is a GPU")
    given = ["--model", tiny_gdn, "--documents", "2", "--verify", "2", "--seeds", "0"]
    given += ["--out", tmp_path / "x.yaml", *args]
    assert _run(*given) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("error: ")
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize(
    "model, beside", [("tiny-nemotron-h", "nemotron-3"), ("tiny-qwen3.5", "qwen3.5")]
)
def test_committed_searches_beat_the_default_at_its_bytes(model: str, beside: str) -> None:
    """Evidence on the shipped models; ``tune --budget-like auto`` makes these files."""
    path = RESULTS / f"tune-{model}.json"
    record = tune.TuneRecord.model_validate_json(path.read_text())
    assert record.model == model and record.beside == beside
    mine, theirs = (
        next(v for v in record.verified if v.name == name and v.task == record.task)
        for name in (record.chosen, beside)
    )
    assert mine.bytes <= theirs.bytes == record.target["bytes"]
    assert record.ratio.upper <= 1.0 and mine.documents >= 24
    assert isinstance(parse_arm(record.sensitivity[0].format), StateConfig)
