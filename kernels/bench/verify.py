"""Verify steps of speculative decoding: gate, then time beside vLLM's own speculative kernels.

    python -m replayssm_quant.kernels.bench --op mamba2_verify --tokens 4,5,8

A step verifies T tokens a row; the rows are out of step with each other and keep ``kept`` tokens a
step, so that they flush as often as such requests would. vLLM keeps a state for every token of a
step: it reads one and writes T. Rows have the columns of the other benchmarks, and ``tokens``,
``kept``. Bytes are those of state and ring.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import ops
from ...state.cache import PAD_SLOT, VerifyRows, read_checkpoint
from ...state.layout import StateLayout, StateViews
from ..gdn import verify_reference as gdn_exact
from ..mamba2 import verify_reference as mamba2_exact
from . import run, vllm_baselines
from .baselines import NATIVE_CONFIGS, Launch, _Pool, _tied
from .registry import (
    BUFFER_LEN,
    DESIGNS,
    PHASES,
    Inputs,
    Op,
    Problem,
    generator,
    make_step,
    make_weights,
    sets_needed,
    slot_sets,
)
from .registry import OPS as DECODE

TOKENS = (4, 5, 8)
_DESIGNS = ("nvfp4+fp16-sr", "P4+8-sr-rot", "P8+4-sr-rot", "e4m3-sr", "fp16-sr", "fp32")
OPS: dict[str, Op] = {
    name.replace("_decode", "_verify"): dataclasses.replace(
        op, name=name.replace("_decode", "_verify"), designs=_DESIGNS
    )
    for name, op in DECODE.items()
}
STATE_BOUND = 1e-2
"""Relative RMS of a checkpoint that fp32 sums may round the other way here and there: one step of
an 8-bit code in a hundredth of the elements, and less for wider ones."""


def kept_tokens(tokens: int) -> int:
    """Tokens that a request keeps of a step: drafts are right half the time, roughly."""
    return (tokens + 1) // 2


def cursor(phase: str, step: int, row: int, kept: int, length: int) -> tuple[int, bool]:
    """(committed inputs, flush) of a row at a step; rows and steps advance by ``kept``."""
    cycle = math.ceil(length / kept)  # steps from flush to flush; the flushing one starts anew
    if phase == "flush":
        return cycle * kept, True
    at = (row + step) % cycle
    if phase == "readout":
        return at * kept, False
    return (cycle * kept, True) if at == 0 else (at * kept, False)


@dataclass
class Step:
    """One launch: its rows, its inputs [b, T, ...], and the bytes it must move."""

    rows: VerifyRows
    inputs: Inputs
    nbytes: float


@dataclass
class VerifyProblem(Problem):
    """A pool whose rows verify ``tokens`` tokens; see ``registry.Problem``."""

    tokens: int = 5

    def __post_init__(self) -> None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        b, t = self.batch, self.tokens
        self.layout = StateLayout(self.geometry, self.config, names[self.dtype], t - 1)
        self.kept = kept_tokens(t)
        per_step = b * sum(self.layout.verify_bytes(self.kept))
        self.sets = self.sets or sets_needed(per_step, self.device)
        self.slots = slot_sets(b, self.sets, self.seed, self.device)
        count = b * self.sets + 1
        self.pages = torch.zeros(
            count, self.layout.page_bytes, dtype=torch.uint8, device=self.device
        )
        self.views = self.layout.views(self.pages)
        self.weights = make_weights(self.geometry, self.seed, self.device)
        self.inputs = [
            tokens_of(self.geometry, b, t, self.weights, self.seed + 1 + i, self.device, self.dtype)
            for i in range(min(self.sets, 4))
        ]
        self.key = torch.randint(
            -(2**63),
            2**63 - 1,
            (count,),
            generator=generator(self.seed, self.device),
            device=self.device,
        )
        self._fill(count)

    def verify_steps(self, phase: str) -> list[Step]:
        """Every launch of one timed pass."""
        length, b = self.config.buffer_len, self.batch
        cycle = math.ceil(length / self.kept)
        layout, out = self.layout, []
        g, c = layout.geometry, layout.config
        readout = c.readout.readout_bytes(g.heads, g.rows, g.n)
        folded = 2 * layout.checkpoint_bytes + layout.copy_bytes
        for i in range(cycle * max(1, math.ceil(self.sets / cycle))):
            both = [cursor(phase, i, row, self.kept, length) for row in range(b)]
            valid = torch.tensor([v for v, _ in both], dtype=torch.int32, device=self.device)
            flush = torch.tensor([f for _, f in both], device=self.device)
            slots = self.slots[i % self.sets]
            count = torch.full_like(valid, self.tokens)
            folding = torch.where(flush, slots, PAD_SLOT)
            key = self.key[slots]
            rows = VerifyRows(slots, valid, flush, count, valid + 1000, key, None, folding)
            ring = sum(v + self.tokens for v, _ in both) * layout.ring_row_bytes
            nbytes = b * readout + sum(f for _, f in both) * folded + ring
            out.append(Step(rows, self.inputs[i % len(self.inputs)], nbytes))
        return out

    def verify(self, step: Step, impl: str | None = None, launch: Any = None) -> torch.Tensor:
        """One launch of our kernels (``impl`` as in ``ops``); updates the pool.

        launch: a LaunchConfig of the family's verify step, under which Triton's kernels run.
        """
        gdn, i = self.op.kind == "gdn", step.inputs
        call: Callable[..., torch.Tensor] = ops.gdn_verify_packed if gdn else ops.mamba2_verify
        how: dict[str, Any] = {"layer": self.layer, "impl": impl}
        if launch is not None:
            kernels = importlib.import_module(f"..{self.op.kind}.verify", __package__)
            call = kernels.verify_packed if gdn else kernels.verify_step
            how = {"layer": self.layer, "launch": launch}
        if gdn:
            packed = (i.mixed_qkv, i.a, i.b, i.A_log, i.dt_bias)
            return call(self.views, self.config, step.rows, *packed, **how)
        return call(
            self.views, self.config, step.rows, i.x, i.dt, i.A, i.B, i.C,
            D=i.D, dt_bias=i.dt_bias, dt_softplus=True, **how,
        )  # fmt: skip

    def exact(self, views: StateViews, rows: VerifyRows, inputs: Inputs) -> torch.Tensor:
        """y of the float64 reference over the bytes of ``views``."""
        i, wide = inputs, {"layer": self.layer, "compute": torch.float64}
        if self.op.kind == "gdn":
            qkv = (i.q.double(), i.k.double(), i.v.double())
            return gdn_exact.verify_step(views, self.config, rows, *qkv, i.g, i.beta, **wide)
        B, C = i.B.double(), i.C.double()
        return mamba2_exact.verify_step(
            views, self.config, rows, i.x.double(), i.dt.double(), i.A, B, C,
            D=i.D, dt_bias=i.dt_bias, dt_softplus=True, **wide,
        )  # fmt: skip

    def exact_fold(self, views: StateViews, rows: VerifyRows) -> None:
        wide = {"layer": self.layer, "compute": torch.float64}
        if self.op.kind == "gdn":
            gdn_exact.fold_committed(views, self.config, rows, **wide)
        else:
            mamba2_exact.fold_committed(views, self.config, rows, self.weights["A"], **wide)


def tokens_of(
    geometry: Any,
    batch: int,
    tokens: int,
    weights: dict[str, torch.Tensor],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    """Random inputs [b, T, ...] of one step."""
    made = make_step(geometry, batch * tokens, weights, seed, device, dtype)
    return Inputs({k: v.unflatten(0, (batch, tokens)) for k, v in made.step.items()}, weights)


def gate(problem: VerifyProblem, impl: str | None = None) -> run.GateResult:
    """Run a step of every phase and compare a few rows with the float64 reference.

    Rows that flush read the copy that the kernel made, in both. Raises ``run.Red``.
    """
    result = run.GateResult()
    for phase in PHASES:
        steps = problem.verify_steps(phase)
        result = result.worst(_gate_step(problem, steps[len(steps) // 2], phase, impl))
    return result


def _gate_step(problem: VerifyProblem, step: Step, phase: str, impl: str | None) -> run.GateResult:
    batch, config = problem.batch, problem.config
    flushing = step.rows.flush.nonzero()[:1, 0].tolist()
    rows = torch.tensor(sorted({0, (batch - 1) // 2, batch - 1, *flushing}), device=problem.device)
    taken = step.rows.take(rows)
    before = problem.pages[taken.slots].clone()
    local = dataclasses.replace(
        taken,
        slots=torch.arange(len(rows), device=problem.device, dtype=taken.slots.dtype),
        fold_slots=None,
    )
    inputs = Inputs({k: v[rows] for k, v in step.inputs.step.items()}, step.inputs.weights)
    got = problem.verify(step, impl)[rows]
    folded = problem.layout.views(before.clone())
    problem.exact_fold(folded, local)
    read = problem.layout.views(before)
    for name, view in read.tensors().items():
        if not name.startswith("ring"):
            view.copy_(getattr(problem.views, name)[taken.slots])
    after = dataclasses.replace(
        local, valid=local.base, flush=torch.zeros_like(local.flush), fold_slots=None
    )
    want = problem.exact(read, after, inputs)
    result = run.GateResult(output=run.relative_rms(got, want))
    where = f"{problem.op.name}, {config.label}, batch {batch}, T {problem.tokens}, {phase}"
    if result.output > run.OUTPUT_BOUND[problem.dtype]:
        raise run.Red(f"{where}: y differs from float64 by {result.output:.2e} (relative RMS)")
    f = taken.flush.nonzero(as_tuple=True)[0]
    if f.numel():
        ours = read_checkpoint(problem.views, config, taken.slots[f])
        result.state = run.relative_rms(ours, read_checkpoint(folded, config, local.slots[f]))
        result.flips = run._flips(problem.views, taken.slots, folded, f)
        bound = STATE_BOUND if config.update.rounds else run.FP32_BOUND
        if result.state > bound or result.flips > run.FLIP_BOUND:
            raise run.Red(
                f"{where}: the checkpoint differs by {result.state:.2e}, {result.flips:.2%} of "
                "the codes"
            )
    for name, ring in problem.views.tensors().items():
        if name.startswith("ring"):
            for t in range(problem.tokens):
                at = (after.valid + t).long()
                ours, theirs = ring[taken.slots, at], getattr(read, name)[local.slots, at]
                if not torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-30):
                    raise run.Red(f"{where}: {name} of token {t} is not what came in")
    return result


# --- vLLM -----------------------------------------------------------------------------------------

_GATING = f"{vllm_baselines._FLA}.fused_sigmoid_gating"


def load_gdn_spec(path: Path | str | None) -> Callable[..., Any]:
    """vLLM's ``fused_sigmoid_gating_delta_rule_update`` from its wheel, a folder or None.

    Raises ValueError where it is not found.
    """
    if path is None:
        return importlib.import_module(_GATING).fused_sigmoid_gating_delta_rule_update
    root, name = Path(path).resolve(), _GATING.replace(".", "/") + ".py"
    if root.is_file():
        import tempfile

        target = Path(tempfile.mkdtemp(prefix="vllm_ops_"))  # Triton reads the source later
        with zipfile.ZipFile(root) as archive:
            archive.extract(name, target)
        root = target
    if not (root / name).is_file():
        raise ValueError(f"{path} has no {name}; give vLLM's wheel or the folder that holds it")
    with vllm_baselines._borrowed_modules(root):
        return importlib.import_module(_GATING).fused_sigmoid_gating_delta_rule_update


class NativeVerify:
    """vLLM's own step: the state after the last accepted token in, one state a token out."""

    def __init__(
        self,
        vllm: vllm_baselines.Baselines,
        update: Callable[..., Any] | None,
        op: Op,
        geometry: Any,
        batch: int,
        tokens: int,
        storage: str,
        device: torch.device,
        sets: int = 0,
    ):
        self.vllm, self.update, self.tokens, self.kind = vllm, update, tokens, op.kind
        self.pool = _Pool(op, geometry, batch * tokens, storage, device, sets=sets)
        p = self.pool
        self.batch, self.configs = batch, NATIVE_CONFIGS if op.kind == "mamba2" else ((),)
        self.inputs = [
            make_step(geometry, batch * tokens, p.weights, 1 + i, device, p.dtype)
            for i in range(min(p.sets, 4))
        ]
        self.out = torch.empty(
            batch * tokens, geometry.heads, geometry.rows, dtype=p.dtype, device=device
        )
        kept = kept_tokens(tokens)
        self.accepted = torch.full((batch,), kept, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        self.nbytes = float((1 + tokens) * batch * p.state_bytes)

    def pinned(self, config: tuple[int, ...]) -> contextlib.AbstractContextManager[object]:
        if self.kind == "gdn":
            return contextlib.nullcontext()
        return self.vllm.override_native((config[0], config[1]))

    def step(self, slots: torch.Tensor, i: Inputs) -> torch.Tensor:
        """y [b * T, H, R]."""
        g, slots = self.pool.geometry, slots.view(self.batch, self.tokens)
        common = {"num_accepted_tokens": self.accepted, "cu_seqlens": self.starts}
        if self.kind == "mamba2":
            self.vllm.selective_state_update(
                self.pool.state, i.x, _tied(i.dt, g.rows), _tied(i.A, g.rows, g.n), i.B, i.C,
                _tied(i.D, g.rows), _tied(i.dt_bias, g.rows), dt_softplus=True,
                state_batch_indices=slots, dst_state_batch_indices=slots, out=self.out, **common,
            )  # fmt: skip
            return self.out
        assert self.update is not None
        y, _ = self.update(
            A_log=i.A_log, a=i.a, b=i.b, dt_bias=i.dt_bias, q=i.q[None], k=i.k[None], v=i.v[None],
            initial_state=self.pool.state, inplace_final_state=True, ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True, **common,
        )  # fmt: skip
        return y[0]

    def launches(self, phase: str) -> list[tuple[Launch, float]]:
        """(callable, bytes it moves) of each step of a pass; the phase makes no difference."""
        p, out = self.pool, []
        for k in range(max(4, p.sets)):
            slots, inputs = p.slots[k % p.sets], self.inputs[k % len(self.inputs)]
            out.append((lambda s=slots, i=inputs: self.step(s, i), self.nbytes))
        return out  # type: ignore[return-value]


# --- upstream ReplaySSM ---------------------------------------------------------------------------

UPSTREAM_WINDOW = 16
"""Committed inputs that upstream's ring keeps; it folds them early where a step might not fit."""


def load_upstream(text: str) -> dict[str, Callable[..., Any]]:
    """FlashInfer's ``checkpointing_ssu`` by type of its state, from ``fp32=FILE,fp16=FILE``.

    FILE is the module that FlashInfer builds for a geometry and T (``checkpointing_ssu_*.so`` in
    its cache). Raises ValueError where it is not there.
    """
    found = {}
    for part in text.split(","):
        storage, _, file = part.partition("=")
        if storage not in ("fp32", "fp16") or not Path(file).is_file():
            raise ValueError(f"'{part}': give fp32=FILE or fp16=FILE, modules FlashInfer built")
        module = importlib.import_module("tvm_ffi").load_module(file)
        found[storage] = module["checkpointing_ssu"]
    return found


class UpstreamVerify:
    """vLLM's step with ReplaySSM and drafts, by FlashInfer: one state read a step, and written by
    the rows whose ring is full.

    The ring keeps ``UPSTREAM_WINDOW`` committed inputs and T new ones; a row whose committed inputs
    leave no room for T more folds them. Configurations: (two kernels or one, parts of a head).
    """

    configs = ((1, 1), (0, 1), (0, 2))

    def __init__(
        self,
        function: Callable[..., Any],
        op: Op,
        geometry: Any,
        batch: int,
        tokens: int,
        storage: str,
        device: torch.device,
        sets: int = 0,
    ):
        self.function, self.tokens, self.batch = function, tokens, batch
        self.pool = p = _Pool(op, geometry, batch, storage, device, sets=sets)
        g, ring = geometry, UPSTREAM_WINDOW + tokens
        self.ring = ring
        draw = generator(7, device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(p.dtype)

        count = p.state.shape[0]
        self.x_ring = normal(count, g.heads, ring, g.rows)
        self.B_ring = normal(count, g.groups, ring, g.n)
        dt = normal(count, g.heads, ring).float() * 0.3
        bias = p.weights["dt_bias"][None, :, None]
        self.dt_ring = torch.nn.functional.softplus(dt + bias).contiguous()
        self.inputs = [
            tokens_of(g, batch, tokens, p.weights, 1 + i, device, p.dtype)
            for i in range(min(p.sets, 4))
        ]
        self.out = torch.empty(batch, tokens, g.heads, g.rows, dtype=p.dtype, device=device)
        self.scratch = (
            torch.empty(batch, g.heads, 32, 8, dtype=p.dtype, device=device),
            torch.empty(batch, g.heads, 16, device=device),
            torch.empty(batch, g.heads, 32, 8, dtype=p.dtype, device=device),
        )
        kept = kept_tokens(tokens)
        self.cycle = list(range(kept, UPSTREAM_WINDOW - tokens + kept + 1, kept))
        if self.cycle[-1] <= UPSTREAM_WINDOW - tokens:
            self.cycle.append(self.cycle[-1] + kept)
        self.config = self.configs[0]
        self.keep: list[torch.Tensor] = []

    @contextlib.contextmanager
    def pinned(self, config: tuple[int, ...]) -> Iterator[None]:
        before, self.config = self.config, (config[0], config[1])
        try:
            yield
        finally:
            self.config = before

    def step(self, slots: torch.Tensor, i: Inputs, start: torch.Tensor, before: torch.Tensor):
        """y [b, T, H, P]; start, before int32 [slots]: where a slot's ring starts, and how many
        committed inputs it holds."""
        g, p = self.pool.geometry, self.pool
        scratch = self.scratch if self.config[0] else (None, None, None)
        self.function(
            p.state, i.x, _tied(i.dt, g.rows), _tied(i.A, g.rows, g.n), i.B, i.C, self.out,
            self.x_ring, self.B_ring, self.dt_ring, start, before,
            _tied(i.D, g.rows), None, _tied(i.dt_bias, g.rows), True, slots, -1, None, None,
            self.config[1], None, *scratch, 0, 0, 0,
        )  # fmt: skip
        return self.out

    def check(self) -> float:
        """Relative RMS of y of a row from the recurrence in float64."""
        p, i, device = self.pool, self.inputs[0], self.out.device
        count, g = p.state.shape[0], p.geometry
        start = torch.full((count,), 3, dtype=torch.int32, device=device)
        before = torch.full((count,), 5, dtype=torch.int32, device=device)
        slot = int(p.slots[0][0])
        at = (3 + torch.arange(5, device=device)) % self.ring
        state = p.state[slot].double()
        x, dt = self.x_ring[slot][:, at].double(), self.dt_ring[slot][:, at].double()
        B = self.B_ring[slot][:, at].double().repeat_interleave(g.heads // g.groups, 0)
        x = torch.cat([x, i.x[0].double().transpose(0, 1)], 1)
        new = torch.nn.functional.softplus(i.dt[0].double() + i.dt_bias.double())
        dt = torch.cat([dt, new.T], 1)
        per = g.heads // g.groups
        B = torch.cat([B, i.B[0].double().transpose(0, 1).repeat_interleave(per, 0)], 1)
        C = i.C[0].double().transpose(0, 1).repeat_interleave(per, 0)
        want = []
        for t in range(x.shape[1]):
            decay = torch.exp(dt[:, t] * i.A.double())[:, None, None]
            state = state * decay + (dt[:, t, None] * x[:, t])[:, :, None] * B[:, t, None, :]
            if t >= 5:
                y = (state * C[:, t - 5, None, :]).sum(-1)
                want.append(y + i.D.double()[:, None] * x[:, t])
        got = self.step(p.slots[0], i, start, before)[0]
        return run.relative_rms(got, torch.stack(want))

    def launches(self, phase: str) -> list[tuple[Launch, float]]:
        """(callable, bytes it moves) of each step of a pass, rows out of step."""
        p, out, steps = self.pool, [], len(self.cycle)
        entry = (self.x_ring[0].numel() + self.B_ring[0].numel()) // self.ring * 2
        entry += self.dt_ring[0].numel() // self.ring * 4
        rows = torch.arange(self.batch)
        for k in range(steps * math.ceil(max(4, p.sets) / steps)):
            slots, inputs = p.slots[k % p.sets], self.inputs[k % len(self.inputs)]
            held = torch.tensor(self.cycle)[(rows + k) % steps]
            before = torch.zeros(p.state.shape[0], dtype=torch.int32, device=p.device)
            before[slots.long()] = held.to(p.device, torch.int32)
            start = torch.full_like(before, 7 * k % self.ring)
            self.keep += [before, start]
            folds = int((held > UPSTREAM_WINDOW - self.tokens).sum())
            moved = p.state_bytes * (self.batch + folds)
            moved += entry * (int(held.sum()) + self.tokens * self.batch)
            out.append(
                (lambda s=slots, i=inputs, a=start, b=before: self.step(s, i, a, b), float(moved))
            )
        return out  # type: ignore[return-value]


# --- rows -----------------------------------------------------------------------------------------


@dataclass
class Settings:
    """What a run covers. seconds: time spent on one group of alternating passes."""

    op: Op
    geometries: list[str]
    batches: list[int]
    designs: list[str]
    phases: list[str]
    tokens: list[int]
    seconds: float = 0.4
    least: int = 8


def measure_point(
    s: Settings,
    geometry_name: str,
    batch: int,
    tokens: int,
    vllm: tuple[vllm_baselines.Baselines, Callable[..., Any] | None] | None,
    copy: float,
    device: torch.device,
    common: dict[str, Any],
    upstream: dict[str, Callable[..., Any]] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Gate, then time every design and phase, and vLLM's steps, at one batch and T."""
    op, geometry = s.op, s.op.geometry(geometry_name)
    passes: dict[tuple[str, str], run.Pass] = {}
    gates: dict[str, run.GateResult] = {}
    notes: dict[str, Any] = {}
    keep: list[object] = []  # graphs hold no reference to the tensors they write
    wrong: list[str] = []
    for design in s.designs:
        problem = VerifyProblem(op, geometry, DESIGNS[design], batch, device=device, tokens=tokens)
        try:
            gates[design] = gate(problem)
        except run.Red as red:
            wrong.append(f"{geometry_name}, {design}: {red}")
            print(f"RED {wrong[-1]}; it is not timed", flush=True)
            continue
        keep.append(problem)
        for phase in s.phases:
            steps = problem.verify_steps(phase)
            passes[design, phase] = run.Pass(
                [(lambda p=problem, x=x: p.verify(x), x.nbytes) for x in steps]  # type: ignore[misc]
            )
    if vllm is not None:
        for storage in op.natives:
            baseline = NativeVerify(*vllm, op, geometry, batch, tokens, storage, device)
            keep.append(baseline)
            name = f"native-{storage}"
            config, passes[name, "mix"] = run.tuned(baseline, "mix")  # type: ignore[arg-type]
            notes[name] = list(config)
    for storage, function in (upstream or {}).items():
        name, label = f"flashinfer-{storage}", f"{geometry_name}, batch {batch}, T {tokens}"
        try:
            replay = UpstreamVerify(function, op, geometry, batch, tokens, storage, device)
            error = replay.check()
        except Exception as problem:  # a module is built for one geometry and T
            print(f"{name} left out of {label}: {str(problem)[:160]}", flush=True)
            continue
        if error > run.OUTPUT_BOUND[torch.bfloat16]:
            print(f"{name} left out of {label}: y is off by {error:.1e}", flush=True)
            continue
        keep.append(replay)
        config, passes[name, "mix"] = run.tuned(replay, "mix")  # type: ignore[arg-type]
        notes[name] = list(config)
    times: dict[tuple[str, str], float] = {}
    for phase in dict.fromkeys((*s.phases, "mix")):
        group = {n: p for (n, ph), p in passes.items() if ph == phase}
        if group:
            for name, value in run.interleave(group, s.seconds, s.least).items():
                times[name, phase] = value
    out = []
    for (name, phase), time_us in sorted(times.items()):
        p = passes[name, phase]
        row = {
            "op": op.name,
            "geometry": geometry_name,
            "batch": batch,
            "tokens": tokens,
            "kept": kept_tokens(tokens),
            "design": name if name in DESIGNS else f"vllm-{name}",
            "phase": phase,
            "time_us": round(time_us, 3),
            "gbps": round(p.gbps(time_us), 1),
            "copy_fraction": round(p.gbps(time_us) / copy, 4),
            "ratio_native_fp32": run._ratio(times.get(("native-fp32", "mix")), time_us),
            "ratio_native_fp16": run._ratio(times.get((f"native-{op.natives[1]}", "mix")), time_us),
            "ratio_upstream_replay_fp32": run._ratio(
                times.get(("flashinfer-fp32", "mix")), time_us
            ),
            "native_16bit": op.natives[1],
            "buffer_len": BUFFER_LEN,
            "copy_gbps": round(copy, 1),
        }
        if name in notes:
            row["launch"] = notes[name]
        if name in gates:
            row["output_error"] = float(f"{gates[name].output:.3g}")
            row["code_flips"] = float(f"{gates[name].flips:.3g}")
        out.append({**row, **common})
    return out, wrong


def measure(
    s: Settings,
    vllm_path: str | None,
    out: Path,
    device: torch.device,
    seconds: float = math.inf,
    upstream: dict[str, Callable[..., Any]] | None = None,
) -> tuple[Path, list[str]]:
    """Measure everything in ``s`` within a time limit: the result file, and what was wrong."""
    stop = time.monotonic() + seconds
    vllm = None
    if vllm_path is not None:
        update = load_gdn_spec(vllm_path) if s.op.kind == "gdn" else None
        vllm = (vllm_baselines.load(vllm_path), update)
    common = run.provenance(None if vllm is None else vllm[0].version)
    copy = run.copy_gbps(device)
    path = out / f"{s.op.name}-{run.gpu_slug(common['gpu'])}-{common['date']}.json"
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for geometry in s.geometries:
        for batch in s.batches:
            for tokens in s.tokens:
                if time.monotonic() > stop:
                    print(f"left out, no time: {geometry}, batch {batch}, T {tokens}", flush=True)
                    continue
                found, red = measure_point(
                    s, geometry, batch, tokens, vllm, copy, device, common, upstream
                )
                rows += found
                wrong += red
                run.write_json(path, rows)
                for row in found:
                    print(f"T {row['tokens']}  {run._line(row)}", flush=True)
                torch.cuda.empty_cache()
    return path, wrong


def check_only(s: Settings, device: torch.device, impl: str | None = None) -> bool:
    """Gate every geometry, batch, T and design; prints one line each. True if all are right."""
    good = True
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for geometry in s.geometries:
        for batch in s.batches:
            for tokens in s.tokens:
                for design in s.designs:
                    label = f"{geometry} batch {batch} T {tokens} {design}"
                    problem = VerifyProblem(
                        s.op, s.op.geometry(geometry), DESIGNS[design], batch,
                        device=device, dtype=dtype, sets=1, tokens=tokens,
                    )  # fmt: skip
                    try:
                        r = gate(problem, impl)
                    except run.Red as red:
                        good = False
                        print(f"RED   {label}: {red}", flush=True)
                        continue
                    print(
                        f"green {label}: y {r.output:.1e}, codes {r.flips:.1e}, state "
                        f"{r.state:.1e}",
                        flush=True,
                    )
    return good


# --- report ---------------------------------------------------------------------------------------

TARGET = (256, 5, "ratio_native_fp32", 3.0)
"""Batch, T, column and least value of the best split design."""

_HEAD = """
## Verify steps: T tokens a row

One step of speculative decoding that verifies T tokens a row, rows out of step with each other and
keeping `kept` of them; flushes of committed inputs are in the mix, so one row in six flushes at
T = 5. vLLM's own step (`selective_state_update` or `fused_sigmoid_gating_delta_rule_update` with
`num_accepted_tokens`) reads one state and writes one for each token; `vllm-flashinfer` is its
ReplaySSM step with drafts, FlashInfer's `checkpointing_ssu`, rows keeping and folding as they
would. Times are microseconds; in brackets, and as `x native fp32`: the time of vLLM's own step with
an fp32 state over ours.
"""


def current(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each (operation, GPU) in a folder; of a geometry, batch and T the newest file's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*_verify-*.json"), reverse=True):  # a later date first
        if any(path.stem.startswith(f"{op}-") for op in OPS):
            rows = found.setdefault(path.stem[: -len("-2000-01-01")], [])
            known = {_point(row) for row in rows}
            new = json.loads(path.read_text(encoding="utf-8"))
            rows += [row for row in new if _point(row) not in known]
    return {stem: found[stem] for stem in sorted(found)}


def _point(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["geometry"], row["batch"], row["tokens"]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Designs by their time, vLLM's own steps last."""
    first: dict[str, float] = {}
    for row in rows:
        first.setdefault(row["design"], row["time_us"])
    return sorted(first, key=lambda name: (name.startswith("vllm"), first[name]))


def _phases(rows: list[dict[str, Any]]) -> list[str]:
    """A line a design: time and share of the copy bandwidth of each phase, ratios of the mix."""
    lines = [
        "| design | readout, us | share of copy | flush, us | share | mix, us | share "
        "| x native fp32 | x native 16-bit | x replay fp32 |",
        "|---" + "|--:" * 9 + "|",
    ]
    for name in _names([r for r in rows if r["phase"] == "mix"]):
        here = {r["phase"]: r for r in rows if r["design"] == name}
        cells = [name]
        for phase in PHASES:
            row = here.get(phase)
            cells += ["–", "–"] if row is None else [
                f"{row['time_us']:.1f}", f"{row['copy_fraction']:.2f}"
            ]  # fmt: skip
        for column in ("ratio_native_fp32", "ratio_native_fp16", "ratio_upstream_replay_fp32"):
            value = here["mix"].get(column)
            cells.append("–" if value is None else f"{value:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown of one operation and GPU: the target, all phases at its batch and T, then the mix of
    every batch and T."""
    first = rows[0]
    lines = [f"### {first['op']}, {first['gpu']}", ""]
    runs: dict[str, list[str]] = {}
    for row in rows:
        text = (
            f"{row['date']}, commit {str(row['commit'])[:12]}, Triton {row['triton']}, vLLM "
            f"{row['vllm']}"
        )
        point = f"{row['geometry']} at {row['batch']}, T = {row['tokens']}"
        points = runs.setdefault(text, [])
        points += [] if point in points else [point]
    for text, points in runs.items():
        lines += [f"{text}." if len(runs) == 1 else f"{'; '.join(points)}: {text}.", ""]
    batch, tokens, column, least = TARGET
    for geometry in dict.fromkeys(r["geometry"] for r in rows):
        here = [r for r in rows if r["geometry"] == geometry]
        mix = [r for r in here if r["phase"] == "mix"]
        headline = [r for r in here if (r["batch"], r["tokens"]) == (batch, tokens)]
        best = [
            r[column]
            for r in headline
            if r["phase"] == "mix"
            and r["design"] in DESIGNS
            and DESIGNS[r["design"]].update.rounds
            and r[column]
        ]
        lines += [f"**{geometry}**", ""]
        if best:
            verdict = "yes" if max(best) >= least else "no"
            lines += [
                f"| target, batch {batch}, T = {tokens} | at least | reached | met |",
                "|---|--:|--:|--:|",
                f"| best rounded design, mix: x vLLM's fp32 step | {least:.2f} | {max(best):.2f} "
                f"| {verdict} |",
                "",
            ]
        if headline:
            lines += _phases(headline)
        names = _names(mix)
        lines += [f"| batch | T | kept | {' | '.join(names)} |", "|" + "--:|" * (3 + len(names))]
        for point in sorted({(r["batch"], r["tokens"]) for r in mix}):
            found = {r["design"]: r for r in mix if (r["batch"], r["tokens"]) == point}
            cells = []
            for name in names:
                row = found.get(name)
                cell = "–" if row is None else f"{row['time_us']:.1f}"
                if row is not None and row["ratio_native_fp32"] and not name.startswith("vllm"):
                    cell += f" ({row['ratio_native_fp32']:.2f}x)"
                cells.append(cell)
            kept = next(iter(found.values()))["kept"]
            lines.append(f"| {point[0]} | {point[1]} | {kept} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def report(folder: Path) -> list[str]:
    """Markdown of the newest verify results in a folder; nothing where there are none."""
    found = [section(rows) for rows in current(folder).values()]
    return [_HEAD, *(line for lines in found for line in lines)] if found else []


def main(argv: list[str] | None = None) -> int:
    """The command for ``--op *_verify``; the flags are those of ``run`` and ``--tokens``."""
    p = argparse.ArgumentParser(
        prog="python -m replayssm_quant.kernels.bench", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--op", choices=sorted(OPS), required=True)
    p.add_argument("--geometry", help="names separated by commas (default: the op's first), or all")
    p.add_argument("--batch", default="1,8,32,128,256,512")
    p.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="T of a step, 2 to 8")
    p.add_argument("--design", default="all", help="names separated by commas, or all")
    p.add_argument("--phase", default="readout,flush,mix", help="readout, flush, mix")
    p.add_argument("--vllm-path", help="vLLM's wheel or the folder that holds vllm/: baselines")
    p.add_argument("--upstream", help="fp32=FILE,fp16=FILE: FlashInfer's checkpointing_ssu modules")
    p.add_argument("--out", type=Path, default=run.RESULTS, help="folder of the result file")
    p.add_argument("--seconds", type=float, default=math.inf, help="start no point after these")
    p.add_argument("--quick", action="store_true", help="less time a measurement")
    p.add_argument("--check-only", action="store_true", help="the correctness gate, no timing")
    p.add_argument("--impl", choices=("reference", "triton"), help="for --check-only")
    p.add_argument("--device", help="for --check-only; CUDA where there is one")
    args = p.parse_args(argv)
    op = OPS[args.op]
    try:
        batches, tokens = ([int(t) for t in x.split(",")] for x in (args.batch, args.tokens))
    except ValueError:
        raise SystemExit("--batch and --tokens take whole numbers, such as 1,8,256") from None
    if min(batches) < 1 or not 2 <= min(tokens) <= max(tokens) <= 8:
        raise SystemExit("--batch takes at least 1, --tokens 2 to 8")
    geometry = args.geometry or op.default
    s = Settings(
        op,
        list(op.geometries)
        if geometry == "all"
        else run._names(geometry, list(op.geometries), "geometry"),
        batches,
        list(op.designs) if args.design == "all" else run._names(args.design, [*DESIGNS], "design"),
        run._names(args.phase, [*PHASES], "phase"),
        tokens,
    )
    if args.quick:
        s.seconds, s.least = 0.1, 4
    cuda = torch.cuda.is_available()
    device = torch.device(args.device or ("cuda" if cuda else "cpu"))
    if args.check_only:
        return 0 if check_only(s, device, args.impl) else 1
    if not cuda:
        print("timing needs a CUDA GPU and torch sees none; use --check-only", file=sys.stderr)
        return 2
    try:
        upstream = load_upstream(args.upstream) if args.upstream and op.kind == "mamba2" else None
    except (ValueError, ImportError) as error:
        raise SystemExit(str(error)) from None
    path, wrong = measure(s, args.vllm_path, args.out, device, args.seconds, upstream)
    for text in wrong:
        print(f"RED {text}; it was not timed", file=sys.stderr)
    print(path)
    return 1 if wrong else 0
