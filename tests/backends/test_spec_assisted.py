"""transformers' assisted generation over a split state: drafts that are rejected leave no trace."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from replayssm_quant.backends import hf
from replayssm_quant.config import StateConfig
from replayssm_quant.models import shipped

FP32 = StateConfig.from_flags("fp32", buffer_len=4)
# the recurrence in another order, as in test_hf_decode.py
SAME = 1e-5


def generate(model, ids, tokens=24, **kwargs):
    """(new tokens, their logits, forwards) of greedy generation."""
    forwards = []
    hook = model.register_forward_pre_hook(lambda *a: forwards.append(1))
    try:
        out = model.generate(
            input_ids=ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True, **kwargs,
        )  # fmt: skip
    finally:
        hook.remove()
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits), len(forwards)


@pytest.fixture
def assistable(model, family):
    """The models that transformers gives a cache when it assists; it forgets to for Mamba2."""
    if family == "mamba2":
        pytest.skip("transformers makes no cache for Mamba2 in assisted generation")
    return model


class Guesses:
    """Drafts that are right until a chosen token: ``right[i]`` many of the i-th ``count[i]``."""

    requires_model_outputs = False

    def __init__(self, truth, counts, rights):
        self.truth, self.counts, self.rights, self.at = truth, counts, rights, 0

    def get_candidates(self, input_ids, *args, **kwargs):
        count = self.counts[self.at % len(self.counts)]
        right = self.rights[self.at % len(self.rights)]
        self.at += 1
        done = input_ids.shape[1]
        draft = self.truth[:, done : done + count].clone()
        draft[:, right:] = (draft[:, right:] + 1) % 90 + 3  # never what the model says
        return torch.cat((input_ids, draft), 1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        pass


def guessing(model, monkeypatch, truth, counts, rights):
    made = Guesses(truth, counts, rights)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kw: made, raising=False)
    return made


def test_fp32_equals_plain_generation_token_for_token(assistable, make_ids, monkeypatch):
    """Every number of right drafts from none to all, windows across flushes (L = 4)."""
    model, ids = assistable, make_ids(1, 9, seed=3)
    with hf.split_state(model, FP32):
        tokens, logits, _ = generate(model, ids)
    truth = torch.cat((ids, tokens[None], ids), 1)
    counts, rights = (4, 1, 3, 4, 0, 2, 4), (4, 0, 1, 2, 0, 2, 3)
    guessing(model, monkeypatch, truth, counts, rights)
    with hf.split_state(model, FP32, drafts=4) as state:
        got, other, forwards = generate(model, ids, prompt_lookup_num_tokens=4)
        stats = state.stats
    assert torch.equal(got, tokens)
    assert float((other - logits).abs().max() / logits.abs().max()) < SAME
    assert forwards < 16  # plain generation takes 24
    assert all(s["flushes"] >= 2 and s["steps"] > 24 for s in stats.values())


@pytest.mark.parametrize("formats", [("P8+4", None), ("fp16", "nvfp4"), ("e4m3", "same")])
def test_split_formats_stay_within_their_noise(assistable, make_ids, formats, monkeypatch):
    """Logits of the same tokens move by no more than a second seed of the rounding moves them.

    Flushes fall on other tokens with drafts, so roundings are drawn at other times. Three times the
    larger distance of two seeds from fp32 is the bound.
    """
    model, ids = assistable, make_ids(1, 9, seed=4)
    config = StateConfig.from_flags(*formats, buffer_len=4, rotate=formats[0] == "P8+4")
    runs = []
    for seed in (0, 1):
        with hf.split_state(model, config, seed=seed):
            runs.append(generate(model, ids, 16))
    with hf.split_state(model, FP32):
        exact = generate(model, ids, 16)
    truth = torch.cat((ids, runs[0][0][None], ids), 1)
    guessing(model, monkeypatch, truth, (3, 2, 3), (3, 0, 1))
    with hf.split_state(model, config, drafts=3):
        ours = generate(model, ids, 16, prompt_lookup_num_tokens=3)
    assert ours[2] < 16  # some drafts are right, as long as the runs agree
    all_runs = torch.stack([tokens for tokens, _, _ in (*runs, exact, ours)])
    same = (all_runs == all_runs[0]).all(0).int().cumprod(0)
    first = 1 + int(same[:-1].sum())  # logits of the same tokens in every run, at least one

    def noise(run):
        return float((run[1] - exact[1])[:first].square().mean().sqrt())

    # plain decode reads one output in four exactly, at the flush; with drafts none is
    assert noise(ours) <= 3 * max(noise(run) for run in runs) + SAME


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_an_assistant_model_drafts(build, make_ids, family):
    """Drafts of another model, most of them wrong, and sampled ones: greedy tokens are the same."""
    model, ids = build(family), make_ids(1, 9, seed=8)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    assistant = LlamaForCausalLM(config).eval()
    with hf.split_state(model, FP32):
        tokens, _, _ = generate(model, ids)
    with hf.split_state(model, FP32, drafts=4):
        got, _, _ = generate(model, ids, assistant_model=assistant)
        sampled = model.generate(
            ids, max_new_tokens=12, min_new_tokens=12, do_sample=True, assistant_model=assistant
        )
    assert torch.equal(got, tokens)
    assert sampled.shape == (1, 21)


def test_prompt_lookup_on_a_repetitive_prompt(build, make_ids):
    """transformers' own n-gram drafts, cut to what the state can take back."""
    model = build("qwen3_5_text")
    ids = make_ids(1, 6, seed=5).repeat(1, 4)
    with hf.split_state(model, FP32):
        tokens, _, plain = generate(model, ids)
    for drafts, wanted in ((7, 7), (2, 7)):
        seen = []
        with hf.split_state(model, FP32, drafts=drafts):
            hook = model.register_forward_pre_hook(
                lambda m, a, k, seen=seen: seen.append(k["input_ids"].shape[1]), with_kwargs=True
            )
            got, _, forwards = generate(model, ids, prompt_lookup_num_tokens=wanted)
            hook.remove()
        assert torch.equal(got, tokens) and forwards <= plain
        assert seen[0] == ids.shape[1] and max(seen[1:]) <= 1 + drafts


@pytest.mark.parametrize("name", sorted(shipped()))
@pytest.mark.parametrize("formats", [("fp32", None), ("P8+4", None), ("fp16", "same")])
def test_shipped_models_say_the_same_with_drafts(name, formats):
    """Trained models, n-gram drafts, a repetitive prompt: token for token, in fewer forwards."""
    model = AutoModelForCausalLM.from_pretrained(shipped()[name]).eval()
    text = "for i in range(10):\n    print(i)\n" * 3
    ids = torch.tensor([AutoTokenizer.from_pretrained(shipped()[name])(text)["input_ids"]])
    config = StateConfig.from_flags(*formats, rotate=formats[0] == "P8+4")
    with hf.split_state(model, config):
        tokens, _, plain = generate(model, ids, 40)
    with hf.split_state(model, config, drafts=5):
        got, _, forwards = generate(model, ids, 40, prompt_lookup_num_tokens=5)
    assert torch.equal(got, tokens)
    assert plain == 40 and forwards < 30


def test_a_few_tokens_at_once_are_kept_unless_cropped(model, make_ids):
    """Without ``crop`` a short continuation stays, as a long one does: the same logits."""
    ids = make_ids(1, 16, seed=6)
    name = next(
        n
        for n in ("cache", "past_key_values", "cache_params")
        if n in inspect.signature(model.forward).parameters
    )
    found = []
    for drafts in (0, 3):
        with hf.split_state(model, FP32, drafts=drafts):
            cache, out, start = DynamicCache(config=model.config), [], 0
            for end in (5, 8, 9, 13, 15, 16):
                kwargs = {name: cache}
                if hf.takes_position_ids(model):
                    kwargs["position_ids"] = torch.arange(start, end)[None]
                with torch.no_grad():
                    out.append(model(input_ids=ids[:, start:end], **kwargs).logits)
                start = end
        found.append(torch.cat(out, 1))
    assert float((found[1] - found[0]).abs().max() / found[0].abs().max()) < SAME


def test_what_cannot_work_is_refused(build, make_ids):
    model, ids = build("qwen3_5_text"), make_ids(1, 8)
    for drafts, message in ((8, "drafts 8"), (-1, "drafts -1")):
        with pytest.raises(ValueError, match=message), hf.split_state(model, FP32, drafts=drafts):
            pass
    with (
        pytest.raises(ValueError, match=r"layers \[2\] keep transformers' own state"),
        hf.split_state(model, {0: FP32}, drafts=2),
    ):
        pass
    before = dict(vars(model))
    with hf.split_state(model, FP32, drafts=2):
        assert model._is_stateful is False
    assert vars(model).keys() == before.keys() and model._is_stateful is True
    with pytest.raises(ValueError, match="stateful"), hf.split_state(model, FP32):
        generate(model, ids, prompt_lookup_num_tokens=2)


def test_tokens_that_are_not_pending_cannot_be_taken_back(build, make_ids):
    model, ids = build("nemotron_h"), make_ids(1, 12)
    with hf.split_state(model, FP32, drafts=3):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        with torch.no_grad():
            model(input_ids=ids[:, :8], past_key_values=cache)
            with pytest.raises(ValueError, match="2 tokens cannot be taken back"):
                cache.crop(-2)
            model(input_ids=ids[:, 8:11], past_key_values=cache)
        cache.crop(-2)
        layer = cache.layers[0]
        assert int(layer.recurrent_states[0].pool.position) == 9
        with pytest.raises(ValueError, match="1 tokens cannot be taken back"):
            cache.crop(-1)
