"""End-to-end decode speed in vLLM: ``python -m replayssm_quant.kernels.bench.e2e``.

Real geometries with dummy weights, one engine process an arm. A wave of engines starts together;
then each is measured alone, in turn. A measurement is one batch of requests that decode in step;
only engine steps that gave a token to every request of the batch count, so neither prefills nor the
start and the end of the batch do. Dummy weights say nothing about accuracy.

Every arm runs on the leaner host of ``host``, or, with ``-served``, on vLLM's as it is.

``--plan`` takes waves of engines of several models and batches from a file, so that one run on one
machine has them all. ``--add`` puts the rows of a run in the place of the committed ones, and
``--report`` makes the tables of E2E.md from those.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gzip
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..._paths import drop_checkout
from ...backends.vllm.page import request_bytes
from ...config import StateConfig
from ...state.geometry import LayerGeometry, read_geometry
from . import host
from .report import _number, _order, _table, _write

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
    "fp16+nvfp4": {"options": {"update_dtype": "fp16", "output_dtype": "nvfp4"}},
    "P4+8": {"options": {"update_dtype": "P4+8", "rotate": True}},
    "P8+4": {"options": {"update_dtype": "P8+4", "rotate": True}},
    "e4m3": {"options": {"update_dtype": "e4m3", "output_dtype": "same"}},
    "replayed-fp32": {"options": {"update_dtype": "fp32"}},
}
"""Plain vLLM (engine arguments), and this package (options of the plugin)."""
SUFFIXES: dict[str, dict[str, Any]] = {
    "v1": {"runner": "v1"},
    "v2": {"runner": "v2"},
    "bare": {"plugins": "none"},
    "served": {"host": "served"},
    "oneprocess": {"host": "oneprocess"},
    "stagger": {"stagger": True},
}
"""``fp32-v1`` runs an arm under one of vLLM's model runners, ``fp32-bare`` without any plugin,
``P4+8-stagger`` spreads the flushes of a batch over the steps of a window. ``fp32-served`` leaves
the host to vLLM, scheduler and model in a process of their own, and staggers as the plugin does
unless it is told otherwise; ``fp32-oneprocess`` has them in the
process that asks, where the leaner host of all other arms is, and changes nothing else."""

SPREAD = (0.0, 0.05, 0.25, 0.75, 0.95, 0.99)
"""Quantiles of the steps in a row: flushes of a whole batch at once show as a second mode."""

PROFILE_STEPS = 32
"""Steps of the trace that ``--profile`` takes."""

PROMPT = 22
"""Tokens of the longest prompt."""
REHEARSED = 0.6
"""Share of the cache in a rehearsal; vLLM wants a block for each request that may run."""
RESULTS = Path(__file__).parent / "results"
OP = "e2e_decode_speedup"
PROFILE = "e2e_profile"
HOST_PARTS = "e2e_host_parts"
HOST_PROFILE = "e2e_host_profile"
BUDGET_GIB = 30
"""Cache in which the tables count the requests that find room."""


def arm_of(name: str) -> dict[str, Any]:
    """The arm of a name, which may end in a suffix. Raises ValueError for an unknown name."""
    base, _, suffix = name.rpartition("-")
    if name in ARMS:
        return at_once(ARMS[name])
    if base in ARMS and suffix == "stagger" and "options" in ARMS[base]:
        return ARMS[base] | {"options": ARMS[base]["options"] | SUFFIXES[suffix]}
    if base in ARMS and suffix in SUFFIXES and suffix != "stagger":
        arm = ARMS[base] if suffix == "served" else at_once(ARMS[base])
        return arm | SUFFIXES[suffix]
    raise ValueError(
        f"unknown arm '{name}'; known: {', '.join(ARMS)}, each with -{', -'.join(SUFFIXES)} or not"
    )


def at_once(arm: dict[str, Any]) -> dict[str, Any]:
    """The arm with all rows flushing together, where the plugin would stagger them."""
    if "options" not in arm:
        return arm
    return arm | {"options": arm["options"] | {"stagger": False}}


def host_of(arm: Mapping[str, Any]) -> str:
    """How an arm's host runs: ``lean``, ``oneprocess`` or ``served``."""
    return arm.get("host", "lean")


def page_bytes(layer: LayerGeometry, arm: Mapping[str, Any]) -> int:
    """Bytes that one request keeps in one recurrent layer, its bf16 convolution state included."""
    from ...state.layout import StateLayout, fp32_bytes

    conv = (layer.conv_kernel - 1) * layer.conv_channels * 2
    if "options" in arm:
        config = StateConfig.from_dict(arm["options"])
        return conv + -conv % 128 + StateLayout(layer, config, "bf16").page_bytes
    engine = arm["engine"]
    nbytes = conv + fp32_bytes(layer)
    if engine["mamba_ssm_cache_dtype"] == "float16":
        nbytes -= fp32_bytes(layer) // 2
    if engine.get("use_replayssm"):  # 16 tokens of x and B in bf16, dt in fp32
        nbytes += 16 * (2 * layer.heads * layer.rows + 2 * layer.groups * layer.n + 4 * layer.heads)
    return nbytes


def state_bytes(model: str, arm: Mapping[str, Any]) -> int:
    """Bytes that one request keeps in all recurrent layers of a model."""
    return sum(page_bytes(g, arm) for g in read_geometry(MODELS[model]).layers.values())


def cache_bytes(model: str, arm: Mapping[str, Any], batch: int, length: int) -> int:
    """Bytes of vLLM's cache in which ``batch`` requests of ``length`` tokens find room."""
    page = max(page_bytes(g, arm) for g in read_geometry(MODELS[model]).layers.values())
    return (batch + 2) * bytes_of_request(model, page, length)


def bytes_of_request(model: str, page: int, tokens: int, states: int = 1) -> int:
    """Bytes of cache that vLLM counts for a request with ``states`` pages in a recurrent layer."""
    config, geometry = MODELS[model], read_geometry(MODELS[model])
    attention = geometry.total_layers - len(geometry.layers)
    if "hybrid_override_pattern" in config:
        attention = str(config["hybrid_override_pattern"]).count("*")
    token = 4 * config["num_key_value_heads"] * config["head_dim"]  # type: ignore[operator]
    return request_bytes(page, len(geometry.layers), attention, token, tokens, states)


def write_tuned(folder: Path, gpu: str, results: Path = RESULTS) -> Path:
    """A folder for VLLM_TUNED_CONFIG_FOLDER: launches of vLLM's native Mamba-2 kernel.

    They are those that the kernel benchmark on this GPU found best at the nearest number of heads
    times batch; without its result file there are none. vLLM brings none for this head size.
    """
    from .registry import OPS
    from .run import gpu_slug

    geometries = OPS["mamba2_decode"].geometries

    folder.mkdir(exist_ok=True)
    found = sorted(results.glob(f"mamba2_decode-{gpu_slug(gpu)}-*.json"))
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for row in json.loads(found[-1].read_text()) if found else []:
        native = re.fullmatch(r"vllm-native-fp(16|32)", row["design"])
        if native and row["geometry"] in geometries and len(row.get("launch") or ()) == 2:
            rows = str(row["batch"] * geometries[row["geometry"]].heads)
            launch = dict(zip(("BLOCK_SIZE_M", "num_warps"), row["launch"], strict=True))
            tables.setdefault(f"float{native[1]}", {})[rows] = launch
    shape = f"headdim={NANO_4B['mamba_head_dim']},dstate={NANO_4B['ssm_state_size']}"
    for dtype, table in tables.items():
        name = f"{shape},device_name={re.sub(r'[ /]+', '_', gpu)},cache_dtype={dtype}.json"
        (folder / name).write_text(json.dumps(table))
    return folder


@contextlib.contextmanager
def noting(llm: Any, note: Callable[[Any], object]) -> Iterator[None]:
    """Call ``note`` with what each step of the engine puts out."""
    core = llm.llm_engine.engine_core
    get_output = core.get_output

    def noted() -> Any:
        found = get_output()
        note(found)
        return found

    core.get_output = noted
    try:
        yield
    finally:
        core.get_output = get_output


def generate(llm: Any, batch: int, tokens: int, vocab: int, name: str) -> float:
    """Let ``batch`` requests of short random prompts get ``tokens`` tokens; when it began."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(0)
    prompts = [[rng.randrange(3, vocab) for _ in range(PROMPT - 6 + i % 7)] for i in range(batch)]
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{name}{i}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return start


def measure(llm: Any, batch: int, tokens: int, vocab: int, warm: int = 20) -> dict[str, Any]:
    """Times of the engine steps in which all requests of a batch got a token."""
    seen: list[tuple[float, int]] = []
    with noting(llm, lambda found: seen.append((time.perf_counter(), len(found.outputs)))):
        if warm:
            generate(llm, batch, warm, vocab, "warm")
        seen.clear()
        start = generate(llm, batch, tokens, vocab, "timed")
    full = [at for at, count in seen if count == batch]
    if len(full) < 0.75 * tokens:
        raise RuntimeError(
            f"only {len(full)} of {tokens} steps had all of {batch} requests: the cache is too "
            "small for the batch"
        )
    steps = [(b - a) * 1e3 for a, b in zip(full[2:], full[3:], strict=False)]
    steps_sorted = sorted(steps)
    mean = (full[-1] - full[2]) * 1e3 / len(steps)
    return {
        "batch": batch,
        "tokens": tokens,
        "steps": len(steps),
        "step_ms": round(mean, 4),
        "median_ms": round(statistics.median(steps), 4),
        "p90_ms": round(steps_sorted[int(0.9 * len(steps))], 4),
        "tokens_per_s": round(batch / mean * 1e3, 1),
        "first_full_step_s": round(full[0] - start, 4),
        "spread_ms": [round(steps_sorted[int(q * len(steps))], 4) for q in SPREAD],
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def read_trace(path: Path, top: int = 40, steps: int = PROFILE_STEPS) -> dict[str, Any]:
    """Time of a trace's GPU kernels: the longest by name, and the share of the span with any.

    ``path`` is what torch's profiler writes (Chrome trace JSON, gzip or not); its times are in
    microseconds. Kernels that run beside each other count once in ``busy_us`` and each in
    ``kernels``. Raises ValueError if it holds no kernel.
    """
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with opened as stream:
        events = json.load(stream)["traceEvents"]
    found = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in KERNEL_EVENTS)
    if not found:
        raise ValueError(f"{path.name} holds no GPU kernel; does the profiler see the GPU?")
    total: dict[str, list[float]] = {}
    busy, until = 0.0, found[0][0]
    for at, took, name in found:
        entry = total.setdefault(name[:80], [0, 0.0])
        entry[0] += 1
        entry[1] += took
        busy += max(0.0, at + took - max(until, at))
        until = max(until, at + took)
    longest = sorted(total.items(), key=lambda item: -item[1][1])[:top]
    return {
        "steps": steps,
        "span_us": round(until - found[0][0], 1),
        "busy_us": round(busy, 1),
        "kernels": [[name, int(n), round(us, 1)] for name, (n, us) in longest],
    }


KERNEL_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""What a GPU does, as torch's profiler calls it."""


def profile(
    llm: Any, batch: int, vocab: int, folder: Path, steps: int = PROFILE_STEPS, tokens: int = 0
) -> dict[str, Any]:
    """Where the GPU's time goes in ``steps`` decode steps of a batch that gets ``tokens`` tokens.

    They are those after the eighth in which as many requests got a token as ever before.
    """
    engine, full, most = llm.llm_engine, 0, 1

    def trace(found: Any) -> None:
        nonlocal full, most
        if len(found.outputs) > most and full < 8:
            full, most = 0, len(found.outputs)
        if len(found.outputs) == most:
            full += 1
            if full in (8, 8 + steps):
                (engine.start_profile if full == 8 else engine.stop_profile)()

    with noting(llm, trace):
        generate(llm, batch, tokens or steps + 16, vocab, "traced")
    traces = sorted(folder.glob("*.json*"), key=lambda p: p.stat().st_mtime)
    if not traces:
        raise RuntimeError("the engine's profiler wrote no trace")
    return read_trace(traces[-1], steps=steps)


def profile_host(llm: Any, batch: int, vocab: int) -> dict[str, Any]:
    """Where the main thread spends its time in ``HOST_STEPS`` decode steps of a batch."""
    sampler, threads, full = host.Sampler(), {}, 0

    def sample(found: Any) -> None:
        nonlocal full, threads
        if len(found.outputs) != batch:
            return
        full += 1
        if full == 8:
            threads = host.thread_seconds()
            sampler.__enter__()
        elif full == 8 + HOST_STEPS:
            sampler.__exit__()
            now = host.thread_seconds()
            threads = {k: (v - threads.get(k, 0.0)) / HOST_STEPS * 1e3 for k, v in now.items()}

    with noting(llm, sample):
        measure(llm, batch, HOST_STEPS + 16, vocab, warm=0)
    busy = {k: round(v, 3) for k, v in sorted(threads.items(), key=lambda i: -i[1]) if v > 0.05}
    step = round(sampler.total / HOST_STEPS * 1e3, 4)
    return {"steps": HOST_STEPS, "step_ms": step, "threads_ms": busy, **sampler.table(HOST_STEPS)}


HOST_STEPS = 150
"""Steps of the sampling that ``--host-profile`` does."""


def measure_point(llm: Any, point: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a point: of a batch and its tokens, or of a batch for what else it asks."""
    batch, kind = point["batch"], point.get("kind", OP)
    if kind == PROFILE:
        folder = Path(job["engine"]["profiler_config"]["torch_profiler_dir"])
        row = profile(llm, batch, job["vocab"], folder)
    elif kind == HOST_PROFILE:
        row = profile_host(llm, batch, job["vocab"])
    else:
        row = measure(llm, batch, point["tokens"], job["vocab"])
    parts = {"parts": point["parts"]} if "parts" in point else {}
    return row | {"op": kind, "batch": batch} | parts


def model_runner(llm: Any) -> Any:
    """vLLM's model runner, if it is in this process."""
    try:
        core = llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner
    except AttributeError:
        return None


def child(job: Mapping[str, Any], row_of: Callable[..., dict[str, Any]] = measure_point) -> None:
    """One engine: start, say so; for each line on stdin measure and write all rows so far.

    ``row_of`` takes the engine, the point and the job; its RuntimeError or ValueError is a row.
    """
    import torch
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    quiet, others = host.split_cores(job.get("cores", 0))
    host.move_to(others)
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
            host.move_to(quiet)
            parts = point.get("parts", job["parts"])
            with host.lean(parts, model_runner(llm), llm.llm_engine.output_processor):
                row = row_of(llm, point, job)
        except (RuntimeError, ValueError) as error:
            row = {**point, "error": str(error)}
        finally:
            host.move_to(others)
        found["rows"].append(row)
        _write(Path(job["out"]), json.dumps(found))
    if model_runner(llm) is not None:  # all of vLLM is in this process: no need to take it apart
        sys.stdout.flush()
        os._exit(0)


def engine_arguments(model: Path, arm: Mapping[str, Any], args: argparse.Namespace) -> dict:
    """Arguments of ``vllm.LLM`` for an arm, whose configuration is in the folder ``model``."""
    extra: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if "options" in arm:  # elsewhere every arm has the shortcut, or none
        extra["replayssm_quant"] = arm["options"] | {"block_shortcut": host_of(arm) == "served"}
    batches = sorted({batch for batch, _ in args.batches})
    cache = args.cache_gib * 2**30
    if not cache:
        lengths = [(batch, length_of(tokens)) for batch, tokens in asked(args)]
        cache = max(cache_bytes(args.model, arm, b, n) for b, n in lengths)
        cache *= REHEARSED if args.rehearse else 1
    profiler = profiler_arguments(model) if args.profile is not None else {}
    made = common_arguments(model, batches[-1], int(cache), args.memory_share)
    made |= {
        "max_model_len": max(length_of(tokens) for _, tokens in asked(args)),
        "compilation_config": {"cudagraph_capture_sizes": batches},
        "additional_config": extra,
    }
    return made | profiler | arm.get("engine", {}) | json.loads(args.engine)


def profiler_arguments(model: Path) -> dict[str, Any]:
    """Arguments for traces of the GPU, in the folder ``model``."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(model.absolute() / "trace"),
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return {"profiler_config": config}


def common_arguments(model: Path, batch: int, cache: int, memory_share: float) -> dict[str, Any]:
    """What every engine here is started with: ``cache`` bytes for up to ``batch`` requests."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": False,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": memory_share,
        "kv_cache_memory_bytes": cache,
    }


def length_of(tokens: int) -> int:
    """Tokens of a request whose response has ``tokens``, rounded up to 16."""
    return 16 * math.ceil((PROMPT + tokens + 1) / 16)


def asked(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(batch, tokens of each response) of all that an engine is to measure."""
    largest, _ = max(args.batches)
    out = list(args.batches)
    if args.profile is not None:
        out.append((args.profile or largest, PROFILE_STEPS + 16))
    if args.host_profile is not None:
        out.append((largest, HOST_STEPS + 16))
    return out


class Engine:
    """A child process and what it has said."""

    module = __spec__.name
    """What the child runs."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, tuned: Path):
        model = folder / f"{args.model}-{name}"
        model.mkdir(exist_ok=True)
        config = COMMON | MODELS[args.model]
        (model / "config.json").write_text(json.dumps(config))
        stem = f"{model.name}-{max(args.batches)[0]}"
        self.name, self.out, self.log = name, folder / f"{stem}.json", folder / f"{stem}.log"
        self.args, self.arm = args, self.find_arm(name)
        self.engine = self.arguments(model)
        self.host = host_of(self.arm)
        job = {
            "engine": self.engine,
            "vocab": config["vocab_size"],
            "out": str(self.out),
            "parts": list(host.PARTS) if self.host == "lean" else [],
            "cores": 0 if self.host == "served" else args.cores,
        }
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_TUNED_CONFIG_FOLDER", str(tuned))
        if "runner" in self.arm:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0" if self.arm["runner"] == "v1" else "1"
        if "plugins" in self.arm:
            env["VLLM_PLUGINS"] = self.arm["plugins"]
        env.pop("OMP_NUM_THREADS", None)  # vLLM then serves with one thread, else with them all
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.host == "served" else "0"
        self.started = time.perf_counter()
        self.start_s, self.asked = 0.0, 0
        self.out.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [args.python, "-m", self.module, "--child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )

    def find_arm(self, name: str) -> dict[str, Any]:
        """The arm of a name."""
        return arm_of(name)

    def arguments(self, model: Path) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``; the model's configuration is in the folder ``model``."""
        return engine_arguments(model, self.arm, self.args)

    def about(self, model: str) -> dict[str, Any]:
        """What its rows say beyond what it measured."""
        return {"op": OP, "state_bytes": state_bytes(model, self.arm)}

    def wait_ready(self, deadline: float) -> bool:
        """True once the engine is up; False if it died or time is up."""
        while self.process.poll() is None:
            if "READY" in self.log.read_text(errors="replace"):
                self.start_s = self.start_s or time.perf_counter() - self.started
                return True
            if time.perf_counter() >= deadline:
                break
            time.sleep(0.3)
        return False

    def takes(self, point: Mapping[str, Any]) -> bool:
        """Whether a point is for this engine; what is asked of a host needs it in one process."""
        chosen = {HOST_PARTS: self.args.host_parts, HOST_PROFILE: self.args.host_profile}
        names = chosen.get(point.get("kind", OP))
        return names is None or (self.host != "served" and (not names or self.name in names))

    def measure(self, point: Mapping[str, Any], deadline: float) -> None:
        """Let it measure one point, and wait for it. It ends if that takes too long."""
        if not self.start_s or self.process.poll() is not None:
            return
        if not self.takes(point):
            return
        self.asked += 1
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(point) + "\n")
            self.process.stdin.flush()
        until = min(deadline, time.perf_counter() + self.args.point_seconds)
        while time.perf_counter() < until and self.process.poll() is None:
            if self.out.is_file() and len(json.loads(self.out.read_text())["rows"]) >= self.asked:
                return
            time.sleep(0.05)
        if until < deadline:  # what hangs must not disturb the others
            self.process.kill()

    def rows(self, model: str) -> list[dict[str, Any]]:
        """A row for each point; one with an error where there is none."""
        log = self.log.read_text(errors="replace")
        room = re.search(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log)
        said = re.search(r"replayssm_quant: (.*)", log)
        common: dict[str, Any] = {
            **self.about(model),
            "model": model,
            "arm": self.name,
            "host": self.host,
            "weights": "dummy",
            "state": said[1] if said else "plain vLLM",
            "cache_gib": round(self.engine["kv_cache_memory_bytes"] / 2**30, 3),
            "max_concurrency": float(room[2]) if room else None,
            "concurrency_tokens": int(room[1].replace(",", "")) if room else None,
            "start_s": round(self.start_s, 1),
        }
        rows: list[dict[str, Any]] = []
        if self.out.is_file():
            found = json.loads(self.out.read_text())
            rows = [common | found | row for row in found.pop("rows")]
        if self.process.poll() is None:
            why = f"ran out of time, {'up' if self.start_s else 'starting'}"
            return rows or [common | {"error": why}]
        if len(rows) < self.asked or not rows:
            errors = [x for x in log.splitlines() if "Error" in x]
            why = (errors or log.splitlines() or ["no output"])[-1][-500:]
            rows.append(common | {"error": why})
        return rows

    def close(self) -> None:
        """Ask it to end; one that has not come up is ended."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        if not self.start_s:
            self.process.kill()

    def stop(self) -> None:
        """Wait for the end, so that its memory is free."""
        for end in (lambda: None, self.process.terminate, self.process.kill):
            if self.process.poll() is not None:
                return
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(12)


@contextlib.contextmanager
def _alone(lock: str | None) -> Iterator[None]:
    """Hold a file lock, so that benchmarks that share a GPU measure one at a time."""
    if lock is None:
        yield
        return
    with open(lock, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def points_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each engine is to measure, in this order: the batches, then profiles."""
    timed: list[dict[str, Any]] = [{"batch": b, "tokens": t} for b, t in args.batches]
    if args.rehearse:
        return [timed[0] | {"tokens": 8}]
    largest, tokens = max(args.batches)
    more: list[dict[str, Any]] = []
    if args.profile is not None:
        more.append({"batch": args.profile or largest, "tokens": None, "kind": PROFILE})
    if args.host_profile is not None:
        more.append({"batch": largest, "tokens": None, "kind": HOST_PROFILE})
    if args.host_parts is not None:
        names = [[], *([n] for n in host.PARTS), list(host.PARTS)]
        some = {"batch": largest, "tokens": min(tokens, 120), "kind": HOST_PARTS}
        more += [some | {"parts": parts} for parts in names]
    return [*timed, *more]


def read_plan(
    path: Path, parser: argparse.ArgumentParser, args: argparse.Namespace
) -> list[list[argparse.Namespace]]:
    """Waves of engines from a file: a line of options for engines alike, an empty one after a wave.

    Lines take what they do not say from ``args``. '#' begins a comment. Raises ValueError if the
    file names no engine.
    """
    waves: list[list[argparse.Namespace]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            continue
        if words := shlex.split(line, comments=True):
            waves[-1].append(parser.parse_args(words, copy.copy(args)))
        else:
            waves.append([])
    if not any(waves):
        raise ValueError(f"{path} names no engine; write a line of options for each kind of them")
    return [wave for wave in waves if wave]


Wave = Sequence[tuple[str, argparse.Namespace]]


def waves_of(args: argparse.Namespace, plan: Sequence[Sequence[argparse.Namespace]]) -> list[Wave]:
    """Engines that are up together, each an arm and its arguments: of a plan, if there is one."""
    if plan:
        return [[(name, line) for line in wave for name in line.arms] for wave in plan]
    arms = [(name, args) for name in args.arms]
    return [arms[i : i + args.parallel] for i in range(0, len(arms), args.parallel)]


def run(
    args: argparse.Namespace,
    kind: type[Engine] = Engine,
    line: Callable[[Mapping[str, Any]], str] | None = None,
    plan: Sequence[Sequence[argparse.Namespace]] = (),
) -> list[dict[str, Any]]:
    """Arms in waves, each point through all engines of a wave; rows are written as they come.

    ``line`` is what is printed of a row.
    """
    from .run import provenance

    origin = provenance()
    gpu = origin["gpu"]
    origin = {k: v for k, v in origin.items() if k not in ("gpu", "torch", "vllm")}
    done: list[dict[str, Any]] = []
    end = time.perf_counter() + args.seconds
    turn = Path(args.after) if args.after else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(args.logs) if args.logs else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tuned = write_tuned(folder / "tuned", gpu)
        for together in waves_of(args, plan):
            if done and time.perf_counter() >= end:
                break
            wave = [kind(name, folder, theirs, tuned) for name, theirs in together]
            try:
                ready = min(end, time.perf_counter() + args.start_seconds)
                for engine in wave:
                    engine.wait_ready(ready)
                while turn and not turn.exists() and time.perf_counter() < end:
                    time.sleep(0.2)
                for points in itertools.zip_longest(*(points_of(e.args) for e in wave)):
                    with _alone(args.lock):
                        for engine, point in zip(wave, points, strict=True):
                            if point is not None:
                                engine.measure(point, end)
                    rows = [origin | r for engine in wave for r in engine.rows(engine.args.model)]
                    _write(Path(args.out), json.dumps(done + rows, indent=1) + "\n")
                done += rows
                for row in rows:
                    print((line or _line)(row), flush=True)
            finally:
                for engine in wave:
                    engine.close()
                for engine in wave:
                    engine.stop()
    return done


def failure(row: Mapping[str, Any]) -> str:
    """One line for a row without a measurement."""
    return f"{row['arm']}: failed: {row['error']}"


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return failure(row)
    if row["op"] == PROFILE:
        return f"{row['arm']}, batch {row['batch']}: GPU busy {row['busy_us'] / row['span_us']:.0%}"
    if row["op"] == HOST_PROFILE:
        longest = ", ".join(f"{name} {took:.2f}" for name, took in row["own"][:8])
        return f"{row['arm']}, batch {row['batch']}: {row['step_ms']:.2f} ms a step: {longest}"
    if row["op"] == HOST_PARTS:
        return f"{row['arm']}, parts {row['parts']}: {row['step_ms']:.2f} ms a step"
    return (
        f"{row['arm']} ({row['runner']}, vLLM {row['vllm']}), batch {row['batch']}: "
        f"{row['step_ms']:.2f} ms a step (median {row['median_ms']:.2f}), "
        f"{row['tokens_per_s']:.0f} tokens/s over {row['steps']} steps; room for "
        f"{row['max_concurrency']} requests in {row['cache_gib']} GiB; started in "
        f"{row['start_s']} s"
    )


HEAD = """# Decode speed in vLLM

Generated by `python -m replayssm_quant.kernels.bench.e2e --report` from the JSON files in
`results/`.

Real geometries with dummy weights, CUDA graphs, greedy, prompts of 16 to 22 tokens. A step counts
if every request of the batch got a token in it, so prefills do not. *x fp32* and *x replay* divide
by the step of plain vLLM with an fp32 state and of vLLM's own `--use-replayssm` in the same run,
under the same model runner where that was measured, else marked `*`; `†` marks a ratio between
runs at different commits, which need not have had the same machine. *state* is what one request
keeps in its recurrent layers, convolution and ring included; codes and scales alone would let 1.56
(`fp16+nvfp4`), 2.56 (`P4+8`) or 2.61 (`P8+4`) requests into the state of one, and a ring of four
inputs 1.51, 2.39 and 2.44 on Nano-4B (`python -m replayssm_quant.plan --buffer-len 4`). *room* is
vLLM's own "Maximum concurrency" of requests as long as those measured, scaled to a cache of
{budget} GiB. vLLM's native Mamba-2 kernel runs with the launches that the kernel benchmark found
best, since vLLM has none for this head size; its prefill kernels may have been left untuned, which
no number here shows.

*Lean host* is the same engine in every arm, plain ones included, with things changed that touch no
token and no kernel ([host.py](host.py)): scheduler and model in one process; no look for new cache
blocks in steps that need none (vLLM's scheduler asks each of seven cache groups for each request,
and this package's plugin keeps that from it); waits that spin instead of sleeping; no garbage
collection, no calls of empty hooks, and outputs processed only when a request ends, as a server
does that in another process. *As served* is vLLM's own host, untouched. Where the host takes longer
than the GPU, a step shows the host. *stagger* spreads the flushes of requests that start together
over the steps of a window, as the plugin does unless it is told otherwise; in other arms of the
lean host they all flush at once. Which engines are up together, and in which order they are timed,
is in [e2e-h200.txt](e2e-h200.txt) since d7701f4. At 47fd9ad and d001aef engines of both models ran
at the same time, on a GPU each of one host. Small steps are the host's: engines that run the same
code differed by up to 2 ms below batch 64 at 47fd9ad, and by 0.5 ms at 8 at d001aef, where each GPU
had sixteen cores of its own; so the tables of 8 and 1 say that nothing is lost or won, and no more.

Published for ReplaySSM with an fp32 state, beside plain vLLM on an H100 and for these geometries:
Nano-4B 1.47 times the tokens at batch 256 and 1.52 at 512 (vLLM pull request 48018), Qwen3.5-4B
1.27 and 1.30 (48792).

"""
HOSTS = {"lean": ", lean host", "oneprocess": ", one process", "served": ", as served"}
TARGETS = (
    ("nemotron-3-nano-4b", "x fp32", 2.2),
    ("nemotron-3-nano-4b", "x replay", 1.4),
    ("qwen3.5-4b", "x fp32", 1.7),
)
"""model, column, least value of the best arm at batch 256."""
ROOM_TARGETS = ((("fp16+nvfp4",), 1.5), (("P4+8", "P8+4"), 2.4))
"""Formats, and the least number of requests whose state takes the bytes of one fp32 request."""


def _base(rows: list[dict], row: Mapping[str, Any], arm: str) -> tuple[float | None, str]:
    """(step of a base arm at the row's point, its marks).

    '*' if it ran under another model runner, '†' if in another run, at another commit.
    """
    point = _point(row)
    names = {arm, f"{arm}-v1", f"{arm}-v2", f"{arm}-served", f"{arm}-oneprocess"}
    found = [r for r in rows if r["arm"] in names and _point(r) == point]
    if not found:
        return None, ""
    best = min(found, key=lambda r: (_other_run(r, row), r["runner"] != row["runner"]))
    marks = "*" if best["runner"] != row["runner"] else ""
    return best["step_ms"], marks + ("†" if _other_run(best, row) else "")


def _other_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.get("commit") != b.get("commit")


def _label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The row's arm, with its commit where rows of several runs stand together."""
    if any(_other_run(r, row) for r in rows):
        return f"{row['arm']} ({str(row.get('commit'))[:7]})"
    return row["arm"]


def _ratio(rows: list[dict], row: Mapping[str, Any], arm: str) -> tuple[float | None, str]:
    step, mark = _base(rows, row, arm)
    return (None if step is None else step / row["step_ms"]), mark


def _point(row: Mapping[str, Any]) -> tuple[str, int, int]:
    """What rows must share to be compared: host, batch, tokens."""
    return row.get("host", "served"), row["batch"], row["tokens"]


def _point_table(here: list[dict], rows: list[dict]) -> list[str]:
    """Rows of one point; rows: all of the model."""
    out = []
    for row in here:
        line = [_label(row, rows), row["runner"], f"{row['tokens_per_s']:,.0f}"]
        line.append(f"{row['step_ms']:.2f}")
        line += [f"{row['median_ms']:.2f}", f"{row['p90_ms']:.2f}"]
        for arm in ("fp32", "vllm-replay"):
            value, mark = _ratio(here, row, arm)
            line.append(_number(value) + mark)
        line.append(f"{row['state_bytes'] / 2**20:.1f}")
        room = row["max_concurrency"]
        line.append(_number(room and room * BUDGET_GIB / row["cache_gib"], "{:.0f}"))
        out.append(line)
    header = ["arm", "runner", "tokens/s", "ms a step", "median", "p90", "x fp32", "x replay"]
    header += ["state, MiB", f"room, {BUDGET_GIB} GiB"]
    return _table(header, out)


def _kind_of_kernel(name: str) -> str:
    """Which part of a step a GPU kernel belongs to."""
    for kind, marks in KERNEL_KINDS:
        if any(mark in name for mark in marks):
            return kind
    return "other"


KERNEL_KINDS = (
    ("read", ("readout_kernel", "step_kernel", "read_kernel", "verify_kernel", "verify_matrix")),
    ("flush", ("flush_kernel", "window_kernel")),
    ("prepare", ("prepare_kernel", "keys_kernel")),
    ("cursors", ("decode_rows", "move_rows", "verify_rows", "move_verify")),
    ("native state", ("selective_scan", "selective_state", "gated_delta", "gdn_decode", "replay")),
    ("convolution", ("causal_conv",)),
    ("attention", ("attention", "flash", "reshape_and_cache")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "splitK", "gemv", "cublas")),
)
"""Parts of a step, and what the names of their kernels contain."""


def _profile_table(
    profiles: list[dict[str, Any]],
    bases: Sequence[str] = ("fp32", "vllm-replay"),
    every: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """GPU time of a step and of its parts, in milliseconds; every: all rows of the model."""
    if not profiles:
        return []
    kinds = [*(kind for kind, _ in KERNEL_KINDS), "other"]
    names = (f"x {base.removeprefix('vllm-')}" for base in bases)
    header = ["arm", "GPU, ms a step", *names, "busy", *kinds]
    out = []
    for batch in dict.fromkeys(r["batch"] for r in profiles):
        here = {r["arm"]: r for r in profiles if r["batch"] == batch}
        for row in here.values():
            label = f"{_label(row, every or profiles)}, batch {batch}"
            line = [label, f"{row['busy_us'] / row['steps'] / 1e3:.2f}"]
            for base in bases:
                ratio = here[base]["busy_us"] / row["busy_us"] if base in here else None
                mark = "†" if ratio is not None and _other_run(here[base], row) else ""
                line.append(_number(ratio) + mark)
            line.append(f"{row['busy_us'] / row['span_us']:.0%}")
            part = dict.fromkeys(kinds, 0.0)
            for name, _, took in row["kernels"]:
                part[_kind_of_kernel(name)] += took / row["steps"] / 1e3
            out.append(line + [_number(value or None) for value in part.values()])
    return [
        "### Time on the GPU",
        "",
        f"From a trace of {profiles[0]['steps']} decode steps: the time in which the GPU ran any "
        "kernel, which is what a step takes where the host keeps up. *busy* is its share of the "
        "traced span; far below 100 %, the step waits for the host (scheduler, sampling, "
        "processes), and the tables above say little about the state. Parts in milliseconds a "
        "step; kernels beside each other count each.",
        "",
        *_table(header, out),
    ]


STAGES = {
    "scheduler": ".schedule",
    "its blocks": "allocate_slots",
    "inputs and launch": "GPUModelRunner.execute_model",
    "sampling": "GPUModelRunner.sample_tokens",
    "wait and copy": "Output.get_output",
    "bookkeeping": ".update_from_output",
    "answers": ".process_outputs",
}
"""Stages of a step on the host, and how the names of their functions end."""


def _host_table(rows: list[dict[str, Any]], every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Milliseconds of a step by parts of the leaner host, and by stages.

    every: all rows of the model.
    """
    parts = [r for r in rows if r["op"] == HOST_PARTS]
    sampled = [r for r in rows if r["op"] == HOST_PROFILE]
    lines = []
    if parts:
        named = dict.fromkeys(", ".join(r["parts"]) or "none" for r in parts)
        out = []
        for arm, batch in dict.fromkeys((r["arm"], r["batch"]) for r in parts):
            here = [r for r in parts if (r["arm"], r["batch"]) == (arm, batch)]
            steps = {", ".join(r["parts"]) or "none": r["step_ms"] for r in here}
            label = f"{_label(here[0], every)}, batch {batch}"
            out.append([label, *(_number(steps.get(n)) for n in named)])
        lines += ["### Parts of the lean host, milliseconds a step in one process", ""]
        lines += _table(["arm", *named], out)
    if sampled:
        out = []
        for row in sampled:
            line = [f"{_label(row, every)}, batch {row['batch']}", f"{row['step_ms']:.2f}"]
            for end in STAGES.values():
                took = [ms for name, ms in row["within"] if name.endswith(end)]
                line.append(_number(max(took, default=None)))
            out.append(line)
        lines += ["### Time on the host, milliseconds a step", ""]
        lines += [
            "Sampled each millisecond in a pass of its own; a stage holds what it calls, so *its "
            "blocks* are part of the scheduler. The wait ends when the GPU has finished a step.",
            "",
        ]
        lines += _table(["arm", "step", *STAGES], out)
    return lines


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Tables of one model."""
    every = rows
    failed = [r for r in rows if "error" in r]
    profiles = [r for r in rows if "error" not in r and r["op"] == PROFILE]
    hosts = [r for r in rows if "error" not in r and r["op"] in (HOST_PARTS, HOST_PROFILE)]
    rows = [r for r in rows if "error" not in r and r["op"] == OP]
    lines = [f"## {(rows or failed or profiles)[0]['model']}", ""]
    lines += heading(rows)
    points = list(dict.fromkeys(map(_point, rows)))
    points.sort(key=lambda point: (list(HOSTS).index(point[0]), -point[1]))
    targets = []
    for model, column, least in TARGETS:
        for name in dict.fromkeys(point[0] for point in points):
            here = [r for r in rows if r["batch"] == 256 and "options" in arm_of(r["arm"])]
            here = [r for r in here if _point(r)[0] == name and r["model"] == model]
            base = "fp32" if column == "x fp32" else "vllm-replay"
            ratios = [(v, m) for v, m in (_ratio(rows, r, base) for r in here) if v is not None]
            if ratios:
                best, marks = max(ratios)
                met = "yes" if best >= least else "no"
                what = f"best arm: {column}{HOSTS[name]}"
                targets.append([what, f"{least:.2f}", f"{best:.2f}{marks.strip('*')}", met])
    targets += _room_targets(rows)
    if targets:
        lines += _table(["target, batch 256", "at least", "reached", "met"], targets)
    for point in points:
        name, batch, tokens = point
        lines += [f"### Batch {batch}, {tokens} tokens{HOSTS[name]}", ""]
        lines += _point_table([r for r in rows if _point(r) == point], rows)
    lines += _profile_table(profiles, every=every)
    lines += _host_table(hosts, every)
    for arm in _order(failed, "arm"):
        lines.append(f"{arm} failed: {next(r['error'] for r in failed if r['arm'] == arm)}")
        lines.append("")
    return lines


def _room_targets(rows: list[dict[str, Any]]) -> list[list[str]]:
    """What the state of the smallest arm of each kind has of ``ROOM_TARGETS``, as rows."""
    states = {r["arm"]: r["state_bytes"] for r in rows}
    out = []
    for names, least in ROOM_TARGETS:
        here = [b for a, b in states.items() if a.removesuffix("-stagger") in names]
        if here and "fp32" in states:
            best = states["fp32"] / min(here)
            met = "yes" if best >= least else "no"
            what = f"{' or '.join(names)}: requests in the state of one fp32 request"
            out.append([what, f"{least:.2f}", f"{best:.2f}", met])
    return out


def newest_rows(folder: Path, op: str) -> dict[str, list[dict[str, Any]]]:
    """Each model's rows in the newest file that has it. Raises ValueError if there is none."""
    newest: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"{op}-*.json")):  # sorted: a later date replaces
        rows = json.loads(path.read_text(encoding="utf-8"))
        for model in _order(rows, "model"):
            newest[model] = [r for r in rows if r["model"] == model]
    if not newest:
        raise ValueError(f"no {op} file in {folder}; run the benchmark on a GPU first")
    return newest


def add_rows(paths: Sequence[Path], folder: Path, op: str, arms: Sequence[str]) -> Path:
    """The file in ``folder`` that has the newest rows of all models and those of runs.

    A row of a run replaces the one of its arm, batch, tokens, host and kind. What ran out of time
    is left out, and a failure of an arm that has been measured. Rows are in the order of ``arms``.
    Raises ValueError if the runs have measured nothing.
    """
    from .run import gpu_slug

    new = [r for path in paths for r in json.loads(path.read_text(encoding="utf-8"))]
    new = [r for r in new if not r.get("error", "").startswith("ran out of time")]
    gpu = next((r["gpu"] for r in new if "error" not in r), None)
    if gpu is None:
        raise ValueError(f"no measured row in {', '.join(map(str, paths))}")
    old: dict[str, list[dict[str, Any]]] = {}
    with contextlib.suppress(ValueError):
        old = newest_rows(folder, op)
    found = {}
    for row in [*(r for rows in old.values() for r in rows), *new]:
        kind = row.get("kind") or row["op"]
        what = (row.get("batch"), row.get("tokens"), row.get("parts"), kind)
        found[json.dumps([row["model"], row["arm"], row.get("host"), *what])] = row
    measured = {(r["model"], r["arm"]) for r in found.values() if "error" not in r}
    rows = [
        r
        for r in found.values()
        if "error" not in r or "batch" in r or (r["model"], r["arm"]) not in measured
    ]

    def place(row: Mapping[str, Any]) -> tuple[str, int, str]:
        base = row["arm"] if row["arm"] in arms else row["arm"].rpartition("-")[0]
        return row["model"], [*arms, base].index(base), row["arm"]

    name = f"{op}-{gpu_slug(gpu)}-{max(r['date'] for r in new)}.json"
    return _write(folder / name, json.dumps(sorted(rows, key=place), indent=1) + "\n")


def heading(rows: list[dict[str, Any]]) -> list[str]:
    """What measured a model's rows, and their notes."""
    if not rows:
        return []
    first = rows[0]
    commits = list(dict.fromkeys(str(r["commit"])[:7] for r in rows))
    *others, last = commits
    named = f"{', '.join(others)} and {last}" if others else last
    lines = [
        f"{first['gpu']}, {first['date']}, commit{'s' * (len(commits) > 1)} "
        f"{named}, vLLM {first['vllm']}, torch {first['torch']}, triton "
        f"{first['triton']}.",
        "",
    ]
    for note in dict.fromkeys(r["note"] for r in rows if "note" in r):
        lines += [note, ""]
    return lines


def report(folder: Path, target: Path) -> Path:
    """E2E.md in ``target`` from each model's newest rows. Raises ValueError if there is none."""
    newest = newest_rows(folder, OP)
    lines = [line for model in sorted(newest) for line in section(newest[model])]
    return _write(target / "E2E.md", HEAD.format(budget=BUDGET_GIB) + "\n".join(lines))


def _points(text: str) -> list[tuple[int, int | None]]:
    """``256:1000,8`` -> [(256, 1000), (8, None)]."""
    out: list[tuple[int, int | None]] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?::(\d+))?", part.strip())
        if not found or int(found[1]) < 1:
            raise argparse.ArgumentTypeError(f"'{part}' is no batch; write 256 or 256:1000")
        out.append((int(found[1]), int(found[2]) if found[2] else None))
    return out


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How engines are started and measured, and what becomes of their rows."""
    add = parser.add_argument
    add("--plan", type=Path, help="a file with a line of options for engines alike, wave by wave")
    add("--add", type=Path, nargs="+", metavar="FILE", help="add the rows of runs to results/")
    add("--rehearse", action="store_true", help="fill vLLM's caches: small, untimed engines")
    add("--profile", type=int, nargs="?", const=0, metavar="BATCH", help="also trace the GPU there")
    add("--parallel", type=int, default=1, help="engines that start together")
    add("--memory-share", type=float, default=0.05)
    add("--seconds", type=float, default=3600.0, help="for everything together")
    add("--start-seconds", type=float, default=3600.0, help="for a wave of engines to come up")
    add("--point-seconds", type=float, default=600.0, help="for one engine to measure one batch")
    add("--after", help="measure once this file is there")
    add("--engine", default="{}", help="more arguments of vllm.LLM, as JSON")
    add("--python", default=sys.executable, help="interpreter that has vLLM")
    add("--lock", help="a file to lock while measuring")
    add("--cores", type=int, default=0, help="cores to measure on, which start-up leaves alone")
    add("--logs", help="keep the engines' logs in this folder")


def main(argv: Sequence[str] | None = None) -> int:
    drop_checkout()
    parser = argparse.ArgumentParser(prog="python -m replayssm_quant.kernels.bench.e2e")
    add = parser.add_argument
    add("--child", help=argparse.SUPPRESS)
    add("--report", action="store_true", help="make E2E.md from the files in results/")
    add("--model", choices=MODELS, default="nemotron-3-nano-4b")
    add("--arms", type=lambda t: t.split(","), default=["fp32", "P4+8"], help=", ".join(ARMS))
    add("--batches", type=_points, default=[(256, None)], help="batch or batch:tokens, by commas")
    add("--tokens", type=int, default=1000, help="of each request, where a batch names none")
    add("--cache-gib", type=float, default=0.0, help="vLLM's cache (default: what the batch needs)")
    some: dict[str, Any] = {"nargs": "?", "const": [], "type": lambda t: t.split(",")}
    add("--host-profile", **some, help="also sample the host at the largest batch (of these arms)")
    add("--host-parts", **some, help="also time each part of the leaner host there (of these arms)")
    add_engine_options(parser)
    add("--out", default=f"{OP}.json")
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return 0
    return command(args, parser, OP, list(ARMS), report, _check)


def command(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    op: str,
    arms: Sequence[str],
    report: Callable[[Path, Path], Path],
    check: Callable[[argparse.Namespace], None],
    kind: type[Engine] = Engine,
    line: Callable[[Mapping[str, Any]], str] | None = None,
) -> int:
    """Add rows and report, or check all that a run asks for and run it; the exit code."""
    try:
        if args.report or args.add:
            if args.add:
                print(add_rows(args.add, RESULTS, op, arms))
            print(report(RESULTS, RESULTS.parent))
            return 0
        plan = read_plan(args.plan, parser, args) if args.plan else []
        for options in [options for wave in plan for options in wave] or [args]:
            check(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = run(args, kind, line, plan)
    return int(all("error" in r for r in rows))


def _check(args: argparse.Namespace) -> None:
    """Fill in the tokens of each batch. Raises ValueError for arguments that no run can take."""
    args.batches = [(b, args.tokens if t is None else t) for b, t in args.batches]
    if min(tokens for _, tokens in args.batches) < 8:
        raise ValueError("a batch needs 8 tokens or more to be timed")
    for name in args.arms:
        arm_of(name)


if __name__ == "__main__":
    sys.exit(main())
