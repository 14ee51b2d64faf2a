"""Suites: which tasks a run asks, on how many documents, with which margins. YAML, checked.

The shipped ones are ``evals/suites/*.yaml``; evals/suites/README.md describes the fields. No torch.
"""

from __future__ import annotations

import difflib
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .. import recipe
from . import data_ruler
from .tasks import TASKS, StreamTask

FOLDER = Path(__file__).resolve().parent / "suites"
RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT, GENERAL = "default", "general"
"""What a run asks that names no suite: of shipped models, and of any other."""
ACCURACY_MARGIN = 0.01
LOSS_MARGIN = 0.01
LEARNED = 0.97
"""fp32 accuracy below which a local task counts as not learned: damage could not be told apart."""


class SuiteError(ValueError):
    """A suite or task list that cannot be used; one line with the value and the remedy."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Generation(_Strict):
    """How an lm-eval task's answers are drawn; what is left out stays as the task has it.

    card: the model's own generation_config.json, where model cards publish their sampling, comes
    before temperature, top_p and top_k. max_gen_toks: tokens of an answer. think_end: the text that
    ends a model's reasoning, which is not scored.
    """

    card: bool = False
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    max_gen_toks: int | None = Field(default=None, ge=1)
    think_end: str | None = None


class TaskSpec(_Strict):
    """One task of a suite.

    label: its name in tables, where a task occurs twice. documents: how many (streams, prompts or
    questions). settings: difficulty of a local task. margin: the loss that is still accepted, of
    accuracy as a share, of likelihood in nats a token. threshold: fp32 accuracy below which the
    task is not learned. path: how a stream's tokens are scored, ``scan`` or ``decode``; None leaves
    it to the command. states: documents whose stored states are compared with fp32's, for gates on
    ``state_error``. models: ``shipped`` or ``other``, where the task is for those only.

    For lm-eval tasks: repeats (answers a question; accuracy is their mean, avg@k), generation, chat
    (ask in the model's chat template, if it has one), and stepwise, which lets a task of
    log-likelihoods score its whole text as decode steps.

    For runs that name no format: arms (in the syntax of --arms) limits the task to those arms, and
    per_step is the number of documents for arms that round at every step, which cost most.
    """

    task: str
    mode: Literal["stream", "generate", "lm_eval"] | None = None
    documents: int | None = Field(default=None, ge=1)
    settings: dict[str, Any] = {}
    margin: float | None = Field(default=None, gt=0)
    threshold: float | None = None
    label: str | None = Field(default=None, pattern=r"^[\w.\-]+$")
    arms: tuple[str, ...] | None = None
    per_step: int | None = Field(default=None, ge=1)
    path: Literal["scan", "decode"] | None = None
    states: int | None = Field(default=None, ge=1)
    models: Literal["shipped", "other"] | None = None
    repeats: int = Field(default=1, ge=1)
    generation: Generation | None = None
    chat: bool = False
    stepwise: bool = False

    @property
    def local(self) -> StreamTask | None:
        return TASKS.get(self.task) if self.kind != "lm_eval" else None

    @property
    def kind(self) -> Literal["stream", "generate", "lm_eval"]:
        if self.mode is not None:
            return self.mode
        if self.task not in TASKS:
            return "lm_eval"
        return "generate" if TASKS[self.task].generates else "stream"

    @property
    def name(self) -> str:
        """The label, else the task's name, with its mode where that is not the usual one."""
        if self.label is not None:
            return self.label
        plain = self.mode is None or self.mode == TaskSpec(task=self.task).kind
        return self.task if plain else f"{self.task}-{self.mode}"

    @property
    def likelihood(self) -> bool:
        return self.local is not None and self.local.scored == "likelihood"

    @property
    def accepted(self) -> float:
        """The margin in force."""
        if self.margin is not None:
            return self.margin
        return LOSS_MARGIN if self.likelihood else ACCURACY_MARGIN

    @property
    def learned(self) -> float | None:
        """The threshold in force; none for likelihood and for lm-eval tasks that name none."""
        if self.threshold is not None or self.kind == "lm_eval" or self.likelihood:
            return self.threshold
        return LEARNED


class SuiteGate(_Strict):
    """A threshold that every arm of a role must meet on a task (None: on every task that has the
    metric), with the given confidence, or the run fails.

    against fp32: kld_mean, kld_p99 (nats) and kld_slope must stay at or below the threshold, top1
    (a share) at or above it; accuracy_delta is non-inferiority: the loss of accuracy, as a share,
    stays below the threshold; length_change is equivalence: responses grow or shrink by less than
    the threshold, as a share of fp32's tokens. against ``committed``, the suite's baseline:
    kld_mean and state_error (root mean square of the stored state's error, the worst layer) are
    ratios to the committed value, kld_slope is the rise above it, top1 and accuracy_delta the loss
    against it.
    """

    metric: Literal[
        "kld_mean", "kld_p99", "kld_slope", "top1", "accuracy_delta", "length_change", "state_error"
    ]
    against: Literal["fp32", "committed"] = "fp32"
    role: Literal["candidate", "floor"] = "candidate"
    task: str | None = None
    threshold: float
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)

    @model_validator(mode="after")
    def _possible(self) -> SuiteGate:
        if self.metric == "state_error" and self.against == "fp32":
            raise ValueError("state_error is compared with a committed result; set against")
        if self.metric == "kld_p99" and self.against == "committed":
            raise ValueError("kld_p99 has no committed value; gate kld_mean against it instead")
        if self.metric == "length_change" and self.against == "committed":
            raise ValueError("length_change has no committed value; leave against out")
        if self.role == "floor" and self.against == "committed":
            raise ValueError("the floor is fp32 measured again; leave against out")
        return self


class Suite(_Strict):
    """A suite file. arms: comparison arms in the syntax of --arms, beside what the command asks;
    recipes: what a run that names no format measures of each model instead. None leaves them to the
    command. gates: what decides the command's exit code, beside the gates of the recipes; baseline:
    the committed result that gates ``against: committed`` compare with, a file beside the suite or
    in evals/results."""

    schema_: Literal[1] = Field(alias="schema")
    name: str
    description: str
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    arms: tuple[str, ...] | None = None
    recipes: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    documents: int = Field(default=24, ge=1)
    gates: tuple[SuiteGate, ...] = ()
    baseline: str | None = None

    @model_validator(mode="after")
    def _baseline(self) -> Suite:
        if self.baseline is None and any(g.against == "committed" for g in self.gates):
            raise ValueError("a gate compares with a committed result; name its file in baseline")
        return self


def shipped() -> dict[str, Path]:
    """Names and files of the suites that come with the package."""
    return {p.stem: p for p in sorted(FOLDER.glob("*.yaml"))}


def load(name: str) -> Suite:
    """A shipped suite by name, or a .yaml file. Raises SuiteError."""
    files = shipped()
    path = files.get(name, Path(name))
    if name not in files and path.suffix not in (".yaml", ".yml"):
        near = difflib.get_close_matches(name, list(files), 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise SuiteError(
            f"unknown suite '{name}': {hint}shipped suites: {', '.join(files)}; or a .yaml file"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(
            f"suite {path}: cannot be read ({error.strerror}); give a suite file"
        ) from None
    except yaml.YAMLError:
        raise SuiteError(f"suite {path}: not valid YAML; check indentation and quotes") from None
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        found = error.errors()
        first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
        where = ".".join(str(p) for p in first["loc"]) or "the file"
        known = ""
        if first["type"] == "extra_forbidden":
            inner: dict[str, type[BaseModel]] = {"tasks": TaskSpec, "gates": SuiteGate}
            parent = inner.get(str(first["loc"][0]), Suite)
            fields = (Generation if "generation" in first["loc"][:-1] else parent).model_fields
            near = difflib.get_close_matches(str(first["loc"][-1]), list(fields), 1)
            known = f" (did you mean '{near[0]}'?)" if near else f" (known: {', '.join(fields)})"
        message = first["msg"].removeprefix("Value error, ")
        raise SuiteError(f"suite {path.name}: {where}: {message}{known}") from None
    names = [s.name for s in suite.tasks]
    for spec in suite.tasks:
        check(spec)
        if names.count(spec.name) > 1:
            raise SuiteError(
                f"suite {path.name}: task '{spec.name}' occurs twice; give one of them a label"
            )
    for gate in suite.gates:
        if gate.task is not None and gate.task not in names:
            near = difflib.get_close_matches(gate.task, names, 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise SuiteError(
                f"suite {path.name}: a gate is on task '{gate.task}', which the suite does not "
                f"have: {hint}tasks: {', '.join(names)}"
            )
    for name in suite.recipes or ():
        if name.partition("/")[0] != "auto":
            recipe.resolve(name)
    return suite.model_copy(update={"baseline": _beside(path, suite.baseline)})


def _beside(path: Path, baseline: str | None) -> str | None:
    """Where the baseline of a suite file lies: beside it if it is there, else in evals/results."""
    if baseline is None:
        return None
    near = path.parent / baseline
    return str(near if near.is_file() else RESULTS / baseline)


def check(spec: TaskSpec) -> None:
    """Raise SuiteError for a local task's unknown or impossible setting."""
    task = spec.local
    if spec.mode in ("stream", "generate") and task is None:
        raise SuiteError(
            f"task '{spec.task}' is not local, so it has no mode '{spec.mode}'; local tasks: "
            f"{', '.join(TASKS)}"
        )
    for name, value in (("path", spec.path), ("states", spec.states)):
        if value is not None and spec.kind != "stream":
            raise SuiteError(f"task '{spec.task}' is not teacher-forced, so it has no {name}")
    if spec.states is not None and spec.path == "decode":
        raise SuiteError(f"task '{spec.task}': states are recorded on path scan; leave one out")
    if spec.kind != "lm_eval":
        for name in ("repeats", "generation", "chat", "stepwise"):
            if getattr(spec, name) != TaskSpec.model_fields[name].default:
                raise SuiteError(f"task '{spec.task}' is local; {name} is for lm-eval tasks")
    if spec.kind == "lm_eval":
        _check_harness(spec)
    if spec.repeats > 1:
        drawn = spec.generation
        if drawn is None or not (drawn.card or drawn.temperature):
            raise SuiteError(
                f"task '{spec.name}': {spec.repeats} greedy answers are one answer "
                f"{spec.repeats} times; set generation.temperature, or generation.card"
            )
    if task is None:
        return
    if spec.kind == "generate" and not task.generates:
        names = ", ".join(t.name for t in TASKS.values() if t.generates)
        raise SuiteError(f"task '{spec.task}' has no free-running form; tasks that do: {names}")
    known = list(signature(task.draw).parameters)[2:]
    for key in spec.settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise SuiteError(
                f"task '{spec.task}' has no setting '{key}': {hint}known: {', '.join(known)}"
            )


def _check_harness(spec: TaskSpec) -> None:
    """Settings of a task that is not local: lengths of those made here, none of the others."""
    made = spec.task in data_ruler.NAMES
    for key in spec.settings:
        if not made or key != "lengths":
            known = "known: lengths" if made else "lm-eval tasks take none"
            raise SuiteError(f"task '{spec.task}' has no setting '{key}': {known}")
    lengths = spec.settings.get("lengths", data_ruler.LENGTHS)
    if not isinstance(lengths, list | tuple) or not lengths:
        raise SuiteError(f"task '{spec.task}': lengths {lengths!r} is no list of tokens")
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or length < 128:
            raise SuiteError(f"task '{spec.task}': length {length!r} is not 128 tokens or more")


def tasks_for(suite: Suite, shipped_models: bool) -> list[TaskSpec]:
    """The suite's tasks for shipped models, or for any other."""
    kind = "shipped" if shipped_models else "other"
    out = [t for t in suite.tasks if t.models in (None, kind)]
    if not out:
        raise SuiteError(f"suite {suite.name} has no task for {kind} models; choose another suite")
    return out


def pick(names: list[str], suite: Suite, lm_eval_tasks: list[str] | None = None) -> list[TaskSpec]:
    """The specs that --tasks names: those of the suite where it has them, else plain ones.

    lm_eval_tasks: names that lm-eval knows, None if it is not installed. Raises SuiteError for an
    unknown name, with a suggestion.
    """
    out: list[TaskSpec] = []
    for name in names:
        listed = [s for s in suite.tasks if name in (s.task, s.name)]
        if listed:
            out += listed
        elif name in TASKS:
            out.append(TaskSpec(task=name))
        elif lm_eval_tasks is not None and name in lm_eval_tasks:
            out.append(TaskSpec(task=name))
        else:
            near = difflib.get_close_matches(name, [*TASKS, *(lm_eval_tasks or [])], 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            more = (
                "lm-eval tasks need the eval extra: pip install 'replayssm-quant[eval]'"
                if lm_eval_tasks is None
                else "lm-eval has no such task either"
            )
            raise SuiteError(
                f"unknown task '{name}': {hint}local tasks: {', '.join(TASKS)}; {more}"
            )
    return [s for i, s in enumerate(out) if s not in out[:i]]
