"""End-to-end decode speed in vLLM: ``python -m replayssm_quant.kernels.bench.e2e``.

Real geometries with dummy weights, one engine process an arm. A wave of engines starts together;
then each is measured alone, in turn. Decode time is (long - short) / (tokens between them), so the
prefill and the start of a batch do not count. Dummy weights say nothing about accuracy.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._paths import drop_checkout

NANO_4B = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    "hidden_size": 3136,
    "intermediate_size": 12544,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "vocab_size": 131072,
    "mamba_ssm_cache_dtype": "float32",
    "tie_word_embeddings": False,
}
QWEN_4B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": True,
}
COMMON = {"dtype": "bfloat16", "max_position_embeddings": 4096, "bos_token_id": 1}
MODELS = {"nemotron-3-nano-4b": NANO_4B, "qwen3.5-4b": QWEN_4B}

ARMS: dict[str, dict[str, Any]] = {
    "fp32": {"engine": {"mamba_ssm_cache_dtype": "float32"}},
    "fp16": {"engine": {"mamba_ssm_cache_dtype": "float16"}},
    "vllm-replay": {
        "engine": {"mamba_ssm_cache_dtype": "float32", "use_replayssm": True},
        "runner": "v1",
    },
    "fp32-v1": {"engine": {"mamba_ssm_cache_dtype": "float32"}, "runner": "v1"},
    "fp16+nvfp4": {"options": {"update_dtype": "fp16", "output_dtype": "nvfp4"}},
    "P4+8": {"options": {"update_dtype": "P4+8", "rotate": True}},
    "P4+8-v1": {"options": {"update_dtype": "P4+8", "rotate": True}, "runner": "v1"},
    "P8+4": {"options": {"update_dtype": "P8+4", "rotate": True}},
    "e4m3": {"options": {"update_dtype": "e4m3", "output_dtype": "same"}},
    "replayed-fp32": {"options": {"update_dtype": "fp32"}},
}
"""Plain vLLM (engine arguments), and this package (options of the plugin)."""


def measure(llm: Any, batch: int, short: int, long: int, repeats: int, vocab: int) -> dict:
    """Seconds of generating ``short`` and ``long`` tokens for a batch, the least of ``repeats``."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(16 + i % 7)]}
        for i in range(batch)
    ]

    def seconds(tokens: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(short)
    times = {n: [seconds(n) for n in (n,) * repeats] for n in (short, long)}
    step = (min(times[long]) - min(times[short])) / (long - short)
    return {
        "step_ms": step * 1e3,
        "tokens_per_s": batch / step,
        "short_s": times[short],
        "long_s": times[long],
    }


def child(job: Mapping[str, Any]) -> None:
    """One engine: start, say so, wait for a line, measure, write the result."""
    import vllm
    from vllm import LLM

    llm = LLM(**job["engine"])
    print("READY", flush=True)
    sys.stdin.readline()
    rows = {}
    for batch in job["batches"]:
        rows[str(batch)] = measure(
            llm, batch, job["short"], job["tokens"], job["repeats"], job["vocab"]
        )
    v2 = llm.llm_engine.vllm_config.use_v2_model_runner
    found = {"vllm": vllm.__version__, "runner": "v2" if v2 else "v1", "batches": rows}
    partial = Path(job["out"] + ".part")
    partial.write_text(json.dumps(found))
    os.replace(partial, job["out"])


def engine_arguments(model: Path, arm: Mapping[str, Any], args: argparse.Namespace) -> dict:
    """Arguments of ``vllm.LLM`` for an arm."""
    extra: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if "options" in arm:
        extra["replayssm_quant"] = arm["options"]
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": False,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.memory_share,
        "kv_cache_memory_bytes": int(args.cache_gib * 2**30),
        "compilation_config": {"cudagraph_capture_sizes": sorted(args.batches)},
        "additional_config": extra,
        **arm.get("engine", {}),
        **json.loads(args.engine),
    }


class Engine:
    """A child process and what it has said."""

    def __init__(self, name: str, arm: Mapping[str, Any], folder: Path, args: argparse.Namespace):
        model = folder / args.model
        model.mkdir(exist_ok=True)
        config = COMMON | MODELS[args.model]
        (model / "config.json").write_text(json.dumps(config))
        self.name, self.out, self.log = name, folder / f"{name}.json", folder / f"{name}.log"
        job = {
            "engine": engine_arguments(model, arm, args),
            "batches": args.batches,
            "short": args.short,
            "tokens": args.tokens,
            "repeats": args.repeats,
            "vocab": config["vocab_size"],
            "out": str(self.out),
        }
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if "runner" in arm:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0" if arm["runner"] == "v1" else "1"
        self.started = time.perf_counter()
        self.start_s = 0.0
        self.process = subprocess.Popen(
            [args.python, "-m", __spec__.name, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )

    def wait_ready(self, deadline: float) -> bool:
        """True once the engine is up; False if it died or time is up."""
        while time.perf_counter() < deadline and self.process.poll() is None:
            if "READY" in self.log.read_text(errors="replace"):
                self.start_s = self.start_s or time.perf_counter() - self.started
                return True
            time.sleep(0.3)
        return False

    def result(self, deadline: float) -> dict[str, Any]:
        """Let it measure; its numbers, or what went wrong."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            self.process.wait(max(1.0, deadline - time.perf_counter()))
        except (subprocess.TimeoutExpired, BrokenPipeError, OSError):
            pass
        log = self.log.read_text(errors="replace")
        found: dict[str, Any] = {"start_s": round(self.start_s, 1)}
        room = re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)
        found["max_concurrency"] = float(room[1]) if room else None
        said = re.search(r"replayssm_quant: (.*)", log)
        found["state"] = said[1] if said else "plain vLLM"
        if self.out.is_file():
            return found | json.loads(self.out.read_text())
        errors = [x for x in log.splitlines() if "Error" in x]
        return found | {"error": (errors or log.splitlines() or ["no output"])[-1][-500:]}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()


@contextlib.contextmanager
def _alone(lock: str | None) -> Iterator[None]:
    """Hold a file lock, so that benchmarks that share a GPU measure one at a time."""
    if lock is None:
        yield
        return
    with open(lock, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm in waves; results are written after each."""
    record: dict[str, Any] = {
        "model": args.model,
        "weights": "dummy",
        "tokens": args.tokens,
        "short": args.short,
        "cache_gib": args.cache_gib,
        "max_model_len": args.max_model_len,
        "arms": {},
    }
    end = time.perf_counter() + args.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.logs) if args.logs else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(0, len(args.arms), args.parallel):
            wave = [Engine(a, ARMS[a], folder, args) for a in args.arms[i : i + args.parallel]]
            try:
                for engine in wave:
                    engine.wait_ready(end)
                for engine in wave:
                    with _alone(args.lock):
                        record["arms"][engine.name] = engine.result(end)
                        engine.stop()
                    _write(args.out, record)
                    print(_line(engine.name, record["arms"][engine.name]), flush=True)
            finally:
                for engine in wave:
                    engine.stop()
    return record


def _line(name: str, result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"{name}: failed: {result['error']}"
    rows = ", ".join(f"batch {b}: {r['step_ms']:.2f} ms" for b, r in result["batches"].items())
    return (
        f"{name} ({result['runner']}, vLLM {result['vllm']}): {rows}; room for "
        f"{result['max_concurrency']} requests; started in {result['start_s']} s"
    )


def _write(out: str, record: Mapping[str, Any]) -> None:
    partial = Path(out + ".part")
    partial.write_text(json.dumps(record, indent=1))
    os.replace(partial, out)


def main(argv: Sequence[str] | None = None) -> int:
    drop_checkout()
    parser = argparse.ArgumentParser(prog="python -m replayssm_quant.kernels.bench.e2e")
    add = parser.add_argument
    add("--child", help=argparse.SUPPRESS)
    add("--model", choices=MODELS, default="nemotron-3-nano-4b")
    add("--arms", type=lambda t: t.split(","), default=["fp32", "P4+8"], help=", ".join(ARMS))
    add("--batches", type=lambda t: [int(b) for b in t.split(",")], default=[256])
    add("--tokens", type=int, default=1016, help="of the long run")
    add("--short", type=int, default=16, help="tokens of the short run")
    add("--repeats", type=int, default=2)
    add("--parallel", type=int, default=1, help="engines that start together")
    add("--cache-gib", type=float, default=36.0, help="vLLM's cache, the same for every arm")
    add("--memory-share", type=float, default=0.2)
    add("--max-model-len", type=int, default=2048)
    add("--seconds", type=float, default=3600.0, help="for everything together")
    add("--engine", default="{}", help="more arguments of vllm.LLM, as JSON")
    add("--python", default=sys.executable, help="interpreter that has vLLM")
    add("--lock", help="a file to lock while measuring")
    add("--logs", help="keep the engines' logs in this folder")
    add("--out", default="e2e.json")
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return 0
    unknown = [a for a in args.arms if a not in ARMS]
    if unknown:
        parser.error(f"unknown arm {unknown[0]}; known: {', '.join(ARMS)}")
    record = run(args)
    return int(all("error" in r for r in record["arms"].values()))


if __name__ == "__main__":
    sys.exit(main())
