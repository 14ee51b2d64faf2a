"""``python -m replayssm_quant.report PATH``: tables from a finished evaluation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._paths import drop_checkout


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code (0, or 2 for a file that cannot be read)."""
    drop_checkout()
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_quant.report", description="Tables from a finished evaluation."
    )
    parser.add_argument("path", type=Path, help="a result file, or a folder that --out wrote")
    parser.add_argument("--format", choices=("md", "json"), default="md")
    args = parser.parse_args(argv)
    from .evals import report
    from .evals.schema import ResultError

    try:
        run = report.load(args.path)
    except ResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.markdown(run) if args.format == "md" else run.model_dump_json(indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
