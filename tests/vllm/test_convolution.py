"""The rolling state of the convolution under drafts, against the convolution of what is kept."""

import random

import pytest
import torch
import torch.nn.functional as F

from replayssm_quant.backends.vllm.convolution import roll, update

CHANNELS, KERNEL = 6, 4


def whole(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """SiLU of the causal convolution of [tokens, channels] from nothing."""
    x = F.pad(tokens.T[None], (KERNEL - 1, 0))
    return F.silu(F.conv1d(x, weight[:, None], bias, groups=CHANNELS))[0].T


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_steps_with_rejected_drafts_and_chunks_are_one_convolution(drafts: int) -> None:
    rng, g = random.Random(drafts), torch.Generator().manual_seed(drafts)
    weight = torch.randn(CHANNELS, KERNEL, generator=g)
    bias = torch.randn(CHANNELS, generator=g)
    tokens = torch.randn(200, CHANNELS, generator=g)
    wanted = whole(tokens, weight, bias)
    # a strided state, as a layer has it; slot 2, whose neighbours must stay
    state = torch.full((4, KERNEL - 1 + drafts, CHANNELS), float("nan")).transpose(1, 2)
    state[2, :, : KERNEL - 1] = 0
    at, shift = 0, 1
    slots = torch.tensor([-1, 2])
    while at < 180:
        count = rng.randint(1, 1 + drafts)
        kept = rng.randint(1, count)
        x = torch.full((count + 1, CHANNELS), 99.0)  # a padding row of one token, then ours
        x[1 : 1 + kept] = tokens[at : at + kept]
        starts = torch.tensor([0, 1, 1 + count])
        y = update(x, state, weight, bias, "silu", slots, torch.tensor([1, shift]), starts)
        torch.testing.assert_close(y[1 : 1 + kept], wanted[at : at + kept])
        at, shift = at + kept, kept
        if rng.random() < 0.2:  # a prefill finds its history in the first columns
            roll(state, torch.tensor([2]), torch.tensor([shift - 1]), KERNEL)
            shift = 1
            past = F.pad(tokens.T, (KERNEL - 1, 0))[:, at : at + KERNEL - 1]
            assert torch.equal(state[2, :, : KERNEL - 1], past)
    assert state[[0, 1, 3]].isnan().all()


def test_an_unknown_activation_is_refused() -> None:
    one = torch.zeros(1, CHANNELS)
    with pytest.raises(ValueError, match="gelu"):
        update(one, one[None], one.T, None, "gelu", *(torch.zeros(1, dtype=torch.long),) * 3)
