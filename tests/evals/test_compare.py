"""Comparisons of made-up units: pairing, verdicts, flips, drift by position."""

import math

import numpy as np
import pytest

from replayssm_quant.evals.compare import compare, overall, tail
from replayssm_quant.evals.schema import ResultError


def _stream(make_unit, kld: np.ndarray, right: np.ndarray, arm="arm", seed=0, reference=False):
    """A stream unit in which every token is scored."""
    n, t = right.shape
    tokens = {
        "scored": np.ones((n, t), bool),
        "loss": np.full((n, t), 0.5) + (0 if reference else 0.25),
        "right": right,
    }
    summary = None
    if not reference:
        tokens |= {"kld": kld, "agree": right}
        summary = tail(kld)
    flags = ["".join("01"[int(x)] for x in row) for row in right]
    return make_unit(flags, arm, seed, tokens, kld=summary)


def test_pairing_is_by_document_not_by_order(make_unit, task_record) -> None:
    reference = make_unit(["1", "0", "1", "1"], "fp32")
    candidate = make_unit(["1", "0", "1", "1"])
    candidate.samples.reverse()
    found = compare(reference, [candidate], task_record(), "candidate")
    assert found.flips_worse == found.flips_better == 0 and found.delta.value == 0.0


def test_another_prompt_is_refused(make_unit, task_record) -> None:
    reference, candidate = make_unit(["1", "1"], "fp32"), make_unit(["1", "1"])
    candidate.samples[1]["prompt_hash"] = "other"
    with pytest.raises(ResultError, match="doc1 was asked with another prompt"):
        compare(reference, [candidate], task_record(), "candidate")


def test_an_unknown_document_is_refused(make_unit, task_record) -> None:
    reference, candidate = make_unit(["1", "1"], "fp32"), make_unit(["1", "1"])
    candidate.samples[0]["doc_hash"] = "elsewhere"
    with pytest.raises(ResultError, match="elsewhere is not among the reference"):
        compare(reference, [candidate], task_record(), "candidate")


def test_seeds_on_different_documents_are_refused(make_unit, task_record) -> None:
    reference = make_unit(["1", "1", "1"], "fp32")
    short = make_unit(["1", "1"], seed=1)
    with pytest.raises(ResultError, match="different documents"):
        compare(reference, [make_unit(["1", "1", "1"]), short], task_record(), "candidate")


def test_flips_and_mcnemar_of_single_answers(make_unit, task_record) -> None:
    reference = make_unit(["1"] * 20 + ["0"] * 5, "fp32")
    candidate = make_unit(["0"] * 8 + ["1"] * 12 + ["1"] * 2 + ["0"] * 3)
    found = compare(reference, [candidate], task_record(), "candidate")
    assert (found.flips_worse, found.flips_better) == (8, 2)
    assert found.delta.value == pytest.approx(-6 / 25)
    assert found.p_value == pytest.approx(0.109375)  # two-sided binomial, 2 of 10
    assert found.reference_accuracy == 0.8 and found.accuracy == pytest.approx(14 / 25)
    assert found.verdict == "FAIL" and "loses more than 1 points" in found.reason


def test_seeds_are_averaged_and_their_spread_reported(make_unit, task_record) -> None:
    reference = make_unit(["11"] * 10, "fp32")
    seeds = [make_unit(["11"] * (10 - k) + ["10"] * k, seed=k) for k in (0, 1, 2)]
    found = compare(reference, seeds, task_record(), "candidate")
    assert found.delta.value == pytest.approx(-0.05)  # 0, 1 and 2 of 20 answers lost
    assert found.delta_seed_sd == pytest.approx(0.05)
    assert found.seeds == [0, 1, 2] and found.flips_worse == 3


def test_many_equal_documents_pass_and_few_do_not(make_unit, task_record) -> None:
    many, few = ["1" * 50] * 40, ["1"] * 10
    passed = compare(make_unit(many, "fp32"), [make_unit(many)], task_record(), "candidate")
    assert passed.verdict == "PASS"
    open_ = compare(make_unit(few, "fp32"), [make_unit(few)], task_record(), "candidate")
    assert open_.verdict == "INCONCLUSIVE" and open_.documents_needed > 200


def test_reference_below_threshold_is_not_learned(make_unit, task_record) -> None:
    flags = ["10"] * 40
    found = compare(
        make_unit(flags, "fp32"), [make_unit(flags)], task_record(threshold=0.97), "candidate"
    )
    assert found.verdict == "NOT-LEARNED" and "fp32 reaches 50.0 %" in found.reason


def test_nonfinite_logits_fail_whatever_the_accuracy(make_unit, task_record) -> None:
    flags = ["1" * 50] * 40
    broken = make_unit(flags, nonfinite=3)
    found = compare(make_unit(flags, "fp32"), [broken], task_record(), "candidate")
    assert found.verdict == "FAIL" and found.reason.startswith("3 tokens have logits")


def test_divergence_of_texts_is_the_common_prefix(make_unit, task_record) -> None:
    reference = make_unit(["1", "1"], "fp32", outputs=["abcdef", "abcd"])
    candidate = make_unit(["1", "1"], outputs=["abcxef", "abcd"])
    found = compare(reference, [candidate], task_record(), "candidate")
    assert found.divergence == pytest.approx((0.5 + 1.0) / 2)


def test_stream_signals_by_position(make_unit, task_record) -> None:
    n, t = 6, 127
    position = np.arange(1, t + 1)  # updates before prediction i
    kld = np.tile(0.01 * position, (n, 1))
    right = np.ones((n, t), bool)
    reference = _stream(make_unit, kld, right, "fp32", reference=True)
    units = [_stream(make_unit, kld * s, right, seed=i) for i, s in enumerate((0.5, 1.0, 1.5))]
    found = compare(reference, units, task_record("stream"), "candidate", kld_floor=1e-9)
    assert [(b.low, b.high) for b in found.buckets] == [(0, 16), (16, 32), (32, 64), (64, 128)]
    assert [b.n for b in found.buckets] == [15 * n, 16 * n, 32 * n, 64 * n]
    first = found.buckets[0]
    assert first.kld == pytest.approx(0.01 * np.arange(1, 16).mean())
    assert first.delta_loss == pytest.approx(0.25) and first.top1 == 1.0
    assert found.kld_slope == pytest.approx(1.0)  # buckets stand at their mean position
    assert found.kld.mean == pytest.approx(0.01 * position.mean())
    assert found.kld_mean.value == pytest.approx(found.kld.mean)
    assert found.kld_seed_sd == pytest.approx(0.5 * 0.01 * position.mean())
    assert found.delta_loss.value == pytest.approx(0.25) and found.kld_floor == 1e-9


def test_likelihood_counts_a_rise_of_the_loss_as_a_loss(make_unit, task_record) -> None:
    right = np.ones((8, 40), bool)
    reference = _stream(make_unit, None, right, "fp32", reference=True)
    unit = _stream(make_unit, np.full((8, 40), 0.1), right)
    task = task_record("stream", "likelihood", margin=0.01)
    found = compare(reference, [unit], task, "candidate")
    assert found.delta.value == pytest.approx(-0.25) and found.verdict == "FAIL"
    assert found.accuracy is None and found.reference_accuracy is None


def test_infinite_divergence_is_reported_not_averaged_away(make_unit, task_record) -> None:
    right = np.ones((4, 20), bool)
    kld = np.zeros((4, 20))
    kld[2, 3] = math.inf
    reference = _stream(make_unit, None, right, "fp32", reference=True)
    unit = _stream(make_unit, kld, right)
    unit.record.nonfinite_tokens = 1
    found = compare(reference, [unit], task_record("stream"), "candidate")
    assert found.kld.mean == math.inf and found.kld_mean is None and found.verdict == "FAIL"


def test_a_run_is_as_good_as_its_worst_candidate(make_unit, task_record) -> None:
    good, bad = ["1" * 50] * 40, ["0" * 50] * 40
    reference = make_unit(good, "fp32")
    passed = compare(reference, [make_unit(good)], task_record(), "candidate")
    failed = compare(reference, [make_unit(bad)], task_record(), "candidate")
    shared = compare(reference, [make_unit(bad)], task_record(), "shared")
    assert overall([passed, shared]) == "PASS"
    assert overall([passed, failed]) == "FAIL"
    assert overall([shared]) == "INCONCLUSIVE"
