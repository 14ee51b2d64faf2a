"""The typed records of an evaluation, versioned. JSON in, JSON out; nothing is executed.

A *unit* is one (model, task, arm, seed): it is measured in one go, written on its own and never
repeated when a run is resumed. A *comparison* joins the units of an arm with those of the fp32
reference, document by document. ``RunRecord`` is the one result file of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .files import write_text

SCHEMA: Literal["replayssm-eval/1"] = "replayssm-eval/1"
Role = Literal["reference", "floor", "shared", "candidate"]
Kind = Literal["stream", "generate", "lm_eval"]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT-LEARNED"]
T = TypeVar("T", bound=BaseModel)


class ResultError(ValueError):
    """A result file that cannot be used; one line that names the file, the value, the remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Environment(_Record):
    """What the numbers were made with. Hardware is a class (cpu, or the GPU's product name)."""

    toolkit: str
    commit: str | None = None
    dirty: bool | None = None
    python: str
    packages: dict[str, str]
    hardware: str
    threads: int


class ModelRecord(_Record):
    """A measured model. source: shipped, folder or hub. weights: digest of its files' headers and
    sizes, and for files up to 1 GiB of their contents. chat_template: digest of the template that
    tasks were asked in, where some ask for one and the tokenizer has one."""

    name: str
    source: Literal["shipped", "folder", "hub"]
    model_type: str
    parameters: int
    dtype: str
    weights: str
    recurrent_layers: int
    state_elements: int
    chat_template: str | None = None


class StateBytes(_Record):
    """Bytes of one request over all recurrent layers. stored: everything the arm keeps; ratio:
    fp32 state / stored; per_step: moved by one decode step, averaged over a window."""

    fp32: int
    stored: int
    ring: int
    ratio: float
    per_step: float
    ring_dtype: str


class ArmRecord(_Record):
    """One way to store the state. config: StateConfig.to_dict(), the same for every layer, or one
    for each layer index as text. digest covers the config, not the batch size; recipe_digest is
    the one that ``recipe show`` prints."""

    name: str
    role: Role
    label: str
    config: dict[str, Any] | None = None
    layers: dict[str, dict[str, Any]] | None = None
    recipe: str | None = None
    recipe_digest: str | None = None
    digest: str
    rounds: bool
    batch_size: int
    bytes: dict[str, StateBytes]


class TaskRecord(_Record):
    """What was asked. threshold: accuracy below which fp32 has not learned the task. metric:
    accuracy, loss, or ended, where the share of responses that end stands for an accuracy."""

    name: str
    kind: Kind
    description: str
    scored: Literal["accuracy", "likelihood"]
    settings: dict[str, Any]
    chance: float | None = None
    threshold: float | None = None
    margin: float
    metric: str


class Exercise(_Record):
    """How hard the stored state was used. writes: roundings of a state into its checkpoint a
    document and layer; quantised_reads: decode steps that read a rounded state, summed over
    documents and layers; decode_share: share of the scored tokens that came from decode steps."""

    steps: int
    flushes: int
    quantised_reads: int
    writes_per_document: float
    scored_tokens: int
    decode_share: float
    path: str


class TailRecord(_Record):
    """Per-token summary in nats."""

    mean: float
    median: float
    p90: float
    p99: float
    p999: float
    max: float
    n: int


class Bucket(_Record):
    """Tokens whose position (recurrent updates so far) lies in low..high - 1. reference_loss: of
    fp32, in nats a token."""

    low: int
    high: int
    n: int
    kld: float
    top1: float
    delta_loss: float
    reference_loss: float | None = None


class UnitRecord(_Record):
    """One (model, task, arm, seed). key: digest of everything that decides its numbers. prompts:
    digest of the prompt hashes in order. accuracy and exact are shares; loss in nats a token."""

    schema_version: Literal["replayssm-eval/1"] = SCHEMA
    key: str
    model: str
    task: str
    arm: str
    seed: int
    documents: int
    answers: int
    prompts: str
    accuracy: float | None
    exact: float | None = None
    loss: float | None = None
    kld: TailRecord | None = None
    kld_all: TailRecord | None = None
    kld_support: str | None = None
    top1: float | None = None
    tokens_generated: int = 0
    nonfinite_tokens: int = 0
    exercise: Exercise
    seconds: float


class IntervalRecord(_Record):
    """low..high: two-sided at ``level``; lower, upper: one-sided bounds at the same level.
    widened: by the exact bound, since too few answers changed for a bootstrap."""

    value: float
    low: float
    high: float
    lower: float
    upper: float
    level: float
    n: int
    widened: bool = False


class Survival(_Record):
    """Share of the responses that equal the reference's through their first ``characters``."""

    characters: int
    same: float


class Comparison(_Record):
    """An arm against the fp32 reference on one task, paired by document, seeds averaged.

    delta: accuracy (or exact match) of the arm minus the reference's, as a share; for likelihood
    tasks minus the rise of the loss in nats a token, so that larger is better everywhere. flips:
    answers right -> wrong and wrong -> right, summed over seeds.

    Of free-running tasks: length, mean tokens of a response, and length_change, its change as a
    share of the reference's; finished, share of the responses that ended before the limit;
    divergence, share of the text before the first difference; first_difference, its median place in
    characters (None where most responses have none), and survival by place.
    """

    model: str
    task: str
    arm: str
    role: Role
    seeds: list[int]
    documents: int
    answers: int
    reference_accuracy: float | None = None
    accuracy: float | None = None
    reference_exact: float | None = None
    exact: float | None = None
    delta: IntervalRecord
    delta_seed_sd: float | None = None
    p_value: float
    flips_worse: int
    flips_better: int
    margin: float
    verdict: Verdict
    reason: str
    documents_needed: int | None = None
    kld: TailRecord | None = None
    kld_mean: IntervalRecord | None = None
    kld_seed_sd: float | None = None
    kld_floor: float | None = None
    kld_slope: float | None = None
    kld_support: str | None = None
    top1: IntervalRecord | None = None
    delta_loss: IntervalRecord | None = None
    buckets: list[Bucket] = []
    divergence: float | None = None
    reference_length: float | None = None
    length: float | None = None
    length_change: IntervalRecord | None = None
    reference_finished: float | None = None
    finished: float | None = None
    first_difference: float | None = None
    survival: list[Survival] = []
    tokens_generated: int = 0
    reference_tokens_generated: int = 0
    nonfinite_tokens: int = 0
    exercise: Exercise


class GateOutcome(_Record):
    """A threshold beyond accuracy (from a recipe or suite) and what was measured against it."""

    model: str
    arm: str
    task: str
    metric: str
    threshold: float
    value: float | None = None
    bound: float | None = None
    verdict: Verdict
    reason: str


class RunRecord(_Record):
    """The result file of a run."""

    schema_version: Literal["replayssm-eval/1"] = SCHEMA
    created: str
    command: list[str]
    suite: str
    limited: bool
    environment: Environment
    settings: dict[str, Any]
    models: list[ModelRecord]
    tasks: list[TaskRecord]
    arms: list[ArmRecord]
    units: list[UnitRecord]
    comparisons: list[Comparison]
    gates: list[GateOutcome] = []
    verdict: Verdict
    seconds: float


def write_json(path: Path, record: BaseModel) -> None:
    """Write a record atomically."""
    write_text(path, record.model_dump_json(indent=1) + "\n")


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"]) or "the file"
    return f"{where}: {first['msg']}"


def read_record(path: Path, kind: type[T]) -> T:
    """A record from a file. Raises ResultError naming the file and the first thing wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise ResultError(
            f"{path}: cannot be read ({error.strerror}); give a folder that --out wrote"
        ) from None
    except ValueError:
        raise ResultError(f"{path}: not valid JSON; remove it and run again") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ResultError(
            f"{path}: schema '{version}', this version reads '{SCHEMA}'; run the evaluation again"
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ResultError(f"{path}: {_first_error(error)}; run the evaluation again") from None


def finite(value: float | None) -> float | None:
    """None for NaN and infinities: for places that must stay plain JSON."""
    return value if value is not None and math.isfinite(value) else None


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n" for row in rows)
