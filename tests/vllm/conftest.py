"""Engines run in the interpreter that VLLM_PYTHON names; without it those tests are skipped.

VLLM_REPORT, if set, is a folder for what each engine did: one JSON file a job, without tokens.
"""

import json
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from replayssm_quant.backends.vllm.generate import environment, plugin_site, probe
from replayssm_quant.models import shipped

WORKER = Path(__file__).with_name("worker.py")
CPU = {
    "OMP_NUM_THREADS": "1",  # vLLM's own thread binding spins when the cores are shared
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
GPU = {  # engines of small models that share one GPU
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**28,
    "additional_config": {"gdn_prefill_backend": "triton"},
}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    path = os.environ.get("VLLM_PYTHON", "")
    if not path:
        pytest.skip("needs VLLM_PYTHON: an interpreter with vLLM 0.32 or 0.33 (its CPU build does)")
    return path


@pytest.fixture(scope="session")
def cpu_environment() -> dict[str, str]:
    return dict(CPU)


@pytest.fixture(scope="session")
def gpu(vllm_python: str) -> bool:
    """Whether vLLM's build has a GPU."""
    return " CPU (" not in probe(vllm_python)["hardware"]


@pytest.fixture(scope="session")
def ties(gpu: bool) -> dict[str, float]:
    """How far two choices of a family's shipped model may be apart where two runs may part.

    fp32 is exact on a CPU, and moves on a GPU with the size of the batch. Logits of these models
    stay below 32, where a bf16 step is 2**-3; a log-probability moves by the rounding of two.
    """
    return {"mamba2": 2e-3 if gpu else 0.0, "gdn": 2 * 2.0**-3}


@pytest.fixture(scope="session")
def attention_block(gpu: bool) -> dict[str, int]:
    """Tokens of an attention block of the shipped models, as long as a page of fp32 states, which
    three drafts lengthen; blocks come in other steps on a CPU."""
    if gpu:
        return {"mamba2": 320, "mamba2-drafts": 352, "gdn": 608}
    return {"mamba2": 384, "mamba2-drafts": 384, "gdn": 640}


@pytest.fixture(scope="session")
def as_served(gpu: bool) -> Any:
    """as_served(engine, tokens=1) -> engine: eager on a CPU; on a GPU as vLLM compiles and captures
    it by default, for steps of one to eight requests with ``tokens`` tokens each."""

    def change(engine: dict[str, Any], tokens: int = 1) -> dict[str, Any]:
        if not gpu:
            return engine | {"enforce_eager": True}
        sizes = [tokens * n for n in (1, 2, 4, 8)]
        return engine | {"compilation_config": {"cudagraph_capture_sizes": sizes}}

    return change


def on_a_gpu(job: Any) -> Any:
    """The job with engines that leave room to others on the GPU."""
    if isinstance(job, list):
        return [on_a_gpu(scenario) for scenario in job]
    return job | {"engine": GPU | job["engine"]} if "engine" in job else job


@pytest.fixture(scope="session")
def run_worker(vllm_python: str, gpu: bool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """run_worker(job) -> result: scenarios (a list), or ``"signatures"``.

    VLLM_WORKERS: processes that share a list of scenarios (default one; an engine of a shipped
    model takes some 2 GB of memory and, on a GPU, a minute of one core to start).
    """
    folder = tmp_path_factory.mktemp("vllm")
    site = plugin_site(folder / "site")
    workers = int(os.environ.get("VLLM_WORKERS", "1"))

    def run(job: Any, **env: str) -> Any:
        if gpu and not isinstance(job, str):
            job = on_a_gpu(job)
        if not isinstance(job, list):
            return run_one(job, "", env)
        found = share(job, env)
        report(job, found)
        return found

    def share(job: Any, env: dict[str, str]) -> Any:
        if workers < 2:
            return run_one(job, "", env)
        shares = [_whole(job[i::workers], job) for i in range(min(workers, len(job)))]
        names = [f"-{i}" for i in range(len(shares))]
        with ThreadPoolExecutor(len(shares)) as pool:
            found = list(pool.map(run_one, shares, names, [env] * len(shares)))
        merged = {name: result for part in found for name, result in part.items()}
        return {scenario["name"]: merged[scenario["name"]] for scenario in job}

    def run_one(job: Any, name: str, env: dict[str, str]) -> Any:
        path = folder / "signatures"
        if not isinstance(job, str):
            path = folder / f"job{name}.json"
            path.write_text(json.dumps(job))
        out = folder / f"out{name}.json"
        out.unlink(missing_ok=True)
        extra = {**CPU, "VLLM_CACHE_ROOT": str(folder / f"cache{name}"), **env}
        done = subprocess.run(
            [vllm_python, str(WORKER), str(path), str(out)],
            cwd=folder,
            env=environment(site, extra),
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return json.loads(out.read_text())

    return run


def report(job: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Write what the engines of a job did into the folder VLLM_REPORT, if that is set."""
    if not (name := os.environ.get("VLLM_REPORT")):
        return
    kept = ("steps", "seconds", "preempted", "runner", "layers", "parts", "unfollowed", "spec")
    rows = {}
    for scenario in job:
        asked = {scenario["name"]: (scenario, found[scenario["name"]])}
        for part, more in scenario.get("then", {}).items():
            asked[f"{scenario['name']}/{part}"] = (more, asked[scenario["name"]][1].get(part, {}))
        for label, (request, result) in asked.items():
            row = {k: result[k] for k in ("error", "memory", *kept) if k in result}
            row |= {"requests": len(result.get("ids", [])), "against": request.get("against")}
            row |= {"tokens": sum(map(len, result.get("ids", [])))}
            row |= {k: v for k, v in result.get("log", {}).items() if isinstance(v, int)}
            rows[label] = row
    model = Path(job[0]["model"]).name
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    where = os.environ.get("PYTEST_CURRENT_TEST", "").replace("/", "_").replace("::", "-")
    path = folder / f"{where.split(' ')[0]}-{model}-{os.getpid()}.json"
    path.with_suffix(".part").write_text(json.dumps(rows, indent=1))
    path.with_suffix(".part").replace(path)


SHARE = 0.1
"""Of the tokens that were a tie, how many may be chosen otherwise; seen are 2 of 132."""


def _whole(share: list[dict[str, Any]], job: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A share of the scenarios, each behind the one that it is compared with."""
    known = {scenario["name"]: scenario for scenario in job}
    found: dict[str, dict[str, Any]] = {}
    for scenario in share:
        asked = [scenario, *scenario.get("then", {}).values()]
        for name in (s["against"].partition("/")[0] for s in asked if "against" in s):
            found.setdefault(name, known[name])
        found.setdefault(scenario["name"], scenario)
    return list(found.values())


@pytest.fixture(scope="session")
def assert_same() -> Any:
    """assert_same(found, wanted, tie): token for token, or parting where both runs saw a gap of at
    most ``tie``, at most at ``SHARE`` of the tokens that were such a tie (of 0: nowhere).

    found was run ``against`` wanted, so that what follows a tie has been compared as well.
    """

    def check(found: dict[str, Any], wanted: dict[str, Any], tie: float) -> None:
        assert "error" not in found, found
        differ = {
            row
            for row, (a, b) in enumerate(zip(found["ids"], wanted["ids"], strict=True))
            if a != b[: len(a)]
        }
        assert differ == {row for row, _, _ in found["parts"]}
        wide = [part for part in found["parts"] if part[2] > tie]
        assert not wide, f"[request, token, gap] beyond {tie}: {wide}"
        ties = sum(gap <= tie for gaps in wanted["gaps"] for gap in gaps) if tie else 0
        assert len(found["parts"]) <= int(SHARE * ties), found["parts"]
        assert not found["unfollowed"]

    return check


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, Path]:
    """Shipped models by model type."""
    found = {}
    for folder in shipped().values():
        found[json.loads((folder / "config.json").read_text())["model_type"]] = folder
    return found


@pytest.fixture(scope="session")
def excerpt() -> Any:
    """excerpt(n, i): n bytes of held-out text as token ids, the i-th sample."""
    folder = Path(__file__).resolve().parents[2] / "evals" / "tasks" / "data"
    text = next(iter(sorted(folder.glob("*.txt")))).read_bytes()

    def take(n: int, i: int = 0) -> list[int]:
        start = random.Random(f"{n}/{i}").randrange(len(text) - n)
        return list(text[start : start + n])

    return take
