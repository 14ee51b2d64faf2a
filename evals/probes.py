"""Documents of the local tasks, ready to score: token streams and free-running prompts.

A stream's tokens are scored teacher-forced, one recurrent update after another; a prompt is
answered by greedy decoding. The hashes of a document are what results are joined on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .tasks import TASKS, StreamTask
from .tasks import text as held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_SEED = 20240
"""Seed of the documents. Rounding seeds are another matter: every seed sees the same documents."""


def short_hash(*parts: bytes | str) -> str:
    """Sixteen hex digits over the parts, each preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Streams:
    """Token streams: ids int64 [n, T]; mask bool [n, T], mask[b, t] says that ids[b, t + 1] is a
    scored answer. doc_hashes cover ids and mask, prompt_hashes ids alone."""

    task: str
    ids: np.ndarray
    mask: np.ndarray
    doc_hashes: list[str]
    prompt_hashes: list[str]
    likelihood: bool

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> Streams:
        """The first ``n`` documents."""
        cut = (self.ids, self.mask, self.doc_hashes, self.prompt_hashes)
        return Streams(self.task, *(x[:n] for x in cut), self.likelihood)


@dataclass(frozen=True)
class Prompts:
    """Free-running questions as token ids. counted[i] says which tokens of target i are answers
    (the others repeat a pattern that needs no state); limits: most tokens of each response.

    open_ended: a response has no target and ends at its ``paragraphs``-th empty line. temperature:
    of sampling, 0 is greedy; the random numbers depend on the document's hash alone.
    """

    task: str
    prompts: list[np.ndarray]
    targets: list[np.ndarray]
    counted: list[np.ndarray]
    doc_hashes: list[str]
    prompt_hashes: list[str]
    limits: list[int]
    open_ended: bool = False
    paragraphs: int = 1
    temperature: float = 0.0

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, rows: slice) -> Prompts:
        """The documents of a slice."""
        cut = ("prompts", "targets", "counted", "doc_hashes", "prompt_hashes", "limits")
        return replace(self, **{name: getattr(self, name)[rows] for name in cut})

    def first(self, n: int) -> Prompts:
        """The first ``n`` documents."""
        return self.at(slice(n))


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if token ids are byte values, as the local streams write them."""
    probe = "~c?aV|"
    ids = tokenizer(probe, add_special_tokens=False)["input_ids"]
    return list(ids) == list(probe.encode())


def _hash_streams(task: str, ids: np.ndarray, mask: np.ndarray, likelihood: bool) -> Streams:
    rows = [
        (np.ascontiguousarray(i, np.int64).tobytes(), m.tobytes())
        for i, m in zip(ids, mask, strict=True)
    ]
    return Streams(
        task,
        ids,
        mask,
        [short_hash(i, m) for i, m in rows],
        [short_hash(i) for i, _ in rows],
        likelihood,
    )


def streams(
    task: StreamTask,
    n: int,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    data_seed: int = DATA_SEED,
) -> Streams:
    """``n`` streams of a task. Raises ValueError where the model's tokens are not bytes."""
    likelihood = task.scored == "likelihood"
    if is_byte_level(tokenizer):
        batch = task.sample(n, data_seed, **settings)
        return _hash_streams(task.name, batch.ids, batch.mask, likelihood)
    if not likelihood:
        known = ", ".join(t.name for t in TASKS.values() if t.scored == "likelihood")
        raise ValueError(
            f"task {task.name} is written in single bytes, which this model's tokenizer does not "
            f"keep apart; it is for the shipped models, use {known} or an lm-eval task"
        )
    return text_streams(task.name, n, int(settings.get("length", 512)), tokenizer, data_seed)


def text_streams(
    name: str,
    n: int,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    data_seed: int = DATA_SEED,
    text: str | None = None,
) -> Streams:
    """Windows of ``length`` tokens of a text (default: the held-out slice) in any tokenizer.

    Raises ValueError where the text is too short.
    """
    if text is None:
        text = held_out.heldout().tobytes().decode("utf-8", errors="replace")
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
    if len(ids) < length:
        raise ValueError(
            f"task {name}: the text has {len(ids)} tokens, fewer than one window of {length}; "
            "use a shorter length"
        )
    rng = np.random.default_rng([data_seed, len(ids)])
    start = rng.integers(0, len(ids) - length + 1, n)
    windows = ids[start[:, None] + np.arange(length)]
    mask = np.ones(windows.shape, bool)
    mask[:, -1] = False
    return _hash_streams(name, windows, mask, True)


def prompts(
    task: StreamTask,
    n: int,
    settings: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    data_seed: int = DATA_SEED,
) -> Prompts:
    """``n`` free-running questions of a task. Raises ValueError as ``streams`` does."""
    if not is_byte_level(tokenizer):
        raise ValueError(
            f"task {task.name} is written in single bytes, which this model's tokenizer does not "
            "keep apart; it is for the shipped models"
        )
    batch = task.sample(n, data_seed, **settings)
    counts = batch.meta.get("count")
    out: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    for row, (ids, mask) in enumerate(zip(batch.ids, batch.mask, strict=True)):
        places = np.nonzero(mask)[0]
        first, last = int(places[0]) + 1, int(places[-1]) + 2
        out[0].append(ids[:first])
        out[1].append(ids[first:last])
        answers = np.ones(last - first, bool)
        if counts is not None:
            answers = counts[row, first - 1 : last - 1] > 0
        out[2].append(answers if answers.any() else np.ones(last - first, bool))
    raw = [
        (p.astype(np.int64).tobytes(), t.astype(np.int64).tobytes())
        for p, t in zip(*out[:2], strict=True)
    ]
    asked = {**task.difficulty, **settings}
    # a target that ends leaves a response room to miss its end
    room = 1.25 if asked.get("whole") else 1.0
    how: dict[str, Any] = {"limits": [math.ceil(room * len(t)) for t in out[1]]}
    if task.open_ended:
        how = {
            "limits": [int(asked["limit"])] * n,
            "open_ended": True,
            "paragraphs": int(asked["paragraphs"]),
            "temperature": float(asked["temperature"]),
        }
    return Prompts(
        task.name,
        *out,
        [short_hash(p, t) for p, t in raw],
        [short_hash(p) for p, _ in raw],
        **how,
    )


def digest_of(hashes: Sequence[str]) -> str:
    """One hash of a list of hashes, order included."""
    return short_hash("\n".join(hashes))
