"""What is published follows from the committed results, and from nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from replayssm_quant import recipe as recipes
from replayssm_quant.evals import matrix, report, report_publish
from replayssm_quant.evals.schema import ResultError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tiny_gdn, tmp_path):
    """A checkout's README and results, the latter of a small matrix."""
    folder = tmp_path / "evals" / "results"
    folder.mkdir(parents=True)
    argv = ["formats", "--model", str(tiny_gdn), "--out", str(tmp_path / "out"), "--device", "cpu"]
    argv += ["--arms", "P8+4:rot,P8+4:rot:rn,fp8:same,fp8:same@8,fp8:same:rn@1"]
    argv += ["--tasks", "count"]
    args = matrix.parser().parse_args([*argv, "--seeds", "1", "--limit", "2"])
    plan = matrix.make_plan(args, argv)
    plan.specs[0].settings["length"] = 64
    run = matrix.measure(plan, tmp_path / "out")
    run.environment.commit = "c" * 40
    (folder / "formats-x.json").write_text(report.compact(run))
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    return tmp_path


def test_texts_hold_the_numbers_of_the_results(root):
    made = report_publish.texts(root)
    run = report.load(root / "evals" / "results" / "formats-x.json")
    page = made[root / "evals" / "results" / "RESULTS.md"]
    arms = {a.name: a for a in run.arms}
    values = {arms[c.arm].label: report.nats(c.kld.mean) for c in run.comparisons}
    row = next(r for r in page.splitlines() if r.startswith("| P8+4 rot") and "e-" in r)
    cells = [c.strip() for c in row.split("|")[2:-1]]  # SR at 8, 16, 32, then RN
    dash = "–"
    expected = [dash, values["P8+4 SR rot"], dash, dash, values["P8+4 RN rot"], dash]
    assert cells == expected
    assert values["e4m3 SR shared L8"] in page and "| e4m3 RN shared L1 |" in page
    readme = made[root / "README.md"]
    assert readme.startswith("before\n") and readme.endswith("\nafter\n")
    assert values["P8+4 SR rot"] in readme and "pareto-tiny-gdn.svg" in readme
    assert "P8+4 RN rot" not in readme  # not one of the first screen's states
    svg = report_publish.figure_files(report.load_all(root / "evals" / "results"))
    assert "P8+4 RN rot" not in svg["pareto-tiny-gdn.svg"]
    assert "P8+4 SR rot" in svg["matrix-tiny-gdn.svg"] and "(matrix-tiny-gdn.svg)" in page


def test_evidence_belongs_to_exactly_the_measured_settings(root, monkeypatch):
    made = json.loads(report_publish.texts(root)[root / "recipes" / "evidence.json"])
    assert list(made) == [recipes.resolve("gdn").digest]
    (entry,) = made[recipes.resolve("qwen3.5").digest]
    assert entry["model"] == "tiny-gdn" and entry["result"] == "formats-x.json"
    assert entry["commit"] == "c" * 12 and "count " in entry["note"]
    monkeypatch.setattr(recipes, "committed_evidence", lambda: made)
    assert recipes.resolve("gdn").has_evidence("tiny-gdn")
    assert not recipes.resolve("gdn").has_evidence("another")
    assert not recipes.resolve("gdn/compact").has_evidence("tiny-gdn")
    assert recipes.resolve("mamba2/quality").has_evidence("tiny-gdn")  # the same settings


def test_the_same_measurement_elsewhere_is_set_beside_it(root):
    run = report.load(root / "evals" / "results" / "formats-x.json")
    other = run.model_copy(deep=True)
    assert report_publish.agreement({"a": run, "b": other}) == []  # the same hardware
    other.environment.hardware = "a GPU"
    for c in other.comparisons:
        c.kld.mean *= 1.5
        c.accuracy -= 0.01
    other.comparisons[1].kld_mean.value = 1e9
    n = len(run.comparisons) - 1
    (row,) = report_publish.agreement({"a": run, "b": other})
    assert row == ["a / b", "tiny-gdn", "count", str(n), f"{n - 1} of {n}", "1.00", "1.50"]
    assert "| a / b " in report_publish.results_md({"a": run, "b": other})


def test_results_of_other_suites_alone_are_refused(root):
    path = root / "evals" / "results" / "formats-x.json"
    path.write_text(path.read_text().replace("matrix-formats", "standard"))
    with pytest.raises(ResultError, match="no committed result of suite matrix-formats"):
        report_publish.texts(root)


def test_a_stale_text_fails_the_check(root, monkeypatch, capsys):
    monkeypatch.setattr(report_publish, "ROOT", root)
    monkeypatch.setattr(report_publish.texts, "__defaults__", (root,))
    (root / "recipes").mkdir()
    assert report_publish.main(["--check"]) == 1
    assert "RESULTS.md differs" in capsys.readouterr().out
    assert report_publish.main([]) == 0
    assert report_publish.main(["--check"]) == 0
    (root / "README.md").write_text("no marks")
    assert report_publish.main(["--check"]) == 2
    shutil.rmtree(root / "evals" / "results")
    (root / "evals" / "results").mkdir()
    assert report_publish.main([]) == 2


def test_the_committed_texts_are_what_the_results_make_of_them():
    assert report_publish.main(["--check"]) == 0
