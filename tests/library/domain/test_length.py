"""Predicted answer lengths: remaining ranges, and wrong predictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.length import RangeEnd, TokenRange, known_length
from kaveri.domain.sampling import SamplingParams


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 120))
def test_what_is_left_shrinks_with_each_token_until_the_range_is_outlived(low: int, width: int, drawn: int) -> None:
    length = TokenRange(low, low + width)
    left = length.after(drawn)
    # It goes on, so at least one more token comes.
    lengths = [total - drawn for total in range(low, low + width) if total > drawn]
    if left is None:
        assert not lengths
    else:
        assert left.at(RangeEnd.HIGH) == max(lengths)
        assert left.at(RangeEnd.LOW) == max(0, low - drawn)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 120))
def test_a_limit_cuts_both_ends(low: int, width: int, most_tokens: int) -> None:
    cut = TokenRange(low, low + width).up_to(most_tokens)
    possible = [min(total, most_tokens) for total in range(low, low + width)]
    assert (cut.at(RangeEnd.LOW), cut.at(RangeEnd.HIGH)) == (min(possible), max(possible))


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (5, 5), (6, 5)])
def test_an_empty_or_negative_range_is_none(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        TokenRange(low, high)


def test_only_an_answer_that_nothing_but_its_limit_ends_has_a_settled_length() -> None:
    assert known_length(SamplingParams(max_tokens=7, ignore_eos=True), 100) == TokenRange(7, 8)
    assert known_length(SamplingParams(max_tokens=7), 100) is None
    assert known_length(SamplingParams(ignore_eos=True), 100) is None
    assert known_length(SamplingParams(max_tokens=7, ignore_eos=True, stop=("x",)), 100) is None
    assert known_length(SamplingParams(max_tokens=7, ignore_eos=True, stop_token_ids=(3,)), 100) is None
    assert known_length(SamplingParams(max_tokens=7, min_tokens=6), 100) is None
    assert known_length(SamplingParams(max_tokens=7, min_tokens=7, stop=("x",)), 100) == TokenRange(7, 8)


def test_an_answer_is_no_longer_than_the_model_has_room_for() -> None:
    """Regression: 2**32 - 1 tokens, which a direct caller of prefill may ask for, overflowed the message to decode."""
    longest = SamplingParams(max_tokens=2**32 - 1, ignore_eos=True)
    assert known_length(longest, 100) == TokenRange(100, 101)
