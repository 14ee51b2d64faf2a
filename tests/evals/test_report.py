"""Tables say what the record says."""

import math

import pytest

from replayssm_quant import report as door
from replayssm_quant.config import StateConfig
from replayssm_quant.evals import report
from replayssm_quant.evals.arms import FLOOR, REFERENCE, arm, reference_arms
from replayssm_quant.evals.compare import compare, overall
from replayssm_quant.evals.schema import (
    Environment,
    ModelRecord,
    RunRecord,
    StateBytes,
    TailRecord,
    write_json,
)


@pytest.fixture
def run(make_unit, task_record) -> RunRecord:
    """One model, one task, a candidate that loses 4 of 40 answers in one seed of two."""
    sizes = {
        "model": StateBytes(
            fp32=4_000_000, stored=1_000_000, ring=9, ratio=4.0, per_step=1.0, ring_dtype="bf16"
        )
    }
    arms = [*reference_arms(8), arm("candidate", StateConfig.from_flags("fp8"))]
    task = task_record(threshold=0.5)
    good, bad = ["11"] * 20, ["11"] * 16 + ["10"] * 4
    reference = make_unit(good, REFERENCE)
    floor = make_unit(good, FLOOR)
    units = [make_unit(good, arms[2].name, 0), make_unit(bad, arms[2].name, 1)]
    comparisons = [
        compare(reference, [floor], task, "floor"),
        compare(reference, units, task, "candidate"),
    ]
    return RunRecord(
        created="2025-01-01T00:00:00+00:00",
        command=[],
        suite="suite",
        limited=False,
        environment=Environment(
            toolkit="0", commit="c" * 40, dirty=True, python="3.11", packages={"torch": "2"},
            hardware="cpu", threads=1,
        ),
        settings={},
        models=[
            ModelRecord(
                name="model", source="shipped", model_type="mamba2", parameters=1_500_000,
                dtype="float32", weights="w", recurrent_layers=1, state_elements=1_000_000,
            )
        ],
        tasks=[task],
        arms=[a.record(sizes, 8) for a in arms],
        units=[u.record for u in (reference, floor, *units)],
        comparisons=comparisons,
        verdict=overall(comparisons),
        seconds=12.0,
    )  # fmt: skip


def test_rows_carry_the_records_numbers(run: RunRecord) -> None:
    table = report.task_table(run, run.models[0], run.tasks[0])
    head, rule, floor, candidate = table.splitlines()
    assert len({len(x) for x in (head, rule, floor, candidate)}) == 1  # padded to one width
    assert "noise floor" in floor and "100.0 -> 100.0" in floor
    c = run.comparisons[1]
    for text in ("1 MB", "4.00x", "100.0 -> 95.0", "-5.0 [", c.verdict):
        assert text in candidate
    low, high = f"{100 * c.delta.low:+.1f}", f"{100 * c.delta.high:+.1f}"
    assert f"[{low}, {high}]" in candidate


def test_report_names_versions_flips_and_open_verdicts(run: RunRecord) -> None:
    text = report.markdown(run)
    for part in ("commit cccccccccccc (modified)", "torch 2", "1.50 M parameters", "seed SD"):
        assert part in text
    assert run.comparisons[1].reason in text
    rows = [x for x in text.splitlines() if x.startswith("| e4m3") and "MB" not in x]
    drift, evidence = ([x.strip() for x in row.split("|")] for row in rows)
    assert evidence[2:4] == ["4", "0"]
    assert drift[2:5] == ["–", "2.0 -> 2.0", "+0.0 [+0.0, +0.0]"]


def test_few_rounding_seeds_are_pointed_out(run: RunRecord) -> None:
    assert "Fewer than three rounding seeds" in report.terminal(run)
    run.settings["seeds"] = [0, 1, 2]
    assert "Fewer than three rounding seeds" not in report.terminal(run)


def test_limited_runs_say_so(run: RunRecord) -> None:
    assert "not a result to quote" not in report.terminal(run)
    assert "not a result to quote" in report.terminal(run.model_copy(update={"limited": True}))


def test_a_saved_record_reports_the_same(run: RunRecord, tmp_path) -> None:
    write_json(tmp_path / "results.json", run)
    assert report.markdown(report.load(tmp_path)) == report.markdown(run)


def test_broken_numbers_are_printed_as_such(run: RunRecord) -> None:
    c = run.comparisons[1]
    nan = math.nan
    c.delta = c.delta.model_copy(update=dict(value=-math.inf, low=nan, high=nan))
    inf = TailRecord(mean=math.inf, median=0, p90=0, p99=math.inf, p999=1, max=1, n=2)
    c.kld = inf
    run.tasks[0] = run.tasks[0].model_copy(update={"kind": "stream"})
    table = report.task_table(run, run.models[0], run.tasks[0])
    assert "not finite" in table and " inf " in table


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0"), (3.2e-5, "3.20e-05"), (0.0123, "0.0123"), (None, "–"), (math.inf, "inf")],
)
def test_divergences_are_readable(value, text: str) -> None:
    assert report.nats(value) == text


@pytest.mark.parametrize(
    "value, text", [(999, "999 B"), (67600, "67.6 kB"), (2.5e6, "2.5 MB"), (1.234e9, "1.23 GB")]
)
def test_sizes_are_readable(value, text: str) -> None:
    assert report.size(value) == text


def test_divergence_inside_the_floor_is_called_noise(run: RunRecord) -> None:
    c = run.comparisons[1]
    assert "within noise" not in report.markdown(run)
    c.kld = TailRecord(mean=1e-9, median=0, p90=0, p99=0, p999=0, max=1e-9, n=2)
    c.kld_floor = 2e-9
    assert f"{c.verdict}, within noise" in report.markdown(run)


def test_generated_tokens_are_shown_beside_fp32s(run: RunRecord) -> None:
    run.comparisons[1].tokens_generated = 37
    assert "40 -> 37" in report.markdown(run)


def test_pipes_do_not_break_tables() -> None:
    table = report.markdown_table(["a", "b"], [["x | y", "1"]])
    assert table.splitlines()[1] == "| :----- | --: |"
    assert table.splitlines()[2].count(" | ") == 1 and "\\|" in table


def test_summary_puts_models_side_by_side(run: RunRecord) -> None:
    text = report.summary(run)
    rows = text.splitlines()
    assert "model: ratio" in rows[0] and "4.00x" in rows[-3] and "95.0, -5.0 [" in rows[-3]
    assert "fp32: model 100.0 %" in rows[-1] and "commit cccccccccccc" in rows[-1]


def test_tables_replace_what_stands_between_the_marks(run: RunRecord, tmp_path, capsys) -> None:
    write_json(tmp_path / "results.json", run)
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        args = [str(tmp_path), "--format", "summary", "--into", str(page)]
        assert door.main(args) == 0
    text = page.read_text()
    assert text == f"before\n{report.BEGIN}\n{report.summary(run)}\n{report.END}\nafter\n"
    page.write_text("no marks")
    assert door.main(args) == 2 and page.read_text() == "no marks"
    assert "lacks the lines" in capsys.readouterr().err


def test_a_compact_record_reports_the_same(run: RunRecord, tmp_path, capsys) -> None:
    write_json(tmp_path / "results.json", run)
    assert door.main([str(tmp_path), "--format", "compact"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "results.json").write_text(text)
    small = report.load(tmp_path)
    assert small.units == [] and report.markdown(small) == report.markdown(run)
    assert small.comparisons == run.comparisons
    assert len(text) < len(run.model_dump_json())


def test_other_json_beside_results_is_passed_over(run: RunRecord, tmp_path) -> None:
    write_json(tmp_path / "a.json", run)
    (tmp_path / "numbers.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text("{")
    assert list(report.load_all(tmp_path)) == ["a.json"]


def test_results_page_holds_every_file_newest_first(run: RunRecord, tmp_path, capsys) -> None:
    write_json(tmp_path / "a.json", run)
    write_json(tmp_path / "b.json", run.model_copy(update={"created": "2026-01-01T00:00:00"}))
    assert door.main([str(tmp_path), "--format", "results"]) == 0
    text = capsys.readouterr().out
    assert text.index("## b.json") < text.index("## a.json")
    assert "\n### model\n" in text and "\n#### task\n" in text
    assert door.main([str(tmp_path / "none"), "--format", "results"]) == 2


def test_a_page_of_results_takes_a_run_without_accuracy(run: RunRecord) -> None:
    run.tasks[0] = run.tasks[0].model_copy(update={"scored": "likelihood"})
    assert "## a.json" in report.results_page({"a.json": run})


def test_an_overview_shows_one_task_for_all_arms(run: RunRecord) -> None:
    first = run.tasks[0].model_copy(update={"name": "rare"})
    run.tasks.insert(0, first)  # measured for one of the two arms only
    run.comparisons.append(run.comparisons[1].model_copy(update={"task": "rare"}))
    rows = report.overview(run, run.models[0])
    assert len(rows) == 2 and {r["accuracy_task"] for r in rows} == {"task"}


def test_an_overview_prefers_a_task_that_fp32_has_learned(run: RunRecord) -> None:
    hard = run.tasks[0].model_copy(update={"name": "hard"})
    run.tasks.insert(0, hard)
    unlearned = {"task": "hard", "verdict": "NOT-LEARNED"}
    run.comparisons += [c.model_copy(update=unlearned) for c in list(run.comparisons)]
    assert {r["accuracy_task"] for r in report.overview(run, run.models[0])} == {"task"}
