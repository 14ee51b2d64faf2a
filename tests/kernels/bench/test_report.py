"""RESULTS.md and plots from result files: what is met is said to be met, what is not is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replayssm_quant.kernels.bench import report, run
from replayssm_quant.kernels.bench.registry import LEAKY, OPS


def row(design: str, phase: str, time_us: float, **changes: object) -> dict:
    fields = {
        "op": "mamba2_decode",
        "geometry": "super",
        "batch": 256,
        "design": design,
        "phase": phase,
        "time_us": time_us,
        "gbps": 3000.0,
        "copy_fraction": 0.7,
        "ratio_native_fp32": round(560.0 / time_us, 4),
        "ratio_native_fp16": round(280.0 / time_us, 4),
        "ratio_upstream_replay_fp32": round(325.0 / time_us, 4),
        "native_16bit": "fp16",
        "buffer_len": 16,
        "copy_gbps": 4250.0,
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "vllm": "0.33.0",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-01",
    }
    return fields | changes


ROWS = [
    row("nvfp4+fp16-sr", "readout", 60.0, copy_fraction=0.81),
    row("nvfp4+fp16-sr", "flush", 500.0, copy_fraction=0.6),
    row("nvfp4+fp16-sr", "mix", 80.0),
    row("P4+8-sr-rot", "mix", 100.0),
    row("vllm-native-fp32", "mix", 560.0, ratio_upstream_replay_fp32=None),
]


def test_targets_are_judged_by_the_rows() -> None:
    found = {line[0]: line[1:] for line in report.target_rows(ROWS)}
    assert found["nvfp4+fp16-sr, mix: x native fp32"] == ["6.50", "7.00", "yes"]
    assert found["P4+8-sr-rot, mix: x native fp32"] == ["7.00", "5.60", "no"]
    assert found["nvfp4+fp16-sr, readout: share of copy bandwidth"] == ["0.80", "0.81", "yes"]
    assert found["nvfp4+fp16-sr, flush: share of copy bandwidth"] == ["0.75", "0.60", "no"]
    small = [row("fp16-sr", "mix", 600.0, batch=1), row("fp32", "mix", 500.0, batch=1)]
    line = report.target_rows(small)[-1]
    assert line[0].startswith("slowest design and geometry at batch 1") and line[2:] == [
        "0.93",
        "no",
    ]


def test_report_reads_the_newest_rows_of_each_point(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    old = [
        row("fp32", "mix", 999.0, commit="old"),
        row("fp32", "mix", 6.25, batch=8, commit="old", ratio_native_fp32=1.37),
    ]
    run.write_json(folder / "mamba2_decode-h200-2026-01-01.json", old)
    run.write_json(folder / "mamba2_decode-h200-2026-02-01.json", ROWS)
    gdn = [
        row(r["design"], r["phase"], r["time_us"], op="gdn_decode", geometry="qwen3.5-4b")
        for r in ROWS
    ]
    run.write_json(folder / "gdn_decode-h200-2026-01-15.json", gdn)
    (folder / "notes.json").write_text("{}")
    written = report.write(folder)
    text = (tmp_path / "RESULTS.md").read_text()
    assert [p.name for p in written] == [
        "RESULTS.md", "roofline-gdn_decode-h200.svg", "roofline-mamba2_decode-h200.svg",
    ]  # fmt: skip
    assert "999" not in text
    assert "super at 8: 2026-01-01, commit old, torch" in text
    assert "super at 256: 2026-01-01, commit 0123456789ab, torch" in text
    assert "| fp32 | 1.37 | – |" in text
    line = "| nvfp4+fp16-sr | 60.0 | 3,000 | 0.81 | 500.0 | 0.60 | 80.0 | 3,000 | 0.70 | 7.00 | "
    assert line + "3.50 | 4.06 |" in text
    assert "commit 0123456789ab, torch 2.11.0, triton 3.6.0, vLLM 0.33.0" in text
    for name in ("roofline-gdn_decode-h200.svg", "roofline-mamba2_decode-h200.svg"):
        assert name in text and (tmp_path / name).read_text().count("<path") > 10


def test_report_is_the_same_twice(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    run.write_json(folder / "mamba2_decode-h200-2026-02-01.json", ROWS)
    first = [p.read_bytes() for p in report.write(folder)]
    assert first == [p.read_bytes() for p in report.write(folder)]


def test_no_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result file"):
        report.write(tmp_path)


def test_result_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    run.write_json(path, ROWS)
    assert json.loads(path.read_text()) == ROWS
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_committed_results_hold_what_a_row_must() -> None:
    """Every committed file is a list of rows of one operation with known names."""
    needed = {
        "op", "geometry", "batch", "design", "phase", "time_us", "gbps", "copy_fraction",
        "ratio_native_fp32", "ratio_native_fp16", "ratio_upstream_replay_fp32", "gpu", "commit",
        "torch", "triton", "date",
    }  # fmt: skip
    for path in sorted(run.RESULTS.glob("*_decode-*.json")) if run.RESULTS.is_dir() else ():
        for r in json.loads(path.read_text()):
            assert needed <= set(r), path.name
            assert path.name.startswith(f"{r['op']}-{run.gpu_slug(r['gpu'])}-")
            assert r["geometry"] in OPS[r["op"]].geometries
            assert r["time_us"] > 0
            if r["copy_gbps"] is None:  # the tuner's passes, with no copy beside them
                assert r["copy_fraction"] is None and r["gbps"] > 0
            else:
                assert 0 < r["copy_fraction"] < 1.6


def test_gpu_names_become_file_names() -> None:
    assert run.gpu_slug("NVIDIA H200") == "h200"
    assert run.gpu_slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_the_exact_fold_is_priced_against_a_leaky_one() -> None:
    design = "P8+4-sr-rot"
    exact = row(design, "flush", 600.0, op="gdn_decode", geometry="qwen3.5-4b")
    leaky = row(design, "flush", 500.0, geometry=LEAKY)
    wrong = [
        row(design, "flush", 1.0, geometry=LEAKY, batch=8),
        row(design, "mix", 1.0, geometry=LEAKY),
        row(design, "flush", 1.0, geometry="super"),
        row(design, "flush", 1.0, geometry=LEAKY, gpu="another"),
    ]
    assert report.fold_rows([exact], wrong) == []
    line = report.fold_rows([exact], [*wrong, leaky])
    assert line == [
        [f"{design}, flush: x a fold with the leak (500 us)", "at most 1.25", "1.20", "yes"]
    ]
    slow = {**exact, "time_us": 700.0}
    assert report.fold_rows([slow], [leaky])[0][2:] == ["1.40", "no"]
