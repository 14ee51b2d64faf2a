"""vLLM's decode kernels on the benchmark's inputs: pools, tuning, and one callable a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...state.geometry import LayerGeometry
from .registry import (
    BUFFER_LEN,
    Inputs,
    Op,
    make_step,
    make_weights,
    phase_rows,
    phase_steps,
    random_state,
    sets_needed,
    slot_sets,
)
from .vllm_baselines import Baselines

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NATIVE_CONFIGS = ((4, 4), (8, 1), (8, 4), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8))
"""(BLOCK_SIZE_M, num_warps) tried for ``selective_state_update``; (4, 4) is its default."""
REPLAY_CONFIGS = (
    (16, 1, 64, 128, 2),
    (16, 2, 64, 128, 2),
    (32, 1, 64, 64, 2),
    (32, 2, 64, 128, 2),
    (64, 4, 64, 64, 2),
)
"""Configurations tried for upstream ReplaySSM, its default first (``override_replay``)."""

Launch = Callable[[], object]


@dataclass
class _Pool:
    """State of shuffled slots, larger than the L2 cache, and the inputs of a few steps."""

    op: Op
    geometry: LayerGeometry
    batch: int
    storage: str
    device: torch.device
    seed: int = 0
    sets: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        g = self.geometry
        width = DTYPES[self.storage].itemsize
        self.state_bytes = width * g.elements
        self.sets = self.sets or sets_needed(self.batch * self.state_bytes, self.device)
        count = self.batch * self.sets + 1
        self.state = torch.empty(
            count, g.heads, g.rows, g.n, dtype=DTYPES[self.storage], device=self.device
        )
        chunk = max(1, (256 << 20) // (4 * g.elements))
        for start in range(0, count, chunk):
            part = self.state[start : start + chunk]
            part.copy_(random_state(g, len(part), self.seed + start, self.device))
        self.slots = [
            s.to(torch.int32) for s in slot_sets(self.batch, self.sets, self.seed, self.device)
        ]
        self.weights = make_weights(g, self.seed, self.device)
        self.inputs = [
            make_step(g, self.batch, self.weights, self.seed + 1 + i, self.device, self.dtype)
            for i in range(min(self.sets, 4))
        ]


def _tied(t: torch.Tensor, *tail: int) -> torch.Tensor:
    """A per-head value as vLLM hands it over: expanded over head_dim (and d_state), stride 0."""
    return t.reshape(*t.shape, *(1 for _ in tail)).expand(*t.shape, *tail)


class NativeMamba2:
    """``selective_state_update``: the whole state is read and written every step."""

    configs = NATIVE_CONFIGS

    def __init__(self, vllm: Baselines, pool: _Pool):
        self.vllm, self.pool = vllm, pool
        self.out = torch.empty_like(pool.inputs[0].x)

    def pinned(self, config: tuple[int, ...]) -> contextlib.AbstractContextManager[object]:
        return self.vllm.override_native((config[0], config[1]))

    def step(self, slots: torch.Tensor, i: Inputs) -> torch.Tensor:
        g = self.pool.geometry
        self.vllm.selective_state_update(
            self.pool.state,
            i.x,
            _tied(i.dt, g.rows),
            _tied(i.A, g.rows, g.n),
            i.B,
            i.C,
            _tied(i.D, g.rows),
            _tied(i.dt_bias, g.rows),
            dt_softplus=True,
            state_batch_indices=slots,
            out=self.out,
        )
        return self.out

    def launches(self, phase: str) -> list[tuple[Launch, float]]:
        """(callable, bytes it moves) of each step of a pass; the phase makes no difference."""
        p, nbytes = self.pool, 2.0 * self.pool.batch * self.pool.state_bytes
        out: list[tuple[Launch, float]] = []
        for k in range(max(4, p.sets)):
            slots, inputs = p.slots[k % p.sets], p.inputs[k % len(p.inputs)]
            out.append((lambda s=slots, i=inputs: self.step(s, i), nbytes))  # type: ignore[misc]
        return out


class ReplayMamba2:
    """Upstream ReplaySSM (``..._replayssm_output_only``): one state, written at a flush."""

    configs = REPLAY_CONFIGS

    def __init__(self, vllm: Baselines, pool: _Pool, length: int = BUFFER_LEN):
        self.vllm, self.pool, self.length = vllm, pool, length
        g, count = pool.geometry, pool.state.shape[0]
        gen = torch.Generator(device=pool.device).manual_seed(pool.seed + 7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device=pool.device).to(pool.dtype)

        self.x_cache = normal(count, g.heads, length, g.rows)
        self.B_cache = normal(count, g.groups, length, g.n)
        self.dt_cache = 1e-3 + 0.1 * torch.rand(
            count, g.heads, length, generator=gen, device=pool.device
        )
        self.bc = torch.empty(pool.batch, g.groups, length, device=pool.device)
        self.out = torch.empty_like(pool.inputs[0].x)

    def pinned(self, config: tuple[int, ...]) -> contextlib.AbstractContextManager[object]:
        return self.vllm.override_replay(config)

    def step(
        self, slots: torch.Tensor, i: Inputs, valid: torch.Tensor, flush: torch.Tensor
    ) -> torch.Tensor:
        g = self.pool.geometry
        self.vllm.replay_output_only(
            self.pool.state,
            i.x,
            _tied(i.dt, g.rows),
            _tied(i.A, g.rows, g.n),
            i.B,
            i.C,
            _tied(i.D, g.rows),
            _tied(i.dt_bias, g.rows),
            dt_softplus=True,
            x_cache=self.x_cache,
            dt_cache=self.dt_cache,
            B_cache=self.B_cache,
            bc_pre=self.bc,
            write_pos=valid,
            is_flush=flush,
            max_cache_len=self.length,
            state_batch_indices=slots,
            out=self.out,
        )
        return self.out

    def launches(self, phase: str) -> list[tuple[Launch, float]]:
        """(callable, bytes it moves) of each step of a pass through the phase."""
        p = self.pool
        row = sum(
            t[0].numel() * t.element_size() / self.length
            for t in (self.x_cache, self.B_cache, self.dt_cache)
        )
        out: list[tuple[Launch, float]] = []
        for k in range(phase_steps(phase, self.length, p.sets)):
            valid, flush = phase_rows(phase, k, p.batch, self.length)
            nbytes = sum(
                row * (v if f else v + 1) + p.state_bytes * (2 if f else 1)
                for v, f in zip(valid, flush, strict=True)
            )
            v = torch.tensor(valid, dtype=torch.int32, device=p.device)
            f = torch.tensor(flush, dtype=torch.int8, device=p.device)
            slots, inputs = p.slots[k % p.sets], p.inputs[k % len(p.inputs)]
            out.append(
                (lambda s=slots, i=inputs, v=v, f=f: self.step(s, i, v, f), nbytes)  # type: ignore[misc]
            )
        return out


class NativeGdn:
    """``fused_recurrent_gated_delta_rule_packed_decode``; it has one configuration."""

    configs = ((),)

    def __init__(self, vllm: Baselines, pool: _Pool):
        self.vllm, self.pool = vllm, pool
        self.out = torch.empty_like(pool.inputs[0].v.contiguous())[:, None]

    def pinned(self, config: tuple[int, ...]) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def step(self, slots: torch.Tensor, i: Inputs) -> torch.Tensor:
        self.vllm.gdn_packed_decode(
            mixed_qkv=i.mixed_qkv,
            a=i.a,
            b=i.b,
            A_log=i.A_log,
            dt_bias=i.dt_bias,
            scale=self.pool.geometry.n**-0.5,
            initial_state=self.pool.state,
            out=self.out,
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )
        return self.out[:, 0]

    launches = NativeMamba2.launches


Baseline = NativeMamba2 | ReplayMamba2 | NativeGdn


def make(
    name: str,
    vllm: Baselines,
    op: Op,
    geometry: LayerGeometry,
    batch: int,
    device: torch.device,
    sets: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Baseline:
    """The baseline ``native-<dtype>`` or ``replay-<dtype>`` of an operation."""
    kind, storage = name.split("-")
    pool = _Pool(op, geometry, batch, storage, device, sets=sets, dtype=dtype)
    if op.kind == "gdn":
        return NativeGdn(vllm, pool)
    return NativeMamba2(vllm, pool) if kind == "native" else ReplayMamba2(vllm, pool)


def names(op: Op) -> list[str]:
    """Every baseline of an operation; upstream has no replayed Gated DeltaNet."""
    found = [f"native-{d}" for d in op.natives]
    return found + ([f"replay-{d}" for d in op.natives] if op.kind == "mamba2" else [])
