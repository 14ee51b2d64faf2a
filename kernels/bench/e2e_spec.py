"""Speculative decoding in vLLM, end to end: ``python -m replayssm_quant.kernels.bench.e2e_spec``.

Real geometries with dummy weights, drafts by n-grams, and vLLM's synthetic acceptance: a draft is
kept with a fixed probability, whatever the model says, so every arm keeps as many. What is counted
are the tokens that a batch of requests got while as many as find room ran together, before the
first of them ended.

``--report`` makes the tables of E2E_SPEC.md from the committed rows instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._paths import drop_checkout
from ...config import StateConfig
from ...state.geometry import LayerGeometry, read_geometry
from ...state.layout import MAX_DRAFTS, StateLayout, fp32_bytes
from .e2e import (
    MODELS,
    PROFILE,
    PROMPT,
    REHEARSED,
    Engine,
    _label,
    _other_run,
    _points,
    _profile_table,
    add_engine_options,
    at_once,
    bytes_of_request,
    child,
    command,
    common_arguments,
    failure,
    generate,
    heading,
    host_of,
    newest_rows,
    noting,
    profile,
    profiler_arguments,
)
from .report import _number, _order, _table, _write

OP = "e2e_spec_decode_throughput"
PROFILE_STEPS = 16
"""Steps of the trace that ``--profile`` takes."""
ROTATED = {"rotate": True}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"drafts": False},
    "vllm": {"drafts": True},
    "fp32": {"drafts": True, "options": {"update_dtype": "fp32"}},
    "P4+8": {"drafts": True, "options": {"update_dtype": "P4+8"} | ROTATED},
    "P8+4": {"drafts": True, "options": {"update_dtype": "P8+4"} | ROTATED},
    "fp16+nvfp4": {"drafts": True, "options": {"update_dtype": "fp16", "output_dtype": "nvfp4"}},
}
"""Plain vLLM without drafts and with them, both on an fp32 state, and this package (options)."""


def arm_of(name: str) -> dict[str, Any]:
    """The arm of a name. Raises ValueError for an unknown one."""
    if name not in ARMS:
        raise ValueError(f"unknown arm '{name}'; known: {', '.join(ARMS)}")
    return at_once(ARMS[name])


def states(arm: Mapping[str, Any], drafts: int) -> int:
    """Pages of a request in each recurrent layer."""
    return 1 + drafts if arm["drafts"] and "options" not in arm else 1


def page_bytes(layer: LayerGeometry, arm: Mapping[str, Any], drafts: int) -> int:
    """Bytes of one page of a recurrent layer, its bf16 convolution state included."""
    columns = layer.conv_kernel - 1 + (drafts if arm["drafts"] else 0)
    conv = columns * layer.conv_channels * 2
    if "options" not in arm:
        return conv + fp32_bytes(layer)
    layout = StateLayout(layer, StateConfig.from_dict(arm["options"]), "bf16", drafts)
    return conv + -conv % 128 + layout.page_bytes


def cache_bytes(model: str, arm: Mapping[str, Any], batch: int, tokens: int, drafts: int) -> int:
    """Bytes of vLLM's cache in which ``batch`` requests of ``tokens`` tokens find room."""
    layers = read_geometry(MODELS[model]).layers.values()
    page = max(page_bytes(g, arm, drafts) for g in layers)
    return (batch + 2) * bytes_of_request(model, page, tokens, states(arm, drafts))


def room_of(cache: int, model: str, arm: Mapping[str, Any], tokens: int, drafts: int) -> int:
    """Requests of ``tokens`` tokens that find room together in ``cache`` bytes, as vLLM counts."""
    spare = cache_bytes(model, arm, 0, tokens, drafts)  # of two requests
    return 2 * cache // spare


def captured(batches: Sequence[int], rooms: Mapping[int, int]) -> list[int]:
    """Numbers of requests to capture graphs for: the batches, and where room ends before one.

    A captured graph also serves fewer requests, padded up to it, at the price of all. rooms: those
    that find room, for each batch.
    """
    found = set(batches)
    for batch, room in rooms.items():
        if room < batch:  # not to the request: vLLM keeps a block or two back
            found.update(range(8 * (room * 47 // 400), min(batch, room * 53 // 50 + 8), 8))
    return sorted(found - {0})


def measure(llm: Any, batch: int, tokens: int, vocab: int) -> dict[str, Any]:
    """Tokens and time of the steps in which as many requests ran as find room together.

    Raises RuntimeError if there are too few of them.
    """
    seen: list[tuple[float, int, int, bool]] = []

    def note(found: Any) -> None:
        new = [len(o.new_token_ids) for o in found.outputs]
        ended = any(o.finish_reason is not None for o in found.outputs)
        seen.append((time.perf_counter(), len(new), sum(new), ended))

    with noting(llm, note):
        generate(llm, batch, 16, vocab, "warm")
        seen.clear()
        generate(llm, batch, tokens, vocab, "timed")
    return window(seen, batch, tokens)


def window(seen: Sequence[tuple[float, int, int, bool]], batch: int, tokens: int) -> dict:
    """The row of one run's outputs: (time, requests, tokens, whether one has ended) of each step.

    Raises RuntimeError if fewer than 8 steps ran as many requests together as found room.
    """
    until = next((i for i, step in enumerate(seen) if step[3]), len(seen))
    running = max((count for _, count, _, _ in seen[:until]), default=0)
    full = [i for i in range(until) if seen[i][1] == running]
    # drop the steps around the prefills; what follows ran without a break
    first = full[0] + 2 if full else until
    steps = until - 1 - first
    if steps < 8 or sum(seen[i][1] < running for i in range(first, until)) > steps // 8:
        raise RuntimeError(f"only {steps} steps of {batch} requests ran together; ask for more")
    spent = seen[until - 1][0] - seen[first][0]
    made = sum(got for _, _, got, _ in seen[first + 1 : until])
    return {
        "batch": batch,
        "tokens": tokens,
        "running": running,
        "steps": steps,
        "step_ms": round(spent / steps * 1e3, 4),
        "tokens_a_step": round(made / steps / running, 4),
        "tokens_per_s": round(made / spent, 1),
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def measure_point(llm: Any, point: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a point, for ``e2e.child``."""
    if point.get("kind") == PROFILE:
        folder = Path(job["engine"]["profiler_config"]["torch_profiler_dir"])
        spec = job["engine"].get("speculative_config", {})
        width = 1 + spec.get("num_speculative_tokens", 0)
        tokens = (PROFILE_STEPS + 12) * width  # so that none ends before the last step
        row = profile(llm, point["batch"], job["vocab"], folder, PROFILE_STEPS, tokens)
        return row | {"op": PROFILE, "batch": point["batch"]}
    return measure(llm, point["batch"], point["tokens"], job["vocab"])


def engine_arguments(model: Path, arm: Mapping[str, Any], args: argparse.Namespace) -> dict:
    """Arguments of ``vllm.LLM`` for an arm, whose configuration is in the folder ``model``."""
    extra: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if "options" in arm:
        extra["replayssm_quant"] = arm["options"] | {"block_shortcut": host_of(arm) == "served"}
    profiler = profiler_arguments(model) if args.profile is not None else {}
    lengths = {batch: PROMPT + tokens + args.drafts for batch, tokens in args.batches}
    batches = sorted(lengths)
    width = 1 + args.drafts if arm["drafts"] else 1
    needed = max(cache_bytes(args.model, arm, b, n, args.drafts) for b, n in lengths.items())
    needed = int(needed * REHEARSED) if args.rehearse else needed
    cache = min(needed, int(args.cache_gib * 2**30))
    rooms = {b: room_of(cache, args.model, arm, n, args.drafts) for b, n in lengths.items()}
    made = common_arguments(model, batches[-1], cache, args.memory_share)
    made |= {
        "max_model_len": args.length,
        "compilation_config": {
            "cudagraph_capture_sizes": [b * width for b in captured(batches, rooms)]
        },
        "additional_config": extra,
    }
    if "options" not in arm:
        made["mamba_ssm_cache_dtype"] = "float32"
    if arm["drafts"]:
        made["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.accepted,
        }
    return made | profiler | json.loads(args.engine)


class DraftEngine(Engine):
    """A child process of this module."""

    module = __spec__.name

    def find_arm(self, name: str) -> dict[str, Any]:
        return arm_of(name) | {"runner": "v2"}  # V1 has no synthetic acceptance, and says nothing

    def arguments(self, model: Path) -> dict[str, Any]:
        return engine_arguments(model, self.arm, self.args)

    def about(self, model: str) -> dict[str, Any]:
        drafts, layers = self.args.drafts, read_geometry(MODELS[model]).layers.values()
        pages = states(self.arm, drafts)
        return {
            "op": OP,
            "drafts": drafts if self.arm["drafts"] else 0,
            "accepted": self.args.accepted if self.arm["drafts"] else 1.0,
            "state_bytes": pages * sum(page_bytes(g, self.arm, drafts) for g in layers),
        }


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return failure(row)
    if row["op"] == PROFILE:
        return f"{row['arm']}, batch {row['batch']}: GPU busy {row['busy_us'] / row['span_us']:.0%}"
    return (
        f"{row['arm']} ({row['runner']}, vLLM {row['vllm']}), {row['running']} of {row['batch']} "
        f"running: {row['step_ms']:.2f} ms a step, {row['tokens_a_step']:.2f} tokens a step and "
        f"request, {row['tokens_per_s']:.0f} tokens/s; room for {row['max_concurrency']} requests "
        f"in {row['cache_gib']} GiB; started in {row['start_s']} s"
    )


HEAD = """# Speculative decoding in vLLM

Generated by `python -m replayssm_quant.kernels.bench.e2e_spec --report` from the JSON files in
`results/`.

Real geometries with dummy weights, CUDA graphs, n-gram drafts whose acceptance is vLLM's synthetic
one, the same in every arm. *plain* is vLLM without drafts and *vllm* vLLM with them, both on an
fp32 state; the others are this package. *running* requests, of the batch that was asked for, found
room together. *x vllm* divides tokens/s by those of *vllm* in the same run; `†` marks a ratio
between runs at different commits. *state* is what one request keeps in its recurrent layers. *room*
is vLLM's own "Maximum concurrency" for requests of
{tokens} tokens, scaled to a cache of {budget} GiB. All arms run on the lean host of
[E2E.md](E2E.md). For ReplaySSM, with fp32 states, 1.85 to 2.10 times the tokens of vLLM's
speculative path at batch 512 and 3.0 to 3.3 times its requests are published for models of 120
billion parameters.

"""
BUDGET_GIB = 100
TARGETS = (("x vllm, batch 512", 1.9), ("room, x vllm", 3.3))
"""What the best split arm is to reach."""


def _room(row: Mapping[str, Any]) -> float | None:
    room = row["max_concurrency"]
    return None if room is None else room * BUDGET_GIB / row["cache_gib"]


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of one model."""
    every = rows
    failed = [r for r in rows if "error" in r]
    profiles = [r for r in rows if "error" not in r and r["op"] == PROFILE]
    rows = [r for r in rows if "error" not in r and r["op"] == OP]
    first = (rows or failed)[0]
    lines = [f"## {first['model']}", ""]
    lines += heading(rows)
    reached: dict[str, list[float]] = {name: [] for name, _ in TARGETS}
    points = dict.fromkeys((r["batch"], max(r["drafts"], 0)) for r in rows)
    for batch, drafts in sorted(points, reverse=True):
        here = [r for r in rows if r["batch"] == batch]
        if not drafts and any(r["drafts"] for r in here):
            continue  # in the table of those with drafts
        bases = [r for r in here if r["arm"] == "vllm"]
        kept = next((r["accepted"] for r in here if r["drafts"]), 1.0)
        lines += [f"### Batch {batch}, {drafts} drafts, {kept:.2f} tokens a step", ""]
        table = []
        for row in here:
            base = next((r for r in bases if not _other_run(r, row)), bases[0] if bases else None)
            mark = "†" if base and _other_run(base, row) else ""
            ratio = row["tokens_per_s"] / base["tokens_per_s"] if base else None
            room = _room(row)
            if base and row["arm"] not in ("plain", "vllm"):
                if batch == 512 and ratio:
                    reached[TARGETS[0][0]].append(ratio)
                if room and _room(base):
                    reached[TARGETS[1][0]].append(room / _room(base))  # type: ignore[operator]
            line = [_label(row, every), row["runner"], str(row["running"])]
            line += [f"{row['tokens_per_s']:,.0f}", _number(ratio) + mark, f"{row['step_ms']:.2f}"]
            line += [f"{row['tokens_a_step']:.2f}", f"{row['state_bytes'] / 2**20:.1f}"]
            line.append(_number(room, "{:.0f}"))
            table.append(line)
        header = ["arm", "runner", "running", "tokens/s", "x vllm", "ms a step", "tokens a step"]
        lines += _table([*header, "state, MiB", f"room, {BUDGET_GIB} GiB"], table)
    targets = [
        [name, f"{least:.1f}", f"{max(values):.2f}", "yes" if max(values) >= least else "no"]
        for name, least in TARGETS
        if (values := reached[name])
    ]
    if targets:
        lines += _table(["target, best arm", "at least", "reached", "met"], targets)
    lines += _profile_table(profiles, ("vllm",), every)
    for arm in _order(failed, "arm"):
        why = next(r["error"] for r in failed if r["arm"] == arm)
        lines += [f"{arm} failed: {why}", ""]
    return lines


def report(folder: Path, target: Path) -> Path:
    """E2E_SPEC.md in ``target`` from each model's newest rows. Raises ValueError if none."""
    newest = newest_rows(folder, OP)
    lengths = {r.get("concurrency_tokens") for rows in newest.values() for r in rows} - {None}
    tokens = ", ".join(f"{n:,}" for n in sorted(lengths)) or "these"
    head = HEAD.format(budget=BUDGET_GIB, tokens=tokens)
    lines = [line for model in sorted(newest) for line in section(newest[model])]
    return _write(target / "E2E_SPEC.md", head + "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    drop_checkout()
    parser = argparse.ArgumentParser(prog="python -m replayssm_quant.kernels.bench.e2e_spec")
    add = parser.add_argument
    add("--child", help=argparse.SUPPRESS)
    add("--report", action="store_true", help="make E2E_SPEC.md from the files in results/")
    add("--model", choices=MODELS, default="nemotron-3-nano-4b")
    arms = ["plain", "vllm", "fp32", "P4+8"]
    add("--arms", type=lambda t: t.split(","), default=arms, help=", ".join(ARMS))
    add("--batches", type=_points, default=[(128, None)], help="batch or batch:tokens, by commas")
    add("--tokens", type=int, default=256, help="of each request, where a batch names none")
    add("--drafts", type=int, default=4, help=f"draft tokens of a step, 1 to {MAX_DRAFTS}")
    add("--accepted", type=float, default=3.0, help="tokens that a step keeps on average")
    add("--length", type=int, default=2048, help="tokens that vLLM counts its concurrency for")
    add("--cache-gib", type=float, default=110.0, help="vLLM's cache at most")
    add_engine_options(parser)
    parser.set_defaults(host_parts=None, host_profile=None)
    add("--out", default=f"{OP}.json")
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child), measure_point)
        return 0
    return command(args, parser, OP, list(ARMS), report, _check, DraftEngine, _line)


def _check(args: argparse.Namespace) -> None:
    """Fill in the tokens of each batch. Raises ValueError for arguments that no run can take."""
    args.batches = [(b, args.tokens if t is None else t) for b, t in args.batches]
    for name in args.arms:
        arm_of(name)
    if not 1 <= args.drafts <= MAX_DRAFTS:
        raise ValueError(f"--drafts {args.drafts} is out of range; use 1 to {MAX_DRAFTS}")
    if not 1 <= args.accepted <= 1 + args.drafts:
        raise ValueError(f"--accepted {args.accepted} is out of range; use 1 to {1 + args.drafts}")
    longest = max(tokens for _, tokens in args.batches)
    if PROMPT + longest + args.drafts > args.length:
        raise ValueError(f"{longest} tokens need more than --length {args.length}; raise it")
    if min(tokens for _, tokens in args.batches) < 16 * (1 + args.drafts):
        raise ValueError(f"a batch needs {16 * (1 + args.drafts)} tokens or more to be timed")


if __name__ == "__main__":
    sys.exit(main())
