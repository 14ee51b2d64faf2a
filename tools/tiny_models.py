"""Configurations, initialisation and fast training scans of the tiny hybrids and the larger pair.

Attention comes first in every model, so that it cannot look anything up for the state: it sees bare
embeddings. Initialisation: fan-in standard deviation, output projections halved, slow decays;
transformers' default (0.02, fast decays) did not learn recall at this width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

BOS, EOS, PAD, VOCAB = 256, 257, 258, 260
CHUNK = 64  # of the training scans
TOKENS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "vocab_size": VOCAB}

# name -> (family, layer pattern, hidden, key heads, value heads, groups, intermediate, rate)
SIZES = {
    "tiny-nemotron-h": ("nemotron_h", "*-M-M-", 256, 8, 8, 2, 512, 2e-3),
    "tiny-qwen3.5": ("qwen3_5_text", "*MM", 256, 2, 2, 1, 384, 2e-3),
    "large-nemotron-h": ("nemotron_h", "*-M-M-M-M-", 512, 16, 16, 2, 2560, 8e-4),
    "large-qwen3.5": ("qwen3_5_text", "*MMMM", 512, 4, 4, 1, 2048, 8e-4),
}


def nemotron_config(
    pattern: str, hidden: int, heads: int, groups: int, inter: int
) -> NemotronHConfig:
    """NemotronH: Mamba-2 heads of 64 x 128 state, attention heads of 64, dt never clamped."""
    return NemotronHConfig(
        **TOKENS,
        architectures=["NemotronHForCausalLM"],
        hidden_size=hidden,
        hybrid_override_pattern=pattern,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=inter,
        mamba_num_heads=heads,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=groups,
        expand=max(1, heads * 64 // hidden),
        chunk_size=128,
        max_position_embeddings=8192,
        use_mamba_kernels=False,
        tie_word_embeddings=False,
        time_step_min=1e-9,  # the initialiser needs > 0; ``shippable`` writes 0.0
    )


def qwen_config(
    pattern: str, hidden: int, heads: int, vheads: int, inter: int
) -> Qwen3_5TextConfig:
    """Qwen3.5 text: Gated DeltaNet heads with K = V = 128, gated attention heads of 64."""
    kinds = {"*": "full_attention", "M": "linear_attention"}
    return Qwen3_5TextConfig(
        **TOKENS,
        architectures=["Qwen3_5ForCausalLM"],
        hidden_size=hidden,
        num_hidden_layers=len(pattern),
        layer_types=[kinds[c] for c in pattern],
        intermediate_size=inter,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=vheads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        mamba_ssm_dtype="float32",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )


def build(name: str) -> nn.Module:
    """A freshly initialised model of ``SIZES[name]``, fp32, on the CPU."""
    family, pattern, hidden, heads, vheads, groups, inter, _ = SIZES[name]
    if family == "nemotron_h":
        model = NemotronHForCausalLM(nemotron_config(pattern, hidden, heads, groups, inter))
    else:
        model = Qwen3_5ForCausalLM(qwen_config(pattern, hidden, heads, vheads, inter))
    if name.startswith("large"):
        model.config.max_position_embeddings = 65536  # scored far beyond the trained length
    outputs = ("o_proj", "out_proj", "down_proj")
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "embed" in key:
                p.normal_(0, 0.5)
            elif p.ndim == 2:
                scale = 0.5 if any(o in key for o in outputs) else 1.0
                p.normal_(0, scale * p.shape[1] ** -0.5)
            if family == "nemotron_h":
                if key.endswith("A_log"):
                    p.uniform_(0.01, 0.3).log_()
                elif key.endswith("dt_bias"):
                    dt = torch.exp(torch.empty_like(p).uniform_(math.log(0.05), math.log(0.5)))
                    p.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse softplus
                elif key.endswith(".D"):
                    p.fill_(0.2)
            else:
                if key.endswith("A_log"):
                    p.uniform_(0.02, 1.0).log_()
                elif key.endswith("dt_bias"):
                    p.fill_(-2.0)
    return model


def shippable(model: nn.Module) -> nn.Module:
    """Last touches before ``save_pretrained``: prefill must not clamp dt, as decode does not."""
    if model.config.model_type == "nemotron_h":
        model.config.time_step_min = 0.0
    return model.eval()


def mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """transformers' ``mamba2_chunk_scan`` as a few einsums (its own broadcasts, in 5.17)."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        b, s, h, p = hidden_states.shape
        g, n, q = B.shape[2], B.shape[3], CHUNK
        x, B, C, dt = hidden_states.float(), B.float(), C.float(), dt.float()
        if dt_bias is not None:
            dt = dt + dt_bias.float()
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        pad, r = -s % q, h // g
        c = (s + pad) // q
        xd = F.pad(x * dt[..., None], (0, 0, 0, 0, 0, pad)).view(b, c, q, g, r, p)
        cum = F.pad(dt * A.float(), (0, 0, 0, pad)).view(b, c, q, g, r).cumsum(2)
        B = F.pad(B, (0, 0, 0, 0, 0, pad)).view(b, c, q, g, n)
        C = F.pad(C, (0, 0, 0, 0, 0, pad)).view(b, c, q, g, n)
        rows = cum.permute(0, 1, 3, 4, 2)
        later = torch.ones(q, q, dtype=torch.bool, device=x.device).triu(1)
        decay = (rows[..., :, None] - rows[..., None, :]).masked_fill(later, float("-inf")).exp()
        scores = torch.einsum("bclgn,bcsgn->bcgls", C, B)[:, :, :, None] * decay
        Y = torch.einsum("bcgrls,bcsgrp->bclgrp", scores, xd)
        added = torch.einsum(
            "bclgn,bclgrp->bcgrpn", B, xd * (cum[:, :, -1:] - cum).exp()[..., None]
        )
        S = torch.zeros_like(added[:, 0])
        if initial_states is not None:
            S = initial_states.float().view(b, g, r, p, n)
        kept, before = cum[:, :, -1].exp()[..., None, None], []
        for i in range(c):
            before.append(S)
            S = S * kept[:, i] + added[:, i]
        states = torch.stack(before, 1)
        Y = Y + torch.einsum("bclgn,bcgrpn->bclgrp", C, states) * cum.exp()[..., None]
        Y = Y.reshape(b, c * q, h, p)[:, :s]
        if D is not None:
            Y = Y + D.float()[..., None] * x
        return (Y, S.reshape(b, h, p, n)) if return_final_states else Y.contiguous()


def gdn_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """transformers' ``torch_chunk_gated_delta_rule`` with one triangular solve per chunk."""
    dtype = query.dtype
    with torch.autocast(query.device.type, enabled=False):
        q, k, v, beta, g = (
            t.transpose(1, 2).float().contiguous() for t in (query, key, value, beta, g)
        )
        if use_qk_l2norm_in_kernel:
            q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6)
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        q = q * q.shape[-1] ** -0.5
        b, h, s, K = k.shape
        V, L = v.shape[-1], CHUNK
        pad = -s % L
        c = (s + pad) // L
        q, k, v = (F.pad(t, (0, 0, 0, pad)).view(b, h, c, L, -1) for t in (q, k, v))
        beta, g = (F.pad(t, (0, pad)).view(b, h, c, L) for t in (beta, g))
        cum = g.cumsum(-1)
        later = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
        decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(later, float("-inf")).exp()
        kb = k * beta[..., None]
        lower = (kb @ k.transpose(-1, -2) * decay).tril(-1) + torch.eye(L, device=q.device)
        right = torch.cat([v * beta[..., None], kb * cum.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        U, W = solved.split([V, K], -1)
        scores = q @ k.transpose(-1, -2) * decay
        qe, ke = q * cum.exp()[..., None], k * (cum[..., -1:] - cum).exp()[..., None]
        kept = cum[..., -1].exp()[..., None, None]
        S = torch.zeros(b, h, K, V, device=q.device)
        if initial_state is not None:
            S = initial_state.float()
        out = []
        for i in range(c):
            new = U[:, :, i] - W[:, :, i] @ S
            out.append(qe[:, :, i] @ S + scores[:, :, i] @ new)
            S = S * kept[:, :, i] + ke[:, :, i].transpose(-1, -2) @ new
        Y = torch.stack(out, 2).reshape(b, h, c * L, V)[:, :, :s]
        return Y.transpose(1, 2).to(dtype), (S if output_final_state else None)


def use_fast_scans() -> None:
    """Replace the prefill functions of both families in this process."""
    modeling_nemotron_h.mamba2_chunk_scan = mamba2_scan
    modeling_qwen3_5.torch_chunk_gated_delta_rule = gdn_scan
