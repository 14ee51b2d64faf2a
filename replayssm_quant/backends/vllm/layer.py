"""What the Mamba-2 and GDN layers of this backend share: their page and what vLLM asks of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from ...config import StateConfig
from ...state.geometry import LayerGeometry, read_geometry
from ...state.layout import StateViews
from .checks import draft_tokens
from .options import parse
from .page import StatePage
from .plugin import refuse_what_failed
from .rehearsal import Rehearsal


def layer_number(prefix: str, hf_config: Any) -> int:
    """Number of a recurrent layer in the model, as transformers counts.

    vLLM names the Mamba layers of two families by numbers behind those of their attention layers.
    """
    number = extract_layer_index(prefix)
    if hf_config.model_type == "falcon_h1":
        return number - hf_config.num_hidden_layers
    if hf_config.model_type == "zamba2":
        return number - sum(kind == "hybrid" for kind in hf_config.layers_block_type)
    return number


class SplitLayer:
    """Mixed into a subclass of vLLM's layer.

    ``page`` is None where the plugin is not asked for, and until ``split`` has run (vLLM's
    constructor asks for state dtypes before that): then every method is vLLM's own.
    """

    page: StatePage | None = None
    views: StateViews
    config: StateConfig
    drafts = 0
    rehearsal: Rehearsal | None = None
    _warming_up = False

    def split(self, vllm_config: Any, local: LayerGeometry) -> None:
        """Read the options and lay out the page, if the plugin is asked for.

        local: this rank's share of the layer. Raises ValueError where layer and model differ.
        """
        options = parse(vllm_config.additional_config)
        if options is None:
            return
        refuse_what_failed()
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            raise ValueError("replayssm_quant runs on CUDA GPUs, and on CPUs by its references")
        model = vllm_config.model_config
        tp = vllm_config.parallel_config.tensor_parallel_size
        self.layer = layer_number(self.prefix, model.hf_config)
        known = read_geometry(model.hf_config).layers.get(self.layer)
        if known is None or (known.heads, known.rows, known.n) != (
            local.heads * tp,
            local.rows,
            local.n,
        ):
            raise ValueError(
                f"{self.prefix} is {local} on one of {tp} ranks, but the configuration says {known}"
            )
        self.geometry, self.act_dtype = local, model.dtype
        self.head_offset = get_tensor_model_parallel_rank() * local.heads
        scheduler = vllm_config.scheduler_config
        self.max_prefills = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self.max_rows = scheduler.max_num_seqs
        self.drafts = draft_tokens(vllm_config)
        self.configs = options.layer_configs(model.hf_config, str(model.model))
        self.config = self.configs[self.layer]
        self.page = self.make_page(self.config)

    def make_page(self, config: StateConfig) -> StatePage:
        """The page of this layer, or of a sister layer with another config."""
        conv_shape, conv_dtype = super().get_state_shape()[0], super().get_state_dtype()[0]
        return StatePage(self.geometry, config, conv_shape, conv_dtype, self.act_dtype, self.drafts)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return super().get_state_shape() if self.page is None else self.page.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        if self.page is None:
            return super().get_state_dtype()
        if self._warming_up:  # the prefill kernels see fp32 states
            return (self.page.conv_dtype, torch.float32)
        return self.page.dtypes

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.page is None or not isinstance(spec, MambaSpec):
            return spec
        # no state is exported from inside a prefill: that serves prefix caching; drafts are in the
        # ring, so that none has a state of its own
        return replace(
            spec,
            num_prefill_checkpoint_blocks=0,
            prefill_checkpoint_alignment=None,
            num_speculative_blocks=0,
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.page is not None:
            self.views = self.page.views(self.kv_cache[1])
            if self.rehearsal is not None:
                self.rehearsal.bound(self)

    def rehearse(self, rows: int) -> None:
        """Launch what steps of ``rows`` rows launch, on inputs that mean nothing.

        Shapes, dtypes and strides are those of a step; only where launches are not run.
        """
        raise NotImplementedError

    def reserve(self, device: torch.device) -> None:
        """Allocate once what the largest prefill needs, so that vLLM's profile run counts it.

        fp32 states after a prefill of every request at once, and two more while they are rotated.
        """
        g = self.geometry
        shape = (3, self.max_prefills, g.heads, g.rows, g.n)
        torch.empty(shape, dtype=torch.float32, device=device)

    def metadata(self) -> Any:
        """This layer's attention metadata; None in a profile run."""
        found = get_forward_context().attn_metadata
        return found.get(self.prefix) if isinstance(found, dict) else None
