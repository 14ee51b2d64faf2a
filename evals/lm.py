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

import logging
import sys
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

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
    them the state stays fp32. prefill and path as in ``backends.hf.score``. Raises ValueError.
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
        """Greedy or sampled continuation; the prompt is transformers' own prefill."""
        generation_kwargs.setdefault("disable_compile", True)
        call = (context, max_length, stop)
        if self.state_config is None:
            out = super()._model_generate(*call, **generation_kwargs)
        else:
            mask = generation_kwargs.get("attention_mask")
            rows = context.tolist()
            if mask is not None:
                rows = [
                    [t for t, keep in zip(row, kept, strict=True) if keep]
                    for row, kept in zip(rows, mask.tolist(), strict=True)
                ]
            requests = [_request(row) for row in rows]
            with hf.split_state(self.model, self.state_config, requests=requests) as state:
                out = super()._model_generate(*call, **generation_kwargs)
                stats = state.stats
            add_counts(self.counts, stats)
        pad = self.tokenizer.pad_token_id
        new = out[:, context.shape[1] :]
        self.generated += int((new != pad).sum()) if pad is not None else new.numel()
        return out

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or self.quiet)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self.quiet)


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
