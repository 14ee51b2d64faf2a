"""Measuring one unit: one arm, one rounding seed, one task's documents, on a loaded model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .arms import Arm
from .compare import tail
from .probes import Prompts, Streams, digest_of
from .schema import Exercise, UnitRecord
from .signals import Reference, TokenSignals, join, signals
from .store import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models import LoadedModel

Tick = Callable[[int], None]


class MeasureError(ValueError):
    """A measurement that would mean nothing; one line with the cause and the remedy."""


@dataclass(frozen=True)
class Options:
    """How documents are run. path: ``scan`` (windows at once) or ``decode`` (token by token) for
    teacher-forced streams; prefill: tokens that transformers' own prefill takes first."""

    batch_size: int = 8
    prefill: int = 1
    path: str = "scan"


def _batches(n: int, size: int) -> Iterable[slice]:
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def add_counts(total: dict[int, dict[str, int]], stats: dict[int, dict[str, int]]) -> None:
    """Add one batch's counts of each layer to ``total``."""
    for layer, values in stats.items():
        mine = total.setdefault(layer, dict.fromkeys(values, 0))
        for name, value in values.items():
            mine[name] += value


def exercise(
    stats: dict[int, dict[str, int]],
    documents: int,
    scored: int,
    decoded: int,
    path: str,
) -> Exercise:
    """Totals over the layers; ``scored`` answers, of which ``decoded`` came from decode steps."""
    total = {k: sum(s[k] for s in stats.values()) for k in ("steps", "flushes", "quantised_reads")}
    layers = max(len(stats), 1)
    return Exercise(
        **total,
        writes_per_document=total["flushes"] / (layers * max(documents, 1)),
        scored_tokens=scored,
        decode_share=decoded / scored if scored else 0.0,
        path=path,
    )


def check_exercised(arm: Arm, used: Exercise, where: str) -> None:
    """Raise MeasureError if an arm that rounds its state never had a rounded state read."""
    if arm.quantises and used.quantised_reads == 0:
        raise MeasureError(
            f"{where}: no quantised state was ever read ({used.steps} decode steps), so this "
            "run says nothing about the format; use longer documents, a smaller --prefill, or a "
            "task that decodes"
        )


@contextlib.contextmanager
def repeated_heads() -> Iterator[None]:
    """Attention with grouped heads as one with equal heads, for the length of the block.

    torch's fused fp32 kernel takes no grouped heads, and its fallback keeps T x T scores: 32,768
    tokens would need hundreds of gigabytes.
    """
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, *args: Any, enable_gqa: bool = False, **kwargs: Any) -> Any:
        if enable_gqa and q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            enable_gqa = False
        return original(q, k, v, *args, enable_gqa=enable_gqa, **kwargs)

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def measure_streams(
    loaded: LoadedModel,
    docs: Streams,
    arm: Arm,
    seed: int,
    options: Options,
    reference: Reference,
    key: str,
    tick: Tick = lambda n: None,
) -> Unit:
    """Teacher-forced, one recurrent update a token. The reference arm fills ``reference``, every
    other arm is compared with it as it runs.

    Raises MeasureError for non-finite fp32 logits and for an arm whose state was never read.
    """
    from ..backends import hf

    began = time.perf_counter()
    is_reference = arm.role == "reference"
    config = arm.seeded(seed)
    counts: dict[int, dict[str, int]] = {}
    parts: list[TokenSignals] = []
    for rows in _batches(len(docs), arm.batch_size or options.batch_size):
        ids = torch.from_numpy(docs.ids[rows]).to(loaded.model.device)
        stats: dict[int, dict[str, int]] = {}
        with repeated_heads():
            logits = hf.score(
                loaded.model,
                ids,
                config,
                prefill=options.prefill,
                path=options.path,
                requests=docs.doc_hashes[rows],
                stats=stats,
            )
        add_counts(counts, stats)
        part = signals(logits, ids, rows.start, None if is_reference else reference)
        if is_reference:
            if not part.finite.all():
                row, at = np.argwhere(~part.finite)[0]
                raise MeasureError(
                    f"model {loaded.resolved.name}, task {docs.task}: fp32 logits are not finite "
                    f"(document {rows.start + row}, position {at}); check the weights and the "
                    "model dtype (--dtype fp32)"
                )
            for row in logits[:, :-1]:
                reference.add(row)
        parts.append(part)
        tick(len(ids))
    found = join(parts)
    scored = docs.mask[:, :-1].copy()
    wanted = int(scored.sum())
    scored[:, : options.prefill] = False
    answers = scored.sum(1)
    if not answers.all():
        raise MeasureError(
            f"task {docs.task}: document {int(np.argmin(answers))} has no scored answer after "
            f"the first {options.prefill} tokens; use a smaller --prefill"
        )
    decoder = loaded.tokenizer.decode
    samples: list[dict[str, Any]] = []
    for b, mask in enumerate(scored):
        right = found.right[b][mask]
        sample = {
            "doc_id": b,
            "doc_hash": docs.doc_hashes[b],
            "prompt_hash": docs.prompt_hashes[b],
            "answers": int(mask.sum()),
            "right": int(right.sum()),
            "flags": "".join("1" if r else "0" for r in right),
            "loss": float(found.loss[b][mask].mean()),
        }
        if not docs.likelihood:
            sample["output"] = decoder(found.predicted[b][mask].tolist())
            sample["target"] = decoder(docs.ids[b][1:][mask].tolist())
        if found.kld is not None:
            sample["kld"] = float(found.kld[b][mask].mean(dtype=np.float64))
        samples.append(sample)
    used = exercise(counts, len(docs), wanted, int(answers.sum()), options.path)
    check_exercised(arm, used, f"{loaded.resolved.name}, {docs.task}, {arm.label}")
    tokens = {
        "scored": scored,
        "loss": found.loss.astype(np.float32),
        "right": found.right,
    }
    divergence: dict[str, Any] = {}
    if found.kld is not None and found.agree is not None:
        tokens |= {"kld": found.kld.astype(np.float32), "agree": found.agree}
        decoded = found.kld[:, options.prefill :]
        divergence = {
            "kld": tail(found.kld[scored]),
            "kld_all": tail(decoded),
            "kld_support": reference.support,
            "top1": float(found.agree[scored].mean()),
        }
    record = UnitRecord(
        key=key,
        model=loaded.resolved.name,
        task=docs.task,
        arm=arm.name,
        seed=seed,
        documents=len(docs),
        answers=int(answers.sum()),
        prompts=digest_of(docs.prompt_hashes),
        accuracy=None if docs.likelihood else float(found.right[scored].mean()),
        loss=float(found.loss[scored].mean()),
        nonfinite_tokens=int((~found.finite).sum()),
        exercise=used,
        seconds=time.perf_counter() - began,
        **divergence,
    )
    return Unit(record, samples, tokens)


def _left_pad(rows: list[np.ndarray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(r) for r in rows)
    ids = np.full((len(rows), width), pad, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


NEWLINE = 10
"""Token of a line's end in the byte tokenizer."""


def response_end(ids: Sequence[int], stop: set[int], paragraphs: int | None = None) -> int | None:
    """Length of a response, its end not counted, or None if it has none: the first of ``stop``, or
    with ``paragraphs`` so many empty lines (two line ends in a row)."""
    empty = 0
    for i, token in enumerate(ids):
        if token in stop:
            return i
        if paragraphs is not None and i and token == ids[i - 1] == NEWLINE:
            empty += 1
            if empty == paragraphs:
                return i + 1
    return None


@lru_cache(maxsize=1)
def gumbel(doc_hashes: tuple[str, ...], steps: int, vocabulary: int) -> np.ndarray:
    """Standard Gumbel noise float32 [n, steps, vocabulary], each document's its own: the largest of
    logits / T + noise is a draw at temperature T, and the same one wherever the logits agree."""
    rows = (np.random.default_rng(int(h, 16)) for h in doc_hashes)
    return np.stack([r.gumbel(size=(steps, vocabulary)).astype(np.float32) for r in rows])


def _generate(
    loaded: LoadedModel, ids: torch.Tensor, mask: torch.Tensor, docs: Prompts, pad: int
) -> torch.Tensor:
    device, width = loaded.model.device, ids.shape[1]
    new, extra = max(docs.limits), {}
    if docs.temperature > 0:
        size = loaded.model.config.get_text_config(decoder=True).vocab_size
        noise = torch.from_numpy(gumbel(tuple(docs.doc_hashes), new, size)).to(device)

        def draw(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores / docs.temperature + noise[:, seen.shape[1] - width]

        extra["logits_processor"] = [draw]
    if docs.open_ended:

        def ended(seen: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            line = seen[:, width:] == NEWLINE
            return (line[:, 1:] & line[:, :-1]).sum(1) >= docs.paragraphs

        extra |= {"stopping_criteria": [ended], "eos_token_id": loaded.tokenizer.eos_token_id}
    with torch.no_grad():
        out = loaded.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            disable_compile=True,
            **extra,
        )
    return out[:, width:].cpu()


def measure_prompts(
    loaded: LoadedModel,
    docs: Prompts,
    arm: Arm,
    seed: int,
    options: Options,
    key: str,
    tick: Tick = lambda n: None,
) -> Unit:
    """Free-running decode of each prompt; an answer is right if it stands where the target has it.

    Raises MeasureError for an arm whose state was never read.
    """
    from ..backends import hf

    began = time.perf_counter()
    tokenizer = loaded.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = loaded.model.generation_config.eos_token_id
    if docs.open_ended:  # what ends a made-up task's answer may occur in text
        ends = None
    stop = {tokenizer.eos_token_id, pad, *(ends if isinstance(ends, list) else [ends])} - {None}
    config = arm.seeded(seed)
    counts: dict[int, dict[str, int]] = {}
    outputs: list[np.ndarray] = []
    for rows in _batches(len(docs), arm.batch_size or options.batch_size):
        ids, mask = _left_pad(docs.prompts[rows], pad or 0)
        part = docs.at(rows)
        if config is None:
            found = _generate(loaded, ids, mask, part, pad or 0)
        else:
            with hf.split_state(loaded.model, config, requests=docs.doc_hashes[rows]) as state:
                found = _generate(loaded, ids, mask, part, pad or 0)
                stats = state.stats
            add_counts(counts, stats)
        outputs += [row.numpy() for row in found]
        tick(len(ids))
    return prompt_unit(
        loaded.resolved.name, docs, arm, seed, key, outputs, stop, tokenizer, counts, began
    )


def prompt_unit(
    model: str,
    docs: Prompts,
    arm: Arm,
    seed: int,
    key: str,
    outputs: list[np.ndarray],
    stop: set[int],
    tokenizer: PreTrainedTokenizerBase,
    counts: dict[int, dict[str, int]],
    began: float,
) -> Unit:
    """The unit of generated answers (token ids, cut here at their end, of which ``stop`` is one).

    counts: of each layer. began: when the measurement did, by ``time.perf_counter``. Raises
    MeasureError for an arm whose state was never read.
    """
    samples: list[dict[str, Any]] = []
    generated = 0
    for b, (output, target) in enumerate(zip(outputs, docs.targets, strict=True)):
        output = output[: docs.limits[b]]
        end = response_end(output.tolist(), stop, docs.paragraphs if docs.open_ended else None)
        output = output[:end]
        generated += len(output)
        padded = np.full(len(target), -1)
        padded[: min(len(output), len(target))] = output[: len(target)]
        right = (padded == target)[docs.counted[b]]
        if docs.open_ended:
            right = np.array([end is not None])
        samples.append(
            {
                "doc_id": b,
                "doc_hash": docs.doc_hashes[b],
                "prompt_hash": docs.prompt_hashes[b],
                "answers": int(right.size),
                "right": int(right.sum()),
                "flags": "".join("1" if r else "0" for r in right),
                **({} if docs.open_ended else {"exact": int(np.array_equal(output, target))}),
                "generated": len(output),
                "finished": int(end is not None),
                "output": tokenizer.decode(output.tolist()),
                "target": "" if docs.open_ended else tokenizer.decode(target.tolist()),
            }
        )
    answers = sum(s["answers"] for s in samples)
    used = exercise(counts, len(docs), answers, answers, "decode")
    check_exercised(arm, used, f"{model}, {docs.task}, {arm.label}")
    record = UnitRecord(
        key=key,
        model=model,
        task=docs.task,
        arm=arm.name,
        seed=seed,
        documents=len(docs),
        answers=answers,
        prompts=digest_of(docs.prompt_hashes),
        accuracy=sum(s["right"] for s in samples) / answers,
        exact=None if docs.open_ended else sum(s["exact"] for s in samples) / len(docs),
        tokens_generated=generated,
        exercise=used,
        seconds=time.perf_counter() - began,
    )
    return Unit(record, samples)
