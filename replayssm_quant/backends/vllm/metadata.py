"""Metadata builders: vLLM's own, plus the control rows of the split state.

A builder belongs to one KV-cache group, whose blocks are our slots. Rows are planned in ``build``,
once a step and outside captured graphs, into vectors at fixed addresses. All groups of a request
advance in lockstep, so the groups that vLLM updates by ``update_block_table`` take the first
group's rows and only exchange the slots.

With speculative decoding every decode row is a row that verifies, of one token or of some: what a
step has to fold or to forget follows from the tokens that vLLM counts, not from which of its rows
had drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from ...state.cache import StepRows
from .cursors import GroupRows, RowBuffers, SlotCursors, move
from .drafts import DraftCursors, Verify, VerifyBuffers, move_verify, ragged


@dataclass
class SplitMamba2Metadata(Mamba2AttentionMetadata):
    """decode_rows: one for each decode row, padding included. prefill_rows: one a prefill row.

    With drafts ``verify`` takes the place of decode_rows; roll int64 [prefills]: by how many
    columns the convolution's states have to roll before the prefill.
    """

    decode_rows: StepRows | None = None
    prefill_rows: StepRows | None = None
    verify: Verify | None = None
    roll: torch.Tensor | None = None


@dataclass
class SplitGDNMetadata(GDNAttentionMetadata):
    """As ``SplitMamba2Metadata``; continues: some prefill row has earlier tokens.

    verify_tokens: number of tokens of rows that verify. They come first in the batch, unless
    spec_token_indx and non_spec_token_indx say where (``scattered``).
    """

    decode_rows: StepRows | None = None
    prefill_rows: StepRows | None = None
    continues: bool = False
    verify: Verify | None = None
    roll: torch.Tensor | None = None
    verify_tokens: int = 0
    scattered: bool = False


class RowPlanner:
    """Plans the rows of one KV-cache group.

    ``request_keys`` int64 [rows], if the model runner shows the requests (V2), is set anew before
    each build, in batch order. ``planned``: rows of all groups and this one's place there, if the
    runner has planned the step's decode rows already. ``drafts``: draft tokens that a step verifies
    at most.
    """

    request_keys: torch.Tensor | None = None
    planned: tuple[GroupRows, int] | None = None

    def __init__(self, layer_names: list[str], vllm_config: Any, device: torch.device):
        layers = vllm_config.compilation_config.static_forward_context
        self.layer = layers[layer_names[0]]
        capture = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        capacity = max(vllm_config.scheduler_config.max_num_seqs, capture)
        self.drafts = self.layer.drafts
        if self.drafts:
            self.verify_buffers = VerifyBuffers(capacity, device)
        else:
            self.buffers = RowBuffers(capacity, device)
        self.cursors: SlotCursors | DraftCursors | None = None

    def slot_cursors(self) -> Any:
        """The cursors (``DraftCursors`` with drafts), made anew when vLLM has made a new cache."""
        state, config = self.layer.kv_cache[1], self.layer.config
        if self.cursors is None or self.cursors.slots != state.shape[0]:
            sizes = (state.shape[0], config.buffer_len)
            how = {"stagger": config.stagger, "seed": config.seed, "device": state.device}
            if self.drafts:
                self.cursors = DraftCursors(*sizes, self.drafts, **how)
            else:
                self.cursors = SlotCursors(*sizes, **how)
        return self.cursors

    def _keys(self, rows: slice | torch.Tensor) -> torch.Tensor | None:
        """Keys of the rows, given by their place in the batch."""
        return None if self.request_keys is None else self.request_keys[rows]

    def decode(self, blocks: torch.Tensor, seq_lens: torch.Tensor) -> StepRows:
        """Rows of the decode part, which comes first in a batch; blocks [rows]."""
        count = blocks.shape[0]
        if self.planned is not None:
            return self.planned[0].rows(self.planned[1], count)
        rows = self.buffers.rows(count)
        self.slot_cursors().decode(rows, blocks, seq_lens[:count], self._keys(slice(count)))
        return rows

    def verify(
        self,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        tokens: int,
        where: torch.Tensor | None = None,
    ) -> Verify:
        """Rows that verify; blocks and seq_lens [rows], starts [rows + 1].

        counts: lengths of the rows on the CPU. tokens: as many as the layers get, with the padding
        of a captured graph. where: the rows' places in the batch, by default the first ones.
        """
        rows = blocks.shape[0]
        # one of two widths: every other would be kernels of its own, compiled as it comes
        width = 1 + self.drafts if int(counts.max()) > 1 else 1
        step = self.verify_buffers.step(rows, width)
        keys = self._keys(slice(rows) if where is None else where)
        self.slot_cursors().verify(step, blocks, seq_lens[:rows], starts, keys)
        if tokens != rows * width:
            step.gather, step.scatter = ragged(step.starts, counts, width)
        return step

    def prefill(
        self,
        rows: slice | torch.Tensor,
        blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
    ) -> tuple[StepRows, torch.Tensor | None]:
        """Rows of the prefill part, at the given places in the batch; starts [prefills + 1].

        With drafts also the roll of the convolution's states.
        """
        lens, keys = seq_lens[rows], self._keys(rows)
        if self.drafts:
            return self.slot_cursors().prefill(blocks, lens, starts.diff(), keys)
        return self.slot_cursors().prefill(blocks, lens, starts.diff(), keys), None

    def moved(self, rows: StepRows | None, blocks: torch.Tensor | None) -> StepRows | None:
        """Decode rows of another group, in this group's blocks and buffers."""
        if rows is None or blocks is None:
            return None
        if self.planned is not None:
            return self.planned[0].rows(self.planned[1], blocks.shape[0])
        return move(rows, blocks, self.buffers.rows(blocks.shape[0]))

    def moved_verify(self, step: Verify, blocks: torch.Tensor) -> Verify:
        """The same for rows that verify."""
        out = self.verify_buffers.step(step.rows.slots.shape[0], step.width)
        return move_verify(step, blocks, out)


class SplitMamba2Builder(Mamba2AttentionMetadataBuilder):
    metadata_cls = SplitMamba2Metadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM clears it for drafts; decode here reads nothing but what is staged a group
        self.supports_update_block_table = True
        self.planner = RowPlanner(layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> SplitMamba2Metadata:
        m = common_attn_metadata
        md = super().build(common_prefix_len, m, *args, **kwargs)
        if md.num_decodes > 0 and self.planner.drafts:
            md.verify = self.planner.verify(
                md.state_indices_tensor_d[:, 0],
                md.seq_lens,
                m.query_start_loc[: md.num_decodes + 1],
                m.query_start_loc_cpu[: md.num_decodes + 1].diff(),
                md.num_decode_tokens,
            )
        elif md.num_decodes > 0:
            md.decode_rows = self.planner.decode(md.state_indices_tensor_d[:, 0], md.seq_lens)
        if md.num_prefills > 0:
            first = md.num_reqs - md.num_prefills
            md.prefill_rows, md.roll = self.planner.prefill(
                slice(first, md.num_reqs),
                md.state_indices_tensor_p,
                md.seq_lens,
                md.query_start_loc_p,
            )
        return md

    def update_block_table(
        self, metadata: SplitMamba2Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SplitMamba2Metadata:
        md = super().update_block_table(metadata, blk_table, slot_mapping)  # a copy
        if metadata.decode_rows is not None:
            blocks = md.state_indices_tensor_d[:, 0]
            md.decode_rows = self.planner.moved(metadata.decode_rows, blocks)
        if metadata.verify is not None:
            blocks = md.state_indices_tensor_d[:, 0]
            md.verify = self.planner.moved_verify(metadata.verify, blocks)
        if metadata.prefill_rows is not None:
            md.prefill_rows = move(metadata.prefill_rows, md.state_indices_tensor_p)
        return md


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
        if self.planner.drafts:
            self._plan_verify(md, m)
        elif md.num_decodes > 0:
            count = md.num_decodes
            if md.num_prefills == 0:  # with the padding of a captured graph, if it runs in one
                count = md.non_spec_state_indices_tensor.shape[0]
            md.decode_rows = self.planner.decode(
                md.non_spec_state_indices_tensor[:count], m.seq_lens
            )
        if md.num_prefills > 0:
            count = md.num_prefills
            rows: slice | torch.Tensor = slice(md.num_decodes, md.num_decodes + count)
            if md.spec_sequence_masks_cpu is not None:
                rows = (~md.spec_sequence_masks_cpu).nonzero()[:count, 0]
            lens = m.query_start_loc_cpu.diff()[rows]
            md.continues = bool((m.seq_lens_cpu_upper_bound[rows] > lens).any())
            md.prefill_rows, md.roll = self.planner.prefill(
                rows if isinstance(rows, slice) else rows.to(self.device, non_blocking=True),
                md.prefill_state_indices[:count],
                m.seq_lens,
                md.prefill_query_start_loc[: count + 1],
            )
        return md

    def _plan_verify(self, md: SplitGDNMetadata, m: Any) -> None:
        """Rows with drafts and decode rows, of which vLLM has one kind or the other in a step."""
        counts, mask = m.query_start_loc_cpu.diff(), md.spec_sequence_masks_cpu
        if mask is None:
            count, tokens = md.num_decodes, md.num_decode_tokens
            if count == 0:
                return
            if md.num_prefills == 0:
                count, tokens = md.non_spec_state_indices_tensor.shape[0], md.num_actual_tokens
            else:  # the rows of vLLM's own plan of the convolution are those of the prefills alone
                starts_cpu = m.query_start_loc_cpu[count : count + md.num_prefills + 1]
                md.nums_dict, md.batch_ptr, md.token_chunk_offset_ptr = (
                    compute_causal_conv1d_metadata(
                        starts_cpu - tokens, device=m.query_start_loc.device
                    )
                )
            blocks, starts = md.non_spec_state_indices_tensor[:count], md.non_spec_query_start_loc
            seq_lens, where, counts = m.seq_lens, None, counts[:count]
        else:
            blocks, starts = md.spec_state_indices_tensor[:, 0], md.spec_query_start_loc
            count, tokens = blocks.shape[0], md.num_spec_decode_tokens
            seq_lens, where = m.seq_lens, None
            if md.num_prefills == 0:
                tokens, counts = md.num_actual_tokens, counts[:count]
            else:
                md.scattered = True
                places = mask.nonzero()[:, 0]
                counts, where = counts[places], places.to(self.device, non_blocking=True)
                seq_lens = m.seq_lens[where]
        md.verify_tokens = tokens
        md.verify = self.planner.verify(
            blocks, seq_lens, starts[: count + 1], counts, tokens, where
        )

    def update_block_table(
        self, metadata: SplitGDNMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SplitGDNMetadata:
        md = super().update_block_table(metadata, blk_table, slot_mapping)  # a copy
        if metadata.decode_rows is not None:
            count = metadata.decode_rows.slots.shape[0]
            blocks = md.non_spec_state_indices_tensor[:count]
            md.decode_rows = self.planner.moved(metadata.decode_rows, blocks)
        if metadata.verify is not None:
            count = metadata.verify.rows.slots.shape[0]
            spec = metadata.spec_sequence_masks_cpu is not None
            blocks = (
                md.spec_state_indices_tensor[:, 0] if spec else md.non_spec_state_indices_tensor
            )
            md.verify = self.planner.moved_verify(metadata.verify, blocks[:count])
        if metadata.prefill_rows is not None:
            count = metadata.prefill_rows.slots.shape[0]
            md.prefill_rows = move(metadata.prefill_rows, md.prefill_state_indices[:count])
        return md


class SplitGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[SplitGDNBuilder]:
        return SplitGDNBuilder
