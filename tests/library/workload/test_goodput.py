import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.workload.goodput import GoodputSearch, Probe


def search(goodput_per_s: float, start_per_s: float, max_runs: int, resolution: float = 0.05) -> GoodputSearch:
    found = GoodputSearch(start_per_s, 0.9, max_runs, resolution)
    while (rate_per_s := found.next_rate()) is not None:
        found.note(Probe(rate_per_s, 0.95 if rate_per_s <= goodput_per_s else 0.4))
    return found


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_with_runs_enough_the_goodput_is_found_from_any_first_rate(goodput_per_s: float, start_per_s: float) -> None:
    found = search(goodput_per_s, start_per_s, max_runs=100)
    assert found.held is not None
    assert found.failed is not None
    assert found.held.rate_per_s <= goodput_per_s < found.failed.rate_per_s <= 1.051 * found.held.rate_per_s
    assert len(found.probes) < 100


@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(1, 6))
def test_no_more_runs_are_made_than_allowed(goodput_per_s: float, start_per_s: float, max_runs: int) -> None:
    assert len(search(goodput_per_s, start_per_s, max_runs).probes) <= max_runs


def test_a_search_that_ends_early_says_what_it_knows() -> None:
    low = search(100.0, 1.0, max_runs=3)
    assert (low.held, low.failed) == (Probe(4.0, 0.95), None)
    high = search(1.0, 100.0, max_runs=3)
    assert (high.held, high.failed) == (None, Probe(25.0, 0.4))


def test_exactly_the_target_is_enough() -> None:
    found = GoodputSearch(1.0, 0.9, 1, 0.05)
    found.note(Probe(1.0, 0.9))
    assert found.held == Probe(1.0, 0.9)
    assert found.next_rate() is None


def test_after_a_hit_and_a_miss_it_tries_between_them() -> None:
    found = GoodputSearch(1.0, 0.9, 10, 0.05)
    found.note(Probe(1.0, 1.0))
    found.note(Probe(2.0, 0.0))
    assert found.next_rate() == pytest.approx(2**0.5)
