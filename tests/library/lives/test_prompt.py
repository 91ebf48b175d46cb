"""State machine of a request at prefill, under any order of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kaveri.domain.length import TokenRange
from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import (
    EngineKey,
    FirstToken,
    KvPushed,
    KvPushFailed,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
)
from kaveri.errors import Unavailable
from kaveri.lives.prompt import (
    Action,
    Adopted,
    Advance,
    AwaitingLength,
    BareAction,
    ComputingPrompt,
    CountPrediction,
    Ended,
    EndHandOver,
    EndRequested,
    Event,
    FindAnotherPlace,
    FindPlace,
    FirstChunkBegun,
    FirstTokenDrawn,
    HandedOver,
    HandOverFailed,
    Known,
    LengthAnswered,
    LengthPending,
    Outcome,
    Placing,
    Predicted,
    PromptComputed,
    Pushing,
    Queued,
    RecordEnd,
    RoomReserved,
    SendReport,
    Started,
    State,
    Terms,
    step,
)
from kaveri.policy.prediction import PredictionOutcome
from kaveri.policy.room_search import PlaceSearch

KEY = EngineKey("a", 1)
TOKENS = 100
PLACED = RoomReserved("decode-0", 1)
LENGTHS = [None, TokenRange(5, 9), TokenRange(200, 300)]


@dataclass
class Model:
    """Expected holdings and progress of a request."""

    in_queue: bool = True
    held: bool = False
    question_open: bool = False
    started: bool = False
    computed_tokens: int = 0
    first_token: bool = False
    hand_over_open: bool = False
    pushing: bool = False
    ended: bool = False
    told: list[type] = field(default_factory=list)

    def allows(self, event: Event) -> bool:
        match event:
            case _ if self.ended:
                return False
            case EndRequested() | HandOverFailed() | RequestFailed():
                return True
            case LengthAnswered():
                return self.question_open
            case PrefillStarted():
                return not self.held and not self.started
            case PrefillProgress() | FirstToken():
                return self.started and not self.first_token
            case RoomReserved():
                return self.hand_over_open and not self.pushing
            case Adopted():
                return self.hand_over_open and not self.pushing and self.first_token
            case KvPushed():
                return self.pushing and self.first_token
            case KvPushFailed():
                return self.pushing


events = st.one_of(
    st.sampled_from(
        [
            PrefillStarted(KEY),
            FirstToken(KEY, 5, None, None),
            FirstToken(KEY, 5, None, FinishReason.STOP),
            PLACED,
            Adopted(PLACED),
            KvPushed(KEY, 10, "tcp"),
            KvPushFailed(KEY, "broken"),
        ]
    ),
    st.integers(1, TOKENS - 1).map(lambda tokens: PrefillProgress(KEY, tokens)),
    st.sampled_from(LENGTHS).map(LengthAnswered),
)
ends = st.sampled_from(
    [
        EndRequested(Outcome.CANCELLED),
        EndRequested(Outcome.REFUSED, Unavailable("replaced")),
        HandOverFailed(Unavailable("no place")),
        RequestFailed(KEY, "broken"),
    ]
)


class LifeMachine(RuleBasedStateMachine):
    """Random events: possible ones keep holdings balanced, impossible ones raise."""

    state: State

    @initialize(search=st.sampled_from(PlaceSearch), first=st.sampled_from(["held", "asked", "known"]))
    def begin(self, search: PlaceSearch, first: str) -> None:
        terms = Terms(0.0, TOKENS, 10, 50, search)
        match first:
            case "held":
                self.state = AwaitingLength(terms)
            case "asked":
                self.state = Queued(terms, LengthPending())
            case "known":
                self.state = Queued(terms, Known(None))
        self.model = Model(held=first == "held", question_open=first != "known")
        self.now_s = 0.0

    @rule(event=events)
    def any_event(self, event: Event) -> None:
        self.happen(event)

    @precondition(lambda self: not self.model.held and not self.model.first_token)
    @rule(data=st.data())
    def the_engine_goes_on(self, data: st.DataObject) -> None:
        """Let random runs get as far as a push."""
        computed = self.model.computed_tokens
        progress = st.integers(min(computed + 1, TOKENS - 1), TOKENS - 1)
        going_on: Event = PrefillProgress(KEY, data.draw(progress))
        self.happen(going_on if self.model.started else PrefillStarted(KEY))

    @rule(event=ends)
    def ends_early(self, event: Event) -> None:
        self.happen(event)

    def happen(self, event: Event) -> None:
        if not self.model.allows(event):
            with pytest.raises(AssertionError) as raised:
                step(self.state, event, self.now_s)
            assert type(event).__name__ in str(raised.value)
            assert type(self.state).__name__ in str(raised.value)
            return
        if isinstance(event, PrefillProgress) and event.computed_tokens <= self.model.computed_tokens:
            return
        self.now_s += 1.0
        self.state, actions = step(self.state, event, self.now_s)
        model = self.model
        match event:
            case LengthAnswered():
                model.question_open = False
            case PrefillStarted():
                model.started = True
            case FirstToken():
                model.first_token = True
            case RoomReserved():
                model.pushing = True
            case KvPushFailed():
                model.pushing = False
        for number, action in enumerate(actions, start=1):
            match action:
                case BareAction.ENQUEUE:
                    assert model.held
                    model.held = False
                case BareAction.LEAVE_QUEUE:
                    assert model.in_queue
                    model.in_queue = False
                case BareAction.DROP_QUESTION:
                    assert model.question_open
                    model.question_open = False
                case BareAction.ABORT_IN_ENGINE:
                    assert isinstance(event, EndRequested | HandOverFailed | RequestFailed)
                case Advance():
                    model.computed_tokens += action.new_tokens
                    assert model.computed_tokens == action.computed_tokens
                    model.in_queue = action.computed_tokens < TOKENS
                case SendReport():
                    model.told.append(type(action.progress))
                case CountPrediction(outcome):
                    assert model.question_open == (outcome is PredictionOutcome.LATE)
                    model.question_open = False
                case FindPlace(length):
                    assert not model.hand_over_open
                    assert length in (None, TokenRange(5, 9), TokenRange(200, 300).up_to(50))
                    assert number == len(actions), "the hand-over may end the request within"
                    model.hand_over_open = True
                case FindAnotherPlace():
                    assert model.hand_over_open
                case EndHandOver(handed_over):
                    assert model.hand_over_open
                    assert handed_over == isinstance(event, KvPushed | Adopted)
                    model.hand_over_open = model.pushing = False
                case RecordEnd():
                    assert number == len(actions)
                    assert isinstance(self.state, Ended)
                    model.ended = True
        assert model.ended == isinstance(self.state, Ended)

    @invariant()
    def nothing_is_kept_after_the_end(self) -> None:
        model = self.model
        assert not model.ended or not (model.in_queue or model.question_open or model.hand_over_open)

    @invariant()
    def a_place_is_looked_for_in_time(self) -> None:
        model = self.model
        if not model.ended and not isinstance(self.state, AwaitingLength):
            match self.state.terms.place_search:
                case PlaceSearch.AT_START:
                    due = model.started and (not model.question_open or model.computed_tokens > 0)
                case PlaceSearch.AFTER_FIRST_CHUNK:
                    due = model.computed_tokens > 0
                case PlaceSearch.AFTER_FIRST_TOKEN:
                    due = model.first_token
            assert model.hand_over_open == due

    @invariant()
    def a_router_hears_each_thing_once_and_in_order_but_for_places(self) -> None:
        told = [kind for kind in self.model.told if kind is not RoomReserved]
        assert told == [Started, FirstTokenDrawn, HandedOver][: len(told)]


LifeMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAnyOrderOfEvents = LifeMachine.TestCase


@given(st.integers(0, 400), st.integers(1, 100), st.integers(0, 600), st.integers(1, 600))
def test_a_prediction_is_used_unless_the_answer_has_outlived_it(
    low: int, width: int, generated: int, most: int
) -> None:
    terms = Terms(0.0, TOKENS, generated, most, PlaceSearch.AT_START)
    state, _ = step(AwaitingLength(terms), LengthAnswered(TokenRange(low, low + width)), 1.0)
    _, actions = step(state, PrefillStarted(KEY), 2.0)
    counted, found = actions[-2:]
    assert isinstance(found, FindPlace)
    used = CountPrediction(PredictionOutcome.OUTLIVED if found.length is None else PredictionOutcome.USED)
    assert counted == used
    assert found.length is None or found.length.high <= most + 1


def test_a_place_is_looked_for_after_the_first_chunk_when_the_length_has_not_come_by_then() -> None:
    at_start = Terms(0.0, TOKENS, 0, 50, PlaceSearch.AT_START)
    state, actions = step(Queued(at_start, LengthPending()), PrefillStarted(KEY), 1.0)
    assert FindPlace(None) not in actions
    _, actions = step(state, PrefillProgress(KEY, 10), 2.0)
    assert FindPlace(None) in actions


TERMS = Terms(0.0, TOKENS, 0, 50, PlaceSearch.AFTER_FIRST_CHUNK)
GIVES_BACK: list[tuple[State, list[Action]]] = [
    (AwaitingLength(TERMS), [BareAction.DROP_QUESTION, BareAction.LEAVE_QUEUE]),
    (Queued(TERMS, LengthPending()), [BareAction.DROP_QUESTION, BareAction.LEAVE_QUEUE]),
    (Queued(TERMS, Known(None)), [BareAction.LEAVE_QUEUE]),
    (ComputingPrompt(TERMS, FirstChunkBegun(1.0), LengthPending()), [BareAction.DROP_QUESTION, BareAction.LEAVE_QUEUE]),
    (ComputingPrompt(TERMS, FirstChunkBegun(1.0), Predicted(TokenRange(1, 2))), [BareAction.LEAVE_QUEUE]),
    (Placing(TERMS, FirstChunkBegun(1.0)), [BareAction.LEAVE_QUEUE, EndHandOver(False)]),
    (Placing(TERMS, PromptComputed(1.0)), [EndHandOver(False)]),
    (Pushing(TERMS, FirstChunkBegun(1.0), 1.0), [BareAction.LEAVE_QUEUE, EndHandOver(False)]),
    (Pushing(TERMS, PromptComputed(1.0), 1.0), [EndHandOver(False)]),
]


def test_a_request_whose_push_has_failed_takes_the_next_place_that_is_found() -> None:
    failed = KvPushFailed(KEY, "broken")
    state, actions = step(Pushing(TERMS, PromptComputed(1.0), 1.0), failed, 2.0)
    assert actions == (FindAnotherPlace(failed),)
    assert isinstance(step(state, PLACED, 3.0)[0], Pushing)


@pytest.mark.parametrize(("state", "gives_back"), GIVES_BACK)
def test_an_early_end_gives_back_what_the_state_holds_and_nothing_else(state: State, gives_back: list[Action]) -> None:
    ended, actions = step(state, EndRequested(Outcome.CANCELLED), 3.0)
    assert ended == Ended(Outcome.CANCELLED)
    assert list(actions) == [*gives_back, BareAction.ABORT_IN_ENGINE, RecordEnd(Outcome.CANCELLED, None, 3.0)]
