"""``compute-sanitizer`` over every kernel, its verdicts as rows of JSON.

``python -m replayssm_quant.kernels.bench.sanitize`` runs the smoke script under each tool, each
operation and design in a process of its own, several side by side, and writes
``sanitizer-<gpu>-<date>.json`` anew after each: tool, op, design, what was reported, whether the
script came to its end. The exit code is 1 if anything was reported or is unfinished.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..._paths import drop_checkout
from .registry import DESIGNS
from .run import RESULTS, gpu_slug, provenance, write_json
from .smoke import GEOMETRIES, SMOKE, label

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)")
FOUND = 9
"""Exit code of a run in which the sanitizer reported something."""


def command(sanitizer: str, tool: str, op: str, design: str) -> list[str]:
    """The smoke script of one operation and design under one tool."""
    return [
        sanitizer, "--tool", tool, "--print-limit", "5", "--error-exitcode", str(FOUND),
        "--kernel-name-exclude", "regex=vectorized",  # torch's own elementwise kernels
        sys.executable, "-m", f"{__package__}.smoke", "--op", op, "--design", design,
    ]  # fmt: skip


def verdict(text: str, code: int | None, op: str, design: str) -> dict[str, Any]:
    """What a run's output says.

    ``reported``: the count of the sanitizer's own summary, None where it printed none.
    ``finished``: each geometry was run to its end and the process ended by itself (``code`` is
    None where it was stopped).
    ``clean``: finished, and nothing reported.
    """
    counts = [int(n) for n in SUMMARY.findall(text)]
    lines = text.splitlines()
    done = [label(op, geometry, design) in lines for geometry in GEOMETRIES[op]]
    reported = sum(counts) if counts else None
    finished = all(done) and code in (0, FOUND)
    return {
        "reported": reported,
        "finished": finished,
        "clean": finished and code == 0 and reported == 0,
    }


def check(argv: list[str], op: str, design: str, seconds: float) -> tuple[dict[str, Any], str]:
    """Run one command; the verdict with the seconds it took, and all that was printed."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=seconds, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        code = None
    found = verdict(text, code, op, design)
    return found | {"seconds": round(time.monotonic() - began, 1)}, text


def main(argv: list[str] | None = None) -> int:
    drop_checkout()
    p = argparse.ArgumentParser(
        prog=f"python -m {__package__}.sanitize", description="compute-sanitizer over every kernel."
    )
    p.add_argument("--tool", default="memcheck,racecheck", help=f"of {', '.join(TOOLS)}")
    p.add_argument("--op", default=",".join(GEOMETRIES), help="names separated by commas")
    p.add_argument("--design", default=",".join(SMOKE), help="names separated by commas")
    p.add_argument("--sanitizer", default="compute-sanitizer", help="the program (CUDA toolkit)")
    p.add_argument("--workers", type=int, default=4, help="processes side by side")
    p.add_argument("--seconds", type=float, default=900, help="for one process")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    p.add_argument("--logs", type=Path, help="keep here what each process printed")
    args = p.parse_args(argv)
    chosen = {}
    for name, known in (("tool", TOOLS), ("op", tuple(GEOMETRIES)), ("design", tuple(DESIGNS))):
        chosen[name] = getattr(args, name).split(",")
        for value in chosen[name]:
            if value not in known:
                p.error(f"unknown {name} '{value}'; known: {', '.join(known)}")
    if args.workers < 1 or args.seconds <= 0:
        p.error(f"--workers {args.workers} and --seconds {args.seconds:g} have to be positive")
    program = shutil.which(args.sanitizer)
    if program is None:
        p.error(f"no program '{args.sanitizer}'; it comes with the CUDA toolkit: --sanitizer PATH")
    if not torch.cuda.is_available():
        p.error("needs a CUDA GPU and torch sees none")
    common = provenance(None)
    path = args.out / f"sanitizer-{gpu_slug(common['gpu'])}-{common['date']}.json"
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    cases = [(t, o, d) for t in chosen["tool"] for o in chosen["op"] for d in chosen["design"]]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    with (
        ThreadPoolExecutor(args.workers) as pool,
        tqdm(total=len(cases), unit="run", disable=not sys.stderr.isatty()) as bar,
    ):
        running = {
            pool.submit(check, command(program, *case), *case[1:], args.seconds): case
            for case in cases
        }
        for done in as_completed(running):
            case = running[done]
            found, text = done.result()
            rows[case] = dict(zip(("tool", "op", "design"), case, strict=True)) | found | common
            write_json(path, [rows[c] for c in cases if c in rows])
            if args.logs is not None:
                (args.logs / f"{'-'.join(case)}.log").write_text(text)
            if not found["clean"]:
                last = "\n".join(text.splitlines()[-20:])
                tqdm.write(f"{' '.join(case)}: {found}\n{last}", file=sys.stderr)
            bar.update()
    clean = sum(row["clean"] for row in rows.values())
    print(f"{clean} of {len(cases)} runs clean: {path}")
    return 0 if clean == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
