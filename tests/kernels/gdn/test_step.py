"""One step of a poisoned layer against the float64 reference: every format, geometry and window."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from replayssm_quant.config import StateConfig  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

# Bounds. read: sums of K + L fp32 products, a few 1e-7; where a 4-bit copy is read, the query is
# held in fp16 and products are summed in fp16 by fours: 2**-10. fold: a flush replays the window in
# fp32, each token adding some 2**-24 of the row's largest value. flips: such an error moves
# 4e-7 * 3 * 2**11 = 2.5e-3 of fp16 codes over a rounding edge, fewer of any narrower format.
EXACT = {"read": 3e-6, "fold": 5e-6, "flips": 5e-3}
PACKED = {**EXACT, "read": 2.0**-10}


def gdn(hk: int, hv: int, k: int, v: int, gate_width: int = 1) -> LayerGeometry:
    return LayerGeometry("gdn", heads=hv, rows=v, n=k, groups=hk, gate_width=gate_width)


def bounds_of(config: StateConfig, output: float = 0.0) -> dict[str, float]:
    """The bounds above, widened by what storing y costs (``output``)."""
    base = PACKED if config.readout.bits == 4 else EXACT
    state = 5e-6 if not config.update.rounds else (5e-2 if config.update.bits == 4 else 1e-2)
    return {**base, "read": base["read"] + output, "fold": base["fold"] + output, "state": state}


FORMATS = {
    "fp32": StateConfig.from_flags("fp32", buffer_len=4),
    "fp16+nvfp4": StateConfig.from_flags("fp16", "nvfp4", buffer_len=4),
    "fp16-rn+e4m3": StateConfig.from_flags("fp16", "e4m3", buffer_len=4, rounding="rn"),
    "fp16": StateConfig.from_flags("fp16", "same", buffer_len=4),
    "bf16": StateConfig.from_flags("bf16", "same", buffer_len=4, rounding="rn"),
    "fp32+bf16": StateConfig.from_flags("fp32", "bf16", buffer_len=4),
    "bf16+int8": StateConfig.from_flags("bf16", "int8", buffer_len=4),
    "e4m3+nvfp4": StateConfig.from_flags("e4m3", "nvfp4", buffer_len=4, philox_rounds=10),
    "e4m3-b32-fp16": StateConfig.from_flags("e4m3/b32/fp16", "same", buffer_len=4),
    "e5m2": StateConfig.from_flags("e5m2", "same", buffer_len=4),
    "int8-rot": StateConfig.from_flags("int8", "same", buffer_len=4, rotate=True),
    "int8+int4": StateConfig.from_flags("int8", "int4", buffer_len=4, random_bits=16),
    "mxfp8+mxfp4": StateConfig.from_flags("mxfp8", "mxfp4", buffer_len=4, rounding="rn"),
    "nvfp4": StateConfig.from_flags("nvfp4", "same", buffer_len=4),
    "P4+4": StateConfig.from_flags("P4+4", buffer_len=4, rounding="rn"),
    "P4+8-rot": StateConfig.from_flags("P4+8", buffer_len=4, rotate=True),
    "P4+8-row": StateConfig.from_flags("P4+8/row", buffer_len=4),
    "P8+4-rot": StateConfig.from_flags("P8+4", buffer_len=4, rotate=True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(gdn_case, gdn_check, name):
    config = FORMATS[name]
    case = gdn_case(gdn(1, 2, 32, 16), config, "frp", torch.float16)
    gdn_check(case.twin(), **bounds_of(config, output=2.0**-11))


@pytest.mark.parametrize("name", ["fp32", "fp16+nvfp4", "e4m3-b32-fp16", "P4+8-rot", "P8+4-rot"])
def test_long_windows_fold_by_products(gdn_case, gdn_check, name):
    """Every way in which a checkpoint becomes an fp16 operand, and keys that reflect."""
    config = dataclasses.replace(FORMATS[name], buffer_len=6)
    case = gdn_case(gdn(1, 1, 128, 16), config, "fe", torch.float16, beta_max=2.0)
    gdn_check(case, **bounds_of(config, output=2.0**-11))


SHAPES = {
    "one-head": (gdn(1, 1, 64, 16), "frpe"),
    "ratio-2": (gdn(2, 4, 16, 16), "rfp"),
    "ratio-3": (gdn(1, 3, 16, 16), "fr"),
    "ratio-4-odd-rows": (gdn(1, 4, 8, 7), "fr"),
    "olmo-small": (gdn(2, 2, 96, 24), "fr"),
    "k-128": (gdn(1, 1, 128, 16), "re"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_in_fp32_and_with_keys_that_reflect(gdn_case, gdn_check, name):
    geometry, kinds = SHAPES[name]
    config = StateConfig.from_flags("fp32", buffer_len=5, rotate=True)
    gdn_check(gdn_case(geometry, config, kinds, beta_max=2.0), **bounds_of(config))


def test_padding_between_planes_stays_out_of_the_planes(gdn_case, gdn_check):
    config = StateConfig.from_flags("P8+4", buffer_len=3, rotate=True)  # 96 / 8 = 12 of 16 lanes
    gdn_check(gdn_case(gdn(1, 1, 96, 16), config, "fr", beta_max=2.0), **bounds_of(config))


@pytest.mark.parametrize("length", [1, 2, 16, 64])
def test_every_window(gdn_case, gdn_check, length):
    config = StateConfig.from_flags("fp32", buffer_len=length)
    gdn_check(gdn_case(gdn(1, 2, 16, 16), config, "fperr"), **bounds_of(config))


@pytest.mark.parametrize("length", [5, 16, 17, 64])
def test_every_window_of_wide_keys(gdn_case, gdn_check, length):
    config = StateConfig.from_flags("fp32", buffer_len=length)
    gdn_check(gdn_case(gdn(1, 1, 96, 16), config, "fe"), **bounds_of(config))


def test_a_gate_for_each_key_channel(gdn_case, gdn_check):
    config = StateConfig.from_flags("fp32", buffer_len=4)
    gdn_check(gdn_case(gdn(1, 2, 32, 16, gate_width=32), config, "frp"), **bounds_of(config))


@pytest.mark.parametrize("kinds", ["f", "r"])
def test_sixteen_equal_keys_at_a_reflecting_beta(gdn_case, gdn_check, kinds):
    """The corrections alternate in sign and do not shrink: the worst case of a triangular solve."""
    config = StateConfig.from_flags("fp32", buffer_len=17)
    case = gdn_case(gdn(1, 1, 128, 16), config, kinds, decay=0.0)
    views, count = case.views, int(case.rows.valid[0])
    slot = case.rows.slots[0]
    case.rows.valid.fill_(16 if kinds == "f" else 15)
    count = int(case.rows.valid[0])
    key = case.inputs["k"][0]
    views.ring_k[slot, :count] = key
    views.ring_v[slot, :count] = torch.randn(count, 1, 16, device=key.device)
    views.ring_g[slot, :count] = 0.0
    views.ring_beta[slot, :count] = 1.999
    views.ring_rk[slot, :count] = torch.rsqrt(key.square().sum() + 1e-6)
    case.inputs["beta"].fill_(1.999)
    case.inputs["g"].fill_(0.0)
    gdn_check(case, **bounds_of(config))


@pytest.mark.parametrize("nats", [30.0, 2000.0])
def test_decay_that_leaves_nothing(gdn_case, gdn_check, nats):
    config = StateConfig.from_flags("fp32", buffer_len=6)
    case = gdn_case(gdn(1, 1, 128, 16), config, "frr", decay=0.0)
    for i in range(3):
        case.views.ring_g[case.rows.slots[i], : int(case.rows.valid[i])] = -nats
    case.inputs["g"].fill_(-nats)
    gdn_check(case, **bounds_of(config))


def test_a_zero_state_and_zero_keys(gdn_case, gdn_check):
    config = StateConfig.from_flags("P8+4", buffer_len=3)
    case = gdn_case(gdn(1, 1, 16, 16), config, "ef", state_scale=0.0)
    for name in ("ring_k", "ring_v"):
        ring = getattr(case.views, name)
        ring[case.rows.slots[1]] = 0.0
    for name in ("k", "v"):
        case.inputs[name].zero_()
    case.views.ring_rk[case.rows.slots] = 1e3
    y = case.step()
    assert not y[1].any() and torch.isfinite(y).all()
    assert not case.views.ckpt_scale[case.rows.slots[1]].any()


def test_nan_stays_in_its_slot_and_head(gdn_case):
    config = StateConfig.from_flags("P8+4", buffer_len=2)
    case = gdn_case(gdn(2, 2, 16, 16), config, "ff")
    case.inputs["v"][0, 1, 3] = float("nan")
    clean = case.twin(inputs={**case.inputs, "v": case.inputs["v"].nan_to_num(0.0)})
    y, want = case.step(), clean.step()
    bad = torch.zeros_like(y, dtype=torch.bool)
    bad[0, 1, 3] = True
    assert y[bad].isnan().all() and torch.equal(y[~bad], want[~bad])
    slot = case.rows.slots[0]
    assert case.views.ckpt_scale[slot, 1, 3].isnan()
    assert torch.equal(case.views.ckpt_scale[slot, 0], clean.views.ckpt_scale[slot, 0])


LAYERS = {
    "qwen3.5-4b": gdn(16, 32, 128, 128),
    "qwen3.5-4b-tp8": gdn(2, 4, 128, 128),
    "qwen3.6-27b": gdn(16, 48, 128, 128),
    "qwen3.5-122b": gdn(16, 64, 128, 128),
    "olmo-hybrid-7b": gdn(30, 30, 96, 192),
    "tiny": gdn(2, 4, 64, 64),
}
SERVED = {
    "fp32": StateConfig.from_flags("fp32"),
    "nvfp4+fp16": StateConfig.from_flags("fp16", "nvfp4"),
    "nvfp4+e4m3": StateConfig.from_flags("e4m3", "nvfp4"),
    "e4m3+fp16": StateConfig.from_flags("fp16", "e4m3"),
    "int8-rot": StateConfig.from_flags("int8", "same", rotate=True),
    "P4+4-rot": StateConfig.from_flags("P4+4", rotate=True),
    "P4+8-rot": StateConfig.from_flags("P4+8", rotate=True),
    "P8+4-rot": StateConfig.from_flags("P8+4", rotate=True),
    "P8+4-L32": StateConfig.from_flags("P8+4", rotate=True, buffer_len=32),
    "fp16-L1": StateConfig.from_flags("fp16", "same", buffer_len=1),
}


ONE_OR_SEVERAL = pytest.mark.parametrize("launches", ["separate", "single"], indirect=True)


@pytest.mark.gpu
@ONE_OR_SEVERAL
@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
@pytest.mark.parametrize("geometry", LAYERS.values(), ids=LAYERS)
def test_served_layers_in_bf16(gdn_case, gdn_check, geometry, config):
    beta_max = 2.0 if geometry.n == 96 else 1.0
    case = gdn_case(geometry, config, "frperrrf", torch.bfloat16, beta_max=beta_max)
    gdn_check(case, **bounds_of(config, output=2.0**-9))


SHARDS = {
    "qwen3.5-4b-tp2": gdn(8, 16, 128, 128),
    "qwen3.5-4b-tp4": gdn(4, 8, 128, 128),
    "qwen3.6-27b-tp8": gdn(2, 6, 128, 128),
    "qwen3.5-122b-tp8": gdn(2, 8, 128, 128),
    "olmo-hybrid-7b-tp2": gdn(15, 15, 96, 192),
}


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["nvfp4+fp16", "P8+4-rot"])
@pytest.mark.parametrize("shard", SHARDS)
def test_shards_in_bf16(gdn_case, gdn_check, shard, config):
    geometry = SHARDS[shard]
    beta_max = 2.0 if geometry.n == 96 else 1.0
    case = gdn_case(geometry, SERVED[config], "frperrrf", torch.bfloat16, beta_max=beta_max)
    gdn_check(case, **bounds_of(SERVED[config], output=2.0**-9))


@pytest.mark.parametrize("groups, heads", [(2, 6), (5, 5)])
def test_small_shards(gdn_case, gdn_check, groups, heads):
    """Odd numbers of heads and groups, as tensor parallelism leaves them."""
    config = StateConfig.from_flags("P8+4", buffer_len=2, rotate=True)
    case = gdn_case(gdn(groups, heads, 16, 8), config, "fr", torch.float16)
    gdn_check(case, **bounds_of(config, 2.0**-11))


@pytest.mark.gpu
@ONE_OR_SEVERAL
@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_every_format_in_bf16(gdn_case, gdn_check, config):
    gdn_check(
        gdn_case(gdn(2, 4, 128, 128), config, "frperrrf", torch.bfloat16),
        **bounds_of(config, output=2.0**-9),
    )
