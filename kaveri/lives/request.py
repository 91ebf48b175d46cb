"""State machine of a request on the router. Pure: no clock, no waiting, no I/O, no protobuf.

    Unplaced -> Prefilling -> Placed -> Decoding -> Finishing -> Ended
       ^            |           |          | ^
       +--- Lost <--+-----------+----------+ |      from every state but Ended: Ended, by a cancel or an error
             |                               |
             +-----> Resuming ---------------+      where there is a replica

An attempt is one placement of the request, on a prefill instance or on the holder of its replica. The service carries
out the actions of step() in order. It alone knows the text, and reports EndRequested at a stop text.

Tokens of a decode instance that no placement has named are held until one names it. Tokens of an instance that the
attempt has left are dropped. Tokens of two instances are never mixed: after the first token of one, a placement on
another loses the attempt.

When the decode instance of a request with a replica is lost, the holder may resume the request. The former instance
gets its Abort only after the holder has answered; an earlier one would make the holder drop the replica.
"""

from dataclasses import replace

from kaveri.domain.sampling import FinishReason
from kaveri.errors import EngineBroke, KaveriError, NoCapacity, Unavailable
from kaveri.lives.request_values import (
    Abort,
    Action,
    Append,
    Attempt,
    AwaitReport,
    CompleteAnswer,
    DecodeNamed,
    Decoding,
    Disown,
    Ended,
    EndRequested,
    Event,
    Finishing,
    FirstTokenReported,
    Follow,
    GivenUp,
    HandOverReported,
    HeldEvents,
    LeaveAttempt,
    Lost,
    NotFound,
    Placed,
    PrefillEnded,
    Prefilling,
    PrefillLeg,
    ReplicaForgone,
    ReplicaNamed,
    ResumeAnswered,
    ResumeRequested,
    Resuming,
    SeekingOwner,
    Sent,
    Sought,
    State,
    Superseded,
    TokensReceived,
    TookOver,
    Unfollow,
    Unplaced,
)
from kaveri.policy.retry import Setback

Step = tuple[State, tuple[Action, ...]]
HAND_OVER_GRACE_S = 0.25
"""Seconds that a complete answer waits for prefill's report of the KV hand-over, for the timing."""


def step(state: State, event: Event, now_s: float) -> Step:
    """Return the next state and the actions to carry out. Events from instances are possible in every state. Raises
    AssertionError for an event of the router itself that is impossible in `state`."""
    match event:
        case TokensReceived():
            return _tokens(state, event, now_s)
        case GivenUp():
            return _given_up(state, event)
        case TookOver():
            return _took_over(state, event, now_s)
        case DecodeNamed():
            return _place_named(state, event, now_s)
        case FirstTokenReported():
            return _first_token(state, event, now_s)
        case PrefillEnded():
            return _prefill_ended(state, event)
        case ReplicaNamed():
            return _replica_named(state, event)
        case ResumeAnswered():
            return _resume_answered(state, event)
        case Superseded():
            return _superseded(state, event)
        case EndRequested():
            return _end_requested(state, event.outcome)
        case _:
            return _moved(state, event)


def _moved(state: State, event: Sent | Sought | NotFound | ResumeRequested | ReplicaForgone | HandOverReported) -> Step:
    match state, event:
        case Unplaced(next_index) | Lost(_, next_index), Sent(attempt, decode):
            assert attempt.first_index == next_index, (state, event)
            withheld = state.withheld if isinstance(state, Lost) else ()
            if decode is None:
                return Prefilling(attempt, next_index), withheld
            follow = Follow(attempt.number, decode, is_there=False)
            return Placed(attempt, next_index, decode), (*withheld, follow)
        case Unplaced(next_index) | Lost(_, next_index), Sought(attempt):
            return SeekingOwner(attempt, next_index), _withheld_by(state)
        case SeekingOwner(attempt, next_index), NotFound():
            if next_index >= attempt.most_tokens:
                # The client has all tokens but no end; an answer that a stop token ends comes with its end.
                return Ended(FinishReason.LENGTH, None), (CompleteAnswer(),)
            return Unplaced(next_index, attempt.suspect_until), ()
        case Unplaced(next_index) | Lost(_, next_index), ResumeRequested(attempt, holder):
            assert attempt.first_index == next_index, (state, event)
            now = Resuming(attempt, next_index, holder, _withheld_by(state))
            return now, (Follow(attempt.number, holder, is_there=False),)
        case Lost() as lost, ReplicaForgone():
            # Release the former instance's Abort; the request is computed again.
            return replace(lost, replica=None, withheld=()), lost.withheld
        case Placed() as placed, HandOverReported():
            return replace(placed, leg=PrefillLeg.HANDED_OVER), ()
        case Decoding() as decoding, HandOverReported():
            return decoding._replace(leg=PrefillLeg.HANDED_OVER), ()
        case Prefilling(attempt) as prefilling, HandOverReported():
            where = attempt.prefill.instance_id
            return _lost(prefilling, Unavailable(f"prefill instance {where} has named no decode instance"))
        case Finishing(), HandOverReported():
            return state, ()
        case _:
            raise _impossible(state, event)


def _tokens(state: State, event: TokensReceived, now_s: float) -> Step:
    # An announcement: the request has landed there and waits for its turn.
    is_announcement = not event.token_ids and event.finish is None
    match state:
        case Placed(attempt) | Decoding(attempt) if is_announcement:
            return _of_another_attempt(state, attempt, event)
        case Decoding(attempt, next_index, decode, _):
            if event.attempt != attempt.number:
                return _of_another_attempt(state, attempt, event)
            if event.source != decode:
                return state, ()
            if event.first_index > next_index:
                return _lost_by_gap(state, event)
            return _taken(state, event, now_s)
        case Placed(attempt, next_index, decode):
            if event.attempt != attempt.number:
                return _of_another_attempt(state, attempt, event)
            if event.source in state.left:
                return state, ()
            if event.source != decode:
                return _held(state, event)
            if event.first_index <= next_index:
                return _taken(state, event, now_s)
            if next_index == attempt.first_index:
                # The first token comes from prefill.
                return _held(state, event)
            return _lost_by_gap(state, event)
        case SeekingOwner(attempt) | Prefilling(attempt):
            if event.attempt == attempt.number:
                return _held(state, event)
            return _of_another_attempt(state, attempt, event)
        case Resuming(attempt, next_index, decode):
            if event.attempt != attempt.number or event.source != decode or is_announcement:
                # The former instance gets its Abort when the holder has answered.
                return state, ()
            if event.first_index > next_index:
                return _lost_by_gap(state, event)
            now, actions = _taken(Decoding(attempt, next_index, decode, PrefillLeg.COMPLETE), event, now_s)
            return now, (*state.withheld, *actions)
        case Lost(attempt):
            return _of_another_attempt(state, attempt, event)
        case Unplaced() | Finishing() | Ended():
            return state, ()


def _of_another_attempt(state: State, attempt: Attempt, event: TokensReceived) -> Step:
    """Drop tokens of another attempt. An instance that still sends an older attempt's has missed its Abort."""
    if event.attempt < attempt.number and event.finish is None:
        return state, (Disown(event.attempt, event.source),)
    return state, ()


def _taken(state: Placed | Decoding, event: TokensReceived, now_s: float) -> Step:
    seen = state.next_index - event.first_index
    added = len(event.token_ids) - seen
    append: tuple[Action, ...] = ()
    if added > 0:
        if seen:
            append = (Append(event.token_ids[seen:], event.logprobs[seen:], event.finish),)
        else:
            append = (Append(event.token_ids, event.logprobs, event.finish),)
    if event.finish is None:
        return Decoding(state.attempt, state.next_index + max(0, added), state.decode, state.leg, state.replica), append
    complete = CompleteAnswer(event.decode_queue_s, event.decode_s)
    if state.leg in (PrefillLeg.WORKING, PrefillLeg.HANDED_OVER):
        wait = AwaitReport(now_s + HAND_OVER_GRACE_S)
        return Finishing(state.attempt, event.finish), (*append, complete, Unfollow(), wait)
    return Ended(event.finish, state.attempt), (*append, complete, LeaveAttempt())


def _held(state: SeekingOwner | Prefilling | Placed, event: TokensReceived | GivenUp) -> Step:
    own_count = len(event.token_ids) if isinstance(event, TokensReceived) else 1
    token_count = state.held.token_count + own_count
    if isinstance(state, SeekingOwner):
        # Each of the instances asked may send a whole answer.
        same = _held_of(tuple(held for held in state.held.events if held.source == event.source))
        if same.token_count + own_count > state.attempt.most_tokens:
            # Becomes a gap once the instance is known.
            return state, ()
    elif token_count > state.attempt.most_tokens:
        return _lost(state, Unavailable(f"decode instance {event.source.instance_id} sent tokens, and no placement"))
    return replace(state, held=HeldEvents((*state.held.events, event), token_count)), ()


def _given_up(state: State, event: GivenUp) -> Step:
    match state:
        case Resuming(attempt, _, decode) | Decoding(attempt, _, decode):
            if event.attempt == attempt.number and event.source == decode:
                return _lost(state, event.error, decode_has_ended=event.has_ended)
            return state, ()
        case Placed(attempt, _, decode):
            if event.attempt != attempt.number or event.source in state.left:
                return state, ()
            if event.source == decode:
                return _lost(state, event.error, decode_has_ended=event.has_ended)
            return _held(state, event)
        case SeekingOwner(attempt) | Prefilling(attempt):
            return _held(state, event) if event.attempt == attempt.number else (state, ())
        case Unplaced() | Lost() | Finishing() | Ended():
            return state, ()


def _took_over(state: State, event: TookOver, now_s: float) -> Step:
    match state:
        case SeekingOwner(_, next_index, held):
            attempt = event.attempt
            append: tuple[Action, ...] = ()
            if event.missing:
                append = (Append(event.missing, (), None),)
                next_index += len(event.missing)
            if event.decode is None:
                return Prefilling(attempt, next_index, held), append
            placed = Placed(attempt, next_index, event.decode, PrefillLeg.COMPLETE, held=held)
            now, actions = _replayed(placed, append, now_s)
            if isinstance(now, Placed | Decoding):
                actions = (*actions, Follow(attempt.number, event.decode))
            return now, actions
        case _:
            raise _impossible(state, event)


def _superseded(state: State, event: Superseded) -> Step:
    """End without an abort: the instances continue for the later session."""
    match state:
        case Ended():
            return state, ()
        case Unplaced():
            return Ended(event.error, None), ()
        case Lost(attempt):
            return Ended(event.error, attempt), ()
        case _:
            return Ended(event.error, state.attempt), (LeaveAttempt(),)


def _place_named(state: State, event: DecodeNamed, now_s: float) -> Step:
    match state:
        case Prefilling(attempt, next_index, held):
            placed = Placed(attempt, next_index, event.decode, held=held)
        case Placed(attempt, next_index, decode, leg, left, held, replica):
            if event.decode != decode:
                events = tuple(former for former in held.events if former.source != decode)
                held, replica = _held_of(events), None
                left = (*(former for former in left if former != event.decode), decode)
            placed = Placed(attempt, next_index, event.decode, leg, left, held, replica)
        case Decoding(attempt, _, decode, _):
            if event.decode != decode:
                where = event.decode.instance_id
                return _lost(state, Unavailable(f"it was placed on {where} after decode had begun elsewhere"))
            return state, (Follow(attempt.number, event.decode),)
        case Finishing(attempt, finish):
            # The answer is already complete.
            return Ended(finish, attempt), (LeaveAttempt(), Abort(attempt.number, event.decode))
        case _:
            raise _impossible(state, event)
    now, actions = _replayed(placed, (), now_s)
    if isinstance(now, Placed | Decoding):
        # Last, as the service may find at once that the decode instance is lost.
        actions = (*actions, Follow(attempt.number, event.decode))
    return now, actions


def _first_token(state: State, event: FirstTokenReported, now_s: float) -> Step:
    match state:
        case Prefilling(attempt, next_index) | Placed(attempt, next_index):
            if next_index != attempt.first_index:
                return state, ()
            append = Append(event.token_ids, event.logprobs, event.finish)
            if event.finish is not None:
                return Ended(event.finish, attempt), (append, CompleteAnswer(), *_leaving(state))
            taken = replace(state, next_index=next_index + 1)
            return _replayed(taken, (append,), now_s) if isinstance(taken, Placed) else (taken, (append,))
        case Decoding() | Finishing():
            return state, ()
        case _:
            raise _impossible(state, event)


def _replayed(state: Placed, actions: tuple[Action, ...], now_s: float) -> Step:
    own = [event for event in state.held.events if event.source == state.decode]
    if not own:
        return state, actions
    others = tuple(event for event in state.held.events if event.source != state.decode)
    now: State = replace(state, held=_held_of(others))
    for event in own:
        now, more = step(now, event, now_s)
        actions += more
    return now, actions


def _prefill_ended(state: State, event: PrefillEnded) -> Step:
    match state:
        case Decoding(_, _, _, leg):
            if event.error is None and leg is not PrefillLeg.HANDED_OVER:
                return _lost(state, _without_hand_over(state.attempt))
            # No loss: decode has the KV, and the answer has prefill's token.
            ended = PrefillLeg.COMPLETE if leg is PrefillLeg.HANDED_OVER else PrefillLeg.BROKEN
            return state._replace(leg=ended), ()
        case Placed(attempt, next_index, _, leg):
            if event.error is None and leg is PrefillLeg.HANDED_OVER:
                if next_index == attempt.first_index:
                    where = attempt.prefill.instance_id
                    return _lost(state, Unavailable(f"prefill instance {where} ended without its first token"))
                return replace(state, leg=PrefillLeg.COMPLETE), ()
            return _lost(state, event.error or _without_hand_over(attempt), was_reached=event.was_reached)
        case Prefilling(attempt):
            return _lost(state, event.error or _without_hand_over(attempt), was_reached=event.was_reached)
        case Finishing(attempt, finish):
            return Ended(finish, attempt), (LeaveAttempt(),)
        case _:
            raise _impossible(state, event)


def _without_hand_over(attempt: Attempt) -> KaveriError:
    return Unavailable(f"prefill instance {attempt.prefill.instance_id} ended without hand-over")


def _end_requested(state: State, outcome: FinishReason | KaveriError) -> Step:
    complete = (CompleteAnswer(),) if isinstance(outcome, FinishReason) else ()
    match state:
        case Ended():
            return state, ()
        case Finishing(attempt, finish):
            return Ended(finish, attempt), (LeaveAttempt(),)
        case Unplaced():
            return Ended(outcome, None), complete
        case Lost(attempt):
            return Ended(outcome, attempt), (*complete, *state.withheld)
        case SeekingOwner(attempt):
            # An instance may have given the request to this router already.
            return Ended(outcome, attempt), (*complete, LeaveAttempt(), Abort(attempt.number, None))
        case Prefilling(attempt) | Placed(attempt) | Resuming(attempt) | Decoding(attempt):
            return Ended(outcome, attempt), (*complete, *_leaving(state))


def _lost_by_gap(state: Placed | Resuming | Decoding, event: TokensReceived) -> Step:
    missing = f"tokens {state.next_index} to {event.first_index - 1} are missing"
    error = Unavailable(f"decode instance {state.decode.instance_id}: {missing}")
    return _lost(state, error, decode_has_ended=event.finish is not None)


def _lost(
    state: Prefilling | Placed | Resuming | Decoding,
    error: KaveriError,
    *,
    was_reached: bool = True,
    decode_has_ended: bool = False,
) -> Step:
    """Fail the attempt; an answer that has all its tokens is complete all the same. was_reached: True if the instance
    may know the attempt. decode_has_ended: True if the decode instance has ended it itself."""
    decode = None if isinstance(state, Prefilling) else state.decode
    replica = state.replica if isinstance(state, Placed | Decoding) else None
    match state:
        case Prefilling():
            leg = PrefillLeg.WORKING
        case Resuming():
            leg = PrefillLeg.COMPLETE
        case _:
            leg = state.leg
    attempt = _with_suspicion(state.attempt, error)
    now = Lost(attempt, state.next_index, error, _setback(error, was_reached), decode, leg, replica)
    actions: tuple[Action, ...] = _leaving(state)
    if decode_has_ended:
        actions = (LeaveAttempt(), *_withheld_by(state))
    elif decode is None and isinstance(error, Unavailable) and was_reached:
        # Only the prefill instance knows which decode instance has reserved room.
        actions = (LeaveAttempt(), Abort(state.attempt.number, None))
    if state.next_index >= attempt.most_tokens:
        return Ended(FinishReason.LENGTH, attempt), (CompleteAnswer(), *actions)
    if replica is not None and not decode_has_ended:
        return replace(now, withheld=(Abort(state.attempt.number, decode),)), (LeaveAttempt(),)
    return now, actions


def _with_suspicion(attempt: Attempt, error: KaveriError) -> Attempt:
    if isinstance(error, EngineBroke) and error.suspect_until > attempt.suspect_until:
        return replace(attempt, suspect_until=error.suspect_until)
    return attempt


def _setback(error: KaveriError, was_reached: bool) -> Setback:
    if isinstance(error, NoCapacity):
        return Setback.FULL
    if isinstance(error, EngineBroke):
        return Setback.BROKEN
    return Setback.LOST if was_reached else Setback.UNREACHED


def _leaving(state: Prefilling | Placed | Resuming | Decoding) -> tuple[Action, ...]:
    """Actions that end an attempt at its instances. There is no Abort for a decode instance that prefill has not named:
    prefill aborts its reservation or, after the hand-over, it has sent events and gets a Disown."""
    if isinstance(state, Prefilling):
        sources = dict.fromkeys(event.source for event in state.held.events)
        return LeaveAttempt(), *(Disown(state.attempt.number, source) for source in sources)
    return LeaveAttempt(), *_withheld_by(state), Abort(state.attempt.number, state.decode)


def _withheld_by(state: State) -> tuple[Abort, ...]:
    return state.withheld if isinstance(state, Lost | Resuming) else ()


def _held_of(events: tuple[TokensReceived | GivenUp | ReplicaNamed, ...]) -> HeldEvents:
    """Wrap events with their token count: an error counts as one token, a replica's name as none."""
    tokens = sum(len(event.token_ids) for event in events if isinstance(event, TokensReceived))
    return HeldEvents(events, tokens + sum(isinstance(event, GivenUp) for event in events))


def _impossible(state: State, event: Event) -> AssertionError:
    return AssertionError(f"{type(event).__name__} is impossible in {type(state).__name__}: {event}, {state}")


def _replica_named(state: State, event: ReplicaNamed) -> Step:
    match state:
        case Placed(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return replace(state, replica=event.replica), ()
        case Decoding(attempt, _, decode) if event.attempt == attempt.number and event.source == decode:
            return state._replace(replica=event.replica), ()
        case SeekingOwner(attempt) | Prefilling(attempt) | Placed(attempt) if event.attempt == attempt.number:
            if isinstance(state, Placed) and event.source in state.left:
                return state, ()
            # Only the last event of each instance counts.
            events = tuple(
                former
                for former in state.held.events
                if not (isinstance(former, ReplicaNamed) and former.source == event.source)
            )
            if sum(isinstance(former, ReplicaNamed) for former in events) >= attempt.most_tokens:
                return state, ()
            return replace(state, held=_held_of((*events, event))), ()
        case _:
            return state, ()


def _resume_answered(state: State, event: ResumeAnswered) -> Step:
    """Apply the answer of a replica's holder to the resume call. Without effect if its tokens came first."""
    match state:
        case Resuming(attempt, next_index, decode):
            if event.error is None:
                now = Decoding(attempt, next_index, decode, PrefillLeg.COMPLETE)
                return now, (*state.withheld, Follow(attempt.number, decode))
            refused = Lost(attempt, next_index, event.error, Setback.REFUSED, decode, PrefillLeg.COMPLETE)
            return refused, _leaving(state) if event.may_have_begun else (LeaveAttempt(), *state.withheld)
        case Decoding(attempt, _, decode):
            return state, (Follow(attempt.number, decode),)
        case _:
            return state, ()
