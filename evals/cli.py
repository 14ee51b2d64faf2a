"""From parsed arguments to an exit code: the part of the command that is not argparse."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import models
from ..config import StateConfig
from . import report, runner, vllm
from . import suite as suites
from .arms import parse_arm

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "NOT-LEARNED": 3}


def _split(values: list[str] | str | None) -> list[str]:
    if values is None:
        return []
    texts = [values] if isinstance(values, str) else values
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in _split(text))
    except ValueError:
        raise ValueError(f"seeds '{text}': write numbers separated by commas, as 0,1,2") from None
    if not seeds or min(seeds) < 0:
        raise ValueError(f"seeds '{text}': write one or more numbers from 0 up, as 0,1,2")
    return seeds


def _state(args: argparse.Namespace) -> tuple[dict[str, Any], StateConfig | None]:
    """(settings shared by all arms, the candidate or None). Raises ValueError."""
    base = {
        "buffer_len": args.buffer_len,
        "rounding": args.rounding,
        "rotate": args.rotate or None,
    }
    base = {k: v for k, v in base.items() if v is not None}
    formats = {
        "update_dtype": args.update_dtype,
        "output_dtype": args.output_dtype,
        "block_size": args.block_size,
    }
    formats = {k: v for k, v in formats.items() if v is not None}
    if args.recipe is not None and (base or formats):
        flag = next(iter([*formats, *base])).replace("_", "-")
        raise ValueError(f"--recipe and --{flag} both set the state; leave one out")
    if "update_dtype" not in formats and (base or formats) and not args.arms:
        flag = next(iter([*formats, *base])).replace("_", "-")
        raise ValueError(f"--{flag} needs --update-dtype: which format the checkpoint has")
    if "update_dtype" not in formats:
        return base, None
    return base, StateConfig.from_flags(**formats, **base)


def _without_effect(args: argparse.Namespace) -> None:
    """Refuse flags of the other backend."""
    for flag, value, default, instead in (
        ("--device", args.device, "auto", "; CUDA_VISIBLE_DEVICES chooses a GPU"),
        ("--prefill", args.prefill, 1, ""),
        ("--path", args.path, "scan", ""),
    ):
        if value != default:
            raise ValueError(f"{flag} has no effect with --backend vllm; leave it out{instead}")


def request(args: argparse.Namespace, command: list[str]) -> runner.Request:
    """The request that the arguments make. Raises ValueError."""
    if args.backend not in ("hf", "vllm"):
        raise ValueError(f"unknown backend '{args.backend}'; use hf or vllm")
    if args.backend == "hf" and (args.vllm_python or args.vllm_args):
        flag = "--vllm-python" if args.vllm_python else "--vllm-args"
        raise ValueError(f"{flag} needs --backend vllm")
    if args.backend == "vllm":
        _without_effect(args)
    base, candidate = _state(args)
    named = [models.resolve(name) for name in _split(args.model)] or models.default_models()
    ours = all(m.source == "shipped" for m in named)
    suite = suites.load(args.suite or (suites.DEFAULT if ours else suites.GENERAL))
    names = _split(args.tasks)
    tasks = suites.tasks_for(suite, ours)
    if names:
        known = None
        if any(n not in suites.TASKS and n not in {t.name for t in suite.tasks} for n in names):
            from . import lm_tasks

            known = lm_tasks.task_names()
        tasks = suites.pick(names, suite, known)
    if args.backend == "vllm":
        vllm.engine_arguments(args.vllm_args)
        tasks = vllm.choose(tasks, named=bool(names))
    seeds = _seeds(args.seeds) if args.seeds is not None else suite.seeds or (0, 1, 2)
    extra = [parse_arm(text, base) for text in _split(args.arms)]
    if args.margin is not None and not 0 < args.margin < 100:
        raise ValueError(f"margin {args.margin} is out of range; give accuracy points, such as 1")
    return runner.Request(
        models=tuple(named),
        suite=suite,
        tasks=tuple(tasks),
        candidate=candidate,
        recipe=args.recipe,
        extra=tuple(extra),
        seeds=seeds,
        documents=args.limit,
        margin=None if args.margin is None else args.margin / 100,
        batch_size=args.batch_size,
        prefill=args.prefill,
        path=args.path,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        data_dir=None if args.data_dir is None else Path(args.data_dir),
        download_data=args.download_data,
        max_gen_toks=args.max_gen_toks,
        chat_template=None if args.chat_template is None else Path(args.chat_template),
        out=None if args.out is None else Path(args.out),
        jobs=args.jobs,
        command=tuple(command),
        backend=args.backend,
        vllm_python=args.vllm_python or sys.executable,
        vllm_args=args.vllm_args,
    )


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Evaluate and print; returns the exit code of the command."""
    try:
        plan = runner.plan(request(args, command))
        record = runner.run(plan, quiet=args.quiet)
    except (ValueError, TypeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; the same command picks up from here" if args.out else ""
        print(f"interrupted{again}", file=sys.stderr)
        return 130
    if args.format == "json":
        print(record.model_dump_json(indent=1))
    else:
        print(report.terminal(record))
        print(f"\n{report.summary_line(record)}", file=sys.stderr)
    return EXIT[record.verdict] if args.gate else 0
