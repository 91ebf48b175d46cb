import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.view import InstanceState, InstanceStatus, Phase
from kaveri.errors import InvalidArgument
from kaveri.policy.placement import DecodePlacementPolicy
from kaveri.policy.room_search import Ask, Hopeless, NoInstance, RoomSearch, Seeker, StopWaiting
from tests.library.policy.views import DECODE, LAYOUT, MODEL, OTHER_LAYOUT, instance, view_of


def decode(instance_id: str, free_blocks: int, total_blocks: int = 10, **more: Any) -> InstanceStatus:
    room = {"free_blocks": free_blocks, "total_blocks": total_blocks}
    return instance(instance_id, DECODE, **{"layout": LAYOUT, **room, **more})


def new_search() -> RoomSearch[str]:
    return RoomSearch(MODEL, LAYOUT, DecodePlacementPolicy.POWER_OF_TWO, random.Random(0))


def seeker(token_count: int = 40, **fields: object) -> Seeker[str]:
    return Seeker("a", token_count, **fields)  # type: ignore[arg-type]


def asked(found: object) -> tuple[str, bool, bool]:
    assert isinstance(found, Ask), found
    return found.target.record.instance_id, found.waits, found.shows_room


def test_a_request_asks_where_there_is_room_and_is_ready_to_wait_there() -> None:
    view = view_of(decode("full", 2), decode("room", 3))
    assert asked(new_search().look(seeker(), view, 0.0)) == ("room", True, True)


def test_a_request_that_sees_no_room_waits_at_an_instance_that_could_hold_it() -> None:
    view = view_of(decode("small", 2, total_blocks=2), decode("large", 1))
    assert asked(new_search().look(seeker(), view, 0.0)) == ("large", True, False)


def test_a_request_that_waits_asks_others_with_room_without_waiting_there_too() -> None:
    search = new_search()
    full, room = decode("full", 0), decode("room", 9)
    assert search.look(seeker(waits_at="full"), view_of(full), 0.0) is None
    assert asked(search.look(seeker(waits_at="full"), view_of(full, room), 0.0)) == ("room", False, True)
    assert search.look(seeker(waits_at="room"), view_of(full, room), 0.0) is None, "it has its place there already"


def test_a_request_leaves_the_line_of_an_instance_that_takes_none_now() -> None:
    search = new_search()
    draining = decode("a", 9, state=InstanceState.DRAINING)
    for view in (view_of(), view_of(draining), view_of(draining, decode("b", 9))):
        assert isinstance(search.look(seeker(waits_at="a"), view, 0.0), StopWaiting)


def test_an_instance_rests_after_a_refusal() -> None:
    search, view = new_search(), view_of(decode("a", 9))
    search.rest("a", 1.0)
    assert search.look(seeker(), view, 0.5) is None
    assert search.next_rest_ends_s() == 1.0
    assert asked(search.look(seeker(), view, 1.0)) == ("a", True, True)
    assert search.next_rest_ends_s() is None


def test_a_request_waits_at_a_silent_instance_only_when_there_is_no_other() -> None:
    silent, full = decode("silent", 9), decode("full", 0)
    avoiding = seeker(silent={"silent"})
    assert asked(new_search().look(avoiding, view_of(silent, decode("room", 3)), 0.0)) == ("room", True, True)
    assert asked(new_search().look(avoiding, view_of(silent, full), 0.0)) == ("full", True, False)
    assert asked(new_search().look(avoiding, view_of(silent), 0.0)) == ("silent", True, False)
    assert asked(new_search().look(seeker(), view_of(silent, full), 0.0)) == ("silent", True, True)


def test_no_two_requests_count_on_the_same_room_until_it_is_given_back() -> None:
    search, view = new_search(), view_of(decode("a", 4))
    assert asked(search.look(seeker(), view, 0.0)) == ("a", True, True)
    other = Seeker("b", 40)
    assert asked(search.look(other, view, 0.0)) == ("a", True, False)
    for key in "ab":
        search.forget(key, "a")
    assert len(search._unconfirmed) == 0
    assert asked(search.look(other, view, 0.0)) == ("a", True, True)


def test_a_request_that_no_instance_can_take_is_hopeless() -> None:
    search = new_search()
    error = InvalidArgument("token_ids", 40, "shorter")
    found = search.look(seeker(unfit={"a": error}), view_of(decode("a", 9)), 0.0)
    assert found == Hopeless(error)
    too_long = search.look(seeker(160), view_of(decode("a", 9), decode("b", 9)), 0.0)
    assert isinstance(too_long, Hopeless)
    assert "159 tokens" in str(too_long.error)
    assert asked(search.look(seeker(159), view_of(decode("a", 9)), 0.0)) == ("a", True, False)


def test_without_an_instance_that_takes_this_layout_the_reason_is_named() -> None:
    found = new_search().look(seeker(), view_of(), 0.0)
    assert found == NoInstance("there is no decode instance")
    found = new_search().look(seeker(), view_of(decode("a", 9, layout=OTHER_LAYOUT)), 0.0)
    assert isinstance(found, NoInstance)
    assert "a:" in found.reason


loads = st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.integers(0, 3)), max_size=5)


@given(loads, st.integers(1, 159), st.integers(-1, 4), st.sets(st.integers(0, 4)))
def test_a_request_that_could_be_served_always_asks_waits_or_rests(
    drawn: list[tuple[int, bool, int]], token_count: int, waits_at: int, resting: set[int]
) -> None:
    search = new_search()
    statuses = [
        decode(f"d{number}", free, state=InstanceState.READY if ready else InstanceState.DRAINING)
        for number, (free, ready, _) in enumerate(drawn)
    ]
    for number in resting:
        search.rest(f"d{number}", 1.0)
    view = view_of(*statuses)
    ready = {status.record.instance_id for status in view.ready(Phase.DECODE, MODEL)}
    needed = LAYOUT.block_count(token_count + 1)
    at = f"d{waits_at}" if waits_at >= 0 else None
    found = search.look(seeker(token_count, waits_at=at), view, 0.0)
    free_elsewhere = {
        status.record.instance_id
        for status in view.ready(Phase.DECODE, MODEL)
        if status.load.free_blocks >= needed and status.record.instance_id not in {at, *(f"d{n}" for n in resting)}
    }
    match found:
        case Ask():
            name = found.target.record.instance_id
            assert name in ready
            assert name not in {f"d{n}" for n in resting}
            assert name != at
            assert found.waits == (at is None)
            assert found.shows_room == bool(free_elsewhere)
        case StopWaiting():
            assert at is not None
            assert at not in ready
        case NoInstance():
            assert not ready
        case None:
            assert not free_elsewhere
            assert at in ready or ready <= {f"d{n}" for n in resting}
        case Hopeless():
            raise AssertionError(found)
