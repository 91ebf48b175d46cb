"""State machine of a request at decode: accepted events and resulting actions."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kaveri.errors import (
    EngineBroke,
    EngineError,
    InvalidArgument,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives import decoding
from kaveri.lives.decoding import (
    Action,
    AnswerReserve,
    BareAction,
    BareEvent,
    Broken,
    Drew,
    Ended,
    EndRequested,
    Event,
    InLine,
    KeepTokens,
    Landed,
    LandingDone,
    LandingFailed,
    Outcome,
    RecordEnd,
    Reserved,
    Reserving,
    Rival,
    RivalCame,
    RoomGranted,
    RoomRefused,
    Running,
    SendError,
    State,
    step,
)

TICKET = Ticket(b"0" * 16, b"1" * 16, 1, (), (0,), 1, 9.0, KvLayout("fingerprint", 2, 16, 2, 8, "float32"))
FULL = NoCapacity("decode", 0.1)
STATES: tuple[State, ...] = (InLine(True), Reserving(True, 0.0), Reserved(0.0), Landed(0.0), Running(0.0))
ENDS: tuple[Event, ...] = (
    BareEvent.CALL_ENDED,
    EndRequested(by_router=True),
    EndRequested(by_router=False),
    *(RivalCame(rival, RequestAlreadyExists("a")) for rival in Rival),
    BareEvent.TIME_OVER,
    BareEvent.ROUTER_LOST,
    Broken(Unavailable("broken")),
)
EVENTS: tuple[Event, ...] = (
    BareEvent.ROOM_REQUESTED,
    RoomGranted(TICKET),
    RoomRefused(FULL),
    RoomRefused(EngineError("stopped")),
    BareEvent.ADOPTED,
    LandingDone(1),
    LandingFailed("expired"),
    BareEvent.SEAT_TAKEN,
    Drew(is_last=False),
    Drew(is_last=True),
    BareEvent.BLOCKS_LOST,
    *ENDS,
)
POSSIBLE: dict[BareEvent | type[Event], set[type[State]]] = {
    BareEvent.ROOM_REQUESTED: {InLine},
    RoomGranted: {Reserving},
    RoomRefused: {InLine, Reserving},
    BareEvent.ADOPTED: {Reserving},
    LandingDone: {Reserved},
    LandingFailed: {Reserving, Reserved},
    BareEvent.SEAT_TAKEN: {Landed},
    BareEvent.BLOCKS_LOST: {Landed, Running},
    Drew: {Running},
}


def possible_states(event: Event) -> set[type[State]]:
    return POSSIBLE.get(event if isinstance(event, BareEvent) else type(event), {type(each) for each in STATES})


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product((*STATES, Ended(Outcome.FINISHED)), EVENTS)), ids=repr
)
def test_an_impossible_event_is_an_assertion_that_names_both(state: State, event: Event) -> None:
    if type(state) in possible_states(event):
        step(state, event, 1.0)
        return
    with pytest.raises(AssertionError) as impossible:
        step(state, event, 1.0)
    assert type(state).__name__ in str(impossible.value)
    assert type(event).__name__ in str(impossible.value)


def told(state: State, event: Event) -> SendError | None:
    _, actions = step(state, event, 1.0)
    return next((action for action in actions if isinstance(action, SendError)), None)


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_a_router_hears_of_an_end_only_when_it_may_wait_for_tokens_in_vain(state: State) -> None:
    landed = isinstance(state, Landed | Running)
    asked = not isinstance(state, InLine)
    assert (told(state, EndRequested(by_router=False)) is not None) == landed
    assert told(state, EndRequested(by_router=True)) is None
    assert told(state, BareEvent.CALL_ENDED) is None
    assert told(state, BareEvent.TIME_OVER) is None
    assert (told(state, RivalCame(Rival.SAME_OWNER, FULL)) is not None) == landed
    assert told(state, RivalCame(Rival.NEWER_OWNER, FULL)) is None
    replaced = told(state, RivalCame(Rival.OTHER_REQUEST, FULL))
    assert (replaced is not None and replaced.replaced) == asked
    assert (told(state, Broken(Unavailable("broken"))) is not None) == asked
    assert (told(state, BareEvent.ROUTER_LOST) is not None) == asked


@pytest.mark.parametrize("error", [EngineError("request 'r': it raised"), EngineBroke("it raised", 4)])
def test_a_router_hears_what_an_exception_of_the_engine_means_for_its_request(error: EngineError | EngineBroke) -> None:
    heard = told(Running(1.0), Broken(error))
    assert heard is not None
    assert (heard.error, heard.fault) == (error.reason, error)


@pytest.mark.parametrize(
    ("error", "outcome", "answer"),
    [
        (FULL, Outcome.NO_ROOM, NoCapacity),
        (EngineError("stopped"), Outcome.FAILED, Unavailable),
        (InvalidArgument("a", 1, "less"), Outcome.REFUSED, InvalidArgument),
    ],
)
def test_a_refusal_of_the_engine_answers_the_call(error: Exception, outcome: Outcome, answer: type) -> None:
    state, actions = step(Reserving(False, 0.0), RoomRefused(error), 1.0)  # type: ignore[arg-type]
    assert state == Ended(outcome)
    assert isinstance(next(action.result for action in actions if isinstance(action, AnswerReserve)), answer)


def test_a_request_that_stays_goes_back_to_its_place_when_the_engine_has_no_room() -> None:
    assert step(Reserving(True, 0.0), RoomRefused(FULL), 1.0) == (InLine(stays=True), (BareAction.KEEP_PLACE,))


def test_a_finished_request_says_where_its_time_went() -> None:
    state: State = Landed(landed_s=1.0)
    for event, now_s in (
        (BareEvent.BLOCKS_LOST, 2.0),
        (BareEvent.SEAT_TAKEN, 3.0),
        (Drew(False), 4.0),
        (Drew(False), 5.0),
    ):
        state, _ = step(state, event, now_s)
    state, (report,) = step(state, Drew(True), 7.0)
    assert state == Ended(Outcome.FINISHED)
    assert isinstance(report, RecordEnd)
    assert report.times == decoding.RequestTimes(queue_s=3.0, decode_s=3.0, preemptions=1)


def test_a_preempted_request_holds_blocks_again_when_it_draws() -> None:
    state, _ = step(Running(0.0), BareEvent.BLOCKS_LOST, 1.0)
    assert isinstance(state, Running)
    assert not state.holds_blocks
    state, _ = step(state, Drew(False), 2.0)
    assert isinstance(state, Running)
    assert (state.holds_blocks, state.preemptions, state.drawn) == (True, 1, 1)


class DecodeLife(RuleBasedStateMachine):
    """Random order of possible events for one request; tracks line, call, engine and report."""

    @initialize(stays=st.booleans())
    def begin(self, stays: bool) -> None:
        self.state: State = InLine(stays)
        self.now_s = 0.0
        self.in_line = True
        self.answers: list[object] = []
        self.in_engine = False
        self.reports: list[RecordEnd] = []
        self.adopted = False

    @precondition(lambda self: not isinstance(self.state, Ended))
    @rule(data=st.data(), later_s=st.floats(0, 10))
    def happens(self, data: st.DataObject, later_s: float) -> None:
        possible = [event for event in EVENTS if type(self.state) in possible_states(event)]
        event = data.draw(st.sampled_from(possible))
        self.now_s += later_s
        if event is BareEvent.ROOM_REQUESTED:
            self.in_engine = True
        if event is BareEvent.ADOPTED:
            # It has no call and no place.
            self.in_line, self.adopted = False, True
        if isinstance(event, Broken) and isinstance(self.state, Landed | Running):
            # The engine has ended it, or ends with the process.
            self.in_engine = False
        self.state, actions = step(self.state, event, self.now_s)
        if isinstance(event, RoomRefused) or (isinstance(event, Drew) and event.is_last):
            self.in_engine = False
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        assert not self.reports, "the report is the last action"
        match action:
            case AnswerReserve(result):
                self.answers.append(result)
            case BareAction.LEAVE_LINE:
                self.in_line = False
            case BareAction.KEEP_PLACE:
                assert self.in_line
            case BareAction.ABORT_IN_ENGINE:
                self.in_engine = False
            case RecordEnd():
                self.reports.append(action)
            case BareAction.DROP_TOKENS | KeepTokens() | SendError():
                assert not isinstance(self.state, InLine)

    @rule()
    def nothing_happens(self) -> None: ...

    @invariant()
    def the_state_says_what_it_holds(self) -> None:
        assert self.in_line == isinstance(self.state, InLine | Reserving)
        assert self.in_engine == (not isinstance(self.state, InLine | Ended))
        assert bool(self.reports) == isinstance(self.state, Ended)
        if isinstance(self.state, Ended):
            assert [report.outcome for report in self.reports] == [self.state.outcome]

    @invariant()
    def its_call_is_answered_once(self) -> None:
        expected = 0 if self.adopted or isinstance(self.state, InLine | Reserving) else 1
        assert len(self.answers) == expected


TestLife = DecodeLife.TestCase
TestLife.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("state", STATES, ids=repr)
def test_only_what_has_not_landed_is_aborted_when_its_engine_breaks(state: State) -> None:
    # An abort would have the holder drop the copy from which a landed request can go on.
    _, actions = step(state, Broken(Unavailable("broken")), 1.0)
    assert (BareAction.ABORT_IN_ENGINE in actions) == isinstance(state, Reserving | Reserved)


def test_a_stale_call_is_answered_with_the_rivals_error() -> None:
    stale = StaleAttempt("a", 1, 2)
    for state in (InLine(True), Reserving(True, 0.0)):
        _, actions = step(state, RivalCame(Rival.NEWER_OWNER, stale), 1.0)
        assert AnswerReserve(stale) in actions
