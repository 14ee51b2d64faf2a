"""Suites: which tasks a run asks, on how many documents, with which margins. YAML, checked.

The shipped ones are ``evals/suites/*.yaml``; evals/suites/README.md describes the fields. No torch.
"""

from __future__ import annotations

import difflib
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .tasks import TASKS, StreamTask

FOLDER = Path(__file__).resolve().parent / "suites"
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


class TaskSpec(_Strict):
    """One task of a suite.

    label: its name in tables, where a task occurs twice. documents: how many (streams, prompts or
    questions). settings: difficulty of a local task. margin: the loss that is still accepted, of
    accuracy as a share, of likelihood in nats a token. threshold: fp32 accuracy below which the
    task is not learned. For runs that name no format: arms (in the syntax of --arms) limits the
    task to those arms, and per_step is the number of documents for arms that round at every step,
    which cost most.
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


class Suite(_Strict):
    """A suite file. arms: comparison arms in the syntax of --arms, beside what the command asks;
    None leaves them to the command."""

    schema_: Literal[1] = Field(alias="schema")
    name: str
    description: str
    tasks: tuple[TaskSpec, ...] = Field(min_length=1)
    arms: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    documents: int = Field(default=24, ge=1)


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
            fields = TaskSpec.model_fields if "tasks" in first["loc"] else Suite.model_fields
            near = difflib.get_close_matches(str(first["loc"][-1]), list(fields), 1)
            known = f" (did you mean '{near[0]}'?)" if near else f" (known: {', '.join(fields)})"
        raise SuiteError(f"suite {path.name}: {where}: {first['msg']}{known}") from None
    names = [s.name for s in suite.tasks]
    for spec in suite.tasks:
        check(spec)
        if names.count(spec.name) > 1:
            raise SuiteError(
                f"suite {path.name}: task '{spec.name}' occurs twice; give one of them a label"
            )
    return suite


def check(spec: TaskSpec) -> None:
    """Raise SuiteError for a local task's unknown or impossible setting."""
    task = spec.local
    if spec.mode in ("stream", "generate") and task is None:
        raise SuiteError(
            f"task '{spec.task}' is not local, so it has no mode '{spec.mode}'; local tasks: "
            f"{', '.join(TASKS)}"
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
