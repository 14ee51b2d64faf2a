"""What the repository says about its committed results, made from them and nothing else.

    python -m replayssm_quant.evals.report_publish [--check]

writes ``evals/results/RESULTS.md`` and the figures beside it, the README's first table and plot
(between its result marks), and ``recipes/evidence.json``: for each recipe's settings the committed
results that were measured with exactly them. ``--check`` writes nothing and fails if a text would
change; figures are left out of the check, since they depend on matplotlib's version.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from .. import recipe as recipes
from .._paths import drop_checkout
from . import plots, report
from .arms import STORY, Arm, arm, parse_arm
from .files import write_text
from .matrix import LENGTHS, PLANAR, PUBLISHED, STANDARD
from .schema import Comparison, ModelRecord, ResultError, RunRecord, TaskRecord

ROOT = Path(__file__).resolve().parents[1]
"""The checkout: evals/ and recipes/ lie in it, also where they are reached through the package."""
MATRIX, LONG, FREE, LAYERS = "matrix-formats", "matrix-long", "matrix-free", "matrix-layers"
README_TASK = "count"
NOTES = {
    LONG: "The larger pair: what `tools/README.md` trains in some minutes, scored eight times "
    "further than it was trained. The nearest to a real model that can be had here, and still "
    "none: bytes instead of words, made-up recall and counting, no reasoning, one training run. It "
    "shows how divergence grows over a long text and whether it levels off; it cannot show what a "
    "benchmark of a large model loses. Tasks that fp32 itself does not solve at that length are "
    "marked NOT-LEARNED and say nothing about a format's accuracy; their divergence still does.",
    FREE: "Free-running: every state goes on from its own answers, as a server does. `write` is "
    "drawn at a temperature of 0.7 with random numbers that belong to the document, so that states "
    "that agree write the same and a response changes only where a rounded state changed a draw; "
    "`tally-end` is greedy, and ends where a count would pass 31. Length and ends of the responses "
    "are the nearest that models of this size come to the length of a reasoning: they show whether "
    "a state makes a model ramble or stop early, not what that does to answers of thousands of "
    "tokens. The larger pair is another training run than the long evaluation's.",
    LAYERS: "KLD, nats a token, with one layer alone in a format and every other in fp32. The "
    "larger pair, another training run than the long evaluation's.",
    "free": "What `python -m replayssm_quant.eval --suite free` runs: responses of the shipped "
    "models, drawn with random numbers that belong to the document.",
    "default": "What `python -m replayssm_quant.eval` runs, here to set hardware beside hardware.",
}

HEAD = """# Results

Made by `python -m replayssm_quant.evals.report_publish` from the result files beside this one; a
test compares the two, so edit neither by hand. A result is measured and committed like this:

```
python -m replayssm_quant.evals.matrix formats --out out/formats
cp out/formats/results.json evals/results/formats-DATE.json
python -m replayssm_quant.evals.report_publish
```

`python -m replayssm_quant.report evals/results --bench kernels/bench/results --out out` turns the
same files into an HTML page with every figure. KLD is KL(fp32 || it) in nats at the scored tokens;
`fp32 again` is the noise floor, fp32 summed in another order. Changes are in points against fp32,
with paired 95 % intervals over documents. A dash: not measured.
"""


def _found(run: RunRecord, model: str, task: str) -> dict[str, Comparison]:
    """Comparisons by the digest of their arm."""
    digests = {a.name: a.digest for a in run.arms}
    return {digests[c.arm]: c for c in run.comparisons if (c.model, c.task) == (model, task)}


def _digest(text: str) -> str:
    return arm("candidate", parse_arm(text)).digest


def _format_name(text: str) -> str:
    config = parse_arm(text + ":rn")
    return config.label.replace(" RN", "", 1)


def _cell(c: Comparison | None, what: str) -> str:
    if c is None:
        return "–"
    if what == "kld":
        return report.nats(c.kld.mean if c.kld else None)
    return report.delta_text(c, what == "loss")


def matrix_tables(run: RunRecord, model: ModelRecord, task: TaskRecord) -> list[str]:
    """Divergence, then change of accuracy (or loss): formats by rounding and L."""
    found = _found(run, model.name, task.name)
    columns = [(r, n) for r in ("sr", "rn") for n in sorted(LENGTHS)]
    head = ["", *(f"{r.upper()}, L {n}" for r, n in columns)]
    out = []
    for what in ("kld", "loss" if task.scored == "likelihood" else "accuracy"):
        rows = []
        for text in (*PUBLISHED, *STANDARD, *PLANAR):
            cells = [_cell(found.get(_digest(f"{text}:{r}@{n}")), what) for r, n in columns]
            if set(cells) != {"–"}:
                rows.append([_format_name(text), *cells])
        name = {"kld": "KLD", "loss": "change of nats a token [95 %]"}.get(what, "points [95 %]")
        out.append(report.markdown_table([name, *head[1:]], rows))
    return out


def bytes_table(run: RunRecord, model: ModelRecord) -> str:
    """Bits an element and how much smaller a request's state is than in fp32, by L."""
    arms = {a.digest: a for a in run.arms}
    head = ["state", "bits an element", *(f"ratio, L {n}" for n in sorted(LENGTHS))]
    rows = []
    for text in (*PUBLISHED, *STANDARD, *PLANAR):
        held = [arms.get(_digest(f"{text}:sr@{n}")) for n in sorted(LENGTHS)]
        sizes = [None if a is None else a.bytes.get(model.name) for a in held]
        size = next((s for s in sizes if s is not None), None)
        if size is None:
            continue
        bits = 8 * (size.stored - size.ring) / model.state_elements
        ratios = ["–" if s is None else f"{s.ratio:.2f}x" for s in sizes]
        rows.append([_format_name(text), f"{bits:.2f}", *ratios])
    return report.markdown_table(head, rows)


def _section(name: str, run: RunRecord) -> list[str]:
    parts = [f"## {name}", report.made_with(run), *filter(None, [NOTES.get(run.suite)])]
    for model in run.models:
        parts += [f"### {model.name}", report.model_line(model)]
        if run.suite == LAYERS:
            for task in run.tasks:
                table = report.layer_table(run, model, task)
                if table[1]:
                    parts += [f"#### {task.name}", report.markdown_table(*table)]
            continue
        if run.suite == MATRIX:
            parts += [bytes_table(run, model)]
            if any(t.name == README_TASK for t in run.tasks):
                parts.append(f"![Divergence against bytes, {model.name}]({_matrix_name(model)})")
        else:
            rows = [report.overview_cells(r) for r in report.overview(run, model)]
            parts += [
                report.markdown_table(report.OVERVIEW, rows),
                report.overview_note(run, model),
            ]
        for task in run.tasks:
            if run.suite == "default" and task.kind == "stream":
                continue
            tables = report.task_tables(run, model, task)
            if not tables:
                continue
            parts += [f"#### {task.name}", report.task_note(run, model.name, task) + "."]
            if run.suite == MATRIX:
                parts += matrix_tables(run, model, task)
                kept = [r for r in tables[0][1] if "L1" in r[0] or r[0] == "fp32 again"]
                parts += ["Rounded at every token, and the floor:"]
                parts += [report.markdown_table(tables[0][0], kept)]
            else:
                parts += [report.markdown_table(*t) for t in tables[:-1]]
    return parts


def _settings(run: RunRecord, c: Comparison) -> tuple[object, ...]:
    """What two comparisons must share to be the same measurement."""
    task = next(t for t in run.tasks if t.name == c.task)
    weights = next((m.weights, m.dtype) for m in run.models if m.name == c.model)
    digest = next(a.digest for a in run.arms if a.name == c.arm)
    settings = json.dumps(task.settings, sort_keys=True)
    return (c.model, weights, c.task, settings, c.documents, digest, tuple(c.seeds))


def agreement(runs: Mapping[str, RunRecord]) -> list[list[str]]:
    """Rows for each model and task that two results measured on different hardware: how many
    states, how many of them with a divergence inside the other's 95 % interval, the largest
    difference of accuracy in points and of the divergence as a factor."""
    rows = []
    names = list(runs)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            a, b = runs[one], runs[two]
            if a.environment.hardware == b.environment.hardware:
                continue
            known = {_settings(a, c): c for c in a.comparisons if c.role != "floor"}
            pairs = [(known[k], c) for c in b.comparisons for k in [_settings(b, c)] if k in known]
            for model, task in dict.fromkeys((x.model, x.task) for x, _ in pairs):
                mine = [(x, y) for x, y in pairs if (x.model, x.task) == (model, task)]
                klds = [(x, y) for x, y in mine if x.kld_mean and y.kld_mean]
                inside = sum(
                    x.kld_mean.low <= y.kld_mean.value <= x.kld_mean.high  # type: ignore[union-attr]
                    for x, y in klds
                )
                points = max(
                    (abs(x.accuracy - y.accuracy) for x, y in mine if x.accuracy is not None
                     and y.accuracy is not None), default=None,
                )  # fmt: skip
                factors = [
                    max(x.kld.mean, y.kld.mean) / max(min(x.kld.mean, y.kld.mean), 1e-300)
                    for x, y in klds
                    if x.kld is not None and y.kld is not None
                ]
                rows.append(
                    [
                        f"{one} / {two}",
                        model,
                        task,
                        str(len(mine)),
                        f"{inside} of {len(klds)}" if klds else "–",
                        "–" if points is None else f"{100 * points:.2f}",
                        f"{max(factors):.2f}" if factors else "–",
                    ]
                )
    return rows


AGREEMENT = (
    "results",
    "model",
    "task",
    "states",
    "KLD inside the other's interval",
    "largest difference, points",
    "largest factor of KLD",
)


def results_md(runs: Mapping[str, RunRecord]) -> str:
    """The text of RESULTS.md."""
    order = (MATRIX, LONG, FREE, "free")
    names = sorted(runs, key=lambda n: order.index(runs[n].suite) if runs[n].suite in order else 9)
    parts = [HEAD.strip()]
    rows = agreement(runs)
    if rows:
        parts += [
            "## The same on other hardware",
            "The same documents, states and rounding seeds, measured twice; sums run in another "
            "order, so a state may round the other way here and there.",
            report.markdown_table(AGREEMENT, rows),
        ]
    for name in names:
        parts += _section(name, runs[name])
    return "\n\n".join(parts) + "\n"


def story(run: RunRecord) -> RunRecord:
    """The arms of the README's table, of a run that may have many more."""
    digests = {_digest(text) for _, text in STORY}
    arms = [a for a in run.arms if a.role in ("reference", "floor") or a.digest in digests]
    order = {_digest(text): i for i, (_, text) in enumerate(STORY)}
    arms.sort(key=lambda a: order.get(a.digest, -1))
    names = {a.name for a in arms}
    kept = [c for c in run.comparisons if c.arm in names]
    return run.model_copy(update={"arms": arms, "comparisons": kept})


def _first(runs: Mapping[str, RunRecord]) -> RunRecord:
    """The newest matrix with the README's task, that task alone."""
    for run in runs.values():
        if run.suite == MATRIX and any(t.name == README_TASK for t in run.tasks):
            return run.model_copy(
                update={
                    "tasks": [t for t in run.tasks if t.name == README_TASK],
                    "comparisons": [c for c in run.comparisons if c.task == README_TASK],
                }
            )
    raise ResultError(
        f"no committed result of suite {MATRIX} with task {README_TASK}; measure one and put it "
        "into evals/results"
    )


def readme_part(runs: Mapping[str, RunRecord]) -> str:
    """What stands between the README's result marks."""
    run = _first(runs)
    images = " ".join(
        f'<img src="evals/results/pareto-{m.name}.svg" alt="Divergence against bytes a request, '
        f'{m.name}" width="48%">'
        for m in run.models
    )
    return f"{report.summary(story(run))}\n\n{images}"


def figure_files(runs: Mapping[str, RunRecord]) -> dict[str, str]:
    """SVG files by name: the README's states, and for RESULTS.md the whole matrix."""
    run = _first(runs)
    out = {}
    for model in run.models:
        for name, part in ((f"pareto-{model.name}.svg", story(run)), (_matrix_name(model), run)):
            figure = plots.pareto(part, model, run.tasks[0])
            if figure is not None:
                out[name] = plots.standalone(figure)
    return out


def _matrix_name(model: ModelRecord) -> str:
    return f"matrix-{model.name}.svg"


def evidence(runs: Mapping[str, RunRecord]) -> str:
    """``recipes/evidence.json``: committed results by the digest of a recipe's settings."""
    out: dict[str, list[dict[str, str]]] = {}
    for path in recipes.shipped().values():
        for resolved in recipes.variants(recipes.read(path)):
            if resolved.settings.get("layers") or resolved.digest in out:
                continue
            digest = Arm("", "candidate", resolved.config()).digest
            found = [e for n, r in runs.items() for e in _evidence_of(n, r, digest)]
            if found:
                out[resolved.digest] = found
    return json.dumps(out, indent=1, sort_keys=True) + "\n"


def _evidence_of(name: str, run: RunRecord, digest: str) -> list[dict[str, str]]:
    """One entry for each model that a result measured with these settings."""
    found = []
    for model in run.models:
        notes = []
        for task in run.tasks:
            c = _found(run, model.name, task.name).get(digest)
            if c is None or c.role == "floor":
                continue
            note = f"{task.name} {c.verdict}"
            if c.kld is not None:
                note += f", KLD {report.nats(c.kld.mean)}"
            if c.accuracy is not None:
                before, after = report.percent(c.reference_accuracy), report.percent(c.accuracy)
                note += f", {before} -> {after} %"
            notes.append(note)
        if notes:
            entry = {"model": model.name, "result": name, "note": "; ".join(notes)}
            if run.environment.commit:
                entry["commit"] = run.environment.commit[:12]
            found.append(entry)
    return found


def texts(root: Path = ROOT) -> dict[Path, str]:
    """Every generated text by its path. Raises ResultError."""
    folder = root / "evals" / "results"
    runs = report.load_all(folder)
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    return {
        folder / "RESULTS.md": results_md(runs),
        readme: report.replace_part(old, readme_part(runs), readme.name),
        root / "recipes" / "evidence.json": evidence(runs),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 1 where --check finds a difference, 2 for results of no use."""
    drop_checkout()
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_quant.evals.report_publish", description="Publish results."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args(argv)
    try:
        made = texts()
        if args.check:
            stale = [
                p for p, t in made.items() if not p.is_file() or p.read_text(encoding="utf-8") != t
            ]
            for path in stale:
                print(f"{path.relative_to(ROOT)} differs from what the results make of it")
            return 1 if stale else 0
        folder = ROOT / "evals" / "results"
        made |= {folder / n: t for n, t in figure_files(report.load_all(folder)).items()}
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for path, text in made.items():
        write_text(path, text)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
