"""Runs an evaluation: checks the request, measures its units, compares, writes one result file.

``plan`` refuses anything that cannot work before a model is loaded, and needs no torch. ``run``
measures each model in its own process where that is safe and of use (several models, CPU), keeps
every finished unit on disk, and picks up where an interrupted run left off.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing as mp
import os
import queue
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import StateConfig
from ..models import ResolvedModel
from ..state.geometry import ModelGeometry, read_geometry
from . import gates
from . import suite as suites
from .arms import Arm, arm, candidate_arms, parse_arm, recipe_arms, reference_arms, story_arms
from .arms import unique as unique_arms
from .compare import compare, overall
from .environment import code_digest, versions
from .probes import DATA_SEED, short_hash
from .schema import (
    SCHEMA,
    ArmRecord,
    Comparison,
    Environment,
    GateOutcome,
    ModelRecord,
    ResultError,
    RunRecord,
    StateBytes,
    TaskRecord,
    write_json,
)
from .store import Unit, UnitStore, unit_key
from .suite import Suite, TaskSpec

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
RESULTS = "results.json"


@dataclass(frozen=True)
class Request:
    """What a user asks for. candidate and recipe None: the comparison of ``arms.STORY``."""

    models: tuple[ResolvedModel, ...]
    suite: Suite
    tasks: tuple[TaskSpec, ...]
    candidate: StateConfig | None = None
    recipe: str | None = None
    extra: tuple[StateConfig, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    documents: int | None = None
    margin: float | None = None
    batch_size: int = 8
    prefill: int = 1
    path: str = "scan"
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    data_dir: Path | None = None
    download_data: bool = False
    max_gen_toks: int | None = None
    chat_template: Path | None = None
    out: Path | None = None
    jobs: int | None = None
    command: tuple[str, ...] = ()
    backend: str = "hf"
    vllm_python: str = sys.executable
    vllm_args: str | None = None


@dataclass
class Plan:
    """A checked request: arms by model name (None where a hub model must be fetched first)."""

    request: Request
    tasks: list[TaskRecord]
    specs: list[TaskSpec]
    arms: dict[str, list[Arm] | None]
    documents: list[int]


def _task_record(spec: TaskSpec, documents: int, request: Request) -> TaskRecord:
    local = spec.local
    margin, drawn, most = spec.accepted, spec.generation is not None, request.max_gen_toks
    if request.margin is not None and not spec.likelihood:
        margin = request.margin
    return TaskRecord(
        name=spec.name,
        kind=spec.kind,
        description=local.description if local else f"{spec.task} of lm-evaluation-harness",
        scored="likelihood" if spec.likelihood else "accuracy",
        settings={
            **(dict(local.difficulty) if local else {}),
            **spec.settings,
            "documents": documents,
            **({"data_seed": DATA_SEED} if local else {}),
            **({"repeats": spec.repeats} if spec.repeats > 1 else {}),
            **({"chat": True} if spec.chat else {}),
            **({"generation": spec.generation.model_dump(exclude_none=True)} if drawn else {}),
            **({"max_gen_toks": most} if most is not None and spec.kind == "lm_eval" else {}),
        },
        chance=local.chance if local else None,
        threshold=spec.learned,
        margin=margin,
        metric="loss" if spec.likelihood else "ended" if local and local.open_ended else "accuracy",
    )


def arms_for(request: Request, geometry: ModelGeometry, config: Any, model: str) -> list[Arm]:
    """The arms of one model, reference and floor first. Raises ValueError where one cannot be."""
    if request.recipe is not None:
        chosen = recipe_arms(request.recipe, geometry, config, model)
    elif request.candidate is not None:
        chosen = candidate_arms(request.candidate)
    elif request.suite.recipes is not None:
        found = (recipe_arms(name, geometry, config, model) for name in request.suite.recipes)
        chosen = [one for arms in found for one in arms if one.role == "candidate"]
    elif request.suite.arms is not None:
        chosen = [arm("candidate", parse_arm(t)) for t in request.suite.arms]
    else:
        chosen = story_arms()
    chosen = unique_arms([*chosen, *(arm("candidate", c) for c in request.extra)])
    for one in chosen:
        one.check(geometry)
    return [*reference_arms(request.batch_size), *chosen]


def plan(request: Request) -> Plan:
    """Check everything that can be checked without loading a model. Raises ValueError."""
    if not DEVICE.fullmatch(request.device):
        raise ValueError(f"unknown device '{request.device}'; use auto, cpu, cuda or cuda:0")
    for name, value, low in (
        ("batch size", request.batch_size, 1),
        ("prefill", request.prefill, 1),
        ("jobs", request.jobs if request.jobs is not None else 1, 1),
        ("limit", request.documents if request.documents is not None else 1, 1),
        ("max-gen-toks", request.max_gen_toks if request.max_gen_toks is not None else 1, 1),
    ):
        if value < low:
            raise ValueError(f"{name} {value} is too small; use {low} or more")
    if request.path not in ("scan", "decode"):
        raise ValueError(f"unknown path '{request.path}'; use scan or decode")
    if not request.seeds or len(set(request.seeds)) < len(request.seeds):
        raise ValueError(f"seeds {list(request.seeds)} must be different numbers, at least one")
    names = [m.name for m in request.models]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ValueError(f"model '{twice}' is named twice; name each model once")
    if request.data_dir is not None and not request.data_dir.is_dir():
        raise ValueError(f"data folder {request.data_dir} does not exist; give a folder")
    chats = [s for s in request.tasks if s.chat]
    if request.chat_template is not None:
        if not chats:
            raise ValueError(
                "--chat-template has no effect: no task of this run is asked in a chat template; "
                "set chat: true on a task of a suite"
            )
        read_template(request.chat_template)
    documents, specs = [], []
    for spec in request.tasks:
        suites.check(spec)
        chosen = spec.documents or (request.suite.documents if spec.kind != "lm_eval" else None)
        if request.documents is not None:
            chosen = min(chosen, request.documents) if chosen else request.documents
        documents.append(chosen or 0)
        specs.append(spec)
    arms: dict[str, list[Arm] | None] = {}
    for model in request.models:
        if model.config is None:
            arms[model.name] = None
            continue
        try:
            geometry = read_geometry(model.config)
            arms[model.name] = arms_for(request, geometry, model.config, model.name)
        except ValueError as error:
            raise ValueError(f"model {model.name}: {error}") from None
    if request.backend == "vllm":
        from .vllm import check

        check(request)
    if any(s.kind == "lm_eval" for s in specs):
        from .lm_tasks import check_tasks

        asked = [s for s in specs if s.kind == "lm_eval"]
        check_tasks(asked, request.data_dir, request.download_data)
    tasks = [_task_record(s, n, request) for s, n in zip(specs, documents, strict=True)]
    if request.suite.baseline is not None:
        committed = gates.read(Path(request.suite.baseline))
        known = {model: ones for model, ones in arms.items() if ones is not None}
        gates.check_fits(request.suite, committed, known, tasks, request.seeds)
    return Plan(request, tasks, specs, arms, documents)


def read_template(path: Path) -> str:
    """A chat template from a file. Raises ValueError where it is none."""
    import jinja2

    try:
        text = path.read_text(encoding="utf-8")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)  # noqa: S701
    except OSError as error:
        raise ValueError(
            f"chat template {path}: cannot be read ({error.strerror}); give a Jinja file"
        ) from None
    except jinja2.TemplateError as error:
        # transformers' own block, which marks what an assistant said, is no error
        if "generation" not in str(error):
            raise ValueError(f"chat template {path}: not valid Jinja ({error}); mend it") from None
    if "messages" not in text:
        raise ValueError(f"chat template {path}: does not use 'messages'; give a chat template")
    return text


def set_template(request: Request, tokenizer: Any) -> str | None:
    """Give a tokenizer the template that the user named; the digest of the one it has then, if
    there is one."""
    if request.chat_template is not None:
        tokenizer.chat_template = read_template(request.chat_template)
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else short_hash(json.dumps(template))


def documents_for(plan: Plan, spec: TaskSpec, one: Arm) -> int | None:
    """Documents of a task for an arm: 0 if the suite leaves the arm out, None for all there are."""
    documents = plan.documents[plan.specs.index(spec)] or None
    request = plan.request
    basis = one.role in ("reference", "floor")
    if basis or request.candidate is not None or request.recipe is not None:
        return documents
    if spec.arms is not None:
        listed = {arm("candidate", parse_arm(t)).digest for t in spec.arms}
        asked = {arm("candidate", c).digest for c in request.extra}
        if one.digest not in listed | asked:
            return 0
    if spec.per_step is not None and one.per_step and documents is not None:
        return min(documents, spec.per_step)
    return documents


@dataclass
class ModelOutcome:
    """What a worker hands back beside the units on disk."""

    model: ModelRecord
    arms: list[Arm]
    bytes: dict[str, StateBytes]
    environment: Environment
    keys: list[tuple[str, str, int, str]] = field(default_factory=list)


def seeds_of(one: Arm, seeds: Sequence[int]) -> Sequence[int]:
    """The rounding seeds of an arm: one where no random bits are drawn."""
    return seeds if one.rounds else seeds[:1]


def _guard(loaded: Any, docs: Sequence[Any]) -> None:
    """Refuse a model whose decode path differs from its one-shot logits."""
    import numpy as np
    import torch

    from ..backends import hf

    ids = next((d.ids[:2, :48] for d in docs if hasattr(d, "ids")), None)
    if ids is None:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, min(256, loaded.model.config.vocab_size), (2, 48))
    hf.check_decode(
        loaded.model, torch.from_numpy(np.ascontiguousarray(ids)).to(loaded.model.device)
    )


def run_model(plan: Plan, index: int, folder: Path, tick: Callable[[int], None]) -> ModelOutcome:
    """Measure every unit of one model that is not on disk yet. Runs in a worker process."""
    from .._paths import drop_checkout

    drop_checkout()
    from ..models import quiet

    if plan.request.backend == "vllm":
        from .vllm import run_model as run_engines

        with quiet():
            return run_engines(plan, index, folder, tick)
    with quiet():
        return _run_model(plan, index, folder, tick)


def _run_model(plan: Plan, index: int, folder: Path, tick: Callable[[int], None]) -> ModelOutcome:
    import torch

    from .. import models
    from ..backends import hf
    from . import environment, probes
    from .measure import Options, measure_prompts, measure_streams
    from .signals import Reference
    from .state_error import StateProbe
    from .state_error import attach as attach_states

    request = plan.request
    resolved = request.models[index]
    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device '{device}': torch sees no CUDA GPU; use --device cpu")
    loaded = models.load(resolved, device, request.dtype, request.trust_remote_code)
    model = loaded.model
    geometry = read_geometry(model.config)
    hf.recurrent_layers(model)
    chosen = plan.arms[resolved.name]
    if chosen is None:
        chosen = arms_for(request, geometry, model.config, resolved.name)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    ring = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    options = Options(request.batch_size, request.prefill, request.path)
    store = UnitStore(folder)
    template = set_template(request, loaded.tokenizer)
    described = environment.describe(device)
    outcome = ModelOutcome(
        ModelRecord(
            name=resolved.name,
            source=resolved.source,
            model_type=geometry.model_type,
            parameters=sum(p.numel() for p in model.parameters()),
            dtype=dtype,
            weights=loaded.digest,
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
        if spec.local is None:
            local.append(None)
            continue
        build = probes.prompts if spec.kind == "generate" else probes.streams
        docs = build(spec.local, documents, spec.settings, loaded.tokenizer)
        local.append(replace(docs, task=spec.name))
    _guard(loaded, local)
    harness: dict[str, Any] = {}
    for spec, documents in zip(plan.specs, plan.documents, strict=True):
        if spec.kind == "lm_eval":  # all of them before the first is measured: data may not fit
            from .lm_tasks import TaskRunner

            asked = (request.data_dir, documents or None, loaded.tokenizer, request.max_gen_toks)
            harness[spec.name] = TaskRunner(spec, *asked)
            if harness[spec.name].info.output_type == "generate_until":
                harness[spec.name].room(loaded)
    common = {
        "schema": SCHEMA,
        "weights": loaded.digest,
        "dtype": dtype,
        "hardware": described.hardware,
        "packages": {k: v for k, v in versions().items() if k in ("torch", "transformers")},
        "toolkit": described.toolkit,
        # a run that looks for changes of the code must not resume what older code measured
        **({"code": code_digest()} if request.suite.recipes is not None else {}),
    }
    for spec, record, docs in zip(plan.specs, plan.tasks, local, strict=True):
        reference, probe = Reference(), None
        options = replace(options, path=spec.path or request.path)
        filled = False
        for one in chosen:
            number = documents_for(plan, spec, one)
            if number == 0:
                continue
            part = docs if docs is None else docs.first(number)
            for seed in seeds_of(one, request.seeds):
                key = unit_key(
                    {
                        **common,
                        "task": record.model_dump(exclude={"margin", "threshold", "description"}),
                        "documents": number,
                        "arm": one.digest,
                        "seed": seed,
                        "batch": one.batch_size or options.batch_size,
                        "prefill": options.prefill,
                        "path": options.path,
                        **({"states": spec.states} if spec.states is not None else {}),
                        **({"template": template} if spec.chat else {}),
                        "data": task_digest(spec, request),
                    }
                )
                outcome.keys.append((record.name, one.name, seed, key))
                if store.load(resolved.name, record.name, one.name, seed, key) is not None:
                    tick(number or 0)
                    continue
                if spec.kind == "stream":
                    if not filled and one.role != "reference":
                        measure_streams(
                            loaded, docs, chosen[0], request.seeds[0], options, reference, ""
                        )
                    filled = True
                    unit = measure_streams(loaded, part, one, seed, options, reference, key, tick)
                    if spec.states is not None and one.role == "candidate":
                        few = docs.first(spec.states)
                        probe = probe or StateProbe(
                            loaded, few, options.batch_size, options.prefill
                        )
                        attach_states(unit.samples, probe.measure(one.seeded(seed)))
                elif spec.kind == "generate":
                    unit = measure_prompts(loaded, part, one, seed, options, key, tick)
                else:
                    unit = harness[spec.name].measure(loaded, one, seed, options, key)
                    tick(unit.record.documents)
                store.save(unit)
    return outcome


def task_digest(spec: TaskSpec, request: Request) -> str:
    """Digest of a task's local data files."""
    if spec.kind != "lm_eval" or request.data_dir is None:
        return ""
    from .lm_tasks import data_digest

    return data_digest(spec.task, request.data_dir)


class _Bar:
    """tqdm on a terminal, nothing elsewhere."""

    def __init__(self, total: int, quiet: bool):
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="doc", leave=False, dynamic_ncols=True)

    def __call__(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _jobs(request: Request) -> int:
    """Worker processes: one a model on a CPU, as long as torch has not been loaded here (a process
    with torch's threads must not be forked)."""
    wanted = request.jobs if request.jobs is not None else _cpus()
    if request.backend == "vllm":  # engines have processes of their own
        return 1
    if request.device not in ("auto", "cpu") or "torch" in sys.modules:
        return 1
    if request.device == "auto" and Path("/dev/nvidiactl").exists():
        return 1
    return max(1, min(wanted, len(request.models)))


def _worker(plan: Plan, index: int, folder: Path, threads: int, messages: Any) -> None:
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        outcome = run_model(plan, index, folder, lambda n: messages.put(("tick", n)))
        messages.put(("done", (index, outcome)))
    except BaseException as error:  # the parent reports it
        known = isinstance(error, ValueError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        if not known:
            import traceback

            traceback.print_exc()
        messages.put(("error", (known, text)))


def _in_processes(plan: Plan, folder: Path, jobs: int, tick: Callable[[int], None]) -> list[Any]:
    """Outcomes of all models, ``jobs`` at a time. Raises what a worker raised, as ValueError, or
    RuntimeError where it died."""
    context = mp.get_context("fork")
    messages = context.Queue()
    threads = max(1, _cpus() // jobs)
    waiting = list(range(len(plan.request.models)))
    running: dict[int, Any] = {}
    outcomes: dict[int, Any] = {}
    total = len(waiting)
    try:
        while len(outcomes) < total:
            while waiting and len(running) < jobs:
                index = waiting.pop(0)
                args = (plan, index, folder, threads, messages)
                running[index] = context.Process(target=_worker, args=args, daemon=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads
                    running[index].start()
            try:
                kind, value = messages.get(timeout=1.0)
            except queue.Empty:
                dead = [p.exitcode for p in running.values() if p.exitcode]
                if dead:
                    raise RuntimeError(
                        f"a worker ended with exit code {dead[0]}; with -9 it ran out of memory: "
                        "use --jobs 1 or a smaller --batch-size"
                    ) from None
                continue
            if kind == "tick":
                tick(value)
            elif kind == "done":
                index, outcomes[value[0]] = value
                running.pop(index).join()
            else:
                known, text = value
                raise ValueError(text) if known else RuntimeError(text)
    finally:
        for process in running.values():
            process.terminate()
            process.join(timeout=10)
    return [outcomes[i] for i in range(total)]


def compare_all(
    units: dict[tuple[str, str, str], list[Unit]], tasks: Sequence[TaskRecord], arms: Sequence[Arm]
) -> list[Comparison]:
    """Comparisons of every arm with the reference; units by (model, task, arm), all seeds."""
    roles = {a.name: a.role for a in arms}
    by_task = {t.name: t for t in tasks}
    out = []
    for (model, task, name), found in units.items():
        if roles[name] == "reference":
            continue
        base = next(
            u
            for (m, t, a), u in units.items()
            if (m, t) == (model, task) and roles[a] == "reference"
        )
        floor = next(
            (
                u
                for (m, t, a), u in units.items()
                if (m, t) == (model, task) and roles[a] == "floor"
            ),
            None,
        )
        kld = floor[0].record.kld.mean if floor and floor[0].record.kld else None
        out.append(compare(base[0], found, by_task[task], roles[name], kld))
    return out


def run(plan: Plan, quiet: bool = False) -> RunRecord:
    """Measure, compare and, where the request names a folder, write ``results.json``, ``report.md``
    and the units. Raises ValueError for what can only be seen with the model at hand, RuntimeError
    if a worker died."""
    began = time.perf_counter()
    request = plan.request
    with contextlib.ExitStack() as stack:
        folder = request.out
        if folder is None:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="replayssm-eval-"))
            )
        folder.mkdir(parents=True, exist_ok=True)
        total = sum(
            (documents_for(plan, spec, one) or 0) * len(seeds_of(one, request.seeds))
            for arms in plan.arms.values()
            for one in arms or reference_arms(1)
            for spec in plan.specs
        )
        jobs = _jobs(request)
        with contextlib.closing(_Bar(total, quiet)) as bar:
            if jobs > 1:
                outcomes = _in_processes(plan, folder, jobs, bar)
            else:
                outcomes = [run_model(plan, i, folder, bar) for i in range(len(request.models))]
        record = _assemble(plan, outcomes, UnitStore(folder), jobs, began)
        if request.out is not None:
            from .report import markdown

            write_json(folder / RESULTS, record)
            from .files import write_text

            write_text(folder / "report.md", markdown(record))
        return record


def _assemble(
    plan: Plan, outcomes: Sequence[ModelOutcome], store: UnitStore, jobs: int, began: float
) -> RunRecord:
    request = plan.request
    units: dict[tuple[str, str, str], list[Unit]] = {}
    records = []
    arms: dict[str, Arm] = {}
    sizes: dict[str, dict[str, StateBytes]] = {}
    for outcome in outcomes:
        for one in outcome.arms:
            known = arms.setdefault(one.name, one)
            if known.digest != one.digest:
                raise ResultError(
                    f"arm {one.name} means different settings on {outcome.model.name}; evaluate "
                    "the models one at a time"
                )
            sizes.setdefault(one.name, {})[outcome.model.name] = outcome.bytes[one.name]
        for task, name, seed, key in outcome.keys:
            unit = store.load(outcome.model.name, task, name, seed, key)
            if unit is None:
                raise ResultError(
                    f"unit {outcome.model.name}, {task}, {name}, seed {seed} vanished from "
                    f"{store.folder}; run again, without other runs in that folder"
                )
            units.setdefault((outcome.model.name, task, name), []).append(unit)
            records.append(unit.record)
    comparisons = compare_all(units, plan.tasks, list(arms.values()))
    outcomes_of_gates = _gates(plan, units, list(arms.values()), [o.model for o in outcomes])
    written: list[ArmRecord] = [a.record(sizes[a.name], request.batch_size) for a in arms.values()]
    first = outcomes[0].environment
    engines = request.backend == "vllm"
    return RunRecord(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=list(request.command),
        suite=request.suite.name,
        limited=request.documents is not None or request.max_gen_toks is not None,
        environment=first,
        settings={
            "seeds": list(request.seeds),
            "batch_size": request.batch_size,
            "prefill": request.prefill,
            "path": request.path,
            "device": request.device,
            "jobs": jobs,
            "recipe": request.recipe,
            "data_seed": DATA_SEED,
            **({"backend": "vllm", "vllm_args": request.vllm_args} if engines else {}),
        },
        models=[o.model for o in outcomes],
        tasks=plan.tasks,
        arms=written,
        units=records,
        comparisons=comparisons,
        gates=outcomes_of_gates,
        verdict=gates.verdict(outcomes_of_gates)
        if request.suite.gates
        else overall(comparisons, outcomes_of_gates),
        seconds=time.perf_counter() - began,
    )


def _gates(
    plan: Plan,
    units: dict[tuple[str, str, str], list[Unit]],
    arms: Sequence[Arm],
    models: Sequence[ModelRecord],
) -> list[GateOutcome]:
    """Outcomes of the suite's gates and of the recipes' own."""
    request = plan.request
    names = [request.recipe] if request.recipe is not None else request.suite.recipes or ()
    known = [(m.name, m.config) for m in request.models if m.config is not None]
    committed = None
    if request.suite.baseline is not None:
        committed = gates.read(Path(request.suite.baseline))
    return gates.evaluate(
        request.suite,
        gates.recipe_gates(names, known),
        units,
        plan.tasks,
        arms,
        models,
        committed,
    )


def as_json(record: RunRecord) -> str:
    """The record as indented JSON text."""
    return json.dumps(json.loads(record.model_dump_json()), indent=1)
