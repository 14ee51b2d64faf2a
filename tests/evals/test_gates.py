"""Gates: verdicts from intervals, signals from units, and recipes' gates in a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replayssm_quant import eval as door
from replayssm_quant.evals import gates, report, stats
from replayssm_quant.evals import suite as suites
from replayssm_quant.evals.compare import compare, tail
from replayssm_quant.evals.suite import SuiteError, SuiteGate


def _interval(lower: float, upper: float) -> stats.Interval:
    middle = (lower + upper) / 2
    return stats.Interval(middle, lower, upper, lower, upper, 0.95, 10)


@pytest.mark.parametrize(
    "metric, against, threshold, good, bad",
    [
        ("kld_mean", "fp32", 0.1, (0.01, 0.1), (0.11, 0.2)),
        ("kld_p99", "fp32", 0.1, (0.01, 0.1), (0.11, 0.2)),
        ("kld_slope", "fp32", 0.6, (-1.0, 0.6), (0.61, 0.7)),
        ("top1", "fp32", 0.99, (0.99, 1.0), (0.9, 0.989)),
        ("accuracy_delta", "fp32", 0.01, (-0.01, 0.2), (-0.3, -0.011)),
        ("length_change", "fp32", 0.05, (0.0, 0.05), (0.051, 0.2)),
        ("kld_mean", "committed", 1.2, (0.5, 1.2), (1.21, 1.3)),
        ("kld_slope", "committed", 0.2, (-0.2, 0.2), (0.21, 0.3)),
        ("top1", "committed", 0.005, (-0.005, 0.0), (-0.1, -0.0051)),
        ("accuracy_delta", "committed", 0.01, (-0.01, 0.0), (-0.1, -0.011)),
        ("state_error", "committed", 1.05, (1.0, 1.05), (1.06, 1.1)),
    ],
)
def test_a_gate_passes_fails_or_stays_open(metric, against, threshold, good, bad) -> None:
    gate = SuiteGate(metric=metric, against=against, threshold=threshold)
    passed, reason, bound = gates.judge(gate, _interval(*good))
    assert passed == "PASS" and bound in good and f"{bound:.4g}" in reason
    failed, _, bound = gates.judge(gate, _interval(*bad))
    assert failed == "FAIL" and bound in bad
    both = (min(*good, *bad), max(*good, *bad))
    assert gates.judge(gate, _interval(*both))[0] == "INCONCLUSIVE"
    nan = float("nan")
    assert gates.judge(gate, stats.Interval(nan, nan, nan, nan, nan, 0.95, 10))[0] == "FAIL"


def test_the_worst_verdict_counts() -> None:
    def outcome(verdict: str) -> gates.GateOutcome:
        return gates.GateOutcome(
            model="m", arm="a", task="t", metric="top1", threshold=1, verdict=verdict, reason=""
        )

    assert gates.verdict([outcome(v) for v in ("PASS", "INCONCLUSIVE", "FAIL")]) == "FAIL"
    assert gates.verdict([outcome(v) for v in ("PASS", "INCONCLUSIVE")]) == "INCONCLUSIVE"
    assert gates.verdict([outcome("PASS")]) == "PASS"
    assert gates.verdict([]) == "INCONCLUSIVE"  # nothing was decided


@pytest.fixture
def pair(make_unit):
    """The reference and two seeds of an arm on six streams of 63 predictions, half of them
    scored; the divergence grows with the position."""
    rng = np.random.default_rng(3)
    n, t = 6, 63
    scored = rng.random((n, t)) < 0.5
    scored[:, -1] = True
    base = {"scored": scored, "loss": np.zeros((n, t), np.float32), "right": scored}
    flags = ["1" * int(row.sum()) for row in scored]
    reference = make_unit(flags, arm="fp32", tokens=base)
    units = []
    for seed in range(2):
        kld = rng.random((n, t)) * np.arange(1, t + 1) ** 1.5 * 1e-3
        more = {"kld": kld.astype(np.float32), "agree": rng.random((n, t)) < 0.9}
        wrong = ["0" + f[1:] for f in flags]
        units.append(
            make_unit(wrong, seed=seed, tokens=base | more, kld=tail(kld[scored]))
        )  # fmt: skip
    return reference, units


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_responses_may_neither_grow_nor_shrink(factor, make_unit, task_record) -> None:
    tokens = [100 + i for i in range(40)]
    reference, unit = (make_unit(["1"] * 40, name) for name in ("fp32", "arm"))
    for r, u, n in zip(reference.samples, unit.samples, tokens, strict=True):
        r["generated"], u["generated"] = n, factor * n + (n % 3 - 1)
    m = gates.measured(reference, [unit], "accuracy")
    x = gates.against_fp32("length_change", m, 0.95)
    change = compare(reference, [unit], task_record(), "candidate").length_change
    assert x.value == pytest.approx(abs(change.value)) == pytest.approx(0.1, abs=0.005)
    assert 0 < x.lower < x.value < x.upper
    words = {}
    for threshold in (0.05, 0.1, 0.15):
        gate = SuiteGate(metric="length_change", threshold=threshold)
        words[threshold] = gates.judge(gate, x)[0]
    assert words == {0.05: "FAIL", 0.1: "INCONCLUSIVE", 0.15: "PASS"}
    same = gates.measured(reference, [reference], "accuracy")
    still = gates.against_fp32("length_change", same, 0.95)
    assert (still.value, still.lower, still.upper) == (0, 0, 0)
    with pytest.raises(ValueError, match="no committed value"):
        SuiteGate(metric="length_change", against="committed", threshold=0.05)


def test_intervals_are_those_of_the_comparison(pair, task_record) -> None:
    reference, units = pair
    c = compare(reference, units, task_record(kind="stream"), "candidate")
    m = gates.measured(reference, units, "accuracy")
    found = {k: gates.against_fp32(k, m, 0.95) for k in ("kld_mean", "top1", "accuracy_delta")}
    for name, want in (("kld_mean", c.kld_mean), ("top1", c.top1), ("accuracy_delta", c.delta)):
        for side in ("value", "lower", "upper"):
            assert getattr(found[name], side) == pytest.approx(getattr(want, side), rel=1e-5)
    slope = gates.against_fp32("kld_slope", m, 0.95)
    assert slope.value == pytest.approx(c.kld_slope, rel=1e-5)
    assert slope.lower < slope.value < slope.upper
    scored = reference.tokens["scored"]
    every = np.sort(np.concatenate([u.tokens["kld"][scored] for u in units]))
    p99 = gates.against_fp32("kld_p99", m, 0.95)
    assert p99.value == pytest.approx(every[int(np.ceil(0.99 * len(every))) - 1], rel=1e-6)
    assert p99.lower <= p99.value <= p99.upper <= every[-1]


def test_changes_against_a_committed_result(pair) -> None:
    reference, units = pair
    now = gates.measured(reference, units, "accuracy")
    then = gates.CommittedArm(
        model="m", weights="w", task="t", arm="a", label="a", digest="d", settings={},
        seeds=[0, 1], counts=now.counts.astype(int).tolist(), documents=now.documents,
    )  # fmt: skip

    def change(metric: str, m: gates.Measured = now) -> stats.Interval:
        return gates._against_committed(metric, m, then, 0.95, "here")

    same = change("kld_mean")
    assert same.value == pytest.approx(1, rel=1e-6) and same.upper == pytest.approx(1, rel=1e-6)
    assert change("kld_slope").value == pytest.approx(0, abs=1e-6)
    assert change("top1").value == 0 and change("accuracy_delta").value == 0
    # twice the divergence late in the text: a larger mean, a steeper slope
    late = now.kld * np.where(now.middles > 20, 2.0, 1.0)
    worse = gates.Measured(**{**vars(now), "kld": late})
    assert 1.5 < change("kld_mean", worse).lower <= change("kld_mean", worse).upper < 2.0
    assert change("kld_slope", worse).lower > 0.1
    # half of the documents, in another order: joined by their hashes
    part = [3, 1, 2]
    cut = {k: v[part] for k, v in vars(now).items() if k in ("kld", "counts", "agree", "answers")}
    few = gates.Measured(
        **{
            **vars(now),
            **cut,
            "right": now.right[part],
            "documents": [now.documents[i] for i in part],
        }
    )
    assert change("kld_mean", few).value == pytest.approx(1, rel=1e-6)
    # one document of another run
    other = now.documents[0].model_copy(update={"doc": "elsewhere"})
    with pytest.raises(gates.GateError, match="made from other data"):
        change(
            "kld_mean", gates.Measured(**{**vars(now), "documents": [other, *now.documents[1:]]})
        )
    with pytest.raises(gates.GateError, match="no states"):
        change(
            "state_error",
            gates.Measured(**{**vars(now), "layers": ("1",), "state": np.ones((6, 1, 3))}),
        )


def test_a_state_error_is_that_of_the_worst_layer(pair) -> None:
    reference, units = pair
    now = gates.measured(reference, units, "accuracy")
    state = np.ones((6, 2, 3))
    state[:, 0, 0], state[:, 1, 0] = 1.21, 4.0  # squares: 1.1 and 2 times an error of one
    old = [d.model_copy(update={"state": {"1": [1, 1, 1], "4": [1, 1, 1]}}) for d in now.documents]
    then = gates.CommittedArm(
        model="m", weights="w", task="t", arm="a", label="a", digest="d", settings={},
        seeds=[0, 1], documents=old,
    )  # fmt: skip
    m = gates.Measured(**{**vars(now), "layers": ("1", "4"), "state": state})
    found = gates._against_committed("state_error", m, then, 0.95, "here")
    assert found.value == found.upper == pytest.approx(2.0)


def test_committed_results_survive_the_file(pair, tmp_path: Path) -> None:
    from replayssm_quant.evals.environment import describe

    reference, units = pair
    now = gates.measured(reference, units, "accuracy")
    arm = gates.CommittedArm(
        model="m", weights="w", task="t", arm="a", label="a", digest="d",
        settings={"p": (0.1, 0.2)}, seeds=[0, 1], counts=now.counts.astype(int).tolist(),
        documents=now.documents,
    )  # fmt: skip
    before = gates.Committed(created="now", suite="s", environment=describe("cpu"), arms=[arm])
    path = tmp_path / "c.json"
    gates.write(path, before)
    after = gates.read(path)
    assert after.arms[0].documents == now.documents and after.find("m", "t", "a") is not None
    assert json.loads(path.read_text())["arms"][0]["settings"] == {"p": [0.1, 0.2]}


def _run(*args: str | Path) -> int:
    return door.main([str(a) for a in (*args, "--quiet", "--device", "cpu")])


def test_a_recipes_gates_decide_a_run_of_it(tiny_gdn: Path, tmp_path: Path) -> None:
    """A threshold that the recipe cannot keep fails the run, one that it keeps does not."""
    suite = tmp_path / "text.yaml"
    task = {"task": "text", "documents": 3, "settings": {"length": 48}, "margin": 1.0}
    suite.write_text(
        json.dumps({"schema": 1, "name": "t", "description": "t", "tasks": [task], "seeds": [0]})
    )
    codes = {}
    for threshold in (1e-12, 1.0):
        recipe = tmp_path / "mine.yaml"
        gate = {"metric": "kld_mean", "task": "text", "threshold": threshold}
        unseen = {"metric": "accuracy_delta", "task": "gsm8k", "threshold": 0.01}
        settings = {"update": {"format": "e4m3"}, "output": {"format": "same"}}
        settings["gates"] = [gate, unseen]
        data = {"schema": 1, "name": "mine", "description": "x", "settings": settings}
        recipe.write_text(json.dumps(data))
        out = tmp_path / str(threshold)
        args = ["--model", tiny_gdn, "--suite", suite, "--recipe", recipe, "--out", out, "--gate"]
        codes[threshold] = _run(*args)
        run = report.load(out)
        (found,) = run.gates  # the task that was not run decides nothing
        assert (found.metric, found.threshold, found.task) == ("kld_mean", threshold, "text")
        assert found.verdict == ("FAIL" if threshold < 1e-6 else "PASS") == run.verdict
        line = f"- gate {found.verdict}: tiny-gdn, text, mine (e4m3 SR shared): mean KLD"
        assert line in (out / "report.md").read_text()
    assert codes == {1e-12: 1, 1.0: 0}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"gates": [{"metric": "kld_men", "threshold": 1}]}, "gates.0.metric"),
        ({"gates": [{"metric": "top1", "treshold": 1}]}, "did you mean 'threshold'"),
        ({"gates": [{"metric": "top1", "threshold": 1, "task": "txt"}]}, "did you mean 'text'"),
        ({"gates": [{"metric": "state_error", "threshold": 1}]}, "set against"),
        (
            {"gates": [{"metric": "kld_p99", "threshold": 1, "against": "committed"}]},
            "no committed value",
        ),
        (
            {"gates": [{"metric": "top1", "threshold": 1, "against": "committed"}]},
            "name its file in baseline",
        ),
        ({"recipes": ["nemotron-33"]}, "did you mean 'nemotron-3'"),
        ({"tasks": [{"task": "text", "path": "scan", "states": 0}]}, "greater than"),
        ({"tasks": [{"task": "text", "path": "decode", "states": 2}]}, "recorded on path scan"),
        ({"tasks": [{"task": "tally", "states": 2}]}, "not teacher-forced"),
    ],
)
def test_bad_gates_are_one_line(change, said, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    base = {"schema": 1, "name": "s", "description": "s", "tasks": [{"task": "text"}]}
    path.write_text(json.dumps(base | change))
    with pytest.raises(ValueError, match=said) as caught:
        suites.load(str(path))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SuiteError) or "recipe" in str(caught.value)
