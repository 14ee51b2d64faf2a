"""The GDN operations around the step: packed input, gates, invariances, loads, drift, errors."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from replayssm_quant import ops  # noqa: E402
from replayssm_quant.config import StateConfig  # noqa: E402
from replayssm_quant.formats.rotation import rotate, unrotate  # noqa: E402
from replayssm_quant.kernels.gdn import reference, triton_ops  # noqa: E402
from replayssm_quant.state.cache import PAD_SLOT, StepRows, read_checkpoint  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

FP32 = StateConfig.from_flags("fp32", buffer_len=4)
P84 = StateConfig.from_flags("P8+4", buffer_len=3, rotate=True)
SMALL = LayerGeometry("gdn", heads=2, rows=16, n=16, groups=1)


def packed(case, a, b, A_log, dt_bias, **kwargs):
    i, g = case.inputs, case.geometry
    rows = len(case.kinds)
    mixed = torch.cat([i[name].reshape(rows, -1) for name in ("q", "k", "v")], 1)
    wide = torch.full((rows, mixed.shape[1] + 24), float("nan"), device=mixed.device)
    wide = wide.to(mixed.dtype)
    wide[:, 8:-16] = mixed
    assert mixed.shape[1] == 2 * g.groups * g.n + g.heads * g.rows
    return triton_ops.decode_packed(
        case.views, case.config, case.rows, wide[:, 8:-16], a, b, A_log, dt_bias,
        layer=case.layer, head_offset=case.head_offset, **kwargs,
    )  # fmt: skip


# --- input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
def test_packed_input_with_raw_gates_equals_the_reference(gdn_case, rms, double):
    case = gdn_case(SMALL, FP32, "frp")
    rows, heads = 3, 2
    gen = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, rows, heads, generator=gen).to(case.inputs["v"])
    A_log, bias = torch.randn(2, heads, generator=gen).to(case.inputs["v"])
    g, beta = reference.gates(a, b, A_log, bias, allow_neg_eigval=double)
    ours, exact = case.twin(), case.twin(inputs={**case.inputs, "g": g, "beta": beta})
    want = exact.exact()
    out = torch.full_like(case.inputs["v"], 7.0)
    got = packed(ours, a, b, A_log, bias, allow_neg_eigval=double, out=out)
    assert got is out and rms(got, want) <= 5e-6
    kept, at = case.kept
    for name in ("ring_k", "ring_v"):
        x, y = (getattr(c.views, name)[kept, at] for c in (ours, exact))
        assert torch.equal(x, y)


GATES = [-104.0, -50.0, -20.0, -1.0, -0.5, 0.0, 0.5, 1.0, 8.0, 17.0, 20.0, 20.1, 88.0, 1e4]


def test_gates_equal_fp32_at_every_size(gdn_case):
    """softplus neither vanishes below nor overflows above; beta is never rounded to 16 bits."""
    heads = len(GATES)
    case = gdn_case(LayerGeometry("gdn", heads, 1, 8, 1), FP32, "r")
    a = torch.tensor([GATES], device=case.inputs["v"].device)
    A_log, bias = torch.zeros(heads, device=a.device), torch.full((heads,), 0.25, device=a.device)
    packed(case, a, a, A_log, bias)
    kept, at = case.kept
    g, beta = case.views.ring_g[kept, at, :, 0], case.views.ring_beta[kept, at]
    want = -F.softplus(a.double() + 0.25)
    want = torch.where(a > 19.9, -(a.double() + 0.25), want)  # exact above 20
    torch.testing.assert_close(g.double(), want, rtol=2e-6, atol=1e-37)
    torch.testing.assert_close(beta.double(), torch.sigmoid(a.double()), rtol=1e-6, atol=1e-38)


def test_16_bit_gate_inputs_are_widened_first(gdn_case):
    case = gdn_case(SMALL, FP32, "r", torch.float16)
    b = torch.tensor([[-0.5, 0.5]], device=case.inputs["v"].device).half()
    zero = torch.zeros(2, device=b.device)
    packed(case, b, b, zero, zero)
    kept, at = case.kept
    beta = case.views.ring_beta[kept, at]
    torch.testing.assert_close(beta.double(), torch.sigmoid(b.double()), rtol=1e-6, atol=0)


def test_slices_of_one_buffer_give_the_same_bytes(gdn_case):
    case = gdn_case(SMALL, P84, "fr")
    i = case.inputs
    parts = [i[name].flatten(1) for name in ("q", "k", "v")]
    buffer = torch.cat([torch.full_like(parts[0], float("nan")), *parts], 1)
    q, k, v = buffer[:, 16:].split([p.shape[1] for p in parts], 1)
    ours = case.twin()
    strided = ours.step(q=q.view(2, 1, 16), k=k.view(2, 1, 16), v=v.view(2, 2, 16))
    plain = case.twin()
    assert torch.equal(strided, plain.step())
    assert torch.equal(ours.buffer, plain.buffer)


def test_scale_and_unnormalised_keys(gdn_case, rms):
    case = gdn_case(SMALL, FP32, "fr")
    case.inputs["k"] *= 0.2
    case.views.ring_rk[:, :] = 1.0
    case.views.ring_k[:, :3] *= 0.2
    i = case.inputs
    args = [i[n] for n in ("q", "k", "v", "g", "beta")]
    exact, ours = case.twin(), case.twin()
    keywords = {"scale": 0.5, "l2norm": False}
    want = reference.decode_step(
        exact.views, case.config, case.rows, *(t.double() for t in args[:3]), *args[3:],
        compute=torch.float64, **keywords,
    )  # fmt: skip
    got = triton_ops.decode_step(ours.views, case.config, case.rows, *args, **keywords)
    assert rms(got, want) <= 5e-6


# --- invariances ----------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_neighbours_or_its_place(gdn_case):
    case = gdn_case(SMALL, P84, "frpe")
    whole = case.twin()
    y = whole.step()
    turned = case.take([3, 2, 0, 1])
    z = turned.step()
    assert torch.equal(z, y[[3, 2, 0, 1]]) and torch.equal(turned.buffer, whole.buffer)
    alone = case.take([3])
    assert torch.equal(alone.step(), y[3:])
    slot = case.rows.slots[3]
    assert torch.equal(alone.buffer[slot], whole.buffer[slot])


def test_another_slot_gives_the_same_bytes(gdn_case):
    case = gdn_case(SMALL, P84, "f")
    slot = int(case.rows.slots[0])
    moved = case.twin()
    moved.buffer[(slot + 1) % 3] = moved.buffer[slot]
    moved.rows = dataclasses.replace(case.rows, slots=(case.rows.slots + 1) % 3)
    assert torch.equal(moved.step(), case.step())
    assert torch.equal(moved.buffer[(slot + 1) % 3], case.buffer[slot])


def test_a_shard_draws_the_bits_of_its_global_heads(gdn_case):
    whole = gdn_case(LayerGeometry("gdn", 4, 16, 16, 2), P84, "f")
    shard = gdn_case(SMALL, P84, "f", head_offset=2)
    slot = whole.rows.slots
    assert torch.equal(slot, shard.rows.slots)
    for name, view in shard.views.tensors().items():
        axis = {"ring_k": 2, "ring_rk": 2}.get(name, 2 if name.startswith("ring") else 1)
        full = getattr(whole.views, name)
        view.copy_(full.narrow(axis, full.shape[axis] // 2, full.shape[axis] // 2))
    shard.inputs = {n: t[:, t.shape[1] // 2 :].contiguous() for n, t in whole.inputs.items()}
    y = whole.step()
    assert torch.equal(shard.step(), y[:, 2:])
    for name in ("ckpt", "ckpt_low", "ckpt_scale"):
        assert torch.equal(getattr(shard.views, name)[slot], getattr(whole.views, name)[slot, 2:])


def test_draws_change_with_position_request_and_layer_alone(gdn_case):
    case = gdn_case(SMALL, StateConfig.from_flags("P8+4", buffer_len=1), "f")
    slot = case.rows.slots[0]

    def codes(**changes):
        twin = case.twin(**changes)
        twin.step()
        return twin.views.ckpt_low[slot]

    rows = case.rows
    plain = codes()
    assert torch.equal(codes(), plain)
    for other in (
        {"rows": dataclasses.replace(rows, position=rows.position + 1)},
        {"rows": dataclasses.replace(rows, key=rows.key ^ 1)},
        {"layer": case.layer + 1},
        {"head_offset": 7},
    ):
        assert not torch.equal(codes(**other), plain)


def test_the_checkpoint_never_sees_the_copy(gdn_case):
    """Bytes of the checkpoint after many flushes, with the copy replaced by noise at every step."""
    config = StateConfig.from_flags("fp16", "nvfp4", buffer_len=2)
    case = gdn_case(LayerGeometry("gdn", 1, 16, 16, 1), config, "r")
    on_gpu = case.buffer.is_cuda
    case.write(torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(4)))
    noisy = case.twin()
    gen, noise = (torch.Generator().manual_seed(i) for i in (5, 6))
    for _ in range(40 if on_gpu else 6):
        for _ in range(2):
            copy = noisy.views.copy
            copy.copy_(torch.randint(-(2**31), 2**31 - 1, copy.shape, generator=noise).int())
            y, z = case.step(), noisy.step()
            if not bool(case.rows.flush[0]):
                assert not torch.equal(y, z)  # the noise was read
            case.advance(gen)
            noisy.rows, noisy.inputs = case.rows, case.inputs
        slot = case.rows.slots[0]
        assert torch.equal(case.views.ckpt[slot], noisy.views.ckpt[slot])


# --- loads and drift ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP32, P84], ids=["fp32", "P8+4"])
def test_load_state_folds_the_ring(gdn_case, rms, config):
    case = gdn_case(LayerGeometry("gdn", 2, 24, 96, 1), config, "rr")
    live = case.rows
    rows = StepRows(
        torch.cat([live.slots, live.slots.new_tensor([PAD_SLOT])]),
        *(torch.cat([t, t[:1]]) for t in (live.valid, live.flush, live.position, live.key)),
    )
    whole = gdn_case(LayerGeometry("gdn", 2, 24, 96, 1), config, "ff")  # a readable checkpoint
    before = whole.buffer.clone()
    got = ops.gdn_load(whole.views, config, rows, impl="triton")
    want = reference.load_state(whole.views, config, live, compute=torch.float64)
    assert rms(got[:2], want) <= 2e-6 and not got[2].any()
    assert torch.equal(whole.buffer, before)


def test_three_windows_follow_the_plain_recurrence(gdn_case, rms):
    """Every output and, at every flush, the state itself, against float64 without any replay."""
    config = StateConfig.from_flags("fp32", buffer_len=5, rotate=True)
    case = gdn_case(SMALL, config, "rr", beta_max=2.0, decay=0.5)
    case.rows.valid.zero_()
    gen = torch.Generator().manual_seed(11)
    state = unrotate(read_checkpoint(case.views, config, case.rows.slots).double().nan_to_num())
    start = torch.randn(state.shape, generator=gen).to(case.buffer.device)
    case.write(start)
    state = unrotate(start.double())
    for _ in range(15):
        i = {name: t.double() for name, t in case.inputs.items()}
        k = i["k"] * reference.inverse_norm(i["k"])[..., None]
        q = i["q"] * reference.inverse_norm(i["q"])[..., None] * 16**-0.5
        q, k = (t.repeat_interleave(2, 1) for t in (q, k))
        want, state = reference.recurrent_step(state, q, k, i["v"], i["g"][..., None], i["beta"])
        got = case.step()
        assert rms(got, want) <= 5e-6
        if bool(case.rows.flush.all()):
            stored = read_checkpoint(case.views, config, case.rows.slots)
            assert rms(unrotate(stored.double()), state) <= 2e-6
        case.advance(gen)


def test_stale_content_decays_after_a_topic_switch(gdn_case, rms):
    """Keys leave a subspace; what was written there must go with the gate, not freeze."""
    config = StateConfig.from_flags("P8+4", buffer_len=1, rotate=True)
    case = gdn_case(LayerGeometry("gdn", 1, 16, 16, 1), config, "f")
    gen = torch.Generator().manual_seed(2)
    start = torch.randn(1, 1, 16, 16, generator=gen).to(case.buffer.device)
    start[..., 8:] = 0.0  # the old topic: channels 0 to 7
    case.write(rotate(start))
    steps, g = 12, -0.4
    for _ in range(steps):
        case.inputs["k"][..., :8] = 0.0
        case.inputs["g"].fill_(g)
        case.step()
        case.advance(gen)
    stored = read_checkpoint(case.views, config, case.rows.slots)
    stale = unrotate(stored)[..., :8].norm()
    left = float(torch.exp(torch.tensor(g * steps)))  # 8e-3 of what was there
    fresh = float(unrotate(stored)[..., 8:].norm())
    # noise: an SR step, 1 / 2032 of a row's largest value, a flush; decay forgets all but a few
    noise = fresh / 2032 * 8
    assert abs(float(stale) - left * float(start.norm())) <= noise


def test_equals_transformers_in_fp32(gdn_case):
    transformers = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = gdn_case(LayerGeometry("gdn", 4, 16, 32, 2), FP32, "rr")
    case.rows.valid.zero_()
    case.write(torch.zeros(2, 4, 16, 32))
    gen, tokens, got = torch.Generator().manual_seed(8), [], []
    for _ in range(9):
        tokens.append(case.inputs)
        got.append(case.step())
        case.advance(gen)
    seq = {n: torch.stack([t[n] for t in tokens], 1).cpu() for n in tokens[0]}
    q, k = (seq[n].repeat_interleave(2, 2) for n in "qk")
    want, state = transformers.torch_recurrent_gated_delta_rule(
        q, k, seq["v"], g=seq["g"], beta=seq["beta"], initial_state=None,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(got, 1).cpu(), want, rtol=1e-5, atol=1e-5)
    folded = triton_ops.load_state(case.views, FP32, case.rows)
    torch.testing.assert_close(folded.cpu(), state.transpose(-1, -2), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_equals_flash_linear_attention_in_fp32(gdn_case):
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs the fla extra")
    case = gdn_case(LayerGeometry("gdn", 32, 128, 128, 16), FP32, "rr")
    case.rows.valid.zero_()
    case.write(torch.zeros(2, 32, 128, 128))
    gen, tokens, got = torch.Generator().manual_seed(8), [], []
    for _ in range(9):
        tokens.append(case.inputs)
        got.append(case.step())
        case.advance(gen)
    seq = {n: torch.stack([t[n] for t in tokens], 1) for n in tokens[0]}
    want, _ = fla.fused_recurrent_gated_delta_rule(
        seq["q"], seq["k"], seq["v"], g=seq["g"], beta=seq["beta"],
        use_qk_l2norm_in_kernel=True, output_final_state=True,
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-5, atol=1e-5)


# --- engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_says_exactly_what_it_changes(gdn_case, packed):
    """By torch's own checks, with the kernels behind it; ``test_operators`` has the references."""
    config = StateConfig.from_flags("fp16", "nvfp4", buffer_len=2)
    case = gdn_case(LayerGeometry("gdn", 1, 16, 16, 1), config, "fr")
    i, inputs, op = case.inputs, case.inputs, torch.ops.replayssm_quant.gdn_decode
    if packed:
        mixed = torch.cat([i[name].flatten(1) for name in ("q", "k", "v")], 1)
        weights = {"A_log": i["g"][0].clone(), "dt_bias": i["g"][1].clone()}
        inputs = {"mixed_qkv": mixed, "a": i["g"], "b": i["beta"], **weights}
        op = torch.ops.replayssm_quant.gdn_decode_packed
    given = {"pages": case.pages, "layout": case.layout.text, "config": config.text}
    given |= {**vars(case.rows), **inputs, "impl": "triton"}
    torch.library.opcheck(op.default, (), given, test_utils=("test_schema", "test_faketensor"))


def test_a_batch_of_nothing(gdn_case):
    case = gdn_case(SMALL, FP32, "r")
    empty = case.take([])
    assert empty.step().shape == (0, 2, 16)


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_slots_of_either_width(gdn_case, slots):
    case = gdn_case(SMALL, FP32, "rp")
    other = case.twin(rows=dataclasses.replace(case.rows, slots=case.rows.slots.to(slots)))
    assert torch.equal(other.step(), case.step())


def wrong(case, **changes):
    i = {**case.inputs, **{k: v for k, v in changes.items() if k in case.inputs}}
    args = {"views": case.views, "config": case.config, "rows": case.rows, **i}
    args.update({k: v for k, v in changes.items() if k not in i})
    return triton_ops.decode_step(**args)


@pytest.mark.parametrize(
    ("error", "says", "change"),
    [
        (ValueError, "q has shape", lambda c: {"q": c.inputs["q"][:, :, :8]}),
        (ValueError, "g has shape", lambda c: {"g": c.inputs["g"][:, :1]}),
        (TypeError, "v is torch.int32", lambda c: {"v": c.inputs["v"].int()}),
        (ValueError, "buffer_len is 9", lambda c: {
            "config": dataclasses.replace(c.config, buffer_len=9)}),
        (TypeError, "rows.valid is torch.int64", lambda c: {
            "rows": dataclasses.replace(c.rows, valid=c.rows.valid.long())}),
        (TypeError, "rows.flush is torch.int32", lambda c: {
            "rows": dataclasses.replace(c.rows, flush=c.rows.flush.int())}),
        (ValueError, "rows.key has shape", lambda c: {
            "rows": dataclasses.replace(c.rows, key=c.rows.key[:1])}),
        (ValueError, "belong to a Mamba-2 layer", lambda c: {
            "views": dataclasses.replace(c.views, ring_k=None)}),
        (ValueError, "has strides", lambda c: {
            "views": dataclasses.replace(c.views, ring_v=c.views.ring_v.expand(4, -1, -1, -1)
                                         .transpose(2, 3).contiguous().transpose(2, 3))}),
        (ValueError, "out is", lambda c: {"out": torch.empty(2, 2, 8, device=c.buffer.device)}),
    ],
)  # fmt: skip
def test_errors_name_the_value_before_anything_is_written(gdn_case, error, says, change):
    case = gdn_case(SMALL, FP32, "fr")
    before = case.buffer.clone()
    with pytest.raises(error, match=says):
        wrong(case, **change(case))
    assert torch.equal(case.buffer, before)


def test_a_head_scale_has_no_kernel_and_says_so(gdn_case):
    case = gdn_case(SMALL, StateConfig.from_flags("int8/head", "same", buffer_len=3), "f")
    with pytest.raises(ValueError, match="use a row or block scale"):
        case.step()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [StateConfig.from_flags("fp16", "nvfp4"), P84], ids=["fp16", "P"]
)
def test_a_cuda_graph_replays_what_eager_steps_do(gdn_case, config):
    case = gdn_case(LayerGeometry("gdn", 32, 128, 128, 16), config, "frpe" * 4, torch.bfloat16)
    case.write(torch.randn(len(case.rows.live), 32, 128, 128))  # all rows flush: no poison
    eager, graphed = case.twin(), case.twin()
    i = {n: t.clone() for n, t in case.inputs.items()}
    rows = dataclasses.replace(case.rows)
    for name in ("slots", "valid", "flush", "position", "key"):
        setattr(rows, name, getattr(case.rows, name).clone())
    out = torch.empty_like(i["v"])

    def launch(where):
        triton_ops.decode_step(where.views, config, rows, *i.values(), layer=2, out=out)

    launch(case.twin())  # compile and fill caches outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(graphed)
    graphed.buffer.copy_(case.buffer)
    gen = torch.Generator().manual_seed(4)
    for _ in range(20):
        for name in ("slots", "valid", "flush", "position", "key"):
            getattr(rows, name).copy_(getattr(eager.rows, name))
        for name, value in eager.inputs.items():
            i[name].copy_(value)
        graph.replay()
        assert torch.equal(out, eager.step())
        assert torch.equal(graphed.buffer, eager.buffer)
        eager.advance(gen)


@pytest.mark.gpu
def test_twenty_launches_give_the_same_bytes(gdn_case):
    config = StateConfig.from_flags("P8+4", rotate=True)
    case = gdn_case(LayerGeometry("gdn", 32, 128, 128, 16), config, "frpe" * 25, torch.bfloat16)
    first = case.twin()
    y = first.step()
    for _ in range(20):
        again = case.twin()
        assert torch.equal(again.step(), y) and torch.equal(again.buffer, first.buffer)


@pytest.mark.gpu
def test_slots_beyond_two_to_the_31(gdn_case):
    """The last slots of a pool of 5 GiB: offsets in bytes and in elements exceed an int32."""
    config = StateConfig.from_flags("P8+4", rotate=True)
    geometry = LayerGeometry("gdn", 32, 128, 128, 16)
    near = gdn_case(geometry, config, "fr", torch.bfloat16)
    far = near.twin()
    stride = 40 << 20
    wide = torch.zeros(128, stride, dtype=torch.uint8, device=near.buffer.device)
    moved = torch.tensor([127, 126], device=wide.device)
    for source, target in zip(near.rows.slots, moved, strict=True):
        wide[target, : near.buffer.shape[1]] = near.buffer[source]
    far.buffer, far.rows = wide, dataclasses.replace(near.rows, slots=moved)
    assert torch.equal(far.step(), near.step())
    for source, target in zip(near.rows.slots, moved, strict=True):
        assert torch.equal(wide[target, : near.buffer.shape[1]], near.buffer[source])


@pytest.mark.gpu
def test_compiled_models_call_the_operator(gdn_case):
    case = gdn_case(LayerGeometry("gdn", 4, 64, 64, 2), FP32, "frp", torch.bfloat16)
    ours, eager = case.twin(), case.twin()
    step = torch.compile(lambda q, k, v, g, beta: 2.0 * ops.gdn_decode(
        ours.views, FP32, case.rows, q, k, v, g, beta, layer=2), fullgraph=True)  # fmt: skip
    assert torch.equal(step(*case.inputs.values()), 2.0 * eager.step())
    assert torch.equal(ours.buffer, eager.buffer)


@pytest.mark.skipif("fla" in sys.modules, reason="fla is imported already")
def test_the_naive_rule_of_flash_linear_attention_agrees(gdn_case):
    """fla's torch reference, which needs no GPU; its package's __init__ does."""
    spec = importlib.util.find_spec("fla")
    if spec is None or importlib.util.find_spec("einops") is None:
        pytest.skip("needs the fla extra (flash-linear-attention), which is for GPUs")
    path = spec.submodule_search_locations[0] + "/ops/gated_delta_rule/naive.py"
    one = importlib.util.spec_from_file_location("fla_naive", path)
    naive = importlib.util.module_from_spec(one)
    one.loader.exec_module(naive)
    case = gdn_case(SMALL, FP32, "rr")
    case.rows.valid.zero_()
    case.write(torch.zeros(2, 2, 16, 16))
    gen, tokens, got = torch.Generator().manual_seed(8), [], []
    for _ in range(6):
        tokens.append(case.inputs)
        got.append(case.step())
        case.advance(gen)
    seq = {n: torch.stack([t[n] for t in tokens], 1).cpu() for n in tokens[0]}
    q, k = (
        (seq[n] * reference.inverse_norm(seq[n])[..., None]).repeat_interleave(2, 2) for n in "qk"
    )
    want, _ = naive.naive_recurrent_gated_delta_rule(q, k, seq["v"], seq["beta"], seq["g"])
    torch.testing.assert_close(torch.stack(got, 1).cpu(), want, rtol=1e-5, atol=1e-5)
