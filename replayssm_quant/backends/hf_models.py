"""What a loaded transformers model is made of: recurrent layers, decoder, names that changed.

Known to hold from transformers 5.16.1 to 5.24: every Mamba-2 and Gated DeltaNet layer calls module
level functions of the same names, keeps its state in ``cache.layers[i].recurrent_states[0]`` and
lives in a decoder that takes the cache as ``cache`` (5.24), ``past_key_values`` or
``cache_params`` (Mamba-2 before 5.24).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..config import StateConfig
from ..state.geometry import LayerGeometry, read_geometry
from ..state.layout import StateLayout

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
STEP_FUNCTIONS = {
    "mamba2": "mamba2_selective_state_update",
    "gdn": "torch_recurrent_gated_delta_rule",
}
CHUNK_FUNCTIONS = {"mamba2": "mamba2_chunk_scan", "gdn": "torch_chunk_gated_delta_rule"}
RING_STORAGE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class RecurrentModel:
    """The parts of a loaded model that a split state touches.

    layers: geometry by layer index (the index of ``cache.layers``). mixers: the module of each.
    decoder: the text model that owns the layers and is given the cache. modules: the modeling files
    whose functions are replaced while a split state is attached.
    """

    model: nn.Module
    layers: Mapping[int, LayerGeometry]
    mixers: Mapping[int, nn.Module]
    decoder: nn.Module
    modules: tuple[ModuleType, ...]

    @property
    def kind(self) -> str:
        """The family of every recurrent layer: ``mamba2`` or ``gdn``."""
        return next(iter(self.layers.values())).kind

    @property
    def model_type(self) -> str:
        return str(self.decoder.config.model_type)


def find_layers(model: nn.Module) -> RecurrentModel:
    """The recurrent layers of a transformers model, checked against its configuration.

    Raises TypeError if ``model`` is no transformers model, ValueError if it has no Mamba-2 or Gated
    DeltaNet layer, if its layers do not match its configuration, or if it is compiled or runs Hub
    kernels, which call none of the functions that a split state replaces.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError("the model is wrapped by torch.compile; pass the plain model instead")
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise TypeError(f"expected a loaded transformers model, not {type(model).__name__}")
    if getattr(model, "use_kernels", False):
        raise ValueError("the model runs Hub kernels; load it without use_kernels=True")
    layers = dict(read_geometry(config).layers)
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "layer_idx")
    }
    mixers = {int(module.layer_idx): module for module in found.values()}
    if set(mixers) != set(layers) or len(found) != len(layers):
        raise ValueError(
            f"the configuration of '{config.model_type}' names recurrent layers {sorted(layers)}, "
            f"the loaded model has {sorted(mixers)}: a layout that we do not know"
        )
    for i, module in mixers.items():
        if module.A_log.shape != (layers[i].heads,):
            raise ValueError(
                f"layer {i}: A_log has shape {tuple(module.A_log.shape)}, but the configuration "
                f"gives {layers[i].heads} heads"
            )
    prefix = next(iter(found)).split(".layers.")[0]
    files = {type(m).__module__: sys.modules[type(m).__module__] for m in mixers.values()}
    kind = next(iter(layers.values())).kind
    for name, file in files.items():
        for function in (STEP_FUNCTIONS[kind], CHUNK_FUNCTIONS[kind]):
            if not callable(getattr(file, function, None)):
                raise ValueError(
                    f"{name} has no function {function}; use transformers 5.16.1 up to 5.24"
                )
    return RecurrentModel(model, layers, mixers, model.get_submodule(prefix), tuple(files.values()))


def layer_configs(
    layers: Mapping[int, LayerGeometry], config: StateConfig | Mapping[int, StateConfig]
) -> dict[int, StateConfig]:
    """The config of each layer; layers that a mapping leaves out keep transformers' fp32 state.

    Raises ValueError for a layer that does not exist and for a format that does not fit.
    """
    if isinstance(config, StateConfig):
        chosen = dict.fromkeys(layers, config)
    elif isinstance(config, Mapping):
        chosen = dict(config)
    else:
        raise TypeError(
            f"config must be a StateConfig or a mapping from layer index to StateConfig, not "
            f"{type(config).__name__}"
        )
    for i, c in chosen.items():
        if i not in layers:
            raise ValueError(f"layer {i} is not recurrent; recurrent layers: {sorted(layers)}")
        if not isinstance(c, StateConfig):
            raise TypeError(f"layer {i}: {c!r} is not a StateConfig")
        StateLayout(layers[i], c)  # does the format fit the shape?
    return chosen


def cache_name(function: Any) -> str:
    """The name under which ``function`` (a model's forward) takes its cache.

    Raises ValueError if it takes none.
    """
    parameters = inspect.signature(function).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise ValueError(f"{function!r} takes no cache under any of {', '.join(CACHE_NAMES)}")


def takes_position_ids(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


class DecoderCalls:
    """Reads the arguments of a decoder's calls by name, however the caller passed them."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder
        self.names = list(inspect.signature(decoder.forward).parameters)
        self.cache_name = cache_name(decoder.forward)
        old = "cache_params" if decoder.config.model_type == "mamba2" else "past_key_values"
        self.accepted = {self.cache_name, old}  # 5.24 maps the old name to the new one

    def get(self, args: tuple, kwargs: Mapping[str, Any], name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self.names.index(name) if name in self.names else len(args)
        return args[position] if position < len(args) else None

    def cache(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The cache of a call, or None."""
        for name in CACHE_NAMES:
            value = self.get(args, kwargs, name)
            if value is None:
                continue
            return value
        return None

    def check_names(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse a cache under a name that the model ignores; a pre-hook of the whole model."""
        for name in CACHE_NAMES:
            if kwargs.get(name) is not None and name not in self.accepted:
                raise ValueError(
                    f"'{self.decoder.config.model_type}' ignores a cache that is given as {name}; "
                    f"pass it as {self.cache_name}"
                )

    def wants_cache(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the decoder makes its own cache if it is given none."""
        use = self.get(args, kwargs, "use_cache")
        if use is None:
            use = getattr(self.decoder.config, "use_cache", False) and not self.decoder.training
        return bool(use)

    def with_cache(
        self, args: tuple, kwargs: Mapping[str, Any], cache: Any
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call with this cache in place of none."""
        position = self.names.index(self.cache_name)
        if position < len(args):
            return (*args[:position], cache, *args[position + 1 :]), dict(kwargs)
        return args, {**kwargs, self.cache_name: cache}

    def tokens(
        self, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[int, int, torch.Tensor | None]:
        """(rows, columns, 2-D attention mask over past and present columns, or None)."""
        given = self.get(args, kwargs, "input_ids")
        given = given if given is not None else self.get(args, kwargs, "inputs_embeds")
        if given is None:
            raise ValueError("the decoder was called without input_ids and without inputs_embeds")
        mask = self.get(args, kwargs, "attention_mask")
        if isinstance(mask, Mapping):
            mask = next((m for m in mask.values() if getattr(m, "ndim", 0) == 2), None)
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] < given.shape[1]:
            mask = None
        return given.shape[0], given.shape[1], mask


def request_ids(requests: Sequence[int | str] | None, rows: int) -> list[int | str]:
    """The request of each row; without ``requests`` its index.

    A batch that is a multiple of them (beams, several samples a prompt) repeats each in place, as
    ``generate`` expands its rows. Raises ValueError for any other number.
    """
    if requests is None:
        return list(range(rows))
    if not requests or rows % len(requests):
        raise ValueError(
            f"{len(requests)} request ids do not fit a batch of {rows} rows; give one for each row "
            "(or for each prompt that generate expands)"
        )
    return [r for r in requests for _ in range(rows // len(requests))]
