"""Cursors from token counts: the schedule of ``state.replay``, padding, reuse, moves."""

import pytest
import torch

from replayssm_quant.backends.vllm.cursors import (
    NEXT_TENANT,
    GroupRows,
    RowBuffers,
    SlotCursors,
    first_offsets,
    move,
    slot_keys,
    window,
)
from replayssm_quant.formats.philox import element_bits, request_key
from replayssm_quant.state.cache import PAD_SLOT, StepRows
from replayssm_quant.state.replay import first_offset, schedule

NAMES = ("slots", "valid", "flush", "position", "key")


def make(slots: int = 8, length: int = 4, stagger: bool = False) -> SlotCursors:
    return SlotCursors(slots, length, stagger=stagger, seed=3, device="cpu")


def vec(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode(cursors: SlotCursors, blocks: torch.Tensor, lens: torch.Tensor, keys=None):
    rows = RowBuffers(16, "cpu").rows(len(blocks))
    cursors.decode(rows, blocks, lens, keys)
    return rows


@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_window_is_the_schedule(length: int) -> None:
    for offset in range(length):
        steps = schedule(0, 3 * length + 2, length, offset)
        valid, flush = window(torch.arange(len(steps)), offset, length)
        assert valid.tolist() == [s.valid for s in steps]
        assert flush.tolist() == [s.flush for s in steps]
        assert valid.dtype == torch.int32 and flush.dtype == torch.bool


def test_keys_and_offsets_are_those_of_the_state_pool() -> None:
    keys = slot_keys(7, 5, "cpu")
    assert keys.tolist() == [request_key(7, i) for i in range(5)]
    assert first_offsets(keys, 16).tolist() == [first_offset(k, 16) for k in keys.tolist()]


@pytest.mark.parametrize("stagger", [False, True])
def test_a_request_follows_its_schedule(stagger: bool) -> None:
    cursors, prompt = make(stagger=stagger), 9
    rows = cursors.prefill(vec(5), vec(prompt), vec(prompt))
    assert (rows.slots.item(), rows.position.item()) == (5, prompt)
    key = int(rows.key)
    offset = first_offset(key, 4) if stagger else 0
    for i, step in enumerate(schedule(prompt, 12, 4, offset)):
        for _ in range(2):  # planning a step twice changes nothing
            rows = decode(cursors, vec(5), vec(prompt + i + 1))
            assert (int(rows.valid), bool(rows.flush)) == (step.valid, step.flush)
            assert (int(rows.position), int(rows.key)) == (step.position, key)


def test_padding_rows_touch_nothing() -> None:
    cursors = make()
    cursors.prefill(vec(3), vec(6), vec(6))
    before = cursors.base.clone()
    rows = decode(cursors, vec(3, 0, 0), vec(7, 0, 99))
    assert rows.slots.tolist() == [3, PAD_SLOT, PAD_SLOT]
    assert rows.flush.tolist() == [False, False, False]
    assert rows.valid.tolist() == [0, 0, 0]
    assert torch.equal(cursors.base, before)


def test_a_chunk_reports_the_ring_it_must_fold_and_starts_anew() -> None:
    cursors = make(length=4)
    cursors.prefill(vec(2), vec(10), vec(10))
    decode(cursors, vec(2), vec(11))  # a chunk of one token runs as a decode row
    decode(cursors, vec(2), vec(12))
    rows = cursors.prefill(vec(2), vec(20), vec(8))
    assert rows.valid.item() == 2 and rows.position.item() == 20
    assert decode(cursors, vec(2), vec(21)).valid.item() == 0
    again = cursors.prefill(vec(2), vec(30), vec(9))  # one more decoded token: 21
    assert again.valid.item() == 1


def test_a_folded_window_counts_only_the_tokens_since_its_flush() -> None:
    cursors = make(length=4)
    cursors.prefill(vec(2), vec(10), vec(10))
    rows = cursors.prefill(vec(2), vec(20), vec(4))  # 6 decoded tokens: a flush at the fourth
    assert rows.valid.item() == 2


def test_a_slot_is_clean_for_its_next_request() -> None:
    cursors = make(length=4)
    cursors.prefill(vec(2), vec(50), vec(50))
    rows = cursors.prefill(vec(2), vec(3), vec(3))  # a shorter request; what is left counts nothing
    assert rows.valid.item() == 0
    steps = schedule(3, 6, 4)
    for i, step in enumerate(steps):
        rows = decode(cursors, vec(2), vec(3 + i + 1))
        assert (int(rows.valid), bool(rows.flush)) == (step.valid, step.flush)


def wrapped(key: int) -> int:
    """The int64 that a sum of keys is."""
    return (key + 2**63) % 2**64 - 2**63


def test_every_tenant_of_a_slot_has_its_own_key() -> None:
    cursors = make(slots=4)
    found: dict[int, list[int]] = {1: [], 2: []}
    for tenant in range(5):
        # one slot's request comes in three parts, the other's is preempted in its second turn
        first = cursors.prefill(vec(2, 1), vec(4, 9), vec(4, 9))
        assert first.key.tolist() == slot_keys(3, 4, "cpu", tenant)[[2, 1]].tolist()
        step = decode(cursors, vec(1, 2, 0), vec(10, 5, 0)).key.tolist()
        assert step[:2] == first.key.flip(0).tolist()
        more = cursors.prefill(vec(2), vec(8), vec(3))
        assert more.key.tolist() == step[1:2]  # it goes on, so its key does
        assert decode(cursors, vec(2), vec(9)).key.tolist() == step[1:2]
        for slot, key in zip((2, 1), first.key.tolist(), strict=True):
            found[slot].append(key)
    for slot, keys in found.items():
        assert keys == [wrapped(request_key(3, slot) + i * NEXT_TENANT) for i in range(5)]
    assert len({*found[1], *found[2]}) == 10
    assert cursors.key[[0, 3]].tolist() == slot_keys(3, 4, "cpu", -1)[[0, 3]].tolist()


def test_a_later_tenant_rounds_by_other_bits_and_flushes_at_other_steps() -> None:
    cursors = make(slots=64, length=16, stagger=True)
    blocks, prompt = torch.arange(1, 64), torch.full((63,), 9)
    bits, offsets = [], []
    for _ in range(2):
        rows = cursors.prefill(blocks, prompt, prompt)
        bits.append(element_bits(rows.key, rows.position, 0, 1, 1, 8))
        offsets.append(first_offsets(rows.key, 16))
    same = (bits[0] == bits[1]).float().mean()
    assert same < 0.05  # of 504 random bytes, 1 in 256 is the same by chance
    assert (offsets[0] == offsets[1]).float().mean() < 0.3  # of 63, 1 in 16


def test_planning_is_the_same_again_from_the_start() -> None:
    runs = []
    for _ in range(2):
        cursors, keys = make(), []
        for lens in (vec(5, 6), vec(9, 3), vec(4, 4)):
            keys.append(cursors.prefill(vec(3, 5), lens, lens).key.tolist())
        runs.append(keys)
    assert runs[0] == runs[1]


def test_keys_of_requests_take_the_place_of_keys_of_slots() -> None:
    cursors = make()
    before = cursors.key.clone()
    keys = torch.tensor([11, -5], dtype=torch.int64)
    rows = cursors.prefill(vec(1, 2), vec(4, 4), vec(4, 4), keys)
    assert rows.key.tolist() == [11, -5]
    assert decode(cursors, vec(2, 1), vec(5, 5), keys.flip(0)).key.tolist() == [-5, 11]
    assert torch.equal(cursors.key, before)


def test_rows_stay_at_their_addresses() -> None:
    buffers = RowBuffers(6, "cpu")
    rows, again = buffers.rows(4), buffers.rows(2)
    for name in ("slots", "valid", "flush", "position", "key"):
        assert getattr(rows, name).data_ptr() == getattr(again, name).data_ptr()
    rows.slots.fill_(9)
    rows.key.fill_(-1)
    assert buffers.rows(6).slots.tolist() == [9, 9, 9, 9, 0, 0]
    assert buffers.rows(6).valid.eq(0).all() and buffers.rows(6).key[4:].eq(0).all()


def test_another_group_has_other_slots_and_the_same_rows() -> None:
    cursors = make()
    cursors.prefill(vec(3, 4), vec(6, 7), vec(6, 7))
    rows = decode(cursors, vec(3, 4, 0), vec(8, 8, 0))
    out = RowBuffers(8, "cpu").rows(3)
    moved = move(rows, vec(6, 1, 0), out)
    assert moved is out and moved.slots.tolist() == [6, 1, PAD_SLOT]
    for name in ("valid", "flush", "position", "key"):
        assert torch.equal(getattr(moved, name), getattr(rows, name))
    assert move(rows, vec(6, 1, 0)).slots.tolist() == [6, 1, PAD_SLOT]


@pytest.mark.parametrize("requests", [False, True], ids=["slot-keys", "request-keys"])
@pytest.mark.parametrize(("length", "stagger"), [(1, False), (5, True), (16, False), (16, True)])
def test_the_kernel_fills_the_rows_of_the_torch_code(
    length: int, stagger: bool, requests: bool
) -> None:
    pytest.importorskip("triton")
    from replayssm_quant.backends.vllm.cursor_kernel import decode_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cursors = SlotCursors(200, length, stagger=stagger, seed=3, device="cpu")
    random = torch.Generator().manual_seed(length)
    cursors.base.copy_(torch.randint(0, 40, (200,), generator=random))
    count = 150  # more than one program
    blocks = torch.randperm(199, generator=random)[:count].to(torch.int32) + 1
    blocks[-7:] = 0
    lens = cursors.base[blocks.long()] + torch.randint(1, 60, (count,), generator=random)
    keys = torch.randint(-(2**62), 2**62, (count,), generator=random) if requests else None
    wanted = RowBuffers(count, "cpu").rows(count)
    cursors.decode(wanted, blocks, lens.to(torch.int32), keys)
    table = torch.stack((blocks, blocks + 1), 1).to(device)  # a column of a block table
    found = RowBuffers(count, device).rows(count)
    decode_rows(
        found,
        table[:, 0],
        lens.to(torch.int32).to(device),
        cursors.base.to(device),
        cursors.key.to(device),
        None if keys is None else keys.to(device),
        length,
        stagger,
    )
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


def test_the_kernel_moves_rows_as_the_torch_code() -> None:
    pytest.importorskip("triton")
    from replayssm_quant.backends.vllm.cursor_kernel import move_rows

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    count = 150  # more than one program
    rows = RowBuffers(count, "cpu").rows(count)
    for name in ("valid", "position", "key"):
        getattr(rows, name).random_(0, 2**31 - 1, generator=random)
    rows.flush.copy_(torch.rand(count, generator=random) < 0.5)
    blocks = torch.randint(0, 4, (count, 3), generator=random, dtype=torch.int32)
    wanted = move(rows, blocks[:, 1], RowBuffers(count, "cpu").rows(count))
    on_device = StepRows(**{n: getattr(rows, n).to(device) for n in NAMES})
    found = RowBuffers(200, device).rows(count)
    move_rows(on_device, blocks.to(device)[:, 1], found)
    assert (wanted.slots == PAD_SLOT).any() and wanted.flush.any()
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize(("length", "stagger"), [(1, False), (5, True), (16, False)])
def test_all_groups_are_planned_as_each_alone(length: int, stagger: bool, kernel: bool) -> None:
    device = "cuda" if kernel and torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(length)
    count, padded, groups = 140, 150, 3  # more than one program
    cursors = SlotCursors(300, length, stagger=stagger, seed=3, device="cpu")
    cursors.base.copy_(torch.randint(0, 40, (300,), generator=random))
    tables = [
        torch.stack([torch.randperm(299, generator=random)[:count] + 1] * width, 1).to(torch.int32)
        for width in (1, 2, 5)
    ]
    tables[0][7] = 0  # a dummy request
    lens = torch.randint(1, 90, (count,), generator=random, dtype=torch.int32)
    keys = torch.randint(-(2**62), 2**62, (200,), generator=random)
    index = torch.randperm(200, generator=random)[:count].to(torch.int32)
    wanted = RowBuffers(count, "cpu").rows(count)
    cursors.decode(wanted, tables[0][:, 0], lens, keys[index.long()])
    out = GroupRows(groups, padded, device)
    for vector in (out.slots, out.shared["valid"], out.shared["position"], out.shared["key"]):
        vector.fill_(77)
    if kernel:
        pytest.importorskip("triton")
        from replayssm_quant.backends.vllm.cursor_kernel import group_rows

        on_device = [t.to(device) for t in tables]
        where = out.addresses(on_device)
        assert out.addresses(on_device) is where
        inputs = [t.to(device) for t in (lens, cursors.base, keys, index)]
        group_rows(out, where, *inputs, count, padded, length, stagger)
    else:
        out.plan(cursors, tables, lens, keys, index, count, padded)
    for group, table in enumerate(tables):
        rows = out.rows(group, count)
        assert out.rows(group, count) is rows
        blocks = table[:, 0].long()
        assert torch.equal(rows.slots.cpu(), torch.where(blocks != 0, blocks, PAD_SLOT))
        for name in ("valid", "flush", "position", "key"):
            assert torch.equal(getattr(rows, name).cpu(), getattr(wanted, name)), name
        assert out.rows(group, padded).slots[count:].eq(PAD_SLOT).all()
    assert out.rows(0, padded).valid[count:].eq(0).all()
    assert not out.rows(0, padded).flush[count:].any()
    assert out.holds(3, 160) and not out.holds(3, 161) and not out.holds(2, 10)
