"""Decoding through a split state inside transformers."""

import copy
import inspect
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

from replayssm_quant.backends import hf
from replayssm_quant.backends.hf_state import StateHandle
from replayssm_quant.config import StateConfig
from replayssm_quant.formats.philox import request_key

FP32 = StateConfig.from_flags("fp32", buffer_len=16)
FP8 = StateConfig.from_flags("fp8", buffer_len=8)
# Both sides sum the same fp32 products in another order; ten layers' worth of eps * sqrt(width) is
# 1e-5 of the largest logit, the bound that the project promises.
SAME = 1e-5


def cache_kwarg(model, cache):
    names = inspect.signature(model.forward).parameters
    return {next(n for n in ("cache", "past_key_values", "cache_params") if n in names): cache}


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def generate(model, ids, mask, tokens, **kwargs):
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return out.sequences, torch.stack(out.logits, 1) if out.logits else None


def left_padded(make_ids, lengths, width):
    ids = make_ids(len(lengths), width)
    mask = torch.ones_like(ids)
    for i, n in enumerate(lengths):
        mask[i, : width - n] = 0
    return ids.masked_fill(mask == 0, 0), mask


def handles(cache):
    states = [getattr(layer, "recurrent_states", {}).get(0) for layer in cache.layers]
    return [s for s in states if isinstance(s, StateHandle)]


def test_fp32_equals_transformers_for_100_greedy_tokens_with_left_padding(model, make_ids):
    ids, mask = left_padded(make_ids, [9, 4, 7], 9)
    expected, logits = generate(model, ids, mask, 100, do_sample=False)
    with hf.split_state(model, FP32) as state:
        got, split = generate(model, ids, mask, 100, do_sample=False)
        stats = state.stats
    assert torch.equal(got, expected)
    assert relative(split, logits) < SAME
    layers = hf.recurrent_layers(model)
    # the last new token is never fed: 99 decode steps, a flush at each 16th
    assert stats == {i: dict(steps=297, flushes=18, quantised_reads=0) for i in layers}


def test_quantised_state_is_read_and_changes_logits(model, make_ids):
    ids = make_ids(2, 30)
    reference = hf.score(model, ids, None, path="decode", prefill=6)
    stats = {}
    split = hf.score(model, ids, FP8, path="decode", prefill=6, stats=stats)
    assert torch.equal(split[:, :6], reference[:, :6])  # the prefill is transformers' own
    assert 1e-4 < relative(split, reference) < 0.6
    layers = hf.recurrent_layers(model)
    assert stats == {i: dict(steps=48, flushes=6, quantised_reads=48) for i in layers}


def test_beam_search_equals_transformers(model, make_ids):
    ids, mask = left_padded(make_ids, [6, 3], 6)
    expected, _ = generate(model, ids, mask, 24, num_beams=3, do_sample=False)
    config = StateConfig.from_flags("fp32", buffer_len=5)
    with hf.split_state(model, config, requests=["one", "two"]):  # each becomes three rows
        got, _ = generate(model, ids, mask, 24, num_beams=3, do_sample=False)
    assert torch.equal(got, expected)


def test_reorder_moves_every_part_of_a_request(model, make_ids):
    ids = make_ids(3, 12)
    order = torch.tensor([2, 0, 0])
    with hf.split_state(model, FP8, requests=["a", "b", "c"]), torch.no_grad():
        cache = DynamicCache(config=model.config)
        for t in range(10):
            model(input_ids=ids[:, t : t + 1], use_cache=True, **cache_kwarg(model, cache))
        before = copy.deepcopy(cache)
        cache.reorder_cache(order)
        for old, new in zip(handles(before), handles(cache), strict=True):
            old, new = old.pool, new.pool
            for name in ("valid", "position", "key", "offset"):
                assert torch.equal(getattr(new, name), getattr(old, name)[order])
            for i in new.pages:
                assert torch.equal(new.pages[i], old.pages[i][order])
            assert new.key[1] == request_key(0, "a") and int(new.valid[0]) == 1


def test_tokens_at_once_fold_the_ring_and_restart_the_window(model, make_ids):
    """Prefill, some single tokens, several tokens at once, single tokens again."""
    ids = make_ids(2, 26)
    cuts = [0, 5, *range(6, 12), 17, *range(18, 27)]

    def run(cache):
        out = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            extra = {}
            if "position_ids" in inspect.signature(model.forward).parameters:
                extra["position_ids"] = torch.arange(a, b).expand(2, -1)
            kwargs = {**cache_kwarg(model, cache), **extra}
            out.append(model(input_ids=ids[:, a:b], use_cache=True, **kwargs).logits)
        return torch.cat(out, 1)

    with torch.no_grad():
        expected = run(DynamicCache(config=model.config))
        with hf.split_state(model, FP32):
            cache = DynamicCache(config=model.config)
            got = run(cache)
            pools = [h.pool for h in handles(cache)]
            assert len(pools) == len(hf.recurrent_layers(model))
            for pool in pools:
                assert pool.position.tolist() == [26, 26] and pool.valid.tolist() == [9, 9]
    assert relative(got, expected) < SAME


NAMES = ("cache", "past_key_values", "cache_params")


def codes(cache):
    return [h.pool.views[h.layer].ckpt.clone() for h in handles(cache)]


def test_left_padding_changes_neither_position_nor_random_bits(model, make_ids):
    """The same request alone and padded on the left draws the same bits: its codes agree, but for
    the few values that another order of the fp32 sums pushes over a rounding boundary."""
    config = StateConfig.from_flags("int8", "same", buffer_len=4)
    ids = make_ids(2, 20)
    padded = torch.cat([torch.zeros(2, 7, dtype=torch.long), ids], 1)
    found, seen = [], []

    def watch(module, args, kwargs):
        seen.extend(v for n, v in kwargs.items() if n in NAMES)

    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        for tokens, mask in ((ids, None), (padded, (padded != 0).long())):
            seen.clear()
            with hf.split_state(model, config, requests=["x", "y"]):
                hf._stepwise(model, tokens, mask, tokens.shape[1] - 8)
                cache = seen[0]
                assert all(h.pool.position.tolist() == [20, 20] for h in handles(cache))
                found.append(codes(cache))
    finally:
        hook.remove()
    assert len(found[0]) == len(hf.recurrent_layers(model))
    for a, b in zip(*found, strict=True):
        assert (a != b).float().mean() < 2e-3


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text"])
def test_detaches_without_a_trace(build, family, make_ids):
    model = build(family)
    file = inspect.getmodule(type(next(iter(hf.find_layers(model).mixers.values()))))
    decoder = hf.find_layers(model).decoder

    def snapshot():
        return dict(vars(file)), len(decoder._forward_pre_hooks), dict(vars(LinearAttentionLayer))

    before, ids = snapshot(), make_ids(2, 9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        with pytest.raises(KeyError), hf.split_state(model, FP32):
            assert snapshot() != before
            hf._stepwise(model, ids, None, 4)
            model(input_ids=ids, use_cache=True, **cache_kwarg(model, cache))
            for t in range(3):
                model(input_ids=ids[:, t : t + 1], use_cache=True, **cache_kwarg(model, cache))
            raise KeyError("from the block")
        assert snapshot() == before
        layers = [x for x in cache.layers if isinstance(x, LinearAttentionLayer)]
        assert layers and all(type(x) is LinearAttentionLayer for x in layers)
        assert all("_split" not in name for x in layers for name in vars(x))
        # the cache goes on as a plain one, from the state that it had reached
        plain = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, **cache_kwarg(model, plain))
        for t in range(4):
            step = dict(input_ids=ids[:, t : t + 1], use_cache=True)
            expected = model(**step, **cache_kwarg(model, plain)).logits
        got = model(**step, **cache_kwarg(model, cache)).logits
    assert relative(got, expected) < SAME


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_takes_over_a_cache_that_was_filled_before(build, family, make_ids):
    model, ids = build(family), make_ids(2, 12)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        plain = DynamicCache(config=model.config)
        first = dict(input_ids=ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
        model(**first, **cache_kwarg(model, plain))
        early = copy.deepcopy(plain)
        step = dict(input_ids=ids[:, 8:9], attention_mask=mask[:, :9], use_cache=True)
        expected = model(**step, **cache_kwarg(model, plain)).logits
        with hf.split_state(model, FP32):
            got = model(**step, **cache_kwarg(model, early)).logits
            assert all(h.pool.position.tolist() == [9, 9] for h in handles(early))
    assert relative(got, expected) < SAME


@pytest.mark.parametrize("family", ["mamba2", "olmo_hybrid"])
def test_reset_and_second_generation_start_anew(build, family, make_ids):
    model, ids = build(family), make_ids(2, 6)
    with hf.split_state(model, FP8), torch.no_grad():
        first, _ = generate(model, ids, torch.ones_like(ids), 20, do_sample=False)
        second, _ = generate(model, ids, torch.ones_like(ids), 20, do_sample=False)
        assert torch.equal(first, second)
        cache = DynamicCache(config=model.config)
        runs = []
        for _ in range(2):
            for t in range(6):
                step = dict(input_ids=ids[:, t : t + 1], use_cache=True)
                model(**step, **cache_kwarg(model, cache))
            runs.append(codes(cache)[0])  # layer 0: not behind attention, whose reset 5.17 botches
            assert all(h.pool.position.tolist() == [6, 6] for h in handles(cache))
            cache.reset()
        assert torch.equal(*runs)


@pytest.mark.parametrize("family", ["bamba", "qwen3_5_text"])
def test_crop_is_refused_as_transformers_refuses_it(build, family, make_ids):
    model, ids = build(family), make_ids(1, 5)
    with torch.no_grad():
        plain = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, **cache_kwarg(model, plain))
        with pytest.raises(RuntimeError) as theirs:
            plain.crop(-1)
        with hf.split_state(model, FP32):
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, use_cache=True, **cache_kwarg(model, cache))
            assert handles(cache)
            with pytest.raises(RuntimeError) as ours:
                cache.crop(-1)
            if hasattr(plain, "is_croppable"):
                assert cache.is_croppable == plain.is_croppable
    assert str(ours.value) == str(theirs.value)


def test_deep_copy_of_a_cache_goes_its_own_way(build, make_ids):
    model, ids = build("qwen3_5_text"), make_ids(2, 8)
    with hf.split_state(model, FP8), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, **cache_kwarg(model, cache))
        other = copy.deepcopy(cache)
        old = codes(cache)
        for t in range(8):
            step = dict(input_ids=ids[:, t : t + 1], use_cache=True)
            model(**step, **cache_kwarg(model, other))
        assert all(torch.equal(a, b) for a, b in zip(old, codes(cache), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(old, codes(other), strict=True))
        assert all(h.pool.position.tolist() == [8, 8] for h in handles(cache))
    assert not handles(cache) and not handles(other)
    assert all(isinstance(x.recurrent_states[0], torch.Tensor) for x in other.layers[::2])


def test_layers_may_differ_and_be_left_out(build, make_ids):
    model, ids = build("zamba2"), make_ids(2, 14)
    first, second, third = sorted(hf.recurrent_layers(model))
    stats = {}
    mixed = {first: FP32, third: StateConfig.from_flags("int8", "same", buffer_len=1)}
    hf.score(model, ids, mixed, path="decode", prefill=2, stats=stats)
    assert stats == {
        first: dict(steps=24, flushes=0, quantised_reads=0),
        third: dict(steps=24, flushes=24, quantised_reads=24),
    }
    reference = hf.score(model, ids, None, path="decode", prefill=2)
    only = hf.score(model, ids, {second: FP32}, path="decode", prefill=2)
    assert relative(only, reference) < SAME


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5_moe_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_ring_in_their_own_dtype(build, family, dtype, make_ids):
    model = copy.deepcopy(build(family)).to(dtype)
    ids = make_ids(2, 24)
    reference = hf.score(model, ids, None, path="decode", prefill=4).float()
    with hf.split_state(model, FP32), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :4], use_cache=True, **cache_kwarg(model, cache))
        expected = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        assert {h.ring_storage for h in handles(cache)} == {expected}
    split = hf.score(model, ids, FP32, path="decode", prefill=4).float()
    # dt (Mamba-2) is bf16 in transformers' fallback and fp32 here: some ulps of the dtype apart
    assert relative(split, reference) < 32 * torch.finfo(dtype).eps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert hf.check_decode(model, ids) < hf.decode_tolerance(model) < 0.1


@pytest.mark.parametrize("config", ["Qwen3_5Config", "Qwen3_5MoeConfig"])
def test_multimodal_wrappers_run_through_their_text_model(config, build, make_ids):
    text = build("qwen3_5_text" if config == "Qwen3_5Config" else "qwen3_5_moe_text").config
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    whole = getattr(transformers, config)(text_config=text.to_dict(), vision_config=vision)
    name = config.replace("Config", "ForConditionalGeneration")
    torch.manual_seed(0)
    model = getattr(transformers, name)(whole).eval()
    ids = make_ids(2, 12)
    reference = hf.score(model, ids, None, path="decode", prefill=3)
    stats = {}
    split = hf.score(model, ids, FP32, path="decode", prefill=3, stats=stats)
    assert relative(split, reference) < SAME
    assert {i: s["steps"] for i, s in stats.items()} == {0: 18, 2: 18}


def test_random_bits_belong_to_the_request(build, make_ids):
    model, ids = build("nemotron_h"), make_ids(2, 20)
    config = StateConfig.from_flags("int8", "same", buffer_len=2, seed=3)
    kwargs = dict(path="decode", prefill=2)
    a = hf.score(model, ids, config, requests=["a", "b"], **kwargs)
    b = hf.score(model, ids.flip(0), config, requests=["b", "a"], **kwargs).flip(0)
    c = hf.score(model, ids, config, requests=["b", "a"], **kwargs)
    d = hf.score(model, ids, config, requests=["a", "b"], seed=4, **kwargs)
    assert relative(a, b) < SAME
    assert relative(c, a) > 1e-3 and relative(d, a) > 1e-3


# --- refusals -------------------------------------------------------------------------------------


def test_second_attach_is_refused_and_leaves_the_first_intact(build, make_ids):
    model, ids = build("nemotron_h"), make_ids(1, 8)
    with hf.split_state(model, FP8) as state:
        with pytest.raises(RuntimeError, match="already attached"), hf.split_state(model, FP8):
            raise AssertionError("must not be reached")
        hf._stepwise(model, ids, None, 2)
        assert state.stats[0]["steps"] == 6


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("MambaConfig", "Mamba-1"),
        ("JambaConfig", "Mamba-1"),
        ("LlamaConfig", "no Mamba-2 or Gated DeltaNet"),
        ("KimiLinearConfig", "Kimi Delta"),
    ],
)
def test_other_models_are_refused_in_one_line(name, match):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")

    class Model(torch.nn.Module):
        config = getattr(transformers, name)()

    for function in (hf.recurrent_layers, lambda m: hf.score(m, torch.ones(1, 4).long(), FP32)):
        with pytest.raises(ValueError, match=match) as error:
            function(Model())
        assert "\n" not in str(error.value)


def test_caches_and_wrappers_that_cannot_work_are_refused(build, make_ids):
    model, ids = build("bamba"), make_ids(1, 4)
    with hf.split_state(model, FP32), torch.no_grad():
        for cache, match in (
            (StaticCache(config=model.config, max_cache_len=32), "StaticCache"),
            (DynamicCache(), "DynamicCache\\(config="),
        ):
            with pytest.raises(ValueError, match=match):
                model(input_ids=ids, use_cache=True, **cache_kwarg(model, cache))
        offloaded = DynamicCache(config=model.config)
        offloaded.offloading = True
        with pytest.raises(ValueError, match="offload"):
            model(input_ids=ids, use_cache=True, **cache_kwarg(model, offloaded))
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, use_cache=True, **cache_kwarg(model, cache))
        with pytest.raises(ValueError, match="offload"):
            cache.layers[0].offload()
        with pytest.raises(TypeError, match="not supported"):
            torch.mul(handles(cache)[0], torch.ones(1))
    with pytest.raises(ValueError, match="torch.compile"):
        hf.recurrent_layers(torch.compile(model))
    with pytest.raises(TypeError, match="transformers model"):
        hf.recurrent_layers(torch.nn.Linear(2, 2))


def test_a_cache_name_that_would_be_ignored_is_refused(build, make_ids):
    model, ids = build("mamba2"), make_ids(1, 4)
    with hf.split_state(model, FP32), torch.no_grad():
        with pytest.raises(ValueError, match="ignores a cache"):
            model(input_ids=ids, past_key_values=DynamicCache(config=model.config))


def test_bad_arguments_name_the_value(build, make_ids):
    model, ids = build("mamba2"), make_ids(2, 6)
    cases = [
        (dict(config={7: FP32}), ValueError, "layer 7"),
        (dict(config="fp8"), TypeError, "StateConfig"),
        (dict(config=FP32, prefill=7), ValueError, "prefill 7"),
        (dict(config=FP32, path="loop"), ValueError, "loop"),
        (dict(config=FP32, requests=["a", "b", "c"], path="decode"), ValueError, "3 request ids"),
        (dict(config=FP32, attention_mask=torch.ones(2, 5)), ValueError, "attention_mask"),
        (dict(config=StateConfig.from_flags("mxfp4")), ValueError, "mxfp4"),
    ]
    for kwargs, error, match in cases:
        with pytest.raises(error, match=match):
            hf.score(model, ids, **{"path": "decode", **kwargs})
    late = torch.ones_like(ids)
    late[0, :3] = 0
    with pytest.raises(ValueError, match="prefill"):
        hf.score(model, ids, FP32, attention_mask=late, prefill=2, path="decode")


# --- the guard ------------------------------------------------------------------------------------


def test_stepwise_equals_one_shot(model, make_ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the clamp of NemotronH and Zamba2 has its own test
        assert hf.check_decode(model, make_ids(2, 40)) <= hf.decode_tolerance(model)


def test_guard_warns_of_the_clamp_and_refuses_a_cache_that_is_ignored(build, make_ids, monkeypatch):
    model = copy.deepcopy(build("nemotron_h"))
    for mixer in hf.find_layers(model).mixers.values():
        mixer.time_step_limit = (0.2, float("inf"))
    with pytest.warns(UserWarning, match="clamps the time step"):
        hf.check_decode(model, make_ids(2, 24))
    broken = copy.deepcopy(build("qwen3_5_text"))
    plain = broken.forward

    def forgetful(*args, **kwargs):
        kwargs.update({n: None for n in NAMES if n in kwargs})
        return plain(*args, **kwargs)

    forgetful.__signature__ = inspect.signature(plain)
    monkeypatch.setattr(broken, "forward", forgetful)
    with pytest.raises(ValueError, match="relative difference"):
        hf.check_decode(broken, make_ids(2, 24))
