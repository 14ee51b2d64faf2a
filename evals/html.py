"""One self-contained HTML page of results: tables, figures with their data, nothing from outside.

No script, no network. Light or dark as the reader prefers; on a narrow screen tables scroll within
their frame and figures take the whole width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from . import plots, report
from .schema import ModelRecord, RunRecord

STYLE = (
    ":root{color-scheme:light dark;--back:#f6f8fa;--good:#1a7f37;--bad:#b42318;--open:#8a6100;"
    f"{plots.css(plots.LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{--back:#0d1117;--good:#56d364;--bad:#ff7b72;"
    f"--open:#e3b341;{plots.css(plots.DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:break-word}
main{max-width:1360px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;margin:0 0 4px}h2{font-size:1.25rem;margin:40px 0 6px}
h3{font-size:1.02rem;margin:22px 0 6px}
p{margin:6px 0}.muted,figcaption,.note{color:var(--muted);font-size:.87rem}
.card{background:var(--paper);border:1px solid var(--grid);border-radius:8px}
.scroll{overflow:auto;max-height:86vh;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:.84rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{font-weight:600;color:var(--muted);vertical-align:bottom}
thead th{position:sticky;top:0;background:var(--paper)}thead th:first-child{z-index:1}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
tbody th{color:var(--ink)}
tbody tr:last-child>*{border-bottom:0}
.PASS{color:var(--good);font-weight:600}.FAIL{color:var(--bad);font-weight:600}
.OPEN{color:var(--open);font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));
gap:14px;margin:14px 0}
figure{margin:0;padding:12px 14px}figure h4{margin:0 0 6px;font-size:.95rem}
figure svg{display:block;width:100%;height:auto}figcaption{margin-top:8px}
details{margin:8px 0}summary{cursor:pointer;color:var(--muted);font-size:.87rem}
summary:focus-visible{outline:2px solid var(--s0)}
nav a{margin-right:14px;display:inline-block}a{color:var(--s0)}
@media(max-width:520px){main{padding:16px 10px 48px}th,td{padding:4px 7px}
th:first-child{min-width:30vw;max-width:40vw;white-space:normal}figure{padding:10px 8px}}
@media print{details{display:none}}
"""
)
_VERDICTS = {"PASS": "PASS", "FAIL": "FAIL", "INCONCLUSIVE": "OPEN", "NOT-LEARNED": "OPEN"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in a frame that scrolls; verdicts coloured, and always written out."""
    cells = []
    for row in rows:
        line = []
        for i, cell in enumerate(row):
            kind = _VERDICTS.get(cell.partition(",")[0], "")
            style = f' class="{kind}"' if kind else ""
            tag = f'<th scope="row"{style}>' if i == 0 else f"<td{style}>"
            line.append(f"{tag}{escape(cell)}</{'th' if i == 0 else 'td'}>")
        cells.append(f"<tr>{''.join(line)}</tr>")
    names = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    return (
        f'<div class="scroll card" tabindex="0"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )


def _details(title: str, body: str, open_: bool = False) -> str:
    return f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>{body}</details>"


def figure(f: plots.Figure) -> str:
    """A figure with its caption, and its data under it."""
    return (
        f'<figure class="card"><h4>{escape(f.title)}</h4>{f.svg}'
        f"<figcaption>{escape(f.note)}</figcaption>"
        f"{_details('Data', table(f.head, f.rows))}</figure>"
    )


def _figures(found: Sequence[plots.Figure]) -> str:
    return f'<div class="figures">{"".join(map(figure, found))}</div>' if found else ""


def _split(found: Sequence[plots.Figure]) -> tuple[list[plots.Figure], list[plots.Figure]]:
    """(the first figure of each kind, the others)."""
    first: dict[str, plots.Figure] = {}
    for f in found:
        first.setdefault(f.title.partition(":")[0], f)
    shown = list(first.values())
    return shown, [f for f in found if f not in shown]


def _model(run: RunRecord, model: ModelRecord, found: Sequence[plots.Figure]) -> str:
    rows = [report.overview_cells(r) for r in report.overview(run, model)]
    shown, others = _split(found)
    parts = [
        f"<h3>{escape(model.name)}</h3>",
        f'<p class="note">{escape(report.model_line(model))}</p>',
        table(report.OVERVIEW, rows),
        f'<p class="note">{escape(report.overview_note(run, model))}</p>',
        _figures(shown),
    ]
    if others:
        parts.append(_details(f"{len(others)} more figures: the other tasks", _figures(others)))
    for task in run.tasks:
        tables = report.task_tables(run, model, task)
        if tables:
            body = f'<p class="note">{escape(report.task_note(run, model.name, task))}.</p>'
            body += "".join(table(head, rows) for head, rows in tables)
            parts.append(_details(f"Task {task.name}: every number", body))
    return "".join(parts)


Drawn = tuple[dict[tuple[str, str], list[plots.Figure]], list[plots.Figure]]


def draw(runs: Mapping[str, RunRecord], bench: Sequence[dict[str, Any]] = ()) -> Drawn:
    """Every figure: those of each (file, model), and those of kernel timings at their largest
    batch (bench: rows of ``kernels.bench``)."""
    batches = sorted({r["batch"] for r in bench})
    speed = plots.throughput(bench, batches[-1]) if batches else []
    return {(n, m.name): plots.figures(r, m) for n, r in runs.items() for m in r.models}, speed


def page(
    runs: Mapping[str, RunRecord], drawn: Drawn | None = None, title: str = "State evaluation"
) -> str:
    """The page of one or several result files."""
    figures, speed = draw(runs) if drawn is None else drawn
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        links = "".join(f'<a href="#run{i}">{escape(n)}</a>' for i, n in enumerate(runs))
        body.append(f"<nav>{links}</nav>")
    for i, (name, run) in enumerate(runs.items()):
        heading = name if len(runs) > 1 else f"Suite {run.suite}"
        body.append(f'<section id="run{i}"><h2>{escape(heading)}</h2>')
        body.append(f'<p class="muted">{escape(report.made_with(run))}</p>')
        for model in run.models:
            body.append(_model(run, model, figures[(name, model.name)]))
        lines = "".join(
            f"<p>{escape(line)}</p>" for note in report.notes(run) for line in note.split("\n")
        )
        body.append(_details("Reading the tables, and open verdicts", lines))
        body.append("</section>")
    if speed:
        body.append(f"<section><h2>Speed</h2>{_figures(speed)}</section>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def as_json(runs: Mapping[str, RunRecord], drawn: Drawn | None = None) -> str:
    """The rows of every overview and the data of every figure, as plain JSON."""
    figures, speed = draw(runs) if drawn is None else drawn

    def data(found: Sequence[plots.Figure]) -> list[dict[str, Any]]:
        return [{"title": f.title, "note": f.note, "head": f.head, "rows": f.rows} for f in found]

    out: dict[str, Any] = {"schema_version": "replayssm-report/1", "runs": {}}
    for name, run in runs.items():
        out["runs"][name] = {
            "suite": run.suite,
            "verdict": run.verdict,
            "made_with": report.made_with(run),
            "models": {m.name: report.overview(run, m) for m in run.models},
            "figures": [d for m in run.models for d in data(figures[(name, m.name)])],
        }
    out["speed"] = data(speed)
    return json.dumps(_plain(out), indent=1) + "\n"


def _plain(value: Any) -> Any:
    """NaN and infinities as text: JSON has neither."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
