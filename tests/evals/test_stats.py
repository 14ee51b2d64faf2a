"""Statistics against scipy, closed forms and cases worked by hand."""

import math

import numpy as np
import pytest
import scipy.stats as reference

from replayssm_quant.evals import stats


def test_bootstrap_agrees_with_scipy_on_a_skewed_mean() -> None:
    rng = np.random.default_rng(1)
    x = rng.exponential(size=60)
    ours = stats.bootstrap_ratio(x, np.ones(60), resamples=20_000)
    theirs = reference.bootstrap(
        (x,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(2)
    ).confidence_interval
    # both are Monte Carlo quantiles; the 2.5 % one of 20,000 has a standard error near 1 % of the
    # interval's width, taken four times over for two of them
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.04 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.04 * width)
    assert ours.value == pytest.approx(x.mean())
    assert ours.low < ours.lower < ours.value < ours.upper < ours.high


def test_percentile_bootstrap_of_two_documents_is_exact() -> None:
    # resampling (0, 1) gives means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4
    found = stats.bootstrap_ratio([0.0, 1.0], [1.0, 1.0], method="percentile")
    assert (found.low, found.high) == (0.0, 1.0)
    values = stats.resample(np.array([0.0, 1.0]), np.ones(2), 40_000)
    shares = [np.mean(values == v) for v in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.015)


def test_ratio_weights_documents_by_their_answers() -> None:
    found = stats.bootstrap_ratio([1.0, 0.0], [1.0, 3.0])
    assert found.value == 0.25
    alike = stats.bootstrap_ratio([2.0, 4.0, 6.0], [4.0, 8.0, 12.0])
    assert (alike.low, alike.value, alike.high) == (0.5, 0.5, 0.5)


def test_bootstrap_covers_at_its_level_with_clustered_answers() -> None:
    """An interval over documents covers; one over answers, of the same data, would not."""
    rng = np.random.default_rng(3)
    hits = naive = 0
    runs = 150
    for run in range(runs):
        level = rng.normal(0.0, 1.0, 40)
        answers = level[:, None] + rng.normal(0, 0.1, (40, 10))
        found = stats.bootstrap_ratio(answers.sum(1), np.full(40, 10.0), resamples=600, seed=run)
        hits += found.low <= 0.0 <= found.high
        half = 1.96 * answers.std() / math.sqrt(answers.size)
        naive += abs(answers.mean()) <= half
    # binomial(150, 0.95) lies in 131..149 with probability 0.999
    assert 131 <= hits <= 150
    assert naive < 100


def test_one_document_says_nothing_about_spread() -> None:
    found = stats.bootstrap_ratio([3.0], [4.0])
    assert found.value == 0.75 and found.low == -math.inf and found.upper == math.inf


@pytest.mark.parametrize("num, den", [([], []), ([1.0], [0.0]), ([math.nan], [1.0]), ([1.0], [-1])])
def test_bootstrap_refuses_impossible_sums(num, den) -> None:
    with pytest.raises(ValueError):
        stats.bootstrap_ratio(num, den)


@pytest.mark.parametrize("k, n", [(0, 1), (0, 24), (1, 24), (5, 24), (23, 24), (24, 24), (7, 900)])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.975])
def test_clopper_pearson_is_scipys(k: int, n: int, level: float) -> None:
    theirs = reference.binomtest(k, n, alternative="less").proportion_ci(level, method="exact").high
    assert stats.clopper_pearson_upper(k, n, level) == pytest.approx(theirs, rel=1e-9)


def test_clopper_pearson_of_nothing_seen_is_the_rule_of_three() -> None:
    assert stats.clopper_pearson_upper(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-9)
    assert stats.clopper_pearson_upper(0, 300) == pytest.approx(3 / 300, rel=0.01)


@pytest.mark.parametrize("k, n", [(0, 10), (3, 10), (10, 10), (98, 198)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    theirs = reference.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert stats.wilson(k, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize("worse, better", [(0, 0), (5, 0), (6, 0), (8, 3), (40, 61), (1, 1)])
def test_mcnemar_is_the_binomial_test(worse: int, better: int) -> None:
    n = worse + better
    theirs = reference.binomtest(worse, n, 0.5).pvalue if n else 1.0
    assert stats.mcnemar_exact(worse, better) == pytest.approx(theirs, rel=1e-9)


def test_mcnemar_needs_six_to_nothing() -> None:
    assert stats.mcnemar_exact(5, 0) == pytest.approx(0.0625)
    assert stats.mcnemar_exact(6, 0) == pytest.approx(0.03125)


def test_sign_flip_is_exact_for_few_and_close_for_many() -> None:
    d = np.array([0.4, 0.1, 0.3, -0.2, 0.5, 0.25, 0.05])
    theirs = reference.permutation_test(
        (d,), np.sum, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert stats.sign_flip(d) == pytest.approx(theirs)
    assert stats.sign_flip([0.0, 0.0]) == 1.0
    many = np.random.default_rng(0).normal(0.25, 1.0, 80)
    t = reference.ttest_1samp(many, 0.0).pvalue
    assert stats.sign_flip(many) == pytest.approx(t, abs=0.01)


def test_holm_steps_down_and_stays_monotone() -> None:
    # smallest x 3, next x 2, next x 1, then the running maximum
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_no_change_seen_is_not_no_change() -> None:
    """24 equal documents of one answer each bound the loss by 1 - 0.05^(1/24), not by zero."""
    same = stats.paired_delta(np.ones(24), np.ones(24), np.ones(24))
    assert same.value == 0.0 and same.widened
    assert same.lower == pytest.approx(-(1 - 0.05 ** (1 / 24)), rel=1e-9)
    assert same.low == pytest.approx(-(1 - 0.025 ** (1 / 24)), rel=1e-9)
    # with 100 answers a document an unseen change is one answer of a hundred
    long = stats.paired_delta(np.full(24, 100), np.full(24, 100), np.full(24, 100))
    assert long.lower == pytest.approx(same.lower / 100, rel=1e-9)


def test_many_changes_leave_the_bootstrap_alone() -> None:
    rng = np.random.default_rng(5)
    reference_right = rng.integers(80, 100, 30).astype(float)
    candidate = reference_right - rng.integers(0, 10, 30)
    found = stats.paired_delta(candidate, reference_right, np.full(30, 100.0))
    plain = stats.bootstrap_ratio(candidate - reference_right, np.full(30, 100.0))
    assert found == plain and not found.widened


def test_one_changed_document_widens_by_its_size() -> None:
    right = np.full(24, 50.0)
    candidate = right.copy()
    candidate[3] -= 20
    found = stats.paired_delta(candidate, right, np.full(24, 50.0))
    worse = reference.binomtest(1, 24, alternative="less").proportion_ci(0.95).high * 20 / 50
    assert found.lower == pytest.approx(-worse, rel=1e-6)


@pytest.mark.parametrize(
    "low, high, verdict",
    [(-0.005, 0.002, "PASS"), (-0.03, -0.012, "FAIL"), (-0.03, 0.01, "INCONCLUSIVE")],
)
def test_non_inferiority(low: float, high: float, verdict: str) -> None:
    middle = (low + high) / 2
    delta = stats.Interval(middle, low - 0.01, high + 0.01, low, high, 0.95, 24)
    assert stats.non_inferiority(delta, 0.01) == verdict


def test_non_inferiority_judges_the_one_sided_bounds() -> None:
    """A two-sided interval that crosses -margin passes if the one-sided bound does not."""
    delta = stats.Interval(-0.005, -0.012, 0.002, -0.0095, 0.001, 0.95, 24)
    assert stats.non_inferiority(delta, 0.01) == "PASS"
    with pytest.raises(ValueError, match="margin"):
        stats.non_inferiority(delta, 0.0)
    broken = stats.Interval(*[math.nan] * 5, 0.95, 24)
    assert stats.non_inferiority(broken, 0.01) == "FAIL"


def test_documents_needed_scales_as_its_bound_does() -> None:
    spread = stats.Interval(0.0, -0.03, 0.03, -0.02, 0.02, 0.95, 100)
    assert stats.documents_needed(spread, 0.01) == 400
    exact = stats.Interval(0.0, -0.03, 0.03, -0.02, 0.02, 0.95, 100, True)
    assert stats.documents_needed(exact, 0.01) == 200
    lost = stats.Interval(-0.02, -0.05, 0.01, -0.04, 0.0, 0.95, 100)
    assert stats.documents_needed(lost, 0.01) is None


def test_tail_quantiles_and_broken_tokens() -> None:
    found = stats.tail(np.arange(1001) / 1000)
    assert (found.median, found.p90, found.p99, found.max) == pytest.approx((0.5, 0.9, 0.99, 1.0))
    assert found.mean == pytest.approx(0.5) and found.n == 1001
    assert stats.tail([0.0, math.inf]).mean == math.inf
    assert math.isnan(stats.tail([0.0, math.nan]).median)
    with pytest.raises(ValueError):
        stats.tail([])


def test_bucket_edges_double_and_end_at_the_length() -> None:
    assert stats.bucket_edges(512) == [0, 16, 32, 64, 128, 256, 512]
    assert stats.bucket_edges(100) == [0, 16, 32, 64, 100]
    assert stats.bucket_edges(5) == [0, 5]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_slope_of_a_power_law(power: float) -> None:
    x = np.array([8.0, 24.0, 48.0, 96.0, 192.0])
    weight = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert stats.loglog_slope(x, 3.0 * x**power, weight) == pytest.approx(power, abs=1e-12)
    theirs = np.polyfit(np.log(x), np.log(x + x**2), 1, w=np.sqrt(weight))[0]
    assert stats.loglog_slope(x, x + x**2, weight) == pytest.approx(theirs)
    assert stats.loglog_slope(x[:2], x[:2], weight[:2]) is None
    assert stats.loglog_slope(x, np.zeros(5), weight) is None


def test_seed_sd_is_the_sample_sd() -> None:
    assert stats.sample_sd([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert stats.sample_sd([1.0]) is None
