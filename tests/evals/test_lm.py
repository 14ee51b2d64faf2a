"""lm-eval tasks on local stand-in files, and lm-eval's own command with our model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm_quant import eval as door
from replayssm_quant import models
from replayssm_quant.backends import hf
from replayssm_quant.config import StateConfig
from replayssm_quant.evals import report

pytest.importorskip("lm_eval")

from replayssm_quant.evals import lm, lm_tasks  # noqa: E402
from replayssm_quant.evals.suite import SuiteError, TaskSpec  # noqa: E402


def _lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the shape of openai/gsm8k, Idavidrein/gpqa and allenai/ai2_arc."""
    import pandas

    folder = tmp_path_factory.mktemp("data")
    for split, n in (("train", 7), ("test", 3)):
        rows = [{"question": f"{i}+{n}?", "answer": f"sum\n#### {i + n}"} for i in range(n)]
        _lines(folder / "gsm8k" / f"{split}.jsonl", rows)
    question = {"Correct Answer": "yes", "Incorrect Answer 1": "no", "Incorrect Answer 2": "so"}
    question["Incorrect Answer 3"] = "oh"
    frame = pandas.DataFrame([{"Question": f"q{i}", **question} for i in range(2)])
    frame.to_parquet(folder / "gpqa_diamond_cot_zeroshot.parquet")
    choices = {"text": ["aa", "b", "ccc"], "label": ["A", "B", "C"]}
    _lines(
        folder / "arc_easy.jsonl",
        [{"question": f"which {i}", "choices": choices, "answerKey": "ABC"[i]} for i in range(3)],
    )
    return folder


@pytest.fixture(scope="module")
def finished(tiny_gdn: Path, data: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lm")
    suite = out / "three.yaml"
    tasks = [{"task": "gsm8k"}, {"task": "gpqa_diamond_cot_zeroshot"}]
    tasks.append({"task": "arc_easy", "stepwise": True})
    suite.write_text(
        json.dumps({"schema": 1, "name": "three", "description": "three", "tasks": tasks})
    )
    code = door.main(
        ["--model", str(tiny_gdn), "--suite", str(suite), "--data-dir", str(data),
         "--update-dtype", "int8", "--output-dtype", "nvfp4", "--seeds", "0", "--limit", "2",
         "--quiet", "--device", "cpu", "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    return out


def test_tasks_run_with_paired_prompts(finished: Path) -> None:
    run = report.load(finished)
    tasks = {t.name: t for t in run.tasks}
    assert {t.kind for t in tasks.values()} == {"lm_eval"}
    for name in ("gsm8k", "gpqa_diamond_cot_zeroshot", "arc_easy"):
        units = [u for u in run.units if u.task == name]
        assert {u.arm for u in units} == {a.name for a in run.arms}
        assert len({u.prompts for u in units}) == 1
        assert all(u.documents == 2 for u in units)


def test_generation_and_likelihood_both_read_the_stored_state(finished: Path) -> None:
    run = report.load(finished)
    for u in run.units:
        if u.arm.startswith("fp32"):
            continue
        assert u.exercise.quantised_reads > 0, u.task
        if u.task == "arc_easy":  # every token but the first is a decode step
            assert u.exercise.path == "scan" and 0.8 < u.exercise.decode_share < 1.0
        else:
            assert u.exercise.path == "decode" and u.tokens_generated > 0


def test_prompts_are_lm_evals_own(finished: Path, data: Path) -> None:
    path = next(finished.glob("units/tiny-gdn/gsm8k/fp32.s0.jsonl"))
    rows = [json.loads(x) for x in path.read_text().splitlines()]
    assert [r["target"] for r in rows] == ["sum\n#### 3", "sum\n#### 4"]
    assert len({r["doc_hash"] for r in rows}) == 2 and all(r["output"] != "" for r in rows)


def test_stepwise_likelihoods_are_those_of_one_forward_in_fp32(tiny_gdn: Path) -> None:
    loaded = models.load(models.resolve(str(tiny_gdn)))
    model = lm.ReplayLM(
        loaded.model, tokenizer=loaded.tokenizer, update_dtype="fp32", path="decode"
    )
    ids = torch.randint(1, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 9:] = 0  # right padding
    plain = loaded.model(ids).logits
    torch.testing.assert_close(model._model_call(ids), plain, rtol=0, atol=2e-5)
    # 11 and 8 tokens after the first: the padded row has nine real ones
    assert (model.scored, model.decoded) == (12 + 9, 11 + 8)
    split = lm.ReplayLM(loaded.model, tokenizer=loaded.tokenizer, update_dtype="fp8")
    assert not torch.allclose(split._model_call(ids), plain, rtol=0, atol=2e-5)


def test_rounding_follows_the_tokens_of_a_request(tiny_gdn: Path) -> None:
    loaded = models.load(models.resolve(str(tiny_gdn)))
    model = lm.ReplayLM(loaded.model, tokenizer=loaded.tokenizer, update_dtype="int8")
    ids = torch.randint(1, 250, (3, 40), generator=torch.Generator().manual_seed(1))
    together = model._model_call(ids)
    for i in (2, 0, 1):
        torch.testing.assert_close(model._model_call(ids[i : i + 1])[0], together[i])


def test_responses_end_at_their_own_stop(tiny_gdn: Path) -> None:
    model = lm.ReplayLM(str(tiny_gdn), device="cpu")
    row = list(b"one two\nthree") + [258, 258]
    assert model._length(row, ["\n"]) == (8, True)
    assert model._length(row, ["x"]) == (13, True)  # padding: it ended
    assert model._length(row[:13], ["x"]) == (13, False)
    model.think_end_token = "two"
    assert model._length(list(b"\none two a\nb"), ["\n"]) == (11, True)
    stops = lm.Stops(model.tokenizer, ["\n", "##"], None, 2)
    ids = torch.tensor([list(b"p\nab#"), list(b"pqrst")])
    assert stops(ids, None).tolist() == [False, False]  # the prompt does not count
    ids = torch.cat([ids, torch.tensor([[ord("#")], [ord("u")]])], 1)
    assert stops(ids, None).tolist() == [True, False]
    thinking = lm.Stops(model.tokenizer, ["\n"], "</t>", 0)
    assert thinking(torch.tensor([list(b"a\n</t")]), None).tolist() == [False]
    assert thinking(torch.tensor([list(b"a\n</t>")]), None).tolist() == [False]
    assert thinking(torch.tensor([list(b"a\n</t>\n")]), None).tolist() == [True]


def test_sampled_answers_do_not_depend_on_the_batch(tiny_gdn: Path) -> None:
    from lm_eval.api.instance import Instance

    texts = ["first prompt", "a second, longer prompt", "third"]
    settings = {"until": [], "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 0}
    asked = [
        Instance("generate_until", {}, (t, settings | {"max_gen_toks": 24}), i)
        for i, t in enumerate(texts)
    ]

    def answers(size: int, **more) -> list[str]:
        model = lm.ReplayLM(str(tiny_gdn), device="cpu", batch_size=size, **more)
        model.quiet = True
        out = model.generate_until(asked)
        assert set(model.lengths) == set(texts)
        assert model.generated == sum(n for [(n, _)] in model.lengths.values())
        return out

    one = answers(1)
    assert one == answers(3) and len(set(one)) == 3
    assert one != answers(3, sampling_seed=1)
    assert one == answers(2, update_dtype="fp32", output_dtype="same")


def test_a_draw_follows_temperature_and_top_p(tiny_gdn: Path) -> None:
    model = lm.ReplayLM(str(tiny_gdn), device="cpu")
    asked = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 0}
    [draw] = model._sampling([f"{i}" for i in range(4000)], asked)["logits_processor"]
    logits = torch.tensor([0.0, 1.0, 1.5]).expand(4000, 3)
    share = torch.bincount(draw(None, logits).argmax(1), minlength=3) / 4000
    kept = torch.tensor([0.0, 1.0, 1.5]).div(0.5).softmax(0)
    kept[0] = 0  # outside of 90 %
    torch.testing.assert_close(share, kept / kept.sum(), atol=0.03, rtol=0)


def test_saved_model_info_holds_the_state_and_asks_no_hub(tiny_gdn: Path) -> None:
    loaded = models.load(models.resolve(str(tiny_gdn)))
    model = lm.ReplayLM(
        loaded.model, tokenizer=loaded.tokenizer, update_dtype="fp8", buffer_len=8, seed=5
    )
    info = model.get_model_info()
    assert info["state_config"] == StateConfig.from_flags("fp8", buffer_len=8, seed=5).to_dict()
    json.dumps(info)


def test_models_without_a_recurrent_state_are_refused(monkeypatch, tiny_gdn: Path) -> None:
    loaded = models.load(models.resolve(str(tiny_gdn)))

    def none(model):
        raise ValueError("has no recurrent layer")

    monkeypatch.setattr(hf, "recurrent_layers", none)
    with pytest.raises(ValueError, match="no recurrent layer"):
        lm.ReplayLM(loaded.model, tokenizer=loaded.tokenizer)
    with pytest.raises(ValueError, match="unknown model"):
        lm.ReplayLM("no-such-model")


def test_lm_evals_own_command_knows_the_model(tiny_gdn: Path, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "toy.yaml"
    task.parent.mkdir()
    _lines(tmp_path / "toy.jsonl", [{"q": f"{i}?", "a": "x"} for i in range(2)])
    task.write_text(
        f"task: toy\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'toy.jsonl'}}}}}\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {max_gen_toks: 24, until: ['\\n\\n']}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    root = Path(lm.__file__).resolve().parents[1]
    env = os.environ | {"PYTHONPATH": str(root.parent), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_quant.evals.lm", "run", "--model", "replayssm-hf",
         "--model_args", f"pretrained={tiny_gdn},update_dtype=fp8,buffer_len=4,max_length=512",
         "--tasks", "toy", "--include_path", str(task.parent), "--device", "cpu",
         "--batch_size", "2", "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, env=env, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "replayssm-hf" in done.stdout and "exact_match" in done.stdout
    (found,) = (tmp_path / "out").rglob("results_*.json")
    saved = json.loads(found.read_text())["config"]
    assert saved["state_config"]["update_dtype"] == "e4m3"
    counts = saved["state_counts"].values()
    assert all(c["quantised_reads"] > 0 for c in counts) and counts


@pytest.mark.parametrize(
    "name, message",
    [
        ("gsm8kk", "did you mean 'gsm8k'"),
        ("wikitext", "none of which is a share per question"),
        ("humaneval", "humaneval"),
    ],
)
def test_tasks_that_cannot_run_say_why(name: str, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        lm_tasks.task_info(name)


def test_the_network_is_not_touched_unasked(tmp_path: Path, capsys) -> None:
    assert door.main(["--tasks", "gsm8k", "--update-dtype", "fp8"]) == 2
    error = capsys.readouterr().err
    assert "task 'gsm8k' reads openai/gsm8k from the network; give --data-dir" in error
    assert door.main(["--tasks", "gsm8k", "--data-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "takes its questions from split 'test'" in error and "gsm8k/test.parquet" in error


def test_missing_examples_are_named(data: Path, tmp_path: Path) -> None:
    rows = (data / "gsm8k" / "test.jsonl").read_text()
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(rows)
    with pytest.raises(SuiteError, match="takes its examples from split 'train'"):
        lm_tasks.check_tasks([TaskSpec(task="gsm8k")], tmp_path, False)


def test_a_file_of_another_shape_is_one_line(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _lines(tmp_path / "gsm8k" / f"{split}.jsonl", [{"problem": "1+1", "solution": "2"}] * 6)
    with pytest.raises(SuiteError, match="columns: problem, solution; give files with the columns"):
        runner = lm_tasks.TaskRunner(TaskSpec(task="gsm8k"), tmp_path, 2)
        runner.check()


def test_questions_do_not_depend_on_the_process(
    tiny_gdn: Path, data: Path, finished: Path, tmp_path: Path, monkeypatch
) -> None:
    """GPQA's choices are shuffled by the global generator: it is seeded, and nothing is cached."""
    import random

    import datasets

    from replayssm_quant.evals.arms import reference_arms
    from replayssm_quant.evals.measure import Options

    loaded = models.load(models.resolve(str(tiny_gdn)))
    name = "gpqa_diamond_cot_zeroshot"
    rows = next(finished.glob(f"units/tiny-gdn/{name}/fp32.s0.jsonl")).read_text().splitlines()
    before = [json.loads(x)["prompt_hash"] for x in rows]
    for state in (1, 2):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / str(state))
        random.seed(state)
        runner = lm_tasks.TaskRunner(TaskSpec(task=name), data, 2)
        random.seed(state)
        unit = runner.measure(loaded, reference_arms(2)[0], 0, Options(), "key")
        assert [s["prompt_hash"] for s in unit.samples] == before


def test_data_digest_follows_the_files(data: Path, tmp_path: Path) -> None:
    before = lm_tasks.data_digest("arc_easy", data)
    text = (data / "arc_easy.jsonl").read_text()
    (tmp_path / "arc_easy.jsonl").write_text(text)
    assert lm_tasks.data_digest("arc_easy", tmp_path) == before
    (tmp_path / "arc_easy.jsonl").write_text(text.replace("which", "what"))
    assert lm_tasks.data_digest("arc_easy", tmp_path) != before
