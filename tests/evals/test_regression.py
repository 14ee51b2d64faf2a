"""The regression gates on the shipped models: green on this code, red on code broken on purpose."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from replayssm_quant import gates as door
from replayssm_quant.evals import gates as gate_code
from replayssm_quant.evals import report
from replayssm_quant.evals import suite as suites
from replayssm_quant.evals.schema import RunRecord
from replayssm_quant.kernels.common.round_trip import RoundTrip
from replayssm_quant.kernels.gdn import reference as gdn_reference
from replayssm_quant.kernels.gdn import scan as gdn_scan

MAMBA2, GDN = "tiny-nemotron-h", "tiny-qwen3.5"


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, RunRecord]]:
    """Run the shipped regression suite on one model, one recipe and some documents of one task.

    Four documents are enough to see what is broken on purpose. They are too few to see that nothing
    is: a processor that sums in another order rounds other values, and the ratio of the two runs is
    as wide as their noise, 1.13 (up to 1.66) of four documents on one where 16 give less than 1.5.
    """

    def run(
        model: str, recipe: str, task: str = "count", documents: int = 4
    ) -> tuple[int, RunRecord]:
        data = yaml.safe_load(suites.shipped()["regression"].read_text())
        data["recipes"] = [recipe]
        data["tasks"] = [t for t in data["tasks"] if t.get("label", t["task"]) == task]
        data["gates"] = [g for g in data["gates"] if g.get("task", task) == task]
        path = tmp_path / "reduced.yaml"
        path.write_text(yaml.safe_dump(data))
        out = tmp_path / "out"
        code = door.main(
            ["check", "--suite", str(path), "--model", model, "--limit", str(documents),
             "--quiet", "--out", str(out)]
        )  # fmt: skip
        return code, report.load(out)

    return run


def _failed(record: RunRecord) -> set[str]:
    return {g.metric for g in record.gates if g.verdict == "FAIL"}


@pytest.mark.parametrize(
    "model, recipe, task", [(MAMBA2, "auto", "text"), (GDN, "auto/compact", "count-decode")]
)
def test_this_code_passes_against_the_committed_result(check, model, recipe, task) -> None:
    """A sample: ``make test`` holds every recipe and task against it next."""
    code, record = check(model, recipe, task, documents=16)
    assert code == 0, [g.reason for g in record.gates if g.verdict != "PASS"]
    assert record.verdict == "PASS" and record.suite == "regression"
    floor = [g for g in record.gates if g.arm == "fp32-again"]
    assert len(floor) == 1 and floor[0].value < 1e-11
    assert len(record.gates) > len(floor)


def test_the_same_random_words_at_each_flush_turn_it_red(check, monkeypatch) -> None:
    real = RoundTrip._uniform

    def stuck(self, keys, positions):
        return real(self, keys, torch.zeros_like(positions))

    monkeypatch.setattr(RoundTrip, "_uniform", stuck)
    code, record = check(MAMBA2, "auto/published-fp8")
    assert code == 1 and record.verdict == "FAIL"
    assert {"state_error/committed", "kld_mean/committed"} <= _failed(record)


def _mutated(module, name: str, old: str, new: str) -> Callable:
    """The module's function compiled from its source with one expression replaced."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(old) == 1, f"{name} no longer holds {old!r}; mutate what replaced it"
    scope = dict(vars(module))
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    return scope[name]


@pytest.mark.parametrize("recipe", ["auto", "auto/compact", "auto/published"])
def test_corrections_read_from_the_copy_turn_it_red(check, monkeypatch, recipe) -> None:
    """The leak that GDN invites: the fold takes the corrections that the readout made."""
    leaky = _mutated(
        gdn_scan, "_windows", "exact = U[i] - W[i] @ high", "exact = U[i] - W[i] @ low"
    )
    monkeypatch.setattr(gdn_scan, "_windows", leaky)
    code, record = check(GDN, recipe)
    assert code == 1 and "state_error/committed" in _failed(record)


def test_a_fold_that_starts_from_the_copy_turns_it_red(check, monkeypatch) -> None:
    monkeypatch.setattr(gdn_reference, "read_checkpoint", gdn_reference.read_copy)
    code, record = check(GDN, "auto/compact", "count-decode")
    assert code == 1 and "kld_mean/committed" in _failed(record)


@pytest.mark.parametrize("model, recipe", [(MAMBA2, "auto"), (GDN, "auto")])
def test_a_swapped_scale_axis_turns_it_red(check, monkeypatch, model, recipe) -> None:
    """Scales shared along the rows of a state (P or V) where the format has them along d_state."""
    real = RoundTrip._scales

    def swapped(self, x, fmt):
        turned = RoundTrip.__new__(RoundTrip)
        turned.__dict__.update(self.__dict__, _scratch={})
        pair = real(turned, x.transpose(-1, -2).contiguous(), fmt)
        if fmt.scale.granularity == "row":
            return tuple(s.transpose(-1, -2) for s in pair)
        block = fmt.scale.block
        full = (s.expand(*s.shape[:-1], block).flatten(-2).transpose(-1, -2) for s in pair)
        return tuple(s.contiguous().unflatten(-1, (-1, block)) for s in full)

    monkeypatch.setattr(RoundTrip, "_scales", swapped)
    code, record = check(model, recipe)
    assert code == 1 and "state_error/committed" in _failed(record)


def test_the_committed_result_covers_every_recipe_of_the_shipped_models() -> None:
    suite = suites.load("regression")
    committed = gate_code.read(Path(suite.baseline))
    found = {(a.model, a.task, a.label.split(" ")[0]) for a in committed.arms}
    for model, family in ((MAMBA2, "nemotron-3"), (GDN, "qwen3.5")):
        for recipe in suite.recipes:
            label = recipe.replace("auto", family)
            for task in suite.tasks:
                assert (model, task.name, label) in found
    assert len(committed.arms) == 2 * len(suite.recipes) * len(suite.tasks)


def test_accept_writes_what_check_passes_against(tmp_path, tiny_gdn, capsys) -> None:
    suite = {
        "schema": 1,
        "name": "mine",
        "description": "mine",
        "recipes": ["auto"],
        "baseline": "mine.json",
        "seeds": [0],
        "tasks": [{"task": "count", "documents": 3, "settings": {"length": 48}, "states": 2}],
        "gates": [
            {"metric": "kld_mean", "against": "committed", "threshold": 1.1},
            {"metric": "state_error", "against": "committed", "threshold": 1.1},
        ],
    }
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(suite))
    common = ["--suite", str(path), "--model", str(tiny_gdn), "--quiet"]
    assert door.main(["check", *common]) == 2
    assert "cannot be read" in capsys.readouterr().err
    baseline = tmp_path / "mine.json"
    assert door.main(["accept", *common, "--into", str(baseline)]) == 0
    assert baseline.read_text().count("\n") > 3
    assert door.main(["check", *common]) == 0
    data = json.loads(baseline.read_text())
    # one document of three is now twice as bad: open whether that is a regression
    data["arms"][0]["documents"][0]["kld"] = [x / 2 for x in data["arms"][0]["documents"][0]["kld"]]
    baseline.write_text(json.dumps(data))
    assert door.main(["check", *common]) == 3
    assert "INCONCLUSIVE" in capsys.readouterr().out
    data["arms"][0]["documents"][0]["kld"] = [x * 2 for x in data["arms"][0]["documents"][0]["kld"]]
    # half of the committed divergence: this run is twice as bad
    for document in data["arms"][0]["documents"]:
        document["kld"] = [x / 2 for x in document["kld"]]
    baseline.write_text(json.dumps(data))
    assert door.main(["check", *common]) == 1
    assert "mean KLD / committed 2" in capsys.readouterr().out
    for key, value, said in (
        ("digest", "0" * 12, "the formats of the recipe are"),
        ("seeds", [1], "the rounding seeds are [0], committed with [1]"),
        ("settings", {"length": 64}, "the settings of the task are"),
        ("weights", "0" * 16, "measured with other weights"),
        ("arm", "gone", "no committed result"),
    ):
        changed = json.loads(json.dumps(data))
        changed["arms"][0][key] = value
        baseline.write_text(json.dumps(changed))
        assert door.main(["check", *common]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and "gates accept" in error
    data["arms"][0]["documents"][1]["prompt"] = "another"
    baseline.write_text(json.dumps(data))
    assert door.main(["check", *common]) == 2
    assert "another prompt" in capsys.readouterr().err
    baseline.write_text("{}")
    assert door.main(["check", *common]) == 2
    assert "schema 'None'" in capsys.readouterr().err


def test_what_older_code_measured_is_not_resumed(tmp_path, tiny_gdn, monkeypatch) -> None:
    from replayssm_quant.evals import measure, runner

    suite = {
        "schema": 1, "name": "mine", "description": "mine", "recipes": ["auto"], "seeds": [0],
        "tasks": [{"task": "text", "documents": 2, "settings": {"length": 48}}],
        "gates": [{"metric": "kld_mean", "threshold": 1.0}],
    }  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(suite))
    calls = []
    real = measure.measure_streams
    monkeypatch.setattr(
        measure, "measure_streams", lambda *a, **k: calls.append(a[2].role) or real(*a, **k)
    )
    args = ["check", "--suite", str(path), "--model", str(tiny_gdn), "--quiet"]
    args += ["--out", str(tmp_path / "out")]
    assert door.main(args) == 0 and calls == ["reference", "floor", "candidate"]
    assert door.main(args) == 0 and len(calls) == 3
    monkeypatch.setattr(runner, "code_digest", lambda: "newer")
    assert door.main(args) == 0 and len(calls) == 6
