"""Eight 4-bit codes to a word, in plane order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_quant.formats.packing import from_page, pack_nibbles, to_page, unpack_nibbles


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 32), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_round_trip(words: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, 8 * words), generator=torch.Generator().manual_seed(seed))
    packed = pack_nibbles(codes)
    assert packed.dtype == torch.int32 and packed.shape == (rows, words)
    assert torch.equal(unpack_nibbles(packed), codes.int())


@pytest.mark.parametrize("n", [8, 16, 96, 128, 256])
def test_nibble_i_of_word_j_is_element_i_n_over_8_plus_j(n: int) -> None:
    codes = torch.randint(0, 16, (3, n), generator=torch.Generator().manual_seed(n))
    packed = pack_nibbles(codes)
    for row in range(3):
        for j in range(n // 8):
            word = int(packed[row, j]) & 0xFFFFFFFF
            for i in range(8):
                assert (word >> (4 * i)) & 15 == int(codes[row, i * (n // 8) + j])


def test_every_word_round_trips_through_unpack() -> None:
    words = torch.randint(
        -(2**31), 2**31, (1000, 4), generator=torch.Generator().manual_seed(0)
    ).to(torch.int32)
    assert torch.equal(pack_nibbles(unpack_nibbles(words)), words)


def test_known_word() -> None:
    assert pack_nibbles(torch.arange(1, 9)).tolist() == [0x87654321 - 2**32]


def test_a_length_that_is_no_multiple_of_8() -> None:
    with pytest.raises(ValueError, match="last axis 12 is not a multiple of 8"):
        pack_nibbles(torch.zeros(2, 12))


@pytest.mark.parametrize("n", [8, 96, 128])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float16, torch.bfloat16])
def test_words_of_a_page_hold_elements_congruent_modulo_n_over_8(
    n: int, dtype: torch.dtype
) -> None:
    """With W = N / 8, word h * W + j of a page holds the elements (h * s + t) * W + j, t < s."""
    natural = torch.arange(2 * n).view(2, n)
    codes = (natural % 251).to(dtype)
    page = to_page(codes)
    width, per_word = n // 8, 4 // codes.element_size()
    assert page.shape == codes.shape and page.dtype == dtype
    for word in range(n // per_word):
        half, j = divmod(word, width)
        for t in range(per_word):
            element = (half * per_word + t) * width + j
            assert torch.equal(page[:, word * per_word + t], codes[:, element])
    assert torch.equal(from_page(page), codes)
    assert torch.equal(from_page(page.contiguous()), codes)


@pytest.mark.parametrize("n", [12, 128])
def test_page_order_leaves_whole_words_and_odd_rows_alone(n: int) -> None:
    wide = torch.arange(2 * n, dtype=torch.float32).view(2, n)
    assert torch.equal(to_page(wide), wide) and torch.equal(from_page(wide), wide)
    if n % 8:
        odd = wide.to(torch.uint8)
        assert torch.equal(to_page(odd), odd) and torch.equal(from_page(odd), odd)
