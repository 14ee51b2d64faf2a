"""``python -m replayssm_quant.tune``: a recipe with a format for each layer, found by measuring.

    python -m replayssm_quant.tune --model tiny-nemotron-h --budget-bytes 300k --out mine.yaml

writes ``mine.yaml`` (use it as ``--recipe mine.yaml``) and ``mine.json``, the measurements behind
it. Exit codes: 0 written, 2 bad input or a target that cannot be met, 1 anything that broke.
"""

from __future__ import annotations

import argparse
import sys

from ._paths import drop_checkout


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.tune",
        description="Choose a state format for each layer of a model under a budget of bytes, or "
        "the smallest state under a divergence, and write the recipe.",
    )
    p.add_argument("--model", required=True, metavar="NAME|DIR|ID")
    aim = p.add_mutually_exclusive_group(required=True)
    aim.add_argument(
        "--budget-bytes", metavar="B", help="of one request's state, rings included: 300000, 1.5M"
    )
    aim.add_argument("--max-kld", type=float, metavar="X", help="mean KLD against fp32, in nats")
    aim.add_argument(
        "--budget-like", metavar="RECIPE", help="the bytes of a recipe (auto: the model's own)"
    )
    add = p.add_argument
    add("--formats", metavar="A,B", help="candidates: UPDATE[:OUTPUT][:rn|sr][:rot]")
    add("--buffer-len", type=int, default=16, metavar="L", help="tokens from flush to flush (16)")
    add("--task", help="documents to tune on (default: count for shipped models, else text)")
    add("--documents", type=int, default=16, metavar="N", help="to tune on (16)")
    add("--verify", type=int, default=24, metavar="N", help="fresh documents at the end (24)")
    add("--seeds", default="0,1,2", metavar="0,1,2", help="rounding seeds")
    add("--group", type=int, default=1, metavar="N", help="neighbouring layers that share a format")
    add("--beside", default="auto", metavar="RECIPE", help="recipe to compare with (auto)")
    add("--batch-size", type=int, default=8)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="of the model: auto, fp32, bf16 or fp16")
    add("--trust-remote-code", action="store_true", help="run code in the model's folder")
    add("--out", default="tuned.yaml", metavar="FILE.yaml", help="the recipe (tuned.yaml)")
    add("--work", metavar="DIR", help="keep measurements there; the same command resumes")
    add("--quiet", action="store_true", help="no progress bar and no tables")
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse and call ``evals.tune_cli.run``; returns the exit code."""
    drop_checkout()
    args = parser().parse_args(argv)
    from .evals import tune_cli

    return tune_cli.run(args, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
