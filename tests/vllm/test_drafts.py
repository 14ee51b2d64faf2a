"""Steps that verify drafts, from token counts: windows, rollback, reuse, padding, ragged rows."""

import random

import pytest
import torch

from replayssm_quant.backends.vllm.cursors import slot_keys
from replayssm_quant.backends.vllm.drafts import (
    DraftCursors,
    Verify,
    VerifyBuffers,
    move_verify,
    ragged,
)
from replayssm_quant.formats.philox import request_key
from replayssm_quant.state.cache import PAD_SLOT, StatePool
from replayssm_quant.state.geometry import LayerGeometry
from replayssm_quant.state.replay import first_offset

NAMES = ("slots", "fold_slots", "valid", "flush", "count", "position", "key")
LAYER = LayerGeometry("mamba2", 2, 16, 32, 1)


def make(length: int = 4, drafts: int = 3, stagger: bool = False) -> DraftCursors:
    return DraftCursors(8, length, drafts, stagger=stagger, seed=3, device="cpu")


def vec(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(
    cursors: DraftCursors, blocks: list[int], computed: list[int], counts: list[int], keys=None
) -> Verify:
    step = VerifyBuffers(16, "cpu").step(len(blocks), max(counts))
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    lens = vec(*computed) + vec(*counts)
    cursors.verify(step, vec(*blocks), lens, starts, keys)
    return step


def pool(cursors: DraftCursors, key: int, prompt: int) -> StatePool:
    from replayssm_quant.config import StateConfig

    config = StateConfig(buffer_len=cursors.buffer_len, stagger=cursors.stagger)
    made = StatePool({0: LAYER}, config, 1, drafts=cursors.drafts, debug=True)
    made.start(torch.tensor([0]), torch.tensor([key]), torch.tensor([prompt]))
    return made


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize(("length", "drafts"), [(1, 1), (1, 7), (4, 3), (5, 1), (16, 7)])
def test_a_request_follows_the_state_pool(length: int, drafts: int, stagger: bool) -> None:
    # the pool commits what was accepted; here only the number of computed tokens says so
    rng = random.Random(f"{length}/{drafts}/{stagger}")
    cursors, prompt = make(length, drafts, stagger), 9
    cursors.prefill(vec(5), vec(prompt), vec(prompt))
    key = int(cursors.key[5])
    other, slot = pool(cursors, key, prompt), torch.tensor([0])
    computed, flushes, shift = prompt, [], 1
    for _ in range(60):
        count = rng.randint(1, 1 + drafts)
        step = plan(cursors, [5], [computed], [count])
        wanted = other.verify_rows(slot, vec(count))
        for name in ("valid", "flush", "count", "position", "key"):
            assert getattr(step.rows, name).tolist() == getattr(wanted, name).tolist(), name
        assert step.rows.slots.tolist() == [5]
        assert step.rows.fold_slots.tolist() == [5 if bool(wanted.flush) else PAD_SLOT]
        assert step.shift.tolist() == [shift]
        if bool(wanted.flush):
            flushes.append(computed - prompt)
        other.advance_verify(wanted)
        shift = rng.randint(1, count)
        other.commit(slot, vec(shift))
        computed += shift
    assert len(flushes) >= 60 // (length + drafts)
    first = length - (first_offset(key, length) if stagger else 0)
    assert first <= flushes[0] < first + 1 + drafts


def test_padding_rows_touch_nothing() -> None:
    cursors = make()
    cursors.prefill(vec(3), vec(6), vec(6))
    before = [v.clone() for v in (cursors.folded, cursors.due, cursors.origin)]
    step = plan(cursors, [0, 3, 0], [0, 6, 50], [2, 0, 0])
    assert step.rows.slots.tolist() == [PAD_SLOT] * 3  # block 0, or no token
    assert not step.rows.flush.any() and not step.rows.valid.any() and not step.rows.count.any()
    assert step.rows.fold_slots.tolist() == [PAD_SLOT] * 3 and step.shift.tolist() == [1, 1, 1]
    for vector, old in zip((cursors.folded, cursors.due, cursors.origin), before, strict=True):
        assert torch.equal(vector[1:], old[1:])


def test_a_chunk_folds_and_rolls_what_decode_rows_have_left() -> None:
    cursors = make(length=4)
    cursors.prefill(vec(2), vec(10), vec(10))
    plan(cursors, [2], [10], [1])  # a chunk of one token runs as a decode row
    plan(cursors, [2], [11], [3])  # a resumed request's chunk of three, all of them kept
    rows, roll = cursors.prefill(vec(2), vec(20), vec(6))
    assert (rows.valid.item(), rows.position.item(), roll.item()) == (4, 20, 2)
    assert roll.dtype == torch.int64
    step = plan(cursors, [2], [20], [4])
    assert (step.rows.valid.item(), step.shift.item()) == (0, 1)


def test_a_slot_is_clean_for_its_next_request() -> None:
    cursors = make(length=4)
    cursors.prefill(vec(2), vec(50), vec(50))
    plan(cursors, [2], [50], [4])
    rows, roll = cursors.prefill(vec(2), vec(3), vec(3))  # a shorter request, after a preemption
    assert (rows.valid.item(), roll.item()) == (0, 0)
    step = plan(cursors, [2], [3], [2])
    assert (step.rows.valid.item(), step.rows.flush.item(), step.shift.item()) == (0, False, 1)


def test_keys_of_requests_take_the_place_of_keys_of_slots() -> None:
    cursors = make()
    keys = torch.tensor([11, -5], dtype=torch.int64)
    rows, _ = cursors.prefill(vec(1, 2), vec(4, 4), vec(4, 4), keys)
    assert rows.key.tolist() == [11, -5]
    assert plan(cursors, [2, 1], [4, 4], [1, 2], keys.flip(0)).rows.key.tolist() == [-5, 11]


def test_every_tenant_of_a_slot_has_its_own_key() -> None:
    cursors, slots = make(), [1, 2]
    for tenant in range(3):
        rows, _ = cursors.prefill(vec(*slots), vec(4, 9), vec(4, 9))
        wanted = slot_keys(3, 3, "cpu", tenant)[slots].tolist()
        assert rows.key.tolist() == wanted
        assert plan(cursors, slots, [4, 9], [1, 2]).rows.key.tolist() == wanted
        more, _ = cursors.prefill(vec(2), vec(15), vec(4))  # the same request goes on
        assert more.key.tolist() == wanted[1:]
        assert plan(cursors, [2], [15], [3]).rows.key.tolist() == wanted[1:]
    assert slot_keys(3, 3, "cpu").tolist() == [request_key(3, i) for i in range(3)]


def test_rows_stay_at_their_addresses() -> None:
    buffers = VerifyBuffers(6, "cpu")
    a, b = buffers.step(4, 3), buffers.step(2, 1)
    for name in NAMES:
        assert getattr(a.rows, name).data_ptr() == getattr(b.rows, name).data_ptr()
    assert a.starts.data_ptr() == b.starts.data_ptr() and a.starts.shape == (5,)
    assert a.shift.data_ptr() == b.shift.data_ptr() and b.shift.shape == (2,)


@pytest.mark.parametrize("counts", [[3, 1, 2], [1, 3], [2], [4, 4, 1, 1]])
def test_ragged_rows_are_padded_and_back(counts: list[int]) -> None:
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    width = max(counts)
    step = VerifyBuffers(8, "cpu").step(len(counts), width)
    step.gather, step.scatter = ragged(starts, torch.tensor(counts), width)
    x = torch.arange(sum(counts) * 2).view(-1, 2)
    packed = step.pack(x)
    assert packed.shape == (len(counts), width, 2)
    for row, count in enumerate(counts):
        assert torch.equal(packed[row, :count], x[starts[row] : starts[row + 1]])
    assert torch.equal(step.unpack(packed), x)


def test_rows_of_one_length_are_views() -> None:
    step = VerifyBuffers(8, "cpu").step(2, 3)
    x = torch.arange(12).view(6, 2)
    assert step.pack(x).data_ptr() == x.data_ptr()
    assert torch.equal(step.unpack(step.pack(x)), x)


def test_another_group_has_other_slots_and_the_same_rows() -> None:
    cursors = make(length=1)
    cursors.prefill(vec(3, 4), vec(6, 7), vec(6, 7))
    plan(cursors, [3, 4], [6, 7], [1, 2])
    step = plan(cursors, [3, 4, 0], [7, 9, 0], [2, 1, 0])
    step.gather, step.scatter = ragged(step.starts, torch.tensor([2, 1, 0]), 2)
    out = move_verify(step, vec(6, 1, 0), VerifyBuffers(8, "cpu").step(3, 2))
    assert out.rows.slots.tolist() == [6, 1, PAD_SLOT]
    assert out.rows.fold_slots.tolist() == [6, 1, PAD_SLOT]
    for name in ("valid", "flush", "count", "position", "key"):
        assert torch.equal(getattr(out.rows, name), getattr(step.rows, name)), name
    assert torch.equal(out.starts, step.starts) and torch.equal(out.shift, step.shift)
    assert out.gather is step.gather and out.scatter is step.scatter


def random_step(length: int, drafts: int, stagger: bool) -> tuple:
    """Cursors as they may be, and a step of 150 rows (more than one program) over them."""
    cursors = DraftCursors(200, length, drafts, stagger=stagger, seed=3, device="cpu")
    g = torch.Generator().manual_seed(length)

    def draw(low: int, high: int, count: int = 200) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=g, dtype=torch.int32)

    cursors.folded.copy_(draw(0, 40))
    cursors.due.copy_(cursors.folded + draw(1, length + 1))
    cursors.origin.copy_(cursors.folded + draw(0, length + drafts + 2))
    count = 150
    blocks = torch.randperm(199, generator=g)[:count].to(torch.int32) + 1
    blocks[-7:] = 0
    counts = draw(1, 2 + drafts, count)
    counts[-5:] = 0
    starts = torch.cat((vec(0), counts.cumsum(0))).to(torch.int32)
    lens = cursors.folded[blocks.long()] + draw(0, length + drafts + 1, count) + counts
    keys = torch.randint(-(2**62), 2**62, (count,), generator=g)
    return cursors, blocks, lens, starts, keys


@pytest.mark.parametrize("requests", [False, True], ids=["slot-keys", "request-keys"])
@pytest.mark.parametrize(("length", "drafts"), [(1, 7), (5, 2), (16, 3)])
def test_the_kernel_plans_what_the_torch_code_does(
    length: int, drafts: int, requests: bool
) -> None:
    pytest.importorskip("triton")
    from replayssm_quant.backends.vllm.cursor_kernel import verify_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cursors, blocks, lens, starts, keys = random_step(length, drafts, False)
    other, *_ = random_step(length, drafts, False)
    for name in ("folded", "due", "origin", "key"):
        setattr(other, name, getattr(other, name).to(device))
    asked = keys if requests else None
    wanted = VerifyBuffers(150, "cpu").step(150, 1 + drafts)
    cursors.verify(wanted, blocks, lens, starts, asked)
    found = VerifyBuffers(200, device).step(150, 1 + drafts)
    table = torch.stack((blocks, blocks + 1), 1).to(device)  # a column of a block table
    verify_rows(
        found,
        table[:, 0],
        lens.to(device),
        starts.to(device),
        other,
        None if asked is None else asked.to(device),
    )
    assert wanted.rows.flush.any() and not wanted.rows.flush.all()
    for name in NAMES:
        a, b = getattr(found.rows, name).cpu(), getattr(wanted.rows, name)
        if name in ("position", "key"):  # of padding they mean nothing
            a, b = a[:143], b[:143]
        assert torch.equal(a, b), name
    assert torch.equal(found.starts.cpu(), wanted.starts)
    assert torch.equal(found.shift.cpu(), wanted.shift)
    for name in ("folded", "due", "origin"):
        assert torch.equal(getattr(other, name).cpu()[1:], getattr(cursors, name)[1:]), name


def test_the_kernel_moves_rows_as_the_torch_code() -> None:
    pytest.importorskip("triton")
    from replayssm_quant.backends.vllm.cursor_kernel import move_verify_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cursors, blocks, lens, starts, keys = random_step(5, 2, True)
    step = VerifyBuffers(150, "cpu").step(150, 3)
    cursors.verify(step, blocks, lens, starts, keys)
    others = torch.where(blocks != 0, 200 - blocks, 0)[:, None].repeat(1, 2)
    wanted = move_verify(step, others[:, 1], VerifyBuffers(150, "cpu").step(150, 3))
    source = VerifyBuffers(150, device).step(150, 3)
    for name in NAMES:
        getattr(source.rows, name).copy_(getattr(step.rows, name))
    source.starts.copy_(step.starts)
    source.shift.copy_(step.shift)
    found = VerifyBuffers(150, device).step(150, 3)
    move_verify_rows(source, others.to(device)[:, 1], found)
    for name in NAMES:
        assert torch.equal(getattr(found.rows, name).cpu(), getattr(wanted.rows, name)), name
    assert torch.equal(found.starts.cpu(), wanted.starts)
    assert torch.equal(found.shift.cpu(), wanted.shift)
