"""``python -m replayssm_quant.gates``: the recipes of the shipped models against committed results.

``check`` measures a suite with gates (``regression``) and decides them; ``accept`` measures it and
writes the result that later checks compare with. Exit codes: 0 every gate passed (or the result was
written), 1 a gate failed, 2 bad input, 3 no gate failed but one is inconclusive.
"""

from __future__ import annotations

import argparse
import sys

from ._paths import drop_checkout


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.gates",
        description="Hold the recipes of the shipped models against their committed results.",
    )
    p.add_argument("command", choices=("check", "accept"), help="decide, or write a new result")
    add = p.add_argument
    add("--suite", default="regression", help="suite with gates, a name or .yaml (regression)")
    add("--model", action="append", metavar="NAME|DIR", help="default: the shipped models")
    add("--tasks", metavar="A,B", help="only these tasks of the suite (check)")
    add("--limit", type=int, metavar="N", help="at most N documents a task (check)")
    add("--batch-size", type=int, default=8)
    add("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    add("--jobs", type=int, help="worker processes, one a model (default: the CPUs)")
    add("--out", metavar="DIR", help="keep the run there; resumes if interrupted")
    add("--into", metavar="FILE", help="accept: the file to write (default: the suite's baseline)")
    add("--quiet", action="store_true", help="no progress bar, and no table if every gate passes")
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse and call ``evals.gates_cli.run``; returns the exit code."""
    drop_checkout()
    args = parser().parse_args(argv)
    from .evals import gates_cli

    return gates_cli.run(args, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
