"""Generation through vLLM with and without the plugin, as a function of any interpreter.

vLLM pins its own torch, so it often lives in another environment. ``Session`` and ``generate``
start that environment's interpreter, which need not have this package installed, and get JSON back.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
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
MODULE = "replayssm_quant.backends.vllm.generate"
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


def probe(python: str) -> dict[str, str]:
    """``installed`` of another interpreter. Raises ValueError where it cannot run vLLM."""
    with tempfile.TemporaryDirectory() as name:
        try:
            done = subprocess.run(
                [python, "-m", MODULE, "--installed"],
                cwd=name,
                env=environment(plugin_site(Path(name) / "site")),
                capture_output=True,
                text=True,
                timeout=300,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"interpreter '{python}' does not run ({error})") from None
        if done.returncode != 0:
            log = Path(name) / "log.txt"
            log.write_text(done.stdout + done.stderr)
            raise ValueError(
                f"interpreter '{python}' cannot run vLLM ({_cause(log)}); give the python of an "
                "environment with vLLM 0.32 or 0.33"
            )
    return json.loads(done.stdout.strip().splitlines()[-1])


class Session:
    """One vLLM engine in a process of its own, which answers prompts until it is closed.

    model: a local folder, or a hub id. options: the plugin's, None for plain vLLM with an fp32
    state. python: interpreter that has vLLM. tokenizer: whether vLLM loads it, as texts and stop
    strings need. engine: more arguments of ``vllm.LLM``. Raises RuntimeError if the engine fails,
    with the line of its log that says why and the file that keeps this log, or does not start in
    ``timeout`` seconds.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None,
        *,
        python: str = sys.executable,
        tokenizer: bool = True,
        engine: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="replayssm-vllm-")
        self._path, self._count, self._timeout = Path(self._folder.name), 0, timeout
        self._log = self._path / "log.txt"
        job = {"model": model, "options": None if options is None else dict(options)}
        job["engine"] = {"skip_tokenizer_init": not tokenizer, **(engine or {})}
        (self._path / "job.json").write_text(json.dumps(job))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", MODULE, str(self._path)],
                cwd=self._path,
                env=environment(plugin_site(self._path / "site"), env),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            self.made_with: dict[str, str] = self._wait("ready")
        except BaseException:
            self.close()
            raise

    def _wait(self, name: str) -> Any:
        end = time.monotonic() + self._timeout
        out = self._path / f"{name}.json"
        while not out.is_file():
            if self._process.poll() is not None and not out.is_file():
                cause = _cause(self._log)
                handle, kept = tempfile.mkstemp(prefix="replayssm-vllm-", suffix=".log")
                os.close(handle)
                shutil.copyfile(self._log, kept)
                raise RuntimeError(f"vLLM failed: {cause}; its log: {kept}")
            if time.monotonic() > end:
                raise RuntimeError(f"vLLM gave no answer in {self._timeout:.0f} s")
            time.sleep(0.05)
        return json.loads(out.read_text())

    def answer(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 64,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        gaps: bool = False,
        ignore_eos: bool = False,
        sampling: Mapping[str, Any] | None = None,
    ) -> ArmResult:
        """Answers in the order of the prompts. seeds: as in ``generate``; sampling: more of vLLM's
        sampling parameters."""
        if not self._path.is_dir():
            raise RuntimeError("this vLLM session is closed; make another")
        self._count += 1
        job = {
            "prompts": [p if isinstance(p, str) else list(p) for p in prompts],
            "sampling": {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stop": list(stop),
                "ignore_eos": ignore_eos,
                **(sampling or {}),
            },
            "seeds": None if seeds is None else list(seeds),
            "gaps": gaps,
        }
        name = f"answer{self._count}"
        (self._path / f"{name}-job.json").write_text(json.dumps(job))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died: _wait says why
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        found = self._wait(name)
        completions = [Completion(**c) for c in found["completions"]]
        made = self.made_with
        return ArmResult(completions, found["seconds"], made["vllm"], made["runner"])

    def close(self) -> None:
        """End the process and wait for it, so that its memory is free."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
                break
        self._folder.cleanup()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


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
    timeout: float = 3600.0,
) -> dict[str, ArmResult]:
    """Answers to the prompts from each arm, in the order of the prompts, so that arms pair up.

    prompts: texts, or token ids (then vLLM loads no tokenizer unless ``stop`` needs one). arms:
    name -> the plugin's options, None for plain vLLM. seeds: sampling seed of each prompt, which
    the random keys of a split state follow too where vLLM shows it. The rest as in ``Session``.
    Raises ValueError for unusable arguments, RuntimeError if an arm fails.
    """
    if not prompts:
        raise ValueError("no prompts to generate from")
    if not arms:
        raise ValueError("no arms: give at least one, for example {'fp32': None}")
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds do not pair with {len(prompts)} prompts")
    tokenizer = bool(stop) or any(isinstance(p, str) for p in prompts)
    common: dict[str, Any] = {"python": python, "tokenizer": tokenizer, "engine": engine}
    found = {}
    for name, options in arms.items():
        try:
            with Session(model, options, env=env, timeout=timeout, **common) as session:
                found[name] = session.answer(
                    prompts,
                    max_tokens=max_tokens,
                    stop=stop,
                    temperature=temperature,
                    seeds=seeds,
                    gaps=gaps,
                    ignore_eos=ignore_eos,
                )
        except RuntimeError as error:
            raise RuntimeError(f"arm {name}: {error}") from None
    return found


def _cause(log: Path) -> str:
    """The line of a vLLM log that says what went wrong."""
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    pattern = re.compile(r"(?:Value error, |\w*Error: )(.*?)(?: \[type=|$)")
    errors = [found[1] for line in reversed(lines) if (found := pattern.search(line)) and found[1]]
    # what one process says of another's end
    own = [x for x in errors if not re.search(r"[Ss]ee (root cause|stack trace) \(?above", x)]
    return (own or errors or lines[-1:] or ["no output"])[0]


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

    ids_only = llm.llm_engine.vllm_config.model_config.skip_tokenizer_init
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


def installed() -> dict[str, str]:
    """What this interpreter computes with: versions, and the GPU's or the CPU's name."""
    import torch
    import transformers
    import vllm

    device = f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": device,
    }


def _write(path: Path, value: object) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


def serve(folder: Path) -> None:
    """Make the engine of ``job.json``, then answer each job that a line on stdin names."""
    import vllm

    job = json.loads((folder / "job.json").read_text())
    llm = make_llm(job["model"], job["options"], job["engine"])
    v2 = llm.llm_engine.vllm_config.use_v2_model_runner
    _write(folder / "ready.json", {"vllm": vllm.__version__, "runner": "v2" if v2 else "v1"})
    for line in sys.stdin:
        name = line.strip()
        asked = json.loads((folder / f"{name}-job.json").read_text())
        start = time.perf_counter()
        completions = _answer(llm, asked)
        seconds = time.perf_counter() - start
        _write(folder / f"{name}.json", {"completions": completions, "seconds": seconds})


def main(argv: Sequence[str] | None = None) -> int:
    """``generate FOLDER`` serves a ``Session``, ``generate --installed`` says what there is."""
    drop_checkout()
    (what,) = sys.argv[1:] if argv is None else argv
    if what == "--installed":
        print(json.dumps(installed()))
    else:
        serve(Path(what))
    return 0


if __name__ == "__main__":
    sys.exit(main())
