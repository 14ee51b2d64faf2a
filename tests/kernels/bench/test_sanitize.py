"""Verdicts about compute-sanitizer's output; the tool itself needs a GPU."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant.kernels.bench import sanitize  # noqa: E402

DONE = "mamba2_decode 64x128 fp32\nmamba2_decode 80x96 fp32\n"
CASE = ("mamba2_decode", "fp32")


@pytest.mark.parametrize(
    "text, code, reported, finished, clean",
    [
        (DONE + "========= ERROR SUMMARY: 0 errors\n", 0, 0, True, True),
        (DONE + "========= ERROR SUMMARY: 1 error\n", 9, 1, True, False),
        (
            DONE + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            0, 0, True, True,
        ),
        (
            DONE + "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n",
            9, 2, True, False,
        ),
        (DONE, 0, None, True, False),  # the tool never reported
        (DONE.splitlines()[0] + "\n========= ERROR SUMMARY: 0 errors\n", 1, 0, False, False),
        (DONE + "========= ERROR SUMMARY: 0 errors\n", 1, 0, False, False),  # the script failed
        (DONE + "========= ERROR SUMMARY: 0 errors\n", None, 0, False, False),  # it was stopped
        ("", None, None, False, False),
    ],
)  # fmt: skip
def test_only_a_whole_run_without_reports_is_clean(
    text: str, code: int | None, reported: int | None, finished: bool, clean: bool
) -> None:
    found = sanitize.verdict(text, code, *CASE)
    assert found == {"reported": reported, "finished": finished, "clean": clean}


def program(folder: Path, text: str) -> Path:
    """A stand-in for compute-sanitizer that prints ``text`` and its own arguments."""
    path = folder / "sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{text}\nprint(sys.argv[1:])\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_run_is_stopped_in_time_and_keeps_what_was_printed(tmp_path: Path) -> None:
    path = program(tmp_path, "print('begun', flush=True); time.sleep(60)")
    found, text = sanitize.check([str(path)], *CASE, seconds=1)
    assert text == "begun\n" and not found["finished"] and 1 <= found["seconds"] < 30


def test_rows_name_tool_operation_and_design(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = program(
        tmp_path,
        "a = sys.argv\n"
        "o, d = a[a.index('--op') + 1], a[a.index('--design') + 1]\n"
        "for shape in ('64x128', '80x96'): print(o, shape, d)\n"
        "n = int(a[a.index('--tool') + 1] == 'racecheck' and d == 'e4m3-sr')\n"
        "print(f'========= ERROR SUMMARY: {n} errors')\n"
        "if n: sys.exit(9)",
    )
    argv = ["--sanitizer", str(path), "--op", "mamba2_decode", "--design", "fp32,e4m3-sr"]
    argv += ["--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs")]
    assert sanitize.main(argv) == 1
    out, err = capsys.readouterr()
    (file,) = (tmp_path / "out").iterdir()
    rows = json.loads(file.read_text())
    assert out == f"3 of 4 runs clean: {file}\n" and "racecheck mamba2_decode e4m3-sr" in err
    assert file.name.startswith("sanitizer-h200-") and {r["gpu"] for r in rows} == {"NVIDIA H200"}
    assert [(r["tool"], r["design"], r["clean"]) for r in rows] == [
        ("memcheck", "fp32", True),
        ("memcheck", "e4m3-sr", True),
        ("racecheck", "fp32", True),
        ("racecheck", "e4m3-sr", False),
    ]
    kept = (tmp_path / "logs" / "memcheck-mamba2_decode-fp32.log").read_text()
    assert "'--error-exitcode', '9'" in kept and "smoke" in kept


@pytest.mark.parametrize(
    "argv, names",
    [
        (["--tool", "lint"], "unknown tool 'lint'; known: memcheck"),
        (["--op", "scan"], "unknown op 'scan'"),
        (["--design", "fp31"], "unknown design 'fp31'"),
        (["--workers", "0"], "--workers 0"),
        (["--sanitizer", "no-such-program"], "no program 'no-such-program'"),
        (["--sanitizer", sys.executable], "needs a CUDA GPU"),
    ],
)
def test_unusable_arguments_are_refused(argv: list[str], names: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        sanitize.main(argv)
    assert refused.value.code == 2 and names in capsys.readouterr().err
