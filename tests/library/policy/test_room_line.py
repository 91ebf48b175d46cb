"""The line of requests that wait for room on a decode instance."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kaveri.policy.room_line import RoomLine

ALWAYS_S = 1e9


class LineMachine:
    """Requests that ask, are given room or refused, and give up; remembers who was overtaken how often."""

    def __init__(self, max_overtakes: int) -> None:
        self.line = RoomLine(max_overtakes)
        self.waiting: list[str] = []
        """As they must stand in line."""
        self.overtaken: Counter[str] = Counter()

    def ask(self, request_id: str, fits: bool) -> bool:
        """Whether it was given room."""
        if fits and self.line.may_take(request_id, 0.0):
            self.line.take(request_id)
            before = self.waiting[: self.waiting.index(request_id)] if request_id in self.waiting else self.waiting
            self.overtaken.update(before)
            self._forget(request_id)
            return True
        is_new = self.line.refuse(request_id, 1, 0.0, ALWAYS_S)
        assert is_new == (request_id not in self.waiting)
        if is_new:
            self.waiting.append(request_id)
        return False

    def give_up(self, request_id: str) -> None:
        self.line.leave(request_id, 1)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if request_id in self.waiting:
            self.waiting.remove(request_id)
            del self.overtaken[request_id]


names = st.sampled_from("abcdefgh")
actions = st.lists(st.tuples(names, st.sampled_from(["fits", "does not fit", "gives up"])), max_size=200)


@given(st.integers(0, 4), actions)
def test_nobody_in_line_is_overtaken_more_often_than_the_limit(
    max_overtakes: int, actions: list[tuple[str, str]]
) -> None:
    machine = LineMachine(max_overtakes)
    for request_id, action in actions:
        if action == "gives up":
            machine.give_up(request_id)
        else:
            machine.ask(request_id, action == "fits")
        assert machine.line.length == len(machine.waiting)
        assert max(machine.overtaken.values(), default=0) <= max_overtakes


@given(st.integers(0, 4), actions)
def test_the_first_in_line_is_given_room_whenever_there_is_room_for_it(
    max_overtakes: int, actions: list[tuple[str, str]]
) -> None:
    machine = LineMachine(max_overtakes)
    for request_id, action in actions:
        if action == "gives up":
            machine.give_up(request_id)
        else:
            machine.ask(request_id, action == "fits")
    # So it waits for nothing but room, and all behind it come to be first.
    while machine.waiting:
        assert machine.ask(machine.waiting[0], fits=True)


def test_small_requests_overtake_a_large_one_until_the_limit_and_go_on_behind_it() -> None:
    machine = LineMachine(2)
    assert not machine.ask("large", fits=False)
    assert [machine.ask(f"small {number}", fits=True) for number in range(4)] == [True, True, False, False]
    assert not machine.line.may_take(None, 0.0)
    assert machine.ask("large", fits=True)
    assert machine.line.may_take(None, 0.0)
    assert [machine.ask(f"small {number}", fits=True) for number in (2, 3)] == [True, True]


def test_who_stops_asking_loses_its_place_and_who_asks_keeps_it() -> None:
    line = RoomLine(max_overtakes=0)
    assert line.refuse("a", 1, now_s=0.0, until_s=2.0)
    assert not line.refuse("a", 1, now_s=1.5, until_s=3.5)
    assert not line.may_take("b", now_s=3.4)
    assert line.may_take("b", now_s=3.5)
    assert line.refuse("a", 1, now_s=4.0, until_s=6.0)


def test_a_newer_attempt_takes_the_place_over_and_an_older_one_cannot_give_it_up() -> None:
    line = RoomLine(max_overtakes=0)
    line.refuse("a", 1, 0.0, ALWAYS_S)
    line.refuse("b", 1, 0.0, ALWAYS_S)
    assert not line.refuse("a", 2, 0.0, ALWAYS_S)
    line.leave("a", 1)
    assert line.may_take("a", 0.0)
    assert not line.may_take("b", 0.0)
    line.leave("a", 2)
    assert line.may_take("b", 0.0)


def test_a_full_line_gives_no_more_places() -> None:
    line = RoomLine(max_waiting=2)
    assert [line.refuse(request_id, 1, 0.0, ALWAYS_S) for request_id in "abcc"] == [True] * 4
    assert line.length == 2
