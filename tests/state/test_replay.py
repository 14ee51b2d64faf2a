"""The flush rule in integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm_quant.state.replay import first_offset, flushes, schedule


@given(st.integers(0, 40), st.integers(0, 200), st.integers(1, 64), st.data())
def test_schedule(prompt, steps, length, data):
    """Windows of L after a first one of L - offset; each step is at its place in its window."""
    offset = data.draw(st.integers(0, length - 1))
    got = schedule(prompt, steps, length, offset)
    assert [s.position for s in got] == list(range(prompt + 1, prompt + steps + 1))
    first = length - offset
    for i, s in enumerate(got):
        inside = i if i < first else (i - first) % length
        assert s.valid == inside
        assert s.flush == (i + 1 == first or (i >= first and (i + 1 - first) % length == 0))


def test_offsets_are_spread_and_in_range():
    """A multiple of 16 below every draw: the 4 low bits are uniform (chi-squared, 15 dof)."""
    from replayssm_quant.formats.philox import request_key

    offsets = [first_offset(request_key(0, r), 16) for r in range(800)]
    counts = [offsets.count(i) for i in range(16)]
    assert sum(counts) == 800
    assert sum((c - 50) ** 2 / 50 for c in counts) < 45  # p < 1e-4
    assert first_offset(request_key(0, 3), 16) == offsets[3]
    assert {first_offset(-5, length) for length in (1,)} == {0}


def test_cursor_out_of_its_window():
    assert [flushes(v, 3) for v in range(3)] == [False, False, True] and flushes(0, 1)
    for valid in (-1, 3):
        with pytest.raises(ValueError, match=f"ring holds {valid} inputs, but a window of 3"):
            flushes(valid, 3)
    with pytest.raises(ValueError, match="offset 4 is outside 0 to 3"):
        schedule(0, 1, 4, 4)
