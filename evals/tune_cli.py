"""The command ``python -m replayssm_quant.tune``, behind its arguments."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from .. import models
from . import tune
from .cli import _seeds


def asked(args: argparse.Namespace, command: list[str]) -> tune.Asked:
    """The request that the arguments make. Raises ValueError."""
    model = models.resolve(args.model)
    out = Path(args.out)
    formats = args.formats.split(",") if args.formats else tune.FORMATS
    budget = tune.parse_bytes(args.budget_bytes) if args.budget_bytes else None
    return tune.Asked(
        model=model,
        budget=budget,
        limit=args.max_kld,
        beside=args.budget_like or args.beside,
        formats=tuple(f for f in formats if f.strip()),
        buffer_len=args.buffer_len,
        task=args.task or ("count" if model.source == "shipped" else "text"),
        documents=args.documents,
        fresh=args.verify,
        seeds=_seeds(args.seeds),
        group=args.group,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        out=out,
        work=Path(args.work) if args.work else out.with_name(f".{out.name}.work"),
        quiet=args.quiet,
        command=tuple(command),
    )


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Search, print what was found; returns the exit code."""
    try:
        what = asked(args, command)
        with models.quiet():
            record, _ = tune.run(what)
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
        print("interrupted; the same command picks up from here", file=sys.stderr)
        return 130
    if not args.work:
        shutil.rmtree(what.work, ignore_errors=True)
    if not args.quiet:
        print(tune.report(record))
    print(f"wrote {what.out} and {what.out.with_suffix('.json')}", file=sys.stderr)
    return 0
