"""Invariants of the replayed step over a split state, both families."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayssm_quant.formats import FORMATS, parse_format
from replayssm_quant.formats.codec import decode, encode
from replayssm_quant.formats.packing import to_page
from replayssm_quant.formats.philox import element_bits
from replayssm_quant.state.cache import read_checkpoint, read_copy, write_state
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.replay import first_offset, schedule

bounded = settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PAIRS = [
    ("fp16", "nvfp4"),
    ("fp8", "nvfp4"),
    ("int8", "int4"),
    ("bf16", "mxfp4"),
    ("e4m3/b32", "e4m3"),
    ("int8", "same"),
    ("P4+4", None),
    ("P4+8", None),
    ("P8+4", None),
]
pairs = pytest.mark.parametrize(("update", "output"), PAIRS)


@bounded
@given(
    length=st.integers(1, 64),
    steps=st.integers(1, 70),
    force=st.sets(st.integers(0, 69), max_size=4),
    rotate=st.booleans(),
    stagger=st.booleans(),
    requests=st.lists(st.integers(0, 50), min_size=1, max_size=3, unique=True),
)
def test_fp32_equals_the_recurrence(lab, distance, length, steps, force, rotate, stagger, requests):
    """Any L, partial rings, forced flushes, rows at different phases: float64 to 2e-6.

    fp32 rounding of a window of at most 64 terms, 64 * 2**-24 = 4e-6 in the worst direction and
    about 2e-7 as measured; 2e-6 leaves room for a small y in one row.
    """
    config = lab.config("fp32", "fp32", buffer_len=length, rotate=rotate, stagger=stagger)
    pool = lab.pool(config)
    poison_rings(pool)
    slots = [2, 0, 1][: len(requests)]
    state = lab.start(pool, slots, requests).double()
    for t in range(steps):
        y, rows = lab.step(pool, slots, requests, force=t in force)
        inputs = lab.inputs(requests, rows.position.tolist())
        want, state = lab.exact(state, inputs)
        assert distance(y, want) < 2e-6
    assert distance(lab.load(pool, slots), state) < 2e-6


def poison_rings(pool) -> None:
    """NaN in every ring row; a step must never read one that it did not write."""
    for name, t in pool.views[0].tensors().items():
        if name.startswith("ring"):
            t.fill_(float("nan"))


@pytest.mark.parametrize("rotate", [False, True])
def test_ring_beyond_the_valid_inputs_is_never_read(lab, distance, rotate):
    """NaN in every ring row at or past ``valid``, before each step, in rows of different phase."""
    pool = lab.pool(lab.config("fp32", "fp32", buffer_len=5, rotate=rotate), 2)
    states, phases = {}, set()
    for t in range(16):
        live = [0] if t < 3 else [0, 1]
        if t in (0, 3):
            states[live[-1]] = lab.start(pool, live[-1:], live[-1:])[0].double()
        for slot in live:
            for name, ring in pool.views[0].tensors().items():
                if name.startswith("ring"):
                    ring[slot, int(pool.valid[slot]) :] = float("nan")
        phases.add(tuple(pool.valid.tolist()))
        exact = torch.stack([states[i] for i in live])
        assert distance(lab.load(pool, live), exact) < 2e-6
        y, rows = lab.step(pool, live, live)
        want, exact = lab.exact(exact, lab.inputs(live, rows.position.tolist()))
        assert distance(y, want) < 2e-6
        states = dict(zip(live, exact, strict=True))
    assert len(phases) > 5


@bounded
@given(length=st.integers(1, 20), force=st.sets(st.integers(0, 40), max_size=3))
def test_split_fp32_equals_shared_fp32_bit_for_bit(lab, bytes_of, equal_bytes, length, force):
    out = []
    for output in (None, "fp32"):
        pool = lab.pool(lab.config("fp32", output, buffer_len=length))
        lab.start(pool, [0, 1], [4, 9])
        out.append((lab.run(pool, [0, 1], [4, 9], 41, force), bytes_of(pool, [0, 1])))
    assert pool.configs[0].has_copy
    assert torch.equal(out[0][0], out[1][0]) and equal_bytes(out[0][1], out[1][1])


@pytest.mark.parametrize("update", ["fp16", "fp8", "int8/row", "bf16"])
def test_checkpoint_ignores_the_output_format(lab, bytes_of, equal_bytes, update):
    """40 flushes; and again with every copy replaced by noise after each flush."""
    found = {}
    for output in ("same", "nvfp4", "int4", "e4m3", "noise"):
        name = "nvfp4" if output == "noise" else output
        pool = lab.pool(lab.config(update, name, buffer_len=3, seed=1))
        lab.start(pool, [0, 1], [4, 9])
        for _ in range(120):
            _, rows = lab.step(pool, [0, 1], [4, 9])
            if output == "noise" and bool(rows.flush.any()):
                scramble(pool.views[0].copy, pool.views[0].copy_scale)
        found[output] = bytes_of(pool, [0, 1])
    assert all(equal_bytes(found["same"], f) for f in found.values())
    assert any(bool(t.view(torch.uint8).any()) for t in found["same"].values())


def scramble(*tensors) -> None:
    for t in tensors:
        if t is not None:
            noise = torch.randint(0, 100, (*t.shape, t.element_size()), dtype=torch.uint8)
            t.copy_(noise.view(t.dtype).view(t.shape))


@pytest.mark.parametrize(("update", "output"), [p for p in PAIRS if p[1] != "same"])
def test_readout_sees_only_the_copy(lab, update, output):
    """Between flushes the update's own bytes may be anything; the copy's bytes matter."""
    config = lab.config(update, output, buffer_len=6)
    clean, pool, blind = (lab.pool(config) for _ in range(3))
    for p in (clean, pool, blind):
        lab.start(p, [0], [4])
        lab.run(p, [0], [4], 6)  # a flush is the last step
    views = pool.views[0]
    if config.update.is_planar:
        scramble(views.ckpt_low)
        blind.views[0].ckpt.zero_()
    else:
        views.ckpt.view(torch.uint8).fill_(0xFF)  # NaN codes
        blind.views[0].copy.zero_()
    y, want = lab.run(pool, [0], [4], 5), lab.run(clean, [0], [4], 5)
    assert torch.equal(y, want)
    other = lab.run(blind, [0], [4], 5)
    assert (other != want).flatten(1).any(1).all()


@pairs
def test_copy_is_a_function_of_the_checkpoint(lab, update, output):
    config = lab.config(update, output, buffer_len=5)
    pool = lab.pool(config)
    lab.start(pool, [0, 1], [4, 9])
    lab.run(pool, [0, 1], [4, 9], 17)  # in the middle of a window
    views, slots = pool.views[0], torch.tensor([0, 1])
    checkpoint, copy = read_checkpoint(views, config, slots), read_copy(views, config, slots)
    if config.output is not None:
        again = encode(checkpoint, config.output)
        assert torch.equal(decode(again, config.output), copy)
        assert torch.equal(to_page(again.codes), views.copy[slots])
    else:
        assert views.copy.data_ptr() == views.ckpt.data_ptr()
    if config.is_shared:
        assert torch.equal(checkpoint, copy)
    elif config.update.is_planar:  # the copy is the checkpoint rounded to the high plane's grid
        scale = (checkpoint - copy).abs().amax((-1, -2))
        assert (scale > 0).all() and ((checkpoint - copy).norm() < 0.2 * checkpoint.norm())


@pytest.mark.parametrize("update", ["fp16", "fp8", "int8", "P4+8", "P8+4"])
def test_same_bytes_in_any_batch(lab, bytes_of, equal_bytes, update):
    """A request alone, and among others in other slots, rows and phases, padded: same bytes."""
    config = lab.config(update, buffer_len=4, stagger=True)
    alone = lab.pool(config, 1)
    lab.start(alone, [0], [7])
    y_alone = lab.run(alone, [0], [7], 14)

    crowd = lab.pool(config, 9)
    lab.start(crowd, [3, 8], [1, 2], prompt=11)
    lab.run(crowd, [3, 8], [1, 2], 3)
    lab.start(crowd, [5], [7])
    ys = []
    for t in range(14):
        slots, requests = [(3, 8, -1, 5), (5, 3), (-1, 5, 8)][t % 3], [7]
        requests = [{3: 1, 8: 2, 5: 7, -1: 0}[s] for s in slots]
        y, _ = lab.step(crowd, list(slots), requests)
        ys.append(y[slots.index(5)])
    assert equal_bytes(bytes_of(alone, [0], ""), bytes_of(crowd, [5], ""))
    assert torch.equal(torch.stack(ys), y_alone[:, 0])


def test_negative_zeros_do_not_depend_on_the_batch(lab, bytes_of, equal_bytes):
    """A state of -0 and no writes, flushed beside a row with a longer window: the same bits."""
    config, found = lab.config("fp16", "same", buffer_len=9, rounding="rn"), []
    for company in (False, True):
        pool = lab.pool(config, 2)
        lab.start(pool, [0, 1], [3, 4])
        pool.write(0, torch.tensor([0]), torch.full_like(lab.state(3)[None], -0.0))
        if company:
            lab.run(pool, [1], [4], 6)
        slots = [0, 1] if company else [0]
        rows = pool.rows(torch.tensor(slots), True)
        inputs = list(lab.inputs([3, 4][: len(slots)], [6, 12][: len(slots)]))
        at = 0 if lab.kind == "mamba2" else 2
        inputs[at] = torch.zeros_like(inputs[at])
        lab.decode(pool, rows, inputs)
        found.append(bytes_of(pool, [0]))
    assert equal_bytes(*found)


@pytest.mark.parametrize("update", ["fp16", "fp8", "int8", "P4+4", "bf16"])
def test_every_flush_and_request_draws_its_own_bits(lab, bytes_of, update):
    config = lab.config(update, buffer_len=2)
    pool = lab.pool(config, 4)
    state = lab.state(1)[None]
    draws = []
    for key, position, seed_layer in ((5, 8, 0), (5, 10, 0), (6, 8, 0), (5, 8, 1)):
        at = torch.tensor([len(draws)])
        pool.start(at, torch.tensor([key]), torch.tensor([position]))
        write_state(
            pool.views[0], config, at, state, pool.key[at], pool.position[at], layer=seed_layer
        )
        draws.append(read_checkpoint(pool.views[0], config, at))
    for i in range(4):
        for j in range(i):
            assert (draws[i] != draws[j]).float().mean() > 0.1
    nearest = lab.pool(lab.config(update, buffer_len=2, rounding="rn"), 2)
    nearest.start(torch.tensor([0, 1]), torch.tensor([5, 6]), torch.tensor([8, 10]))
    nearest.write(0, torch.tensor([0, 1]), state.repeat(2, 1, 1, 1))
    both = bytes_of(nearest, [0, 1])
    assert all(torch.equal(t[0], t[1]) for t in both.values())


@pytest.mark.parametrize("rotated_n", [32, 96])
def test_rotation_changes_nothing_in_fp32(make_lab, kind, distance, rotated_n):
    lab = make_lab(kind, LayerGeometry(kind, 4, 6, rotated_n, 2))
    y, state = [], []
    for rotate in (False, True):
        pool = lab.pool(lab.config("fp32", "fp32", rotate=rotate, buffer_len=7))
        lab.start(pool, [0], [3])
        y.append(lab.run(pool, [0], [3], 25))
        state.append(lab.load(pool, [0]))
    assert distance(y[1], y[0]) < 2e-6 and distance(state[1], state[0]) < 2e-6
    raw = read_checkpoint(pool.views[0], pool.configs[0], torch.tensor([0]))
    assert distance(raw, state[0]) > 0.5  # what is stored is rotated


@pytest.mark.parametrize(
    ("update", "output"), [("fp16", "nvfp4"), ("int8", "same"), ("P8+4", None)]
)
def test_buffer_of_one_is_the_per_step_baseline(lab, update, output):
    """L = 1: every step flushes, and the state is round(step(state)) with the same bits."""
    config = lab.config(update, output, buffer_len=1)
    pool = lab.pool(config, 1)
    g, fmt = lab.geometry, config.update
    shape = (g.heads, g.rows, g.n)
    key = torch.tensor([lab.key(3)])

    def rounded(state, position):
        bits = element_bits(key, torch.tensor([position]), 0, *shape)
        return decode(encode(state, fmt, bits), fmt)

    state = rounded(lab.start(pool, [0], [3], prompt=5), 5)
    for t in range(12):
        y, rows = lab.step(pool, [0], [3])
        assert bool(rows.flush.all()) and int(rows.valid[0]) == 0
        want, state = lab.exact(state, lab.inputs([3], [6 + t]))
        assert torch.allclose(y, want, rtol=1e-5, atol=1e-6)  # y comes from the unrounded state
        state = rounded(state, 6 + t)
        assert torch.equal(read_checkpoint(pool.views[0], config, torch.tensor([0])), state)


SCALED = [("fp8", "nvfp4"), ("int8", "int4"), ("P4+8", None), ("P8+4", None), ("e4m3/b32", "same")]


@pytest.mark.parametrize(("update", "output"), SCALED)
@pytest.mark.parametrize("factor", [2.0**9, 2.0**-11])
def test_linear_in_powers_of_two(lab, bytes_of, update, output, factor):
    """State and x (or v) times 2**k: y times 2**k and the same codes, bit for bit."""
    config = lab.config(update, output, buffer_len=4)
    out = []
    for scale in (1.0, factor):
        pool = lab.pool(config, 1)
        lab.start(pool, [0], [3])
        pool.write(0, torch.tensor([0]), lab.state(3)[None] * scale)
        ys = []
        for _ in range(11):
            rows = pool.rows(torch.tensor([0]))
            inputs = list(lab.inputs([3], rows.position.tolist()))
            at = 0 if lab.kind == "mamba2" else 2
            inputs[at] = inputs[at] * scale
            ys.append(lab.decode(pool, rows, inputs))
            pool.advance(rows)
        out.append((torch.stack(ys), bytes_of(pool, [0])["ckpt"]))
    assert torch.equal(out[0][0] * factor, out[1][0]) and torch.equal(out[0][1], out[1][1])
    assert out[0][0].abs().max() > 0


@pytest.mark.parametrize("update", ["int8", "fp8", "P8+4"])
def test_no_input_leaves_only_decay(make_lab, bytes_of, update):
    """x = 0 under nearest rounding: the codes stay, the fp32 scales shrink by the decay."""
    lab = make_lab("mamba2", LayerGeometry("mamba2", 4, 6, 32, 2), 0.01)
    config = lab.config(update, "same" if update != "P8+4" else None, buffer_len=4, rounding="rn")
    pool = lab.pool(config, 1)
    lab.start(pool, [0], [3])
    before = bytes_of(pool, [0])
    total = torch.zeros(lab.geometry.heads)
    for _ in range(400):
        rows = pool.rows(torch.tensor([0]))
        x, dt, B, C = lab.inputs([3], rows.position.tolist())
        lab.decode(pool, rows, (torch.zeros_like(x), dt, B, C))
        total += dt[0] * lab.A
        pool.advance(rows)
    after = bytes_of(pool, [0])
    assert torch.equal(before["ckpt"], after["ckpt"])
    ratio = after["ckpt_scale"] / before["ckpt_scale"]
    # 100 flushes, each within about three fp32 roundings
    assert torch.allclose(ratio, torch.exp(total)[None, :, None].expand_as(ratio), rtol=5e-5)


@bounded
@given(
    phases=st.lists(st.integers(0, 12), min_size=2, max_size=3),
    length=st.integers(1, 9),
)
def test_rows_flush_at_their_own_steps(lab, phases, length):
    """Rows that joined at different times follow replay.schedule, each by itself."""
    config = lab.config("fp32", "fp32", buffer_len=length, stagger=True)
    pool = lab.pool(config)
    seen = {i: [] for i in range(len(phases))}
    for t in range(22):
        live = [i for i, p in enumerate(phases) if p <= t]
        for i in live:
            if phases[i] == t:
                lab.start(pool, [i], [i], prompt=3 + i)
        if live:
            _, rows = lab.step(pool, live, live)
            for i, p, v, f in zip(live, rows.position, rows.valid, rows.flush, strict=True):
                seen[i].append((int(p), int(v), bool(f)))
    for i, got in seen.items():
        steps = schedule(3 + i, len(got), length, first_offset(lab.key(i), length))
        assert got == [(s.position, s.valid, s.flush) for s in steps]


@pytest.mark.parametrize("length", [1, 2, 16])
def test_padding_rows_touch_nothing(lab, bytes_of, equal_bytes, length):
    """Pads give zero even where every other slot is NaN; no byte outside the live slot changes."""
    config = lab.config("fp8", "nvfp4", buffer_len=length)
    pool = lab.pool(config, 3)
    pool.pages[0][:] = 0xFF
    lab.start(pool, [1], [3])
    before = bytes_of(pool, [0, 2], "")
    for _ in range(2 * length + 1):
        y, rows = lab.step(pool, [-1, 1, -1], [0, 3, 0])
        assert y.isfinite().all() and not y[0].any() and not y[2].any() and y[1].any()
        assert not bool(rows.flush[0])
    assert equal_bytes(before, bytes_of(pool, [0, 2], ""))
    assert pool.position.tolist() == [0, 5 + 2 * length + 1, 0]
    y, _ = lab.step(pool, [-1, -1], [0, 0])  # nothing but padding
    assert not y.any()


@pairs
def test_slot_reuse_equals_a_fresh_slot(lab, bytes_of, equal_bytes, update, output):
    config = lab.config(update, output, buffer_len=5)
    used, fresh = lab.pool(config, 1), lab.pool(config, 1)
    lab.start(used, [0], [8])
    lab.run(used, [0], [8], 13)
    used.pages[0][:] = 0xFF  # the worst tenant: NaN everywhere, ring included
    results = []
    for pool in (used, fresh):
        at = torch.tensor([0])
        pool.start(
            at, torch.tensor([lab.key(3)]), torch.tensor([0])
        )  # no prompt, so nothing to write
        results.append((lab.run(pool, [0], [3], 12), bytes_of(pool, [0], "ckpt")))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].isfinite().all()
    assert equal_bytes(results[0][1], results[1][1])


@pairs
def test_every_buffer_is_written(lab, update, output):
    """Pages of NaN bytes, one window: checkpoint, copy, scales and ring are all finite."""
    config = lab.config(update, output, buffer_len=3)
    pool = lab.pool(config, 1)
    pool.pages[0][:] = 0xFF
    at = torch.tensor([0])
    pool.start(at, torch.tensor([lab.key(3)]), torch.tensor([5]), clear=False)
    pool.write(0, at, lab.state(3)[None])
    lab.run(pool, [0], [3], 3)
    assert read_checkpoint(pool.views[0], config, at).isfinite().all()
    assert read_copy(pool.views[0], config, at).isfinite().all()
    for name, t in pool.views[0].tensors().items():
        if name.startswith("ring"):
            assert t[0, :2].isfinite().all(), name


def test_moved_requests_go_on_unchanged(lab):
    """save, restore, copy and reorder in the middle of a window, ring and cursor included."""
    config = lab.config("fp8", "nvfp4", buffer_len=6)
    pool = lab.pool(config, 4)
    lab.start(pool, [0, 1], [3, 4])
    lab.run(pool, [0, 1], [3, 4], 9)
    saved = pool.save(torch.tensor([0]))
    pool.copy(torch.tensor([1]), torch.tensor([2]))
    want = lab.run(pool, [0, 1], [3, 4], 8)
    assert torch.equal(lab.run(pool, [2], [4], 8)[:, 0], want[:, 1])
    pool.restore(torch.tensor([3]), saved)
    assert torch.equal(lab.run(pool, [3], [3], 8)[:, 0], want[:, 0])
    pool.restore(torch.tensor([0]), saved)
    pool.reorder(torch.tensor([2, 0, 0, 1]))
    again = lab.run(pool, [1, 2], [3, 3], 8)
    assert torch.equal(again[:, 0], want[:, 0]) and torch.equal(again[:, 1], want[:, 0])


def test_forced_flush_empties_the_ring(lab, distance):
    config = lab.config("fp32", "nvfp4", buffer_len=8)
    pool = lab.pool(config, 1)
    state = lab.start(pool, [0], [3]).double()
    for t in range(11):
        y, rows = lab.step(pool, [0], [3], force=t in (0, 4, 5, 10))
        want, state = lab.exact(state, lab.inputs([3], [6 + t]))
        if bool(rows.flush[0]):
            assert distance(y, want) < 2e-6  # a flush reads the fp32 state, not the copy
    assert int(pool.valid[0]) == 0
    stored = read_checkpoint(pool.views[0], config, torch.tensor([0]))
    assert distance(stored, state) < 2e-6


def test_every_pair_of_formats_runs_or_says_why(lab):
    ran = refused = 0
    for update in FORMATS:
        for output in (None, "same", *FORMATS):
            try:
                config = lab.config(update, output, buffer_len=2)
            except ValueError as error:
                names = {parse_format(f).name for f in (update, output) if f not in (None, "same")}
                assert "\n" not in str(error) and any(n in str(error) for n in names)
                refused += 1
                continue
            pool = lab.pool(config, 1)
            lab.start(pool, [0], [3])
            assert lab.run(pool, [0], [3], 3).isfinite().all()
            ran += 1
    assert ran > 60 and refused > 60


@pytest.mark.parametrize(
    ("update", "output", "bound"),
    [
        # numerics measured on base-like data times four (Mamba-2) for white data, rounded up
        ("fp16", "fp16", 4e-3),
        ("P8+4", None, 2e-2),
        ("P4+8", None, 0.15),
        ("P4+4", None, 0.2),
        ("fp16", "nvfp4", 0.15),
        ("fp8", "nvfp4", 0.25),
        ("int8", "same", 6e-2),
    ],
)
def test_output_error_is_that_of_the_format(lab, distance, update, output, bound):
    config = lab.config(update, output, rotate=True)
    pool = lab.pool(config, 1)
    state = lab.start(pool, [0], [3]).double()
    y, want = [], []
    for t in range(96):
        y.append(lab.step(pool, [0], [3])[0])
        exact, state = lab.exact(state, lab.inputs([3], [6 + t]))
        want.append(exact)
    error = distance(torch.stack(y), torch.stack(want))
    assert bound / 30 < error < bound
    assert distance(lab.load(pool, [0]), state) < bound


def test_half_precision_ring_rounds_inputs_once(lab, distance):
    """A bf16 ring: flush and readout use the same rounded inputs as a recurrence fed with them."""
    pool = lab.pool(lab.config("fp32", "fp32", buffer_len=5), 1, ring_storage="bf16")
    state = lab.start(pool, [0], [3]).double()
    rounded = {0, 2} if lab.kind == "mamba2" else {1, 2}
    for t in range(13):
        y, _ = lab.step(pool, [0], [3])
        inputs = lab.inputs([3], [6 + t])
        inputs = [i.bfloat16().float() if n in rounded else i for n, i in enumerate(inputs)]
        want, state = lab.exact(state, inputs)
        assert distance(y, want) < 2e-6


def test_inputs_of_another_shape_are_refused(lab):
    pool = lab.pool(lab.config("fp32"), 2)
    lab.start(pool, [0, 1], [3, 4])
    rows = pool.rows(torch.tensor([0, 1]))
    good = list(lab.inputs([3, 4], [6, 6]))
    for at in range(len(good)):
        bad = list(good)
        bad[at] = bad[at][:1]
        with pytest.raises(ValueError, match=r"has shape \(1, .*need \(2, "):
            lab.decode(pool, rows, bad)
