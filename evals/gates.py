"""Gates: thresholds of a suite or a recipe, held against what a run measured, with intervals.

A gate passes if its one-sided bound at the gate's confidence keeps the threshold, fails if the
bound on the other side breaks it, and is INCONCLUSIVE in between. Bounds come from resampling whole
documents. Gates ``against: committed`` join a run with a committed result document by document, so
that a change of the code shows even where it is far smaller than what the format costs.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from . import stats
from .arms import Arm
from .files import write_text
from .schema import Environment, GateOutcome, ModelRecord, RunRecord, TaskRecord, Verdict
from .store import Unit
from .suite import Suite, SuiteGate

COMMITTED: Literal["replayssm-committed/1"] = "replayssm-committed/1"
RESAMPLES = 1000
Units = Mapping[tuple[str, str, str], Sequence[Unit]]


class GateError(ValueError):
    """A gate that cannot be decided; one line with the cause and the remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class CommittedDocument(_Record):
    """One document, its rounding seeds averaged. kld: sum of nats in each position bucket; agree:
    answers whose likeliest token is fp32's; state: [checkpoint, copy, norm] squares by layer."""

    doc: str
    prompt: str
    answers: int
    right: float | None = None
    kld: list[float] | None = None
    agree: float | None = None
    state: dict[str, list[float]] | None = None


class CommittedArm(_Record):
    """One recipe or format on one task of one model. counts: answers of each document in each
    position bucket."""

    model: str
    weights: str
    task: str
    arm: str
    label: str
    digest: str
    settings: dict[str, Any]
    seeds: list[int]
    counts: list[list[int]] = []
    documents: list[CommittedDocument]


class Committed(_Record):
    """The committed result that a suite's gates compare with."""

    schema_version: Literal["replayssm-committed/1"] = COMMITTED
    created: str
    suite: str
    environment: Environment
    arms: list[CommittedArm]

    def find(self, model: str, task: str, arm: str) -> CommittedArm | None:
        return next((a for a in self.arms if (a.model, a.task, a.arm) == (model, task, arm)), None)


@dataclass(frozen=True)
class Measured:
    """What gates need of one arm on one task: arrays over documents, rounding seeds averaged.

    kld and counts [n, buckets], middles [buckets] (mean position, 0 for none), agree [n]; values
    and owners [m]: each answer's divergence and the row of its document; state [n', layers, 3];
    length and length_fp32 [n]: tokens of the responses.
    """

    documents: list[CommittedDocument]
    answers: np.ndarray
    right: np.ndarray | None
    right_fp32: np.ndarray | None
    kld: np.ndarray | None = None
    counts: np.ndarray | None = None
    middles: np.ndarray | None = None
    agree: np.ndarray | None = None
    values: np.ndarray | None = None
    owners: np.ndarray | None = None
    layers: tuple[str, ...] = ()
    state: np.ndarray | None = None
    length: np.ndarray | None = None
    length_fp32: np.ndarray | None = None
    broken: int = 0


def _rows(reference: Unit, unit: Unit) -> list[int]:
    where = {s["doc_hash"]: i for i, s in enumerate(reference.samples)}
    return [where[s["doc_hash"]] for s in unit.samples]


def measured(
    reference: Unit, units: Sequence[Unit], scored: Literal["accuracy", "likelihood"]
) -> Measured:
    """Join an arm's units (all rounding seeds) with the fp32 unit of the task."""
    rows = _rows(reference, units[0])
    first = units[0].samples
    answers = np.array([s["answers"] for s in first], np.float64)
    right = right_fp32 = None
    if scored == "accuracy":
        right = _shorts(np.mean([[float(s["right"]) for s in u.samples] for u in units], 0))
        right_fp32 = np.array([float(reference.samples[r]["right"]) for r in rows])
    out: dict[str, Any] = {"broken": sum(u.record.nonfinite_tokens for u in units)}
    if units[0].tokens is not None and reference.tokens is not None:
        out |= _divergences(reference, rows, units)
    if all("generated" in u.samples[0] for u in (reference, *units)):
        out["length"] = np.mean([[float(s["generated"]) for s in u.samples] for u in units], 0)
        out["length_fp32"] = np.array([float(reference.samples[r]["generated"]) for r in rows])
    with_state = [s for s in first if s.get("state")]
    if with_state:
        layers = tuple(sorted(with_state[0]["state"], key=int))
        out["layers"] = layers
        out["state"] = np.array([[s["state"][layer] for layer in layers] for s in with_state])
    documents = []
    for i, sample in enumerate(first):
        documents.append(
            CommittedDocument(
                doc=sample["doc_hash"],
                prompt=sample["prompt_hash"],
                answers=int(sample["answers"]),
                right=None if right is None else _short(right[i]),
                kld=None if "kld" not in out else [_short(x) for x in out["kld"][i]],
                agree=None if "agree" not in out else _short(out["agree"][i]),
                state={k: [_short(x) for x in v] for k, v in sample["state"].items()}
                if sample.get("state")
                else None,
            )
        )
    return Measured(documents, answers, right, right_fp32, **out)


def _short(x: float) -> float:
    """Seven significant digits: what a committed file keeps of a number."""
    return float(f"{x:.7g}")


def _shorts(x: np.ndarray) -> np.ndarray:
    return np.array([_short(v) for v in x])


def _divergences(reference: Unit, rows: list[int], units: Sequence[Unit]) -> dict[str, Any]:
    """Sums of the divergence by document and position bucket (``stats.bucket_edges``)."""
    assert reference.tokens is not None
    scored = reference.tokens["scored"][rows]
    klds = [np.asarray(u.tokens["kld"], np.float64) for u in units if u.tokens is not None]
    mean = np.mean(klds, 0)
    agree = np.mean([u.tokens["agree"] for u in units if u.tokens is not None], 0)
    at = np.arange(1, scored.shape[1] + 1)  # recurrent updates before the prediction
    edges = stats.bucket_edges(scored.shape[1] + 1)
    kld, counts, middles = [], [], []
    for low, high in zip(edges, edges[1:], strict=False):
        part = scored & (at >= low) & (at < high)
        kld.append(np.where(part, mean, 0).sum(1))
        counts.append(part.sum(1))
        inside = np.broadcast_to(at, part.shape)[part]
        middles.append(float(inside.mean()) if inside.size else 0.0)
    owner = np.broadcast_to(np.arange(len(rows))[:, None], scored.shape)[scored]
    return {
        "kld": np.stack(kld, 1),
        "counts": np.stack(counts, 1),
        "middles": np.array(middles),
        "agree": _shorts(np.where(scored, agree, 0).sum(1)),
        "values": np.concatenate([k[scored] for k in klds]),
        "owners": np.tile(owner, len(klds)),
    }


# --- intervals ------------------------------------------------------------------------------------


def _draws(n: int, seed: int = 0) -> np.ndarray:
    """How often each of ``RESAMPLES`` bootstrap samples holds each of n documents."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)


def _interval(value: float, draws: np.ndarray, level: float, n: int) -> stats.Interval:
    """Percentile interval of resampled values."""
    draws = np.sort(draws[~np.isnan(draws)])
    if not math.isfinite(value) or not draws.size:
        return stats.Interval(value, *(math.nan,) * 4, level, n)
    if n < 2:
        low = -math.inf
        return stats.Interval(value, low, math.inf, low, math.inf, level, n)
    tail = 1 - level
    q = [float(x) for x in np.quantile(draws, [tail / 2, 1 - tail / 2, tail, 1 - tail])]
    return stats.Interval(value, q[0], q[1], q[2], q[3], level, n)


def _slopes(m: Measured, weights: np.ndarray) -> np.ndarray:
    """Log-log slope of the divergence by position for each row of document weights [r, n]."""
    assert m.kld is not None and m.counts is not None and m.middles is not None
    kld, count = weights @ m.kld, weights @ m.counts
    with np.errstate(divide="ignore", invalid="ignore"):
        means = kld / count
    found = [stats.loglog_slope(m.middles, y, w) for y, w in zip(means, count, strict=True)]
    return np.array([math.nan if s is None else s for s in found])


def _quantiles(m: Measured, weights: np.ndarray, q: float) -> np.ndarray:
    """The q-quantile of all answers' divergence for each row of document weights [r, n]."""
    assert m.values is not None and m.owners is not None
    order = np.argsort(m.values)
    values, owners = m.values[order], m.owners[order]
    out = np.empty(len(weights))
    for i, row in enumerate(weights):
        total = np.cumsum(row[owners])
        out[i] = values[np.searchsorted(total, q * total[-1])]
    return out


def _joined(then: CommittedArm, now: Measured, where: str) -> list[int]:
    """Rows of the committed documents that the run measured. Raises GateError."""
    rows = {d.doc: i for i, d in enumerate(then.documents)}
    found = []
    for d in now.documents:
        if d.doc not in rows:
            raise GateError(
                f"{where}: document {d.doc} is not in the committed result; it was made from other "
                f"data; {_AGAIN}"
            )
        if then.documents[rows[d.doc]].prompt != d.prompt:
            raise GateError(
                f"{where}: document {d.doc} was asked with another prompt than in the committed "
                "result (the prompt hashes differ); accept a new one"
            )
        found.append(rows[d.doc])
    return found


def _against_committed(
    metric: str, now: Measured, then: CommittedArm, level: float, where: str
) -> stats.Interval | None:
    """Interval of the change; larger is worse for kld, slope and state, better for the others."""
    rows = _joined(then, now, where)
    old = [then.documents[r] for r in rows]
    n = len(old)
    if metric == "kld_mean" and now.kld is not None:
        before = np.array([sum(d.kld or []) for d in old])
        if not np.isfinite(now.kld).all():
            return stats.Interval(math.inf, *(math.nan,) * 4, level, n)
        if before.sum() <= 0:
            return None
        return stats.bootstrap_ratio(now.kld.sum(1), before, level=level)
    if metric == "kld_slope" and now.kld is not None:
        past = Measured(
            old,
            now.answers,
            None,
            None,
            kld=np.array([d.kld for d in old]),
            counts=np.array([then.counts[r] for r in rows]),
            middles=now.middles,
        )
        draws = _draws(n)
        rise = _slopes(now, draws) - _slopes(past, draws)
        one = np.ones((1, n))
        return _interval(float((_slopes(now, one) - _slopes(past, one))[0]), rise, level, n)
    if metric == "top1" and now.agree is not None:
        before = np.array([d.agree for d in old], np.float64)
        return stats.paired_delta(now.agree, before, now.answers, level=level)
    if metric == "accuracy_delta" and now.right is not None:
        before = np.array([d.right for d in old], np.float64)
        return stats.paired_delta(now.right, before, now.answers, level=level)
    if metric == "state_error" and now.state is not None:
        held = [d.state for d in old[: len(now.state)]]
        if any(h is None for h in held):
            raise GateError(f"{where}: the committed result has no states; accept a new one")
        worst: stats.Interval | None = None
        for j, layer in enumerate(now.layers):
            before = np.array([h[layer][0] / h[layer][2] for h in held])  # type: ignore[index]
            after = now.state[:, j, 0] / now.state[:, j, 2]
            if before.sum() <= 0:
                continue
            square = stats.bootstrap_ratio(after, before, level=level)
            if worst is None or square.value > worst.value:
                worst = square
        return None if worst is None else _root(worst)
    return None


def _root(x: stats.Interval) -> stats.Interval:
    """Interval of the root of a non-negative quantity."""
    r = [math.sqrt(max(v, 0.0)) for v in (x.value, x.low, x.high, x.lower, x.upper)]
    return stats.Interval(*r, x.level, x.n)


def against_fp32(metric: str, m: Measured, level: float) -> stats.Interval | None:
    n = len(m.answers)
    if metric in ("kld_mean", "kld_p99", "kld_slope") and m.kld is not None:
        if not np.isfinite(m.kld).all():
            return stats.Interval(math.inf, *(math.nan,) * 4, level, n)
        assert m.counts is not None
        if metric == "kld_mean":
            return stats.bootstrap_ratio(m.kld.sum(1), m.counts.sum(1), level=level)
        one = np.ones((1, n))
        if metric == "kld_p99":
            value = float(_quantiles(m, one, 0.99)[0])
            return _interval(value, _quantiles(m, _draws(n), 0.99), level, n)
        return _interval(float(_slopes(m, one)[0]), _slopes(m, _draws(n)), level, n)
    if metric == "top1" and m.agree is not None:
        return stats.bootstrap_ratio(m.agree, m.answers, level=level)
    if metric == "accuracy_delta" and m.right is not None and m.right_fp32 is not None:
        return stats.paired_delta(m.right, m.right_fp32, m.answers, level=level)
    if metric == "length_change" and m.length is not None and m.length_fp32 is not None:
        if m.length_fp32.sum() <= 0:
            return None
        return _size(stats.bootstrap_ratio(m.length - m.length_fp32, m.length_fp32, level=level))
    return None


def _size(x: stats.Interval) -> stats.Interval:
    """Interval of how far a change is from zero, in either direction."""

    def span(low: float, high: float) -> tuple[float, float]:
        near = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        return near, max(abs(low), abs(high))

    return stats.Interval(abs(x.value), *span(x.low, x.high), *span(x.lower, x.upper), x.level, x.n)


# --- verdicts -------------------------------------------------------------------------------------


def _ceiling(x: stats.Interval, threshold: float) -> Verdict:
    """PASS if x stays at or below the threshold, with confidence."""
    if math.isnan(x.lower) or math.isnan(x.upper):
        return "FAIL"
    if x.upper <= threshold:
        return "PASS"
    return "FAIL" if x.lower > threshold else "INCONCLUSIVE"


def _floor(x: stats.Interval, threshold: float) -> Verdict:
    """PASS if x stays at or above the threshold, with confidence."""
    if math.isnan(x.lower) or math.isnan(x.upper):
        return "FAIL"
    if x.lower >= threshold:
        return "PASS"
    return "FAIL" if x.upper < threshold else "INCONCLUSIVE"


_WORDS: dict[tuple[str, str], str] = {
    ("kld_mean", "fp32"): "mean KLD",
    ("kld_p99", "fp32"): "KLD at 99 %",
    ("kld_slope", "fp32"): "slope of KLD by position",
    ("top1", "fp32"): "top-1 agreement",
    ("accuracy_delta", "fp32"): "change of accuracy",
    ("length_change", "fp32"): "change of response length, in either direction",
    ("kld_mean", "committed"): "mean KLD / committed",
    ("kld_slope", "committed"): "slope of KLD - committed",
    ("top1", "committed"): "top-1 agreement - committed",
    ("accuracy_delta", "committed"): "accuracy - committed",
    ("state_error", "committed"): "state error / committed",
}


def judge(gate: SuiteGate, x: stats.Interval) -> tuple[Verdict, str, float]:
    """(verdict, reason, the bound that decided) of a gate on its interval."""
    lower_is_better = gate.metric not in ("top1", "accuracy_delta")
    loss = gate.metric == "accuracy_delta" or (gate.metric, gate.against) == ("top1", "committed")
    limit = -gate.threshold if loss else gate.threshold
    verdict = _ceiling(x, limit) if lower_is_better else _floor(x, limit)
    good, bad = (x.upper, x.lower) if lower_is_better else (x.lower, x.upper)
    bound = bad if verdict == "FAIL" else good
    sign = "at most" if lower_is_better else "at least"
    words = _WORDS[gate.metric, gate.against]
    reason = (
        f"{words} {x.value:.4g}, {100 * gate.confidence:g} % bounds {x.lower:.4g} to "
        f"{x.upper:.4g}, must be {sign} {limit:g}"
    )
    return verdict, reason, bound


def _names(gate: SuiteGate) -> str:
    return gate.metric if gate.against == "fp32" else f"{gate.metric}/committed"


def recipe_gates(
    names: Iterable[str], models: Sequence[tuple[str, Any]]
) -> dict[tuple[str, str], list[SuiteGate]]:
    """Gates of the named recipes by (model name, recipe label); models: (name, configuration)."""
    from .. import recipe as recipes

    out: dict[tuple[str, str], list[SuiteGate]] = {}
    for name in names:
        for model, config in models:
            resolved = recipes.resolve(name, config, model)
            out[model, resolved.label] = [
                SuiteGate(
                    metric=g.metric, task=g.task, threshold=g.threshold, confidence=g.confidence
                )
                for g in resolved.gates
            ]
    return out


def evaluate(
    suite: Suite,
    of_recipes: Mapping[tuple[str, str], Sequence[SuiteGate]],
    units: Units,
    tasks: Sequence[TaskRecord],
    arms: Sequence[Arm],
    models: Sequence[ModelRecord],
    committed: Committed | None,
) -> list[GateOutcome]:
    """Every gate that the run has data for; the floor is held to the suite's gates on it.

    Raises GateError where the committed result does not fit the run: another model, other settings,
    other documents.
    """
    roles = {a.name: a for a in arms}
    by_task = {t.name: t for t in tasks}
    weights = {m.name: m.weights for m in models}
    out: list[GateOutcome] = []
    for (model, task, name), found in units.items():
        one = roles[name]
        if one.role not in ("candidate", "floor"):
            continue
        asked = [g for g in suite.gates if g.role == one.role]
        if one.role == "candidate" and one.recipe is not None:
            asked += of_recipes.get((model, one.recipe), [])
        asked = [g for g in asked if g.task in (None, task)]
        if not asked:
            continue
        base = next(
            u[0] for (m, t, a), u in units.items()
            if (m, t) == (model, task) and roles[a].role == "reference"
        )  # fmt: skip
        now = measured(base, found, by_task[task].scored)
        then = None
        if any(g.against == "committed" for g in asked):
            assert committed is not None
            then = committed.find(model, task, name)
            if then is None or then.weights != weights[model]:
                raise GateError(
                    f"{one.label} on {model}, {task}: the committed result was measured with other "
                    f"weights; {_AGAIN}"
                )
        for gate in asked:
            where = f"{model}, {task}, {one.label}"
            if gate.against == "committed":
                assert then is not None
                x = _against_committed(gate.metric, now, then, gate.confidence, where)
            else:
                x = against_fp32(gate.metric, now, gate.confidence)
            if x is None:
                if gate.task is None:
                    continue
                raise GateError(f"{where}: the task gives no {gate.metric}; take the gate away")
            verdict, reason, bound = judge(gate, x)
            if now.broken:
                verdict, reason = "FAIL", f"{now.broken} tokens have logits that are not finite"
            out.append(
                GateOutcome(
                    model=model,
                    arm=name,
                    task=task,
                    metric=_names(gate),
                    threshold=gate.threshold,
                    value=_plain(x.value),
                    bound=_plain(bound),
                    verdict=verdict,
                    reason=reason,
                )
            )
    return out


def _plain(x: float) -> float | None:
    return x if math.isfinite(x) else None


_AGAIN = "look at what changed, then write a new one: python -m replayssm_quant.gates accept"


def check_fits(
    suite: Suite,
    committed: Committed,
    arms: Mapping[str, Sequence[Arm]],
    tasks: Sequence[TaskRecord],
    seeds: Sequence[int],
) -> None:
    """Refuse, before anything is measured, arms (by model) that the committed result does not hold
    with the same formats, task settings and rounding seeds. Raises GateError."""
    for task in tasks:
        if not any(g.against == "committed" and g.task in (None, task.name) for g in suite.gates):
            continue
        for model, ones in arms.items():
            for one in (a for a in ones if a.role == "candidate"):
                then = committed.find(model, task.name, one.name)
                where = f"{one.label} on {model}, {task.name}"
                if then is None:
                    raise GateError(f"{where}: no committed result; {_AGAIN}")
                used = list(seeds) if one.rounds else list(seeds)[:1]
                for what, now, old in (
                    ("the formats of the recipe are", one.digest, then.digest),
                    ("the settings of the task are", _settings(task), then.settings),
                    ("the rounding seeds are", used, then.seeds),
                ):
                    if now != old:
                        raise GateError(f"{where}: {what} {now}, committed with {old}; {_AGAIN}")


def _settings(task: TaskRecord) -> dict[str, Any]:
    """What decides a task's documents, apart from how many there are."""
    plain = {k: v for k, v in task.settings.items() if k != "documents"}
    return json.loads(json.dumps(plain))


def verdict(gates: Sequence[GateOutcome]) -> Verdict:
    """The worst of the gates; without any nothing was decided."""
    found = {g.verdict for g in gates}
    for word in ("FAIL", "INCONCLUSIVE", "NOT-LEARNED"):
        if word in found:
            return word  # type: ignore[return-value]
    return "PASS" if found else "INCONCLUSIVE"


# --- the committed result -------------------------------------------------------------------------


def commit(
    suite: str,
    units: Units,
    tasks: Sequence[TaskRecord],
    roles: Mapping[str, tuple[str, str, str]],
    models: Sequence[ModelRecord],
    environment: Environment,
) -> Committed:
    """A committed result of a run's candidates. roles: (role, label, digest) by arm name."""
    by_task = {t.name: t for t in tasks}
    weights = {m.name: m.weights for m in models}
    arms = []
    for (model, task, name), found in units.items():
        role, label, digest = roles[name]
        if role != "candidate":
            continue
        base = next(
            u[0] for (m, t, a), u in units.items()
            if (m, t) == (model, task) and roles[a][0] == "reference"
        )  # fmt: skip
        now = measured(base, found, by_task[task].scored)
        arms.append(
            CommittedArm(
                model=model,
                weights=weights[model],
                task=task,
                arm=name,
                label=label,
                digest=digest,
                settings=_settings(by_task[task]),
                seeds=[u.record.seed for u in found],
                counts=[] if now.counts is None else now.counts.astype(int).tolist(),
                documents=now.documents,
            )
        )
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Committed(created=created, suite=suite, environment=environment, arms=arms)


def write(path: Path, committed: Committed) -> None:
    """Write a committed result, a document a line, atomically."""
    data = committed.model_dump(mode="json", exclude_none=True)
    arms = data.pop("arms")
    head = json.dumps(data, indent=1)[:-2]

    def dense(x: Any) -> str:
        return json.dumps(x, separators=(",", ":"))

    entries = []
    for a in arms:
        documents = ",\n".join(dense(d) for d in a.pop("documents"))
        entries.append(f'{dense(a)[:-1]},"documents":[\n{documents}]}}')
    write_text(path, head + ',\n "arms": [\n' + ",\n".join(entries) + "]\n}\n")


def read(path: Path) -> Committed:
    """A committed result. Raises GateError naming the file and the remedy."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(
            f"committed result {path}: cannot be read ({error.strerror}); results stay in a "
            "checkout, run the suite there, or accept one (python -m replayssm_quant.gates accept)"
        ) from None
    except ValueError:
        raise GateError(f"committed result {path}: not valid JSON; accept a new one") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != COMMITTED:
        raise GateError(
            f"committed result {path}: schema '{version}', this version reads '{COMMITTED}'; "
            "accept a new one"
        )
    try:
        return Committed.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise GateError(
            f"committed result {path}: {where}: {first['msg']}; accept a new one"
        ) from None


_SHORT = {
    "kld_mean": "KLD",
    "kld_p99": "KLD 99 %",
    "kld_slope": "slope",
    "top1": "top-1",
    "accuracy_delta": "accuracy",
    "length_change": "length",
    "kld_mean/committed": "KLD ratio",
    "kld_slope/committed": "slope change",
    "top1/committed": "top-1 change",
    "accuracy_delta/committed": "accuracy change",
    "state_error/committed": "state error ratio",
}
_WORST = ("FAIL", "INCONCLUSIVE", "NOT-LEARNED", "PASS")


def _cell(found: Sequence[GateOutcome]) -> str:
    """Value and deciding bound of the strictest outcome, marked unless it passed."""
    if not found:
        return ""
    one = min(found, key=lambda g: _WORST.index(g.verdict))
    value, bound = ("inf" if x is None else f"{x:.3g}" for x in (one.value, one.bound))
    mark = "" if one.verdict == "PASS" else f" {one.verdict}"
    return f"{value} ({bound}){mark}"


def table(record: RunRecord) -> str:
    """One row for each model, task and arm: values with the bound that decided; then what did not
    pass, in words. fp32 measured again (the A/A control) stands first on each task."""
    from .report import markdown_table, nats

    metrics = [m for m in _SHORT if any(g.metric == m for g in record.gates)]
    labels = {a.name: a.label for a in record.arms}
    rows = []
    for c in record.comparisons:
        mine = [g for g in record.gates if (g.model, g.task, g.arm) == (c.model, c.task, c.arm)]
        if not mine:
            continue
        cells = [_cell([g for g in mine if g.metric == m]) for m in metrics]
        worst = min((g.verdict for g in mine), key=_WORST.index)
        measured_ = nats(c.kld.mean) if c.kld else "–"
        rows.append([c.model, c.task, labels[c.arm], measured_, nats(c.kld_floor), *cells, worst])
    head = ["model", "task", "state", "KLD measured", "floor"]
    parts = [markdown_table([*head, *(_SHORT[m] for m in metrics), "verdict"], rows)]
    for g in record.gates:
        if g.verdict != "PASS":
            parts.append(f"{g.verdict} {g.model}, {g.task}, {labels[g.arm]}: {g.reason}")
    return "\n\n".join([parts[0], "\n".join(parts[1:])]).strip()
