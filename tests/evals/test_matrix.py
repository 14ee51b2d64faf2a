"""The format matrices: what is in them, the time limit, joining results."""

import time
from pathlib import Path

import pytest
import torch

from replayssm_quant.backends import hf
from replayssm_quant.evals import matrix, report
from replayssm_quant.evals.arms import parse_arm
from replayssm_quant.evals.measure import repeated_heads


def small(monkeypatch, kind, length=48):
    specs = tuple(
        s.model_copy(update={"settings": {"length": length}, "documents": 2})
        for s in matrix.TASKS[kind]
        if s.kind == "stream"
    )
    monkeypatch.setitem(matrix.TASKS, kind, specs)


def test_the_formats_are_crossed_with_rounding_and_length():
    arms = matrix.format_arms()
    formats = [*matrix.PUBLISHED, *matrix.STANDARD, *matrix.PLANAR]
    assert len(arms) == len(formats) * 2 * 3 + len(matrix.PER_STEP)
    have = {(a.config.update.name, a.config.rounding, a.config.buffer_len) for a in arms}
    assert {("P4+8", "rn", 8), ("fp16", "sr", 32), ("int8", "rn", 16)} <= have
    assert {a.role for a in arms if a.config.output is not None} == {"candidate"}
    assert {a.role for a in arms if a.config.is_shared} == {"shared"}


def test_layers_are_changed_one_at_a_time(tiny_gdn, monkeypatch, tmp_path):
    small(monkeypatch, "layers")
    out = tmp_path / "out"
    argv = ["layers", "--model", str(tiny_gdn), "--out", str(out), "--seeds", "1"]
    assert matrix.main([*argv, "--device", "cpu", "--tasks", "text"]) == 0
    run = report.load(out)
    assert [t.name for t in run.tasks] == ["text"] and run.suite == "matrix-layers"
    layered = [a for a in run.arms if a.layers is not None]
    assert len(layered) == len(matrix.LAYER)  # one recurrent layer
    assert {len(a.layers) for a in layered} == {1}
    worst = max(c.kld.mean for c in run.comparisons)
    assert worst > 100 * max(c.kld.mean for c in run.comparisons if c.role == "floor")


def test_what_is_finished_in_time_is_kept(tiny_mamba2, monkeypatch, tmp_path):
    small(monkeypatch, "formats")
    argv = ["formats", "--model", str(tiny_mamba2), "--out", str(tmp_path), "--tasks", "text"]
    args = matrix.parser().parse_args([*argv, "--seeds", "2", "--device", "cpu"])
    with pytest.raises(ValueError, match="before any arm was finished"):
        matrix.measure(matrix.make_plan(args, argv), tmp_path, time.time() - 1)
    real = time.time
    calls = []

    def clock():
        calls.append(1)
        return real() + (1e6 if len(calls) > 9 else 0)  # up in the midst of the fourth arm

    monkeypatch.setattr(matrix.time, "time", clock)
    run = matrix.measure(matrix.make_plan(args, argv), tmp_path, real() + 1e5)
    wanted = [a for a in matrix.format_arms() if a.config.update.name != "mxfp4"]  # d_state 16
    kept = [a.name for a in run.arms[2:]]
    assert 0 < len(kept) < 6 and kept == [a.name for a in wanted[: len(kept)]]
    assert {len(c.seeds) for c in run.comparisons if c.role != "floor"} == {2}


def test_an_arm_that_hangs_is_cut_off(tiny_mamba2, monkeypatch, tmp_path):
    small(monkeypatch, "formats")
    argv = ["formats", "--model", str(tiny_mamba2), "--out", str(tmp_path), "--tasks", "text"]
    args = matrix.parser().parse_args([*argv, "--seeds", "1", "--device", "cpu"])
    monkeypatch.setattr(matrix, "format_arms", lambda: matrix._arms(matrix.PLANAR))
    score, began = hf.score, time.time()

    def hang(*a, **k):
        done = len(list(tmp_path.rglob("P*.json"))) >= 2
        return time.sleep(60) if done else score(*a, **k)

    monkeypatch.setattr(hf, "score", hang)
    run = matrix.measure(matrix.make_plan(args, argv), tmp_path, began + 5)
    assert time.time() - began < 40 and len(run.arms[2:]) == 2


def test_results_are_joined(tiny_mamba2, tiny_gdn, monkeypatch, tmp_path):
    small(monkeypatch, "formats")
    pick = "P8+4:rot,fp8:same"
    for name, model in (("a", tiny_mamba2), ("b", tiny_gdn)):
        argv = ["formats", "--model", str(model), "--out", str(tmp_path / name)]
        argv += ["--tasks", "text", "--arms", pick, "--seeds", "1", "--device", "cpu"]
        assert matrix.main(argv) == 0
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert matrix.main(["merge", *both, "--out", str(tmp_path / "c")]) == 0
    run = report.load(tmp_path / "c")
    assert [m.name for m in run.models] == [tiny_mamba2.name, tiny_gdn.name]
    assert len(run.comparisons) == 2 * 3 and all(len(a.bytes) == 2 for a in run.arms)
    labels = [parse_arm(t).label for t in pick.split(",")]
    assert sorted(a.label for a in run.arms[2:]) == sorted(labels)
    assert run.verdict == report.worst_of(report.load(Path(p)).verdict for p in both)
    assert report.worst_of(["PASS", "NOT-LEARNED", "FAIL", "INCONCLUSIVE"]) == "FAIL"
    keep = ["merge", str(tmp_path / "c"), "--model", tiny_gdn.name, "--out", str(tmp_path / "d")]
    assert matrix.main(keep) == 0
    alone, before = report.load(tmp_path / "d"), report.load(tmp_path / "b")
    assert alone.comparisons == before.comparisons and alone.models == before.models
    assert [a.bytes for a in alone.arms] == [a.bytes for a in before.arms]
    keep[3] = "nobody"
    assert matrix.main(keep) == 2
    other = report.load(tmp_path / "b")
    other.environment.hardware = "another GPU"
    with pytest.raises(ValueError, match="differ in hardware"):
        matrix.merge([run, other])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["formats", "--tasks", "tokens"], "no task 'tokens'"),
        (["formats", "--seeds", "0"], "seeds 0"),
        (["merge"], "name the result files"),
        (["merge", "/no/such/result"], "does not exist"),
        (["long", "--model", "org/name"], "give a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, tmp_path, capsys):
    assert matrix.main([*argv, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1


def test_grouped_heads_are_repeated_for_fp32_only():
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, k, is_causal=True, enable_gqa=True)
    with repeated_heads():
        changed = torch.nn.functional.scaled_dot_product_attention
        got = changed(q, k, k, is_causal=True, enable_gqa=True)
        half = changed(q.half(), k.half(), k.half(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, expected)
    assert half.dtype == torch.float16
    assert torch.nn.functional.scaled_dot_product_attention is attend
