"""Data that users bring: suites for their models on stand-in files, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from replayssm_quant import eval as door
from replayssm_quant.evals import data, data_ruler, report
from replayssm_quant.evals import suite as suites
from replayssm_quant.evals.suite import SuiteError, TaskSpec

pytest.importorskip("lm_eval")

from replayssm_quant.evals import lm_tasks  # noqa: E402


def _lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with the columns of every data set that the shipped suites read."""
    import pandas

    folder = tmp_path_factory.mktemp("data")
    for split, n in (("train", 7), ("test", 3)):
        rows = [{"question": f"{i}+{n}?", "answer": f"sum\n#### {i + n}"} for i in range(n)]
        _lines(folder / "gsm8k" / f"{split}.jsonl", rows)
    question = {"Correct Answer": "yes", "Incorrect Answer 1": "no", "Incorrect Answer 2": "so"}
    question["Incorrect Answer 3"] = "oh"
    frame = pandas.DataFrame([{"Question": f"q{i}", **question} for i in range(3)])
    frame.to_parquet(folder / "gpqa_diamond_cot_zeroshot.parquet")
    solved = {"solution": "so \\boxed{4}", "answer": "4", "subject": "Algebra", "level": 1}
    frame = pandas.DataFrame([{"problem": f"{i}+4-{i}?", **solved} for i in range(3)])
    (folder / "hendrycks_math500").mkdir()
    frame.to_parquet(folder / "hendrycks_math500" / "test-00000-of-00001.parquet")
    _lines(folder / "aime25.jsonl", [{"problem": f"p{i}", "answer": str(i)} for i in range(3)])
    route = {"reference_output": "<Route>\nA to B\n</Route>", "id": "x", "metadata": "{}"}
    _lines(
        folder / "longproc_path_traversal_2k.jsonl",
        [{"input_prompt": f"go {i}\n", **route} for i in range(3)],
    )
    table = {"reference_output": "a\tb\n1\t2", "id": "x"}
    table["metadata"] = json.dumps({"task_topic": "t", "tsv_header": "a\tb"})
    _lines(
        folder / "longproc_html_to_tsv_2k.jsonl",
        [{"input_prompt": f"page {i}\n", **table} for i in range(3)],
    )
    return folder


def _reduced(name: str, path: Path) -> Path:
    """A shipped suite with short answers and prompts, for a model of 1,024 tokens."""
    raw = yaml.safe_load(suites.shipped()[name].read_text())
    for task in raw["tasks"]:
        if "generation" in task:
            task["generation"]["max_gen_toks"] = 20
        if "repeats" in task:
            task["repeats"] = 3
        if "settings" in task:
            short = {"length": 64, "lengths": [640, 768]}
            task["settings"] = {k: short[k] for k in task["settings"] if k in short}
        if task["task"].startswith("longproc"):
            task["generation"] = {"max_gen_toks": 20}
    path.write_text(yaml.safe_dump(raw))
    return path


def _run(*args: str | Path) -> int:
    return door.main([str(a) for a in (*args, "--quiet", "--device", "cpu")])


@pytest.mark.slow
def test_the_full_suite_runs_on_stand_in_files(tiny_gdn: Path, files: Path, tmp_path: Path) -> None:
    suite = _reduced("full", tmp_path / "full.yaml")
    out, template = tmp_path / "out", tmp_path / "chat.jinja"
    template.write_text(CHAT)
    code = _run(
        "--model", tiny_gdn, "--suite", suite, "--data-dir", files, "--update-dtype", "int8",
        "--output-dtype", "nvfp4", "--limit", "2", "--batch-size", "4", "--out", out,
        "--chat-template", template,
    )  # fmt: skip
    assert code == 0
    run = report.load(out)
    asked = {t.name for t in suites.tasks_for(suites.load(str(suite)), False)}
    assert {t.name for t in run.tasks} == asked and len(asked) == 10
    for task in ("gpqa_diamond", "math500", "aime25"):
        mine = [u for u in run.units if u.task == task]
        assert len(mine) == 4 and all((u.documents, u.answers) == (2, 6) for u in mine)
        assert len({u.prompts for u in mine}) == 1
        assert all(u.tokens_generated > 6 for u in mine)
        found = next(t for t in run.tasks if t.name == task)
        assert found.settings["repeats"] == 3
        assert found.settings["generation"]["temperature"] == 0.6
        rows = (out / f"units/tiny-gdn/{task}/fp32.s0.jsonl").read_text().splitlines()
        sample = json.loads(rows[0])
        assert len(sample["flags"]) == 3 and len(set(sample["outputs"])) > 1  # sampled anew
    for c in (c for c in run.comparisons if c.task == "math500"):
        assert c.documents == 2 and c.answers == 6  # intervals resample questions, not answers
    for u in run.units:
        if not u.arm.startswith("fp32"):
            assert u.exercise.quantised_reads > 0
    assert run.models[0].chat_template
    generated = [c for c in run.comparisons if c.length is not None]
    assert {c.task for c in generated} == asked - {"text", "text-4k"}
    for c in generated:
        if c.role == "floor":  # the same random numbers in another batch size
            assert c.divergence == 1.0 and c.length_change.value == 0.0


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def test_chat_templates_change_the_prompts_of_tasks_that_ask_for_one(
    tiny_gdn: Path, files: Path, tmp_path: Path, capsys
) -> None:
    suite, template = tmp_path / "chat.yaml", tmp_path / "chat.jinja"
    tasks = [{"task": "aime25", "chat": True}, {"task": "hendrycks_math500"}]
    suite.write_text(
        yaml.safe_dump({"schema": 1, "name": "chat", "description": "", "tasks": tasks})
    )
    template.write_text(CHAT)
    runs = []
    for more in ((), ("--chat-template", template)):
        out = tmp_path / f"out{len(more)}"
        assert 0 == _run(
            "--model", tiny_gdn, "--suite", suite, "--data-dir", files, "--update-dtype", "int8",
            "--limit", "2", "--seeds", "0", "--max-gen-toks", "17", "--out", out, *more,
        )  # fmt: skip
        runs.append(report.load(out))
        said = capsys.readouterr().out
        assert ("has no chat template, so aime25 was asked" in said) == (not more)
        assert "not a result to quote" in said
        assert said.count("change of length % [95 %]") == 2
    prompts = [{(u.task, u.prompts) for u in r.units} for r in runs]
    assert {t for t, _ in prompts[0] & prompts[1]} == {"hendrycks_math500"}
    assert {t for t, _ in prompts[0] - prompts[1]} == {"aime25"}
    assert all(c.length <= 17 for r in runs for c in r.comparisons)
    assert [r.models[0].chat_template is None for r in runs] == [True, False]


@pytest.mark.parametrize(
    ("text", "task", "said"),
    [
        (None, "aime25", "cannot be read"),
        ("{% for m in messages %}", "aime25", "not valid Jinja"),
        ("hello", "aime25", "does not use 'messages'"),
        (CHAT, "gsm8k", "has no effect"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(
    text, task, said, tiny_gdn, files, tmp_path, capsys
) -> None:
    template = tmp_path / "t.jinja"
    if text is not None:
        template.write_text(text)
    args = ("--model", tiny_gdn, "--suite", "full", "--tasks", task, "--data-dir", files)
    assert _run(*args, "--chat-template", template) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.slow
def test_standard_and_smoke_run_on_a_users_model(tiny_gdn, files, tmp_path) -> None:
    for name, more in (("standard", {"gsm8k", "math500", "ruler_niah"}), ("smoke", {"ruler_niah"})):
        suite = _reduced(name, tmp_path / f"{name}.yaml")
        out = tmp_path / name
        code = _run(
            "--model", tiny_gdn, "--suite", suite, "--data-dir", files, "--update-dtype", "P4+4",
            "--limit", "2", "--seeds", "0", "--out", out,
        )  # fmt: skip
        assert code == 0
        assert {t.name for t in report.load(out).tasks} == {"text"} | more


@pytest.mark.parametrize(
    "name, rows, said",
    [
        ("gsm8k", [{"problem": "1", "answer": "2"}], "'question' is missing"),
        ("hendrycks_math500", [{"problem": "1", "answer": "2"}], "'solution' is missing"),
        ("aime24", [{"problem": "1", "answer": "2"}], "'Problem' is missing"),
        ("longproc_tom_tracking_2k", [{"input_prompt": "1"}], "'reference_output' is missing"),
    ],
)
def test_a_file_of_another_schema_is_refused_before_any_work(
    name, rows, said, tmp_path, capsys, monkeypatch
) -> None:
    from replayssm_quant import models

    monkeypatch.setattr(models, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    for split in ("train", "test"):
        _lines(tmp_path / name / f"{split}.jsonl", rows)
    assert _run("--tasks", name, "--data-dir", tmp_path, "--update-dtype", "fp8") == 2
    error = capsys.readouterr().err
    assert said in error and f"{name}/" in error and error.count("\n") == 1


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "{"), ("b.parquet", "no parquet"), ("c.json", "[]"),
                       ("d.jsonl", "3\n"), ("e.jsonl", "")):  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(data.DataError, match=r"unreadable \(.+\); give rows"):
            data.columns(tmp_path / name)


def test_every_data_set_of_the_suites_has_its_columns_written_down() -> None:
    readme = (suites.FOLDER / "README.md").read_text()
    for name in ("standard", "full"):
        for spec in suites.load(name).tasks:
            if spec.kind == "lm_eval" and spec.task not in data_ruler.NAMES:
                info = lm_tasks.task_info(spec.task)
                assert info.data in data.COLUMNS and info.output_type == "generate_until"
                row = next(x for x in readme.splitlines() if x.startswith(f"| `{spec.task}`"))
                assert info.data in row
                assert all(f"`{c}`" in row for c in data.COLUMNS[info.data])


def test_tasks_of_likelihoods_are_refused_with_the_reason(tmp_path, capsys) -> None:
    for name in ("hellaswag", "arc_easy", "piqa"):
        assert _run("--tasks", name, "--data-dir", tmp_path, "--update-dtype", "fp8") == 2
        error = capsys.readouterr().err
        assert "decodes nothing" in error and "stepwise: true" in error


def test_greedy_repeats_are_refused(tmp_path: Path, tiny_gdn: Path, files: Path, capsys) -> None:
    base = {"schema": 1, "name": "x", "description": "x"}
    path = tmp_path / "x.yaml"

    def write(**task) -> None:
        path.write_text(json.dumps(base | {"tasks": [{"task": "aime25", **task}]}))

    write(repeats=4)
    with pytest.raises(SuiteError, match="4 greedy answers are one answer 4 times"):
        suites.load(str(path))
    write(repeats=4, generation={"temperature": 0})
    with pytest.raises(SuiteError, match="set generation.temperature"):
        suites.load(str(path))
    # the model's own file samples nothing, and the suite names no temperature
    write(repeats=4, generation={"card": True})
    args = ["--model", tiny_gdn, "--suite", path, "--data-dir", files, "--update-dtype", "fp8"]
    assert _run(*args) == 2
    assert "generation_config.json samples nothing" in capsys.readouterr().err
    write(generation={"max_gen_toks": 4096})
    assert _run(*args) == 2
    assert "holds 1024; lower" in capsys.readouterr().err


def test_the_models_own_sampling_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert lm_tasks.card_sampling(str(tmp_path)) == {}
    path.write_text(json.dumps({"temperature": 0.3}))
    assert lm_tasks.card_sampling(str(tmp_path)) == {}
    path.write_text(json.dumps({"do_sample": True, "top_p": 0.9, "top_k": 20, "eos_token_id": 1}))
    assert lm_tasks.card_sampling(str(tmp_path)) == {"temperature": 1.0, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize(
    "task, said",
    [
        ({"task": "count", "repeats": 2}, "repeats is for lm-eval tasks"),
        ({"task": "count", "generation": {"temperature": 1.0}}, "generation is for lm-eval"),
        ({"task": "gsm8k", "settings": {"length": 3}}, "lm-eval tasks take none"),
        ({"task": "gsm8k", "generation": {"temprature": 1.0}}, "did you mean 'temperature'"),
        ({"task": "ruler_vt", "settings": {"length": 4096}}, "known: lengths"),
        ({"task": "ruler_vt", "settings": {"lengths": [64]}}, "not 128 tokens or more"),
        ({"task": "ruler_vt", "settings": {"lengths": 512}}, "no list of tokens"),
        ({"task": "gsm8k", "path": "decode"}, "not teacher-forced"),
    ],
)
def test_bad_entries_of_a_suite_say_what_is_wrong(task, said, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps({"schema": 1, "name": "x", "description": "x", "tasks": [task]}))
    with pytest.raises(SuiteError, match=said):
        suites.load(str(path))


@pytest.mark.parametrize("name", data_ruler.NAMES)
def test_prompts_are_as_long_as_asked_and_hold_their_answers(name: str) -> None:
    def words(text: str) -> int:
        return len(text.split())

    rows = data_ruler.documents(name, 6, [256, 1024], words)
    assert [r["length"] for r in rows] == [256] * 6 + [1024] * 6
    for row in rows:
        assert row["length"] - 60 < words(row["input"]) < row["length"]
        right = " and ".join(row["answers"])
        assert data_ruler.score(row, [f" {right}."]) == {"exact_match": 1.0}
        assert data_ruler.score(row, [right[:-3]]) == {"exact_match": 0.0}
        for answer in row["answers"]:
            assert answer in row["input"]
    assert len({r["input"] for r in rows}) == 12
    assert rows == data_ruler.documents(name, 6, [256, 1024], words)
    with pytest.raises(ValueError, match="do not hold its facts"):
        data_ruler.documents(name, 1, [64], words)


def test_variables_follow_from_the_text() -> None:
    """The answer of ``ruler_vt`` is what running its assignments gives."""
    for row in data_ruler.documents("ruler_vt", 5, [400], lambda t: len(t.split())):
        values: dict[str, str] = {}
        for line in row["input"].replace(". ", ".\n").splitlines():
            if line.startswith("Let "):
                name, source = line.removeprefix("Let ").rstrip(".").split(" = ")
                values[name] = values.get(source, source)
        asked = row["input"].rsplit("value ", 1)[1].split()[0]
        assert {n for n, v in values.items() if v == asked} == set(row["answers"])


def test_suites_pick_their_tasks_by_the_model() -> None:
    smoke = suites.load("smoke")
    assert [t.task for t in suites.tasks_for(smoke, True)] == ["count", "tally", "text"]
    assert [t.task for t in suites.tasks_for(smoke, False)] == ["text", "ruler_niah"]
    only = smoke.model_copy(update={"tasks": (TaskSpec(task="count", models="shipped"),)})
    with pytest.raises(SuiteError, match="no task for other models"):
        suites.tasks_for(only, False)
