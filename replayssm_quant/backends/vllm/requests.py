"""The random key of a request from the request itself, where vLLM's V2 model runner shows it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from ...formats.philox import request_key
from .cursors import GroupRows, request_identity
from .metadata import SplitGDNBuilder, SplitMamba2Builder


class SplitModelState(MambaHybridModelState):
    """Keeps the key of each request in the batch and hands it to the builders before each step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.request_keys = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        self.batch_keys = torch.zeros_like(self.request_keys)
        self._builder_seed: int | None = None
        self.group_rows: Any = None

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
        places, planners = [], []
        for place, groups in enumerate(attn_groups):
            for group in groups:
                builder = group.get_metadata_builder(0)
                if isinstance(builder, SplitMamba2Builder | SplitGDNBuilder):
                    places.append(place)
                    planners.append(builder.planner)
        if planners:
            tables = [block_tables[place] for place in places] if self._alike(planners) else None
            self._plan(planners, tables, input_batch)
        try:
            return super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        finally:
            for planner in planners:
                planner.planned = None

    def _alike(self, planners: list[Any]) -> bool:
        """True if one plan of decode rows holds for all groups."""
        if self.device.type != "cuda" or planners[0].drafts:
            return False
        kinds = {(p.layer.config.buffer_len, p.layer.config.stagger) for p in planners}
        return len(kinds) == 1

    def _plan(self, planners: list[Any], tables: list[torch.Tensor] | None, batch: Any) -> None:
        """Plan the decode rows of all groups in one launch, if ``tables`` has theirs; else leave
        them to the builders. Either way they get the keys of the batch."""
        count = batch.num_reqs
        rows = max(count, batch.num_reqs_after_padding)
        if tables is not None and self.group_rows is None:
            capacity = planners[0].buffers.vectors["slots"].shape[0]
            self.group_rows = GroupRows(len(planners), capacity, self.device)
        if tables is None or not self.group_rows.holds(len(tables), rows):
            keys = self._batch_keys(batch)
            for planner in planners:
                planner.request_keys = keys
            return
        cursors, index = planners[0].slot_cursors(), batch.idx_mapping
        self.group_rows.plan(cursors, tables, batch.seq_lens, self.request_keys, index, count, rows)
        keys = self.group_rows.rows(0, rows).key
        for place, planner in enumerate(planners):
            planner.request_keys, planner.planned = keys, (self.group_rows, place)

    def _batch_keys(self, input_batch: Any) -> torch.Tensor:
        """Keys in batch order, int64 [rows with padding]; those of padding mean nothing."""
        count = input_batch.num_reqs
        rows = max(count, input_batch.num_reqs_after_padding)
        if self.batch_keys.shape[0] < rows:
            self.batch_keys = self.request_keys.new_zeros(rows)
        index = input_batch.idx_mapping[:count]
        torch.index_select(self.request_keys, 0, index, out=self.batch_keys[:count])
        return self.batch_keys[:rows]
