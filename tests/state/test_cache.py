"""StatePool and StepRows: what they refuse, and that bookkeeping touches only what it should."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.config import StateConfig
from replayssm_quant.state.cache import PAD_SLOT, StatePool, StepRows
from replayssm_quant.state.geometry import LayerGeometry

GEOMETRY = {0: LayerGeometry("mamba2", 2, 4, 32, 1), 3: LayerGeometry("gdn", 2, 4, 32, 1)}


def pool(slots: int = 4, update: str = "fp8", **kw) -> StatePool:
    options = {k: kw.pop(k) for k in ("ring_storage", "debug") if k in kw}
    return StatePool(GEOMETRY, StateConfig.from_flags(update, **kw), slots, **options)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def started(**kw) -> StatePool:
    p = pool(**kw)
    p.start(ids(0, 2), ids(5, 6), ids(3, 9))
    for layer, g in GEOMETRY.items():
        gen = torch.Generator().manual_seed(layer)
        p.write(layer, ids(0, 2), torch.randn(2, g.heads, g.rows, g.n, generator=gen))
    return p


def test_making_a_pool():
    with pytest.raises(ValueError, match="at least one slot, not 0"):
        pool(0)
    with pytest.raises(ValueError, match="no.*recurrent layer|has none"):
        StatePool({}, StateConfig(), 1)
    configs = {0: StateConfig(buffer_len=8), 3: StateConfig(buffer_len=16)}
    with pytest.raises(ValueError, match=r"buffer_len differs: \[8, 16\]"):
        StatePool(GEOMETRY, configs, 1)
    with pytest.raises(ValueError, match=r"layers \[3\] have no StateConfig"):
        StatePool(GEOMETRY, {0: StateConfig()}, 1)
    mixed = StatePool(GEOMETRY, {0: StateConfig(), 3: StateConfig.from_flags("P8+4")}, 2)
    assert mixed.slots == 2 and mixed.configs[3].update.is_planar


@pytest.mark.parametrize("slots", [ids(4), ids(0, 99), ids(-2), ids(2**40), ids(-(2**40), 0)])
def test_slots_out_of_range(slots):
    p = started()
    before = {i: page.clone() for i, page in p.pages.items()}
    keys = torch.zeros(slots.numel(), dtype=torch.int64)
    state = torch.zeros(slots.numel(), 2, 4, 32)
    for call in (
        lambda: p.start(slots, keys, keys),
        lambda: p.write(0, slots, state),
        lambda: p.clear(slots),
        lambda: p.save(slots),
        lambda: p.copy(slots, slots),
        lambda: p.rows(slots),
    ):
        with pytest.raises(ValueError, match=r"slot -?\d+ is outside the pool of 4 slots"):
            call()
    assert all(torch.equal(before[i], page) for i, page in p.pages.items())


def test_only_steps_may_pad():
    p = started()
    rows = p.rows(ids(PAD_SLOT, 2))
    assert rows.live.tolist() == [1] and rows.flush.tolist() == [False, False]
    for call in (p.clear, p.save, lambda s: p.start(s, ids(1), ids(1))):
        with pytest.raises(ValueError, match="slot -1 is outside"):
            call(ids(PAD_SLOT))


@pytest.mark.parametrize("slots", [torch.tensor([0.0]), torch.tensor(1), torch.tensor([True])])
def test_slots_of_another_type(slots):
    with pytest.raises(TypeError, match="slots must be an integer vector"):
        started().rows(slots)


def test_two_requests_cannot_share_a_slot():
    p = started(debug=True)
    for call in (
        lambda: p.start(ids(1, 1), ids(5, 6), ids(0, 0)),
        lambda: p.write(0, ids(1, 1), torch.zeros(2, 2, 4, 32)),
        lambda: p.copy(ids(0, 2), ids(1, 1)),
        lambda: p.rows(ids(1, PAD_SLOT, 1)),
    ):
        with pytest.raises(ValueError, match="slot 1 appears twice"):
            call()
    assert p.rows(ids(PAD_SLOT, 1, PAD_SLOT)).live.tolist() == [1]  # pads may repeat
    assert started().rows(ids(1, 1)).slots.tolist() == [1, 1]  # without debug nobody looks


def test_states_and_vectors_that_do_not_fit():
    p = started()
    for state in (
        torch.zeros(2, 2, 4, 32, dtype=torch.float64),
        torch.zeros(2, 2, 32, 4),
        torch.zeros(1, 2, 4, 32),
    ):
        with pytest.raises(ValueError, match=r"layer 0 stores fp32 states \(2, 2, 4, 32\)"):
            p.write(0, ids(0, 2), state)
    with pytest.raises(ValueError, match="keys must be integers, one a slot"):
        p.start(ids(0, 1), ids(5), ids(0, 0))
    with pytest.raises(ValueError, match="positions must be integers"):
        p.start(ids(0), ids(5), torch.tensor([0.5]))
    with pytest.raises(ValueError, match="position -3 is negative"):
        p.start(ids(0), ids(5), ids(-3))


def test_checking_rows():
    p = started(buffer_len=4)
    good = p.rows(ids(0, PAD_SLOT, 2))
    good.check(4, 4)
    changes = [
        ({"valid": good.valid.long()}, TypeError, "rows.valid is torch.int64; it must be"),
        ({"flush": good.flush.int()}, TypeError, "rows.flush is torch.int32"),
        ({"key": good.key.int()}, TypeError, "rows.key"),
        ({"slots": good.slots.float()}, TypeError, "rows.slots is torch.float32"),
        ({"position": good.position[:1]}, ValueError, r"rows.position has shape \(1,\)"),
        ({"slots": ids(0, -1, 0)}, ValueError, "slot 0 appears twice"),
        ({"slots": ids(0, -1, 4)}, ValueError, "slot 4 is outside .* or -1 for padding"),
        ({"slots": ids(0, -7, 2)}, ValueError, "slot -7 is outside"),
        ({"valid": good.valid + 4}, ValueError, "rows.valid holds 4; a ring of 4 allows 0 to 3"),
        ({"valid": good.valid - 1}, ValueError, "rows.valid holds -1"),
        ({"valid": good.valid + 3}, ValueError, "slot 0 holds 3 inputs and does not flush"),
        ({"position": good.position * 0}, ValueError, "at least 1"),
    ]
    for change, error, words in changes:
        with pytest.raises(error, match=words):
            dataclasses.replace(good, **change).check(4, 4)
    pads = p.rows(ids(PAD_SLOT))
    dataclasses.replace(pads, valid=pads.valid + 9).check(4, 4)  # a pad's values mean nothing


def test_int32_slots_do():
    p = started()
    rows = p.rows(torch.tensor([2, PAD_SLOT], dtype=torch.int32))
    p.advance(rows)
    assert p.valid.tolist() == [0, 0, 1, 0] and p.position.tolist() == [3, 0, 10, 0]


def test_clear_leaves_no_trace_and_spares_the_others():
    p = started()
    others = {i: page[[0, 1, 3]].clone() for i, page in p.pages.items()}
    p.advance(p.rows(ids(0, 2)))
    p.clear(ids(2))
    assert not any(page[2].any() for page in p.pages.values())
    for vector in (p.valid, p.position, p.offset, p.key):
        assert int(vector[2]) == 0
    assert all(torch.equal(others[i], page[[0, 1, 3]]) for i, page in p.pages.items())
    assert int(p.valid[0]) == 1 and int(p.key[0]) == 5


def test_start_zeroes_the_slot_or_leaves_it():
    p = started()
    kept = {i: page[0].clone() for i, page in p.pages.items()}
    p.start(ids(0), ids(5), ids(7), clear=False)
    assert all(torch.equal(kept[i], page[0]) for i, page in p.pages.items())
    p.start(ids(0), ids(5), ids(7))
    assert not any(page[0].any() for page in p.pages.values())
    assert any(page[2].any() for page in p.pages.values())


@pytest.mark.parametrize(
    "other",
    [
        dict(update="int8"),  # same bytes a slot, another meaning
        dict(update="fp8", rotate=True),
        dict(update="fp8", output_dtype="int4"),
        dict(update="fp8", buffer_len=8),
        dict(update="fp8", ring_storage="fp16"),
    ],
)
def test_saved_states_fit_only_their_own_layout(other):
    update = other.pop("update")
    saved = started().save(ids(0))
    strange = pool(4, update, **other)
    with pytest.raises(ValueError, match="another layout"):
        strange.restore(ids(1), saved)
    with pytest.raises(ValueError, match="another layout"):
        started().restore(ids(1), {k: v for k, v in saved.items() if k != "layout"})


def test_saved_states_fit_a_pool_of_another_size_and_seed():
    source = started()
    target = pool(9, seed=3)
    target.restore(ids(8, 4), source.save(ids(0, 2)))
    for i in GEOMETRY:
        assert torch.equal(target.pages[i][[8, 4]], source.pages[i][[0, 2]])
    assert target.key[[8, 4]].tolist() == [5, 6] and target.position[[8, 4]].tolist() == [3, 9]
    with pytest.raises(ValueError, match="2 saved requests do not pair with 1 slots"):
        target.restore(ids(0), source.save(ids(0, 2)))


def test_moves_of_the_wrong_size():
    p = started()
    with pytest.raises(ValueError, match="2 source slots do not pair with 1"):
        p.copy(ids(0, 2), ids(1))
    with pytest.raises(ValueError, match="order has 3 entries; the pool has 4"):
        p.reorder(ids(0, 1, 2))
    with pytest.raises(ValueError, match="slot 7 is outside"):
        p.reorder(ids(0, 1, 2, 7))


def test_one_source_may_fill_many_slots():
    p = started()
    p.copy(ids(2, 2, 0), ids(0, 1, 3))  # slot 0 is read before it is overwritten
    assert p.key.tolist() == [6, 6, 6, 5]
    assert torch.equal(p.pages[0][0], p.pages[0][2])
    p.reorder(ids(3, 3, 0, 0))
    assert p.key.tolist() == [5, 5, 6, 6]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 6), max_size=5))
def test_fuzzed_indices_never_write_elsewhere(slots):
    p = started(debug=True)
    untouched = [s for s in range(4) if s not in slots]
    tensors = (p.position, *p.pages.values())
    before = [t[untouched].clone() for t in tensors]
    legal = all(-1 <= s < 4 for s in slots)
    live = [s for s in slots if s != PAD_SLOT]
    legal = legal and len(set(live)) == len(live)
    try:
        rows = p.rows(torch.tensor(slots, dtype=torch.int64))
        p.advance(rows)
        assert legal and p.position[live].tolist() == rows.position[rows.live].tolist()
    except ValueError:
        assert not legal
    assert all(torch.equal(a, t[untouched]) for a, t in zip(before, tensors, strict=True))


def test_take_keeps_rows_together():
    rows = StepRows(ids(3, 1), ids(0, 2).int(), ids(0, 1).bool(), ids(5, 6).int(), ids(7, 8))
    one = rows.take(ids(1))
    assert [int(getattr(one, f.name)) for f in dataclasses.fields(one)] == [1, 2, 1, 6, 8]
