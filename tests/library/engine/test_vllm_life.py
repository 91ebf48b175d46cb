"""State machine of a request in the vLLM engine: any order of possible events, and every impossible one.

Does not verify that vLLM causes them in such orders; tests/vllm does.
"""

from dataclasses import fields, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.engine.contract import (
    EngineKey,
    EngineRequest,
    FirstToken,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    TokenStep,
)
from kaveri.engine.vllm import life
from kaveri.engine.vllm.life import (
    Arrived,
    BlocksAllocated,
    Drawn,
    Event,
    Evicted,
    Joined,
    Joining,
    KvArrived,
    Leaving,
    Left,
    Scheduled,
    Signal,
    State,
    Stepped,
    Submitted,
    TransferOpened,
    VllmComputed,
    VllmEnded,
    VllmFailed,
    VllmPrefilling,
    VllmReserved,
    VllmRunning,
    Waiting,
    reserved,
    step,
    submitted,
)
from kaveri.engine.vllm.rank import RankCall
from kaveri.kv.layout.layout import KvLayout

_LAYOUT = KvLayout("test", 1, 4, 1, 4, "float32")
_GENERATED = 3
"""Tokens that an earlier attempt generated: they count as prompt."""
_EVENTS: dict[Any, Event] = {
    event if isinstance(event, Signal) else type(event): event
    for event in (
        TransferOpened(b"x"),
        Signal.TRANSFER_ENDED,
        KvArrived(1),
        Signal.ADOPTED,
        Signal.ADMITTED,
        Joined(),
        Signal.LEAVE_ASKED,
        Signal.LEFT_BATCH,
        Signal.WENT_ON,
        BlocksAllocated(1),
        Scheduled(1),
        Stepped(1),
        Drawn(1, 1, None, None),
        Signal.LEFT_OUT,
        Signal.BLOCKS_TAKEN,
        Signal.BLOCKS_GIVEN_UP,
        VllmFailed("why"),
        Signal.NO_LONGER_NEEDED,
    )
}
_ENDS = {Signal.NO_LONGER_NEEDED, VllmFailed, Signal.BLOCKS_TAKEN}
_ENDS_OUTSIDE = {Signal.NO_LONGER_NEEDED, VllmFailed, Signal.BLOCKS_GIVEN_UP}
_OF_PROMPTS = _ENDS | {TransferOpened, Signal.TRANSFER_ENDED, Scheduled}
_LEGAL: dict[type[Any], set[Any]] = {
    Submitted: _OF_PROMPTS,
    VllmPrefilling: _OF_PROMPTS | {Stepped, Drawn},
    VllmComputed: _OF_PROMPTS | {Signal.ADOPTED, Stepped, Drawn},
    VllmReserved: {TransferOpened, Signal.TRANSFER_ENDED, BlocksAllocated, KvArrived, Signal.NO_LONGER_NEEDED},
    Arrived: _ENDS_OUTSIDE | {Signal.ADMITTED, Signal.LEAVE_ASKED, Scheduled, Stepped, Drawn},
    Waiting: _ENDS_OUTSIDE | {Joined, Scheduled, Stepped, Drawn},
    Joining: _ENDS | {Scheduled, Signal.LEFT_OUT},
    VllmRunning: _ENDS | {Scheduled, Stepped, Drawn, Signal.LEAVE_ASKED},
    Evicted: _ENDS | {Scheduled},
    Leaving: _ENDS | {Scheduled, Stepped, Drawn, Signal.LEFT_BATCH, Signal.WENT_ON},
    Left: {Signal.WENT_ON, Signal.NO_LONGER_NEEDED},
    VllmEnded: {Signal.TRANSFER_ENDED},
}


def _request(prompt_tokens: int) -> EngineRequest:
    return EngineRequest(EngineKey("r", 1), (0,) * prompt_tokens, _GENERATED, ResolvedParams(max_tokens=50, seed=0))


class VllmLife(RuleBasedStateMachine):
    """State machine of one request: each rule applies an event that can happen now and checks its actions."""

    state: State
    told: list[Any]

    @rule(prompt_tokens=st.integers(_GENERATED + 1, 20), is_prefill=st.booleans())
    @precondition(lambda self: not hasattr(self, "state"))
    def begin(self, prompt_tokens: int, is_prefill: bool) -> None:
        make = submitted if is_prefill else reserved
        self.state = make("kaveri-1", _request(prompt_tokens), _LAYOUT)
        self.told = []

    @rule(data=st.data())
    @precondition(lambda self: hasattr(self, "state"))
    def anything(self, data: st.DataObject) -> None:
        is_end = data.draw(st.integers(0, 9)) == 0
        legal = _LEGAL[type(self.state)]
        kinds = [kind for kind in _EVENTS if kind in legal and (is_end or kind not in _ENDS)] or [*legal]
        event = data.draw(st.sampled_from([_EVENTS[kind] for kind in kinds]))
        match event:
            case Drawn() | Scheduled() | Stepped() if _has_drawn_all(self.state):
                return
            case TransferOpened() if self.state.transfer_id is not None:
                return
            case Signal.TRANSFER_ENDED if self.state.transfer_id is None:
                return
            case KvArrived() | Signal.ADOPTED if self.state.transfer_id is not None:
                return
            case Scheduled() | BlocksAllocated():
                event = type(event)(data.draw(st.integers(0, 6)))
            case Joined():
                event = Joined(anew=data.draw(st.booleans()))
            case Stepped():
                event = Stepped(self.state.computed + data.draw(st.integers(1, 5)))
            case Drawn():
                event = Drawn(
                    self.state.computed + data.draw(st.integers(1, 5)),
                    5,
                    None,
                    data.draw(st.sampled_from([None, FinishReason.STOP])),
                )
        before = self.state
        self.state, actions = step(before, event)
        self.check(before, event, list(actions))
        self.told += actions

    def check(self, before: State, event: Event, actions: list[Any]) -> None:
        """Assert the actions of an event. A push ends with its prompt; tokens drawn ahead are reported at admission."""
        is_prompt = isinstance(before, Submitted | VllmPrefilling | VllmComputed)
        abort = [RankCall("abort_push", (before.transfer_id,))] if is_prompt and before.transfer_id is not None else []
        key = before.facts.key
        is_computing = isinstance(before, Submitted | VllmPrefilling)
        expected: list[Any] = []
        match event:
            case Scheduled() if isinstance(before, Submitted):
                expected = [PrefillStarted(key)]
            case Stepped(computed) if is_computing and computed < before.facts.prompt_tokens:
                expected = [PrefillProgress(key, computed)]
            case Joined():
                assert isinstance(before, Waiting)
                expected = list(before.ahead)
            case Drawn(_, token_id, logprobs, finish) if is_computing:
                rest = [RankCall("hand_over", ("kaveri-1", token_id))] if finish is None else abort
                expected = [FirstToken(key, token_id, logprobs, finish), *rest]
            case Drawn(_, token_id, logprobs, finish) if not isinstance(before, VllmComputed | Arrived | Waiting):
                index = sum(isinstance(each, TokenStep) for each in self.told)
                expected = [TokenStep(key, _GENERATED + 1 + index, token_id, logprobs, finish)]
            case Signal.BLOCKS_GIVEN_UP:
                expected = [Preempted(key)]
            case Signal.BLOCKS_TAKEN if not is_prompt:
                expected = [Preempted(key)]
            case VllmFailed() | Signal.BLOCKS_TAKEN:
                expected = [RequestFailed(key, actions[0].reason), *abort]
        assert actions == expected

    @invariant()
    def keeps_no_more_than_it_may_need(self) -> None:
        if not hasattr(self, "state"):
            return
        state, facts = self.state, self.state.facts
        assert 0 <= state.promised <= facts.block_count(facts.prompt_tokens + 1)
        match state:
            case VllmEnded():
                assert (state.computed, state.promised) == (0, 0)
            case Evicted():
                assert (state.computed, state.promised) == (0, 0)
            case VllmRunning() | Joining():
                assert state.transfer_id is None
            case Arrived() | Waiting():
                assert state.transfer_id is None

    @invariant()
    def tells_of_one_end_only(self) -> None:
        ends = [each for each in getattr(self, "told", ()) if _is_end(each)]
        assert len(ends) <= 1
        if ends:
            assert isinstance(self.state, VllmEnded)


def _has_drawn_all(state: State) -> bool:
    ahead = getattr(state, "ahead", ())
    return bool(ahead) and ahead[-1].finish is not None


def _is_end(told: Any) -> bool:
    return isinstance(told, RequestFailed) or (isinstance(told, FirstToken | TokenStep) and told.finish is not None)


TestLife = VllmLife.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def _example(kind: type[Any]) -> State:
    first = submitted("kaveri-1", _request(6), _LAYOUT)
    running: dict[str, Any] = {"former": _example(Leaving)} if kind is Left else {}
    extra: dict[str, Any] = {"first_token_id": 1, "index": 1, "block_count": 1, **running}
    named = {field.name for field in fields(kind)}
    state: State = kind(facts=first.facts, **{name: value for name, value in extra.items() if name in named})
    return state


def _is_leaf(kind: Any, base: type[Any]) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and not kind.__subclasses__()


def _name(kind: Any) -> str:
    return str(kind.name if isinstance(kind, Signal) else kind.__name__)


def test_every_pair_of_state_and_event_is_either_possible_or_refused_by_both_names() -> None:
    assert set(_LEGAL) == {kind for kind in vars(life).values() if _is_leaf(kind, State)}
    events = {kind for kind in vars(life).values() if _is_leaf(kind, Event)}
    assert set(_EVENTS) == events - {Signal} | set(Signal)
    for kind, legal in _LEGAL.items():
        for event_kind, event in _EVENTS.items():
            state = _example(kind)
            if event_kind is Signal.TRANSFER_ENDED and Signal.TRANSFER_ENDED in legal:
                state = replace(state, open_id=b"x")  # type: ignore[type-var, assignment, call-arg]
            if event_kind in legal:
                step(state, event)
                continue
            with pytest.raises(AssertionError, match=f"{_name(event_kind)} cannot happen .* {kind.__name__}"):
                step(state, event)


@pytest.mark.parametrize("event", [KvArrived(1), Signal.ADOPTED, TransferOpened(b"y")])
def test_nothing_becomes_of_a_request_whose_transfer_is_open(event: Event) -> None:
    for kind in (VllmReserved, VllmComputed):
        state = replace(_example(kind), open_id=b"x")  # type: ignore[type-var, call-arg]
        with pytest.raises(AssertionError):
            step(state, event)  # type: ignore[arg-type]


@pytest.mark.parametrize("event", [Drawn(6, 5, None, FinishReason.STOP), VllmFailed("why"), Signal.BLOCKS_TAKEN])
def test_a_prompt_that_ends_by_itself_ends_its_push(event: Event) -> None:
    ended, actions = step(replace(_example(VllmPrefilling), open_id=b"x"), event)  # type: ignore[type-var, call-arg]
    assert RankCall("abort_push", (b"x",)) in actions
    assert ended.transfer_id == b"x"


def test_a_preempted_answer_goes_on_with_its_next_token() -> None:
    state: State = _example(VllmRunning)
    state, (first,) = step(state, Drawn(7, 5, None, None))
    state, _ = step(state, Signal.BLOCKS_TAKEN)
    assert isinstance(state, Evicted)
    assert (state.computed, state.promised) == (0, 0), "its KV is gone"
    state, _ = step(state, Scheduled(0))
    _, (second,) = step(state, Drawn(8, 6, None, None))
    assert isinstance(first, TokenStep)
    assert isinstance(second, TokenStep)
    assert (first.index, second.index) == (1, 2)
