"""The page of a layer: its bytes are those of ``replayssm_quant.plan``, its fields aligned."""

import pytest
import torch

from replayssm_quant.backends.vllm.page import StatePage, model_pages, request_bytes, start_line
from replayssm_quant.config import StateConfig
from replayssm_quant.state.budget import budget
from replayssm_quant.state.geometry import LayerGeometry, ModelGeometry
from replayssm_quant.state.layout import ALIGN, StateLayout

NANO = LayerGeometry("mamba2", 96, 80, 128, 8)
QWEN = LayerGeometry("gdn", 32, 128, 128, 16)
ODD = LayerGeometry("mamba2", 3, 20, 96, 1)
CONFIGS = [
    StateConfig(),
    StateConfig.from_flags("fp16"),
    StateConfig.from_flags("P4+8", rotate=True),
    StateConfig.from_flags("e4m3/b32", "nvfp4", buffer_len=7),
]


def page(geometry: LayerGeometry, config: StateConfig, dtype: torch.dtype) -> StatePage:
    conv = (geometry.conv_kernel - 1, geometry.conv_channels)
    return StatePage(geometry, config, conv, dtype, dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
@pytest.mark.parametrize("geometry", [NANO, QWEN, ODD], ids=["nano-4b", "qwen3.5-4b", "odd"])
def test_bytes_are_those_of_the_plan(geometry: LayerGeometry, config: StateConfig) -> None:
    found = page(geometry, config, torch.bfloat16)
    plan = budget("m", ModelGeometry("m", {0: geometry}, 1), config, ring_storage="bf16")
    layout = StateLayout(geometry, config, "bf16")
    assert found.layout.page_bytes == layout.page_bytes
    assert plan.layers[0].page == layout.page_bytes
    assert plan.layers[0].conv == found.conv_bytes
    assert found.nbytes == found.conv_bytes + found.lead + layout.page_bytes
    assert found.nbytes % ALIGN == 0 and 0 <= found.lead < ALIGN
    declared = zip(found.shapes, found.dtypes, strict=True)
    total = sum(torch.Size(s).numel() * d.itemsize for s, d in declared)
    assert total == found.nbytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_pages_of_a_model_are_those_of_its_layers(ranks: int) -> None:
    layers = dict.fromkeys((0, 2, 5), NANO)
    configs = dict(zip(layers, [CONFIGS[1], CONFIGS[2], CONFIGS[1]], strict=True))
    local = NANO.shard(ranks)
    conv = (3, local.conv_channels)
    types = (torch.bfloat16, torch.float16)
    for drafts in (0, 3):
        pages = model_pages(layers, configs, ranks, conv, *types, drafts)
        wanted = [StatePage(local, c, conv, *types, drafts) for c in (CONFIGS[1], CONFIGS[2])]
        assert [(p.shapes, p.dtypes) for p in pages] == [(p.shapes, p.dtypes) for p in wanted]
    with pytest.raises(ValueError, match="do not divide over 5 ranks"):
        model_pages(layers, configs, 5, conv, *types)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label)
def test_views_of_a_strided_page_are_aligned_and_stay_inside(config: StateConfig) -> None:
    found = page(ODD, config, torch.float32)
    stride = found.nbytes + 3 * ALIGN  # an engine pads pages as it likes
    memory = torch.zeros(4 * stride + ALIGN, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGN
    pages = memory[start : start + 4 * stride].view(4, stride)
    state = pages[:, found.conv_bytes : found.conv_bytes + found.shapes[1][0]]
    views = found.views(state).tensors()
    for t in views.values():
        assert t.data_ptr() % ALIGN == 0 and t.stride(0) * t.itemsize == stride
        t[2].view(torch.uint8).fill_(255)
    touched = pages.ne(0).any(1).tolist()
    assert touched == [False, False, True, False]
    assert not pages[2, : found.conv_bytes + found.lead].any()
    assert not pages[2, found.nbytes :].any()


def test_a_page_off_the_alignment_is_refused() -> None:
    found = page(ODD, CONFIGS[1], torch.float32)
    state = torch.zeros(2, found.shapes[1][0] + 64, dtype=torch.uint8)[:, : found.shapes[1][0]]
    assert state.stride(0) % ALIGN
    with pytest.raises(RuntimeError, match="--block-size"):
        found.views(state)


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize("geometry", [NANO, QWEN], ids=["nano-4b", "qwen3.5-4b"])
def test_drafts_lengthen_the_ring_as_the_plan_says(geometry: LayerGeometry, drafts: int) -> None:
    config = CONFIGS[2]
    conv = (geometry.conv_kernel - 1 + drafts, geometry.conv_channels)
    found = StatePage(geometry, config, conv, torch.bfloat16, torch.bfloat16, drafts)
    plan = budget(
        "m", ModelGeometry("m", {0: geometry}, 1), config, ring_storage="bf16", drafts=drafts
    )
    assert plan.layers[0].page == found.layout.page_bytes
    assert plan.layers[0].conv == found.conv_bytes
    assert found.layout.capacity == config.buffer_len + 1 + drafts


def test_an_unknown_activation_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        page(ODD, CONFIGS[0], torch.float64)


MIB = 2**20


@pytest.mark.parametrize(
    ("page_bytes", "tokens", "room"),
    [(3990528, 2048, 223.78), (1880960, 2048, 385.18), (2863360, 2048, 310.22)],
)
def test_room_is_what_vllm_reported(page_bytes: int, tokens: int, room: float) -> None:
    # vLLM 0.33's "Maximum concurrency" in 30 GiB: Nano-4B, 21 Mamba-2 and 4 attention layers of
    # 8 heads x 128 in bf16, with an fp32 state, with P4+8 and with fp16 + nvfp4
    found = 30 * 2**30 / request_bytes(page_bytes, 21, 4, 2 * 2 * 8 * 128, tokens)
    assert found == pytest.approx(room, rel=0.003)


def test_groups_of_nearly_equal_size_are_padded_to_the_larger() -> None:
    # 5 recurrent and 4 attention layers: one group of 5 each
    assert request_bytes(16 * 64, 5, 4, 64, 16) == 5 * 2 * 16 * 64
    # 6 and 4: groups of 4, two of them recurrent
    assert request_bytes(16 * 64, 6, 4, 64, 16) == 4 * 3 * 16 * 64
    assert request_bytes(1000, 3, 0, 0, 10**6) == 3000  # no attention: any length


def test_the_start_line_says_what_is_stored_and_what_to_expect() -> None:
    pages = [(MIB, 2 * MIB), (MIB, 2 * MIB)]
    line = start_line("recipe auto", ["P4+8 SR rot"], 16, pages, [1024, 1024], 1024)
    assert line == (
        "replayssm_quant: recipe auto, state P4+8 SR rot, L = 16, 2 layers, 2.00 MiB a request on "
        "this rank against 4.00 MiB with an FP32 state (2.00x); a request of 1,024 tokens takes "
        "about 4.0 MiB of cache against 8.0 MiB, so expect 2.00x the concurrency"
    )


def test_with_drafts_plain_vllm_has_a_state_for_each() -> None:
    pages = [(MIB, 2 * MIB), (MIB, 2 * MIB)]
    line = start_line("recipe auto", ["fp32"], 16, pages, [1024, 1024], 1024, 3)
    assert "L = 16, 3 drafts, 2 layers, 2.00 MiB a request on this rank against 16.00 MiB" in line
    # a group of two layers: one block of 1,024 tokens and one state, or 512 tokens and four
    assert "about 4.0 MiB of cache against 20.0 MiB, so expect 5.00x the concurrency" in line
    assert request_bytes(2 * MIB, 2, 2, 1024, 1024, 4) == 20 * MIB
    assert request_bytes(1000, 3, 0, 0, 10**6, 4) == 12000
