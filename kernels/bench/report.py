"""Result files -> RESULTS.md and one roofline plot an operation; computes no timings."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import verify
from .registry import LEAKY, OPS

Row = dict[str, Any]

HEADLINE_BATCH = 256
TARGETS: tuple[tuple[str, str, str, str, str, float], ...] = (
    # op, geometry, design, phase, column, least value; at batch HEADLINE_BATCH
    ("mamba2_decode", "super", "nvfp4+fp16-sr", "mix", "ratio_native_fp32", 6.5),
    ("mamba2_decode", "super", "nvfp4+fp16-sr", "mix", "ratio_upstream_replay_fp32", 3.8),
    ("mamba2_decode", "super", "P4+8-sr-rot", "mix", "ratio_native_fp32", 7.0),
    ("mamba2_decode", "super", "P4+8-sr-rot", "mix", "ratio_upstream_replay_fp32", 4.0),
    ("mamba2_decode", "super", "e4m3-sr", "readout", "copy_fraction", 0.90),
    ("mamba2_decode", "super", "nvfp4+fp16-sr", "readout", "copy_fraction", 0.80),
    ("mamba2_decode", "super", "P4+8-sr-rot", "readout", "copy_fraction", 0.80),
    ("mamba2_decode", "super", "nvfp4+fp16-sr", "flush", "copy_fraction", 0.75),
    ("gdn_decode", "qwen3.5-4b", "P8+4-sr-rot", "mix", "ratio_native_fp32", 3.5),
    ("gdn_decode", "qwen3.5-4b", "nvfp4+fp16-sr", "mix", "ratio_native_fp32", 4.5),
    ("gdn_decode", "qwen3.5-4b", "P8+4-sr-rot", "readout", "copy_fraction", 0.75),
)
COLUMNS = {
    "ratio_native_fp32": "x native fp32",
    "ratio_native_fp16": "x native 16-bit",
    "ratio_upstream_replay_fp32": "x upstream replay fp32",
    "copy_fraction": "share of copy bandwidth",
}
SMALL_BATCHES, SMALL_LEAST = (1, 8), 0.97
FOLD_MOST = 1.25
"""An exact fold of Gated DeltaNet costs at most this many times one with the leak."""


def current(folder: Path) -> dict[str, list[Row]]:
    """Rows of each (operation, GPU) in a folder, by the stem of its files without the date.

    Of a geometry and batch that several files have, the rows of the newest file (by the date in its
    name) count; they come first.
    """
    found: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.json"), reverse=True):  # a later date first
        stem = path.stem[: -len("-2000-01-01")]
        if any(path.stem.startswith(f"{op}-") for op in OPS):
            rows = found.setdefault(stem, [])
            known = {_point(row) for row in rows}
            new = json.loads(path.read_text(encoding="utf-8"))
            rows += [row for row in new if _point(row) not in known]
    return {stem: found[stem] for stem in sorted(found)}


def _point(row: Row) -> tuple[str, int]:
    return row["geometry"], row["batch"]


def _write(path: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)
    os.replace(name, path)
    return path


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    rule = "|".join("---" if i == 0 else "--:" for i in range(len(header)))
    lines = ["| " + " | ".join(header) + " |", f"|{rule}|"]
    return lines + ["| " + " | ".join(r) + " |" for r in rows] + [""]


def _find(rows: list[Row], **wanted: Any) -> Row | None:
    for row in rows:
        if all(row[k] == v for k, v in wanted.items()):
            return row
    return None


def _order(rows: list[Row], key: str) -> list[Any]:
    """Values of a column in the order in which they first appear."""
    return list(dict.fromkeys(row[key] for row in rows))


def _designs(rows: list[Row]) -> list[str]:
    """Designs with vLLM's kernels last, each group by its time in the mix."""
    mix = {r["design"]: r["time_us"] for r in rows if r["phase"] == "mix"}
    return sorted(_order(rows, "design"), key=lambda d: (d.startswith("vllm"), mix.get(d, 1e9)))


def _geometry_table(rows: list[Row]) -> list[str]:
    """Times and ratios of every design at one geometry and batch."""
    header = ["design", "readout, us", "GB/s", "share of copy", "flush, us", "share"]
    header += ["mix, us", "GB/s", "share"]
    header += ["x native fp32", "x native 16-bit", "x replay fp32"]
    out = []
    for design in _designs(rows):
        line = [design]
        for phase in ("readout", "flush", "mix"):
            row = _find(rows, design=design, phase=phase)
            line.append(_number(row and row["time_us"], "{:.1f}"))
            if phase != "flush":
                line.append(_number(row and row["gbps"], "{:,.0f}"))
            line.append(_number(row and row["copy_fraction"]))
        mix = _find(rows, design=design, phase="mix")
        for column in ("ratio_native_fp32", "ratio_native_fp16", "ratio_upstream_replay_fp32"):
            line.append(_number(mix and mix[column]))
        out.append(line)
    return _table(header, out)


def _batch_table(rows: list[Row], column: str) -> list[str]:
    """A ratio of the mix of every design by batch, at one geometry."""
    batches = sorted({r["batch"] for r in rows})
    out = []
    for design in _designs(rows):
        line = [design]
        for batch in batches:
            row = _find(rows, design=design, phase="mix", batch=batch)
            line.append(_number(row and row[column]))
        out.append(line)
    return _table(["design", *(str(b) for b in batches)], out)


def target_rows(rows: list[Row]) -> list[list[str]]:
    """Target, reached value, and whether it is met, for the targets that a file's rows cover."""
    out = []
    for op, geometry, design, phase, column, least in TARGETS:
        row = _find(
            rows, op=op, geometry=geometry, design=design, phase=phase, batch=HEADLINE_BATCH
        )
        if row is None or row[column] is None:
            continue
        what = f"{design}, {phase}: {COLUMNS[column]}"
        verdict = "yes" if row[column] >= least else "no"
        out.append([what, f"{least:.2f}", f"{row[column]:.2f}", verdict])
    for batch in SMALL_BATCHES:
        found = [
            r["ratio_native_fp32"]
            for r in rows
            if r["batch"] == batch
            and r["phase"] == "mix"
            and r["ratio_native_fp32"] is not None
            and not r["design"].startswith("vllm")
        ]
        if found:
            low = min(found)
            verdict = "yes" if low >= SMALL_LEAST else "no"
            out.append(
                [
                    f"slowest design and geometry at batch {batch}: x native fp32",
                    f"{SMALL_LEAST:.2f}",
                    f"{low:.2f}",
                    verdict,
                ]
            )
    return out


def fold_rows(rows: list[Row], all_rows: list[Row]) -> list[list[str]]:
    """What the exact fold costs, for the designs of a gdn_decode file whose leaky fold was timed in
    ``all_rows`` on the same GPU: the flush of every row over that of the same state under a fold
    without a solve."""
    out = []
    for row in rows:
        if (row["op"], row["geometry"]) != ("gdn_decode", OPS["gdn_decode"].default):
            continue
        if row["phase"] != "flush" or row["batch"] != HEADLINE_BATCH:
            continue
        same = {k: row[k] for k in ("design", "phase", "batch", "gpu")}
        leaky = _find(all_rows, op="mamba2_decode", geometry=LEAKY, **same)
        if leaky is None:
            continue
        ratio = row["time_us"] / leaky["time_us"]
        what = f"{row['design']}, flush: x a fold with the leak ({leaky['time_us']:.0f} us)"
        verdict = "yes" if ratio <= FOLD_MOST else "no"
        out.append([what, f"at most {FOLD_MOST:.2f}", f"{ratio:.2f}", verdict])
    return out


def section(rows: list[Row], plot: str | None, all_rows: list[Row] | None = None) -> list[str]:
    """Markdown lines of one result file; ``all_rows``: those of every file."""
    first = rows[0]
    op = OPS[first["op"]]
    lines = [f"## {op.name} on {first['gpu']}", ""]
    runs: dict[str, list[str]] = {}
    for row in rows:
        commit = str(row["commit"] or "unknown")[:12] + (" (modified)" if row["dirty"] else "")
        copied = "the tuner's passes, without a copy beside them"
        if row["copy_gbps"] is not None:
            copied = f"device-to-device copy {row['copy_gbps']:.0f} GB/s, bytes read and written"
        text = (
            f"{row['date']}, commit {commit}, torch {row['torch']}, triton {row['triton']}, "
            f"vLLM {row['vllm'] or '–'}; {copied}; L = {row['buffer_len']}"
        )
        points = runs.setdefault(text, [])
        point = f"{row['geometry']} at {row['batch']}"
        points += [] if point in points else [point]
    for text, points in runs.items():
        lines += [f"{text}." if len(runs) == 1 else f"{', '.join(points)}: {text}.", ""]
    targets = target_rows(rows) + fold_rows(rows, all_rows or rows)
    if targets:
        lines += _table([f"target, batch {HEADLINE_BATCH}", "at least", "reached", "met"], targets)
    if plot:
        lines += [f"![Roofline of {op.name}]({plot})", ""]
    for geometry in _order(rows, "geometry"):
        here = [r for r in rows if r["geometry"] == geometry]
        batches = _order(here, "batch")
        batch = HEADLINE_BATCH if HEADLINE_BATCH in batches else max(batches)
        g = op.geometry(geometry)
        lines += [
            f"### {geometry}: {g.heads} heads, {g.rows} x {g.n}, {g.groups} groups, batch {batch}",
            "",
        ]
        lines += _geometry_table([r for r in here if r["batch"] == batch])
        if len(batches) > 1:
            lines += ["Mix against native fp32, by batch:", ""]
            lines += _batch_table(here, "ratio_native_fp32")
    return lines


def roofline(rows: list[Row], path: Path) -> Path:
    """Plot state elements served a second over elements a byte, under the copy bandwidth.

    A design's place on the x axis is what its format and its ring leave of the bytes; its distance
    from the line is what the kernel leaves of the bandwidth.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = rows[0]
    op = OPS[first["op"]]
    geometry, batches = op.default, {r["batch"] for r in rows}
    if geometry not in {r["geometry"] for r in rows}:
        geometry = first["geometry"]
    batch = HEADLINE_BATCH if HEADLINE_BATCH in batches else max(batches)
    elements = op.geometry(geometry).elements * batch
    here = [r for r in rows if _point(r) == (geometry, batch)]
    fig, ax = plt.subplots(figsize=(8, 5.4))
    low, high = 0.08, 3.0
    copy = first["copy_gbps"]
    ax.plot([low, high], [low * copy, high * copy], color="black", lw=1)
    ax.text(0.3, 0.42 * copy, f"copy {copy / 1e3:.2f} TB/s", ha="right")
    marks = {"readout": "o", "flush": "v", "mix": "s"}
    designs = _designs(here)
    colors = plt.get_cmap("tab20")
    for i, design in enumerate(designs):
        points = [r for r in here if r["design"] == design]
        for r in points:
            nbytes = r["gbps"] * r["time_us"] * 1e3
            ax.scatter(
                elements / nbytes,
                elements / r["time_us"] * 1e-3,
                marker=marks[r["phase"]],
                color=colors(i % 20),
                s=34,
                zorder=3,
            )
        ax.scatter([], [], color=colors(i % 20), label=design)
    for phase, mark in marks.items():
        ax.scatter([], [], color="gray", marker=mark, label=phase)
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="state elements a byte moved (state and ring)",
        ylabel="state elements served, 10^9 a second",
        title=f"{op.name}, {geometry}, batch {batch}, {first['gpu']}",
    )
    ax.grid(True, which="both", lw=0.3, alpha=0.5)
    ax.legend(fontsize=7, ncols=2, loc="lower right")
    fig.tight_layout()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".svg")
    os.close(handle)
    with plt.rc_context({"svg.hashsalt": path.name}):  # the same file from the same rows
        fig.savefig(name, format="svg", metadata={"Date": None})
    plt.close(fig)
    os.chmod(name, 0o644)
    os.replace(name, path)
    return path


HEAD = """# Kernel benchmark

Generated by `python -m replayssm_quant.kernels.bench --report` from the JSON files in `results/`.

Every design is checked against a float64 reference before it is timed. Times are medians of CUDA-
graph replays that alternate between variants; the slots outgrow the L2 cache and rows are out of
step, their cursors advancing. *readout*: no row flushes. *flush*: every row does. *mix*: one row
in L flushes at each step, as served. Bytes are those of state and ring alone; inputs and outputs
move too and are not counted, so shares of the copy bandwidth err on the low side. Ratios compare
the same step of vLLM's kernels: native (`selective_state_update`,
`fused_recurrent_gated_delta_rule_packed_decode`) at the best launch configuration of a small
grid, and upstream ReplaySSM with an fp32 state in the same phase, tuned alike. `native 16-bit`
has an fp16 state for Mamba-2 and a bf16 state for Gated DeltaNet. `a+b` is a copy in `a` beside a
checkpoint in `b`; `P4+8` holds both in one integer; a single format is one shared, replayed
state. `qwen3.5-4b-leaky` is no model: Qwen3.5-4B's state under a fold without a solve, to price
the exact one.

"""


def write(folder: Path, target: Path | None = None) -> list[Path]:
    """RESULTS.md and plots beside the folder of result files (or in ``target``).

    Raises ValueError where there is no result file.
    """
    found = current(folder)
    if not found:
        raise ValueError(f"no result file in {folder}; run the benchmark on a GPU first")
    target = target or folder.parent
    lines, written = [], []
    all_rows = [row for rows in found.values() for row in rows]
    for stem, rows in found.items():
        svg = target / f"roofline-{stem}.svg"
        written.append(roofline(rows, svg))
        lines += section(rows, svg.name, all_rows)
    lines += verify.report(folder)
    return [_write(target / "RESULTS.md", HEAD + "\n".join(lines)), *written]
