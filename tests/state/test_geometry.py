"""read_geometry against the shapes of real transformers modules and their own defaults."""

import json
from types import SimpleNamespace

import pytest
import torch

from replayssm_quant.state.geometry import GDN_TYPES, MAMBA2_TYPES, LayerGeometry, read_geometry

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GDN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=3,
)
MOE = dict(
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
BAMBA = dict(
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=3, mamba_chunk_size=8
)
NO_HEAD_DIM = {k: v for k, v in SMALL.items() if k != "head_dim"}
MAMBA2 = dict(vocab_size=32, hidden_size=64, num_heads=8, head_dim=16, state_size=32, n_groups=2)
ROPE = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
MROPE = dict(ROPE, mrope_section=[2, 1, 1], mrope_interleaved=True)

# (model type, keyword arguments of its config, expected geometry, recurrent layers, all layers)
TINY = {
    "mamba2": (
        "mamba2",
        dict(MAMBA2, num_hidden_layers=3, conv_kernel=3, chunk_size=8),
        LayerGeometry("mamba2", 8, 16, 32, 2, 3),
        [0, 1, 2],
        3,
    ),
    "nemotron_h": (
        "nemotron_h",
        dict(
            SMALL,
            hybrid_override_pattern="*-M-M",
            mamba_num_heads=6,
            mamba_head_dim=24,
            ssm_state_size=16,
            n_groups=3,
            conv_kernel=3,
            chunk_size=8,
        ),
        LayerGeometry("mamba2", 6, 24, 16, 3, 3),
        [2, 4],
        5,
    ),
    "bamba": (
        "bamba",
        dict(NO_HEAD_DIM, **BAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
        LayerGeometry("mamba2", 8, 16, 16, 2, 3),
        [0, 2],
        3,
    ),
    "falcon_h1": (
        "falcon_h1",
        dict(NO_HEAD_DIM, **BAMBA, num_hidden_layers=2, mamba_d_ssm=96, mamba_d_head=12),
        LayerGeometry("mamba2", 8, 12, 16, 2, 3),
        [0, 1],
        2,
    ),
    "falcon_h1 by expansion": (
        "falcon_h1",
        dict(NO_HEAD_DIM, **BAMBA, num_hidden_layers=2, mamba_d_ssm=None, mamba_expand=3),
        LayerGeometry("mamba2", 8, 24, 16, 2, 3),
        [0, 1],
        2,
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(
            NO_HEAD_DIM,
            **BAMBA,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=2,
            num_experts_per_tok=1,
            shared_intermediate_size=32,
        ),
        LayerGeometry("mamba2", 8, 16, 16, 2, 3),
        [0, 2],
        3,
    ),
    "zamba2": (
        "zamba2",
        dict(
            NO_HEAD_DIM,
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            n_mamba_heads=8,
            mamba_d_state=16,
            mamba_ngroups=2,
            mamba_d_conv=3,
            chunk_size=8,
        ),
        LayerGeometry("mamba2", 8, 16, 16, 2, 3),
        [0, 1, 2],
        3,
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(SMALL, **GDN, **MOE, num_hidden_layers=4, rope_parameters=ROPE),
        LayerGeometry("gdn", 6, 24, 16, 2, 3),
        [0, 1, 2],
        4,
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        dict(
            SMALL,
            **GDN,
            layer_types=["full_attention", "linear_attention"],
            num_hidden_layers=2,
            rope_parameters=MROPE,
        ),
        LayerGeometry("gdn", 6, 24, 16, 2, 3),
        [1],
        2,
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        dict(SMALL, **GDN, **MOE, num_hidden_layers=4, rope_parameters=MROPE),
        LayerGeometry("gdn", 6, 24, 16, 2, 3),
        [0, 1, 2],
        4,
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        dict(NO_HEAD_DIM, num_hidden_layers=4, linear_conv_kernel_dim=3),
        LayerGeometry("gdn", 4, 24, 12, 4, 3),
        [0, 1, 2],
        4,
    ),
    "olmo_hybrid short": (
        "olmo_hybrid",
        dict(NO_HEAD_DIM, num_hidden_layers=2, linear_num_value_heads=8, linear_key_head_dim=8),
        LayerGeometry("gdn", 8, 16, 8, 4, 4),
        [0],
        2,
    ),
}


def build(model_type: str, values: dict):
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(0)
    return config, transformers.AutoModel.from_config(config).eval()


@pytest.mark.parametrize("name", TINY)
def test_geometry_equals_the_states_of_a_real_model(name: str):
    model_type, values, layer, indices, total = TINY[name]
    config, model = build(model_type, values)
    geometry = read_geometry(config)
    assert geometry.total_layers == total and list(geometry.layers) == indices
    assert all(g == layer for g in geometry.layers.values())

    cache = transformers.DynamicCache(config=config)
    key = "cache_params" if model_type == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5, 6, 7]]), use_cache=True, **{key: cache})
    found = {}
    for i, part in enumerate(cache.layers):
        for state in (getattr(part, "recurrent_states", None) or {}).values():
            if state is not None:
                found[i] = tuple(state.shape[1:])
    order = (layer.heads, layer.rows, layer.n)
    if layer.kind == "gdn":  # transformers keeps (K, V)
        order = (layer.heads, layer.n, layer.rows)
    assert found == dict.fromkeys(indices, order)
    for i in indices:
        conv = [t for t in cache.layers[i].conv_states.values() if t is not None]
        channels = sum(t.shape[1] for t in conv)
        assert channels == layer.conv_channels


@pytest.mark.parametrize("name", TINY)
def test_dictionary_reads_like_the_object(name: str, tmp_path):
    model_type, values, *_ = TINY[name]
    config = transformers.AutoConfig.for_model(model_type, **values)
    expected = read_geometry(config)
    assert read_geometry(dict(values, model_type=model_type)) == expected  # what a person writes
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert read_geometry(saved) == expected  # what transformers writes


@pytest.mark.parametrize("model_type", sorted(MAMBA2_TYPES | GDN_TYPES))
def test_defaults_are_those_of_transformers(model_type: str):
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type)
    geometry = read_geometry(config)
    assert geometry == read_geometry({"model_type": model_type})
    assert geometry.total_layers == getattr(config, "text_config", config).num_hidden_layers


def test_wrappers_are_read_through_the_text_model():
    values = dict(SMALL, **GDN, num_hidden_layers=8)
    inner = read_geometry(dict(values, model_type="qwen3_5_text"))
    assert read_geometry({"model_type": "qwen3_5", "text_config": values}) == inner
    named = {"model_type": "some_vision_model", "text_config": {**values, "model_type": "qwen3_5"}}
    assert read_geometry(named) == inner
    omni = {"model_type": "nemotron_h_omni", "llm_config": {"model_type": "nemotron_h"}}
    assert read_geometry(omni) == read_geometry({"model_type": "nemotron_h"})


PUZZLE = {
    "model_type": "nemotron_h_puzzle",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 96,
    "n_groups": 2,
    "num_hidden_layers": None,  # as the published file has it
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 8},
        {"block_type": "attention"},
        {"block_type": "mamba", "ssm_state_size": None},
        {"block_type": "mlp", "intermediate_size": 8},
    ],
}


@pytest.mark.parametrize("objects", [False, True], ids=["file", "class"])
def test_puzzle_models_say_what_each_layer_is(objects: bool):
    """vLLM reads the same blocks as objects and a pattern that the model's own class makes."""
    values: dict = PUZZLE
    config = values
    if objects:
        blocks = [SimpleNamespace(**block) for block in values["block_configs"]]
        pattern = {"hybrid_override_pattern": "MM"}  # the blocks count
        config = SimpleNamespace(**values | pattern | {"block_configs": blocks})
    found = read_geometry(config)
    layer = LayerGeometry("mamba2", 8, 16, 96, 2)
    assert dict(found.layers) == {0: layer, 3: layer} and found.total_layers == 5
    plain = {k: v for k, v in values.items() if k != "block_configs"}
    assert dict(read_geometry(plain | {"layers_block_type": ["mamba", "moe"]}).layers) == {0: layer}
    assert dict(read_geometry(plain | {"hybrid_override_pattern": "EM"}).layers) == {1: layer}


def test_a_puzzle_layer_may_have_sizes_of_its_own():
    blocks = [{"block_type": "mamba", "ssm_state_size": 32}, {"block_type": "mamba"}]
    found = read_geometry(PUZZLE | {"block_configs": blocks}).layers
    assert [found[i].n for i in (0, 1)] == [32, 96]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**PUZZLE, "block_configs": [{"block_type": "kda"}]}, "blocks of type kda; known are"),
        ({**PUZZLE, "block_configs": [{"block_type": "moe"}]}, "no recurrent layer"),
        ({"model_type": "jamba"}, "'jamba' is Mamba-1"),
        ({"model_type": "falcon_mamba"}, "'falcon_mamba' is Mamba-1"),
        ({"model_type": "kimi_linear"}, "Kimi Delta Attention"),
        ({"model_type": "x", "text_config": {"model_type": "glm5_next_text"}}, "Kimi Delta"),
        ({"model_type": "llama"}, "'llama' has no Mamba-2 or Gated DeltaNet layer"),
        ({}, "model type '\\?' has no"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "*-*"}, "no recurrent layer"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "has 'X'; known are"),
        ({"model_type": "qwen3_5", "linear_num_value_heads": "32"}, "heads = '32'"),
        ({"model_type": "qwen3_5", "linear_num_value_heads": 0}, "heads = 0"),
        ({"model_type": "qwen3_5", "layer_types": "linear_attention"}, "no list of names"),
        ({"model_type": "qwen3_5", "linear_num_value_heads": 24}, "do not divide into 16 groups"),
        ({"model_type": "zamba2", "n_mamba_heads": 7}, "7 Mamba heads do not divide"),
    ],
)
def test_refusals_name_the_value(config: dict, words: str):
    with pytest.raises(ValueError, match=words) as error:
        read_geometry(config)
    assert "\n" not in str(error.value)


def test_real_refused_configs():
    for model_type in ("mamba", "jamba", "llama"):
        with pytest.raises(ValueError, match=f"'{model_type}'"):
            read_geometry(transformers.AutoConfig.for_model(model_type))


def test_shards_divide_or_say_so():
    layer = LayerGeometry("mamba2", 128, 64, 128, 8)
    assert [layer.shard(t).heads for t in (1, 2, 4, 8)] == [128, 64, 32, 16]
    assert [layer.shard(t).groups for t in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert LayerGeometry("mamba2", 24, 128, 256, 1).shard(4).groups == 1  # one group: replicated
    with pytest.raises(ValueError, match="8 groups do not divide over 16 ranks"):
        layer.shard(16)
    with pytest.raises(ValueError, match="24 heads do not divide over 5 ranks"):
        LayerGeometry("mamba2", 24, 128, 256, 1).shard(5)
    with pytest.raises(ValueError, match="parallelism 0"):
        layer.shard(0)
