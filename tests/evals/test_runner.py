"""The whole command on tiny random models: what is measured, written, resumed and refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from replayssm_quant import eval as door
from replayssm_quant.backends import hf
from replayssm_quant.evals import measure, report, runner
from replayssm_quant.evals.schema import RunRecord, read_record


def _run(*args: str | Path) -> int:
    return door.main([str(a) for a in (*args, "--quiet", "--device", "cpu")])


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "short.yaml"
    tasks = [
        {"task": "count", "documents": 3, "settings": {"length": 48}},
        {"task": "tally", "documents": 2, "settings": {"length": 96, "decode": 24}},
        {"task": "text", "documents": 2, "settings": {"length": 40}},
    ]
    text = {"schema": 1, "name": "short", "description": "short", "tasks": tasks}
    path.write_text(json.dumps(text))
    return path


@pytest.fixture(scope="module")
def finished(tiny_mamba2: Path, tiny_gdn: Path, suite: Path, tmp_path_factory) -> Path:
    """A run of both families with three rounding seeds."""
    out = tmp_path_factory.mktemp("finished")
    code = _run(
        "--model", f"{tiny_mamba2},{tiny_gdn}", "--suite", suite, "--update-dtype", "int8",
        "--output-dtype", "nvfp4", "--buffer-len", "8", "--out", out, "--batch-size", "2",
    )  # fmt: skip
    assert code == 0
    return out


def test_a_run_holds_reference_floor_shared_and_candidate(finished: Path) -> None:
    run = report.load(finished)
    assert [a.role for a in run.arms] == ["reference", "floor", "shared", "candidate"]
    assert [m.model_type for m in run.models] == ["nemotron_h", "qwen3_5_text"]
    candidate = run.arms[-1]
    assert candidate.config["update_dtype"] == "int8" and candidate.config["buffer_len"] == 8
    assert run.arms[2].config == candidate.config | {"output_dtype": "same", "buffer_len": 1}
    # 3 tasks, 2 models; the fp32 arms need one seed, the rounding ones three
    assert len(run.units) == 2 * 3 * (1 + 1 + 3 + 3)
    assert len(run.comparisons) == 2 * 3 * 3
    assert {c.verdict for c in run.comparisons if c.task != "text"} == {"NOT-LEARNED"}


def test_the_reference_reads_no_rounded_state_and_every_other_arm_does(finished: Path) -> None:
    for unit in report.load(finished).units:
        e = unit.exercise
        if unit.arm.startswith("fp32"):
            assert e.quantised_reads == 0
        else:
            assert e.quantised_reads > 0 and e.steps > 0
            if unit.task == "count":  # 47 steps a document after one token of prefill
                assert e.steps == 47 * 3
                per = 47 if "shared" in unit.arm else 47 // 8
                assert per <= e.writes_per_document <= per + 1
        # a text's first prediction comes from the prefill; no answer of the other tasks does
        assert e.decode_share == (38 / 39 if unit.task == "text" else 1.0)


def test_noise_floor_lies_far_below_the_candidate(finished: Path) -> None:
    run = report.load(finished)
    for model in run.models:
        for task in ("count", "text"):
            found = {c.role: c for c in run.comparisons if (c.model, c.task) == (model.name, task)}
            floor, candidate = found["floor"], found["candidate"]
            assert floor.kld.mean < 1e-9 < candidate.kld.mean
            assert candidate.kld_floor == pytest.approx(floor.kld.mean)  # stored in fp32
            assert candidate.kld_seed_sd is not None and len(candidate.seeds) == 3


def test_what_is_on_disk_says_what_was_printed(finished: Path, suite: Path, capsys) -> None:
    run = read_record(finished / "results.json", RunRecord)
    text = (finished / "report.md").read_text()
    assert text == report.markdown(run)
    for c in run.comparisons:
        assert c.model in text and c.task in text
    rows = [x for x in text.splitlines() if x.startswith("| int8 SR + nvfp4") and "x |" in x]
    assert len(rows) == 2 + 6  # a model's overview, then its tasks
    samples = sorted(finished.glob("units/tiny-mamba2/tally/*.jsonl"))
    lines = [json.loads(x) for x in samples[0].read_text().splitlines()]
    assert len(lines) == 2 and set(lines[0]) >= {"doc_hash", "prompt_hash", "output", "target"}
    for path in finished.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".md"):
            assert "hostname" not in path.read_text()


def test_environment_names_versions_and_no_machine(finished: Path) -> None:
    import socket

    e = report.load(finished).environment
    assert {"torch", "transformers"} <= set(e.packages) and e.hardware
    assert socket.gethostname() not in e.model_dump_json()


def test_resuming_measures_only_what_is_missing(
    finished: Path, tiny_mamba2: Path, tiny_gdn: Path, suite: Path, monkeypatch
) -> None:
    before = report.load(finished)
    gone = finished / "units/tiny-gdn/count/int8-sr_nvfp4_L8.s1.json"
    gone.unlink()
    calls = []
    real = measure.measure_streams

    def spy(loaded, docs, arm, *args):
        calls.append((loaded.resolved.name, docs.task, arm.role))
        return real(loaded, docs, arm, *args)

    monkeypatch.setattr(measure, "measure_streams", spy)
    monkeypatch.setattr(measure, "measure_prompts", lambda *a: pytest.fail("already measured"))
    code = _run(
        "--model", f"{tiny_mamba2},{tiny_gdn}", "--suite", suite, "--update-dtype", "int8",
        "--output-dtype", "nvfp4", "--buffer-len", "8", "--out", finished, "--batch-size", "2",
    )  # fmt: skip
    assert code == 0
    # the reference once more, for its logits, then the missing unit
    assert calls == [("tiny-gdn", "count", "reference"), ("tiny-gdn", "count", "candidate")]
    after = report.load(finished)
    assert [c.model_dump() for c in after.comparisons] == [
        c.model_dump() for c in before.comparisons
    ]


def test_changed_settings_are_measured_anew(
    finished: Path, tiny_mamba2: Path, suite: Path, tmp_path, monkeypatch
) -> None:
    calls = []
    real = measure.measure_streams

    def spy(loaded, docs, arm, *args):
        calls.append(arm.role)
        return real(loaded, docs, arm, *args)

    monkeypatch.setattr(measure, "measure_streams", spy)
    args = ["--model", tiny_mamba2, "--suite", suite, "--update-dtype", "int8", "--tasks", "text",
            "--seeds", "0", "--out", tmp_path]  # fmt: skip
    assert _run(*args) == 0 and len(calls) == 4
    assert _run(*args) == 0 and len(calls) == 4
    assert _run(*args, "--prefill", "2") == 0 and len(calls) == 8


def test_rounding_bits_follow_the_document_not_the_batch(
    finished: Path, tiny_mamba2: Path, suite: Path, tmp_path
) -> None:
    """Decoded answers under SR are the same whatever else is in the batch."""
    args = ["--model", tiny_mamba2, "--suite", suite, "--update-dtype", "int8", "--output-dtype",
            "nvfp4", "--buffer-len", "8", "--tasks", "tally", "--seeds", "0"]  # fmt: skip
    assert _run(*args, "--batch-size", "1", "--out", tmp_path) == 0
    name = "units/tiny-mamba2/tally/int8-sr_nvfp4_L8.s0.jsonl"
    assert (tmp_path / name).read_text() == (finished / name).read_text()


def test_seeds_change_the_numbers_and_repeat_them(finished: Path) -> None:
    run = report.load(finished)
    klds = [u.kld.mean for u in run.units if u.task == "count" and u.arm == "int8-sr_nvfp4_L8"]
    assert len(set(klds)) == 6  # two models, three seeds


def test_scan_and_decode_measure_the_same_thing(finished: Path, tiny_gdn, suite, tmp_path) -> None:
    args = ["--model", tiny_gdn, "--suite", suite, "--update-dtype", "int8", "--output-dtype",
            "nvfp4", "--buffer-len", "8", "--tasks", "count", "--batch-size", "2"]  # fmt: skip
    assert _run(*args, "--path", "decode", "--out", tmp_path) == 0
    by_decode, by_scan = report.load(tmp_path), report.load(finished)

    def pick(run: RunRecord):
        (one,) = [
            c
            for c in run.comparisons
            if (c.model, c.task, c.role) == ("tiny-gdn", "count", "candidate")
        ]
        return one

    a, b = pick(by_decode), pick(by_scan)
    assert a.exercise.path == "decode" and b.exercise.path == "scan"
    # the same draws at the same flushes; sums in another order flip a few codes
    assert a.kld.mean == pytest.approx(b.kld.mean, rel=0.2)
    assert a.exercise.flushes == b.exercise.flushes


def test_a_state_that_is_never_read_fails_loudly(tiny_mamba2, suite, capsys, monkeypatch) -> None:
    real = hf.score

    def silent(model, ids, config, **kwargs):
        logits = real(model, ids, config, **kwargs)
        for counts in kwargs["stats"].values():
            counts["quantised_reads"] = 0
        return logits

    monkeypatch.setattr(hf, "score", silent)
    args = ["--model", tiny_mamba2, "--suite", suite, "--tasks", "text", "--update-dtype", "fp8"]
    assert _run(*args, "--block-size", "16", "--output-dtype", "same") != 0
    error = capsys.readouterr().err
    assert "no quantised state was ever read" in error and error.count("\n") == 1


def test_prefilling_everything_is_refused(tiny_mamba2, suite, capsys) -> None:
    args = ["--model", tiny_mamba2, "--suite", suite, "--tasks", "count", "--update-dtype", "int8"]
    assert _run(*args, "--prefill", "48", "--output-dtype", "same") == 2
    assert "use a smaller --prefill" in capsys.readouterr().err


def test_non_finite_reference_logits_stop_the_run(tiny_mamba2, suite, capsys, monkeypatch) -> None:
    real = hf.score

    def broken(model, ids, config, **kwargs):
        logits = real(model, ids, config, **kwargs)
        logits[1, 5, 3] = float("nan")
        return logits

    monkeypatch.setattr(hf, "score", broken)
    args = ["--model", tiny_mamba2, "--suite", suite, "--tasks", "count", "--update-dtype", "int8"]
    assert _run(*args, "--output-dtype", "same") == 2
    error = capsys.readouterr().err
    assert "fp32 logits are not finite (document 1, position 5)" in error and "--dtype" in error


def test_an_arm_with_non_finite_logits_fails(tiny_mamba2, suite, tmp_path, monkeypatch) -> None:
    real = hf.score

    def broken(model, ids, config, **kwargs):
        logits = real(model, ids, config, **kwargs)
        if config is not None:
            logits[0, 9] = float("inf")
        return logits

    monkeypatch.setattr(hf, "score", broken)
    args = ["--model", tiny_mamba2, "--suite", suite, "--tasks", "text", "--update-dtype", "int8",
            "--output-dtype", "same", "--out", tmp_path, "--gate"]  # fmt: skip
    assert _run(*args) == 1
    run = report.load(tmp_path)
    candidate = run.comparisons[-1]
    assert candidate.verdict == "FAIL" and candidate.nonfinite_tokens > 0
    assert candidate.kld.mean == np.inf and "inf" in (tmp_path / "report.md").read_text()


def test_a_wrong_decode_path_is_refused(tiny_mamba2, suite, capsys, monkeypatch) -> None:
    def refuse(model, ids, **kwargs):
        raise ValueError("decoding token by token gives other logits than one forward")

    monkeypatch.setattr(hf, "check_decode", refuse)
    assert _run("--model", tiny_mamba2, "--suite", suite, "--update-dtype", "fp8") == 2
    assert "gives other logits" in capsys.readouterr().err


def test_gate_turns_verdicts_into_exit_codes(tiny_mamba2, suite, tmp_path) -> None:
    args = ["--model", tiny_mamba2, "--suite", suite, "--update-dtype", "fp16", "--output-dtype",
            "same", "--tasks", "count", "--seeds", "0", "--out", tmp_path]  # fmt: skip
    assert _run(*args) == 0
    assert report.load(tmp_path).verdict == "NOT-LEARNED" and _run(*args, "--gate") == 3


def test_json_output_is_the_record(tiny_mamba2, suite, capsys) -> None:
    args = ["--model", tiny_mamba2, "--suite", suite, "--tasks", "text", "--update-dtype", "fp32",
            "--output-dtype", "nvfp4", "--limit", "1", "--format", "json"]  # fmt: skip
    assert _run(*args) == 0
    run = RunRecord.model_validate(json.loads(capsys.readouterr().out))
    assert run.limited and run.comparisons[-1].documents == 1


def test_suites_can_limit_arms_and_documents(tiny_mamba2, tmp_path) -> None:
    path = tmp_path / "limits.yaml"
    tasks = [
        {"task": "count", "documents": 3, "settings": {"length": 32}, "per_step": 2},
        {"task": "text", "documents": 2, "settings": {"length": 24}, "arms": ["int8:same"]},
    ]
    arms = ["int8:same", "int8:same@1", "P8+4"]
    text = {"schema": 1, "name": "limits", "description": "x", "tasks": tasks, "arms": arms}
    path.write_text(json.dumps(text))
    out = tmp_path / "out"
    assert _run("--model", tiny_mamba2, "--suite", path, "--seeds", "0", "--out", out) == 0
    run = report.load(out)
    found = {(c.task, c.arm): c.documents for c in run.comparisons if c.role == "candidate"}
    assert found == {
        ("count", "int8-sr_shared_L16"): 3,
        ("count", "int8-sr_shared_L1"): 2,
        ("count", "P8-4-sr_L16"): 3,
        ("text", "int8-sr_shared_L16"): 2,
    }


def test_workers_give_what_one_process_gives(finished, tiny_mamba2, tiny_gdn, suite, tmp_path):
    """The command as users start it: a fresh interpreter, one worker a model."""
    import os
    import subprocess
    import sys

    root = Path(runner.__file__).resolve().parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_quant.eval", "--model", f"{tiny_mamba2},{tiny_gdn}",
         "--suite", str(suite), "--update-dtype", "int8", "--output-dtype", "nvfp4",
         "--buffer-len", "8", "--batch-size", "2", "--tasks", "text", "--jobs", "2", "--device",
         "cpu", "--out", str(tmp_path)],
        capture_output=True, text=True, env=env, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = {(c.model, c.arm): c for c in report.load(tmp_path).comparisons}
    for c in report.load(finished).comparisons:
        if c.task == "text":
            assert ours[c.model, c.arm].kld.mean == pytest.approx(c.kld.mean, rel=1e-6, abs=1e-12)
    assert "int8 SR + nvfp4" in done.stdout and "verdict" in done.stderr
