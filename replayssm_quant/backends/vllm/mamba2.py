"""vLLM's Mamba-2 layer on a split state."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

from ... import ops
from ...state.cache import PAD_SLOT, StepRows
from ...state.geometry import LayerGeometry
from .convolution import roll, update
from .drafts import Verify, shapes
from .layer import SplitLayer
from .metadata import SplitMamba2Backend, SplitMamba2Metadata
from .rehearsal import empty_rows


@PluggableLayer.register_oot(name="MambaMixer2")
class SplitMambaMixer2(SplitLayer, MambaMixer2):
    """``MambaMixer2`` whose SSM state is a checkpoint, an output copy and a ring.

    The custom op ``vllm::mamba_mixer2`` calls ``conv_ssm_forward``, so torch.compile and CUDA
    graphs see the same op as without the plugin.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        tp = self.tp_size
        local = LayerGeometry(
            "mamba2",
            self.num_heads // tp,
            self.head_dim,
            self.ssm_state_size,
            self.n_groups // tp,
            self.conv_kernel_size,
        )
        self.split(get_current_vllm_config(), local)

    def get_attn_backend(self) -> Any:
        return super().get_attn_backend() if self.page is None else SplitMamba2Backend

    def _warmup_ssd_kernels(self, projected_states: torch.Tensor) -> None:
        self._warming_up = True
        try:
            super()._warmup_ssd_kernels(projected_states)
        finally:
            self._warming_up = False

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        md = self.metadata()
        if self.page is None or md is None:
            if self.page is not None:
                self.reserve(projected_states.device)
            return super().conv_ssm_forward(projected_states, output)
        assert isinstance(md, SplitMamba2Metadata)
        xbc, dt = self._projections(projected_states)
        d, total = md.num_decode_tokens, md.num_decode_tokens + md.num_prefill_tokens
        if total > d:
            self._prefill(md, xbc[d:total], dt[d:total], output[d:total])
        if d > 0 and md.verify is not None:
            self._verify(md.verify, xbc[:d], dt[:d], output[:d])
        elif d > 0:
            self._decode(md, xbc[:d], dt[:d], output[:d])
        return None

    def _projections(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the convolution takes [t, channels], and dt [t, H], of the projected tokens."""
        sizes = [self.tped_conv_size, self.tped_dt_size]
        return torch.split(projected[..., self.tped_intermediate_size :], sizes, dim=-1)

    @property
    def _conv_state(self) -> torch.Tensor:
        """[slots, channels, width - 1], whichever way vLLM stores it."""
        state = self.kv_cache[0]
        return state if is_conv_state_dim_first() else state.transpose(-1, -2)

    def _heads(self, xbc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [t, H, P], B and C [t, G, N] of the convolution's output [t, channels]."""
        x, B, C = self.split_hidden_states_B_C_fn(xbc)
        g = self.geometry
        return (
            x.unflatten(-1, (g.heads, g.rows)),
            B.unflatten(-1, (g.groups, g.n)),
            C.unflatten(-1, (g.groups, g.n)),
        )

    def _prefill(
        self, md: SplitMamba2Metadata, xbc: torch.Tensor, dt: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Prompt chunks: vLLM's chunked scan between fp32 states, which are then stored split."""
        rows = md.prefill_rows
        assert rows is not None
        if md.roll is not None and md.prep_initial_states:
            roll(self._conv_state, rows.slots, md.roll, self.conv_kernel_size)
        conv = causal_conv1d_fn(
            xbc.transpose(0, 1),
            self.conv_weights,
            self.conv1d.bias,
            activation=self.activation,
            conv_states=self._conv_state,
            has_initial_state=md.has_initial_states_p,
            cache_indices=md.state_indices_tensor_p,
            metadata=md,
            query_start_loc=md.query_start_loc_p,
        ).transpose(0, 1)[: xbc.shape[0]]
        x, B, C = self._heads(conv)
        before = None
        if md.prep_initial_states:
            # a decoded token may have gone into the ring since the last chunk
            loaded = ops.mamba2_load(self.views, self.config, rows, self.A)
            before = torch.where(md.has_initial_states_p[:, None, None, None], loaded, 0)
        after = mamba_chunk_scan_combined_varlen(
            x,
            dt,
            self.A,
            B,
            C,
            chunk_size=md.chunk_size,
            D=self.D,
            z=None,
            dt_bias=self.dt_bias,
            seq_idx=md.seq_idx_p,
            cu_seqlens=md.query_start_loc_p,
            cu_chunk_seqlens=md.cu_chunk_seqlen_p,
            last_chunk_indices=md.last_chunk_indices_p,
            initial_states=before,
            dt_softplus=True,
            dt_limit=(0.0, float("inf")),
            out=out.unflatten(-1, (self.geometry.heads, self.geometry.rows)),
            state_dtype=torch.float32,
        )
        del before
        ops.store_state(
            self.views, self.config, rows, after, layer=self.layer, head_offset=self.head_offset
        )

    @property
    def _step_options(self) -> dict[str, Any]:
        return {
            "D": self.D,
            "dt_bias": self.dt_bias,
            "dt_softplus": True,
            "layer": self.layer,
            "head_offset": self.head_offset,
        }

    def _decode(
        self, md: SplitMamba2Metadata, xbc: torch.Tensor, dt: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One token a row through the split state."""
        blocks, rows = md.state_indices_tensor_d, md.decode_rows
        assert blocks is not None and rows is not None
        conv = causal_conv1d_update(
            xbc,
            self._conv_state,
            self.conv_weights,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=blocks,
            max_query_len=blocks.size(-1),
        )
        self._step(rows, conv, dt, out)

    def _step(
        self, rows: StepRows, conv: torch.Tensor, dt: torch.Tensor, out: torch.Tensor
    ) -> None:
        """``_decode`` behind the convolution."""
        x, B, C = self._heads(conv)
        inputs = (self.views, self.config, rows, x, dt, self.A, B, C)
        more = self._step_options
        if x.is_cuda:  # writes where the layer wants it
            from ...kernels.mamba2.triton_ops import decode_step

            decode_step(*inputs, out=out.unflatten(-1, x.shape[1:]), **more)
            return
        out.copy_(ops.mamba2_decode(*inputs, **more).flatten(1))

    def _verify(self, step: Verify, xbc: torch.Tensor, dt: torch.Tensor, out: torch.Tensor) -> None:
        """One token or several a row, of which the engine may forget the last ones."""
        self._verify_step(step, self._convolve_drafts(step, xbc), dt, out)

    def _verify_step(
        self, step: Verify, conv: torch.Tensor, dt: torch.Tensor, out: torch.Tensor
    ) -> None:
        """``_verify`` behind the convolution."""
        x, B, C = (step.pack(t) for t in self._heads(conv))
        inputs = (self.views, self.config, step.rows, x, step.pack(dt), self.A, B, C)
        if x.is_cuda and step.gather is None:  # writes where the layer wants it
            from ...kernels.mamba2.verify import verify_step

            heads = out.unflatten(-1, x.shape[2:])
            verify_step(*inputs, out=step.pack(heads), **self._step_options)
            return
        y = step.unpack(ops.mamba2_verify(*inputs, **self._step_options)).flatten(1)
        out[: y.shape[0]].copy_(y)

    def _convolve_drafts(self, step: Verify, xbc: torch.Tensor) -> torch.Tensor:
        if not xbc.is_cuda:
            return update(
                xbc,
                self._conv_state,
                self.conv_weights,
                self.conv1d.bias,
                self.activation,
                step.rows.slots,
                step.shift,
                step.starts,
            )
        return causal_conv1d_update(
            xbc,
            self._conv_state,
            self.conv_weights,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=step.rows.slots,
            num_accepted_tokens=step.shift,
            query_start_loc=step.starts,
            max_query_len=1 + self.drafts,
            null_block_id=PAD_SLOT,
        )

    def rehearse(self, rows: int) -> None:
        g, device = self.geometry, self.views.ckpt.device
        of_one = self.tped_intermediate_size + self.tped_conv_size + self.tped_dt_size

        def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            projected = torch.empty(tokens, of_one, dtype=self.act_dtype, device=device)
            xbc, dt = self._projections(projected)
            # the convolution writes over its input, where that has the dtype of its state
            conv = xbc.to(self._conv_state.dtype).to(xbc.dtype)
            return conv, dt, projected.new_empty(tokens, g.heads * g.rows)

        if not self.drafts:
            self._step(empty_rows(rows, device), *inputs(rows))
        for step in shapes(rows, self.drafts, device) if self.drafts else ():
            self._verify_step(step, *inputs(rows * step.width))
        one = empty_rows(1, device)
        state = ops.mamba2_load(self.views, self.config, one, self.A)
        ops.store_state(
            self.views, self.config, one, state, layer=self.layer, head_offset=self.head_offset
        )
