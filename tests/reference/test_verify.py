"""Draft tokens against the plain recurrence over the accepted ones, in float64, on stored bytes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from replayssm_quant.formats.rotation import unrotate
from replayssm_quant.formats.spec import ELEMENTS
from replayssm_quant.kernels.gdn import verify_reference as gdn
from replayssm_quant.kernels.mamba2 import verify_reference as mamba2
from replayssm_quant.state.cache import (
    PAD_SLOT,
    StatePool,
    compact,
    read_checkpoint,
    read_copy,
    tree_ancestors,
)
from replayssm_quant.state.geometry import LayerGeometry

DRAFT = 50_000_000  # inputs of rejected tokens: another request's, so no accident makes them fit


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b; the floor keeps 0 against 0 at 0."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


# GDN's ring keeps 1 / |k| in fp32, and the recurrence beside it is float64 throughout
ARITHMETIC = {"mamba2": 1e-11, "gdn": 2e-6}


class Speculation:
    """Rows that verify tokens of which some are accepted, beside an exact recurrence.

    The recurrence starts from what the checkpoint decodes to, and again after every flush, so what
    it misses is arithmetic, not rounding. y of a token is compared with the recurrence that starts
    from the copy.
    """

    def __init__(self, lab, pool: StatePool, requests: list[int], compute=torch.float64):
        self.lab, self.pool, self.requests, self.compute = lab, pool, requests, compute
        self.slots = torch.tensor(random.Random(7).sample(range(pool.slots), len(requests)))
        lab.start(pool, self.slots.tolist(), requests)
        self.accepted = torch.zeros(len(requests), dtype=torch.int32)
        self.worst = 0.0
        self.exact = self._decode(self.slots).double()  # state after the committed tokens
        self.seen = self._copy(self.slots).double()  # the same from the copy

    def _decode(self, slots):
        return read_checkpoint(self.pool.views[0], self.pool.configs[0], slots)

    def _copy(self, slots):
        return read_copy(self.pool.views[0], self.pool.configs[0], slots)

    def call(self, rows, inputs):
        lab, pool = self.lab, self.pool
        views, config = pool.views[0], pool.configs[0]
        inputs = tuple(t.to(self.compute) for t in inputs)  # y comes in the dtype of x or v
        if lab.kind == "mamba2":
            x, dt, B, C = inputs
            return mamba2.verify_step(views, config, rows, x, dt, lab.A, B, C, compute=self.compute)
        return gdn.verify_step(views, config, rows, *inputs, compute=self.compute)

    def tokens(self, row: int, position: int, count: int, keep: int, width: int):
        """Inputs of one row's tokens: the first ``keep`` are the request's own, NaN from count."""
        request = self.requests[row]
        ids = [request if t < keep else DRAFT + request for t in range(width)]
        inputs = self.lab.inputs(ids, [position + 1 + t for t in range(width)])
        for t in inputs:
            t[count:] = float("nan")
        return inputs

    def step(self, counts: list[int], keeps: list[int], width: int) -> torch.Tensor:
        """Commit, verify ``counts`` tokens a row of which ``keeps`` will be accepted; y."""
        pool, lab, b = self.pool, self.lab, len(self.requests)
        pool.commit(self.slots, self.accepted)
        rows = pool.verify_rows(self.slots, torch.tensor(counts))
        per_row = [
            self.tokens(i, int(rows.position[i]), counts[i], keeps[i], width) for i in range(b)
        ]
        inputs = tuple(torch.stack(t) for t in zip(*per_row, strict=True))
        y = self.call(rows, inputs)
        for i in range(b):
            if rows.flush[i]:
                self.seen[i] = self._copy(self.slots[i : i + 1])[0]
                stored = self._decode(self.slots[i : i + 1])[0].double()
                self.flushed(i, stored)
                self.exact[i] = stored
            for which in ("seen", "exact"):
                state = getattr(self, which)[i : i + 1]
                for t in range(counts[i]):
                    want, state = lab.exact(state, tuple(z[t : t + 1] for z in per_row[i]))
                    if which == "seen":
                        scale = want.double().square().mean().sqrt() + 1e-9
                        self.worst = max(
                            self.worst, float((y[i, t].double() - want[0]).abs().max() / scale)
                        )
                    if t + 1 == keeps[i]:
                        getattr(self, which)[i] = state[0]
            assert not y[i, counts[i] :].any()
        pool.advance_verify(rows)
        self.accepted = torch.tensor(keeps, dtype=torch.int32)
        return y

    def flushed(self, row: int, stored: torch.Tensor) -> None:
        """Called with the new checkpoint of a row, before ``exact`` takes it over."""


class Unrounded(Speculation):
    """With an fp32 checkpoint the stored state is the recurrence's."""

    error = 0.0

    def flushed(self, row, stored):
        distance = (stored - self.exact[row]).norm() / self.exact[row].norm()
        self.error = max(self.error, float(distance))


def poisoned(lab, config, slots=3, drafts=1, **kw) -> StatePool:
    """A pool whose rings hold NaN wherever nobody has written."""
    pool = lab.pool(config, slots, drafts=drafts, **kw)
    start = pool.start

    def begin(*args, **options):
        start(*args, **options)
        for name, view in pool.views[0].tensors().items():
            if name.startswith("ring"):
                view.fill_(float("nan"))

    pool.start = begin  # type: ignore[method-assign]
    return pool


FORMATS = [
    ("fp32", None), ("fp32", "fp32"), ("fp16", "nvfp4"), ("e4m3", "nvfp4"), ("e4m3", "same"),
    ("int8", "same"), ("int8/b32/fp16", "int4"), ("bf16", "mxfp4"), ("fp16", "e4m3"),
    ("e5m2", "same"), ("P4+4", None), ("P4+8", None), ("P8+4", None),
]  # fmt: skip


PATTERNS = LayerGeometry("", 2, 2, 32, 1)


def every_pattern(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(counts, kept), int32 [rows, 3]: every pattern of accepted tokens over three windows.

    T up to 2: with every count, 0 included. Beyond, every second row has random counts.
    """
    if width < 3:
        one = [(c, a) for c in range(width + 1) for a in range(c + 1)]
        both = torch.tensor(list(itertools.product(one, repeat=3)), dtype=torch.int32)
        return both[..., 0], both[..., 1]
    kept = torch.tensor(list(itertools.product(range(width + 1), repeat=3)), dtype=torch.int32)
    spare = torch.rand(kept.shape, generator=torch.Generator().manual_seed(width))
    counts = kept + (spare * (width + 1 - kept)).int()
    counts[::2] = width
    return counts, kept


class Rows(Speculation):
    """All rows at once, beside three recurrences in float64 over the accepted tokens.

    ``exact`` starts again from what each flush stored, ``seen`` from the copy; ``true`` never
    does, so it tells what rounding costs.
    """

    def __init__(self, lab, pool: StatePool, count: int):
        super().__init__(lab, pool, [0] * count)
        self.gen = torch.Generator().manual_seed(count)
        g = lab.geometry
        state = torch.randn(count, g.heads, g.rows, g.n, generator=self.gen)
        pool.start(self.slots, torch.arange(count) * 7919, torch.full((count,), 5))
        pool.write(0, self.slots, state)
        self.true = state.double()
        self.exact, self.seen = self._decode(self.slots), self._copy(self.slots)
        self.flushes = torch.zeros(count)

    def _plain(self, state):
        state = state.double()
        return unrotate(state) if self.pool.configs[0].rotate else state

    def _decode(self, slots):
        return self._plain(super()._decode(slots))

    def _copy(self, slots):
        return self._plain(super()._copy(slots))

    def random_inputs(self, counts: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        """As ``Lab.inputs`` has them, for all rows at once; NaN beyond a row's count."""
        g, b = self.lab.geometry, len(counts)

        def n(*shape):
            return torch.randn(b, width, *shape, generator=self.gen)

        def u():
            return torch.rand(b, width, g.heads, generator=self.gen)

        if self.lab.kind == "mamba2":
            out = (n(g.heads, g.rows), u(), n(g.groups, g.n), n(g.groups, g.n))
        else:
            keys = n(g.groups, g.n) + 0.3
            out = (n(g.groups, g.n), keys, n(g.heads, g.rows), -self.lab.decay * u(), u())
        beyond = torch.arange(width) >= counts[:, None]
        for t in out:
            t[beyond] = float("nan")
        return out

    def window(self, counts: torch.Tensor, kept: torch.Tensor, width: int) -> dict[str, float]:
        """A step and its commit. Relative RMS of y from ``seen`` and ``true``, and of the state
        that the committed tokens leave from ``exact`` and ``true``."""
        pool, inside = self.pool, torch.arange(width) < counts[:, None]
        rows = pool.verify_rows(self.slots, counts)
        inputs = self.random_inputs(counts, width)
        y = self.call(rows, inputs)
        assert not y[~inside].any()
        f = rows.flush
        if f.any():
            self.exact[f], self.seen[f] = self._decode(self.slots[f]), self._copy(self.slots[f])
            self.flushes += f
        found = {}
        for name in ("exact", "seen", "true"):
            state, wanted = getattr(self, name), []
            after = state
            for t in range(width):
                want, state = self.lab.exact(state, tuple(z[:, t] for z in inputs))
                wanted.append(want)
                after = torch.where((kept == t + 1)[:, None, None, None], state, after)
            setattr(self, name, after)
            if name != "exact" and inside.any():
                found[f"y {name}"] = rel(y[inside], torch.stack(wanted, 1)[inside])
        pool.advance_verify(rows)
        pool.commit(self.slots, kept)
        state = self.lab.load(pool, self.slots.tolist(), compute=torch.float64)
        return found | {f"state {n}": rel(state, getattr(self, n)) for n in ("exact", "true")}


def noise(fmt, stochastic: bool, high_only: bool = False) -> float:
    """What storing a state costs, as relative RMS, at most.

    An error within a step has variance 1 / 12 of the step's square where the nearest code is
    taken, on average 1 / 6 where chance decides. A float's step is 2**-mantissa of its value at
    most; that of integers belongs to the largest value of a row or block, below five times the RMS.
    The high plane of a planar format is the nearest on its own.
    """
    if fmt.name == "fp32":
        step = 2.0**-23
    elif fmt.kind == "float":
        step = 2.0 ** -ELEMENTS[fmt.element].mantissa
    else:
        step = 5.0 / fmt.max_code * (2**fmt.lo_bits if high_only and fmt.kind == "planar" else 1)
    return step / (6 if stochastic else 12) ** 0.5


def check_patterns(make_lab, kind: str, width: int, formats=("fp32", None), **kw) -> None:
    """Three windows with every pattern, and a fourth which reads what the last commit left.

    y and state over all rows: within ARITHMETIC of the recurrence from the stored state. From the
    recurrence that never rounds the state is as far as its stores take it, each with an error of
    its own, so that squares add up; a window's own inputs are exact, and decay takes the error and
    the state alike. A first state is rotated in fp32, each sum of 32 through log2(32) + 1
    roundings. A read takes C or q at random, so y is as far off as the copy is, whose own rounding
    comes on top.
    """
    lab = make_lab(kind, dataclasses.replace(PATTERNS, kind=kind))
    config = lab.config(*formats, buffer_len=2 if width < 3 else 3, **kw)
    counts, kept = every_pattern(width)
    pool = poisoned(lab, config, len(kept), 7)
    run = Rows(lab, pool, len(kept))
    update, own = config.update, noise(config.update, config.rounding == "sr")
    if config.output is not None:
        copy = noise(config.output, False)
    else:
        copy = noise(update, False, True) if update.kind == "planar" else 0.0
    sums = ARITHMETIC[kind] + (6 * 2.0**-24 if config.rotate else 0.0)
    last = torch.full_like(kept[:, :1], width)
    for n, k in zip(torch.cat((counts, last), 1).T, torch.cat((kept, last), 1).T, strict=True):
        found = run.window(n, k, width)
        stores = float(1 + run.flushes.mean())
        limits = {"y seen": ARITHMETIC[kind], "state exact": ARITHMETIC[kind]}
        limits["state true"] = stores**0.5 * own + sums
        limits["y true"] = (stores * own**2 + copy**2) ** 0.5 + sums
        for name, error in found.items():
            assert error <= limits[name], name
    assert torch.equal(pool.position[run.slots], 5 + (kept.sum(1) + width).int())
    assert run.flushes.max() == (3 if width > 1 else 1) and not run.flushes.min()


@pytest.mark.parametrize("width", range(1, 9))
def test_every_pattern_of_accepted_counts(make_lab, kind, width):
    check_patterns(make_lab, kind, width)


@pytest.mark.parametrize("at", range(1, len(FORMATS)), ids=lambda i: "+".join(map(str, FORMATS[i])))
def test_every_pattern_in_every_format(make_lab, kind, at):
    """T from 1 to 8 in turn; every second format rotated."""
    check_patterns(make_lab, kind, 1 + at % 8, FORMATS[at], rotate=at % 2 == 1)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "+".join(str(x) for x in f))
def test_random_steps_in_every_format(lab, formats, rotate):
    """T up to 8, rows that differ, counts 0 to T, accepted 0 to count; windows across flushes."""
    if rotate and formats[0] in ("bf16", "e5m2"):
        pytest.skip("rotation is the same for all")
    config = lab.config(*formats, buffer_len=5, rotate=rotate)
    pool = poisoned(lab, config, 5, 7, ring_storage="bf16")
    rng = random.Random(str(formats))
    run = Speculation(lab, pool, [3, 4, 5])
    lab_inputs = lab.inputs
    # what the ring keeps is bf16, so the recurrence beside it gets bf16 too
    keep = {"mamba2": (0, 2, 3), "gdn": (1, 2)}[lab.kind]

    def rounded(*args):
        found = lab_inputs(*args)
        return tuple(t.bfloat16().float() if i in keep else t for i, t in enumerate(found))

    lab.inputs = rounded
    if config.rotate:
        plain, copy = run._decode, run._copy
        run._decode = lambda s: unrotate(plain(s).double())
        run._copy = lambda s: unrotate(copy(s).double())
        run.exact, run.seen = run._decode(run.slots), run._copy(run.slots)
    flushes = 0
    for _ in range(12):
        counts = [rng.randint(0, 8) for _ in range(3)]
        keeps = [rng.randint(0, c) for c in counts]
        before = pool.valid[run.slots] + torch.minimum(run.accepted, pool.pending[run.slots])
        flushes += int((before >= 5).sum())
        run.step(counts, keeps, 8)
    assert flushes >= 4
    assert run.worst < ARITHMETIC[lab.kind]


def test_ring_is_full_to_the_last_entry(lab):
    """L - 1 committed inputs and T accepted: L + T - 1 entries, all folded by the next step."""
    config = lab.config("fp32", buffer_len=4)
    pool = poisoned(lab, config, 2, 7)
    run = Unrounded(lab, pool, [1])
    assert pool.views[0].tensors()[
        "ring_x" if lab.kind == "mamba2" else "ring_k"
    ].shape[1] == 4 + 8  # fmt: skip
    run.step([3], [3], 8)
    run.step([8], [8], 8)
    pool.commit(run.slots, run.accepted)
    run.accepted[:] = 0
    assert int(pool.valid[run.slots]) == 11
    run.step([8], [0], 8)
    assert run.worst < ARITHMETIC[lab.kind] and 0 < run.error < 1e-6


def test_rejected_tokens_leave_no_trace(lab, bytes_of, equal_bytes):
    """Overflowing drafts (Inf, NaN) that are rejected: later bytes and outputs are unchanged."""
    outcomes = []
    for poison in (None, 1e30, float("inf"), float("nan")):
        pool = poisoned(lab, lab.config("e4m3", "nvfp4", buffer_len=4), 2, 3)
        run = Speculation(lab, pool, [1], torch.float32)
        original = run.tokens

        def tokens(row, position, count, keep, width, poison=poison, original=original):
            inputs = original(row, position, count, keep, width)
            if poison is not None:
                for t in inputs:
                    t[keep:count] = poison
            return inputs

        run.tokens = tokens
        kept = []
        for count, keep in ((4, 1), (3, 2), (4, 4), (4, 0), (4, 2), (2, 1)):
            y = run.step([count], [keep], 4)
            kept.append(y[0, :keep])
        outcomes.append((torch.cat(kept), bytes_of(pool, run.slots.tolist(), "c")))
    for y, stored in outcomes[1:]:
        assert torch.equal(y, outcomes[0][0])
        assert equal_bytes(stored, outcomes[0][1])


@pytest.mark.parametrize("formats", [("e4m3", "nvfp4"), ("P4+8", None), ("fp16", "same")])
def test_a_retried_flush_writes_the_same_bytes(lab, formats, bytes_of, equal_bytes):
    """A step taken back and tried with other drafts, other T, another slot and other neighbours."""
    config = lab.config(*formats, buffer_len=4)
    pool = poisoned(lab, config, 4, 7)
    run = Speculation(lab, pool, [1, 2], torch.float32)
    run.step([4, 1], [4, 0], 8)
    saved = pool.save(run.slots)
    run.step([8, 1], [1, 1], 8)
    first = bytes_of(pool, run.slots[:1].tolist(), "c")
    again = poisoned(lab, config, 4, 7)
    other = torch.tensor([2])
    again.restore(other, {k: v[:1] if k != "layout" else v for k, v in saved.items()})
    run.pool, run.slots, run.requests = again, other, [1]
    run.accepted = torch.tensor([4], dtype=torch.int32)
    run.step([3], [0], 3)
    assert equal_bytes(first, bytes_of(again, [2], "c"))
    changed = bytes_of(again, [2], "c")
    run.accepted[:] = 3
    for _ in range(2):
        run.step([4], [4], 4)
    assert not equal_bytes(changed, bytes_of(again, [2], "c"))  # the next flush is another one


def test_one_token_is_a_plain_step_bit_for_bit(lab):
    """T = 1 beside plain decode over the same bytes, rows that read; and a whole run of a pool."""
    config = lab.config("e4m3", "nvfp4", buffer_len=4, rotate=True)
    pools = [poisoned(lab, config, 2, 3) for _ in range(2)]
    at = torch.tensor([1])
    for pool in pools:
        lab.start(pool, [1], [1])
    run = Speculation(lab, poisoned(lab, config, 2, 3), [1], torch.float32)
    for step in range(3):
        rows = pools[1].verify_rows(at, torch.tensor([1]))
        inputs = lab.inputs([1], [step + 6])
        run.pool = pools[1]
        got = run.call(rows, tuple(t[:, None] for t in inputs))
        pools[1].advance_verify(rows)
        pools[1].commit(at, torch.tensor([1]))
        want, _ = lab.step(pools[0], [1], [1])
        assert torch.equal(got[:, 0], want) and got.abs().max() > 0
    assert torch.equal(pools[0].valid, pools[1].valid)
    assert torch.equal(pools[0].position, pools[1].position)
    # the pages too, but for the entries that nobody wrote (NaN)
    assert torch.equal(pools[0].pages[0], pools[1].pages[0])
    # a plain step may follow: it folds the committed inputs and its own token
    y, rows = lab.step(pools[1], [1], [1])
    assert bool(rows.flush) and int(rows.valid) == 3
    assert torch.equal(y, lab.step(pools[0], [1], [1])[0])
    assert torch.equal(pools[0].pages[0], pools[1].pages[0])


def test_one_token_a_row_through_two_flushes(lab, bytes_of, equal_bytes, distance):
    """What T = 1 shares with plain decode, and what only a plain step has.

    A plain step folds its own token and reads the exact state; a verify step folds committed tokens
    alone, since its own may yet be taken back. So the L-th token of a window is read from the copy,
    and folded by the next step: into the same bytes, as the random bits belong to the position. All
    other outputs are plain decode's, bit for bit. A caller that knows its tokens to be accepted
    takes plain steps, which a pool with drafts serves as any other, bit for bit.
    """
    length = 4
    config = lab.config("e4m3", "nvfp4", buffer_len=length, rotate=True)
    plain, ours, without = *(poisoned(lab, config, 2, 3) for _ in range(2)), lab.pool(config, 2)
    run, at, owed = Speculation(lab, ours, [1], torch.float32), torch.tensor([1]), None
    for pool in (plain, ours, without):
        lab.start(pool, [1], [1])
    for step in range(2 * length + 2):
        inputs = lab.inputs([1], [step + 6])
        rows = ours.verify_rows(at, torch.tensor([1]))
        got = run.call(rows, tuple(t[:, None] for t in inputs))[:, 0]
        ours.advance_verify(rows)
        ours.commit(at, torch.tensor([1]))
        want, taken = lab.step(plain, [1], [1])
        assert torch.equal(want, lab.step(without, [1], [1])[0])
        assert torch.equal(ours.position[at], plain.position[at])
        assert bool(rows.flush) == (owed is not None)
        if owed is not None:
            assert equal_bytes(bytes_of(ours, [1], "c"), owed)
        if taken.flush:
            owed = bytes_of(plain, [1], "c")
            assert not equal_bytes(bytes_of(ours, [1], "c"), owed)
            assert int(ours.valid[1]) == length and int(plain.valid[1]) == 0
            error = distance(got, want)
            assert 0 < error < 2 * noise(config.output, False)  # as in a drift over cycles
        else:
            owed = None
            assert torch.equal(got, want)
            assert equal_bytes(bytes_of(ours, [1], "c"), bytes_of(plain, [1], "c"))
        assert equal_bytes(bytes_of(without, [1], "c"), bytes_of(plain, [1], "c"))


def test_plain_steps_between_windows(lab, distance):
    """A plain step after a long accepted window folds up to L + T inputs with its own token."""
    config = lab.config("fp32", buffer_len=4)
    pool = poisoned(lab, config, 2, 7)
    run = Unrounded(lab, pool, [1])
    run.step([3], [3], 8)
    run.step([8], [8], 8)
    pool.commit(run.slots, run.accepted)
    y, rows = lab.step(pool, run.slots.tolist(), [1], compute=torch.float64)
    assert int(rows.valid) == 11 and bool(rows.flush)
    want, state = lab.exact(run.exact, lab.inputs([1], rows.position.tolist()))
    assert distance(y, want) < 1e-6
    assert distance(run._decode(run.slots), state) < 1e-6


def test_rows_do_not_depend_on_their_neighbours(lab, bytes_of, equal_bytes):
    config = lab.config("e4m3", "nvfp4", buffer_len=3)
    outcomes = []
    for requests in ([5], [4, 5, 6], [6, 7, 5, 4]):
        pool = poisoned(lab, config, 6, 7)
        run = Speculation(lab, pool, requests, torch.float64)
        mine = requests.index(5)
        rng, ys = random.Random(3), []
        for count, keep in ((5, 3), (8, 8), (2, 0), (6, 1)):
            counts = [rng.randint(1, 8) for _ in requests]
            keeps = [rng.randint(0, c) for c in counts]
            counts[mine], keeps[mine] = count, keep
            ys.append(run.step(counts, keeps, 8)[mine])
        outcomes.append((torch.stack(ys), bytes_of(pool, run.slots[mine : mine + 1].tolist(), "c")))
    for y, stored in outcomes[1:]:
        torch.testing.assert_close(y, outcomes[0][0], rtol=1e-6, atol=1e-9)
        assert equal_bytes(stored, outcomes[0][1])


def test_the_checkpoint_never_sees_the_copy(lab, bytes_of, equal_bytes):
    """Drafts and rollbacks over several flushes, with noise for a copy before each step."""
    config = lab.config("fp16", "nvfp4", buffer_len=2)
    pools = [poisoned(lab, config, 3, 3) for _ in range(2)]
    runs = [Speculation(lab, pool, [1, 2], torch.float32) for pool in pools]
    gen, flushes, folds = torch.Generator().manual_seed(6), 0, []
    for counts, keeps in (((4, 3), (3, 1)), ((4, 4), (0, 4)), ((2, 4), (2, 0)), ((4, 1), (4, 1)),
                          ((1, 4), (1, 2)), ((3, 2), (3, 2)), ((4, 4), (1, 1))):  # fmt: skip
        copy = pools[1].views[0].copy
        copy.copy_(torch.randint(-(2**31), 2**31, copy.shape, generator=gen).int())
        for run in runs:
            run.pool.commit(run.slots, run.accepted)
        rows = pools[0].verify_rows(runs[0].slots, torch.tensor(counts))
        flushes += rows.flush.int()
        y, z = (run.step(list(counts), list(keeps), 4) for run in runs)
        read = ~rows.flush & (rows.count > 0)
        assert not torch.isclose(y[read], z[read]).all() or not read.any()  # the noise was read
        ours, noisy = (bytes_of(p, runs[0].slots.tolist(), "ckpt") for p in pools)
        assert equal_bytes(ours, noisy)
        folds.append(ours["ckpt"])
    assert flushes.min() >= 3 and not torch.equal(folds[0], folds[-1])


def test_padding_rows(lab):
    config = lab.config("e4m3", "nvfp4", buffer_len=4)
    pool = poisoned(lab, config, 3, 3)
    run = Speculation(lab, pool, [1], torch.float32)
    run.step([4], [4], 4)
    pool.commit(run.slots, run.accepted)
    before = pool.pages[0].clone()
    slots = torch.tensor([PAD_SLOT, int(run.slots), PAD_SLOT])
    rows = pool.verify_rows(slots, torch.tensor([4, 2, 0]))
    assert rows.flush.tolist() == [False, True, False]
    inputs = tuple(t.unflatten(0, (3, 4)) for t in lab.inputs([1] * 12, list(range(12))))
    y = run.call(rows, inputs)
    assert not y[0].any() and not y[2].any() and y[1, :2].any() and not y[1, 2:].any()
    pool.advance_verify(rows)
    others = [s for s in range(3) if s != int(run.slots)]
    assert torch.equal(pool.pages[0][others], before[others])
    assert pool.pending.sum() == 2 and not pool.valid.any()


@pytest.mark.parametrize("formats", [("fp32", None), ("e4m3", "nvfp4"), ("P8+4", None)])
def test_drift_over_64_cycles(lab, formats, distance):
    """64 flushes with random acceptance: the replay adds nothing to what rounding costs.

    A store's error (``noise``) fades by g^2 until the next, at least 4 tokens later: at the slowest
    head's mean decay of 0.05 a token g^2 is at most e^-0.4, so all stores together cost at most
    1 / sqrt(1 - e^-0.4) = 1.75 of one. A fold in fp32 is one more store of some ten roundings. y of
    one token has few elements, so twice the RMS error of what it reads bounds it.
    """
    config = lab.config(*formats, buffer_len=4, rotate=formats[0] == "P8+4")
    pool = poisoned(lab, config, 2, 4)
    run = Speculation(lab, pool, [1], torch.float32)
    state, rng, flushes = lab.state(1)[None].double(), random.Random(1), 0
    update, copy = config.update, 0.0
    if formats[0] != "fp32":
        copy = noise(config.output or update, False, config.output is None)
    own = 1.75 * (noise(update, True) + 10 * 2.0**-24)
    while flushes < 64:
        rows = pool.verify_rows(run.slots, torch.tensor([5]))
        flushes += int(rows.flush)
        keep = rng.choice((0, 1, 1, 2, 3, 5))
        position = int(rows.position)
        inputs = run.tokens(0, position, 5, keep, 5)
        y = run.call(rows, tuple(t[None] for t in inputs))
        for t in range(keep):
            want, state = lab.exact(state, tuple(z[t : t + 1] for z in inputs))
        pool.advance_verify(rows)
        pool.commit(run.slots, torch.tensor([keep]))
        assert int(pool.position[run.slots]) == position + keep
        got = lab.load(pool, run.slots.tolist(), compute=torch.float64)
        assert distance(got, state) < own
        if keep:
            assert distance(y[0, keep - 1], want[0]) < 2 * (own**2 + copy**2) ** 0.5


def test_trees(lab, bytes_of, equal_bytes):
    """Each path of a tree gives what the same tokens give as a chain; the accepted one is moved."""
    config = lab.config("e4m3", "nvfp4", buffer_len=4)
    parents = [-1, 0, 0, 1, 2, 2, 4, -1]
    paths = [[0, 1, 3], [0, 2, 4, 6], [0, 2, 5], [7], [0]]
    ancestors = tree_ancestors(torch.tensor([parents]))
    assert ancestors[0].tolist() == [1, 3, 5, 11, 21, 37, 85, 128]
    for path in paths:
        pool = poisoned(lab, config, 2, 7)
        chain = poisoned(lab, config, 2, 7)
        tokens = lab.inputs([10 + t for t in range(8)], list(range(8)))
        ys, runs = [], []
        for p, tree in ((pool, True), (chain, False)):
            run = Speculation(lab, p, [1], torch.float64)
            run.step([3], [2], 8)
            p.commit(run.slots, run.accepted)
            picked = tuple(t[None] for t in tokens)
            count = 8
            if not tree:
                index = path + [0] * (8 - len(path))
                picked, count = tuple(t[index][None] for t in tokens), len(path)
            rows = p.verify_rows(run.slots, torch.tensor([count]), ancestors if tree else None)
            ys.append(run.call(rows, picked)[0])
            p.advance_verify(rows)
            if tree:
                compact(p.views[0], rows, torch.tensor([path + [-1] * (8 - len(path))]))
            p.commit(run.slots, torch.tensor([len(path)]))
            runs.append(run)
        torch.testing.assert_close(ys[0][path], ys[1][: len(path)], rtol=1e-6, atol=1e-9)
        assert torch.equal(pool.valid, chain.valid) and torch.equal(pool.position, chain.position)
        rows = [
            p.verify_rows(r.slots, torch.tensor([2]))
            for p, r in zip((pool, chain), runs, strict=True)
        ]
        more = tuple(t[None] for t in lab.inputs([1, 1], [40, 41]))
        a, b = (run.call(r, more) for run, r in zip(runs, rows, strict=True))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_what_is_refused(lab):
    config = lab.config("fp32", buffer_len=4)
    plain = lab.pool(config)
    with pytest.raises(ValueError, match="verifies no drafts"):
        plain.verify_rows(torch.tensor([0]), torch.tensor([1]))
    pool = poisoned(lab, config, 3, 3)
    run = Speculation(lab, pool, [1])
    rows = pool.verify_rows(run.slots, torch.tensor([4]))
    inputs = tuple(t.unflatten(0, (1, 2)) for t in lab.inputs([1, 1], [1, 2]))
    short = (inputs[0][:, :1], *inputs[1:])
    with pytest.raises(ValueError, match="has shape"):
        run.call(rows, short)
    views = lab.pool(lab.config("fp32", buffer_len=2)).views[0]
    run.pool.views[0] = views
    with pytest.raises(ValueError, match="do not fit a ring of 2"):
        run.call(rows, inputs)
    other = {"mamba2": gdn, "gdn": mamba2}[lab.kind]
    with pytest.raises(ValueError, match="these views belong to"):
        other.verify_step(pool.views[0], config, rows, *(inputs[0],) * 5)
