"""lm-eval's view of a vLLM engine: tasks that generate, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from ..config import StateConfig
from .lm_tasks import MAX_TOKENS
from .probes import short_hash
from .vllm import counts, request_seed

if TYPE_CHECKING:
    from ..backends.vllm.generate import Session


class VllmLM(LM):
    """Greedy or sampled answers of one engine.

    seed: rounding seed, which enters the sampling seed of every request. configs: the state of each
    layer, for the counts. think_end: the text that ends a model's reasoning, which is cut away.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        seed: int,
        configs: Mapping[int, StateConfig],
        think_end: str | None = None,
    ):
        super().__init__()
        self.think_end = think_end
        self.session, self.tokenizer, self.seed, self.configs = session, tokenizer, seed, configs
        self.counts: dict[int, dict[str, int]] = {}
        self.scored = self.decoded = self.generated = 0
        self.lengths: dict[str, list[tuple[int, bool]]] = {}

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError("vLLM answers tasks that generate; use --backend hf")

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError("vLLM answers tasks that generate; use --backend hf")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of the requests, cut at their stop strings."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        answers = [""] * len(requests)
        lengths: list[int] = []
        for settings, members in groups.items():
            wanted = json.loads(settings)
            stop = wanted.get("until") or []
            stop = [stop] if isinstance(stop, str) else stop
            sampled = wanted.get("do_sample", True) and wanted.get("temperature", 0.0) > 0
            texts = [requests[i].args[0] for i in members]
            found = self.session.answer(
                [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts],
                max_tokens=int(wanted.get("max_gen_toks", MAX_TOKENS)),
                stop=() if self.think_end else stop,
                temperature=wanted["temperature"] if sampled else 0.0,
                sampling={k: wanted[k] for k in ("top_p", "top_k") if sampled and k in wanted},
                seeds=[request_seed(short_hash(t), self.seed) for t in texts],
            )
            for i, completion in zip(members, found.completions, strict=True):
                tokens = len(completion.token_ids)
                lengths.append(tokens)
                limit = int(wanted.get("max_gen_toks", MAX_TOKENS))
                self.lengths.setdefault(requests[i].args[0], []).append((tokens, tokens < limit))
                answers[i] = self._cut(completion.token_ids, stop)
        self.generated += sum(lengths)
        self.counts = counts(self.configs, lengths)
        return answers

    def _cut(self, ids: list[int], stop: list[str]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        if self.think_end and self.think_end in text:
            text = text.split(self.think_end)[-1].lstrip()
        for term in stop:
            if term:
                text = text.split(term)[0]
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the model's own template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
