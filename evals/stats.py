"""Paired statistics over documents: bootstrap and exact intervals, non-inferiority, drift slopes.

numpy only, float64 throughout. Answers cluster in documents (a stream holds many answers, a
question is asked once a seed), so every interval resamples whole documents. Sources: Efron,
"Better bootstrap confidence intervals" (JASA 1987) for BCa; Clopper and Pearson (Biometrika 1934);
McNemar (Psychometrika 1947), exact form; Miller, "Adding error bars to evals" (2024) for pairing
and clusters; Holm (Scand. J. Statist. 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT-LEARNED"]

RESAMPLES = 4000
FEW_DISCORDANT = 6
"""Below this many changed documents the bootstrap is no longer trusted alone (``paired_delta``)."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided interval ``low``..``high`` at ``level`` and the one-sided
    bounds ``lower`` and ``upper`` at the same level (narrower: they spend all of 1 - level on one
    side). widened: too few changes were seen for a bootstrap, see ``paired_delta``."""

    value: float
    low: float
    high: float
    lower: float
    upper: float
    level: float
    n: int
    widened: bool = False

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def _pairs(num: ArrayLike, den: ArrayLike) -> tuple[Array, Array]:
    a, b = np.asarray(num, np.float64), np.asarray(den, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"need two equal non-empty vectors, not shapes {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()) or (b < 0).any() or b.sum() <= 0:
        raise ValueError("sums must be finite, weights non-negative and not all zero")
    return a, b


def resample(num: Array, den: Array, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """``resamples`` values of sum(num) / sum(den) over documents drawn with replacement, sorted."""
    rng = np.random.default_rng(seed)
    n = len(num)
    out = np.empty(resamples)
    block = max(1, 2_000_000 // n)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        picks = rng.integers(0, n, (rows, n))
        weight = den[picks].sum(1)
        top = num[picks].sum(1)
        out[start : start + rows] = np.divide(
            top, weight, out=np.full(rows, num.sum() / den.sum()), where=weight > 0
        )
    out.sort()
    return out


def _quantile(ordered: Array, q: float) -> float:
    return float(np.quantile(ordered, min(max(q, 0.0), 1.0)))


def bootstrap_ratio(
    num: ArrayLike,
    den: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
    method: Literal["bca", "percentile"] = "bca",
) -> Interval:
    """Interval of sum(num) / sum(den), resampling documents. num and den: [documents].

    With den = 1 it is the interval of a mean. BCa corrects the percentiles for bias and skew by
    the jackknife over documents; where every document says the same, the interval is a point.
    """
    a, b = _pairs(num, den)
    value = float(a.sum() / b.sum())
    n = len(a)
    if n == 1:
        return Interval(value, -math.inf, math.inf, -math.inf, math.inf, level, 1)
    values = resample(a, b, resamples, seed)
    if values[0] == values[-1]:
        return Interval(value, value, value, value, value, level, n)
    tails = {"low": (1 - level) / 2, "lower": 1 - level}
    shift, accelerate = 0.0, 0.0
    if method == "bca":
        below = np.mean(values < value) + np.mean(values == value) / 2
        below = min(max(float(below), 0.5 / resamples), 1 - 0.5 / resamples)
        shift = _NORMAL.inv_cdf(below)
        rest = b.sum() - b
        left_out = np.where(rest > 0, (a.sum() - a) / np.where(rest > 0, rest, 1), value)
        d = left_out.mean() - left_out
        scale = float((d * d).sum()) ** 1.5
        accelerate = float((d**3).sum()) / (6 * scale) if scale > 0 else 0.0

    def bound(q: float) -> float:
        z = shift + _NORMAL.inv_cdf(q)
        room = 1 - accelerate * z
        if room <= 0:
            return _quantile(values, float(q > 0.5))
        return _quantile(values, _NORMAL.cdf(shift + z / room))

    return Interval(
        value,
        bound(tails["low"]),
        bound(1 - tails["low"]),
        bound(tails["lower"]),
        bound(1 - tails["lower"]),
        level,
        n,
    )


def _log_binomial_tail(k: int, n: int, p: float) -> float:
    """log P(X <= k) for X ~ Binomial(n, p), 0 < p < 1."""
    if k >= n:
        return 0.0
    i = np.arange(k + 1)
    log_choose = (
        math.lgamma(n + 1)
        - np.array([math.lgamma(x + 1) for x in i])
        - np.array([math.lgamma(n - x + 1) for x in i])
    )
    terms = log_choose + i * math.log(p) + (n - i) * math.log1p(-p)
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))


def clopper_pearson_upper(k: int, n: int, level: float = 0.95) -> float:
    """Exact one-sided upper bound of a rate after k of n; k = 0 gives 1 - (1 - level)^(1/n)."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k={k} of n={n}: need 0 <= k <= n and n >= 1")
    if k == n:
        return 1.0
    target = math.log(1 - level)
    low, high = k / n, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        if middle <= 0 or middle >= 1:
            break
        if _log_binomial_tail(k, n, middle) > target:
            low = middle
        else:
            high = middle
    return high


def wilson(k: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's two-sided interval of a single rate."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k={k} of n={n}: need 0 <= k <= n and n >= 1")
    z = _NORMAL.inv_cdf(0.5 + level / 2)
    p = k / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar_exact(worse: int, better: int) -> float:
    """Two-sided exact p of ``worse`` right->wrong against ``better`` wrong->right documents."""
    if worse < 0 or better < 0:
        raise ValueError(f"counts must not be negative: {worse}, {better}")
    n = worse + better
    if n == 0:
        return 1.0
    return min(1.0, 2 * math.exp(_log_binomial_tail(min(worse, better), n, 0.5)))


def sign_flip(differences: ArrayLike, resamples: int = 20_000, seed: int = 0) -> float:
    """Two-sided p of a zero mean difference: exact up to 14 documents, sampled beyond."""
    d = np.asarray(differences, np.float64)
    if d.ndim != 1 or not d.size:
        raise ValueError(f"need a non-empty vector of differences, not shape {d.shape}")
    d = d[d != 0]
    if not d.size:
        return 1.0
    seen = abs(d.sum())
    if d.size <= 14:
        signs = ((np.arange(2**d.size)[:, None] >> np.arange(d.size)) & 1) * 2 - 1
        return float(np.mean(np.abs(signs @ d) >= seen * (1 - 1e-12)))
    rng = np.random.default_rng(seed)
    hits, block = 0, max(1, 2_000_000 // d.size)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        signs = rng.integers(0, 2, (rows, d.size)) * 2 - 1
        hits += int((np.abs(signs @ d) >= seen * (1 - 1e-12)).sum())
    return (hits + 1) / (resamples + 1)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = np.argsort(p, kind="stable")
    out, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def paired_delta(
    candidate: ArrayLike,
    reference: ArrayLike,
    weight: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Accuracy difference candidate - reference with its interval, paired by document.

    candidate, reference: right answers of each document (candidate averaged over its seeds);
    weight: answers of each document. All [documents].

    A bootstrap knows only the changes that it has seen: with none, its interval is a point however
    few documents there were. So where fewer than ``FEW_DISCORDANT`` documents changed, the interval
    is widened to the exact bound on the rate of documents that get worse (better), times the
    answers that such a document changes: the largest change seen, or one answer if none was seen.
    """
    c, b = _pairs(candidate, weight)
    r, _ = _pairs(reference, weight)
    d = c - r
    seen = bootstrap_ratio(d, b, level=level, resamples=resamples, seed=seed)
    changed = d[d != 0]
    if changed.size >= FEW_DISCORDANT:
        return seen
    n, mean_weight = len(d), float(b.mean())
    size = max(1.0, float(np.abs(changed).max(initial=0.0))) / mean_weight

    def reach(count: int, confidence: float) -> float:
        return min(1.0, clopper_pearson_upper(count, n, confidence) * size)

    worse, better = int((d < 0).sum()), int((d > 0).sum())
    both = 0.5 + level / 2
    return Interval(
        seen.value,
        min(seen.low, -reach(worse, both)) if math.isfinite(seen.low) else seen.low,
        max(seen.high, reach(better, both)) if math.isfinite(seen.high) else seen.high,
        min(seen.lower, -reach(worse, level)) if math.isfinite(seen.lower) else seen.lower,
        max(seen.upper, reach(better, level)) if math.isfinite(seen.upper) else seen.upper,
        level,
        n,
        True,
    )


def non_inferiority(delta: Interval, margin: float) -> Verdict:
    """PASS if the lower one-sided bound of ``delta`` is above -margin, FAIL if the upper one is
    below it, else INCONCLUSIVE. ``delta`` is better when larger."""
    if margin <= 0 or not math.isfinite(margin):
        raise ValueError(f"margin {margin} must be positive: the loss that would still be accepted")
    if math.isnan(delta.lower) or math.isnan(delta.upper):
        return "FAIL"
    if delta.lower > -margin:
        return "PASS"
    if delta.upper < -margin:
        return "FAIL"
    return "INCONCLUSIVE"


def documents_needed(delta: Interval, margin: float) -> int | None:
    """Documents at which this delta would pass; None if it never would. A bootstrap bound shrinks
    with the root of the documents, the exact bound on changes that were not seen in proportion."""
    room = margin + delta.value
    spread = delta.value - delta.lower
    if room <= 0 or not math.isfinite(spread):
        return None
    return math.ceil(delta.n * (spread / room) ** (1 if delta.widened else 2))


def sample_sd(values: Sequence[float]) -> float | None:
    """Standard deviation between runs (n - 1); None below two values."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return None
    return float(np.std(x, ddof=1)) if np.isfinite(x).all() else math.nan


@dataclass(frozen=True)
class Tail:
    """Summary of a per-token quantity."""

    mean: float
    median: float
    p90: float
    p99: float
    p999: float
    max: float
    n: int


def tail(values: ArrayLike) -> Tail:
    """Mean, quantiles and maximum of values [n]. One Inf makes mean and maximum infinite, one NaN
    makes everything NaN: a broken token cannot hide."""
    v = np.asarray(values, np.float64).ravel()
    if not v.size:
        raise ValueError("no values to summarise")
    if np.isnan(v).any():
        nan = math.nan
        return Tail(nan, nan, nan, nan, nan, nan, v.size)
    levels = np.array([0.5, 0.9, 0.99, 0.999])
    if np.isfinite(v).all():
        q = np.quantile(v, levels)
    else:
        q = np.quantile(v, levels, method="higher")  # no Inf - Inf
    median, p90, p99, p999 = (float(x) for x in q)
    return Tail(float(v.mean()), median, p90, p99, p999, float(v.max()), v.size)


def bucket_edges(length: int, first: int = 16) -> list[int]:
    """Position buckets that double: 0, first, 2 first, ... up to and including ``length``."""
    if length < 1:
        raise ValueError(f"length {length} must be at least 1")
    edges = [0]
    step = first
    while step < length:
        edges.append(step)
        step *= 2
    return [*edges, length]


def loglog_slope(position: ArrayLike, value: ArrayLike, weight: ArrayLike) -> float | None:
    """Weighted least-squares slope of log(value) on log(position); None below three usable points.

    0 is a plateau, 0.5 a random walk, 1 a bias. Points that are zero, negative, not finite or
    weightless are left out.
    """
    x, y, w = (np.asarray(v, np.float64) for v in (position, value, weight))
    keep = (x > 0) & (y > 0) & np.isfinite(y) & (w > 0)
    if keep.sum() < 3:
        return None
    lx, ly, w = np.log(x[keep]), np.log(y[keep]), w[keep] / w[keep].sum()
    dx = lx - (w * lx).sum()
    spread = float((w * dx * dx).sum())
    return float((w * dx * ly).sum()) / spread if spread > 0 else None
