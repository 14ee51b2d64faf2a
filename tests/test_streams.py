"""The local tasks: every scored answer is recomputed here from the text of its stream alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.evals.tasks import BLOCK, TASKS, streams, text

COUNTS = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
SEEDS = st.integers(0, 2**31)
few = settings(max_examples=12, deadline=None)


def lines(ids: np.ndarray) -> list[str]:
    return [row.astype(np.uint8).tobytes().decode("ascii") for row in ids]


def count_answers(line: str) -> dict[int, str]:
    """Index of each answer of a counting text -> the right symbol, by walking over it."""
    seen: dict[str, int] = {}
    answers, i = {}, 2
    while i < len(line):
        if line[i] == "?":
            answers[i + 2] = COUNTS[seen.get(line[i + 1], 0)]
            i += 3
        else:
            if line[i] in "abcdefgh":
                seen[line[i]] = seen.get(line[i], 0) + 1
            i += 1
    return answers


def assert_answers(line: str, mask: np.ndarray, expected: dict[int, str]) -> None:
    assert {int(t) + 1 for t in np.nonzero(mask)[0]} == set(expected)
    assert {i: line[i] for i in expected} == expected


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_sample_depends_on_its_seed_alone(name: str) -> None:
    task = TASKS[name]
    first, again, other = (task.sample(BLOCK + 3, s, length=128, **easy(name)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.mask, again.mask)
    assert (first.ids != other.ids).any(1).all()
    short = task.sample(2, 1, length=128, **easy(name))
    np.testing.assert_array_equal(short.ids, first.ids[:2])
    assert first.ids.shape == first.mask.shape == (BLOCK + 3, 128)
    assert len({tuple(row) for row in first.ids}) == BLOCK + 3  # blocks do not repeat
    assert first.ids.dtype == np.int64 and first.mask.dtype == bool
    for values in first.meta.values():
        assert values.shape == first.mask.shape and not values[~first.mask].any()


def easy(name: str) -> dict:
    return {"decode": 48, "warmup": (0, 16)} if name == "tally" else {}


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"text", "write"}))
def test_streams_are_printable_and_scored_inside(name: str) -> None:
    batch = TASKS[name].sample(8, 3)
    assert batch.ids.min() >= 32 and batch.ids.max() <= 126
    assert not batch.mask[:, -1].any()
    assert batch.mask.sum(1).min() >= 16


@few
@given(seed=SEEDS, length=st.integers(16, 300), most=st.integers(0, 31))
def test_count_answers(seed: int, length: int, most: int) -> None:
    ids, mask, meta = streams.draw_count(
        np.random.default_rng(seed), 4, length, (1, 8), 0.4, (0.0, 0.3), most
    )
    for line, m, counts in zip(lines(ids), mask, meta["count"], strict=True):
        expected = count_answers(line)
        assert_answers(line, m, expected)
        assert all(counts[i - 1] == COUNTS.index(s) <= most for i, s in expected.items())


@few
@given(seed=SEEDS, length=st.integers(16, 300), again=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_recall_answers(seed: int, length: int, again: float) -> None:
    ids, mask, meta = streams.draw_recall(
        np.random.default_rng(seed), 4, length, (1, 62), 0.4, 0.2, again
    )
    for line, m, ages, held in zip(lines(ids), mask, meta["age"], meta["stored"], strict=True):
        store: dict[str, tuple[str, int]] = {}
        expected, i = {}, 2
        while i < length:
            if line[i] == "?":
                expected[i + 2] = store[line[i + 1]][0]
                assert ages[i + 1] == i - store[line[i + 1]][1] and held[i + 1] == len(store)
                i += 3
            elif line[i].isalnum():
                store[line[i]] = (line[i + 1], i)
                i += 2
            else:
                assert line[i] in " `"
                i += 1
        assert_answers(line, m, expected)


def test_recall_overwrites() -> None:
    ids, _, meta = streams.draw_recall(np.random.default_rng(0), 16, 512, (8, 8), p_again=0.3)
    values: set[tuple[int, str, str]] = set()
    for b, line in enumerate(lines(ids)):
        values |= {(b, line[i + 1], line[i + 2]) for i in range(510) if line[i] == "?"}
    assert len(values) > 16 * 8 * 2  # far more answers than keys: the newest value counts
    assert meta["stored"].max() == 8


@few
@given(seed=SEEDS, margin=st.sampled_from([0.0, 0.03, 0.1]))
def test_leaky_mean_answers(seed: int, margin: float) -> None:
    ids, mask, meta = streams.draw_leaky_mean(np.random.default_rng(seed), 3, 256, 0.2, margin)
    for line, m, milli in zip(lines(ids), mask, meta["milli"], strict=True):
        mean, expected, i = 0.0, {}, 2
        while i < 256:
            if line[i] == "?":
                expected[i + 1] = str(min(7, int((mean + 1) * 4)))
                edge = abs((mean + 1) * 4 - round((mean + 1) * 4)) / 4
                assert edge >= margin - 1e-9 and milli[i] == round(mean * 1000)
                i += 2
            else:
                mean = mean * 31 / 32 + (1 if line[i] == "+" else -1) / 32
                i += 1
        assert_answers(line, m, expected)


def test_leaky_mean_visits_every_bucket() -> None:
    batch = TASKS["leaky_mean"].sample(32, 0)
    answers = batch.ids[:, 1:][batch.mask[:, :-1]]
    share = np.bincount(answers - ord("0"), minlength=8) / len(answers)
    assert share.min() > 0.01 and share.max() < 0.4


def continuation(prompt: str, tokens: int) -> str:
    """What must follow a tally's prompt, from the prompt alone."""
    _, pattern, rest = prompt[2:].split("|")
    assert rest == ""
    while len(prompt) < 4096:
        i = 0
        while i < len(pattern):
            if pattern[i] == "?":
                key = pattern[i + 1]
                asked = sum(prompt[j - 1] == "?" for j in range(3, len(prompt)) if prompt[j] == key)
                count = prompt[2:].count(key) - asked
                if count >= len(COUNTS):
                    return prompt
                prompt += f"?{key}{COUNTS[count]}"
                i += 3
            else:
                prompt += pattern[i]
                i += 1
        prompt += "|"
    return prompt


@few
@given(seed=SEEDS, repeats=st.sampled_from([(0, 0), (1, 2)]))
def test_tally_follows_from_its_prompt(seed: int, repeats: tuple[int, int]) -> None:
    task = TASKS["tally"]
    setting = {"length": 256, "decode": 96, "warmup": (0, 24), "repeats": repeats}
    batch = task.sample(3, seed, **setting)
    generations = task.generations(3, seed, **setting)
    for line, m, counts, generation in zip(
        lines(batch.ids), batch.mask, batch.meta["count"], generations, strict=True
    ):
        prompt, target = generation.prompt, generation.target
        assert len(target) == 96 and line.startswith(prompt + target)
        assert continuation(prompt, 96)[len(prompt) :].startswith(target)
        begin = len(prompt)
        np.testing.assert_array_equal(np.nonzero(m)[0], np.arange(begin - 1, begin + 95))
        answers = {i: s for i, s in count_answers(line).items() if begin <= i < begin + 96}
        assert {int(t) + 1: COUNTS[counts[t] - 1] for t in np.nonzero(counts)[0]} == answers


def test_tally_default_decodes_long_and_asks_often() -> None:
    task = TASKS["tally"]
    assert {len(g.target) for g in task.generations(16, 0)} == {320}
    counts = task.sample(16, 0).meta["count"]
    assert (counts > 0).sum(1).min() >= 20
    assert len(np.unique(counts)) > 20


def test_a_whole_tally_ends_with_its_pattern() -> None:
    setting = {"length": 320, "warmup": (0, 8), "decode": None, "whole": True}
    batch = TASKS["tally"].sample(6, 0, **setting)
    generations = TASKS["tally"].generations(6, 0, **setting)
    assert len({len(g.target) for g in generations}) > 2
    for line, g in zip(lines(batch.ids), generations, strict=True):
        end = len(g.prompt) + len(g.target)
        assert g.target.endswith("|") and set(line[end:]) <= set(".,;:") and end < 320


def test_openings_do_not_depend_on_how_the_response_is_drawn() -> None:
    plain = TASKS["write"].sample(3, 0, length=64)
    other = TASKS["write"].sample(3, 0, length=64, limit=9, paragraphs=7, temperature=0.0)
    np.testing.assert_array_equal(plain.ids, other.ids)
    assert plain.mask[:, -2].all() and plain.mask.sum() == 3


def test_text_windows_lie_in_the_held_out_slice() -> None:
    whole = text.heldout().tobytes()
    assert len(whole) <= 256 * 1024
    batch = TASKS["text"].sample(3, 0, length=64)
    for row in batch.ids:
        assert row.astype(np.uint8).tobytes() in whole
    assert batch.mask[:, :-1].all()


@pytest.mark.parametrize(
    ("name", "setting", "word"),
    [
        ("count", {"lenght": 64}, "lenght"),
        ("count", {"length": 3}, "length=3"),
        ("count", {"keys": (4, 9)}, "keys"),
        ("count", {"max_count": 32}, "max_count=32"),
        ("recall", {"keys": (0, 4)}, "keys"),
        ("tally", {"length": 64, "decode": 320}, "decode=320"),
        ("tally", {"repeats": (0, 7)}, "repeats"),
        ("tally", {"length": 64, "decode": None, "whole": True}, "whole"),
        ("text", {"length": 10**7}, "length=10000000"),
        ("write", {"paragraphs": 0}, "paragraphs=0"),
    ],
)
def test_bad_difficulty_names_the_value(name: str, setting: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TASKS[name].sample(1, 0, **setting)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="n=0"):
        TASKS["count"].sample(0, 0)
    with pytest.raises(ValueError, match="tally"):
        TASKS["count"].generations(1, 0)
    with pytest.raises(ValueError, match="write"):
        TASKS["write"].generations(1, 0)
