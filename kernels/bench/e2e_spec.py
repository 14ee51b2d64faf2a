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
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._paths import drop_checkout
from ...backends.vllm.page import request_bytes
from ...config import StateConfig
from ...state.geometry import LayerGeometry, read_geometry
from ...state.layout import MAX_DRAFTS, StateLayout, fp32_bytes
from .e2e import COMMON, MODELS, PROMPT, RESULTS, Engine, _alone, _points, write_tuned
from .report import _number, _order, _table, _write

OP = "e2e_spec_decode_throughput"
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
    return ARMS[name]


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
    config, geometry = MODELS[model], read_geometry(MODELS[model])
    layers = geometry.layers.values()
    attention = geometry.total_layers - len(layers)
    if "hybrid_override_pattern" in config:
        attention = str(config["hybrid_override_pattern"]).count("*")
    token = 4 * config["num_key_value_heads"] * config["head_dim"]  # type: ignore[operator]
    page = max(page_bytes(g, arm, drafts) for g in layers)
    one = request_bytes(page, len(layers), attention, token, tokens, states(arm, drafts))
    return (batch + 2) * one


def measure(llm: Any, batch: int, tokens: int, vocab: int) -> dict[str, Any]:
    """Tokens and time of the steps in which as many requests ran as find room together.

    Raises RuntimeError if there are too few of them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocab) for _ in range(PROMPT - 6 + i % 7)] for i in range(batch)]
    engine = llm.llm_engine
    core, seen = engine.engine_core, []
    get_output = core.get_output

    def noted() -> Any:
        found = get_output()
        new = [len(o.new_token_ids) for o in found.outputs]
        ended = any(o.finish_reason is not None for o in found.outputs)
        seen.append((time.perf_counter(), len(new), sum(new), ended))
        return found

    def answer(count: int, name: str) -> None:
        seen.clear()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()

    core.get_output = noted
    try:
        answer(16, "warm")
        answer(tokens, "timed")
    finally:
        core.get_output = get_output
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


def child(job: Mapping[str, Any]) -> None:
    """One engine: start, say so; for each line on stdin measure and write all rows so far."""
    import torch
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    llm = LLM(**job["engine"])
    v2 = llm.llm_engine.vllm_config.use_v2_model_runner
    found = {
        "gpu": "none" if current_platform.is_cpu() else current_platform.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "runner": "v2" if v2 else "v1",
        "rows": [],
    }
    print("READY", flush=True)
    for line in sys.stdin:
        point = json.loads(line)
        try:
            row = measure(llm, point["batch"], point["tokens"], job["vocab"])
        except RuntimeError as error:
            row = {**point, "error": str(error)}
        found["rows"].append(row)
        _write(Path(job["out"]), json.dumps(found))


def engine_arguments(model: Path, arm: Mapping[str, Any], args: argparse.Namespace) -> dict:
    """Arguments of ``vllm.LLM`` for an arm, whose configuration is in the folder ``model``."""
    extra: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if "options" in arm:
        extra["replayssm_quant"] = arm["options"]
    batches = sorted({batch for batch, _ in args.batches})
    width = 1 + args.drafts if arm["drafts"] else 1
    needed = max(
        cache_bytes(args.model, arm, b, PROMPT + t + args.drafts, args.drafts)
        for b, t in args.batches
    )
    made: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_model_len": args.length,
        "max_num_seqs": batches[-1],
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.memory_share,
        "kv_cache_memory_bytes": min(needed, int(args.cache_gib * 2**30)),
        "compilation_config": {"cudagraph_capture_sizes": [b * width for b in batches]},
        "additional_config": extra,
    }
    if "options" in arm:
        del made["mamba_ssm_cache_dtype"]
    if arm["drafts"]:
        made["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.accepted,
        }
    return made | json.loads(args.engine)


class DraftEngine(Engine):
    """A child process of this module."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, tuned: Path):
        model = folder / f"{args.model}-{name}"
        model.mkdir(exist_ok=True)
        config = COMMON | MODELS[args.model]
        (model / "config.json").write_text(json.dumps(config))
        self.name, self.out, self.log = name, folder / f"{name}.json", folder / f"{name}.log"
        self.args, self.engine = args, engine_arguments(model, arm_of(name), args)
        job = {"engine": self.engine, "vocab": config["vocab_size"], "out": str(self.out)}
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_TUNED_CONFIG_FOLDER", str(tuned))
        self.started, self.start_s, self.asked = time.perf_counter(), 0.0, 0
        self.out.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [args.python, "-m", __spec__.name, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )

    def rows(self, model: str) -> list[dict[str, Any]]:
        """A row for each point; one with an error where there is none."""
        log = self.log.read_text(errors="replace")
        room = re.search(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log)
        said = re.search(r"replayssm_quant: (.*)", log)
        arm, drafts = arm_of(self.name), self.args.drafts
        layers = read_geometry(MODELS[model]).layers.values()
        common: dict[str, Any] = {
            "op": OP,
            "model": model,
            "arm": self.name,
            "weights": "dummy",
            "drafts": drafts if arm["drafts"] else 0,
            "accepted": self.args.accepted if arm["drafts"] else 1.0,
            "state": said[1] if said else "plain vLLM",
            "state_bytes": states(arm, drafts) * sum(page_bytes(g, arm, drafts) for g in layers),
            "cache_gib": round(self.engine["kv_cache_memory_bytes"] / 2**30, 3),
            "max_concurrency": float(room[2]) if room else None,
            "concurrency_tokens": int(room[1].replace(",", "")) if room else None,
            "start_s": round(self.start_s, 1),
        }
        if self.out.is_file():
            found = json.loads(self.out.read_text())
            rows = found.pop("rows")
            return [common | found | row for row in rows]
        if self.process.poll() is None:
            return [common | {"error": f"ran out of time, {'up' if self.start_s else 'starting'}"}]
        errors = [x for x in log.splitlines() if "Error" in x]
        return [common | {"error": (errors or log.splitlines() or ["no output"])[-1][-500:]}]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Arms in waves, each point through all engines of a wave; rows are written as they come."""
    from .run import provenance

    origin = provenance()
    gpu = origin["gpu"]
    origin = {k: v for k, v in origin.items() if k not in ("gpu", "torch", "vllm")}
    done: list[dict[str, Any]] = []
    end = time.perf_counter() + args.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.logs) if args.logs else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tuned = write_tuned(folder / "tuned", gpu)
        for i in range(0, len(args.arms), args.parallel):
            wave = [DraftEngine(a, folder, args, tuned) for a in args.arms[i : i + args.parallel]]
            rows: list[dict[str, Any]] = []
            try:
                for engine in wave:
                    engine.wait_ready(end)
                for batch, tokens in args.batches:
                    with _alone(args.lock):
                        for engine in wave:
                            engine.measure(batch, tokens, end)
                    rows = [origin | r for engine in wave for r in engine.rows(args.model)]
                    _write(Path(args.out), json.dumps(done + rows, indent=1) + "\n")
                done += rows
                for row in rows:
                    print(_line(row), flush=True)
            finally:
                for engine in wave:
                    engine.close()
                for engine in wave:
                    engine.stop()
    return done


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['arm']}: failed: {row['error']}"
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
room together. *x vllm* divides tokens/s by those of *vllm* in the same run. *state* is what one
request keeps in its recurrent layers. *room* is vLLM's own "Maximum concurrency" for requests of
{tokens} tokens, scaled to a cache of {budget} GiB.

"""
BUDGET_GIB = 100
TARGETS = (("x vllm, batch 512", 1.9), ("room, x vllm", 3.3))
"""What the best split arm is to reach."""


def _room(row: Mapping[str, Any]) -> float | None:
    room = row["max_concurrency"]
    return None if room is None else room * BUDGET_GIB / row["cache_gib"]


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of one model."""
    failed = [r for r in rows if "error" in r]
    rows = [r for r in rows if "error" not in r]
    first = (rows or failed)[0]
    lines = [f"## {first['model']}", ""]
    if rows:
        lines += [
            f"{first['gpu']}, {first['date']}, commit {str(first['commit'])[:7]}, vLLM "
            f"{first['vllm']}, torch {first['torch']}, triton {first['triton']}.",
            "",
        ]
    for note in dict.fromkeys(r["note"] for r in rows if "note" in r):
        lines += [note, ""]
    reached: dict[str, list[float]] = {name: [] for name, _ in TARGETS}
    for batch, drafts in dict.fromkeys((r["batch"], max(r["drafts"], 0)) for r in rows):
        here = [r for r in rows if r["batch"] == batch]
        if not drafts and any(r["drafts"] for r in here):
            continue  # in the table of those with drafts
        base = next((r for r in here if r["arm"] == "vllm"), None)
        kept = next((r["accepted"] for r in here if r["drafts"]), 1.0)
        lines += [f"### Batch {batch}, {drafts} drafts, {kept:.2f} tokens a step", ""]
        table = []
        for row in here:
            ratio = row["tokens_per_s"] / base["tokens_per_s"] if base else None
            room = _room(row)
            if base and row["arm"] not in ("plain", "vllm"):
                if batch == 512 and ratio:
                    reached[TARGETS[0][0]].append(ratio)
                if room and _room(base):
                    reached[TARGETS[1][0]].append(room / _room(base))  # type: ignore[operator]
            line = [row["arm"], row["runner"], str(row["running"]), f"{row['tokens_per_s']:,.0f}"]
            line += [_number(ratio), f"{row['step_ms']:.2f}", f"{row['tokens_a_step']:.2f}"]
            line += [f"{row['state_bytes'] / 2**20:.1f}", _number(room, "{:.0f}")]
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
    for arm in _order(failed, "arm"):
        why = next(r["error"] for r in failed if r["arm"] == arm)
        lines += [f"{arm} failed: {why}", ""]
    return lines


def report(folder: Path, target: Path) -> Path:
    """E2E_SPEC.md in ``target`` from each model's newest rows. Raises ValueError if none."""
    newest: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"{OP}-*.json")):  # sorted: a later date replaces
        rows = json.loads(path.read_text(encoding="utf-8"))
        for model in _order(rows, "model"):
            newest[model] = [r for r in rows if r["model"] == model]
    if not newest:
        raise ValueError(f"no {OP} file in {folder}; run the benchmark on a GPU first")
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
    add("--parallel", type=int, default=1, help="engines that start together")
    add("--cache-gib", type=float, default=110.0, help="vLLM's cache at most")
    add("--memory-share", type=float, default=0.05)
    add("--seconds", type=float, default=3600.0, help="for everything together")
    add("--engine", default="{}", help="more arguments of vllm.LLM, as JSON")
    add("--python", default=sys.executable, help="interpreter that has vLLM")
    add("--lock", help="a file to lock while measuring")
    add("--logs", help="keep the engines' logs in this folder")
    add("--out", default=f"{OP}.json")
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return 0
    try:
        if args.report:
            print(report(RESULTS, RESULTS.parent))
            return 0
        args.batches = [(b, args.tokens if t is None else t) for b, t in args.batches]
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    rows = run(args)
    return int(all("error" in r for r in rows))


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that no run can take."""
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
