"""Result records as tables. Computes no statistics: every number comes from the record."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .schema import (
    SCHEMA,
    ArmRecord,
    Comparison,
    IntervalRecord,
    ModelRecord,
    ResultError,
    RunRecord,
    TaskRecord,
    Verdict,
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


def finite_kld(x: float | None) -> bool:
    """True for a divergence that can be plotted."""
    return x is not None and math.isfinite(x)


def group_of(a: ArmRecord) -> str:
    """What kind of storage an arm is: fp32, per-step (rounded at every token), planar, published
    (checkpoint and copy) or shared (one state, replayed)."""
    if a.config is None or a.role in ("reference", "floor"):
        return "fp32"
    if a.config["buffer_len"] == 1:
        return "per-step"
    if a.config["output_dtype"] is None:
        return "planar"
    return "shared" if a.config["output_dtype"] == "same" else "published"


def percent(x: float | None, digits: int = 1) -> str:
    return "–" if x is None else f"{100 * x:.{digits}f}"


def delta_text(c: Comparison, likelihood: bool) -> str:
    """A change with its interval: points, or nats a token for likelihood."""
    d, scale, digits = c.delta, (1.0 if likelihood else 100.0), (4 if likelihood else 1)
    if not all(map(math.isfinite, (d.value, d.low, d.high))):
        return "not finite" if not math.isfinite(d.value) else f"{scale * d.value:+.{digits}f}"
    low, high = f"{scale * d.low:+.{digits}f}", f"{scale * d.high:+.{digits}f}"
    return f"{scale * d.value:+.{digits}f} [{low}, {high}]"


def _interval(x: IntervalRecord | None, digits: int = 1, signed: bool = False) -> str:
    if x is None:
        return "–"
    form = f"{'+' if signed else ''}.{digits}f"
    if not (math.isfinite(x.low) and math.isfinite(x.high)):  # one document
        return f"{100 * x.value:{form}}"
    return f"{100 * x.value:{form}} [{100 * x.low:{form}}, {100 * x.high:{form}}]"


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


@cache
def recipe_digests(model_type: str) -> dict[str, list[str]]:
    """Recipes of a model family whose layers are all alike: labels by the digest of their arm."""
    from .. import recipe as recipes
    from .arms import Arm

    family = None
    for path in recipes.shipped().values():
        found = recipes.read(path)
        match = found.match
        if model_type in (match.model_type or ()) and match.name is None:
            family = family or found
    out: dict[str, list[str]] = {}
    for resolved in [] if family is None else recipes.variants(family):
        if not resolved.settings.get("layers"):
            digest = Arm("", "candidate", resolved.config()).digest
            out.setdefault(digest, []).append(resolved.label)
    return out


def recipes_of(a: ArmRecord, model: ModelRecord) -> list[str]:
    """Labels of the shipped recipes that store the state as this arm does."""
    return [a.recipe] if a.recipe else recipe_digests(model.model_type).get(a.digest, [])


def without_evidence(run: RunRecord) -> list[str]:
    """A line for each recipe that a run used on a model without a committed result of it."""
    from .. import recipe as recipes

    lines = []
    for a in run.arms:
        for model in run.models if a.recipe else ():
            if model.name not in a.bytes:
                continue
            known = False
            for name in (a.recipe, run.settings.get("recipe")):  # a file's label is not its path
                with contextlib.suppress(ValueError):  # a file that is not here any more
                    found = recipes.resolve(name) if name and name != "auto" else None
                    same = found is not None and found.label == a.recipe
                    known = known or (same and found.has_evidence(model.name))
            if not known:
                lines.append(
                    f"- recipe {a.recipe} has no committed evidence on {model.name}: what is "
                    "measured here is all there is"
                )
    return lines


def gate_lines(run: RunRecord) -> list[str]:
    """A line for each gate of the run, those that did not pass first."""
    order = ("FAIL", "INCONCLUSIVE", "NOT-LEARNED", "PASS")
    return [
        f"- gate {g.verdict}: {g.model}, {g.task}, {label_of(_arm(run, g.arm))}: {g.reason}"
        for g in sorted(run.gates, key=lambda g: order.index(g.verdict))
    ]


def layer_cells(
    run: RunRecord, model: ModelRecord, task: TaskRecord
) -> dict[tuple[str, int], float]:
    """Mean divergence of states that one layer alone is in, by (label, layer)."""
    arms = {a.name: a for a in run.arms}
    cells = {}
    for c in _find(run, model.name, task.name):
        a = arms[c.arm]
        if a.layers is not None and len(a.layers) == 1 and c.kld is not None:
            cells[(a.label, int(next(iter(a.layers))))] = c.kld.mean
    return cells


def layer_table(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Table:
    """``layer_cells`` as a table, states by layers."""
    cells = layer_cells(run, model, task)
    layers = sorted({i for _, i in cells})
    rows = [
        [f, *(nats(cells.get((f, i))) for i in layers)] for f in dict.fromkeys(k[0] for k in cells)
    ]
    return ["state", *(f"layer {i}" for i in layers)], rows


def worst(found: Sequence[Comparison]) -> str:
    """One verdict for an arm's comparisons: an unlearned task says nothing beside a learned one."""
    verdicts = {c.verdict for c in found}
    for verdict in ("FAIL", "INCONCLUSIVE", "PASS", "NOT-LEARNED"):
        if verdict in verdicts:
            return verdict
    return "INCONCLUSIVE"


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for several runs: the worst."""
    order: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "NOT-LEARNED", "PASS")
    return min(verdicts, key=order.index)


def _overview_tasks(run: RunRecord, model: ModelRecord) -> tuple[str | None, str | None]:
    """The tasks whose divergence and whose accuracy the overview shows: of those that most arms
    have, the first; accuracy of a task that fp32 has learned, if there is one."""
    found = [c for c in run.comparisons if c.model == model.name]
    likelihood = {t.name for t in run.tasks if t.scored == "likelihood" or t.metric == "ended"}
    names = [t.name for t in run.tasks]

    def most(having: list[str]) -> str | None:
        return max(names, key=having.count) if having else None

    scored = [c for c in found if c.task not in likelihood]
    unlearned = {c.task for c in scored if c.verdict == "NOT-LEARNED"}
    return (
        most([c.task for c in found if c.kld is not None]),
        most([c.task for c in scored if c.task not in unlearned] or [c.task for c in scored]),
    )


def overview(run: RunRecord, model: ModelRecord) -> list[dict[str, Any]]:
    """A row an arm: bits and bytes, divergence on one task and accuracy on one, the same for all
    arms, tokens generated, the worst verdict of all tasks."""
    rows = []
    divergence, accuracy = _overview_tasks(run, model)
    for a in run.arms:
        found = [c for c in run.comparisons if (c.model, c.arm) == (model.name, a.name)]
        if not found or model.name not in a.bytes:
            continue
        size_of = a.bytes[model.name]
        kld = next((c for c in found if c.task == divergence), None)
        task = next((c for c in found if c.task == accuracy), None)
        rows.append(
            {
                "state": label_of(a),
                "group": group_of(a),
                "recipes": recipes_of(a, model),
                "bits": 8 * (size_of.stored - size_of.ring) / max(model.state_elements, 1),
                "bytes": size_of.stored,
                "ratio": size_of.ratio,
                "kld_task": kld.task if kld else None,
                "kld": kld.kld.mean if kld and kld.kld else None,
                "kld_p99": kld.kld.p99 if kld and kld.kld else None,
                "kld_floor": kld.kld_floor if kld else None,
                "top1": kld.top1.value if kld and kld.top1 else None,
                "accuracy_task": task.task if task else None,
                "accuracy_fp32": task.reference_accuracy if task else None,
                "accuracy": task.accuracy if task else None,
                "delta": task.delta.value if task else None,
                "delta_low": task.delta.low if task else None,
                "delta_high": task.delta.high if task else None,
                "flips_worse": task.flips_worse if task else None,
                "flips_better": task.flips_better if task else None,
                "tokens_fp32": sum(c.reference_tokens_generated for c in found),
                "tokens": sum(c.tokens_generated for c in found),
                "seeds": max(len(c.seeds) for c in found),
                "verdict": "noise floor" if a.role == "floor" else worst(found),
            }
        )
    return rows


OVERVIEW = (
    "state",
    "verdict",
    "bits",
    "state a request",
    "ratio",
    "KLD",
    "p99",
    "floor",
    "top-1 %",
    "fp32 -> it %",
    "points [95 %]",
    "flips",
    "tokens",
    "recipe",
)


def overview_cells(row: dict[str, Any]) -> list[str]:
    """The cells of ``OVERVIEW`` for a row of ``overview``."""
    accuracy = delta = flips = "–"
    if row["accuracy"] is not None:
        accuracy = f"{percent(row['accuracy_fp32'])} -> {percent(row['accuracy'])}"
        flips = f"{row['flips_worse']} / {row['flips_better']}"
        delta = "not finite"
        if all(map(math.isfinite, (row["delta"], row["delta_low"], row["delta_high"]))):
            low, high = 100 * row["delta_low"], 100 * row["delta_high"]
            delta = f"{100 * row['delta']:+.1f} [{low:+.1f}, {high:+.1f}]"
    tokens = "–"
    if row["tokens_fp32"] or row["tokens"]:
        tokens = f"{row['tokens_fp32']} -> {row['tokens']}"
    return [
        row["state"],
        row["verdict"],
        f"{row['bits']:.2f}",
        size(row["bytes"]),
        f"{row['ratio']:.2f}x",
        nats(row["kld"]),
        nats(row["kld_p99"]),
        nats(row["kld_floor"]),
        percent(row["top1"], 2),
        accuracy,
        delta,
        flips,
        tokens,
        ", ".join(row["recipes"]) or "–",
    ]


def overview_note(run: RunRecord, model: ModelRecord) -> str:
    """What the columns of the overview are measured on."""
    rows = overview(run, model)
    divergence = next((r["kld_task"] for r in rows if r["kld_task"]), None)
    accuracy = next((r["accuracy_task"] for r in rows if r["accuracy_task"]), None)
    parts = ["bits: of checkpoint, copy and scales an element; bytes and ratio with the ring"]
    if divergence:
        parts.append(f"KLD and top-1: task {divergence}")
    if accuracy:
        parts.append(f"accuracy and flips (right to wrong / wrong to right): task {accuracy}")
    parts.append("tokens: generated by free-running tasks, fp32 -> it")
    parts.append("verdict: the worst over all tasks")
    return "; ".join(parts) + "."


Table = tuple[list[str], list[list[str]]]


def label_of(a: ArmRecord) -> str:
    """The arm's name in tables; where a single layer is stored so, with that layer."""
    if a.layers is not None and len(a.layers) == 1:
        return f"layer {next(iter(a.layers))}: {a.label}"
    return a.label


def task_table(run: RunRecord, model: ModelRecord, task: TaskRecord) -> str:
    """The first of ``task_tables`` as Markdown."""
    return markdown_table(*_task_rows(run, model, task))


def _task_rows(run: RunRecord, model: ModelRecord, task: TaskRecord) -> Table:
    """One row an arm: state, bytes, divergence, accuracy fp32 -> arm, delta, verdict."""
    rows = []
    found = _find(run, model.name, task.name)
    likelihood = task.scored == "likelihood"
    stream, exact = task.kind == "stream", any(c.exact is not None for c in found)
    head = ["state", "bytes/request", "ratio"]
    head += ["KLD", "p99", "top-1 %"] if stream else []
    share = "ended, fp32 -> it %" if task.metric == "ended" else "fp32 -> it %"
    head += ["delta nats/token [95 %]"] if likelihood else [share, "delta points [95 %]"]
    head += ["exact %", "same until %"] if exact else []
    head += ["verdict"]
    for c in found:
        a = _arm(run, c.arm)
        stored = a.bytes[model.name]
        row = [label_of(a), size(stored.stored), f"{stored.ratio:.2f}x"]
        if stream:
            row += [nats(c.kld.mean if c.kld else None), nats(c.kld.p99 if c.kld else None)]
            row.append(percent(c.top1.value if c.top1 else None, 2))
        if likelihood:
            row.append(delta_text(c, True))
        else:
            before, after = percent(c.reference_accuracy), percent(c.accuracy)
            row += [f"{before} -> {after}", delta_text(c, False)]
        if exact:
            row += [
                f"{percent(c.reference_exact, 0)} -> {percent(c.exact, 0)}",
                percent(c.divergence, 0),
            ]
        rows.append([*row, _verdict(c)])
    return head, rows


def task_tables(run: RunRecord, model: ModelRecord, task: TaskRecord) -> list[Table]:
    """A task's tables: results, divergence by position (if it has positions), exercise."""
    if not _find(run, model.name, task.name):
        return []
    tables = [
        _task_rows(run, model, task),
        drift_rows(run, model.name, task),
        _position_rows(run, model.name, task),
    ]
    return [t for t in (*tables, _evidence_rows(run, model.name, task)) if t[1]]


def task_note(run: RunRecord, model: str, task: TaskRecord) -> str:
    first = next(iter(_find(run, model, task.name)), None)
    if first is None:
        return ""
    unit = "nats a token" if task.scored == "likelihood" else "points"
    scale = 1 if task.scored == "likelihood" else 100
    seeds = max(len(c.seeds) for c in _find(run, model, task.name))
    answers = "" if task.scored == "likelihood" else f", {first.answers} answers"
    repeats = task.settings.get("repeats", 1)
    how = {
        "stream": "teacher-forced, every token a state update",
        "generate": "free-running decode",
        "lm_eval": f"avg@{repeats}" if repeats > 1 else "one answer a question",
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
            parts.append(task_note(run, model.name, task))
            parts.append(task_table(run, model, task))
            drift = drift_rows(run, model.name, task)
            if drift[1] and (task.kind == "lm_eval" or task.metric == "ended"):
                parts.append(markdown_table(*drift))
    parts += notes(run)
    return "\n\n".join(p for p in parts if p)


def notes(run: RunRecord) -> list[str]:
    """Lines under the tables: how to read them, and what the candidates' verdicts rest on."""
    lines = []
    candidates = [c for c in run.comparisons if c.role == "candidate"]
    reasons = [
        f"- {c.verdict}: {c.model}, {c.task}, {label_of(_arm(run, c.arm))}: {c.reason}"
        for c in candidates
        if c.verdict != "PASS"
    ]
    if reasons:
        lines.append("\n".join(reasons))
    if run.gates:
        lines.append("\n".join(gate_lines(run)))
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
    named = dict.fromkeys(
        f"{a.recipe} ({a.recipe_digest})" for a in run.arms if a.recipe and a.recipe_digest
    )
    if named:
        text += f" Recipes, with the digest of their settings: {', '.join(named)}."
    plain = [m.name for m in run.models if m.chat_template is None]
    if plain and any(t.settings.get("chat") for t in run.tasks):
        asked = ", ".join(t.name for t in run.tasks if t.settings.get("chat"))
        lines.insert(
            0,
            f"- {', '.join(plain)} has no chat template, so {asked} was asked in plain text; give "
            "one with --chat-template",
        )
    missing = without_evidence(run)
    if missing:
        lines.insert(0, "\n".join(missing))
    if run.limited:
        text += (
            " Limited to fewer documents or shorter answers than the suite has: not a result to "
            "quote."
        )
    lines.append(text)
    return lines


def summary_line(run: RunRecord) -> str:
    """The verdict of the run in one line."""
    counts: dict[str, int] = {}
    for c in run.comparisons:
        if c.role == "candidate":
            counts[c.verdict] = counts.get(c.verdict, 0) + 1
    text = ", ".join(f"{n} {v}" for v, n in sorted(counts.items())) or "no candidate"
    if run.gates:
        words = sorted({g.verdict for g in run.gates})
        each = (f"{sum(g.verdict == w for g in run.gates)} {w}" for w in words)
        text += f"; gates {', '.join(each)}"
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
        row = [label_of(a)]
        for model in run.models:
            c = found.get(model.name)
            if c is None:
                row += ["–", "–", "–"]
                continue
            mean = nats(c.kld.mean if c.kld else None)
            row += [f"{a.bytes[model.name].ratio:.2f}x", mean]
            row.append(f"{percent(c.accuracy)}, {delta_text(c, False)}")
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
        parts.append(f"## {name}")
        if any(t.scored == "accuracy" for t in run.tasks):
            parts.append(summary(run))
        text = markdown(run)
        body = text[text.index("\n") + 1 :].strip()
        parts.append(re.sub(r"^(##+ )", r"#\1", body, flags=re.MULTILINE))
    return "\n\n".join(parts)


def _position_rows(run: RunRecord, model: str, task: TaskRecord) -> Table:
    found = [c for c in _find(run, model, task.name) if c.buckets]
    if not found:
        return [], []
    spans = [(b.low, b.high) for b in found[0].buckets]
    head = ["KLD by position", *(f"{low}–{high - 1}" for low, high in spans), "slope"]
    rows = []
    if all(b.reference_loss is not None for b in found[0].buckets):
        losses = [f"{b.reference_loss:.3g}" for b in found[0].buckets]
        rows.append(["(loss of fp32, nats)", *losses, "–"])
    for c in found:
        by_span = {(b.low, b.high): b.kld for b in c.buckets}
        slope = "–" if c.kld_slope is None else f"{c.kld_slope:.2f}"
        rows.append([label_of(_arm(run, c.arm)), *(nats(by_span.get(s)) for s in spans), slope])
    return head, rows


SURVIVAL = (64, 256, 512, 1024, 4096, 16384)
"""Places whose survival tables show."""


def drift_rows(run: RunRecord, model: str, task: TaskRecord) -> Table:
    """Response length and where responses first differ from fp32's, of a free-running task."""
    found = [c for c in _find(run, model, task.name) if c.length is not None]
    if not found:
        return [], []
    places = [p for p in SURVIVAL if any(s.characters == p for c in found for s in c.survival)]
    head = ["response", "ended fp32 -> it %", "tokens fp32 -> it", "change of length % [95 %]"]
    head += ["first difference, median", *(f"same through {p} %" for p in places)]
    rows = []
    for c in found:
        same = {s.characters: s.same for s in c.survival}
        change = "–" if c.length_change is None else _interval(c.length_change, signed=True)
        first = "–" if c.first_difference is None else f"{c.first_difference:.0f}"
        ended = f"{percent(c.reference_finished)} -> {percent(c.finished)}"
        rows.append(
            [
                label_of(_arm(run, c.arm)),
                "–" if c.finished is None else ended,
                f"{c.reference_length:.1f} -> {c.length:.1f}",
                change,
                first,
                *(percent(same.get(p), 0) for p in places),
            ]
        )
    return head, rows


def _evidence_rows(run: RunRecord, model: str, task: TaskRecord) -> Table:
    head = ["state", "right -> wrong", "wrong -> right", "p", "seed SD", "flushes/doc", "read", "%"]
    found = _find(run, model, task.name)
    generates = task.kind != "stream" and all(c.length is None for c in found)
    head += ["tokens fp32 -> it"] if generates else []
    rows = []
    for c in found:
        sd = "–" if c.delta_seed_sd is None else f"{100 * c.delta_seed_sd:.2f}"
        e = c.exercise
        rows.append(
            [
                label_of(_arm(run, c.arm)),
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
    return head, rows


def made_with(run: RunRecord) -> str:
    """Verdict, suite, versions, hardware and date of a run in one line."""
    e = run.environment
    packages = ", ".join(f"{k} {v}" for k, v in e.packages.items())
    commit = (
        f"commit {e.commit[:12]}{' (modified)' if e.dirty else ''}" if e.commit else "no commit"
    )
    return (
        f"{summary_line(run)}. Suite {run.suite}; toolkit {e.toolkit}, {commit}; {e.hardware}, "
        f"{e.threads} threads; Python {e.python}, {packages}; {run.created}."
    )


def model_line(model: ModelRecord) -> str:
    """What a model is, in one line."""
    chat = f"; chat template {model.chat_template}" if model.chat_template else ""
    return (
        f"{model.model_type}, {model.parameters / 1e6:.2f} M parameters in {model.dtype}, "
        f"{model.recurrent_layers} recurrent layers with {model.state_elements} state elements a "
        f"request; weights {model.weights}{chat}."
    )


def markdown(run: RunRecord) -> str:
    """The full report: tables, divergence by position, flips and exercise, what it was run with."""
    parts = ["# State evaluation", made_with(run)]
    for model in run.models:
        rows = [overview_cells(r) for r in overview(run, model)]
        parts.append(f"## {model.name}\n\n{model_line(model)}")
        parts += [markdown_table(OVERVIEW, rows), overview_note(run, model)]
        for task in run.tasks:
            tables = task_tables(run, model, task)
            if tables:
                parts += [f"### {task.name}", task_note(run, model.name, task) + "."]
                parts += [markdown_table(*t) for t in tables]
    parts += ["## Reading the tables", *notes(run)]
    parts.append(
        "Flips are summed over rounding seeds. `seed SD`: of the accuracy between rounding seeds, "
        "in points. `flushes/doc`: roundings of a layer's checkpoint a document; `read`: decode "
        "steps that read a rounded state, over documents, layers and seeds; `%`: share of the "
        "scored tokens that came from decode steps. `same until`: share of the text before the "
        "first difference from fp32. `first difference`: its median place in characters, a dash "
        "where most responses have none; `same through`: responses that agree so far; tokens: mean "
        "of a response; ended: before the limit."
    )
    return "\n\n".join(p for p in parts if p) + "\n"
