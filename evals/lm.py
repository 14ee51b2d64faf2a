"""lm-evaluation-harness model ``replayssm-hf``: transformers with a split recurrent state.

    python -m replayssm_quant.evals.lm run --model replayssm-hf \\
        --model_args pretrained=tiny-nemotron-h,update_dtype=fp8,output_dtype=nvfp4 --tasks ...

lm-eval finds models in its own registry only and loads no plugins, so the command above is
``lm-eval`` with this model registered first; in Python, call ``register()`` before
``simple_evaluate(model="replayssm-hf", ...)``. The stock ``hf`` model scores log-likelihoods in one
forward, which never reads a decode state; here every token after the first ``prefill`` is a
recurrent update on the stored state. Needs the ``eval`` extra.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .. import models
from ..backends import hf
from ..config import StateConfig
from ..state.geometry import read_geometry
from .measure import add_counts
from .probes import short_hash

NAME = "replayssm-hf"
TARGET = f"{__package__}.lm:ReplayLM"

Config = StateConfig | dict[int, StateConfig]


def register() -> None:
    """Make ``replayssm-hf`` known to lm-eval in this process; twice is once."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


class ReplayLM(HFLM):
    """lm-eval's transformers model with its recurrent state split.

    pretrained: a shipped model, a folder, a hub id, or a loaded model (then give ``tokenizer``).
    update_dtype, output_dtype, block_size, buffer_len, rounding, rotate, seed: as
    ``StateConfig.from_flags``; or recipe: a recipe's name; or config: a ready one. Without any of
    them the state stays fp32. prefill and path as in ``backends.hf.score``; sampling_seed: of
    sampled answers. ``lengths`` holds, for each prompt, tokens and end of its responses. Raises
    ValueError.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        update_dtype: str | None = None,
        output_dtype: str | None = None,
        block_size: int | None = None,
        buffer_len: int = 16,
        rounding: str = "sr",
        rotate: bool = False,
        seed: int = 0,
        recipe: str | None = None,
        config: Config | None = None,
        prefill: int = 1,
        path: str = "scan",
        sampling_seed: int = 0,
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(pretrained, str):
            wanted = device or ("cuda" if torch.cuda.is_available() else "cpu")
            name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
            loaded = models.load(models.resolve(pretrained), wanted, name, trust_remote_code)
            pretrained = loaded.model
            kwargs.setdefault("tokenizer", loaded.tokenizer)
        if config is None and recipe is not None:
            from .. import recipe as recipes

            resolved = recipes.resolve(recipe, pretrained.config)
            config = resolved.configs(read_geometry(pretrained.config), seed)
        elif config is None and update_dtype is not None:
            config = StateConfig.from_flags(
                update_dtype,
                output_dtype,
                block_size=block_size,
                buffer_len=buffer_len,
                rounding=rounding,
                rotate=rotate,
                seed=seed,
            )
        hf.recurrent_layers(pretrained)  # a model without a recurrent state is refused here
        if prefill < 1:
            raise ValueError(f"prefill {prefill} is too small; use 1 or more")
        # lm-eval warns at length about arguments that a loaded model ignores; all are handled here
        logger = logging.getLogger("lm_eval.models.huggingface")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            super().__init__(pretrained=pretrained, **kwargs)
        finally:
            logger.setLevel(level)
        self.state_config, self.prefill, self.path = config, prefill, path
        self.counts: dict[int, dict[str, int]] = {}
        self.scored = self.decoded = self.generated = 0
        self.sampling_seed = sampling_seed
        self.lengths: dict[str, list[tuple[int, bool]]] = {}
        self._pending: list[tuple[int, bool]] = []
        self.quiet = False

    def get_model_info(self) -> dict[str, Any]:
        """What is saved beside lm-eval's results; asks no hub."""
        config = self.state_config
        if isinstance(config, dict):
            state: Any = {str(i): c.to_dict() for i, c in config.items()}
        else:
            state = None if config is None else config.to_dict()
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "state_config": state,
            "state_prefill": self.prefill,
            "state_counts": {str(k): v for k, v in self.counts.items()},
            "scored_tokens": self.scored,
            "scored_by_decode": self.decoded,
            "tokens_generated": self.generated,
        }

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> Any:
        """Stepwise logits [batch, tokens, vocabulary] of right-padded ids."""
        if attn_mask is not None or labels is not None:
            raise ValueError("encoder-decoder models have no recurrent decode state to evaluate")
        # Rows are padded with zeros on the right, which no real token can see.
        rows = [row[: len(row) - _trailing_zeros(row)] for row in inps.tolist()]
        prefill = min(self.prefill, inps.shape[1])
        stats: dict[int, dict[str, int]] = {}
        logits = hf.score(
            self.model,
            inps,
            self.state_config,
            prefill=prefill,
            path=self.path,
            requests=[_request(row) for row in rows],
            stats=stats,
        )
        add_counts(self.counts, stats)
        self.scored += sum(len(r) for r in rows)
        self.decoded += sum(max(len(r) - prefill, 0) for r in rows)
        return logits

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Greedy or sampled continuation; the prompt is transformers' own prefill.

        A sampled answer depends on its prompt, ``sampling_seed`` and the logits alone: states that
        agree write the same, whatever else is in the batch.
        """
        mask = generation_kwargs.get("attention_mask")
        rows = context.tolist()
        if mask is not None:
            rows = [
                [t for t, keep in zip(row, kept, strict=True) if keep]
                for row, kept in zip(rows, mask.tolist(), strict=True)
            ]
        requests = [_request(row) for row in rows]
        settings = self._sampling(requests, generation_kwargs)
        width = context.shape[1]
        settings |= {
            "max_length": max_length,
            "stopping_criteria": [Stops(self.tokenizer, stop, self.think_end_token, width)],
            "pad_token_id": self.tokenizer.pad_token_id,
            "use_cache": True,
            "disable_compile": True,
        }
        dtype = self.mixed_precision_dtype
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(context.device.type, dtype, dtype is not None))
            state = None
            if self.state_config is not None:
                wrapped = hf.split_state(self.model, self.state_config, requests=requests)
                state = stack.enter_context(wrapped)
            out = self.model.generate(input_ids=context, **settings)
            stats = {} if state is None else state.stats
        add_counts(self.counts, stats)
        for row in out[:, width:].tolist():
            length, ended = self._length(row, stop)
            self._pending.append((length, ended))
            self.generated += length
        return out

    def _sampling(self, requests: list[str], asked: dict[str, Any]) -> dict[str, Any]:
        """Arguments of ``generate`` that draw with the requests' own random numbers."""
        settings = {k: v for k, v in asked.items() if k not in ("temperature", "top_p", "top_k")}
        sampled = asked.get("do_sample", asked.get("temperature", 0.0) > 0)
        settings |= {"do_sample": False}
        if not sampled:
            return settings
        card = self.model.generation_config
        warpers: list[Any] = []
        temperature, top_k, top_p = (
            asked.get(name, getattr(card, name, None)) for name in ("temperature", "top_k", "top_p")
        )
        if temperature is not None and temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            warpers.append(TopKLogitsWarper(int(top_k)))
        if top_p is not None and top_p < 1.0:
            warpers.append(TopPLogitsWarper(float(top_p)))
        device = self.model.device
        seeds = [int(short_hash(r, str(self.sampling_seed)), 16) >> 1 for r in requests]
        generators = [torch.Generator(device).manual_seed(s) for s in seeds]

        def draw(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.float()
            for warp in warpers:
                scores = warp(seen, scores)
            rows = (torch.empty_like(scores[0]).exponential_(generator=g) for g in generators)
            return scores - torch.stack(list(rows)).log()  # the largest is a draw (Gumbel)

        return settings | {"logits_processor": [draw]}

    def _length(self, row: list[int], stop: list[str]) -> tuple[int, bool]:
        """Tokens of a response (what ends it as text included, an end token not), and whether it
        ended before the limit."""
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        ends |= {self.tokenizer.pad_token_id}
        at = next((i for i, token in enumerate(row) if token in ends), len(row))
        row, ended = row[:at], at < len(row)

        def stopped(n: int) -> bool:
            text = self.tokenizer.decode(row[:n])
            if isinstance(self.think_end_token, str):
                if self.think_end_token not in text:
                    return False
                text = text.split(self.think_end_token)[-1]
            return any(s and s in text for s in stop)

        if not stopped(len(row)):
            return len(row), ended
        low, high = 1, len(row)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if stopped(middle) else (middle + 1, high)
        return low, True

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or self.quiet)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        hook, self._pending = self.cache_hook, []
        self.cache_hook = _Lengths(self, hook)
        try:
            return super().generate_until(requests, disable_tqdm=disable_tqdm or self.quiet)
        finally:
            self.cache_hook = hook


class _Lengths:
    """Stands before lm-eval's cache: which prompt each response belongs to, in lm-eval's order."""

    def __init__(self, lm: ReplayLM, hook: Any):
        self.lm, self.hook = lm, hook

    def add_partial(self, kind: str, request: tuple[str, Any], answer: str) -> None:
        self.lm.lengths.setdefault(request[0], []).append(self.lm._pending.pop(0))
        self.hook.add_partial(kind, request, answer)


class Stops:
    """Ends each row of a batch at its own stop string, which counts only behind ``think_end`` where
    that is given (a reasoning may hold what ends an answer). width: tokens of the prompt."""

    def __init__(self, tokenizer: Any, stop: list[str], think_end: Any, width: int):
        self.tokenizer, self.width = tokenizer, width
        self.stop = [s for s in stop if s]
        self.think_end = think_end if isinstance(think_end, str) else None
        texts = [*self.stop, *([self.think_end] if self.think_end else [])]
        sizes = [len(tokenizer.encode(s, add_special_tokens=False)) for s in texts]
        self.look_back = 2 + max(sizes, default=0)
        self.done: list[bool] = []
        self.thinking: list[bool] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.done:
            self.done = [False] * len(ids)
            self.thinking = [self.think_end is not None] * len(ids)
        tail = ids[:, max(self.width, ids.shape[1] - self.look_back) :].tolist()
        for i, row in enumerate(tail):
            if self.done[i]:
                continue
            text = self.tokenizer.decode(row)
            if self.thinking[i]:
                if self.think_end not in text:
                    continue
                self.thinking[i] = False
                text = text.split(self.think_end)[-1]
            self.done[i] = any(s in text for s in self.stop)
        return torch.tensor(self.done, device=ids.device)


def _trailing_zeros(row: list[int]) -> int:
    n = 0
    for token in reversed(row):
        if token:
            break
        n += 1
    return min(n, len(row) - 1)


def _request(row: list[int]) -> str:
    """An id that depends on the request's tokens alone, not on its place in a batch."""
    return short_hash(" ".join(map(str, row)))


def main() -> None:
    """``lm-eval`` with ``replayssm-hf`` registered."""
    from .._paths import drop_checkout

    drop_checkout()
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
