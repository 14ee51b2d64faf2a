"""Refusals before anything is loaded, the version gate, and the default of prefix caching."""

from types import SimpleNamespace

import pytest

from replayssm_quant.backends.vllm.checks import (
    ANY_VERSION,
    check,
    draft_tokens,
    turn_off_prefix_caching,
    version_problem,
)
from replayssm_quant.backends.vllm.options import KEY
from replayssm_quant.backends.vllm.plugin import drop_placeholder_drafts

HF = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "hidden_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 1,
}


def config(architecture: str = "NemotronHForCausalLM", **changes: object) -> SimpleNamespace:
    """What ``check`` reads of a VllmConfig; changes as ``part__name=value``."""
    made = SimpleNamespace(
        additional_config={KEY: {"recipe": "auto"}},
        model_config=SimpleNamespace(
            architecture=architecture, hf_config=HF, model="m", dtype="torch.float32"
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, use_replayssm=False, kv_offloading_size=None
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            use_ubatching=False,
        ),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        speculative_config=None,
        use_v2_model_runner=True,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        owner = made
        for part in parents:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return made


def speculative(drafts: int, draft: str | None = None, **more: object) -> SimpleNamespace:
    """What ``check`` reads of a SpeculativeConfig; draft: architecture of a model that drafts."""
    model = None
    if draft is not None:
        model = SimpleNamespace(architecture=draft, runner_type="draft")
    return SimpleNamespace(num_speculative_tokens=drafts, draft_model_config=model, **more)


def test_a_plain_configuration_passes() -> None:
    options = check(config())
    assert options is not None and options.recipe == "auto"


def test_without_the_option_nothing_is_checked() -> None:
    asked = config("LlamaForCausalLM", speculative_config=object(), additional_config={})
    assert check(asked, "too old") is None


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"speculative_config": speculative(8)}, "num_speculative_tokens to 1 to 7"),
        (
            {"speculative_config": speculative(3, enable_adaptive_verification=True)},
            "enable_adaptive_verification",
        ),
        (
            {
                "speculative_config": speculative(3, parallel_drafting=True),
                "use_v2_model_runner": False,
            },
            "parallel_drafting",
        ),
        (
            {"speculative_config": speculative(3, "NemotronHForCausalLM")},
            "draft model NemotronHForCausalLM has recurrent layers",
        ),
        (
            {"model_config__architecture": "Qwen3_5ForCausalLM"},
            "Gated DeltaNet take no float32; pass --dtype bfloat16",
        ),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"cache_config__kv_offloading_size": 4.0}, "--kv-offloading-size"),
        ({"cache_config__use_replayssm": True}, "--use-replayssm"),
        ({"cache_config__enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"parallel_config__enable_dbo": True}, "--enable-dbo"),
        ({"parallel_config__use_ubatching": True}, "--enable-dbo"),
        ({"mamba_config__enable_stochastic_rounding": True}, "stochastic-rounding"),
        ({"model_config__architecture": "LlamaForCausalLM"}, "does not support LlamaForCausalLM"),
        ({"additional_config": {KEY: {"recipe": "autos"}}}, "unknown recipe"),
    ],
)
def test_refused_with_one_line(change: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy) as found:
        check(config(**change))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("drafts", [1, 7])
@pytest.mark.parametrize("draft", [None, "Qwen3_5MTP", "LlamaForCausalLM"])
def test_drafts_are_accepted(drafts: int, draft: str | None) -> None:
    spec = speculative(drafts, draft, parallel_drafting=True)
    asked = config(speculative_config=spec)
    assert check(asked) is not None and draft_tokens(asked) == drafts
    if draft is not None:  # vLLM checks the draft's own configuration too
        asked.model_config = spec.draft_model_config
        assert check(asked) is not None


def test_an_ngram_drafter_that_names_the_model_itself_is_accepted() -> None:
    asked = config()
    asked.speculative_config = SimpleNamespace(
        num_speculative_tokens=3, draft_model_config=asked.model_config
    )
    assert check(asked) is not None
    assert draft_tokens(config()) == 0


def test_another_version_is_refused_when_the_plugin_is_asked_for() -> None:
    with pytest.raises(ValueError, match="not 0.31"):
        check(config(), version_problem((0, 31, 1)))


@pytest.mark.parametrize("version", [(0, 32, 0), (0, 33, 2, "dev", "g1")])
def test_supported_versions(version: tuple) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", [(0, 31, 0), (0, 34, 0), (1, 0, 0), (0, 0, "dev")])
def test_the_override_accepts_any_version(version: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ANY_VERSION, raising=False)
    assert ANY_VERSION in str(version_problem(version))
    monkeypatch.setenv(ANY_VERSION, "1")
    assert version_problem(version) is None
    monkeypatch.setenv(ANY_VERSION, "0")
    assert version_problem(version) is not None


@pytest.mark.parametrize(
    ("given", "asked", "expected", "warnings"),
    [
        (None, True, False, 1),
        (None, False, None, 0),
        (True, True, True, 0),
        (False, True, False, 0),
    ],
)
def test_prefix_caching_is_off_by_default_where_the_plugin_is_asked_for(
    given: bool | None, asked: bool, expected: bool | None, warnings: int
) -> None:
    extra = {KEY: {"recipe": "auto"}} if asked else {}
    arguments = SimpleNamespace(enable_prefix_caching=given, additional_config=extra)
    said: list[str] = []
    turn_off_prefix_caching(arguments, said.append)
    assert arguments.enable_prefix_caching is expected and len(said) == warnings


def test_a_prompt_of_one_token_keeps_no_placeholder_drafts() -> None:
    """A row that verifies keeps its drafts, also if they are placeholders for the worker."""
    computed = {"new": 0, "old": 7}
    requests = {k: SimpleNamespace(num_computed_tokens=v) for k, v in computed.items()}
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={"old": [-1, -1, -1], "new": [-1, -1, -1]},
        num_scheduled_tokens={"old": 4, "new": 4, "prompt": 9},
        total_num_scheduled_tokens=17,
    )
    drop_placeholder_drafts(output, requests)
    assert output.scheduled_spec_decode_tokens == {"old": [-1, -1, -1]}
    assert output.num_scheduled_tokens == {"old": 4, "new": 1, "prompt": 9}
    assert output.total_num_scheduled_tokens == 14
