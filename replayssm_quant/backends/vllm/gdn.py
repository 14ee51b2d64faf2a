"""vLLM's Gated DeltaNet layer (Qwen3-Next, Qwen3.5) on a split state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from ... import ops
from ...kernels.gdn.reference import gates
from ...state.cache import PAD_SLOT, StepRows
from ...state.geometry import LayerGeometry
from .convolution import roll, update
from .drafts import Verify, shapes
from .layer import SplitLayer
from .metadata import SplitGDNBackend, SplitGDNMetadata
from .rehearsal import empty_rows


@PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")
class SplitQwenGatedDeltaNet(SplitLayer, stock.QwenGatedDeltaNetAttention):
    """``QwenGatedDeltaNetAttention`` whose recurrent state is a checkpoint, a copy and a ring.

    The custom op ``vllm::qwen_gdn_attention_core`` calls ``_forward_core`` for every batch, so
    decode rows take the split state also in a batch that holds prefills.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        tp = self.tp_size
        local = LayerGeometry(
            "gdn",
            self.num_v_heads // tp,
            self.head_v_dim,
            self.head_k_dim,
            self.num_k_heads // tp,
            self.conv_kernel_size,
        )
        self.split(get_current_vllm_config(), local)
        if self.page is not None:  # the op that leaves the norm to us
            self.enable_fused_gdn_spec_decode = False
        if self.page is not None and current_platform.is_cpu():
            self._forward_method = self.forward_cuda  # the op that calls _forward_core

    def get_attn_backend(self) -> Any:
        return super().get_attn_backend() if self.page is None else SplitGDNBackend

    def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
        self._warming_up = True
        try:
            super()._warmup_prefill_kernels(*args, **kwargs)
        finally:
            self._warming_up = False

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        md = self.metadata()
        if self.page is None:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        if md is None:
            self.reserve(mixed_qkv.device)
            if not current_platform.is_cpu():
                super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return None
        assert isinstance(md, SplitGDNMetadata)
        if self.drafts:
            return self._forward_drafts(md, mixed_qkv, b, a, core_attn_out)
        d, total = md.num_decode_tokens, md.num_actual_tokens
        if md.num_prefills == 0:
            d = total  # in a captured graph with its padding
        mixed_qkv, b, a, out = (t[:total] for t in (mixed_qkv, b, a, core_attn_out))
        prefill = _prefill_cpu if current_platform.is_cpu() else _prefill_gpu
        conv_decode, conv_prefill = _convolution(self, md, mixed_qkv, d)
        if total > d:
            prefill(self, md, conv_prefill, b[d:], a[d:], out[d:])
        if d > 0:
            assert md.decode_rows is not None
            self._step(md.decode_rows, conv_decode, b[:d], a[:d], out[:d])
        return None

    def _forward_drafts(
        self,
        md: SplitGDNMetadata,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """As ``_forward_core`` where decode rows verify drafts; prefills are apart from them."""
        total, d = md.num_actual_tokens, md.verify_tokens
        inputs = [t[:total] for t in (mixed_qkv, b, a)]
        if md.scattered:
            verify, prefill = md.spec_token_indx, md.non_spec_token_indx
            of_verify = [t.index_select(0, verify) for t in inputs]
            of_prefill = [t.index_select(0, prefill) for t in inputs]
        else:
            verify, prefill = slice(d), slice(d, total)
            of_verify, of_prefill = ([t[i] for t in inputs] for i in (verify, prefill))
        out = core_attn_out[:total]
        if md.num_prefills > 0:
            y = torch.empty_like(out[: total - d]) if md.scattered else out[d:]
            _prefill_beside_drafts(self, md, *of_prefill, y)
            if md.scattered:
                out[prefill] = y
        if md.verify is not None:
            y = self._verify(md.verify, *of_verify, None if md.scattered else out[:d])
            if md.scattered:
                out[verify] = y

    def _verify(
        self,
        step: Verify,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """One token or several a row, into ``out`` if given; returns [tokens, HV, V]."""
        return self._verify_step(step, _convolve_drafts(self, step, qkv), b, a, out)

    def _verify_step(
        self,
        step: Verify,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """``_verify`` behind the convolution."""
        qkv, b, a = (step.pack(t) for t in (qkv, b, a))
        where = {"layer": self.layer, "head_offset": self.head_offset}
        if qkv.is_cuda:  # norms and gates belong to the step's first kernel
            from ...kernels.gdn.verify import verify_packed

            place = None if out is None or step.gather is not None else step.pack(out)
            weights = (self.A_log, self.dt_bias)
            y = verify_packed(
                self.views, self.config, step.rows, qkv, a, b, *weights, out=place, **where
            )
            if place is not None:
                return out
        else:
            q, k, v = self.heads(qkv)
            g, beta = gates(a, b, self.A_log, self.dt_bias)
            y = ops.gdn_verify(self.views, self.config, step.rows, q, k, v, g, beta, **where)
        y = step.unpack(y)
        if out is not None:
            out[: y.shape[0]].copy_(y)
        return y

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k [..., HK, K], v [..., HV, V] of the convolution's output [..., channels]."""
        g = self.geometry
        keys, values = g.groups * g.n, g.heads * g.rows
        q, k, v = qkv.split([keys, keys, values], dim=-1)
        return (
            q.unflatten(-1, (g.groups, g.n)),
            k.unflatten(-1, (g.groups, g.n)),
            v.unflatten(-1, (g.heads, g.rows)),
        )

    def _step(
        self,
        rows: StepRows,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One token a row through the split state, behind the convolution."""
        where = {"layer": self.layer, "head_offset": self.head_offset}
        if qkv.is_cuda:  # norms and gates belong to the step's first kernel
            from ...kernels.gdn.triton_ops import decode_packed

            decode_packed(
                self.views,
                self.config,
                rows,
                qkv,
                a,
                b,
                self.A_log,
                self.dt_bias,
                out=out,
                **where,
            )
            return
        q, k, v = self.heads(qkv)
        g, beta = gates(a, b, self.A_log, self.dt_bias)
        out.copy_(ops.gdn_decode(self.views, self.config, rows, q, k, v, g, beta, **where))

    def rehearse(self, rows: int) -> None:
        g, device, dtype = self.geometry, self.views.ckpt.device, self.act_dtype
        channels, values = 2 * g.groups * g.n + g.heads * g.rows, g.heads * g.rows
        # Qwen3-Next gathers q, k and v; of the others they are a part of the projection, with z
        whole = channels if getattr(self, "gqa_interleaved_layout", False) else channels + values

        def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
            qkv = torch.empty(tokens, whole, dtype=dtype, device=device)[:, :channels]
            qkv = qkv.to(_conv_state(self).dtype).to(dtype)  # written over by the convolution
            b, a = (t.contiguous() for t in qkv.new_empty(tokens, 2 * g.heads).chunk(2, 1))
            return qkv, b, a, qkv.new_empty(tokens, g.heads, g.rows)

        if not self.drafts:
            self._step(empty_rows(rows, device), *inputs(rows))
        for step in shapes(rows, self.drafts, device) if self.drafts else ():
            self._verify_step(step, *inputs(rows * step.width))
        one = empty_rows(1, device)
        state = ops.gdn_load(self.views, self.config, one)
        ops.store_state(
            self.views, self.config, one, state, layer=self.layer, head_offset=self.head_offset
        )

    def before(self, md: SplitGDNMetadata, has_initial: torch.Tensor) -> torch.Tensor:
        """fp32 states [prefills, HV, V, K] that the prefill rows start from, rings folded in."""
        rows, g = md.prefill_rows, self.geometry
        assert rows is not None
        if not md.continues:
            shape = (rows.slots.shape[0], g.heads, g.rows, g.n)
            return torch.zeros(shape, dtype=torch.float32, device=rows.slots.device)
        loaded = ops.gdn_load(self.views, self.config, rows)
        return torch.where(has_initial[:, None, None, None], loaded, 0)

    def store(self, md: SplitGDNMetadata, state: torch.Tensor) -> None:
        """Store fp32 states [prefills, HV, V, K]."""
        rows = md.prefill_rows
        assert rows is not None
        ops.store_state(
            self.views, self.config, rows, state, layer=self.layer, head_offset=self.head_offset
        )


def _convolution(
    layer: SplitQwenGatedDeltaNet, md: SplitGDNMetadata, x: torch.Tensor, decode: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The causal convolution of decode rows and of prefill rows, its states updated."""
    if current_platform.is_cpu():
        return _convolution_cpu(layer, md, x, decode)
    state = layer.kv_cache[0]
    state = state if is_conv_state_dim_first() else state.transpose(-1, -2)
    weight = layer.conv1d.weight.flatten(1)
    bias, blocks = layer.conv1d.bias, md.non_spec_state_indices_tensor
    if md.num_prefills > 0:
        y = stock.causal_conv1d_fn(
            x.transpose(0, 1),
            weight,
            bias,
            activation=layer.activation,
            conv_states=state,
            has_initial_state=md.has_initial_state,
            cache_indices=blocks,
            query_start_loc=md.non_spec_query_start_loc,
            metadata=md,
        ).transpose(0, 1)
    else:
        y = stock.causal_conv1d_update(
            x,
            state,
            weight,
            bias,
            layer.activation,
            conv_state_indices=blocks[: x.shape[0]],
            validate_data=False,
        )
    return y[:decode], y[decode:]


def _conv_state(layer: SplitQwenGatedDeltaNet) -> torch.Tensor:
    """[slots, channels, columns], whichever way vLLM stores it."""
    state = layer.kv_cache[0]
    return state if is_conv_state_dim_first() else state.transpose(-1, -2)


def _conv_weight(layer: SplitQwenGatedDeltaNet) -> torch.Tensor:
    """[channels, width]; the CPU build packs its own and keeps this one beside it."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    return layer.conv1d.weight.flatten(1) if weight is None else weight


def _convolve_drafts(layer: SplitQwenGatedDeltaNet, step: Verify, x: torch.Tensor) -> torch.Tensor:
    """The causal convolution of rows that verify, its states updated."""
    state, weight = _conv_state(layer), _conv_weight(layer)
    slots, bias = step.rows.slots, layer.conv1d.bias
    if not x.is_cuda:
        return update(x, state, weight, bias, layer.activation, slots, step.shift, step.starts)
    return stock.causal_conv1d_update(
        x,
        state,
        weight,
        bias,
        layer.activation,
        conv_state_indices=slots,
        num_accepted_tokens=step.shift,
        query_start_loc=step.starts,
        max_query_len=1 + layer.drafts,
        null_block_id=PAD_SLOT,
    )


def _prefill_beside_drafts(
    layer: SplitQwenGatedDeltaNet,
    md: SplitGDNMetadata,
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The rows that prefill: their convolution, and the rule itself."""
    assert md.prefill_rows is not None and md.roll is not None
    state, weight = _conv_state(layer), _conv_weight(layer)
    if md.continues:
        roll(state, md.prefill_rows.slots, md.roll, weight.shape[1])
    y = stock.causal_conv1d_fn(
        x.transpose(0, 1),
        weight,
        layer.conv1d.bias,
        activation=layer.activation,
        conv_states=state,
        has_initial_state=md.prefill_has_initial_state,
        cache_indices=md.prefill_state_indices,
        query_start_loc=md.prefill_query_start_loc,
        metadata=md,
    ).transpose(0, 1)
    prefill = _prefill_cpu if current_platform.is_cpu() else _prefill_gpu
    prefill(layer, md, y, b, a, out)


def _prefill_gpu(
    layer: SplitQwenGatedDeltaNet,
    md: SplitGDNMetadata,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Prompt chunks by vLLM's chunked delta rule between fp32 states."""
    q, k, v, g, beta = stock.fused_post_conv_prep(
        conv_output=qkv,
        a=a,
        b=b,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        num_k_heads=layer.geometry.groups,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        apply_l2norm=True,
        output_g_exp=False,
    )
    q, k, v, g, beta = (t.unsqueeze(0) for t in (q, k, v, g, beta))
    y, after = layer.chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=layer.before(md, md.prefill_has_initial_state),
        output_final_state=True,
        cu_seqlens=md.prefill_query_start_loc,
        chunk_indices=md.chunk_indices,
        chunk_offsets=md.chunk_offsets,
        use_qk_l2norm_in_kernel=False,
        aiter_prefill_metadata=md.aiter_prefill_metadata,
    )
    out.copy_(y.squeeze(0))
    layer.store(md, after.float())


# The CPU build has its own kernels: weights packed at load time, states [HV, K, V].


def _convolution_cpu(
    layer: SplitQwenGatedDeltaNet, md: SplitGDNMetadata, x: torch.Tensor, decode: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as cpu

    state, blocks = _conv_state(layer), md.non_spec_state_indices_tensor
    # a clone also where there is one token, whose row is contiguous with any stride
    x = x.clone(memory_format=torch.contiguous_format)
    d, p = md.num_decodes, md.num_prefills
    how: dict[str, Any] = {"bias": layer.conv1d.bias}
    # vLLM chooses by the same question, and packs the weights while loading by it
    if torch.cpu._is_avx512_bf16_supported() or cpu.is_arm_bf16():
        how |= {"weight": layer.conv1d.weight, "is_weight_packed": True}
        how |= {"silu_activation": layer.activation == "silu"}
        decode_rows = partial(cpu._causal_conv1d_update_cpu, conv_states=state, **how)
        prefill_rows = partial(cpu._causal_conv1d_fwd_cpu, **how)
    else:
        how |= {"weight": layer.conv1d.weight.flatten(1), "activation": layer.activation}
        decode_rows = partial(cpu.causal_conv1d_update_cpu, conv_state=state, **how)
        prefill_rows = partial(cpu.causal_conv1d_torch, **how)
    y = x[:0]
    if d > 0:
        y = decode_rows(x=x[:decode], conv_state_indices=blocks[:d])
    if p == 0:
        return y, x[:0]
    z = prefill_rows(
        x=x[decode:].transpose(0, 1),
        conv_states=state,
        query_start_loc=md.non_spec_query_start_loc[d : d + p + 1] - decode,
        cache_indices=blocks[d : d + p],
        has_initial_state=md.has_initial_state[d : d + p],
    )
    return y, z.transpose(0, 1)


def _prefill_cpu(
    layer: SplitQwenGatedDeltaNet,
    md: SplitGDNMetadata,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As ``_prefill_gpu``, by the CPU build's kernels."""
    from vllm import _custom_ops as cpu_ops

    d, p = md.num_decodes, md.num_prefills
    q, k, v = layer.rearrange_mixed_qkv(qkv)
    g, beta = cpu_ops.fused_gdn_gating_cpu(
        A_log=layer.A_log, a=a.contiguous(), b=b.contiguous(), dt_bias=layer.dt_bias
    )
    state = layer.before(md, md.has_initial_state[d : d + p]).transpose(-1, -2).contiguous()
    y, _ = cpu_ops.chunk_gated_delta_rule_cpu(
        query=q,
        key=k,
        value=v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=md.non_spec_query_start_loc[d : d + p + 1] - md.num_decode_tokens,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.arange(p, dtype=torch.int32),
    )
    out.copy_(y.squeeze(0))
    layer.store(md, state.transpose(-1, -2).contiguous())
