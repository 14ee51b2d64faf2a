"""``python -m replayssm_quant.eval``: what a split state costs against fp32 state, with intervals.

Exit codes: 0 done (with --gate: every candidate passed), 1 a gate failed or the run broke, 2 bad
input, 3 a gate is inconclusive or its task not learned.
"""

from __future__ import annotations

import argparse
import sys

from ._paths import drop_checkout


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="replayssm-eval",
        description="Measure what a split recurrent state costs against fp32 state. Without flags: "
        "the shipped models, shared and split states side by side.",
    )
    add = p.add_argument_group("what").add_argument
    add("--model", action="append", metavar="NAME|DIR|ID", help="repeat, or separate by commas")
    add("--suite", help="shipped suite or .yaml file (default, or general for models of your own)")
    add("--tasks", metavar="A,B", help="tasks of the suite, other local ones, or lm-eval tasks")
    add("--limit", type=int, metavar="N", help="at most N documents a task")
    add("--data-dir", metavar="DIR", help="local files of lm-eval tasks (parquet, jsonl, json)")
    add("--download-data", action="store_true", help="let lm-eval fetch data sets")
    add("--max-gen-toks", type=int, metavar="N", help="at most N tokens an lm-eval answer")
    add("--chat-template", metavar="FILE", help="Jinja file, instead of the tokenizer's template")
    add = p.add_argument_group("state").add_argument
    add("--update-dtype", metavar="F", help="checkpoint format; fp8 alone: with an nvfp4 copy")
    add("--output-dtype", metavar="F", help="output copy's format, or 'same' for one shared state")
    add("--block-size", type=int, metavar="N", help="scale block of the checkpoint: 16 or 32")
    add("--buffer-len", type=int, metavar="L", help="tokens from flush to flush, 1 to 64 (16)")
    add("--rounding", metavar="sr|rn", help="of the checkpoint: stochastic (default) or nearest")
    add("--rotate", action="store_true", help="randomised Hadamard along d_state")
    add("--recipe", metavar="NAME|FILE", help="family, family/variant, auto, or a .yaml file")
    add("--arms", action="append", metavar="A,B", help="more arms: UPDATE[:OUTPUT][:rn][:rot][@L]")
    add("--seeds", default=None, metavar="0,1,2", help="rounding seeds")
    add = p.add_argument_group("how").add_argument
    add("--backend", default="hf", help="hf (transformers), or vllm for tasks that generate")
    add("--vllm-python", metavar="FILE", help="interpreter that has vLLM (default: this one)")
    add("--vllm-args", metavar="JSON", help="more arguments of vllm.LLM")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="of the model: auto, fp32, bf16 or fp16")
    add("--batch-size", type=int, default=8)
    add("--prefill", type=int, default=1, metavar="N", help="tokens of a stream taken at once (1)")
    add("--path", default="scan", help="teacher-forced scoring: scan, or decode token by token")
    add("--jobs", type=int, help="worker processes, one a model (default: the CPUs)")
    add("--trust-remote-code", action="store_true", help="run code in the model's folder")
    add = p.add_argument_group("output").add_argument
    add("--out", metavar="DIR", help="results.json, samples and report.md; resumes if interrupted")
    add("--format", default="md", choices=("md", "json"))
    add("--gate", action="store_true", help="exit 1 or 3 unless every candidate passes")
    add("--margin", type=float, metavar="POINTS", help="accuracy loss that still passes")
    add("--quiet", action="store_true", help="no progress bar")
    return p


def main(argv: list[str] | None = None) -> int:
    """Parse and call ``evals.cli.run``; returns the exit code."""
    drop_checkout()
    args = parser().parse_args(argv)
    from .evals import cli

    return cli.run(args, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
