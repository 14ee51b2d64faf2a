"""Bad input: one line that names the value and the remedy, exit code 2, before any work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import replayssm_quant
from replayssm_quant import eval as door
from replayssm_quant import models
from replayssm_quant import report as report_door
from replayssm_quant.evals import cli, runner


@pytest.fixture(autouse=True)
def _no_work(monkeypatch) -> None:
    """Nothing in this file may get as far as loading a model."""
    monkeypatch.setattr(models, "load", lambda *a: pytest.fail("a model was loaded"))
    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("the run was started"))


@pytest.mark.parametrize(
    "args, message",
    [
        ("--update-dtype fp9", "unknown state format 'fp9': did you mean 'fp8'"),
        ("--update-dtype fp8 --output-dtype fp16", "wider than the checkpoint"),
        ("--update-dtype P4+8 --output-dtype nvfp4", "already holds its output copy"),
        ("--update-dtype fp8 --buffer-len 0", "buffer_len 0 is out of range"),
        ("--update-dtype fp8 --buffer-len 65", "buffer_len 65 is out of range"),
        ("--update-dtype fp8 --block-size 24", "scale block 24 is not supported; use 16 or 32"),
        ("--update-dtype nvfp4 --block-size 16", "fixes its own scale"),
        ("--update-dtype fp8 --rounding up", "unknown rounding 'up'"),
        ("--output-dtype nvfp4", "--output-dtype needs --update-dtype"),
        ("--rotate", "--rotate needs --update-dtype"),
        ("--recipe nope", "unknown recipe 'nope'"),
        ("--recipe mamba2 --update-dtype fp8", "--recipe and --update-dtype both set the state"),
        ("--arms fp8:nvfp4:int4", "second output format"),
        ("--tasks cuont", "unknown task 'cuont': did you mean 'count'"),
        ("--suite defalt", "did you mean 'default'"),
        ("--model tiny-qwen", "unknown model 'tiny-qwen': did you mean"),
        ("--model ./nowhere", "unknown model './nowhere'"),
        ("--model tiny-qwen3.5,tiny-qwen3.5", "named twice"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--backend vllm --vllm-python /no/python", "interpreter '/no/python' does not run"),
        ("--backend jax", "unknown backend 'jax'; use hf or vllm"),
        ("--path guess", "unknown path 'guess'"),
        ("--seeds a,b", "seeds 'a,b'"),
        ("--seeds 1,1", "must be different"),
        ("--seeds -1", "from 0 up"),
        ("--limit 0", "limit 0 is too small"),
        ("--batch-size 0", "batch size 0 is too small"),
        ("--prefill 0", "prefill 0 is too small"),
        ("--jobs 0", "jobs 0 is too small"),
        ("--margin 0", "margin 0.0 is out of range"),
        ("--data-dir /no/such/folder", "data folder /no/such/folder does not exist"),
    ],
)
def test_bad_input_is_one_line_and_two(args: str, message: str, capsys) -> None:
    assert door.main(args.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "raised, code, text",
    [
        (RuntimeError("a worker died"), 1, "error: a worker died\n"),
        (PermissionError(13, "Permission denied", "/out"), 2, "error: /out: Permission denied\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command picks up from here\n"),
    ],
)
def test_what_breaks_a_run_is_one_line(raised, code, text, capsys, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise raised

    monkeypatch.setattr(runner, "run", broken)
    assert door.main(["--out", "out"]) == code
    assert capsys.readouterr().err == text


def test_unknown_flags_are_argparses(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        door.main(["--updaet-dtype", "fp8"])
    assert caught.value.code == 2 and "--updaet-dtype" in capsys.readouterr().err


def _request(*args: str) -> runner.Request:
    return cli.request(door.parser().parse_args(list(args)), list(args))


def test_no_flags_mean_the_shipped_pair_and_the_story() -> None:
    plan = runner.plan(_request())
    assert [m.name for m in plan.request.models] == ["tiny-nemotron-h", "tiny-qwen3.5"]
    roles = [a.role for a in plan.arms["tiny-qwen3.5"]]
    assert roles == ["reference", "floor", *["shared"] * 6, *["candidate"] * 4]
    assert len(plan.request.seeds) >= 3


def test_fp8_alone_is_the_published_pair() -> None:
    candidate = _request("--update-dtype", "fp8").candidate
    assert (candidate.update.name, candidate.output.name) == ("e4m3", "nvfp4")
    assert (candidate.buffer_len, candidate.rounding) == (16, "sr")


def test_flags_reach_the_candidate_and_the_extra_arms() -> None:
    request = _request(
        "--update-dtype", "int8", "--output-dtype", "nvfp4", "--buffer-len", "8", "--rounding",
        "rn", "--rotate", "--arms", "fp16:nvfp4,fp8@4", "--arms", "P4+8:sr",
    )  # fmt: skip
    assert request.candidate.to_dict() | {} == {
        "update_dtype": "int8", "output_dtype": "nvfp4", "buffer_len": 8, "rounding": "rn",
        "rotate": True, "random_bits": 8, "philox_rounds": 7, "seed": 0, "stagger": False,
    }  # fmt: skip
    assert [c.buffer_len for c in request.extra] == [8, 4, 8]
    assert [c.rounding for c in request.extra] == ["rn", "rn", "sr"]
    plan = runner.plan(request)
    assert [a.role for a in plan.arms["tiny-qwen3.5"]].count("candidate") == 4


def test_margin_is_in_points() -> None:
    plan = runner.plan(_request("--tasks", "count,text", "--margin", "2.5"))
    assert [t.margin for t in plan.tasks] == [0.025, 0.01]  # likelihood keeps its own


def test_models_of_ones_own_are_asked_for_text(tiny_mamba2) -> None:
    request = _request("--model", str(tiny_mamba2))
    assert request.suite.name == "general" and [t.task for t in request.tasks] == ["text"]
    assert _request("--model", str(tiny_mamba2), "--suite", "default").suite.name == "default"


def test_limit_caps_and_marks() -> None:
    plan = runner.plan(_request("--limit", "3"))
    assert set(plan.documents) == {3}
    assert max(runner.plan(_request()).documents) > 3


def test_planning_needs_no_torch() -> None:
    """Bad input must be refused at once, not after ten seconds of imports."""
    root = Path(replayssm_quant.__file__).resolve().parents[1]
    code = (
        "import sys; from replayssm_quant.eval import main; "
        "rc = main(['--update-dtype', 'fp9']); "
        "from replayssm_quant.evals import cli, runner; from replayssm_quant.eval import parser; "
        "runner.plan(cli.request(parser().parse_args([]), [])); "
        "sys.exit(10 * rc + ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True
    )
    assert done.returncode == 20, done.stderr.decode()


def test_a_folder_without_weights_is_refused(tmp_path, capsys) -> None:
    source = models.shipped()["tiny-qwen3.5"]
    shutil.copy(source / "config.json", tmp_path)
    assert door.main(["--model", str(tmp_path)]) == 2
    assert "no *.safetensors weights" in capsys.readouterr().err


def test_a_model_without_recurrent_layers_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert door.main(["--model", str(tmp_path)]) == 2
    assert "model type 'llama' has no Mamba-2 or Gated DeltaNet layer" in capsys.readouterr().err


def test_a_format_that_does_not_fit_the_model_is_refused(tmp_path, capsys) -> None:
    import json

    config = json.loads((models.shipped()["tiny-qwen3.5"] / "config.json").read_text())
    config["linear_key_head_dim"] = 24
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert door.main(["--model", str(tmp_path), "--update-dtype", "fp8"]) == 2
    assert "24 is not a multiple of the scale block 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "holds no result file"),
        ("{", "not valid JSON"),
        ('{"schema_version": "x"}', "schema 'x'"),
    ],
)
def test_report_refuses_what_is_no_result(tmp_path, capsys, text, message) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    assert report_door.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
