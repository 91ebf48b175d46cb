import pytest

from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.byte_budget import KEY_SHARE, ByteBudget

MOST = 1000 * KEY_SHARE


def test_requests_past_the_limit_are_refused_until_others_end() -> None:
    changes: list[int] = []
    budget = ByteBudget("gateway", MOST, changes.append)
    with budget.hold() as second:
        with budget.hold() as first:
            first.add(MOST - 10)
            with pytest.raises(NoCapacity, match="--max-bodies-bytes") as refused:
                second.add(11)
            assert refused.value.retry_after_s > 0
            second.add(10)
        second.add(MOST - 10)
    assert changes == [MOST - 10, MOST, 10, MOST, 0]


def test_a_key_that_holds_its_share_leaves_room_for_the_others() -> None:
    budget = ByteBudget("gateway", MOST)
    with budget.hold("greedy") as first, budget.hold("greedy") as second, budget.hold("other") as other:
        first.add(600)
        with pytest.raises(NoCapacity, match="API key greedy"):
            second.add(600)
        other.add(600)
    with budget.hold("greedy") as again:
        again.add(1000)


def test_what_never_fits_is_no_matter_of_time() -> None:
    budget = ByteBudget("gateway", MOST)
    with budget.hold() as held, pytest.raises(InvalidArgument):
        held.add(MOST + 1)
    with budget.hold("alice") as held, pytest.raises(InvalidArgument, match="API key alice"):
        held.add(1001)
