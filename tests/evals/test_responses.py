"""Free-running responses: where they end, what draws them, how states are compared on them."""

import json

import numpy as np
import pytest

from replayssm_quant import models
from replayssm_quant.config import StateConfig
from replayssm_quant.evals import measure, probes
from replayssm_quant.evals.arms import arm, reference_arms
from replayssm_quant.evals.compare import compare, first_difference
from replayssm_quant.evals.tasks import TASKS

WRITE = {"length": 24, "limit": 48, "temperature": 0.8}


@pytest.fixture(scope="module")
def loaded(tiny_gdn):
    return models.load(models.resolve(str(tiny_gdn)), "cpu", "fp32", False)


def written(loaded, one, seed=0, **settings):
    docs = probes.prompts(TASKS["write"], 3, WRITE | settings, loaded.tokenizer)
    return measure.measure_prompts(loaded, docs, one, seed, measure.Options(batch_size=3), "key")


def outputs(unit) -> list[str]:
    return [s["output"] for s in unit.samples]


@pytest.mark.parametrize(
    ("ids", "paragraphs", "end"),
    [
        ([65, 10, 10, 66], 1, 3),
        ([65, 10, 66, 10], 1, None),
        ([10, 10, 10, 65], 2, 3),  # three line ends are two empty lines
        ([65, 10, 10, 66, 10, 10], 2, 6),
        ([65, 257, 10, 10], 1, 1),
        ([65, 10, 10, 257], None, 3),
        ([65, 66], None, None),
    ],
)
def test_where_a_response_ends(ids, paragraphs, end) -> None:
    assert measure.response_end(ids, {257}, paragraphs) == end


def test_noise_belongs_to_the_document() -> None:
    both = measure.gumbel(("00ff", "a1"), 40, 50)
    np.testing.assert_array_equal(measure.gumbel(("a1",), 40, 50)[0], both[1])
    assert both.dtype == np.float32 and (both[0] != both[1]).all()
    assert both.mean() == pytest.approx(0.5772, abs=0.05)  # of a standard Gumbel variable


def test_largest_noisy_logit_is_a_draw_at_the_temperature() -> None:
    logits, temperature = np.array([0.0, 1.0, 2.0]), 0.5
    noise = measure.gumbel(("7",), 20_000, 3)[0]
    drawn = np.bincount((logits / temperature + noise).argmax(1), minlength=3) / 20_000
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    np.testing.assert_allclose(drawn, wanted, atol=0.012)


def test_the_same_state_writes_the_same(loaded) -> None:
    reference, floor = reference_arms(3)
    base = written(loaded, reference)
    assert outputs(base) == outputs(written(loaded, floor))  # another batch size, replayed
    assert outputs(base) != outputs(written(loaded, reference, temperature=0.0))
    assert len(set(outputs(base))) == 3
    assert base.record.exact is None and all(s["answers"] == 1 for s in base.samples)


def test_a_response_ends_at_its_empty_line_or_its_limit(loaded, monkeypatch) -> None:
    reference = reference_arms(3)[0]
    short = written(loaded, reference, limit=5)
    assert [s["generated"] for s in short.samples] == [5, 5, 5]
    assert short.record.accuracy == 0.0  # none ended
    vocabulary = loaded.model.config.vocab_size

    def newlines(hashes, steps, size):
        noise = np.zeros((len(hashes), steps, size), np.float32)
        noise[:, 3:, measure.NEWLINE] = 1e6
        assert size == vocabulary
        return noise

    monkeypatch.setattr(measure, "gumbel", newlines)
    ended = written(loaded, reference, paragraphs=2)
    assert [s["generated"] for s in ended.samples] == [6, 6, 6]
    assert ended.record.accuracy == 1.0 and all(s["finished"] for s in ended.samples)


def test_lengths_are_paired_and_drift_is_counted(make_unit, task_record) -> None:
    texts = ["x" * 40, "y" * 20, "z" * 100]
    reference = make_unit(["1"] * 3, "fp32", outputs=texts)
    longer = [texts[0], "y" * 18 + "!" * 12, "z" * 70]
    units = [
        make_unit(["1"] * 3, seed=seed, outputs=kept) for seed, kept in enumerate((texts, longer))
    ]
    for unit in (reference, *units):
        for sample in unit.samples:
            sample["generated"] = len(sample["output"])
            sample["finished"] = int(sample["generated"] < 100)
    found = compare(reference, units, task_record(), "candidate")
    assert found.reference_length == pytest.approx(160 / 3)
    assert found.length == pytest.approx((160 + 140) / 6)
    assert found.length_change.value == pytest.approx((150 - 160) / 160)
    assert found.length_change.low <= found.length_change.value <= found.length_change.high
    assert found.reference_finished == pytest.approx(2 / 3)
    assert found.finished == pytest.approx(5 / 6)
    assert {s.characters: s.same for s in found.survival} == {
        16: 1.0, 32: pytest.approx(5 / 6), 64: pytest.approx(5 / 6)
    }  # fmt: skip
    assert found.first_difference is None  # four of six responses have none
    alone = compare(reference, units[1:], task_record(), "candidate")
    assert alone.first_difference == 70


@pytest.mark.parametrize(
    ("a", "b", "at"), [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2)]
)
def test_first_difference(a, b, at) -> None:
    assert first_difference(a, b) == at


def test_the_record_of_a_response_is_json(loaded) -> None:
    unit = written(loaded, arm("candidate", StateConfig.from_flags("fp8")))
    assert json.loads(json.dumps(unit.samples)) == unit.samples
    assert unit.record.exercise.quantised_reads > 0
