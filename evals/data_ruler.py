"""Retrieval in long filler, made on the spot in any tokenizer's lengths: no data to bring.

After RULER (Hsieh et al. 2024), in our own words: ``ruler_niah`` hides numbers for keys in filler
and asks for one of them, ``ruler_vt`` hides a chain of assignments and asks for every variable with
the first one's value. An answer is right if it names everything asked for. A prompt is read in a
prefill, so these tasks decode a few dozen tokens only: they show that a long prompt's state
survives its first rounding, little more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

LENGTHS = (4096,)
"""Tokens of a prompt, of a suite entry that sets none."""
SEED = 20240

_FILLER = (
    "The river was low that year.",
    "Nobody on the bridge said a word.",
    "A clock somewhere struck the hour.",
    "The road went on as before.",
    "Later the rain came back.",
)
_FIRST = (
    "amber",
    "brisk",
    "copper",
    "dusty",
    "early",
    "faded",
    "gentle",
    "hollow",
    "inner",
    "jade",
)
_SECOND = (
    "anchor",
    "beacon",
    "cedar",
    "drum",
    "ember",
    "ferry",
    "garnet",
    "harbor",
    "island",
    "jar",
)


def _lines(count: int) -> list[str]:
    return [_FILLER[i % len(_FILLER)] for i in range(count)]


def _hide(rng: random.Random, lines: list[str], facts: Sequence[str]) -> str:
    """The lines with the facts in between, in their order."""
    places = sorted(rng.sample(range(len(lines) + 1), len(facts)))
    out, done = [], 0
    for i, fact in zip(places, facts, strict=True):
        out += [*lines[done:i], fact]
        done = i
    return " ".join([*out, *lines[done:]])


def _niah(rng: random.Random) -> tuple[list[str], str, list[str]]:
    """(facts, question, answers) of four keys, one of them asked for."""
    names = rng.sample([f"{a} {b}" for a in _FIRST for b in _SECOND], 4)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in names]
    facts = [f"The number of the {n} is {v}." for n, v in zip(names, numbers, strict=True)]
    asked = rng.randrange(len(names))
    question = f"What is the number of the {names[asked]}? The number of the {names[asked]} is"
    return facts, question, [numbers[asked]]


def _vt(rng: random.Random) -> tuple[list[str], str, list[str]]:
    """A chain of five variables beside another of three."""
    letters = rng.sample([a + b + c for a in "BDFGHK" for b in "LMNPR" for c in "STVWX"], 8)
    value, other = rng.sample(range(10_000, 99_999), 2)
    chains = []
    for names, first in ((letters[:5], value), (letters[5:], other)):
        chain = [f"Let {names[0]} = {first}."]
        chain += [f"Let {b} = {a}." for a, b in zip(names, names[1:], strict=False)]
        chains.append(chain)
    facts: list[str] = []
    while any(chains):  # interleaved, each chain in its order
        facts.append(rng.choice([c for c in chains if c]).pop(0))
    question = f"Which variables have the value {value}? The variables with the value {value} are"
    return facts, question, letters[:5]


_TASKS: dict[str, tuple[Callable[..., Any], int]] = {
    "ruler_niah": (_niah, 32),
    "ruler_vt": (_vt, 48),
}
NAMES = tuple(_TASKS)


def documents(
    name: str, n: int, lengths: Sequence[int], count: Callable[[str], int]
) -> list[dict[str, Any]]:
    """``n`` questions of a task at each length. count: tokens of a text. Raises ValueError for a
    length that does not hold the facts."""
    make, room = _TASKS[name]
    out = []
    for length in lengths:
        rng = random.Random(f"{SEED} {name} {length}")
        for _ in range(n):
            facts, question, answers = make(rng)
            head = "Read the text and answer the question after it.\n"

            def prompt(lines: int) -> str:
                body = _hide(random.Random(str(facts)), _lines(lines), facts)  # noqa: B023
                return f"{head}{body}\n{question}"  # noqa: B023

            low, high = len(facts), length
            if count(prompt(low)) + room > length:
                raise ValueError(
                    f"task {name}: {length} tokens do not hold its facts; use a longer length"
                )
            while low < high:  # the most lines that fit
                middle = (low + high + 1) // 2
                if count(prompt(middle)) + room <= length:
                    low = middle
                else:
                    high = middle - 1
            out.append({"input": prompt(low), "answers": answers, "length": length})
    return out


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 if everything asked for stands in the answer."""
    return {"exact_match": float(all(a in results[0] for a in doc["answers"]))}


def config(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The task as lm-eval takes it."""

    def load(**kwargs: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(list(rows))}

    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{answers}}",
        "process_results": score,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {
            "until": ["\n"], "do_sample": False, "max_gen_toks": _TASKS[name][1],
        },
        "metadata": {"version": 1.0},
    }  # fmt: skip
