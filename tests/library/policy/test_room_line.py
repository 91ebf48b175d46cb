from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from kaveri.policy.admission import AdmissionPolicy, DecodeBatch
from kaveri.policy.decode_room import DecodeRoom, FreeRoom

POOL = 10
"""KV blocks in the pool, of one token each."""


def line(**limits: int) -> DecodeRoom:
    return DecodeRoom(POOL, 1, DecodeBatch(AdmissionPolicy.GREEDY, 1, POOL), **limits)


def free(blocks: int, attainable_blocks: int = POOL) -> FreeRoom:
    return FreeRoom(blocks, POOL - attainable_blocks, 0)


def next_to_ask(room: DecodeRoom, blocks: int, attainable_blocks: int = POOL) -> str | None:
    return room.next_to_ask(free(blocks, attainable_blocks), 0.0)


class LineMachine:
    """State machine: a block pool and its queue of requests; counts how often each is overtaken."""

    def __init__(self, max_overtakes: int) -> None:
        self.line = line(max_overtakes=max_overtakes)
        self.waiting: dict[str, int] = {}
        """Needed blocks by request id, in order of arrival."""
        self.asked: list[str] = []
        self.holds: dict[str, int] = {}
        self.overtaken: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return POOL - sum(self.holds.values())

    def join(self, request_id: str, needed_blocks: int) -> None:
        if request_id not in self.waiting and request_id not in self.holds:
            self.line.join(request_id, needed_blocks, needed_blocks)
            self.waiting[request_id] = needed_blocks

    def ask_next(self) -> str | None:
        request_id = next_to_ask(self.line, self.free)
        if request_id is not None:
            assert request_id not in self.asked
            self.line.asked(request_id)
            self.asked.append(request_id)
            self.holds[request_id] = self.waiting[request_id]
        return request_id

    def answer(self, granted: bool) -> None:
        if not self.asked:
            return
        request_id = self.asked.pop(0)
        if not granted:
            self.line.refused(request_id)
            del self.holds[request_id]
            return
        for other_id in self.waiting:
            if other_id == request_id:
                break
            self.overtaken[other_id] += 1
        self._leave(request_id)

    def end(self, request_id: str) -> None:
        if request_id in self.asked:
            self.asked.remove(request_id)
        self._leave(request_id)
        self.holds.pop(request_id, None)

    def _leave(self, request_id: str) -> None:
        self.line.leave_line(request_id)
        self.waiting.pop(request_id, None)
        self.overtaken.pop(request_id, None)


names = st.sampled_from("abcdefgh")
actions = st.lists(
    st.one_of(
        st.tuples(st.just("join"), names, st.integers(1, POOL)),
        st.tuples(st.sampled_from(["ask", "granted", "refused"]), st.none(), st.none()),
        st.tuples(st.just("end"), names, st.none()),
    ),
    max_size=200,
)


def run(machine: LineMachine, actions: list[tuple[str, str, int]], limit: int | None = None) -> None:
    for action, request_id, needed_blocks in actions:
        if action == "join":
            machine.join(request_id, needed_blocks)
        elif action == "ask":
            machine.ask_next()
        elif action == "end":
            machine.end(request_id)
        else:
            machine.answer(action == "granted")
        assert machine.line.waiting_count == len(machine.waiting)
        if limit is not None:
            assert max(machine.overtaken.values(), default=0) <= limit


NONE = None, None
ONE_IS_REFUSED_WHILE_ANOTHER_IS_ASKED_FOR = [
    ("join", "a", 1),
    ("join", "b", 1),
    ("ask", *NONE),
    ("ask", *NONE),
    ("refused", *NONE),
    ("granted", *NONE),
]


@given(st.integers(0, 4), actions)
@example(0, ONE_IS_REFUSED_WHILE_ANOTHER_IS_ASKED_FOR)
def test_no_request_in_line_is_overtaken_more_often_than_the_limit(
    max_overtakes: int, actions: list[tuple[str, str, int]]
) -> None:
    run(LineMachine(max_overtakes), actions, max_overtakes)


@given(st.integers(0, 4), actions)
def test_every_request_in_line_is_given_room_when_those_that_have_it_end(
    max_overtakes: int, actions: list[tuple[str, str, int]]
) -> None:
    machine = LineMachine(max_overtakes)
    run(machine, actions)
    for _ in range(20):
        for request_id in list(machine.holds):
            if request_id not in machine.asked:
                machine.end(request_id)
        while machine.ask_next() is not None:
            pass
        while machine.asked:
            machine.answer(granted=True)
    assert not machine.waiting


@given(st.integers(1, 4), actions)
def test_room_that_fits_a_waiting_request_is_idle_only_for_one_that_was_overtaken_to_the_limit(
    max_overtakes: int, actions: list[tuple[str, str, int]]
) -> None:
    machine = LineMachine(max_overtakes)
    run(machine, actions)
    while machine.ask_next() is not None:
        pass
    fits = [r for r, needed in machine.waiting.items() if needed <= machine.free and r not in machine.asked]
    assert not fits or not machine.line.is_open(free(0))


def test_small_requests_overtake_a_large_one_until_the_limit_and_go_on_behind_it() -> None:
    machine = LineMachine(2)
    machine.holds["taken"] = 4
    machine.join("large", 8)
    for number in range(4):
        machine.join(f"small {number}", 1)
    assert [machine.ask_next() for _ in range(3)] == ["small 0", "small 1", None]
    assert not machine.line.is_open(free(0))
    machine.answer(granted=True)
    machine.answer(granted=True)
    for request_id in ("taken", "small 0"):
        machine.end(request_id)
    assert [machine.ask_next() for _ in range(2)] == ["large", None], "it may be refused, and overtaken once more"
    machine.answer(granted=True)
    assert [machine.ask_next() for _ in range(2)] == ["small 2", None]
    assert machine.line.is_open(free(0))


def test_a_request_that_the_engine_refused_keeps_its_place() -> None:
    room = line()
    room.join("a", 2, 1)
    room.join("b", 2, 1)
    room.asked("a")
    assert next_to_ask(room, 2) == "b"
    room.refused("a")
    assert next_to_ask(room, 2) == "a"


def test_a_request_that_the_engine_refused_has_overtaken_no_other() -> None:
    room = line(max_overtakes=1)
    room.join("large", 8, 1)
    room.join("small", 1, 1)
    for _ in range(3):
        assert next_to_ask(room, 2) == "small"
        room.asked("small")
        assert not room.is_open(free(0))
        room.refused("small")
        assert room.is_open(free(0))


def test_a_request_that_asks_again_can_take_its_former_place_over() -> None:
    room = line(max_overtakes=1)
    for request_id in "ab":
        room.join(request_id, 2, 1)
    room.join("c", 1, 1)
    room.asked("c")
    assert room.leave_line("c") is not None
    room.join("a", 2, 1, room.leave_line("a"))
    assert not room.is_open(free(0)), "its overtakings count on"
    assert next_to_ask(room, 2) == "a"
    room.join("a", 2, 1, (room.leave_line("a"), None)[1])
    assert next_to_ask(room, 2) == "b", "without the place it is the last"


def test_a_request_that_waits_for_quarantined_blocks_holds_no_other_up() -> None:
    room = line(max_overtakes=1)
    room.join("large", 8, 1)
    for request_id in "abc":
        room.join(request_id, 1, 1)
        assert next_to_ask(room, 2, 7) == request_id
        room.asked(request_id)
        room.leave_line(request_id)
    assert room.is_open(free(0, 7))
    assert not room.is_open(free(0, 8)), "the blocks are out of quarantine"
    room.join("d", 1, 1)
    assert next_to_ask(room, 2, 8) is None
    assert next_to_ask(room, 8, 8) == "large"


def test_a_line_has_limits_of_requests_and_of_tokens() -> None:
    by_count = line(max_waiting=2)
    by_tokens = line(max_waiting_tokens=100)
    over = []
    for number in range(3):
        by_count.join(f"r{number}", 1, 90)
        by_tokens.join(f"r{number}", 1, 40)
        over.append((by_count.is_over_limit(), by_tokens.is_over_limit()))
    assert over == [(False, False), (False, False), (True, True)]
    for room in (by_count, by_tokens):
        room.leave_line("r1")
        assert not room.is_over_limit()
    alone = line(max_waiting_tokens=100)
    alone.join("r", 1, 1000)
    assert not alone.is_over_limit()
