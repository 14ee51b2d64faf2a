"""vLLM's model classes, with the page sizes of the layers they have built.

``models.<architecture>`` is a subclass of vLLM's own class of that architecture, made when it is
asked for. Importing this module puts our layers in the place of vLLM's.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import MambaSpec

from ...state.geometry import read_geometry
from . import gdn, mamba2  # noqa: F401  (registers the layers)
from .checks import ARCHITECTURES, draft_tokens
from .layer import SplitLayer
from .options import parse
from .page import model_pages, start_line
from .rehearsal import Rehearsal

logger = init_logger("vllm.replayssm_quant")


def _split_layers(vllm_config: Any) -> list[SplitLayer]:
    """The recurrent layers of this rank whose state is split."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [x for x in context.values() if isinstance(x, SplitLayer)]
    return [layer for layer in layers if layer.page is not None]


def _attention_layers(vllm_config: Any) -> list[int]:
    """Bytes of one token in each attention layer of this rank."""
    found = []
    for layer in vllm_config.compilation_config.static_forward_context.values():
        heads, size = getattr(layer, "num_kv_heads", None), getattr(layer, "head_size", None)
        dtype = getattr(layer, "kv_cache_torch_dtype", None)
        if heads and size and dtype is not None:
            found.append(heads * (size + getattr(layer, "head_size_v", size)) * dtype.itemsize)
    return found


def _announce(vllm_config: Any, layers: list[SplitLayer]) -> None:
    options = parse(vllm_config.additional_config)
    assert options is not None
    pages = [layer.page for layer in layers]
    logger.info(
        "%s",
        start_line(
            options.label,
            sorted({layer.config.label for layer in layers}),
            layers[0].config.buffer_len,
            [(page.nbytes, page.stock_bytes) for page in pages],
            _attention_layers(vllm_config),
            vllm_config.model_config.max_model_len,
            layers[0].drafts,
        ),
    )


def _request_states() -> type:
    from .requests import SplitModelState

    return SplitModelState


class SplitStateModel:
    """Mixed into a model class of vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        layers = _split_layers(vllm_config)
        if layers:
            _announce(vllm_config, layers)
            rehearsal = Rehearsal(layers, lambda line: logger.info("%s", line))
            for layer in layers:
                layer.rehearsal = rehearsal
            self.get_model_state_cls = _request_states  # asked for by the V2 model runner

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: Any) -> list[MambaSpec]:
        """Specs whose largest page vLLM fits its blocks to; the same on every pipeline rank."""
        layers, options = _split_layers(vllm_config), parse(vllm_config.additional_config)
        if layers:
            configs = set(layers[0].configs.values())
            pages = [layers[0].make_page(config) for config in configs]
        else:
            shapes = cls.get_mamba_state_shape_from_config(vllm_config)
            dtypes = cls.get_mamba_state_dtype_from_config(vllm_config)
            if options is None:
                return [MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1)]
            model = vllm_config.model_config  # its recurrent layers are on other pipeline ranks
            pages = model_pages(
                read_geometry(model.hf_config).layers,
                options.layer_configs(model.hf_config, str(model.model)),
                vllm_config.parallel_config.tensor_parallel_size,
                shapes[0],
                dtypes[0],
                model.dtype,
                draft_tokens(vllm_config),
            )
        return [MambaSpec(shapes=p.shapes, dtypes=p.dtypes, block_size=-1) for p in pages]


@functools.cache
def _model_class(module: str, name: str) -> type:
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    return type(name, (SplitStateModel, base), {"__module__": __name__, "__doc__": base.__doc__})


def __getattr__(architecture: str) -> type:
    if architecture not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no model {architecture!r}")
    return _model_class(*ARCHITECTURES[architecture].split(":"))
