"""Generation through vLLM with and without the plugin, as a function of any interpreter.

vLLM pins its own torch, so it often lives in another environment. ``generate`` starts that
environment's interpreter, which need not have this package installed, and gets JSON back.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._paths import drop_checkout
from .options import KEY

Prompt = str | Sequence[int]
ENTRY_POINTS = f"[vllm.general_plugins]\n{KEY} = replayssm_quant.backends.vllm.plugin:register\n"


@dataclass(frozen=True)
class Completion:
    """token_ids of one answer; text if a tokenizer was used; gaps: log-probability of the token
    chosen by greedy decoding over the runner-up at each step, if asked for."""

    token_ids: list[int]
    text: str = ""
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ArmResult:
    """What one arm generated, and with what."""

    completions: list[Completion]
    seconds: float
    vllm: str
    runner: str


def plugin_site(folder: Path) -> Path:
    """A folder for PYTHONPATH that holds this package and its entry point, and nothing else."""
    package = Path(__file__).resolve().parents[2]
    info = folder / "replayssm_quant-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    link = folder / package.name
    if not link.exists():
        link.symlink_to(package, target_is_directory=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: replayssm-quant\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(site: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a vLLM process that finds the plugin in ``site``."""
    env = dict(os.environ)
    env |= {"PYTHONPATH": str(site), "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("TRITON_INTERPRET", None)
    return env | dict(extra or {})


def generate(
    model: str,
    prompts: Sequence[Prompt],
    arms: Mapping[str, Mapping[str, Any] | None],
    *,
    python: str = sys.executable,
    max_tokens: int = 64,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    gaps: bool = False,
    ignore_eos: bool = False,
    engine: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    isolate: bool = True,
    timeout: float = 3600.0,
) -> dict[str, ArmResult]:
    """Answers to the prompts from each arm, in the order of the prompts, so that arms pair up.

    model: a local folder, or a hub id. prompts: texts, or token ids (then vLLM loads no tokenizer
    unless ``stop`` needs one). arms: name -> the plugin's options (``options``), None for plain
    vLLM with an fp32 state. python: interpreter that has vLLM. seeds: sampling seed of each prompt,
    which the random keys of a split state follow too where vLLM shows it. engine: more arguments of
    ``vllm.LLM``. isolate: a process for each arm, else one after the other in one process.
    Raises ValueError for unusable arguments, RuntimeError with the last line of the log if an arm
    fails.
    """
    if not prompts:
        raise ValueError("no prompts to generate from")
    if not arms:
        raise ValueError("no arms: give at least one, for example {'fp32': None}")
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds do not pair with {len(prompts)} prompts")
    job = {
        "model": model,
        "prompts": [p if isinstance(p, str) else list(p) for p in prompts],
        "sampling": {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": list(stop),
            "ignore_eos": ignore_eos,
        },
        "seeds": None if seeds is None else list(seeds),
        "gaps": gaps,
        "engine": dict(engine or {}),
    }
    groups = [{k: v} for k, v in arms.items()] if isolate else [dict(arms)]
    results: dict[str, ArmResult] = {}
    for group in groups:
        results |= _run(python, {**job, "arms": group}, env, timeout)
    return results


def _run(
    python: str, job: dict[str, Any], env: Mapping[str, str] | None, timeout: float
) -> dict[str, ArmResult]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        command = [python, "-m", "replayssm_quant.backends.vllm.generate"]
        log = folder / "log.txt"
        with log.open("w") as stream:
            code = subprocess.run(
                [*command, "job.json", "out.json"],
                cwd=folder,
                env=environment(plugin_site(folder / "site"), env),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
        out = folder / "out.json"
        if code != 0 or not out.is_file():
            raise RuntimeError(f"vLLM failed ({', '.join(job['arms'])}): {_cause(log)}")
        found = json.loads(out.read_text())
    return {
        arm: ArmResult(
            [Completion(**c) for c in r["completions"]], r["seconds"], r["vllm"], r["runner"]
        )
        for arm, r in found.items()
    }


def _cause(log: Path) -> str:
    """The line of a vLLM log that says what went wrong."""
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    for line in reversed(lines):
        found = re.search(r"(?:Value error, |\w*Error: )(.*?)(?: \[type=|$)", line)
        if found and found[1]:
            return found[1]
    return (lines or ["no output"])[-1]


def make_llm(model: str, options: Mapping[str, Any] | None, engine: Mapping[str, Any]) -> Any:
    """A ``vllm.LLM`` with the plugin on these options, or plain with an fp32 state for None."""
    from vllm import LLM

    arguments = {"enable_prefix_caching": False, "generation_config": "vllm", **engine}
    extra = dict(arguments.pop("additional_config", {}))
    if options is None:
        arguments.setdefault("mamba_ssm_cache_dtype", "float32")
    else:
        extra[KEY] = dict(options)
    return LLM(model=model, additional_config=extra, **arguments)


def _gaps(steps: Any) -> list[float]:
    out = []
    for step in steps or []:
        best = sorted((x.logprob for x in step.values()), reverse=True)
        out.append(best[0] - best[1])
    return out


def _answer(llm: Any, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    ids_only = job["engine"]["skip_tokenizer_init"]
    common = {**job["sampling"], "detokenize": not ids_only}
    if job["gaps"]:
        common["logprobs"] = 2
    seeds = job["seeds"] or [None] * len(job["prompts"])
    params = [SamplingParams(**common, seed=s) for s in seeds]
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in job["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        best = output.outputs[0]
        gaps = _gaps(best.logprobs) if job["gaps"] else []
        found.append({"token_ids": list(best.token_ids), "text": best.text, "gaps": gaps})
    return found


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job's arms one after the other in this process."""
    import vllm

    needs_text = bool(job["sampling"]["stop"]) or any(isinstance(p, str) for p in job["prompts"])
    job["engine"].setdefault("skip_tokenizer_init", not needs_text)
    results = {}
    for arm, options in job["arms"].items():
        llm = make_llm(job["model"], options, job["engine"])
        start = time.perf_counter()
        completions = _answer(llm, job)
        seconds = time.perf_counter() - start
        v2 = llm.llm_engine.vllm_config.use_v2_model_runner
        results[arm] = {
            "completions": completions,
            "seconds": seconds,
            "vllm": vllm.__version__,
            "runner": "v2" if v2 else "v1",
        }
        del llm
        gc.collect()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """``generate JOB.json OUT.json``, in the interpreter that has vLLM."""
    drop_checkout()
    job, out = (Path(a) for a in (sys.argv[1:] if argv is None else argv))
    found = work(json.loads(job.read_text()))
    partial = out.with_suffix(".part")
    partial.write_text(json.dumps(found))
    os.replace(partial, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
