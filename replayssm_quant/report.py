"""``python -m replayssm_quant.report PATH``: tables from a finished evaluation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._paths import drop_checkout


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 2 for a file that cannot be used)."""
    drop_checkout()
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_quant.report", description="Tables from a finished evaluation."
    )
    parser.add_argument("path", type=Path, help="a result file, or a folder that --out wrote")
    parser.add_argument(
        "--format",
        choices=("md", "json", "compact", "summary", "results"),
        default="md",
        help="everything, the record, the record without its units (to commit), one table, or all "
        "result files of a folder on one page",
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="replace what stands between FILE's result marks"
    )
    args = parser.parse_args(argv)
    from .evals import report
    from .evals.files import write_text
    from .evals.schema import ResultError

    try:
        if args.format == "results":
            text = report.results_page(report.load_all(args.path))
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
