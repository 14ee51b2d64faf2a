"""Evaluation by vLLM: tasks that generate, through engines with and without the plugin, paired.

vLLM runs in an interpreter of its own (``--vllm-python``), an engine process for each arm, which is
asked every task in turn. The reference is plain vLLM with an fp32 state. Teacher-forced tasks are
refused: an engine that scores a given text does not decode, so it never reads the stored state.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.vllm.checks import ARCHITECTURES, version_problem
from ..config import StateConfig
from ..state.geometry import ModelGeometry, read_geometry
from .arms import Arm
from .suite import TaskSpec

if TYPE_CHECKING:
    from ..backends.vllm.generate import Session
    from .runner import ModelOutcome, Plan, Request
    from .store import Unit

GENERAL = "give --tasks tally, or an lm-eval task that generates such as gsm8k"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@functools.lru_cache(maxsize=4)
def installed(python: str) -> dict[str, str]:
    """What the other interpreter holds. Raises ValueError where it cannot run the plugin."""
    from ..backends.vllm.generate import probe

    found = probe(python)
    parts = [int(p) if p.isdigit() else p for p in found["vllm"].split("+")[0].split(".")]
    problem = version_problem(parts)
    if problem is not None:
        raise ValueError(f"--vllm-python {python}: {problem}")
    return found


def engine_arguments(text: str | None) -> dict[str, Any]:
    """``--vllm-args``. Raises ValueError for anything but a JSON mapping."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"--vllm-args {text!r} is no JSON mapping; write for example "
            "'{\"max_model_len\": 4096}'"
        )
    return found


def generates(spec: TaskSpec) -> bool:
    """True for a task whose answers are generated."""
    if spec.kind != "lm_eval":
        return spec.kind == "generate"
    from .lm_tasks import task_info

    return task_info(spec.task).output_type == "generate_until"


def choose(tasks: Sequence[TaskSpec], named: bool) -> list[TaskSpec]:
    """The tasks that can run: all that were named, else those of the suite that generate.

    Raises ValueError for one that was named and cannot, and where none is left.
    """
    kept = [t for t in tasks if generates(t)]
    if named and len(kept) < len(tasks):
        bad = next(t for t in tasks if not generates(t))
        raise ValueError(
            f"task {bad.name} scores given text, for which vLLM does not decode; {GENERAL}, or "
            "use --backend hf"
        )
    if not kept:
        raise ValueError(
            f"the suite has no task that generates, as --backend vllm needs; {GENERAL}"
        )
    return kept


def check(request: Request) -> None:
    """Refuse what cannot run, before any engine starts. Raises ValueError."""
    choose(request.tasks, named=True)
    for task in request.tasks:
        if task.local is not None and task.local.open_ended:
            raise ValueError(
                f"task {task.name} draws with random numbers that vLLM cannot be given; use "
                "--backend hf"
            )
    for model in request.models:
        for name in (model.config or {}).get("architectures") or ():
            if name not in ARCHITECTURES:
                raise ValueError(
                    f"model {model.name}: the vLLM plugin does not support {name}; use --backend hf"
                )
    hardware = installed(request.vllm_python)["hardware"]
    for model in request.models:
        model_dtype(model.config or {}, request.dtype, hardware)


def options(arm: Arm, recipe: str | None, seed: int) -> dict[str, Any] | None:
    """The plugin's options of an arm; None for plain vLLM. recipe: as the user named it."""
    if arm.config is None:
        return None
    if arm.layers is not None:
        assert recipe is not None
        path = Path(recipe)
        return {"recipe": str(path.resolve()) if path.is_file() else recipe, "seed": seed}
    return {**arm.config.to_dict(), "seed": seed}


def model_dtype(config: Mapping[str, Any], wanted: str, hardware: str) -> str:
    """vLLM's dtype for ``--dtype``: the checkpoint's own for ``auto``.

    vLLM's kernels of Gated DeltaNet take no fp32, and on a CPU bf16 alone: a checkpoint in another
    dtype is run in bf16. Raises ValueError where another one is asked for.
    """
    text = config.get("text_config") or config
    given = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    dtype = str(given) if wanted == "auto" else DTYPES[wanted]
    cpu = " CPU (" in hardware
    refused = dtype == "float32" or (cpu and dtype != "bfloat16")
    if "linear_num_value_heads" not in text or not refused:
        return dtype
    if wanted == "auto":
        return "bfloat16"
    takes = "take bf16 alone on a CPU" if cpu else "take no fp32"
    raise ValueError(
        f"--dtype {wanted}: vLLM's kernels of Gated DeltaNet {takes}; give --dtype bf16, or leave "
        "it out"
    )


def parameters(folder: Path) -> int:
    """Number of weights, from the headers of the safetensors files."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        total += sum(math.prod(t["shape"]) for t in header.values())
    return total


def stop_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """Token ids that end an answer."""
    found: set[Any] = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    path = folder / "generation_config.json"
    if path.is_file():
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(ends if isinstance(ends, list) else [ends])
    return found - {None}


def counts(
    configs: Mapping[int, StateConfig], generated: Sequence[int]
) -> dict[int, dict[str, int]]:
    """What decoding did to the state of each layer, from the tokens of each answer.

    The first token of an answer comes from the prefill. Flushes of staggered windows are counted as
    if they were not, which is at most one too few an answer.
    """
    steps = [max(n - 1, 0) for n in generated]
    return {
        layer: {
            "steps": sum(steps),
            "flushes": sum(n // c.buffer_len for n in steps),
            "quantised_reads": sum(steps) * (c.update.rounds or c.readout.rounds),
        }
        for layer, c in configs.items()
    }


def request_seed(doc_hash: str, seed: int) -> int:
    """Sampling seed of a document's request: its random key follows it where vLLM shows it."""
    from .probes import short_hash

    return int(short_hash(doc_hash, str(seed)), 16) >> 1


def _environment(hardware: str) -> dict[str, str]:
    """Settings of a CPU build without which a small model takes minutes."""
    if " CPU (" not in hardware:
        return {}
    import os

    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    return {k: v for k, v in wanted.items() if k not in os.environ}


class Engines:
    """At most one engine at a time, made when an arm first asks."""

    def __init__(self, make: Callable[[Arm, int], Session]):
        self._make = make
        self._session: Session | None = None
        self._serves: tuple[str, int] | None = None

    def get(self, arm: Arm, seed: int) -> Session:
        """An engine for an arm. Where vLLM shows requests, the seed is theirs and not its own."""
        shown = self._session is not None and self._session.made_with["runner"] == "v2"
        if self._session is None or self._serves is None or self._serves[0] != arm.digest:
            shown = False
        if not shown and self._serves != (arm.digest, seed):
            self.close()
            self._session = self._make(arm, seed)
            self._serves = (arm.digest, seed)
        assert self._session is not None
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._serves = None


def run_model(plan: Plan, index: int, folder: Path, tick: Callable[[int], None]) -> ModelOutcome:
    """Measure every unit of one model that is not on disk yet."""
    from transformers import AutoConfig, AutoTokenizer

    from .. import models
    from ..backends.vllm.generate import Session
    from . import environment, probes, runner
    from .schema import ModelRecord

    request = plan.request
    resolved = request.models[index]
    where = Path(resolved.location)
    if resolved.source == "hub":
        where = models.hub_folder(resolved.location, request.trust_remote_code)
    made_with = installed(request.vllm_python)
    config = models.check_folder(where)
    loading = {"local_files_only": True, "trust_remote_code": request.trust_remote_code}
    hf_config = AutoConfig.from_pretrained(where, **loading)
    tokenizer = AutoTokenizer.from_pretrained(where, **loading)
    template = runner.set_template(request, tokenizer)
    geometry = read_geometry(hf_config)
    chosen = plan.arms[resolved.name]
    if chosen is None:
        chosen = runner.arms_for(request, geometry, hf_config, resolved.name)
    dtype = model_dtype(config, request.dtype, made_with["hardware"])
    ring = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    extra = engine_arguments(request.vllm_args)
    described = environment.describe("cpu").model_copy(
        update={
            "hardware": made_with["hardware"],
            "packages": environment.versions()
            | {k: made_with[k] for k in ("vllm", "torch", "transformers")},
        }
    )
    outcome = runner.ModelOutcome(
        ModelRecord(
            name=resolved.name,
            source=resolved.source,
            model_type=geometry.model_type,
            parameters=parameters(where),
            dtype=dtype,
            weights=models.weights_digest(where),
            recurrent_layers=len(geometry.layers),
            state_elements=sum(g.elements for g in geometry.layers.values()),
            chat_template=template if any(s.chat for s in plan.specs) else None,
        ),
        chosen,
        {a.name: a.bytes(geometry, ring) for a in chosen},
        described,
    )
    local: list[Any] = []
    for spec, documents in zip(plan.specs, plan.documents, strict=True):
        docs = None
        if spec.local is not None:
            docs = probes.prompts(spec.local, documents, spec.settings, tokenizer)
            docs = replace(docs, task=spec.name)
        local.append(docs)
    harness = any(s.kind == "lm_eval" for s in plan.specs)

    def engine(arm: Arm, seed: int) -> Session:
        quick = {"enforce_eager": True} if " CPU (" in made_with["hardware"] else {}
        arguments = {
            "dtype": dtype,
            "seed": 0,
            "max_num_seqs": arm.batch_size or request.batch_size,
            "trust_remote_code": request.trust_remote_code,
            **quick,
            **extra,
        }
        return Session(
            str(where.resolve()),
            options(arm, request.recipe, seed),
            python=request.vllm_python,
            tokenizer=harness,
            engine=arguments,
            env=_environment(made_with["hardware"]),
        )

    common = {
        "backend": "vllm",
        "weights": outcome.model.weights,
        "dtype": dtype,
        "made_with": made_with,
        "engine": extra,
        "toolkit": described.toolkit,
    }
    store = runner.UnitStore(folder)
    tasks: dict[str, Any] = {}
    found: dict[tuple[str, str, int], str] = {}
    with contextlib.closing(Engines(engine)) as engines:
        for one in chosen:
            for seed in runner.seeds_of(one, request.seeds):
                for spec, record, docs in zip(plan.specs, plan.tasks, local, strict=True):
                    number = runner.documents_for(plan, spec, one)
                    if number == 0:
                        continue
                    key = runner.unit_key(
                        {
                            **common,
                            "task": record.model_dump(
                                exclude={"margin", "threshold", "description"}
                            ),
                            "documents": number,
                            "arm": one.digest,
                            "seed": seed,
                            "batch": one.batch_size or request.batch_size,
                            "data": runner.task_digest(spec, request),
                            **({"template": template} if spec.chat else {}),
                        }
                    )
                    found[record.name, one.name, seed] = key
                    if store.load(resolved.name, record.name, one.name, seed, key) is None:
                        session = engines.get(one, seed)
                        if docs is not None:
                            unit = measure_prompts(
                                session, docs.first(number), one, seed, key, resolved.name,
                                geometry, tokenizer, stop_tokens(where, tokenizer),
                            )  # fmt: skip
                        else:
                            unit = _measure_harness(
                                session, spec, number, one, seed, key, resolved.name, geometry,
                                tokenizer, request, tasks,
                            )  # fmt: skip
                        store.save(unit)
                    tick(number or 0)
    for record in plan.tasks:
        for (task, arm, seed), key in found.items():
            if task == record.name:
                outcome.keys.append((task, arm, seed, key))
    return outcome


def _configs(one: Arm, geometry: ModelGeometry) -> dict[int, StateConfig]:
    if one.config is None:
        return {}
    return {i: (one.layers or {}).get(i, one.config) for i in geometry.layers}


def measure_prompts(
    session: Session,
    docs: Any,
    one: Arm,
    seed: int,
    key: str,
    model: str,
    geometry: ModelGeometry,
    tokenizer: Any,
    stop: set[int],
) -> Unit:
    """``measure.measure_prompts`` through an engine."""
    import numpy as np

    from .measure import prompt_unit

    began = time.perf_counter()
    new = max(docs.limits)
    answers = session.answer(
        [p.tolist() for p in docs.prompts],
        max_tokens=new,
        ignore_eos=True,
        seeds=[request_seed(h, seed) for h in docs.doc_hashes],
    )
    outputs = [np.asarray(c.token_ids, np.int64) for c in answers.completions]
    used = counts(_configs(one, geometry), [len(o) for o in outputs])
    return prompt_unit(model, docs, one, seed, key, outputs, stop, tokenizer, used, began)


def _measure_harness(
    session: Session,
    spec: TaskSpec,
    limit: int | None,
    one: Arm,
    seed: int,
    key: str,
    model: str,
    geometry: ModelGeometry,
    tokenizer: Any,
    request: Request,
    tasks: dict[str, Any],
) -> Unit:
    from .lm_tasks import TaskRunner
    from .vllm_lm import VllmLM

    if spec.name not in tasks:
        tasks[spec.name] = TaskRunner(
            spec, request.data_dir, limit, tokenizer, request.max_gen_toks
        )
    runner = tasks[spec.name]

    def make(repeat: int) -> VllmLM:
        return VllmLM(
            session, tokenizer, runner.seed_of(seed, repeat), _configs(one, geometry),
            runner.think_end,
        )  # fmt: skip

    return runner.measure_with(make, model, one, seed, key, "decode")
