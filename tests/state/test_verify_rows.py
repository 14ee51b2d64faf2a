"""Cursors of speculative decoding, ring capacity, and what a plan says of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.config import StateConfig
from replayssm_quant.plan import main
from replayssm_quant.state.budget import budget
from replayssm_quant.state.cache import PAD_SLOT, StatePool, compact, tree_ancestors
from replayssm_quant.state.geometry import LayerGeometry, ModelGeometry
from replayssm_quant.state.layout import (
    CURSOR_BYTES,
    PENDING_BYTES,
    StateLayout,
    ring_capacity,
)

GEOMETRY = {0: LayerGeometry("mamba2", 2, 4, 32, 1), 3: LayerGeometry("gdn", 2, 4, 32, 1)}


def pool(drafts: int = 3, length: int = 4, slots: int = 4, **kw) -> StatePool:
    config = StateConfig.from_flags("fp8", buffer_len=length, **kw)
    made = StatePool(GEOMETRY, config, slots, drafts=drafts, debug=True)
    made.start(ids(*range(slots)), ids(*range(5, 5 + slots)), ids(*[10] * slots))
    return made


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def step(p: StatePool, slot: int, count: int, accepted: int):
    """Verify and accept at once; returns the rows."""
    rows = p.verify_rows(ids(slot), ids(count))
    p.advance_verify(rows)
    p.commit(ids(slot), ids(accepted))
    return rows


def test_capacity():
    assert [ring_capacity(16, d) for d in (0, 1, 7)] == [16, 18, 24]
    for drafts, error in ((8, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match=f"drafts {drafts}"):
            ring_capacity(16, drafts)  # type: ignore[arg-type]


@pytest.mark.parametrize("geometry", GEOMETRY.values(), ids=lambda g: g.kind)
def test_drafts_only_lengthen_the_ring(geometry):
    config = StateConfig.from_flags("fp8", "nvfp4")
    plain, wide = StateLayout(geometry, config), StateLayout(geometry, config, drafts=4)
    assert StateLayout(geometry, config, drafts=0).signature == plain.signature
    assert wide.signature != plain.signature
    for name, field in plain.fields.items():
        other = wide.fields[name]
        if name.startswith("ring"):
            assert field.shape[0] == 16 and other.shape == (21, *field.shape[1:])
        else:
            assert other == field
    assert wide.ring_bytes * 16 == plain.ring_bytes * 21
    assert wide.ring_row_bytes == plain.ring_row_bytes


def test_bytes_of_a_step_follow_the_cursors():
    """Counted along a run of a pool: T tokens a step, always ``kept`` of them kept."""
    layout = pool(4, 16).layouts[0]
    for kept in range(1, 6):
        p = pool(4, 16)
        state = ring = 0.0
        steps = 0
        while True:
            rows = step(p, 0, 5, kept)
            flush = bool(rows.flush)
            if steps or flush:  # from the first flush on
                steps += 1
                state += layout.config.readout.readout_bytes(2, 4, 32)
                ring += (int(rows.valid) + 5) * layout.ring_row_bytes
                if flush:
                    state += 2 * layout.checkpoint_bytes + layout.copy_bytes
            if steps > 3 * 16 and flush:
                break
        state -= 2 * layout.checkpoint_bytes + layout.copy_bytes  # the last flush opens a window
        state -= layout.config.readout.readout_bytes(2, 4, 32)
        ring -= (int(rows.valid) + 5) * layout.ring_row_bytes
        want = layout.verify_bytes(kept)
        assert state / (steps - 1) == pytest.approx(want[0])
        assert ring / (steps - 1) == pytest.approx(want[1])
    with pytest.raises(ValueError, match="kept 6"):
        layout.verify_bytes(6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 6),
    st.data(),
    st.booleans(),
    st.lists(st.booleans(), max_size=30),
)
def test_cursors_of_any_run(drafts, length, data, stagger, plain):
    """Against counting by hand: committed inputs, position, flush, and room in the ring."""
    p = pool(drafts, length, 2, stagger=stagger)
    valid, position, offset = 0, 10, int(p.offset[1])
    for is_plain in plain:
        if is_plain:
            rows = p.rows(ids(1))
            flush = valid + offset + 1 >= length
            assert bool(rows.flush) == flush and int(rows.valid) == valid < p.capacity
            assert int(rows.position) == position + 1
            p.advance(rows)
            valid, position = 0 if flush else valid + 1, position + 1
        else:
            count = data.draw(st.integers(0, 1 + drafts))
            accepted = data.draw(st.integers(0, count))
            rows = p.verify_rows(ids(PAD_SLOT, 1), ids(3, count))
            flush = valid > 0 and valid + offset >= length
            assert rows.flush.tolist() == [False, flush]
            assert int(rows.position[1]) == position and int(rows.valid[1]) == valid
            assert int(rows.base[1]) + count <= p.capacity
            p.advance_verify(rows)
            assert int(p.pending[1]) == count
            p.commit(ids(PAD_SLOT, 1), ids(9, accepted))
            valid, position = (0 if flush else valid) + accepted, position + accepted
        offset = 0 if flush else offset
        assert (int(p.valid[1]), int(p.position[1]), int(p.pending[1])) == (valid, position, 0)
    assert int(p.valid[0]) == 0 and int(p.position[0]) == 10  # the other slot, and padding


def test_committing_twice_and_too_much():
    p = pool()
    rows = p.verify_rows(ids(1, 2), ids(3, 2))
    p.advance_verify(rows)
    p.commit(ids(2, 1), ids(99, -4))
    assert p.valid.tolist() == [0, 0, 2, 0] and p.position.tolist() == [10, 10, 12, 10]
    p.commit(ids(2, 1), ids(2, 3))  # nothing is pending any more
    assert p.valid.tolist() == [0, 0, 2, 0]
    with pytest.raises(ValueError, match="accepted must be integers"):
        p.commit(ids(1), torch.tensor([1.0]))


def test_pending_tokens_must_be_committed_first():
    p = pool()
    p.advance_verify(p.verify_rows(ids(0), ids(3)))
    with pytest.raises(ValueError, match="commit before the next step"):
        p.rows(ids(0))
    with pytest.raises(ValueError, match="commit before the next step"):
        p.verify_rows(ids(0), ids(1))
    p.verify_rows(ids(1), ids(1))


def test_slot_reuse_preemption_and_moves():
    """A slot that is started anew, cleared, saved, restored or copied takes its cursors along."""
    p = pool()
    step(p, 0, 4, 3)
    p.advance_verify(p.verify_rows(ids(0), ids(4)))
    saved = p.save(ids(0))  # preempted with drafts pending
    p.start(ids(0), ids(77), ids(3))
    assert (int(p.valid[0]), int(p.pending[0]), int(p.position[0])) == (0, 0, 3)
    p.commit(ids(0), ids(4))
    assert int(p.valid[0]) == 0  # what the former request left does not count
    p.restore(ids(2), saved)
    p.commit(ids(2), ids(2))
    assert (int(p.valid[2]), int(p.position[2])) == (5, 15)
    p.copy(ids(2), ids(3))
    assert int(p.valid[3]) == 5
    p.clear(ids(2))
    assert (int(p.valid[2]), int(p.pending[2])) == (0, 0)
    with pytest.raises(ValueError, match="another layout"):
        pool(drafts=2).restore(ids(0), saved)
    assert "pending" not in StatePool(GEOMETRY, StateConfig(), 1).save(ids(0))


def test_trees():
    parents = torch.tensor([[-1, 0, 1, 0, -1], [-1, -1, -1, 2, 3]])
    masks = tree_ancestors(parents)
    assert masks.tolist() == [[1, 3, 7, 9, 16], [1, 2, 4, 12, 28]] and masks.dtype == torch.int32
    p = pool(4)
    rows = p.verify_rows(ids(2, 0), ids(5, 4), masks)
    path = rows.paths(5)
    assert path[0, 2].tolist() == [True, True, True, False, False]
    assert path[1, 3].tolist() == [False, False, True, True, False]
    assert not path[1, 4].any()  # beyond the count
    bad = masks.clone()
    for mask in (0b101, 0b110, 0b1000):  # parent 2 of itself, a path its parent lacks, a late bit
        bad[0, 2] = mask if mask != 0b101 else 0b010
        with pytest.raises(ValueError, match="rows.ancestors of row 0, token 2"):
            p.verify_rows(ids(2, 0), ids(5, 4), bad)
    with pytest.raises(ValueError, match="a tree needs int32"):
        p.verify_rows(ids(2, 0), ids(5, 4), masks[:, :4])


def test_an_accepted_path_moves_to_the_front():
    p = pool(4)
    step(p, 1, 2, 2)
    rows = p.verify_rows(ids(PAD_SLOT, 1, 0), ids(0, 5, 3))
    for name, ring in p.views[3].tensors().items():
        if name.startswith("ring"):
            tokens = torch.arange(ring.shape[1], dtype=ring.dtype)
            ring.copy_(tokens.view(1, -1, *(1,) * (ring.ndim - 2)).expand_as(ring))
    compact(p.views[3], rows, torch.tensor([[0, 1, -1], [0, 2, 4], [1, -1, -1]]))
    for name, ring in p.views[3].tensors().items():
        if name.startswith("ring"):
            flat = ring.flatten(2)[:, :, 0]
            assert flat[1, :6].tolist() == [0, 1, 2, 4, 6, 5]
            assert flat[0, :3].tolist() == [1, 1, 2]
            assert torch.equal(flat[2], torch.arange(flat.shape[1], dtype=flat.dtype))


@pytest.mark.parametrize("field", ["valid", "count", "key"])
def test_rows_are_checked(field):
    rows = pool().verify_rows(ids(0, 1), ids(2, 2))
    wrong = dataclasses.replace(rows, **{field: torch.zeros(2, dtype=torch.float32)})
    with pytest.raises(TypeError, match=f"rows.{field} is torch.float32"):
        wrong.check(4, 8, 4)
    wrong = dataclasses.replace(rows, **{field: getattr(rows, field)[:1]})
    with pytest.raises(ValueError, match=f"rows.{field} has shape"):
        wrong.check(4, 8, 4)


def test_rows_that_do_not_fit():
    rows = pool().verify_rows(ids(0, 1), ids(2, 2))
    five = torch.tensor([5, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows.count holds 5"):
        dataclasses.replace(rows, count=five).check(4, 8, 4)
    with pytest.raises(ValueError, match="base . count holds 9"):
        dataclasses.replace(rows, valid=five + 2).check(4, 8, 4)
    with pytest.raises(ValueError, match="slot 1 appears twice"):
        dataclasses.replace(rows, slots=ids(1, 1)).check(4, 8, 4)


def test_plan(capsys):
    """Bytes of a plan with drafts are those of a pool; fp32 keeps a state a token."""
    layers = {i: LayerGeometry("gdn", 4, 16, 32, 2) for i in range(3)}
    config = StateConfig.from_flags("P8+4", rotate=True)
    model = ModelGeometry("test", layers, 5)
    plan = budget("test", model, config, drafts=4)
    made = StatePool(layers, config, 1, drafts=4)
    assert plan.request == made.bytes_per_slot + CURSOR_BYTES + PENDING_BYTES
    pages = sum(page.numel() for page in made.pages.values())
    vectors = (made.valid, made.offset, made.position, made.key, made.pending)
    assert plan.request == pages + sum(v.nbytes for v in vectors)
    plain = budget("test", model, config)
    assert plan.fp32 == 5 * plain.fp32 and plan.fp32_moved == 3 * plain.fp32_moved
    assert plan.moved == 3 * sum(made.layouts[0].verify_bytes(5))
    assert plan.conv - plain.conv == 3 * 4 * layers[0].conv_channels * 2
    assert "speculation" not in plain.to_dict()

    assert main(["--model", "qwen3.5-4b", "--drafts", "4", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)["speculation"]
    assert said["ring_inputs"] == 21 and said["drafts"] == 4
    moved = said["bytes_per_step"]
    assert 0 < moved["one_kept"] < moved["all_kept"] < moved["fp32"] / 4
    assert main(["--model", "qwen3.5-4b", "--drafts", "4"]) == 0
    assert "rings of 21 inputs" in capsys.readouterr().out
    assert main(["--model", "qwen3.5-4b", "--drafts", "8"]) == 2
    assert capsys.readouterr().err == ("error: drafts 8 is out of range; use 0 (none) to 7\n")
