"""One driver for both families: a pool, made-up inputs, a float64 recurrence beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from replayssm_quant.config import StateConfig
from replayssm_quant.formats import parse_format
from replayssm_quant.formats.philox import request_key
from replayssm_quant.kernels.gdn import reference as gdn
from replayssm_quant.kernels.mamba2 import reference as mamba2
from replayssm_quant.state.cache import StatePool
from replayssm_quant.state.geometry import LayerGeometry

GEOMETRY = {
    "mamba2": LayerGeometry("mamba2", 4, 6, 32, 2),
    "gdn": LayerGeometry("gdn", 4, 6, 32, 2),
}


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b; the floor keeps 0 against 0 at 0."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@dataclass
class Lab:
    """One family's step over a pool, with inputs that are a pure function of (request, position).

    So a request meets the same inputs in any batch, slot or row. ``decay`` scales the log decay a
    token, ``beta_max`` bounds the GDN beta.
    """

    kind: str
    geometry: LayerGeometry
    decay: float = 0.2
    beta_max: float = 1.0
    A: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(99)
        self.A = -self.decay * (0.5 + torch.rand(self.geometry.heads, generator=g))

    def config(self, update="fp32", output=None, **kw) -> StateConfig:
        """Like StateConfig.from_flags, but fp32 beside fp32 stays two stored copies."""
        if (update, output) == ("fp32", "fp32"):
            return StateConfig(parse_format("fp32"), parse_format("fp32"), **kw)
        return StateConfig.from_flags(update, output, **kw)

    def pool(self, config: StateConfig, slots: int = 3, **kw) -> StatePool:
        kw.setdefault("ring_storage", "fp32")
        return StatePool({0: self.geometry}, config, slots, debug=True, **kw)

    def inputs(self, requests: list[int], positions: list[int]) -> tuple[torch.Tensor, ...]:
        """Mamba-2: x, dt, B, C. GDN: q, k, v, g, beta. One row a (request, position)."""
        g, rows = self.geometry, []
        for request, position in zip(requests, positions, strict=True):
            gen = torch.Generator().manual_seed(1000003 * request + position)

            def n(*shape, gen=gen):
                return torch.randn(shape, generator=gen)

            def u(*shape, gen=gen):
                return torch.rand(shape, generator=gen)

            if self.kind == "mamba2":
                row = (n(g.heads, g.rows), u(g.heads), n(g.groups, g.n), n(g.groups, g.n))
            else:
                q, k = n(g.groups, g.n), n(g.groups, g.n) + 0.3
                log_decay = -self.decay * u(g.heads)
                row = (q, k, n(g.heads, g.rows), log_decay, self.beta_max * u(g.heads))
            rows.append(row)
        return tuple(torch.stack(t) for t in zip(*rows, strict=True))

    def state(self, request: int) -> torch.Tensor:
        gen = torch.Generator().manual_seed(7919 * request + 5)
        g = self.geometry
        return torch.randn(g.heads, g.rows, g.n, generator=gen)

    @staticmethod
    def key(request: int) -> int:
        return request_key(0, request)

    def start(self, pool: StatePool, slots: list[int], requests: list[int], prompt: int = 5):
        """Begin requests (key from ``key``) with the state of ``state``, fp32 [b, H, R, N]."""
        at = torch.tensor(slots)
        keys = torch.tensor([self.key(r) for r in requests])
        pool.start(at, keys, torch.full((len(slots),), prompt))
        states = torch.stack([self.state(r) for r in requests])
        pool.write(0, at, states)
        return states

    def decode(self, pool: StatePool, rows, inputs, **kw) -> torch.Tensor:
        views, config = pool.views[0], pool.configs[0]
        if self.kind == "mamba2":
            x, dt, B, C = inputs
            return mamba2.decode_step(views, config, rows, x, dt, self.A, B, C, **kw)
        return gdn.decode_step(views, config, rows, *inputs, **kw)

    def step(self, pool: StatePool, slots: list[int], requests: list[int], *, force=False, **kw):
        """One token for each row (slot -1 pads): y, and the rows. Cursors advance."""
        rows = pool.rows(torch.tensor(slots), force)
        inputs = self.inputs(requests, rows.position.tolist())
        y = self.decode(pool, rows, inputs, **kw)
        pool.advance(rows)
        return y, rows

    def run(self, pool: StatePool, slots, requests, steps: int, force_at=()) -> torch.Tensor:
        """y [steps, b, H, R]."""
        return torch.stack(
            [self.step(pool, slots, requests, force=t in force_at)[0] for t in range(steps)]
        )

    def exact(self, state: torch.Tensor, inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain recurrence in state's dtype: (y, new state)."""
        t = [i.to(state.dtype) for i in inputs]
        if self.kind == "mamba2":
            x, dt, B, C = t
            return mamba2.recurrent_step(state, x, dt, self.A.to(state.dtype), B, C)
        q, k, v, g, beta = t
        per_group = self.geometry.heads_per_group

        def unit(z):
            return (z * gdn.inverse_norm(z)[..., None]).repeat_interleave(per_group, 1)

        scaled = unit(q) * self.geometry.n**-0.5
        return gdn.recurrent_step(state, scaled, unit(k), v, g[..., None], beta)

    def load(self, pool: StatePool, slots: list[int], **kw) -> torch.Tensor:
        rows = pool.rows(torch.tensor(slots))
        views, config = pool.views[0], pool.configs[0]
        if self.kind == "mamba2":
            return mamba2.load_state(views, config, rows, self.A, **kw)
        return gdn.load_state(views, config, rows, **kw)


@pytest.fixture(params=["mamba2", "gdn"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def lab(kind) -> Lab:
    return Lab(kind, GEOMETRY[kind])


@pytest.fixture
def make_lab():
    """Lab(kind, geometry, decay, beta_max) for tests with their own geometry."""
    return Lab


@pytest.fixture
def distance():
    return rel


def stored(pool: StatePool, slots: list[int], prefix: str = "ckpt") -> dict[str, torch.Tensor]:
    """Copies of the stored tensors whose names begin with the prefix."""
    views = pool.views[0].tensors()
    return {n: t[slots].clone() for n, t in views.items() if n.startswith(prefix)}


@pytest.fixture
def bytes_of():
    return stored


@pytest.fixture
def equal_bytes():
    def check(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        """Bit for bit: NaN equals NaN of the same bits, -0 differs from 0."""
        same = a.keys() == b.keys()
        return same and all(
            torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
            for n in a
        )

    return check
