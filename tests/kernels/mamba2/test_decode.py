"""The Mamba-2 kernels against the float64 reference: every byte of the pool, and the output."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant import ops  # noqa: E402
from replayssm_quant.config import StateConfig  # noqa: E402
from replayssm_quant.formats.philox import request_key  # noqa: E402
from replayssm_quant.formats.rotation import rotate  # noqa: E402
from replayssm_quant.formats.spec import ELEMENTS  # noqa: E402
from replayssm_quant.kernels.mamba2 import reference  # noqa: E402
from replayssm_quant.state.cache import PAD_SLOT, StatePool, read_checkpoint  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

GPU = pytest.mark.gpu
MODELS = {  # heads, head_dim, d_state, groups
    "nemotron-super": (128, 64, 128, 8),
    "nemotron-nano-4b": (96, 80, 128, 8),
    "nemotron-nano-30b": (64, 64, 128, 8),
    "nemotron-ultra": (256, 64, 128, 8),
    "nemotron-nano-9b": (128, 80, 128, 8),
    "falcon-h1-1.5b": (48, 64, 256, 1),
    "falcon-h1-7b": (24, 128, 256, 1),
    "falcon-h1-34b": (32, 128, 256, 2),
    "falcon-h1-tiny": (24, 32, 64, 1),
    "granite-350m": (48, 32, 128, 1),
    "granite-h-micro": (64, 64, 128, 1),
    "zamba2-2.7b": (80, 64, 64, 1),
    "bamba-9b": (128, 64, 128, 1),
    "odd-state": (8, 64, 96, 2),
    "small-state": (4, 64, 16, 1),
}


def geometry(heads: int, rows: int, n: int, groups: int) -> LayerGeometry:
    return LayerGeometry("mamba2", heads, rows, n, groups)


def flags(update: str, output: str | None = None, **kw: object) -> StateConfig:
    return StateConfig.from_flags(update, output, **kw)


def step_of(config: StateConfig) -> float:
    """One rounding step of the checkpoint over the RMS of a row, at most."""
    fmt = config.update
    if fmt.kind == "float":
        return 2.0 ** -ELEMENTS[fmt.element].mantissa
    return 5.0 / fmt.max_code  # a row's largest value is below five times its RMS


def bounds_of(bounds, config: StateConfig, dtype: torch.dtype, device: torch.device):
    """What an implementation may differ by from float64.

    Output: fp32 sums of d_state + L products stay below 1e-5 of the output's RMS. On a GPU 4-bit
    copies may be read through fp16 pairs (4e-4 measured), and storing y in bf16 costs 1.7e-3, in
    fp16 2e-4. Codes: the fold's fp32 sums differ from float64 by some 1e-7 of a row's RMS, which is
    up to 1e-3 of a step where integers have 12 bits: so many round the other way. A float's step
    shrinks with its value, so small fp16 values are closer to a boundary: 1e-7 * 2**11 * RMS /
    |value|, 2e-3 on average over a Gaussian row. On a GPU the fold's operands are sums of two bf16
    numbers, 2**-17 of a term each: 3e-3 of a step where integers have 12 bits. State: that share of
    elements, one step each, and the exponentials of a GPU, 2**-22 each.
    """
    packed = device.type == "cuda" and config.readout.bits == 4
    output = 1e-3 if packed else 1e-5
    output += {torch.bfloat16: 2.2e-3, torch.float16: 4e-4}.get(dtype, 0.0)
    planar = device.type == "cuda" and config.update.kind == "planar"
    flips = 4e-3 if config.update.name == "fp16" or planar else 1e-3
    return bounds(output, flips, 2 * flips**0.5 * step_of(config) + 3e-6)


CASES = {
    # one of every format and geometry class; the heads of a group share B and C
    "nvfp4+fp16": ((2, 64, 128, 1), flags("fp16", "nvfp4"), 5),
    "nvfp4+fp16-rn-headdim80": ((1, 80, 128, 1), flags("fp16", "nvfp4", rounding="rn"), 3),
    "nvfp4+e4m3-12-heads-a-group": ((12, 16, 32, 1), flags("e4m3", "nvfp4", buffer_len=4), 4),
    "P4+8-1-head-a-group": ((2, 32, 128, 2), flags("P4+8", rotate=True), 4),
    "P4+4-state96-L32": ((1, 32, 96, 1), flags("P4+4", rotate=True, buffer_len=32), 4),
    "P8+4-state256-headdim128-L2": ((1, 128, 256, 1), flags("P8+4", buffer_len=2), 2),
    "P4+8-row-16-bits": ((1, 32, 64, 1), flags("P4+8/row", random_bits=16), 3),
    "e4m3-shared": ((1, 64, 128, 1), flags("e4m3", "same"), 4),
    "int8-16-heads-a-group-state16": (
        (16, 16, 16, 1),
        flags("int8", "same", rotate=True, buffer_len=4),
        2,
    ),  # fmt: skip
    "int4+int8-blocks": ((1, 32, 64, 1), flags("int8/b32/fp16", "int4"), 3),
    "mxfp4+bf16": ((1, 32, 64, 1), flags("bf16", "mxfp4"), 3),
    "mxfp8+fp16": ((1, 16, 96, 1), flags("fp16", "mxfp8"), 3),
    "e5m2+fp32": ((1, 17, 64, 1), flags("fp32", "e5m2"), 3),
    "e4m3-blocks+bf16-rn": ((1, 16, 64, 1), flags("bf16", "e4m3/b16", rounding="rn"), 3),
    "fp32-L1": ((2, 16, 64, 1), flags("fp32", buffer_len=1), 3),
    "fp16-shared-L32": ((1, 32, 64, 1), flags("fp16", "same", buffer_len=32), 4),
    "int4-shared": ((1, 16, 32, 1), flags("int4", "same"), 3),
    "bf16-shared": ((1, 16, 32, 1), flags("bf16", "same", buffer_len=4), 3),
    "bf16+fp32": ((1, 16, 64, 1), flags("fp32", "bf16", buffer_len=4), 3),
    "fp16+fp32-2-groups-state256": ((2, 16, 256, 2), flags("fp32", "fp16", buffer_len=3), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_step(name: str, mamba2_case, step_check, bounds, device: torch.device) -> None:
    shape, config, batch = CASES[name]
    case = mamba2_case(geometry(*shape), config, batch)
    step_check(case, bounds_of(bounds, config, case.dtype, device))


def test_fp16_activations(mamba2_case, step_check, bounds, device: torch.device) -> None:
    config = flags("e4m3", "nvfp4")
    case = mamba2_case(geometry(1, 32, 64, 1), config, 4, dtype=torch.float16)
    step_check(case, bounds_of(bounds, config, torch.float16, device))


@pytest.mark.parametrize("leave_out", [("z",), ("D", "z", "dt_bias")])
def test_optional_inputs(mamba2_case, rms, leave_out: tuple[str, ...]) -> None:
    case = mamba2_case(geometry(1, 16, 32, 1), flags("fp16", "e4m3"), 2)
    none = dict.fromkeys(leave_out)
    ours, theirs = case.twin(), case.twin()
    assert rms(ours.step(**none), theirs.step("reference", **none)) < 1e-5


def test_d_for_each_channel(mamba2_case, rms) -> None:
    case = mamba2_case(geometry(2, 16, 32, 1), flags("fp16", "e4m3"), 2)
    D = torch.randn(2, 16, generator=torch.Generator().manual_seed(5)).to(case.buffer.device)
    ours, theirs = case.twin(), case.twin()
    assert rms(ours.step(D=D), theirs.step("reference", D=D)) < 1e-5


def test_large_time_steps_pass_through_softplus(mamba2_case) -> None:
    """dt + bias of 88 or 1e4 comes back as it is, of -50 as a tiny step: never Inf or NaN."""
    case = mamba2_case(geometry(1, 16, 32, 1), flags("fp16", "e4m3"), 5)
    dt = torch.tensor([88.0, 1e4, 0.0, -50.0, 20.0], device=case.buffer.device)[:, None]
    case.inputs["dt_bias"] = torch.zeros_like(case.inputs["dt_bias"])
    out = case.step(dt=dt, D=None, z=None)
    assert torch.isfinite(out).all()
    slots, at = case.kept
    stored = case.views.ring_dt[slots, at, 0].cpu()
    want = torch.nn.functional.softplus(torch.tensor([-50.0, 20.0]).double()).float()
    torch.testing.assert_close(stored, want, rtol=1e-5, atol=0)  # exp(-50) by ex2.approx: 4e-6


def _digest(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()


def test_twenty_launches_give_one_hash(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 16, 1), flags("fp16", "same", buffer_len=4), 4)
    seen = set()
    for _ in range(20):
        twin = case.twin()
        seen.add(_digest(twin.step(), twin.buffer))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["nvfp4+fp16", "P4+8"])
def test_a_request_has_the_same_bits_in_any_row_slot_and_batch(mamba2_case, name: str) -> None:
    config = flags("fp16", "nvfp4") if name == "nvfp4+fp16" else flags("P4+8", rotate=True)
    case = mamba2_case(geometry(1, 16, 32, 1), dataclasses.replace(config, buffer_len=4), 5)
    alone = case.twin()
    y = alone.step()

    moved = case.take([4, 0, 3, 1, 2])
    shift = torch.roll(torch.arange(case.slots), 3).to(case.buffer.device)  # old slot -> new
    buffer = torch.empty_like(case.buffer)
    buffer[shift] = case.buffer
    slots = torch.where(moved.rows.slots >= 0, shift[moved.rows.slots], PAD_SLOT)
    moved = moved.twin(buffer=buffer, rows=dataclasses.replace(moved.rows, slots=slots))
    moved.buffer = buffer
    assert torch.equal(moved.step(), y[[4, 0, 3, 1, 2]])
    assert torch.equal(moved.buffer[shift], alone.buffer)

    for row in (0, 3):
        single = case.take([row])
        assert torch.equal(single.step(), y[[row]])
        slot = int(case.rows.slots[row])
        assert torch.equal(single.buffer[slot], alone.buffer[slot])


def test_random_bits_belong_to_request_position_layer_and_head(mamba2_case, codes_of) -> None:
    """Each of the four changes the draws of a flush; the slot and the row change none (above)."""
    case = mamba2_case(geometry(2, 16, 64, 1), flags("e4m3", "nvfp4"), 1)
    slots = case.flushed

    def codes(**changes: object) -> torch.Tensor:
        twin = case.twin(**changes)
        twin.step()
        return codes_of(twin.views, case.config, slots)

    base, rows = codes(), case.rows
    assert torch.equal(base, codes())
    others = [
        codes(rows=dataclasses.replace(rows, key=rows.key + 1)),
        codes(rows=dataclasses.replace(rows, position=rows.position + 1)),
        codes(layer=case.layer + 1),
        codes(head_offset=1),
    ]
    for other in others:
        share = float((other != base).float().mean())
        assert 0.1 < share < 0.6  # SR moves a third of the codes, on average over the fractions
        assert (other - base).abs().max() <= 1
    # a shard that starts at head 1 draws for its first head what the whole layer draws for head 1
    shard = mamba2_case(geometry(1, 16, 64, 1), flags("e4m3", "nvfp4"), 1, head_offset=1)
    whole = mamba2_case(geometry(2, 16, 64, 1), flags("e4m3", "nvfp4"), 1)
    state = torch.randn(1, 2, 16, 64, generator=torch.Generator().manual_seed(1))
    state = state.to(case.buffer.device)
    for one, part in ((whole, state), (shard, state[:, 1:])):
        step = one.rows.take(one.rows.live)
        ops.store_state(
            one.views, one.config, step, part, head_offset=one.head_offset, impl="triton"
        )
    assert torch.equal(
        whole.views.ckpt[whole.rows.slots][:, 1:], shard.views.ckpt[shard.rows.slots]
    )


def test_outputs_between_flushes_read_the_copy_alone(mamba2_case) -> None:
    """Whatever the checkpoint holds, a readout is the same; a changed copy changes it."""
    case = mamba2_case(geometry(1, 16, 64, 1), flags("P4+8"), 4)
    slots, _ = case.kept
    base = case.twin().step()
    low = case.twin()
    low.views.ckpt_low[slots] = 0x77
    high = case.twin()
    high.views.ckpt[slots] ^= 0x11111111
    reading = (case.rows.slots >= 0) & ~case.rows.flush
    assert torch.equal(low.step()[reading], base[reading])
    assert not torch.equal(high.step()[reading], base[reading])


@pytest.mark.parametrize(
    "config", [flags("fp16", "nvfp4"), flags("P8+4", rotate=True)], ids=lambda c: c.label
)
def test_load_folds_the_ring(mamba2_case, rms, config: StateConfig) -> None:
    """A prefill that continues: the fp32 state of each row, rings folded in, nothing written."""
    case = mamba2_case(geometry(2, 24, 64, 1), dataclasses.replace(config, buffer_len=5), 4)
    live = case.rows.live
    rows = case.rows.take(live)
    fresh = torch.randn(len(live), 2, 24, 64, generator=torch.Generator().manual_seed(3))
    ops.store_state(case.views, case.config, rows, fresh.to(case.buffer.device), impl="triton")
    before = case.buffer.clone()
    got = ops.mamba2_load(case.views, case.config, rows, case.inputs["A"], impl="triton")
    want = reference.load_state(
        case.views, case.config, rows, case.inputs["A"], compute=torch.float64
    )
    assert got.dtype == torch.float32
    assert rms(got, want) < 2e-6  # fp32 sums of at most L products
    assert torch.equal(case.buffer, before)


def test_windows_in_a_row(device: torch.device, rms) -> None:
    """Two staggered windows and a forced flush: fp32 states follow the plain recurrence."""
    g = geometry(2, 16, 32, 1)
    config = flags("fp32", buffer_len=4, stagger=True)
    gen = torch.Generator().manual_seed(4)
    pool = StatePool({0: g}, config, 4, ring_storage="fp32", device=device, debug=True)
    slots = torch.tensor([3, 0, 2], device=device)
    keys = torch.tensor([request_key(0, r) for r in (1, 2, 5)], device=device)
    pool.start(slots, keys, torch.zeros(3, dtype=torch.int64, device=device))
    state = torch.zeros(3, 2, 16, 32, dtype=torch.float64)
    A = -torch.rand(2, generator=gen) - 0.1
    flushes = []
    for step in range(9):
        x, dt = torch.randn(3, 2, 16, generator=gen), torch.rand(3, 2, generator=gen)
        B, C = torch.randn(2, 3, 1, 32, generator=gen)
        rows = pool.rows(slots, force_flush=step == 5)
        inputs = (t.to(device) for t in (x, dt, A, B, C))
        y = ops.mamba2_decode(pool.views[0], config, rows, *inputs, impl="triton")
        wide = (t.double() for t in (x, dt, A, B, C))
        want, state = reference.recurrent_step(state, *wide)
        assert rms(y.cpu(), want) < 5e-6
        flushes.append(rows.flush.tolist())
        pool.advance(rows)
    assert len({tuple(f) for f in flushes}) > 2  # the rows did not flush together
    loaded = ops.mamba2_load(pool.views[0], config, pool.rows(slots), A.to(device), impl="triton")
    assert rms(loaded.cpu(), state) < 5e-6


def test_rotation_does_not_change_an_exact_state(mamba2_case, rms) -> None:
    """Through an fp32 state the rotated step gives the unrotated output."""
    plain = mamba2_case(geometry(1, 16, 96, 1), flags("fp32", buffer_len=4), 4)
    turned = plain.twin(config=dataclasses.replace(plain.config, rotate=True))
    live = plain.rows.take(plain.rows.live).slots
    turned.views.ckpt[live] = rotate(read_checkpoint(plain.views, plain.config, live))
    assert rms(turned.step(), plain.step()) < 5e-6


def test_offsets_beyond_32_bits(mamba2_case) -> None:
    """A slot stride of 4.4 GB: byte and word offsets of slot 3 overflow int32."""
    case = mamba2_case(geometry(1, 16, 32, 1), flags("e4m3", "same"), 1)
    stride = 4_400_000_000 // 128 * 128
    try:
        wide = torch.empty(3 * stride + (1 << 20), dtype=torch.uint8, device=case.buffer.device)
    except RuntimeError as error:  # pages are touched only where slots lie
        pytest.skip(f"no address space for a pool that large: {error}")
    far = wide.as_strided((4, case.layout.page_bytes), (stride, 1), 128)
    slot = int(case.rows.slots[0])
    far[3] = case.pages[slot]
    y = case.twin().step()
    rows = dataclasses.replace(case.rows, slots=torch.full_like(case.rows.slots, 3))
    moved = case.twin(rows=rows)
    moved.layout = _FixedViews(case.layout, far)
    assert torch.equal(moved.step(), y)
    after = case.twin()
    after.step()
    assert torch.equal(far[3], after.pages[slot])


class _FixedViews:
    """A layout whose views lie over given pages."""

    def __init__(self, layout, pages: torch.Tensor):
        self.page_bytes, self._views = layout.page_bytes, layout.views(pages)

    def views(self, pages: torch.Tensor):
        return self._views


def _rows(**changes: object):
    return lambda case: {"rows": dataclasses.replace(case.rows, **changes)}


BAD = {
    "x of another batch": (lambda c: {"x": c.inputs["x"][:1]}, ValueError, "x has shape"),
    "B of other groups": (
        lambda c: {"B": c.inputs["B"].repeat(1, 2, 1)}, ValueError, "B has shape",
    ),
    "A of other heads": (lambda c: {"A": c.inputs["A"][:1]}, ValueError, "A has shape"),
    "z of another shape": (lambda c: {"z": c.inputs["z"][..., :8]}, ValueError, "z"),
    "D of another shape": (lambda c: {"D": c.inputs["D"][:1]}, ValueError, "D"),
    "dt_bias of another shape": (
        lambda c: {"dt_bias": c.inputs["dt_bias"][:1]}, ValueError, "dt_bias",
    ),
    "integer x": (lambda c: {"x": c.inputs["x"].long()}, TypeError, "x"),
    "float valid": (
        lambda c: {"rows": dataclasses.replace(c.rows, valid=c.rows.valid.float())},
        TypeError, "valid",
    ),
    "int64 position": (
        lambda c: {"rows": dataclasses.replace(c.rows, position=c.rows.position.long())},
        TypeError, "position",
    ),
    "int8 flush": (
        lambda c: {"rows": dataclasses.replace(c.rows, flush=c.rows.flush.to(torch.int8))},
        TypeError, "flush",
    ),
    "keys of another batch": (
        lambda c: {"rows": dataclasses.replace(c.rows, key=c.rows.key[:2])}, ValueError, "key",
    ),
    "another buffer length": (
        lambda c: {"config": dataclasses.replace(c.config, buffer_len=8)}, ValueError, "buffer_len",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_launch(mamba2_case, name: str) -> None:
    change, error, message = BAD[name]
    case = mamba2_case(geometry(2, 16, 32, 1), flags("fp16", "nvfp4"), 4)
    before = case.buffer.clone()
    changes = change(case)
    twin = case.twin(**{k: v for k, v in changes.items() if k in ("rows", "config")})
    overrides = {k: v for k, v in changes.items() if k not in ("rows", "config")}
    with pytest.raises(error, match=message):
        twin.step(**overrides)
    assert torch.equal(twin.buffer, before)


def test_formats_without_a_kernel_are_named(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 32, 1), flags("int8/head", "same"), 2)
    with pytest.raises(ValueError, match="int8/head"):
        case.step()


def test_state_sizes_without_a_kernel_are_named(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 12, 1), flags("fp16", "same"), 2)
    with pytest.raises(ValueError, match="d_state 12"):
        case.step()


def test_views_of_the_other_family_are_named(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 32, 1), flags("fp16", "same"), 2)
    views = dataclasses.replace(case.views, ring_x=None, ring_B=None)
    case.layout = _FixedViews(case.layout, case.pages)
    case.layout._views = views
    with pytest.raises(ValueError, match="Gated DeltaNet"):
        case.step()


def test_two_rows_in_one_slot_are_refused_in_debug_mode(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 32, 1), flags("fp16", "nvfp4"), 2)
    slots = case.rows.slots.clone()
    slots[1] = slots[0]
    with pytest.raises(ValueError, match="appears twice"):
        dataclasses.replace(case.rows, slots=slots).check(case.slots, case.config.buffer_len)


def test_an_empty_batch_is_no_work(mamba2_case) -> None:
    case = mamba2_case(geometry(1, 16, 32, 1), flags("fp16", "nvfp4"), 2)
    empty = case.take([])
    out = empty.step()
    assert out.shape == (0, 1, 16)
    assert torch.equal(empty.buffer, case.buffer)


@pytest.mark.parametrize("copy", ["nvfp4", "same"])
def test_the_operator_says_exactly_what_it_changes(mamba2_case, copy: str) -> None:
    """By torch's own checks, with the kernels behind it; ``test_operators`` has the references."""
    case = mamba2_case(geometry(1, 16, 16, 1), flags("fp16", copy, buffer_len=2), 2)
    given = {"pages": case.pages, "layout": case.layout.text, "config": case.config.text}
    given |= {**vars(case.rows), **case.inputs, "dt_softplus": True, "impl": "triton"}
    op = torch.ops.replayssm_quant.mamba2_decode.default
    torch.library.opcheck(op, (), given, test_utils=("test_schema", "test_faketensor"))


# --- on a GPU: full sizes, bf16, graphs -----------------------------------------------------------

FULL_FORMATS = {
    "nvfp4+fp16": flags("fp16", "nvfp4"),
    "nvfp4+fp16-rn": flags("fp16", "nvfp4", rounding="rn"),
    "nvfp4+e4m3": flags("e4m3", "nvfp4"),
    "P4+8": flags("P4+8", rotate=True),
    "P4+4": flags("P4+4", rotate=True),
    "P8+4": flags("P8+4", rotate=True),
    "e4m3": flags("e4m3", "same"),
    "int8": flags("int8", "same", rotate=True),
    "fp16": flags("fp16", "same"),
    "fp32": flags("fp32"),
    "mxfp4+bf16": flags("bf16", "mxfp4"),
    "int4+int8": flags("int8/b32", "int4"),
}


@GPU
@pytest.mark.parametrize("model", MODELS)
def test_models_in_bf16(model: str, mamba2_case, step_check, bounds, device: torch.device) -> None:
    for i, config in enumerate((FULL_FORMATS["nvfp4+fp16"], FULL_FORMATS["P4+8"])):
        case = mamba2_case(geometry(*MODELS[model]), config, 9, dtype=torch.bfloat16, seed=i)
        step_check(case, bounds_of(bounds, config, torch.bfloat16, device))


@GPU
@pytest.mark.parametrize("name", FULL_FORMATS)
def test_formats_in_bf16(name: str, mamba2_case, step_check, bounds, device: torch.device) -> None:
    config = FULL_FORMATS[name]
    for length in (1, 2, 16, 32) if name in ("nvfp4+fp16", "fp32") else (16,):
        at_length = dataclasses.replace(config, buffer_len=length)
        shape = (16, 64, 128, 2) if length == 16 else (4, 64, 128, 2)
        case = mamba2_case(geometry(*shape), at_length, 7, dtype=torch.bfloat16, seed=length)
        step_check(case, bounds_of(bounds, at_length, torch.bfloat16, device))


@GPU
@pytest.mark.parametrize("name", ["nvfp4+fp16", "P4+8", "fp32"])
def test_fp32_inputs_at_full_size(
    name: str, mamba2_case, step_check, bounds, device: torch.device
) -> None:
    """bf16 inputs hide a tf32 product; fp32 inputs with an fp32 state do not."""
    config = FULL_FORMATS[name]
    case = mamba2_case(geometry(32, 64, 128, 2), config, 9)
    step_check(case, bounds_of(bounds, config, torch.float32, device))


@GPU
def test_one_hash_at_batch_99(mamba2_case) -> None:
    case = mamba2_case(
        geometry(16, 64, 128, 2), FULL_FORMATS["nvfp4+fp16"], 99, dtype=torch.bfloat16
    )
    seen = set()
    for _ in range(20):
        twin = case.twin()
        seen.add(_digest(twin.step(), twin.buffer))
    assert len(seen) == 1


@GPU
@pytest.mark.parametrize("name", ["nvfp4+fp16", "P4+8", "e4m3"])
def test_a_graph_replays_with_new_data(name: str, mamba2_case) -> None:
    """Inputs, cursors, flags and slots are read at replay; the state is updated in place."""
    config = FULL_FORMATS[name]
    case = mamba2_case(geometry(8, 64, 128, 1), config, 9, dtype=torch.bfloat16)
    other = mamba2_case(geometry(8, 64, 128, 1), config, 9, dtype=torch.bfloat16, seed=5)
    for k in other.rows.__dataclass_fields__:  # other rows flush, and other slots are live
        setattr(other.rows, k, getattr(other.rows, k).roll(4, 0))
    weights = ("A", "D", "dt_bias")
    other.inputs = {k: v if k in weights else v.roll(4, 0) for k, v in other.inputs.items()}
    captured = case.twin()
    captured.rows = dataclasses.replace(
        case.rows, **{k: getattr(case.rows, k).clone() for k in case.rows.__dataclass_fields__}
    )
    captured.inputs = {k: v.clone() for k, v in case.inputs.items()}
    case.twin().step()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.step()
    for source in (case, other):
        captured.buffer.copy_(source.buffer)
        for k in case.rows.__dataclass_fields__:
            getattr(captured.rows, k).copy_(getattr(source.rows, k))
        for k, v in source.inputs.items():
            captured.inputs[k].copy_(v)
        graph.replay()
        eager = source.twin()
        assert torch.equal(eager.step(), out)
        assert torch.equal(eager.buffer, captured.buffer)


def _compiled_step(case, backend: str) -> None:
    """A compiled function without a graph break around the step: output and pages of the eager one,
    whose views it makes inside."""
    compiled, eager = case.twin(), case.twin()

    def step(x: torch.Tensor) -> torch.Tensor:
        return compiled.step(x=x * 1.0) + 1.0

    got = torch.compile(step, fullgraph=True, backend=backend)(case.inputs["x"])
    assert torch.equal(got, eager.step() + 1.0)
    assert torch.equal(compiled.buffer, eager.buffer)


def test_a_compiled_function_calls_the_kernels(mamba2_case) -> None:
    _compiled_step(mamba2_case(geometry(1, 16, 16, 1), flags("fp16", "nvfp4"), 2), "aot_eager")


@GPU
def test_torch_compile_keeps_the_step(mamba2_case) -> None:
    shape = geometry(8, 64, 128, 1)
    case = mamba2_case(shape, FULL_FORMATS["nvfp4+fp16"], 5, dtype=torch.bfloat16)
    _compiled_step(case, "inductor")


@GPU
def test_a_graph_of_compiled_code_replays_with_new_data(mamba2_case) -> None:
    config = FULL_FORMATS["nvfp4+fp16"]
    case = mamba2_case(geometry(8, 64, 128, 1), config, 9, dtype=torch.bfloat16)
    other = mamba2_case(geometry(8, 64, 128, 1), config, 9, dtype=torch.bfloat16, seed=5)
    captured, x = case.twin(), case.inputs["x"].clone()
    views = captured.views

    def run(views, x: torch.Tensor) -> torch.Tensor:
        more = {k: v for k, v in case.inputs.items() if k != "x"}
        return ops.mamba2_decode(views, config, case.rows, x * 1.0, **more, dt_softplus=True) + 1.0

    step = torch.compile(run, fullgraph=True)
    step(case.twin().views, x)  # compile before the capture
    step(views, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(views, x)
    for source in (case, other):
        captured.buffer.copy_(case.buffer)
        x.copy_(source.inputs["x"])
        graph.replay()
        eager = case.twin()
        assert torch.equal(run(eager.views, x), out)
        assert torch.equal(eager.buffer, captured.buffer)
