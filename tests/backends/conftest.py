"""Random tiny models of every supported architecture."""

import functools
import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 96
_SHARED = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48)
_ATTENTION = dict(num_attention_heads=2, num_key_value_heads=1)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16)
_GDN = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
)
_MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_SPECS = {
    "mamba2": (
        "Mamba2Config",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_heads=4,
            head_dim=16,
            state_size=16,
            n_groups=2,
            num_hidden_layers=2,
            chunk_size=16,
        ),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        dict(
            **_SHARED,
            **_ATTENTION,
            layers_block_type=["mamba", "attention", "mamba", "mlp"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=16,
            time_step_min=1e-4,
        ),
    ),
    "bamba": (
        "BambaConfig",
        dict(
            **_SHARED,
            **_ATTENTION,
            **_MAMBA,
            num_hidden_layers=3,
            attn_layer_indices=[1],
            mamba_n_groups=2,
        ),
    ),
    "falcon_h1": (
        "FalconH1Config",
        dict(
            **_SHARED,
            **_ATTENTION,
            **_MAMBA,
            num_hidden_layers=2,
            head_dim=16,
            mamba_d_ssm=64,
            mamba_n_groups=2,
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        dict(
            **_SHARED,
            **_ATTENTION,
            **_MAMBA,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            mamba_n_groups=1,
            shared_intermediate_size=48,
            num_local_experts=0,
        ),
    ),
    "zamba2": (
        "Zamba2Config",
        dict(
            **_SHARED,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            hybrid_layer_ids=[1],
            n_mamba_heads=4,
            mamba_d_state=16,
            mamba_ngroups=2,
            chunk_size=16,
            num_mem_blocks=1,
            use_shared_attention_adapter=False,
            adapter_rank=4,
            time_step_min=1e-4,
        ),
    ),
    "qwen3_next": ("Qwen3NextConfig", dict(**_SHARED, **_ATTENTION, **_GDN, **_MOE, head_dim=16)),
    "qwen3_5_text": ("Qwen3_5TextConfig", dict(**_SHARED, **_ATTENTION, **_GDN, head_dim=16)),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        dict(**_SHARED, **_ATTENTION, **_GDN, **_MOE, head_dim=16),
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {**_SHARED, **_ATTENTION, **_GDN, "linear_num_value_heads": 2},
    ),
}
FAMILIES = list(_SPECS)


def _initialise(model, seed):
    """Fan-in weights: with std 0.02 a tiny model hardly reads its state. Gated DeltaNet decays are
    brought into a range in which a state lives for some tens of tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                std = 0.4 if "conv" in name else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * std)
            elif name.endswith("A_log") and "linear_attn" in name:
                p.copy_(torch.log(torch.rand(p.shape, generator=generator) * 0.5 + 0.02))
            elif name.endswith("dt_bias"):
                p.copy_(torch.rand(p.shape, generator=generator) * 2 - 3)
    return model


@functools.cache
def _build(family, seed=0):
    name, values = _SPECS[family]
    config = getattr(transformers, name)(**{**values, **_TOKENS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _initialise(AutoModelForCausalLM.from_config(config), seed).eval()


@pytest.fixture(scope="session", autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def build():
    """build(family): a tiny model, made once; tests must not change it."""
    return _build


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return _build(family)


@pytest.fixture(scope="session")
def make_ids():
    def make(rows, tokens, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCAB, (rows, tokens), generator=generator)

    return make
