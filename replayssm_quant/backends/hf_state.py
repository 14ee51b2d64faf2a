"""A split state inside a transformers cache: the handle, the cache layer, the replaced functions.

A ``StateHandle`` takes the place of the fp32 tensor in ``cache.layers[i].recurrent_states[0]``. A
prefill hands its final state to ``update_recurrent_state``, which stores it in the handle's
checkpoint and copy; single tokens come in through the decode function of the family and run on
``replayssm_quant.ops``; several tokens at once get the ring folded into an fp32 state, run through
transformers' own chunk function and start a new window. With drafts a few tokens at once are
verified instead: they stay pending until the next call, and ``crop`` takes some of them back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from .. import ops
from ..config import StateConfig
from ..formats.philox import request_key
from ..state.cache import StatePool, StepRows, VerifyRows
from ..state.layout import ring_capacity
from .hf_models import (
    CHUNK_FUNCTIONS,
    RING_STORAGE,
    STEP_FUNCTIONS,
    DecoderCalls,
    RecurrentModel,
    find_layers,
    layer_configs,
    request_ids,
)

_MARK = "_replayssm_quant"


def _per_head(t: torch.Tensor, ndim: int, name: str) -> torch.Tensor:
    """Undo transformers' expansion of a per-head argument over head_dim and d_state."""
    while t.ndim > ndim:
        if t.shape[-1] > 1 and t.stride(-1) != 0:
            raise ValueError(
                f"{name} {tuple(t.shape)} differs within a head; only one value a head (Mamba-2) "
                "is supported"
            )
        t = t[..., 0]
    return t


class StateHandle:
    """The split state of one layer for the rows of one batch; stands where a tensor stood."""

    def __init__(self, owner: HFState, layer: int, ring_storage: str):
        self.owner, self.layer, self.ring_storage = owner, layer, ring_storage
        self.geometry = owner.found.layers[layer]
        self.config = owner.configs[layer]
        self.pool: StatePool | None = None
        self.pending = 0

    # what transformers may ask of the tensor that it expects here

    @property
    def shape(self) -> tuple[int, ...]:
        g = self.geometry
        tail = (g.rows, g.n) if g.kind == "mamba2" else (g.n, g.rows)
        return (self.rows, g.heads, *tail)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self._live().valid.device

    @property
    def rows(self) -> int:
        return 0 if self.pool is None else self.pool.slots

    def index_select(self, dim: int, index: torch.Tensor) -> StateHandle:
        """A handle whose row i is this one's row index[i] (beam search)."""
        if dim != 0:
            raise ValueError(f"a split state can be indexed along its rows only, not axis {dim}")
        pool = self._live()
        return self._with(pool, index.to(pool.valid.device))

    def zero_(self) -> StateHandle:
        self.pool, self.pending = None, 0
        return self

    def to(self, *args: Any, **kwargs: Any) -> StateHandle:
        raise ValueError("a split state cannot be moved or cast; use a cache without offloading")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None):
        raise TypeError(
            f"transformers called {getattr(func, '__name__', func)} on a split state, which "
            "replayssm_quant does not replace; this transformers version is not supported"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHandle:
        if self.pool is None:
            return StateHandle(self.owner, self.layer, self.ring_storage)
        return self._with(self.pool, self._slots(self.pool))

    # state

    def _live(self) -> StatePool:
        if not self.owner.active:
            raise RuntimeError("this cache belongs to a split_state block that has ended")
        if self.pool is None:
            raise RuntimeError("the split state is empty: no prompt has been run on this cache")
        return self.pool

    def _new_pool(self, rows: int, device: torch.device) -> StatePool:
        return StatePool(
            {self.layer: self.geometry},
            self.config,
            rows,
            ring_storage=self.ring_storage,
            device=device,
            drafts=self.owner.drafts,
        )

    def _slots(self, pool: StatePool) -> torch.Tensor:
        return torch.arange(pool.slots, device=pool.valid.device)

    def _with(self, pool: StatePool, source: torch.Tensor) -> StateHandle:
        new = StateHandle(self.owner, self.layer, self.ring_storage)
        new.pool = self._new_pool(source.numel(), source.device)
        new.pool.restore(new._slots(new.pool), pool.save(source))
        new.pending = self.pending
        return new

    def _rows(self, pool: StatePool) -> StepRows:
        self.keep(self.pending)  # what no crop has taken back
        return pool.rows(self._slots(pool))

    def keep(self, tokens: int) -> None:
        """Keep the first ``tokens`` of those that the last call left pending; forget the others."""
        if self.pending and self.pool is not None:
            slots = self._slots(self.pool)
            self.pool.commit(slots, torch.full_like(slots, tokens))
        self.pending = 0

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens. Raises ValueError if they are not pending."""
        if tokens > self.pending:
            raise ValueError(
                f"{tokens} tokens cannot be taken back from a split state that has {self.pending} "
                "pending; use split_state(..., drafts=N) with assisted generation"
            )
        self.keep(self.pending - tokens)

    def verifies(self, tokens: int) -> bool:
        """Whether a call with so many tokens is a verify step: no more than T, without padding."""
        return 1 < tokens <= 1 + self.owner.drafts and self.owner.unpadded()

    def _verify_rows(self, pool: StatePool, tokens: int) -> VerifyRows:
        self.keep(self.pending)
        slots = self._slots(pool)
        return pool.verify_rows(slots, torch.full_like(slots, tokens, dtype=torch.int32))

    def _verified(self, pool: StatePool, rows: VerifyRows, tokens: int) -> None:
        pool.advance_verify(rows)
        self.pending = tokens
        flushes, total = rows.flush.sum(), rows.slots.numel()
        reads = flushes * self.config.update.rounds + total * self.config.readout.rounds
        self.owner.count(self.layer, steps=total * tokens, flushes=flushes, reads=reads)

    @torch.no_grad()
    def load(self, state: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the state that a prefill left, and begin a new window.

        state: transformers' layout, [b, H, P, N] or (GDN) [b, HV, K, V]. tokens: int [b], real
        tokens that this prefill added.
        """
        b = state.shape[0]
        if self.geometry.kind == "gdn":
            state = state.transpose(-1, -2)
        expected = (b, self.geometry.heads, self.geometry.rows, self.geometry.n)
        if tuple(state.shape) != expected:
            raise ValueError(
                f"layer {self.layer}: the prefill left a state of {tuple(state.shape)}, the "
                f"configuration says {expected}"
            )
        self.keep(self.pending)
        if self.pool is None or self.pool.slots != b:
            self.pool = self._new_pool(b, state.device)
            key = self.owner.keys(self.config, b).to(state.device)
            position = tokens.to(state.device)
        else:
            key = self.pool.key.clone()
            position = self.pool.position + tokens.to(state.device)
        slots = self._slots(self.pool)
        self.pool.start(slots, key, position)
        ops.store_state(
            self.pool.views[self.layer],
            self.config,
            StepRows(slots, self.pool.valid, slots < 0, self.pool.position, self.pool.key),
            state.float().contiguous(),
            layer=self.layer,
            impl=self.owner.impl,
        )

    @torch.no_grad()
    def materialize(self) -> torch.Tensor:
        """The fp32 state with its ring folded in, in transformers' layout; nothing is written."""
        pool = self._live()
        views, rows = pool.views[self.layer], self._rows(pool)
        if self.config.update.rounds:
            self.owner.count(self.layer, reads=rows.slots.numel())
        if self.geometry.kind == "mamba2":
            A = -torch.exp(self.owner.found.mixers[self.layer].A_log.float())
            A = A.to(pool.valid.device)
            return ops.mamba2_load(views, self.config, rows, A, impl=self.owner.impl)
        state = ops.gdn_load(views, self.config, rows, impl=self.owner.impl)
        return state.transpose(-1, -2).contiguous()

    def _count(self, rows: StepRows) -> None:
        flushes = rows.flush.sum()
        total = rows.slots.numel()
        reads = flushes * self.config.update.rounds
        reads = reads + (total - flushes) * self.config.readout.rounds
        self.owner.count(self.layer, steps=total, flushes=flushes, reads=reads)

    @torch.no_grad()
    def mamba2_step(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        dt_softplus: bool,
    ) -> torch.Tensor:
        """One token a row, as ``mamba2_selective_state_update``: no clamp of dt, as there."""
        pool = self._live()
        rows = self._rows(pool)
        y = ops.mamba2_decode(
            pool.views[self.layer],
            self.config,
            rows,
            x,
            _per_head(dt, 2, "dt"),
            _per_head(A, 1, "A"),
            B,
            C,
            D=None if D is None else _per_head(D, 1, "D"),
            z=z,
            dt_bias=None if dt_bias is None else _per_head(dt_bias, 1, "dt_bias"),
            dt_softplus=dt_softplus,
            layer=self.layer,
            impl=self.owner.impl,
        )
        pool.advance(rows)
        self._count(rows)
        return y

    @torch.no_grad()
    def gdn_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        l2norm: bool,
    ) -> torch.Tensor:
        """One token a row, as ``torch_recurrent_gated_delta_rule``: [b, 1, ...] in and out."""
        if q.shape[1] != 1:
            raise ValueError(f"the decode function was given {q.shape[1]} tokens; it takes one")
        pool = self._live()
        rows = self._rows(pool)
        q, k = (t[:, 0, :: t.shape[2] // self.geometry.groups] for t in (q, k))
        y = ops.gdn_decode(
            pool.views[self.layer],
            self.config,
            rows,
            q,
            k,
            v[:, 0],
            g[:, 0],
            beta[:, 0],
            l2norm=l2norm,
            layer=self.layer,
            impl=self.owner.impl,
        )
        pool.advance(rows)
        self._count(rows)
        return y[:, None]

    @torch.no_grad()
    def mamba2_verify(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        dt_softplus: bool,
    ) -> torch.Tensor:
        """[b, T, ...] as ``mamba2_chunk_scan``; dt is not clamped, as in single steps."""
        pool, tokens = self._live(), x.shape[1]
        rows = self._verify_rows(pool, tokens)
        y = ops.mamba2_verify(
            pool.views[self.layer],
            self.config,
            rows,
            x,
            dt,
            _per_head(A, 1, "A"),
            B,
            C,
            D=None if D is None else _per_head(D, 1, "D"),
            z=z,
            dt_bias=None if dt_bias is None else _per_head(dt_bias, 1, "dt_bias"),
            dt_softplus=dt_softplus,
            layer=self.layer,
            impl=self.owner.impl,
        )
        self._verified(pool, rows, tokens)
        return y

    @torch.no_grad()
    def gdn_verify(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        l2norm: bool,
    ) -> torch.Tensor:
        """[b, T, ...] as ``torch_chunk_gated_delta_rule``."""
        pool, tokens = self._live(), q.shape[1]
        rows = self._verify_rows(pool, tokens)
        q, k = (t[:, :, :: t.shape[2] // self.geometry.groups] for t in (q, k))
        y = ops.gdn_verify(
            pool.views[self.layer],
            self.config,
            rows,
            q,
            k,
            v,
            g,
            beta,
            l2norm=l2norm,
            layer=self.layer,
            impl=self.owner.impl,
        )
        self._verified(pool, rows, tokens)
        return y


class _SplitLayer:
    """Methods laid over the class of a cache layer whose state is split; ``_release`` undoes it.

    ``_split_class`` copies them into a subclass of the layer's own class: with a second base class
    Python would refuse to change the class of a living layer.
    """

    is_compileable = False
    _split_owner: HFState
    _split_index: int

    @property
    def is_croppable(self) -> bool:
        """Asked by transformers 5.24 before it assists."""
        return self._split_owner.drafts > 0

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any):
        handle = self.recurrent_states[state_idx]  # type: ignore[attr-defined]
        if recurrent_states is handle and handle is not None:
            return handle  # a decode step, already taken
        if not isinstance(handle, StateHandle):
            handle = self._new_handle(state_idx)
        handle.load(recurrent_states, self._split_owner.new_tokens(recurrent_states.shape[0]))
        return handle

    def _new_handle(self, state_idx: int = 0) -> StateHandle:
        dtype = self.conv_states[state_idx].dtype  # type: ignore[attr-defined]
        if dtype not in RING_STORAGE:
            raise ValueError(f"activations in {dtype} are not supported; use fp32, bf16 or fp16")
        handle = StateHandle(self._split_owner, self._split_index, RING_STORAGE[dtype])
        self.recurrent_states[state_idx] = handle  # type: ignore[attr-defined]
        self.is_recurrent_states_initialized[state_idx] = True  # type: ignore[attr-defined]
        return handle

    def crop(self, tokens_to_remove: int) -> None:
        base: Any = type(self).__base__
        base.crop(self, tokens_to_remove)  # the convolution, and attention beside it
        for state in self.recurrent_states.values():  # type: ignore[attr-defined]
            if isinstance(state, StateHandle):
                state.crop(abs(tokens_to_remove))

    def offload(self) -> None:
        raise ValueError("a split state cannot be offloaded; use a cache without offloading")

    prefetch = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> _SplitLayer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            keep = name == "_split_owner"
            new.__dict__[name] = value if keep else copy.deepcopy(value, memo)
        self._split_owner.track(new)
        return new


@functools.cache
def _split_class(base: type) -> type:
    methods = {k: v for k, v in vars(_SplitLayer).items() if k not in ("__dict__", "__weakref__")}
    return type("Split" + base.__name__, (base,), methods)


class _EmptyLayer(LinearAttentionLayer):
    """The place of an MLP in a cache, which transformers would crop although it holds nothing."""

    is_croppable = True  # type: ignore[assignment]

    def crop(self, tokens_to_remove: int) -> None:
        pass


def _is_split(layer: Any) -> bool:
    return "_split_owner" in vars(layer)


def _release(layer: Any) -> None:
    """Give a cache layer its own class back, and a handle's state as a plain fp32 tensor."""
    try:
        for i, state in list(layer.recurrent_states.items()):
            if isinstance(state, StateHandle):
                layer.recurrent_states[i], layer.is_recurrent_states_initialized[i] = None, False
                if state.pool is not None:
                    layer.recurrent_states[i] = state.materialize()
                    layer.is_recurrent_states_initialized[i] = True
    finally:
        layer.__class__ = type(layer).__base__
        del layer._split_owner, layer._split_index


class HFState:
    """An attached split state: what is stored how, and what has been counted.

    Made by ``split_state``. ``requests`` may be set anew between generate calls; it applies to the
    caches that are filled from then on.
    """

    def __init__(
        self,
        found: RecurrentModel,
        configs: Mapping[int, StateConfig],
        requests: Sequence[int | str] | None,
        seed: int | None,
        impl: str | None,
        drafts: int = 0,
    ):
        self.found, self.configs, self.seed, self.impl = found, dict(configs), seed, impl
        self.drafts = drafts
        self.requests = requests
        self.active = False
        self._calls = DecoderCalls(found.decoder)
        self._layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._empty: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mask: torch.Tensor | None = None
        self._columns = 0
        self._totals: dict[int, dict[str, Any]] = {
            i: {"steps": 0, "flushes": 0, "quantised_reads": 0} for i in self.configs
        }

    @property
    def stats(self) -> dict[int, dict[str, int]]:
        """Counts of each layer, summed over rows: steps (decoded tokens), flushes, and
        quantised_reads (times that a rounded state was read for an output or an update)."""
        return {i: {k: int(v) for k, v in t.items()} for i, t in self._totals.items()}

    def count(self, layer: int, steps: Any = 0, flushes: Any = 0, reads: Any = 0) -> None:
        total = self._totals[layer]
        total["steps"] += steps
        total["flushes"] = total["flushes"] + flushes
        total["quantised_reads"] = total["quantised_reads"] + reads

    def keys(self, config: StateConfig, rows: int) -> torch.Tensor:
        """Random keys int64 [rows] of the requests in a batch of ``rows``."""
        seed = config.seed if self.seed is None else self.seed
        ids = request_ids(self.requests, rows)
        return torch.tensor([request_key(seed, r) for r in ids], dtype=torch.int64)

    def new_tokens(self, rows: int) -> torch.Tensor:
        """Real tokens int32 [rows] of the forward in progress: padding is not counted."""
        if self._mask is None:
            return torch.full((rows,), self._columns, dtype=torch.int32)
        return (self._mask[:, -self._columns :] != 0).sum(1, dtype=torch.int32)

    def unpadded(self) -> bool:
        """Whether every token of the forward in progress is real."""
        return self._mask is None or bool((self._mask[:, -self._columns :] != 0).all())

    def track(self, layer: Any) -> None:
        self._layers.add(layer)

    def _before_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a split state does not run under torch.compile; use the plain model, and "
                "generate(..., disable_compile=True)"
            )
        cache = self._calls.cache(args, kwargs)
        made = cache is None
        if made:
            if not self._calls.wants_cache(args, kwargs):
                return None
            cache = DynamicCache(config=module.config)
            args, kwargs = self._calls.with_cache(args, kwargs, cache)
        rows, self._columns, self._mask = self._calls.tokens(args, kwargs)
        self._take(cache, rows)
        return (args, kwargs) if made else None

    def _take(self, cache: Any, rows: int) -> None:
        """Make the recurrent layers of a cache hold split states."""
        if not isinstance(cache, Cache):
            raise TypeError(f"expected a transformers cache, not {type(cache).__name__}")
        if isinstance(cache, StaticCache) or any(isinstance(x, StaticLayer) for x in cache.layers):
            raise ValueError("a split state needs a DynamicCache; a StaticCache is not supported")
        if getattr(cache, "offloading", False):
            raise ValueError("a split state cannot be offloaded; make the cache without offloading")
        if self.drafts:
            for i, layer in enumerate(cache.layers):
                if i not in self.found.layers and type(layer) is LinearAttentionLayer:
                    layer.__class__ = _EmptyLayer
                    self._empty.add(layer)
        for i in self.configs:
            layer = cache.layers[i] if i < len(cache.layers) else None
            if layer is not None and _is_split(layer):
                if layer._split_owner is not self:
                    raise ValueError("this cache is in use by another split_state block")
                continue
            if not isinstance(layer, LinearAttentionLayer):
                raise ValueError(
                    f"layer {i} of the cache is {type(layer).__name__}, not a recurrent state; "
                    "make the cache with DynamicCache(config=model.config)"
                )
            state = layer.recurrent_states[0]
            layer._split_owner, layer._split_index = self, i
            layer.__class__ = _split_class(type(layer))
            self.track(layer)
            if layer.has_previous_state[0] and state is not None:  # filled before this block
                layer._new_handle().load(state, self._past_tokens(cache, rows))
            else:
                layer.recurrent_states[0] = None
                layer.is_recurrent_states_initialized[0] = False

    def _past_tokens(self, cache: Any, rows: int) -> torch.Tensor:
        if self._mask is not None:
            past = self._mask[:, : self._mask.shape[1] - self._columns]
            return (past != 0).sum(1, dtype=torch.int32)
        try:
            length = cache.get_seq_length()
        except ValueError:  # recurrent layers only: transformers keeps no length
            length = 0
        return torch.full((rows,), length, dtype=torch.int32)

    @contextlib.contextmanager
    def attached(self) -> Iterator[HFState]:
        """Replace the functions and watch the decoder until the block ends."""
        kind = self.found.kind
        make = {
            STEP_FUNCTIONS[kind]: _mamba2_step if kind == "mamba2" else _gdn_step,
            CHUNK_FUNCTIONS[kind]: _mamba2_chunk if kind == "mamba2" else _gdn_chunk,
        }
        with patched(self.found, make), contextlib.ExitStack() as stack:
            for module, function in (
                (self.found.model, self._calls.check_names),
                (self.found.decoder, self._before_forward),
            ):
                hook = module.register_forward_pre_hook(function, with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
            if self.drafts:
                stack.enter_context(assisted(self.found.model, self.drafts))
            stack.callback(self._detach)
            self.active = True
            yield self

    def _detach(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "active", False)
            for layer in list(self._layers):
                stack.callback(_release, layer)
            for layer in list(self._empty):
                stack.callback(setattr, layer, "__class__", LinearAttentionLayer)
        self._layers.clear()
        self._empty.clear()
        self._mask = None


class _Candidates:
    """A candidate generator whose drafts a split state can take back.

    It proposes nothing at first, since that forward is the prompt's and its state is stored as a
    whole, and later no more than ``drafts`` tokens.
    """

    def __init__(self, generator: Any, drafts: int):
        self._generator, self._drafts, self._started = generator, drafts, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = self._generator.get_candidates(input_ids, *args, **kwargs)
        if not self._started:  # asked all the same: an assistant model counts on every call
            self._started = True
            return input_ids, None
        ids = ids[:, : input_ids.shape[1] + self._drafts]
        return ids, None if logits is None else logits[:, : self._drafts]


@contextlib.contextmanager
def assisted(model: Any, drafts: int) -> Iterator[None]:
    """Let ``generate`` of a recurrent model assist, with candidates of up to ``drafts`` tokens.

    transformers refuses that for models whose state it cannot take back. Raises ValueError for a
    version whose caches do not keep what they need to be cropped.
    """
    if not hasattr(LinearAttentionLayer(), "record_past"):
        raise ValueError("drafts need transformers 5.17 or newer: its caches can be cropped")
    make = model._get_candidate_generator

    def limited(*args: Any, **kwargs: Any) -> _Candidates:
        return _Candidates(make(*args, **kwargs), drafts)

    before = {
        n: vars(model)[n] for n in ("_is_stateful", "_get_candidate_generator") if n in vars(model)
    }
    model._is_stateful, model._get_candidate_generator = False, limited
    try:
        yield
    finally:
        del model._is_stateful, model._get_candidate_generator
        for name, value in before.items():
            setattr(model, name, value)


@contextlib.contextmanager
def patched(
    found: RecurrentModel, make: Mapping[str, Callable[[Callable], Callable]]
) -> Iterator[None]:
    """Replace module-level functions of the modeling files: name -> maker(original).

    Raises RuntimeError if another block has replaced one already.
    """
    originals = [(file, name, getattr(file, name)) for file in found.modules for name in make]
    for file, name, function in originals:
        if hasattr(function, _MARK):
            raise RuntimeError(
                f"a split state is already attached to {file.__name__}.{name}; leave that block "
                "before attaching another"
            )
    try:
        for file, name, function in originals:
            hook = make[name](function)
            setattr(hook, _MARK, True)
            setattr(file, name, hook)
        yield
    finally:
        for file, name, function in originals:
            setattr(file, name, function)


def _mamba2_step(original: Callable) -> Callable:
    def mamba2_selective_state_update(
        state: Any,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        *,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if isinstance(state, StateHandle):
            return state.mamba2_step(hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
        return original(
            state,
            hidden_states,
            dt,
            A,
            B,
            C,
            D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            **kwargs,
        )

    return mamba2_selective_state_update


def _mamba2_chunk(original: Callable) -> Callable:
    def mamba2_chunk_scan(*args: Any, initial_states: Any = None, **kwargs: Any) -> Any:
        if isinstance(initial_states, StateHandle):
            if initial_states.verifies(args[0].shape[1]):
                x, dt, A, B, C, *_ = args
                optional = (kwargs.get(name) for name in ("D", "z", "dt_bias"))
                softplus = kwargs.get("dt_softplus", False)
                y = initial_states.mamba2_verify(x, dt, A, B, C, *optional, softplus)
                return (y, initial_states) if kwargs.get("return_final_states") else y
            initial_states = initial_states.materialize()
        return original(*args, initial_states=initial_states, **kwargs)

    return mamba2_chunk_scan


def _gdn_step(original: Callable) -> Callable:
    def torch_recurrent_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if isinstance(initial_state, StateHandle):
            y = initial_state.gdn_step(query, key, value, g, beta, use_qk_l2norm_in_kernel)
            return y, initial_state
        return original(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )

    return torch_recurrent_gated_delta_rule


def _gdn_chunk(original: Callable) -> Callable:
    def torch_chunk_gated_delta_rule(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        if isinstance(initial_state, StateHandle):
            if initial_state.verifies(args[0].shape[1]):
                found = dict(zip(("query", "key", "value", "g", "beta"), args, strict=False))
                found |= {n: kwargs[n] for n in ("g", "beta") if n in kwargs}
                norm = kwargs.get("use_qk_l2norm_in_kernel", False)
                return initial_state.gdn_verify(*found.values(), norm), initial_state
            initial_state = initial_state.materialize()
        return original(*args, initial_state=initial_state, **kwargs)

    return torch_chunk_gated_delta_rule


def attach(
    model: torch.nn.Module,
    config: StateConfig | Mapping[int, StateConfig],
    requests: Sequence[int | str] | None,
    seed: int | None,
    impl: str | None,
    drafts: int = 0,
) -> HFState:
    """Find and check everything that ``split_state`` needs; nothing is changed yet."""
    ring_capacity(1, drafts)  # in range?
    found = find_layers(model)
    configs = layer_configs(found.layers, config)
    plain = sorted(set(found.layers) - set(configs))
    if drafts and plain:
        raise ValueError(
            f"layers {plain} keep transformers' own state, which cannot take drafts back; give "
            "every recurrent layer a StateConfig (fp32 loses nothing), or drafts=0"
        )
    return HFState(found, configs, requests, seed, impl, drafts)
