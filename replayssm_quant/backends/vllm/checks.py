"""What the plugin refuses, each with one readable line, before anything is loaded. No vLLM here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from ...state.layout import MAX_DRAFTS
from .options import KEY, Options, parse

VERSIONS = ((0, 32), (0, 33))
ANY_VERSION = "REPLAYSSM_QUANT_ANY_VLLM"

ARCHITECTURES = {
    "NemotronHForCausalLM": "nemotron_h:NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM": "nemotron_h:NemotronHForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3NextForCausalLM",
    "FalconH1ForCausalLM": "falcon_h1:FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid:GraniteMoeHybridForCausalLM",
    "Zamba2ForCausalLM": "zamba2:Zamba2ForCausalLM",
    "Mamba2ForCausalLM": "mamba2:Mamba2ForCausalLM",
}
"""Supported architectures, and the module and class of vLLM's own model of each."""


def version_problem(version: Iterable[Any]) -> str | None:
    """Why this vLLM is refused, or None. ``ANY_VERSION=1`` in the environment accepts any."""
    found = tuple(version)[:2]
    if found in VERSIONS or os.environ.get(ANY_VERSION, "0") not in ("", "0"):
        return None
    tested = " and ".join(".".join(map(str, v)) for v in VERSIONS)
    return (
        f"replayssm_quant is written for vLLM {tested}, not {'.'.join(map(str, found))}; install "
        f"one of these, or set {ANY_VERSION}=1 to try"
    )


def draft_tokens(config: Any) -> int:
    """Draft tokens that a step of a VllmConfig verifies at most."""
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None)
    return 0 if drafts is None else int(drafts)


def _draft_features(config: Any) -> Iterable[tuple[bool, str]]:
    """``_features`` of speculative decoding."""
    spec = config.speculative_config
    if spec is None:
        return
    drafts = draft_tokens(config)
    yield (
        drafts > MAX_DRAFTS,
        f"{drafts} draft tokens are too many; set num_speculative_tokens to 1 to {MAX_DRAFTS}",
    )
    yield (
        bool(getattr(spec, "enable_adaptive_verification", False)),
        "adaptive verification is not supported; leave enable_adaptive_verification out of "
        "--speculative-config",
    )
    yield (
        bool(getattr(spec, "parallel_drafting", False)) and not config.use_v2_model_runner,
        "parallel drafting needs the V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER or leave "
        "parallel_drafting out of --speculative-config",
    )
    draft = getattr(spec, "draft_model_config", None)
    other = getattr(draft, "runner_type", "") == "draft"  # n-grams name the model itself
    architecture = str(draft.architecture) if other else ""
    yield (
        architecture in ARCHITECTURES,
        f"the draft model {architecture} has recurrent layers of its own; draft with the model's "
        "MTP head, with n-grams or with a model of attention alone",
    )


def _features(config: Any) -> Iterable[tuple[bool, str]]:
    """(in use, what to do about it) for each feature that does not work with a split state."""
    cache, parallel = config.cache_config, config.parallel_config
    model = config.model_config
    yield (
        model.architecture.startswith("Qwen3") and str(model.dtype) == "torch.float32",
        "vLLM's kernels of Gated DeltaNet take no float32; pass --dtype bfloat16",
    )
    yield from _draft_features(config)
    yield (
        config.kv_transfer_config is not None
        or getattr(cache, "kv_offloading_size", None) is not None,
        "KV connectors and KV offloading are not supported; leave --kv-transfer-config and "
        "--kv-offloading-size out",
    )
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        yield (
            getattr(parallel, size, 1) > 1,
            f"context parallelism is not supported; leave {size} at 1",
        )
    yield (
        bool(getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False)),
        "dual batch overlap is not supported; leave --enable-dbo out",
    )
    yield (
        bool(getattr(cache, "use_replayssm", False)),
        "--use-replayssm is vLLM's own replay and excludes this plugin; leave it out",
    )
    yield (
        bool(getattr(config.mamba_config, "enable_stochastic_rounding", False)),
        f"--enable-mamba-cache-stochastic-rounding has no effect here; set rounding in '{KEY}'",
    )
    yield (
        bool(cache.enable_prefix_caching),
        "prefix caching is not supported; pass --no-enable-prefix-caching "
        "(enable_prefix_caching=False)",
    )


def check(config: Any, problem: str | None = None) -> Options | None:
    """The options of a VllmConfig, checked with it; None if the plugin is not asked for.

    problem: why the plugin cannot run at all (``version_problem``). Raises ValueError or TypeError.
    """
    options = parse(config.additional_config)
    if options is None:
        return None
    if problem is not None:
        raise ValueError(problem)
    model = config.model_config
    if getattr(model, "runner_type", "") == "draft":  # its model was checked with the target's
        return options
    if model.architecture not in ARCHITECTURES:
        raise ValueError(
            f"replayssm_quant does not support {model.architecture} in vLLM; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    for used, remedy in _features(config):
        if used:
            raise ValueError(f"replayssm_quant: {remedy}")
    options.layer_configs(model.hf_config, str(model.model))
    return options


def turn_off_prefix_caching(arguments: Any, warn: Callable[[str], object]) -> None:
    """Turn prefix caching off in vLLM's EngineArgs, unless the user said what he wants."""
    if arguments.enable_prefix_caching is None and parse(arguments.additional_config) is not None:
        arguments.enable_prefix_caching = False
        warn("replayssm_quant turned prefix caching off, which split states do not support")
