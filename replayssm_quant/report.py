"""``python -m replayssm_quant.report PATH``: reports of finished evaluations."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ._paths import drop_checkout

RENDERED = ("report.md", "report.json", "report.html")


def _bench(path: Path | None) -> list[dict[str, Any]]:
    """Rows of kernel timings from a result file of ``kernels.bench`` or a folder of them."""
    from .evals.schema import ResultError

    if path is None:
        return []
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ResultError(f"{file}: cannot be read as JSON; give kernel timings") from None
        if not isinstance(found, list) or not all(isinstance(r, dict) for r in found):
            raise ResultError(
                f"{file}: no kernel timings; give a result file of replayssm_quant.kernels.bench"
            )
        rows += [r for r in found if {"op", "design", "batch", "phase", "time_us"} <= set(r)]
    if not rows:
        raise ResultError(f"{path}: no kernel timings found; give a folder that holds some")
    return rows


def _render(args: argparse.Namespace) -> list[Path]:
    """Write the three reports of a folder; returns their paths. Raises ResultError."""
    from .evals import html, plots, report
    from .evals.files import write_text

    plots.available()
    bench = _bench(args.bench)
    one = not args.path.is_dir() or (args.path / report.RESULTS).is_file()
    runs = {args.path.name: report.load(args.path)} if one else report.load_all(args.path)
    out = args.out or (args.path if args.path.is_dir() else args.path.parent)
    text = next(iter(map(report.markdown, runs.values()))) if one else report.results_page(runs)
    drawn = html.draw(runs, bench)
    texts = (text, html.as_json(runs, drawn), html.page(runs, drawn))
    for name, text in zip(RENDERED, texts, strict=True):
        write_text(out / name, text)
    return [out / name for name in RENDERED]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 2 for a file that cannot be used)."""
    drop_checkout()
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_quant.report",
        description="Reports of finished evaluations. Without --format: report.md, report.json and "
        "report.html (one page with its figures, nothing from the network).",
    )
    parser.add_argument(
        "path",
        type=Path,
        help="a folder that --out wrote, a result file, or a folder of result files",
    )
    parser.add_argument(
        "--format",
        choices=("md", "json", "compact", "summary", "results", "html"),
        help="print one thing instead: everything, the record, the record without its units (to "
        "commit), one table, all result files of a folder on one page, or the HTML page",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the reports go (PATH)")
    parser.add_argument(
        "--bench", type=Path, metavar="PATH", help="kernel timings to set beside the results"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="replace what stands between FILE's result marks"
    )
    args = parser.parse_args(argv)
    from .evals import report
    from .evals.files import write_text
    from .evals.schema import ResultError

    try:
        if args.into is not None and args.format is None:
            raise ResultError("--into needs --format: say what goes between the marks")
        if args.format is None:
            for path in _render(args):
                print(path)
            return 0
        if args.format == "results":
            text = report.results_page(report.load_all(args.path))
        elif args.format == "html":
            from .evals import html, plots

            plots.available()
            runs = {args.path.name: report.load(args.path)}
            text = html.page(runs, html.draw(runs, _bench(args.bench)))
        else:
            run = report.load(args.path)
            render = {
                "md": report.markdown,
                "json": lambda r: r.model_dump_json(indent=1),
                "compact": report.compact,
                "summary": report.summary,
            }
            text = render[args.format](run)
        if args.into is None:
            print(text)
            return 0
        if not args.into.is_file():
            raise ResultError(f"{args.into} does not exist; give a file with result marks")
        old = args.into.read_text(encoding="utf-8")
        write_text(args.into, report.replace_part(old, text, args.into.name))
    except ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
