"""Suites and task lists: what is accepted, and what a typo is told."""

import pytest

from replayssm_quant.evals import suite as suites
from replayssm_quant.evals.suite import SuiteError, TaskSpec


def test_every_shipped_suite_loads() -> None:
    assert "default" in suites.shipped()
    for name in suites.shipped():
        loaded = suites.load(name)
        assert loaded.name == name and loaded.tasks


@pytest.mark.parametrize(
    "text, message",
    [
        ("tasks: [}", "not valid YAML"),
        ("schema: 1\nname: x\ndescription: d\ntasks: []", "at least 1"),
        ("schema: 1\nname: x\ndescription: d\ntasks: [{tusk: count}]", "did you mean 'task'"),
        ("schema: 2\nname: x\ndescription: d\ntasks: [{task: count}]", "schema"),
        (
            "schema: 1\nname: x\ndescription: d\ntasks: [{task: count, settings: {lenght: 9}}]",
            "did you mean 'length'",
        ),
        (
            "schema: 1\nname: x\ndescription: d\ntasks: [{task: count, mode: generate}]",
            "no free-running form; tasks that do: tally",
        ),
        (
            "schema: 1\nname: x\ndescription: d\ntasks: [{task: gsm8k, mode: stream}]",
            "not local",
        ),
        (
            "schema: 1\nname: x\ndescription: d\ntasks: [{task: text}, {task: text}]",
            "'text' occurs twice; give one of them a label",
        ),
    ],
)
def test_bad_suites_say_what_is_wrong(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SuiteError, match=message):
        suites.load(str(path))


def test_unknown_suite_is_told_the_known_ones() -> None:
    with pytest.raises(SuiteError, match="did you mean 'default'"):
        suites.load("defalt")
    with pytest.raises(SuiteError, match="cannot be read"):
        suites.load("absent.yaml")


def test_picking_keeps_the_suites_settings(short_suite) -> None:
    suite = suites.load(str(short_suite))
    (spec,) = suites.pick(["count"], suite)
    assert spec.settings == {"length": 48} and spec.kind == "stream"
    plain, again = suites.pick(["recall", "tally", "recall"], suite)
    assert plain == TaskSpec(task="recall") and again.kind == "generate"


def test_unknown_tasks_get_a_suggestion(short_suite) -> None:
    suite = suites.load(str(short_suite))
    with pytest.raises(SuiteError, match="unknown task 'cuont': did you mean 'count'.*eval extra"):
        suites.pick(["cuont"], suite, None)
    with pytest.raises(SuiteError, match="did you mean 'gsm8k'"):
        suites.pick(["gsm8kk"], suite, ["gsm8k", "arc_easy"])
    assert suites.pick(["gsm8k"], suite, ["gsm8k"])[0].kind == "lm_eval"


def test_thresholds_and_margins_have_stated_defaults() -> None:
    assert TaskSpec(task="count").learned == suites.LEARNED
    assert TaskSpec(task="text").learned is None and TaskSpec(task="text").likelihood
    assert TaskSpec(task="count", margin=0.02).accepted == 0.02
    assert TaskSpec(task="gsm8k").learned is None
    assert TaskSpec(task="tally", mode="stream").name == "tally-stream"
