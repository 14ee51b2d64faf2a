"""An arm against the fp32 reference, joined document by document: deltas, divergence, verdicts.

Refuses to compare answers to different prompts. Everything is computed from stored units, so a
finished run can be compared again without running a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import stats
from .schema import (
    Bucket,
    Comparison,
    Exercise,
    IntervalRecord,
    ResultError,
    Role,
    Survival,
    TailRecord,
    TaskRecord,
    Verdict,
)
from .store import Unit


def interval(x: stats.Interval) -> IntervalRecord:
    return IntervalRecord(**dataclasses.asdict(x))


def tail(values: np.ndarray) -> TailRecord:
    return TailRecord(**dataclasses.asdict(stats.tail(values)))


def _join(reference: Unit, unit: Unit) -> list[int]:
    """Rows of the reference that hold the unit's documents, in the unit's order.

    Raises ResultError for a document or prompt that the reference did not see.
    """
    where = {s["doc_hash"]: i for i, s in enumerate(reference.samples)}
    rows = []
    for sample in unit.samples:
        row = where.get(sample["doc_hash"])
        r = unit.record
        name = f"{r.model}, {r.task}, {r.arm}, seed {r.seed}"
        if row is None:
            raise ResultError(
                f"{name}: document {sample['doc_hash']} is not among the reference's; measure both "
                "with the same data and settings"
            )
        if reference.samples[row]["prompt_hash"] != sample["prompt_hash"]:
            raise ResultError(
                f"{name}: document {sample['doc_hash']} was asked with another prompt than the "
                "reference's (the prompt hashes differ); measure both again in one run"
            )
        rows.append(row)
    return rows


def _column(unit: Unit, name: str) -> np.ndarray:
    return np.array([float(s[name]) for s in unit.samples])


def _flips(reference: Unit, rows: Sequence[int], unit: Unit) -> tuple[int, int]:
    """(right -> wrong, wrong -> right) over the answers of one seed."""
    worse = better = 0
    for row, sample in zip(rows, unit.samples, strict=True):
        for old, new in zip(reference.samples[row]["flags"], sample["flags"], strict=True):
            worse += old == "1" and new == "0"
            better += old == "0" and new == "1"
    return worse, better


PLACES = tuple(2**k for k in range(4, 16))
"""Characters at which ``Survival`` is counted."""


def first_difference(a: str, b: str) -> int | None:
    """Characters before the first difference of two texts; None if they are equal."""
    if a == b:
        return None
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _drift(texts: Sequence[str], units: Sequence[Unit]) -> dict[str, object]:
    """Where responses first differ from the reference's (``texts``, joined), seeds pooled."""
    pairs = [(a, s["output"]) for u in units for a, s in zip(texts, u.samples, strict=True)]
    places = [first_difference(a, b) for a, b in pairs]
    shares = [
        1.0 if p is None else p / max(len(a), len(b))
        for p, (a, b) in zip(places, pairs, strict=True)
    ]
    at = np.array([np.inf if p is None else p for p in places])
    longest = max(len(a) for a in texts)
    middle = float(np.median(at))
    return {
        "divergence": float(np.mean(shares)),
        "first_difference": middle if np.isfinite(middle) else None,
        "survival": [
            Survival(characters=n, same=float(np.mean(at >= n))) for n in PLACES if n <= longest
        ],
    }


def _lengths(
    reference: Unit, rows: Sequence[int], units: Sequence[Unit], seed: int
) -> dict[str, object]:
    """Response length of an arm beside the reference's, paired by document, seeds averaged."""
    if any("generated" not in u.samples[0] for u in (reference, *units)):
        return {}
    base = _column(reference, "generated")[rows]
    mean = np.mean([_column(u, "generated") for u in units], 0)
    out: dict[str, object] = {}
    if base.sum() > 0:
        out["length_change"] = interval(stats.bootstrap_ratio(mean - base, base, seed=seed))
    # responses of a sample: one, or as many as an lm-eval task repeats its question
    repeats = np.array([float(reference.samples[r].get("repeats", 1)) for r in rows])
    out |= {
        "reference_length": float(base.sum() / repeats.sum()),
        "length": float(mean.sum() / repeats.sum()),
    }
    if all("finished" in u.samples[0] for u in (reference, *units)):
        ended = np.mean([_column(u, "finished").sum() for u in units])
        before = _column(reference, "finished")[rows].sum()
        out |= {
            "reference_finished": float(before / repeats.sum()),
            "finished": float(ended / repeats.sum()),
        }
    return out


def _generated(reference: Unit, rows: Sequence[int]) -> int:
    """Tokens that the reference generated for these documents (all of them, where lm-eval counted
    them only in total)."""
    if "generated" not in reference.samples[0]:
        return reference.record.tokens_generated
    return sum(int(reference.samples[r]["generated"]) for r in rows)


def _mean_exercise(units: Sequence[Unit]) -> Exercise:
    first = units[0].record.exercise
    return Exercise(
        steps=sum(u.record.exercise.steps for u in units),
        flushes=sum(u.record.exercise.flushes for u in units),
        quantised_reads=sum(u.record.exercise.quantised_reads for u in units),
        writes_per_document=first.writes_per_document,
        scored_tokens=sum(u.record.exercise.scored_tokens for u in units),
        decode_share=first.decode_share,
        path=first.path,
    )


def _buckets(
    reference: Unit, rows: Sequence[int], units: Sequence[Unit]
) -> tuple[list[Bucket], float | None]:
    """Scored tokens by position (recurrent updates before the prediction), and the KL's slope."""
    assert reference.tokens is not None
    scored = reference.tokens["scored"][list(rows)]
    edges = stats.bucket_edges(scored.shape[1] + 1)
    out, middles, means, weights = [], [], [], []
    for low, high in zip(edges, edges[1:], strict=False):
        part = np.zeros_like(scored)
        part[:, max(low - 1, 0) : high - 1] = scored[:, max(low - 1, 0) : high - 1]
        n = int(part.sum())
        if not n:
            continue
        kld = np.mean([u.tokens["kld"][part].mean(dtype=np.float64) for u in units])
        top1 = np.mean([u.tokens["agree"][part].mean() for u in units])
        base = reference.tokens["loss"][list(rows)][part].mean(dtype=np.float64)
        loss = np.mean([u.tokens["loss"][part].mean(dtype=np.float64) for u in units]) - base
        out.append(
            Bucket(
                low=low,
                high=high,
                n=n,
                kld=float(kld),
                top1=float(top1),
                delta_loss=float(loss),
                reference_loss=float(base),
            )
        )
        middles.append(1.0 + float(np.nonzero(part)[1].mean()))
        means.append(float(kld))
        weights.append(float(n))
    slope = stats.loglog_slope(middles, means, weights) if out else None
    return out, slope


def _teacher_forced(
    reference: Unit, rows: Sequence[int], units: Sequence[Unit], seed: int
) -> dict[str, object]:
    """KL, agreement and loss of stream units, clustered by document."""
    assert reference.tokens is not None
    scored = reference.tokens["scored"][list(rows)]
    counts = scored.sum(1).astype(np.float64)
    pooled = np.concatenate([u.tokens["kld"][scored] for u in units]).astype(np.float64)
    out: dict[str, object] = {"kld": tail(pooled)}
    buckets, slope = _buckets(reference, rows, units)
    out |= {"buckets": buckets, "kld_slope": slope}
    out["kld_support"] = units[0].record.kld_support
    if len(units) > 1:
        out["kld_seed_sd"] = stats.sample_sd([u.record.kld.mean for u in units])
    if not np.isfinite(pooled).all():
        return out

    def per_document(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.mean([np.where(scored, v, 0).sum(1, dtype=np.float64) for v in values], 0)

    kld = per_document([u.tokens["kld"] for u in units])
    agree = per_document([u.tokens["agree"] for u in units])
    loss = per_document([u.tokens["loss"] for u in units])
    loss -= per_document([reference.tokens["loss"][list(rows)]])
    for name, num in (("kld_mean", kld), ("top1", agree), ("delta_loss", loss)):
        out[name] = interval(stats.bootstrap_ratio(num, counts, seed=seed))
    return out


def _judge(
    task: TaskRecord, reference: float | None, delta: stats.Interval, broken: int
) -> tuple[Verdict, str, int | None]:
    """(verdict, its reason in one line, documents that would settle an open one)."""
    unit = "nats a token" if task.scored == "likelihood" else "points"
    scale = 1.0 if task.scored == "likelihood" else 100.0
    margin = f"{scale * task.margin:g} {unit}"
    if broken:
        return "FAIL", f"{broken} tokens have logits that are not finite", None
    if task.threshold is not None and reference is not None and reference < task.threshold:
        return (
            "NOT-LEARNED",
            f"fp32 reaches {100 * reference:.1f} %, below the task's {100 * task.threshold:.1f} %",
            None,
        )
    verdict = stats.non_inferiority(delta, task.margin)
    low, high = scale * delta.lower, scale * delta.upper
    if verdict == "PASS":
        return verdict, f"loses less than {margin} (lower bound {low:+.2f})", None
    if verdict == "FAIL":
        return verdict, f"loses more than {margin} (upper bound {high:+.2f})", None
    needed = stats.documents_needed(delta, task.margin)
    more = f"; about {needed} documents would settle it" if needed else ""
    return verdict, f"bounds {low:+.2f} to {high:+.2f} straddle -{margin}{more}", needed


def compare(
    reference: Unit,
    units: Sequence[Unit],
    task: TaskRecord,
    role: Role,
    kld_floor: float | None = None,
    seed: int = 0,
) -> Comparison:
    """One arm (its units of all rounding seeds) against the reference on one task.

    kld_floor: the mean divergence of fp32 measured again, for the table. Raises
    ResultError where prompts or documents do not match.
    """
    if not units:
        raise ValueError("no unit to compare")
    joined = [_join(reference, u) for u in units]
    rows = joined[0]
    if any(j != rows for j in joined):
        raise ResultError(
            f"{units[0].record.arm}: its seeds were measured on different documents; run again"
        )
    answers = _column(units[0], "answers")
    right_ref = _column(reference, "right")[rows]
    per_seed = [_column(u, "right") for u in units]
    right = np.mean(per_seed, 0)
    likelihood = task.scored == "likelihood"
    out: dict[str, object] = {}
    if task.kind == "stream":
        out |= _teacher_forced(reference, rows, units, seed)
    broken = sum(u.record.nonfinite_tokens for u in units)
    if likelihood:
        scored = reference.tokens["scored"][rows]
        base = np.where(scored, reference.tokens["loss"][rows], 0).sum(1, dtype=np.float64)
        losses = [np.where(scored, u.tokens["loss"], 0).sum(1, dtype=np.float64) for u in units]
        weight = scored.sum(1).astype(np.float64)
        differences = [base - x for x in losses]
        if broken:
            nan = float("nan")
            delta = stats.Interval(-np.inf, nan, nan, nan, nan, 0.95, len(rows))
        else:
            delta = stats.bootstrap_ratio(np.mean(differences, 0), weight, seed=seed)
    else:
        weight = answers
        differences = [r - right_ref for r in per_seed]
        delta = stats.paired_delta(right, right_ref, weight, seed=seed)
    single = len(units) == 1 and bool((weight == 1).all()) and not likelihood
    flips = [_flips(reference, rows, u) for u in units]
    worse, better = sum(f[0] for f in flips), sum(f[1] for f in flips)
    finite = [d for d in differences if np.isfinite(d).all()]
    p = 0.0
    if single and set(np.unique(differences[0])) <= {-1.0, 0.0, 1.0}:
        p = stats.mcnemar_exact(worse, better)
    elif len(finite) == len(differences):
        p = stats.sign_flip(np.mean(differences, 0), seed=seed)
    reference_accuracy = None if likelihood else float(right_ref.sum() / weight.sum())
    verdict, reason, needed = _judge(task, reference_accuracy, delta, broken)
    if task.kind == "generate" or (task.kind == "lm_eval" and "output" in units[0].samples[0]):
        out |= _drift([reference.samples[r]["output"] for r in rows], units)
        out |= _lengths(reference, rows, units, seed)
    if reference.record.exact is not None:
        whole = _column(reference, "exact")[rows]
        out["reference_exact"] = float(whole.mean())
        out["exact"] = float(np.mean([_column(u, "exact").mean() for u in units]))
    first = units[0].record
    return Comparison(
        model=first.model,
        task=task.name,
        arm=first.arm,
        role=role,
        seeds=[u.record.seed for u in units],
        documents=len(rows),
        answers=int(weight.sum()),
        reference_accuracy=reference_accuracy,
        accuracy=None if likelihood else float(right.sum() / weight.sum()),
        delta=interval(delta),
        delta_seed_sd=stats.sample_sd([float(d.sum() / weight.sum()) for d in differences]),
        p_value=p,
        flips_worse=worse,
        flips_better=better,
        margin=task.margin,
        verdict=verdict,
        reason=reason,
        documents_needed=needed,
        kld_floor=kld_floor,
        tokens_generated=sum(u.record.tokens_generated for u in units) // len(units),
        reference_tokens_generated=_generated(reference, rows),
        nonfinite_tokens=broken,
        exercise=_mean_exercise(units),
        **out,
    )


def overall(comparisons: Sequence[Comparison], gates: Sequence[object] = ()) -> Verdict:
    """The verdict of a run: the worst among its candidates and gates."""
    found = {c.verdict for c in comparisons if c.role == "candidate"}
    found |= {g.verdict for g in gates}  # type: ignore[attr-defined]
    for verdict in ("FAIL", "INCONCLUSIVE", "NOT-LEARNED"):
        if verdict in found:
            return verdict  # type: ignore[return-value]
    return "PASS" if found else "INCONCLUSIVE"
