"""Local tasks: seeded streams that need their recurrent state, and a little byte-level text.

>>> batch = TASKS["count"].sample(4, seed=0)
>>> batch.ids.shape, batch.mask.shape
((4, 512), (4, 512))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from zlib import crc32

import numpy as np

from replayssm_quant.evals.tasks import streams, text

BLOCK = 32  # streams drawn together; a shorter sample is a prefix of a longer one


@dataclass(frozen=True)
class Batch:
    """Streams of one task.

    ids: int64 [n, length], byte values, which are token ids of the shipped byte tokenizer.
    mask: bool [n, length]; ``mask[b, t]`` says that ``ids[b, t + 1]`` is a scored answer.
    meta: int32 [n, length] arrays that describe the answer at each masked place.
    """

    ids: np.ndarray
    mask: np.ndarray
    meta: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Generation:
    """One free-running question: greedy decoding of ``prompt`` should yield exactly ``target``."""

    prompt: str
    target: str


@dataclass(frozen=True)
class StreamTask:
    """A seeded task.

    name: key in ``TASKS``. description: one line for reports. chance: accuracy of a guess among the
    answer symbols. difficulty: the evaluation setting, overridable by keyword in ``sample``.
    scored: the signal that means something, 'accuracy' or 'likelihood'. generates: whether
    ``generations`` applies. open_ended: there is no right answer; a response counts as right if it
    ends by itself.
    """

    name: str
    description: str
    chance: float
    draw: Callable[..., streams.Drawn]
    difficulty: Mapping[str, Any] = field(default_factory=dict)
    scored: str = "accuracy"
    generates: bool = False
    open_ended: bool = False

    def sample(self, n: int, seed: int, **difficulty: Any) -> Batch:
        """``n`` streams, a pure function of (task, seed, difficulty); n only cuts the sequence.

        Raises ValueError for an unknown difficulty or a value out of range.
        """
        if n < 1:
            raise ValueError(f"n={n}: ask for at least one stream")
        known = list(signature(self.draw).parameters)[2:]
        unknown = sorted(set(difficulty) - set(known))
        if unknown:
            raise ValueError(f"task {self.name} has no {unknown[0]!r}; it takes {', '.join(known)}")
        setting = {**self.difficulty, **difficulty}
        parts = []
        for block in range(-(-n // BLOCK)):
            rng = np.random.default_rng([seed, crc32(self.name.encode()), block])
            parts.append(self.draw(rng, BLOCK, **setting))
        ids = np.concatenate([p[0] for p in parts])[:n]
        mask = np.concatenate([p[1] for p in parts])[:n]
        meta = {k: np.concatenate([p[2][k] for p in parts])[:n] for k in parts[0][2]}
        return Batch(ids, mask, meta)

    def generations(self, n: int, seed: int, **difficulty: Any) -> list[Generation]:
        """Prompts and targets of ``sample(n, seed)``: the target is the masked run of each stream.

        Raises ValueError for a task whose answers are not one run at the end.
        """
        if not self.generates or self.open_ended:
            names = ", ".join(t.name for t in TASKS.values() if t.generates and not t.open_ended)
            raise ValueError(f"task {self.name} has no free-running form; tasks that do: {names}")
        batch = self.sample(n, seed, **difficulty)
        out = []
        for ids, mask in zip(batch.ids, batch.mask, strict=True):
            places = np.nonzero(mask)[0] + 1
            line = ids.astype(np.uint8).tobytes().decode("ascii")
            out.append(Generation(line[: places[0]], line[places[0] : places[-1] + 1]))
        return out


TASKS: dict[str, StreamTask] = {
    task.name: task
    for task in (
        StreamTask(
            "count",
            "how often has this key occurred (0-31), 4-8 keys",
            1 / 32,
            streams.draw_count,
            {"length": 512},
        ),
        StreamTask(
            "recall",
            "newest value of a key, 40-62 keys, some overwritten",
            1 / 28,
            streams.draw_recall,
            {"length": 512, "keys": (40, 62)},
        ),
        StreamTask(
            "leaky_mean",
            "bucket (of 8) of the running leaky mean of a +-1 stream",
            1 / 8,
            streams.draw_leaky_mean,
            {"length": 512},
        ),
        StreamTask(
            "tally",
            "repeat a pattern of events and write the running counts it asks for",
            1 / 32,
            streams.draw_tally,
            {"length": 512, "decode": 320},
            generates=True,
        ),
        StreamTask(
            "text",
            "held-out Python documentation source, byte by byte",
            1 / 256,
            text.draw_windows,
            {"length": 512},
            scored="likelihood",
        ),
        StreamTask(
            "write",
            "go on from held-out text until an empty line, the same random numbers for every state",
            0.0,
            text.draw_openings,
            {"length": 256, "limit": 1024, "paragraphs": 3, "temperature": 0.7},
            generates=True,
            open_ended=True,
        ),
    )
}

__all__ = ["BLOCK", "TASKS", "Batch", "Generation", "StreamTask", "streams", "text"]
