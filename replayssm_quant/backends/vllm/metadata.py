"""Metadata builders: vLLM's own, plus the control rows of the split state.

A builder belongs to one KV-cache group, whose blocks are our slots. Rows are planned in ``build``,
once a step and outside captured graphs, into vectors at fixed addresses. All groups of a request
advance in lockstep, so the groups that vLLM updates by ``update_block_table`` take the first
group's rows and only exchange the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mamba2_attn import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
)

from ...state.cache import StepRows
from .cursors import RowBuffers, SlotCursors, move


@dataclass
class SplitMamba2Metadata(Mamba2AttentionMetadata):
    """decode_rows: one for each decode row, padding included. prefill_rows: one a prefill row."""

    decode_rows: StepRows | None = None
    prefill_rows: StepRows | None = None


@dataclass
class SplitGDNMetadata(GDNAttentionMetadata):
    """As ``SplitMamba2Metadata``; continues: some prefill row has earlier tokens."""

    decode_rows: StepRows | None = None
    prefill_rows: StepRows | None = None
    continues: bool = False


class RowPlanner:
    """Plans the rows of one KV-cache group.

    ``request_keys`` int64 [rows], if the model runner shows the requests (V2), is set anew before
    each build, in batch order.
    """

    request_keys: torch.Tensor | None = None

    def __init__(self, layer_names: list[str], vllm_config: Any, device: torch.device):
        layers = vllm_config.compilation_config.static_forward_context
        self.layer = layers[layer_names[0]]
        capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        capacity = max(vllm_config.scheduler_config.max_num_seqs, capture)
        self.buffers = RowBuffers(capacity, device)
        self.cursors: SlotCursors | None = None

    def _slots(self) -> SlotCursors:
        """The cursors, made anew when vLLM has made a new cache."""
        state, config = self.layer.kv_cache[1], self.layer.config
        if self.cursors is None or self.cursors.slots != state.shape[0]:
            self.cursors = SlotCursors(
                state.shape[0],
                config.buffer_len,
                stagger=config.stagger,
                seed=config.seed,
                device=state.device,
            )
        return self.cursors

    def _keys(self, start: int, count: int) -> torch.Tensor | None:
        if self.request_keys is None:
            return None
        return self.request_keys[start : start + count]

    def decode(self, blocks: torch.Tensor, seq_lens: torch.Tensor) -> StepRows:
        """Rows of the decode part, which comes first in a batch; blocks [rows]."""
        count = blocks.shape[0]
        rows = self.buffers.rows(count)
        self._slots().decode(rows, blocks, seq_lens[:count], self._keys(0, count))
        return rows

    def prefill(
        self, first: int, blocks: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor
    ) -> StepRows:
        """Rows of the prefill part, from batch row ``first`` on; starts [prefills + 1]."""
        count = blocks.shape[0]
        lens = seq_lens[first : first + count]
        return self._slots().prefill(blocks, lens, starts.diff(), self._keys(first, count))

    def moved(self, rows: StepRows | None, blocks: torch.Tensor | None) -> StepRows | None:
        """Decode rows of another group, in this group's blocks and buffers."""
        if rows is None or blocks is None:
            return None
        return move(rows, blocks, self.buffers.rows(blocks.shape[0]))


class SplitMamba2Builder(Mamba2AttentionMetadataBuilder):
    metadata_cls = SplitMamba2Metadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.planner = RowPlanner(layer_names, vllm_config, device)

    def build(self, *args: Any, **kwargs: Any) -> SplitMamba2Metadata:
        md = super().build(*args, **kwargs)
        decode_rows = prefill_rows = None
        if md.num_decodes > 0:
            decode_rows = self.planner.decode(md.state_indices_tensor_d[:, 0], md.seq_lens)
        if md.num_prefills > 0:
            prefill_rows = self.planner.prefill(
                md.num_reqs - md.num_prefills,
                md.state_indices_tensor_p,
                md.seq_lens,
                md.query_start_loc_p,
            )
        return replace(md, decode_rows=decode_rows, prefill_rows=prefill_rows)

    def update_block_table(
        self, metadata: SplitMamba2Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SplitMamba2Metadata:
        md = super().update_block_table(metadata, blk_table, slot_mapping)
        decode_rows = prefill_rows = None
        if metadata.decode_rows is not None:
            blocks = md.state_indices_tensor_d[:, 0]
            decode_rows = self.planner.moved(metadata.decode_rows, blocks)
        if metadata.prefill_rows is not None:
            prefill_rows = move(metadata.prefill_rows, md.state_indices_tensor_p)
        return replace(md, decode_rows=decode_rows, prefill_rows=prefill_rows)


class SplitMamba2Backend(Mamba2AttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[SplitMamba2Builder]:
        return SplitMamba2Builder


class SplitGDNBuilder(GDNAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM sets it for its own class alone; decode here reads nothing but what is staged a group
        self.supports_update_block_table = True
        self.planner = RowPlanner(layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any):
        m = common_attn_metadata
        base = super().build(common_prefix_len, m, *args, **kwargs)
        md = SplitGDNMetadata(**{f.name: getattr(base, f.name) for f in fields(base)})
        if md.num_decodes > 0:
            count = md.num_decodes
            if md.num_prefills == 0:  # with the padding of a captured graph, if it runs in one
                count = md.non_spec_state_indices_tensor.shape[0]
            md.decode_rows = self.planner.decode(
                md.non_spec_state_indices_tensor[:count], m.seq_lens
            )
        if md.num_prefills > 0:
            first, count = md.num_decodes, md.num_prefills
            lens = m.query_start_loc_cpu.diff()[first : first + count]
            md.continues = bool((m.seq_lens_cpu_upper_bound[first : first + count] > lens).any())
            md.prefill_rows = self.planner.prefill(
                first,
                md.prefill_state_indices[:count],
                m.seq_lens,
                md.prefill_query_start_loc[: count + 1],
            )
        return md

    def update_block_table(
        self, metadata: SplitGDNMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SplitGDNMetadata:
        md = super().update_block_table(metadata, blk_table, slot_mapping)
        decode_rows = prefill_rows = None
        if metadata.decode_rows is not None:
            count = metadata.decode_rows.slots.shape[0]
            blocks = md.non_spec_state_indices_tensor[:count]
            decode_rows = self.planner.moved(metadata.decode_rows, blocks)
        if metadata.prefill_rows is not None:
            count = metadata.prefill_rows.slots.shape[0]
            prefill_rows = move(metadata.prefill_rows, md.prefill_state_indices[:count])
        return replace(md, decode_rows=decode_rows, prefill_rows=prefill_rows)


class SplitGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[SplitGDNBuilder]:
        return SplitGDNBuilder
