"""The command ``python -m replayssm_quant.gates``, behind its arguments."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from .. import models
from . import gates, runner
from . import suite as suites
from .schema import RunRecord
from .store import Unit, UnitStore

EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "NOT-LEARNED": 3}


def _request(args: argparse.Namespace, command: list[str], out: Path | None) -> runner.Request:
    suite = suites.load(args.suite)
    if not suite.gates:
        raise suites.SuiteError(f"suite {suite.name} has no gates; use --suite regression")
    names = [n.strip() for n in (args.tasks or "").split(",") if n.strip()]
    if args.command == "accept":
        if names or args.limit is not None:
            raise suites.SuiteError(
                "accept writes the whole result; leave --tasks and --limit to check"
            )
        suite = suite.model_copy(update={"gates": (), "baseline": None})
    asked = [m for text in args.model or () for m in text.split(",")]
    found = [models.resolve(name) for name in asked] or models.default_models()
    ours = all(m.source == "shipped" for m in found)
    return runner.Request(
        models=tuple(found),
        suite=suite,
        tasks=tuple(suites.pick(names, suite) if names else suites.tasks_for(suite, ours)),
        seeds=suite.seeds or (0, 1, 2),
        documents=args.limit,
        batch_size=args.batch_size,
        device=args.device,
        out=out,
        jobs=args.jobs,
        command=tuple(command),
    )


def committed(record: RunRecord, folder: Path) -> gates.Committed:
    """The committed result that a finished run in ``folder`` makes."""
    wanted = {(u.model, u.task, u.arm, u.seed): u.key for u in record.units}
    units: dict[tuple[str, str, str], list[Unit]] = {}
    store = UnitStore(folder)
    for (model, task, name, seed), key in wanted.items():
        unit = store.load(model, task, name, seed, key)
        if unit is None:
            raise gates.GateError(f"{folder}: unit {model}, {task}, {name} vanished; run again")
        units.setdefault((model, task, name), []).append(unit)
    roles = {a.name: (a.role, a.label, a.digest) for a in record.arms}
    return gates.commit(record.suite, units, record.tasks, roles, record.models, record.environment)


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Measure the suite, then decide its gates or write its result; returns the exit code."""
    try:
        with tempfile.TemporaryDirectory(prefix="replayssm-gates-") as scratch:
            folder = Path(args.out or scratch)
            target = suites.load(args.suite).baseline if args.into is None else args.into
            request = _request(args, command, folder)
            if args.command == "accept" and target is None:
                raise suites.SuiteError(f"suite {request.suite.name} has no baseline; use --into")
            record = runner.run(runner.plan(request), quiet=args.quiet)
            if args.command == "accept":
                assert target is not None
                gates.write(Path(target), committed(record, folder))
                print(f"wrote {target}")
                return 0
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
    counts = Counter(g.verdict for g in record.gates)
    if record.verdict != "PASS" or not args.quiet:
        print(gates.table(record))
    said = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
    print(f"\n{record.verdict}: {said or 'no gates'}; {record.seconds:.0f} s", file=sys.stderr)
    return EXIT[record.verdict]
