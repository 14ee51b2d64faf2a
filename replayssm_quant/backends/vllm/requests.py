"""The random key of a request from the request itself, where vLLM's V2 model runner shows it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from ...formats.philox import request_key
from .cursors import request_identity
from .metadata import SplitGDNBuilder, SplitMamba2Builder


class SplitModelState(MambaHybridModelState):
    """Keeps the key of each request in the batch and hands it to the builders before each step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.request_keys = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        self.batch_keys = torch.zeros_like(self.request_keys)
        self._builder_seed: int | None = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        identity = request_identity(new_req_data.req_id, getattr(params, "seed", None))
        self.request_keys[req_index].fill_(request_key(self._seed(), identity))

    def _seed(self) -> int:
        """The seed of the options, which every layer's config carries."""
        if self._builder_seed is None:
            context = self.vllm_config.compilation_config.static_forward_context
            layers = (x for x in context.values() if getattr(x, "page", None) is not None)
            self._builder_seed = next(layers).config.seed
        return self._builder_seed

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        attn_groups = kwargs["attn_groups"] if "attn_groups" in kwargs else args[1]
        keys = self._batch_keys(input_batch)
        for group in (g for groups in attn_groups for g in groups):
            builder = group.get_metadata_builder(0)
            if isinstance(builder, SplitMamba2Builder | SplitGDNBuilder):
                builder.planner.request_keys = keys
        return super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)

    def _batch_keys(self, input_batch: Any) -> torch.Tensor:
        """Keys in batch order, int64 [rows with padding]; those of padding mean nothing."""
        count = input_batch.num_reqs
        rows = max(count, input_batch.num_reqs_after_padding)
        if self.batch_keys.shape[0] < rows:
            self.batch_keys = self.request_keys.new_zeros(rows)
        index = input_batch.idx_mapping[:count]
        torch.index_select(self.request_keys, 0, index, out=self.batch_keys[:count])
        return self.batch_keys[:rows]
