"""The page of one layer and request: vLLM's convolution state, then ours. No vLLM here.

vLLM sees two tensors: the convolution state as it declares it, and one run of bytes (uint8, so that
no warm-up or copy of the engine takes it for numbers) that holds the fields of ``StateLayout``. The
run begins with the padding that puts its first field on 128 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

import torch

from ...config import StateConfig
from ...state.geometry import LayerGeometry
from ...state.layout import ALIGN, StateLayout, StateViews, fp32_bytes

RING_STORAGE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


BLOCK = 16
"""Tokens that an attention block is a multiple of on a GPU."""


def request_bytes(
    page: int, recurrent: int, attention: int, token: int, tokens: int, states: int = 1
) -> int:
    """Bytes that vLLM's cache gives a request of ``tokens`` tokens.

    page: bytes of the largest recurrent page. recurrent, attention: numbers of layers. token: bytes
    of one token in one attention layer. states: pages of a request in a recurrent layer; with
    drafts vLLM's own layers have one more for each. vLLM has pages of one size, so it grows the
    attention block to the recurrent page, and it hands out blocks for groups of equally many
    layers.
    """
    if not attention:
        return page * recurrent * states
    few, many = sorted((recurrent, attention))
    group = many if many < 1.5 * few else few
    block = BLOCK * ceil(page / token / BLOCK)
    blocks = states * ceil(recurrent / group) + ceil(attention / group) * ceil(tokens / block)
    return group * blocks * block * token


class StatePage:
    """Shapes, dtypes and views of one layer's page.

    conv_shape and conv_dtype: as the stock layer declares its convolution state. act_dtype: dtype
    of the model's activations, which the ring holds. drafts: draft tokens that a step verifies at
    most. Raises ValueError for another dtype.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        config: StateConfig,
        conv_shape: tuple[int, ...],
        conv_dtype: torch.dtype,
        act_dtype: torch.dtype,
        drafts: int = 0,
    ):
        if act_dtype not in RING_STORAGE:
            raise ValueError(f"activations in {act_dtype} are not supported; use fp32, bf16, fp16")
        self.layout = StateLayout(geometry, config, RING_STORAGE[act_dtype], drafts)
        self.conv_shape, self.conv_dtype = tuple(conv_shape), conv_dtype
        self.conv_bytes = prod(conv_shape) * conv_dtype.itemsize
        self.lead = -self.conv_bytes % ALIGN

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.conv_shape, (self.lead + self.layout.page_bytes,))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.conv_dtype, torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, a multiple of 128."""
        return self.conv_bytes + self.lead + self.layout.page_bytes

    @property
    def stock_bytes(self) -> int:
        """Bytes of one slot in plain vLLM with an fp32 state, of which it has one more for each
        draft token."""
        return self.conv_bytes + fp32_bytes(self.layout.geometry)

    def views(self, state: torch.Tensor) -> StateViews:
        """Typed views over the second declared tensor, uint8 [slots, ...] with any slot stride.

        Raises RuntimeError where the engine did not place the pages on 128 bytes.
        """
        pages = state[:, self.lead :]
        if pages.stride(0) % ALIGN or (pages.is_cuda and pages.data_ptr() % ALIGN):
            raise RuntimeError(
                f"vLLM placed state pages {pages.stride(0)} bytes apart at offset "
                f"{pages.data_ptr() % ALIGN}; the kernels need multiples of {ALIGN}. Give another "
                "--block-size"
            )
        return self.layout.views(pages)


def model_pages(
    layers: Mapping[int, LayerGeometry],
    configs: Mapping[int, StateConfig],
    ranks: int,
    conv_shape: tuple[int, ...],
    conv_dtype: torch.dtype,
    act_dtype: torch.dtype,
    drafts: int = 0,
) -> list[StatePage]:
    """The different pages of a model's layers on one of its tensor-parallel ranks.

    layers and configs: of each recurrent layer of the whole model. They are those of the layers
    that a rank builds, also for a pipeline rank that builds none. The rest as in ``StatePage``;
    raises ValueError where a layer does not divide over the ranks.
    """
    different = dict.fromkeys((layer.shard(ranks), configs[i]) for i, layer in layers.items())
    return [StatePage(g, c, conv_shape, conv_dtype, act_dtype, drafts) for g, c in different]


def start_line(
    label: str,
    formats: list[str],
    buffer_len: int,
    pages: list[tuple[int, int]],
    attention: list[int],
    tokens: int,
    drafts: int = 0,
) -> str:
    """What is logged once the model stands.

    pages: bytes of each recurrent layer's slot, split and with an FP32 state. attention: bytes of a
    token in each attention layer. tokens: the longest request. drafts: of a step.
    """
    ours, stock = (sum(x) for x in zip(*pages, strict=True))
    stock *= 1 + drafts
    cache = [
        request_bytes(max(x), len(pages), len(attention), max(attention, default=0), tokens, states)
        for x, states in zip(zip(*pages, strict=True), (1, 1 + drafts), strict=True)
    ]
    of = "FP32 states" if drafts else "an FP32 state"
    return (
        f"replayssm_quant: {label}, state {'; '.join(formats)}, L = {buffer_len}, "
        f"{f'{drafts} drafts, ' if drafts else ''}{len(pages)} layers, {ours / 2**20:.2f} MiB a "
        f"request on this rank against {stock / 2**20:.2f} MiB with {of} ({stock / ours:.2f}x); a "
        f"request of {tokens:,} tokens takes about {cache[0] / 2**20:.1f} MiB of cache against "
        f"{cache[1] / 2**20:.1f} MiB, so expect {cache[1] / cache[0]:.2f}x the concurrency"
    )
