"""transformers backend: run or score a loaded model with its recurrent state split.

    with split_state(model, StateConfig.from_flags("fp8")) as state:
        model.generate(...)
    state.stats

transformers' own prefill stays as it is; its final fp32 state is rounded into checkpoint and copy,
and every later token goes through ``replayssm_quant.ops``. Positions, which the random bits of a
flush depend on, count the real tokens of a request: padding that the attention mask marks does not
count, so a row draws the same bits however its batch is padded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..config import StateConfig
from ..state.geometry import LayerGeometry
from .hf_models import (
    CHUNK_FUNCTIONS,
    cache_name,
    find_layers,
    layer_configs,
    takes_position_ids,
)
from .hf_scan import ScanState
from .hf_state import HFState, attach, patched

__all__ = ["HFState", "check_decode", "recurrent_layers", "score", "split_state"]

Config = StateConfig | Mapping[int, StateConfig]


def recurrent_layers(model: nn.Module) -> dict[int, LayerGeometry]:
    """Geometry of each recurrent layer of a loaded model, by layer index.

    Raises ValueError for a model without Mamba-2 or Gated DeltaNet layers (Mamba-1 and KDA
    included), a compiled model, or one that runs Hub kernels.
    """
    return dict(find_layers(model).layers)


@contextlib.contextmanager
def split_state(
    model: nn.Module,
    config: Config,
    *,
    requests: Sequence[int | str] | None = None,
    seed: int | None = None,
    impl: str | None = None,
    drafts: int = 0,
) -> Iterator[HFState]:
    """Attach a split state to a loaded transformers model for the length of the block.

    config: one ``StateConfig``, or one by layer index (layers that are left out keep transformers'
    fp32 state). requests: an id for each row of a batch, from which its random key follows together
    with ``seed`` (default: the config's); without ids the row's index. A batch that is a multiple
    of the ids repeats each, as ``generate`` expands its rows for beams or samples. impl: passed to
    ``replayssm_quant.ops``. drafts: tokens that assisted generation may propose at a time, 0 to 7;
    above 0 ``model.generate(..., prompt_lookup_num_tokens=N)`` works, which transformers refuses
    for a recurrent model: rejected tokens are forgotten by moving a cursor.

    Inside, ``model.generate(...)`` and calls with a ``DynamicCache`` (new, or filled before the
    block) decode through the split state. On leaving, also by an exception, the model's functions
    and the caches' classes are the old ones, and caches that are still alive hold plain fp32 states
    again. Raises ValueError for a model, a cache or a format that is not supported, RuntimeError if
    a split state is attached already.
    """
    with attach(model, config, requests, seed, impl, drafts).attached() as state:
        yield state


def _check_batch(ids: torch.Tensor, mask: torch.Tensor | None, prefill: int) -> torch.Tensor | None:
    """The checked attention mask. Raises ValueError or TypeError."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise TypeError("ids must be an integer tensor [rows, tokens]")
    if not 1 <= prefill <= ids.shape[1]:
        raise ValueError(f"prefill {prefill} is out of range; use 1 to {ids.shape[1]} tokens")
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)} must be like ids {tuple(ids.shape)}")
    real = mask != 0
    if bool((real[:, prefill:] & ~real[:, prefill - 1 : -1]).any()):
        raise ValueError(
            f"attention_mask: padding before a real token after the first {prefill} tokens; pad on "
            "the right, or prefill at least the padding and one token"
        )
    return mask


def _positions(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    """position_ids as ``generate`` makes them. They are always given: Bamba's model starts from 0
    at each step if it has to make its own."""
    if not takes_position_ids(model):
        return {}
    if mask is None:
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}
    return {"position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


@torch.no_grad()
def _stepwise(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, prefill: int
) -> torch.Tensor:
    """Logits [B, T, V] of a prefill and one forward for each later token."""
    name = cache_name(model.forward)
    cache = DynamicCache(config=model.config)
    extra = _positions(model, ids, mask)
    out, start = [], 0
    for end in [prefill, *range(prefill + 1, ids.shape[1] + 1)]:
        kwargs: dict[str, Any] = {k: v[:, start:end] for k, v in extra.items()}
        if mask is not None:
            kwargs["attention_mask"] = mask[:, :end]
        kwargs[name] = cache
        out.append(model(input_ids=ids[:, start:end], use_cache=True, **kwargs).logits)
        start = end
    return torch.cat(out, 1)


def score(
    model: nn.Module,
    ids: torch.Tensor,
    config: Config | None,
    *,
    attention_mask: torch.Tensor | None = None,
    prefill: int = 1,
    path: str = "scan",
    requests: Sequence[int | str] | None = None,
    seed: int | None = None,
    stats: dict[int, dict[str, int]] | None = None,
) -> torch.Tensor:
    """Teacher-forced logits [B, T, V] of a model whose state is split, in the model's dtype.

    ids: integer [B, T]. The first ``prefill`` tokens run as a prefill, exact; each later token runs
    on the state that ``config`` describes (None: an fp32 state that is never rounded).
    attention_mask [B, T]: rows may be padded on the right, and on the left within the prefill.
    path: ``scan`` computes the whole text in one forward (``kernels/*/scan.py``), ``decode`` feeds
    one token at a time through ``split_state``, or through the plain model for config None. Both
    draw the same random bits; the scan is several times faster. requests and seed as in
    ``split_state``. stats, if given, receives ``HFState.stats``. Logits of padding mean nothing.
    """
    mask = _check_batch(ids, attention_mask, prefill)
    found = find_layers(model)
    if path == "scan":
        configs = {} if config is None else layer_configs(found.layers, config)
        positions = torch.full((ids.shape[0],), prefill, dtype=torch.int64)
        if mask is not None:
            positions = (mask[:, :prefill] != 0).sum(1).cpu()
        state = ScanState(
            found, configs, prefill=prefill, positions=positions, requests=requests, seed=seed
        )
        extra = _positions(model, ids, mask)
        if mask is not None:
            extra["attention_mask"] = mask
        with state.attached(), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **extra).logits
        counts = state.stats(ids.shape[1])
    elif path != "decode":
        raise ValueError(f"unknown path '{path}'; use scan (whole text) or decode (token by token)")
    elif config is None:
        return _stepwise(model, ids, mask, prefill)
    else:
        with split_state(model, config, requests=requests, seed=seed) as attached:
            logits = _stepwise(model, ids, mask, prefill)
            counts = attached.stats
    if stats is not None:
        stats.update(counts)
    return logits


def decode_tolerance(model: nn.Module) -> float:
    """Largest difference of stepwise and one-shot logits, relative to the largest logit.

    Both compute the same sums in another order: in fp32 within the recurrence, in the model's dtype
    around it. In fp32 one layer adds about eps * sqrt(width) of relative error, and a chunked scan
    subtracts cumulative log decays up to some hundred before it exponentiates, which costs a
    further factor of about 30. In half precision sums still run in fp32 and one layer adds a few
    roundings of its outputs, about eps each. Layers add up in quadrature; 4 is a margin.
    """
    config = model.config.get_text_config(decoder=True)
    dtype = next(model.parameters()).dtype
    one = 30.0 * config.hidden_size**0.5 if dtype == torch.float32 else 2.0**0.5
    return 4.0 * one * torch.finfo(dtype).eps * config.num_hidden_layers**0.5


def _unclamped(original: Callable) -> Callable:
    def mamba2_chunk_scan(*args: Any, dt_limit: Any = None, **kwargs: Any) -> Any:
        return original(*args, dt_limit=(0.0, float("inf")), **kwargs)

    return mamba2_chunk_scan


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """(largest difference relative to the largest value of ``a``, its token)."""
    error = (a - b).abs().amax(-1)
    scale = max(float(a.abs().max()), torch.finfo(torch.float32).tiny)
    return float(error.max()) / scale, int(error.flatten().argmax()) % a.shape[1]


@torch.no_grad()
def check_decode(model: nn.Module, ids: torch.Tensor, *, prefill: int = 1) -> float:
    """Check that feeding tokens one by one gives the logits of feeding them at once, in fp32 state.

    ids: integer [B, T]. Returns the largest difference relative to the largest logit. Raises
    ValueError with that number if it exceeds ``decode_tolerance``: then the decode path (a cache
    that is ignored, say) is not the model that one-shot scoring sees, and no comparison of states
    would mean anything. NemotronH and Zamba2 clamp dt at ``time_step_min`` in the prefill only; a
    difference that disappears without the clamp is a warning, since every run compared here decodes
    without it.
    """
    found = find_layers(model)
    mask = _check_batch(ids, None, prefill)
    extra = _positions(model, ids, mask)
    step = _stepwise(model, ids, mask, prefill).float()
    once = model(input_ids=ids, use_cache=False, **extra).logits.float()
    worst, at = _difference(once, step)
    allowed = decode_tolerance(model)
    if worst <= allowed:
        return worst
    if found.kind == "mamba2":
        with patched(found, {CHUNK_FUNCTIONS["mamba2"]: _unclamped}):
            step = _stepwise(model, ids, mask, prefill).float()
            once = model(input_ids=ids, use_cache=False, **extra).logits.float()
        free, at_free = _difference(once, step)
        if free <= allowed:
            warnings.warn(
                f"'{model.config.model_type}': transformers clamps the time step in a prefill but "
                f"not in decode, which moves logits by {worst:.2g} of their largest; give the "
                "configuration time_step_min 0 if the model was trained without the clamp",
                stacklevel=2,
            )
            return free
        worst, at = free, at_free
    raise ValueError(
        f"'{model.config.model_type}': decoding token by token gives other logits than one forward "
        f"(relative difference {worst:.2g} at token {at}, allowed {allowed:.2g}), so its decode "
        "path cannot be evaluated"
    )
