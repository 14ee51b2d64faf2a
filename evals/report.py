"""Result records as tables. Computes no statistics: every number comes from the record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from .schema import (
    SCHEMA,
    ArmRecord,
    Comparison,
    IntervalRecord,
    ModelRecord,
    ResultError,
    RunRecord,
    TaskRecord,
    read_record,
)

RESULTS = "results.json"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def load(path: Path) -> RunRecord:
    """The record of a result file, or of a folder that --out wrote. Raises ResultError."""
    if path.is_dir():
        path = path / RESULTS
    if not path.is_file():
        raise ResultError(
            f"{path} does not exist; give a result file, or a folder that --out wrote"
        )
    return read_record(path, RunRecord)


def load_all(folder: Path) -> dict[str, RunRecord]:
    """Every result file of a folder of committed results, by file name, newest run first. JSON
    files of other kinds are passed over."""
    found = {p.name: load(p) for p in sorted(folder.glob("*.json")) if _is_result(p)}
    if not found:
        raise ResultError(f"{folder} holds no result file; give a folder that --out wrote")
    return dict(sorted(found.items(), key=lambda kv: kv[1].created, reverse=True))


def _is_result(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    version = data.get("schema_version") if isinstance(data, dict) else None
    return isinstance(version, str) and version.startswith(SCHEMA.partition("/")[0])


def compact(run: RunRecord) -> str:
    """The record without its units, an entry a line: small enough to commit, and still a record."""
    data = json.loads(run.model_copy(update={"units": []}).model_dump_json(exclude_none=True))
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(json.dumps(v, separators=(",", ":")) for v in value)
            parts.append(f"{json.dumps(key)}:[\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(key)}:{json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def replace_part(text: str, part: str, name: str) -> str:
    """``text`` with what stands between its result marks replaced. Raises ResultError."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ResultError(f"{name} lacks the lines {BEGIN} and {END}; put them where tables belong")
    return f"{before}{begin}\n{part.strip()}\n{end}{after}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; the first column is left-aligned, the others right-aligned, all padded."""
    cells = [[c.replace("|", "\\|") for c in row] for row in (head, *rows)]
    width = [max(3, *(len(r[i]) for r in cells)) for i in range(len(head))]  # GitHub: three dashes
    rule = [":" + "-" * (width[0] - 1)] + ["-" * (w - 1) + ":" for w in width[1:]]

    def line(row: Sequence[str]) -> str:
        rest = (c.rjust(w) for c, w in zip(row[1:], width[1:], strict=True))
        return "| " + " | ".join([row[0].ljust(width[0]), *rest]) + " |"

    return "\n".join([line(cells[0]), "| " + " | ".join(rule) + " |", *map(line, cells[1:])])


def size(n: float) -> str:
    """Bytes in decimal units with three significant digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f} B"


def nats(x: float | None) -> str:
    """A divergence: plain between 0.001 and 1000, else with an exponent."""
    if x is None:
        return "–"
    if not math.isfinite(x):
        return "inf"
    if x == 0:
        return "0"
    return f"{x:.2e}" if x < 1e-3 else f"{x:.3g}"


def percent(x: float | None, digits: int = 1) -> str:
    return "–" if x is None else f"{100 * x:.{digits}f}"


def _delta(c: Comparison, likelihood: bool) -> str:
    d, scale, digits = c.delta, (1.0 if likelihood else 100.0), (4 if likelihood else 1)
    if not all(map(math.isfinite, (d.value, d.low, d.high))):
        return "not finite" if not math.isfinite(d.value) else f"{scale * d.value:+.{digits}f}"
    low, high = f"{scale * d.low:+.{digits}f}", f"{scale * d.high:+.{digits}f}"
    return f"{scale * d.value:+.{digits}f} [{low}, {high}]"


def _interval(x: IntervalRecord | None, digits: int = 1) -> str:
    if x is None:
        return "–"
    return f"{100 * x.value:.{digits}f} [{100 * x.low:.{digits}f}, {100 * x.high:.{digits}f}]"


def within_noise(c: Comparison) -> bool:
    """True if the divergence is no larger than fp32's own when measured again."""
    return c.kld is not None and c.kld_floor is not None and c.kld.mean <= c.kld_floor


def _find(run: RunRecord, model: str, task: str) -> list[Comparison]:
    return [c for c in run.comparisons if (c.model, c.task) == (model, task)]


def _arm(run: RunRecord, name: str) -> ArmRecord:
    return next(a for a in run.arms if a.name == name)


def _verdict(c: Comparison) -> str:
    if c.role == "floor":
        return "noise floor"
    return f"{c.verdict}, within noise" if within_noise(c) else c.verdict


def task_table(run: RunRecord, model: ModelRecord, task: TaskRecord) -> str:
    """One row an arm: state, bytes, divergence, accuracy fp32 -> arm, delta, verdict."""
    rows = []
    found = _find(run, model.name, task.name)
    likelihood = task.scored == "likelihood"
    stream, exact = task.kind == "stream", any(c.exact is not None for c in found)
    head = ["state", "bytes/request", "ratio"]
    head += ["KLD", "p99", "top-1 %"] if stream else []
    head += ["delta nats/token [95 %]"] if likelihood else ["fp32 -> it %", "delta points [95 %]"]
    head += ["exact %", "same until %"] if exact else []
    head += ["verdict"]
    for c in found:
        a = _arm(run, c.arm)
        stored = a.bytes[model.name]
        row = [a.label, size(stored.stored), f"{stored.ratio:.2f}x"]
        if stream:
            row += [nats(c.kld.mean if c.kld else None), nats(c.kld.p99 if c.kld else None)]
            row.append(percent(c.top1.value if c.top1 else None, 2))
        if likelihood:
            row.append(_delta(c, True))
        else:
            before, after = percent(c.reference_accuracy), percent(c.accuracy)
            row += [f"{before} -> {after}", _delta(c, False)]
        if exact:
            row += [
                f"{percent(c.reference_exact, 0)} -> {percent(c.exact, 0)}",
                percent(c.divergence, 0),
            ]
        rows.append([*row, _verdict(c)])
    return markdown_table(head, rows)


def _task_note(run: RunRecord, model: str, task: TaskRecord) -> str:
    first = next(iter(_find(run, model, task.name)), None)
    if first is None:
        return ""
    unit = "nats a token" if task.scored == "likelihood" else "points"
    scale = 1 if task.scored == "likelihood" else 100
    seeds = max(len(c.seeds) for c in _find(run, model, task.name))
    answers = "" if task.scored == "likelihood" else f", {first.answers} answers"
    how = {
        "stream": "teacher-forced, every token a state update",
        "generate": "free-running greedy decode",
        "lm_eval": "lm-evaluation-harness",
    }[task.kind]
    return (
        f"{task.description}; {how}; {first.documents} documents{answers}, {seeds} rounding "
        f"seed{'s' if seeds > 1 else ''}; margin {scale * task.margin:g} {unit}"
    )


def terminal(run: RunRecord) -> str:
    """What the command prints."""
    parts = []
    for model in run.models:
        for task in run.tasks:
            if not _find(run, model.name, task.name):
                continue
            parts.append(f"### {model.name}, {task.name}")
            parts.append(_task_note(run, model.name, task))
            parts.append(task_table(run, model, task))
    parts += notes(run)
    return "\n\n".join(p for p in parts if p)


def notes(run: RunRecord) -> list[str]:
    """Lines under the tables: how to read them, and what the candidates' verdicts rest on."""
    lines = []
    candidates = [c for c in run.comparisons if c.role == "candidate"]
    reasons = [
        f"- {c.verdict}: {c.model}, {c.task}, {_arm(run, c.arm).label}: {c.reason}"
        for c in candidates
        if c.verdict != "PASS"
    ]
    if reasons:
        lines.append("\n".join(reasons))
    ring = next((b.ring_dtype for a in run.arms for b in a.bytes.values()), "bf16")
    text = (
        "KLD: KL(fp32 || it) in nats at the scored tokens, mean over rounding seeds. `fp32 again`: "
        "another batch size, replayed. Intervals resample documents. bytes/request: checkpoint, "
        f"output copy, scales and the ring of cached inputs (in {ring}, as run here), all "
        "recurrent layers."
    )
    seeds = run.settings.get("seeds", [])
    if any(a.rounds for a in run.arms) and len(seeds) < 3:
        text += " Fewer than three rounding seeds: the spread between seeds is not known."
    if run.limited:
        text += " Limited to fewer documents than the suite has: not a result to quote."
    lines.append(text)
    return lines


def summary_line(run: RunRecord) -> str:
    """The verdict of the run in one line."""
    counts: dict[str, int] = {}
    for c in run.comparisons:
        if c.role == "candidate":
            counts[c.verdict] = counts.get(c.verdict, 0) + 1
    text = ", ".join(f"{n} {v}" for v, n in sorted(counts.items())) or "no candidate"
    return f"verdict {run.verdict} ({text}) after {run.seconds:.0f} s"


def summary(run: RunRecord) -> str:
    """One row an arm, all models side by side: the run's first task that has an accuracy."""
    task = next((t for t in run.tasks if t.scored == "accuracy"), None)
    if task is None:
        raise ResultError("this run has no task with an accuracy, so no summary; use --format md")
    head = ["state"]
    for model in run.models:
        head += [f"{model.name}: ratio", "KLD", f"{task.name} %, change [95 %]"]
    rows = []
    for a in run.arms:
        found = {c.model: c for c in run.comparisons if (c.task, c.arm) == (task.name, a.name)}
        if not found:
            continue
        row = [a.label]
        for model in run.models:
            c = found.get(model.name)
            if c is None:
                row += ["–", "–", "–"]
                continue
            mean = nats(c.kld.mean if c.kld else None)
            row += [f"{a.bytes[model.name].ratio:.2f}x", mean]
            row.append(f"{percent(c.accuracy)}, {_delta(c, False)}")
        rows.append(row)
    base = ", ".join(
        f"{m.name} {percent(c.reference_accuracy)} %"
        for m in run.models
        for c in _find(run, m.name, task.name)[:1]
    )
    e = run.environment
    commit = f"{e.commit[:12]}" if e.commit else "unknown"
    seeds = max(len(c.seeds) for c in run.comparisons)
    documents = max(c.documents for c in run.comparisons if c.task == task.name)
    return (
        f"{markdown_table(head, rows)}\n\n"
        f"Task {task.name} ({task.description}), fp32: {base}. ratio: bytes a request, fp32 / "
        "this, ring included. KLD: KL(fp32 || this) in nats at the answers. Changes in points, "
        f"95 % intervals over {documents} documents, up to {seeds} rounding seeds. Measured on "
        f"{e.hardware}, commit {commit}, {run.created[:10]}."
    )


def results_page(runs: dict[str, RunRecord]) -> str:
    """The page of committed results: for each file its summary and every table."""
    parts = []
    for name, run in runs.items():
        parts += [f"## {name}", summary(run)]
        text = markdown(run)
        body = text[text.index("\n") + 1 :].strip()
        parts.append(re.sub(r"^(##+ )", r"#\1", body, flags=re.MULTILINE))
    return "\n\n".join(parts)


def _position_table(run: RunRecord, model: str, task: TaskRecord) -> str:
    found = [c for c in _find(run, model, task.name) if c.buckets]
    if not found:
        return ""
    spans = [(b.low, b.high) for b in found[0].buckets]
    head = ["KLD by position", *(f"{low}–{high - 1}" for low, high in spans), "slope"]
    rows = []
    for c in found:
        by_span = {(b.low, b.high): b.kld for b in c.buckets}
        slope = "–" if c.kld_slope is None else f"{c.kld_slope:.2f}"
        rows.append([_arm(run, c.arm).label, *(nats(by_span.get(s)) for s in spans), slope])
    return markdown_table(head, rows)


def _evidence_table(run: RunRecord, model: str, task: TaskRecord) -> str:
    head = ["state", "right -> wrong", "wrong -> right", "p", "seed SD", "flushes/doc", "read", "%"]
    generates = task.kind != "stream"
    head += ["tokens fp32 -> it"] if generates else []
    rows = []
    for c in _find(run, model, task.name):
        sd = "–" if c.delta_seed_sd is None else f"{100 * c.delta_seed_sd:.2f}"
        e = c.exercise
        rows.append(
            [
                _arm(run, c.arm).label,
                str(c.flips_worse),
                str(c.flips_better),
                f"{c.p_value:.2g}",
                sd,
                f"{e.writes_per_document:.0f}",
                str(e.quantised_reads),
                percent(e.decode_share, 0),
            ]
        )
        if generates:
            rows[-1].append(f"{c.reference_tokens_generated} -> {c.tokens_generated}")
    return markdown_table(head, rows)


def markdown(run: RunRecord) -> str:
    """The full report: tables, divergence by position, flips and exercise, what it was run with."""
    e = run.environment
    packages = ", ".join(f"{k} {v}" for k, v in e.packages.items())
    commit = (
        f"commit {e.commit[:12]}{' (modified)' if e.dirty else ''}" if e.commit else "no commit"
    )
    parts = [
        "# State evaluation",
        f"{summary_line(run)}. Suite {run.suite}; toolkit {e.toolkit}, {commit}; {e.hardware}, "
        f"{e.threads} threads; Python {e.python}, {packages}; {run.created}.",
    ]
    for model in run.models:
        parts.append(
            f"## {model.name}\n\n{model.model_type}, {model.parameters / 1e6:.2f} M parameters in "
            f"{model.dtype}, {model.recurrent_layers} recurrent layers with "
            f"{model.state_elements} state elements a request; weights {model.weights}."
        )
        for task in run.tasks:
            if not _find(run, model.name, task.name):
                continue
            parts += [
                f"### {task.name}",
                _task_note(run, model.name, task) + ".",
                task_table(run, model, task),
                _position_table(run, model.name, task),
                _evidence_table(run, model.name, task),
            ]
    parts += ["## Reading the tables", *notes(run)]
    parts.append(
        "Flips are summed over rounding seeds. `seed SD`: of the accuracy between rounding seeds, "
        "in points. `flushes/doc`: roundings of a layer's checkpoint a document; `read`: decode "
        "steps that read a rounded state, over documents, layers and seeds; `%`: share of the "
        "scored tokens that came from decode steps. `same until`: share of the text before the "
        "first difference from fp32."
    )
    return "\n\n".join(p for p in parts if p) + "\n"
