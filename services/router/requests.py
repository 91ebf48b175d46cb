"""The requests in flight on this router.

A request's state changes by lifecycle.step alone. An entry carries out the actions that step returns: it appends to the
answer, keeps the timers, wakes the client's RPC, and passes on to the placer what concerns instances.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import (
    DeadlineExceeded,
    KaveriError,
    RequestAlreadyExists,
    Unavailable,
)
from kaveri.text.answer import Answer
from services.router.accepted_request import AcceptedRequest, OwnerHint
from services.router.direct_reading import DirectReading
from services.router.lifecycle import step
from services.router.lifecycle_values import (
    Action,
    Append,
    AwaitReport,
    Cancelled,
    CannotAnswer,
    CompleteAnswer,
    Decoding,
    Ended,
    Event,
    Finishing,
    FirstTokenReported,
    GivenUp,
    GraceOver,
    InstanceLife,
    LeaveAttempt,
    Lost,
    NotFound,
    Placed,
    PrefillEnded,
    Prefilling,
    ReplicaNamed,
    ResumeAsked,
    Sent,
    Sought,
    State,
    Superseded,
    TextStopped,
    Tokens,
    Unplaced,
)
from services.router.owner_change import OwnerChange
from services.router.request_timing import RequestTiming
from services.router.request_trace import RequestTrace

_COMPLETE = (Finishing, Ended)
_MOST_STEPS = 64
_MOST_CAUSE_CHARACTERS = 300


class SentAway(Unavailable):
    """The router drains, and the client is to re-attach through another one. The instances go on meanwhile."""

    def __init__(self) -> None:
        super().__init__("this router is draining: the request goes on through another router", retry_after_s=0.0)


class Interrupted(SentAway):
    """A decode instance was lost while the client read there. The client re-attaches with the tokens that it has."""

    def __init__(self, cause: str) -> None:
        """cause: why it was lost."""
        Unavailable.__init__(self, "the decode instance was lost while its tokens were read there", retry_after_s=0.0)
        self.cause = cause


class RequestEntry:
    """One request in flight. Lives on one event loop; every method is called there."""

    def __init__(
        self,
        accepted: AcceptedRequest,
        answer: Answer,
        act: "Callable[[RequestEntry, Action], None]",
        hint_changed: "Callable[[OwnerHint], object]" = lambda hint: None,
    ) -> None:
        """act: carries out the actions that concern instances. hint_changed: told who has a request that its client may
        re-attach."""
        self.accepted = accepted
        self.answer = answer
        self.timing = RequestTiming()
        self.state: State = Unplaced(len(answer.token_ids), accepted.received.suspect_until)
        self.begun_s = 0.0
        """time.monotonic() when the present attempt began here."""
        self.owner_news: OwnerHint | None = None
        """The owner, unless the client knows it."""
        self.owner_change: OwnerChange | None = None
        """Since an instance was lost, until the next token."""
        self.steps: deque[tuple[float, str]] = deque(maxlen=_MOST_STEPS)
        """What has happened to it, and when, as time.monotonic()."""
        # The router keeps what a client reads at decode, and reports are large.
        is_offered = accepted.direct and accepted.params.logprobs is None
        self.direct = DirectReading() if is_offered else None
        self.trace: RequestTrace | None = None
        """None: it is not traced."""
        self.has_begun = False
        """True once an instance has begun to compute the prompt."""
        self.delay_noted = False
        """Whether the log says already that the request could not be placed at once."""
        self._hint = OwnerHint()
        self._act = act
        self._hint_changed = hint_changed
        self._attempt_over: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        remaining_s = max(0.0, accepted.deadline_s - time.monotonic())
        self._deadline = asyncio.get_running_loop().call_later(remaining_s, self.fail, DeadlineExceeded())
        self._grace: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.accepted.request_id

    @property
    def attempt_number(self) -> int:
        """The number of the present attempt, or of the last one; 0 when there was none."""
        attempt = None if isinstance(self.state, Unplaced) else self.state.attempt
        return 0 if attempt is None else attempt.number

    @property
    def suspect_until(self) -> int:
        """As of the present attempt, or of the next one."""
        if isinstance(self.state, Unplaced):
            return self.state.suspect_until
        return 0 if self.state.attempt is None else self.state.attempt.suspect_until

    @property
    def ended(self) -> bool:
        """Whether nothing is taken in any more."""
        return isinstance(self.state, Ended)

    @property
    def is_superseded(self) -> bool:
        """Whether the request is left to a later session, at this router or at another one."""
        return isinstance(self.error, RequestAlreadyExists | SentAway)

    @property
    def is_sent_away(self) -> bool:
        """Whether its client is to re-attach through another router."""
        return isinstance(self.error, SentAway)

    @property
    def finish(self) -> FinishReason | None:
        """How the answer is complete; None: it is not."""
        match self.state:
            case Finishing(_, finish) | Ended(FinishReason() as finish):
                stopped = self.answer.stopped and finish is not FinishReason.CANCELLED
                return FinishReason.STOP if stopped else finish
            case _:
                return None

    @property
    def error(self) -> KaveriError | None:
        """Why the request has failed."""
        match self.state:
            case Ended(KaveriError() as error):
                return error
            case _:
                return None

    def adopt(self, resolved: SamplingParams) -> None:
        """Takes the parameters that the request's first router has resolved."""
        self.accepted = replace(self.accepted, params=replace(self.accepted.params, **resolved.chosen))

    def ownership(self, attempt: int, router_id: str) -> Ownership:
        """Under which an attempt has the request."""
        return Ownership(Owner(self.accepted.session, attempt), router_id, self.accepted.secret)

    def attachment(
        self, attempt: int, router_id: str, *, landed: bool = False, at_prefill: bool = False, placed_by: str = ""
    ) -> Attachment:
        """What an instance must see to give the request to this router, from the answer's next token on."""
        token_ids = (*self.accepted.prompt_token_ids, *self.answer.token_ids)
        ownership = self.ownership(attempt, router_id)
        count = len(self.answer.token_ids)
        return Attachment(self.request_id, ownership, token_ids, count, landed, at_prefill, placed_by)

    @property
    def traceparent(self) -> str:
        """Of the present attempt, for the instances; empty: it is not traced."""
        return "" if self.trace is None else self.trace.traceparent

    def begin(self, event: Sent | Sought | ResumeAsked) -> asyncio.Future[None]:
        """Starts an attempt. Returns a future that is done when the request has ended, or the attempt is lost."""
        over = self._attempt_over = asyncio.get_running_loop().create_future()
        self.begun_s = time.monotonic()
        self.timing.attempts += 1
        self.steps.append((self.begun_s, f"attempt {event.attempt.number} {_aim(event)}"))
        if self.trace is not None:
            self.trace.begin_attempt(event.attempt.number, self.begun_s)
        if isinstance(event, Sent):
            self.note_owner(event.attempt.prefill, event.decode)
        self.handle(event, self.begun_s)
        return over

    def note_owner(self, prefill: InstanceLife | None, decode: InstanceLife | None) -> None:
        """Remembers the instances of the attempt, for its timing, for the client, and for a later session. prefill:
        None when the attempt needs none; the timing then keeps the last one."""
        self._note_hint(OwnerHint(prefill, decode))
        if prefill is not None:
            self.timing.prefill_instance_id = prefill.instance_id
        self.timing.decode_instance_id = decode.instance_id if decode is not None else ""

    def note_replica(self, event: ReplicaNamed, now_s: float) -> None:
        """Takes in where the request's replica is."""
        self.handle(event, now_s)
        self.note_holder()

    def note_holder(self) -> None:
        """Remembers the holder of the replica for a later session, which hears only of another one, not of growth."""
        if not isinstance(self.state, Placed | Decoding):
            return
        replica = self.state.replica
        holder = None if replica is None else InstanceLife(replica.holder_id, replica.holder_incarnation)
        if holder != self._hint.holder:
            self._note_hint(replace(self._hint, holder=holder))

    def note_loss(self, cause: str, former: InstanceLife) -> None:
        """An instance was lost. The owner changes from now on, unless it is doing so already."""
        shown = cause[:_MOST_CAUSE_CHARACTERS]
        self.steps.append((time.monotonic(), f"lost {former.instance_id or 'its instance'}: {shown}"))
        if self.owner_change is None:
            since_s = self.answer.last_token_s or time.monotonic()
            self.owner_change = OwnerChange(cause, former.instance_id, since_s)

    def note_not_found(self) -> None:
        """The attempt has sought it where its last session left it, in vain."""
        now_s = time.monotonic()
        self.steps.append((now_s, "not found there"))
        if self.trace is not None:
            self.trace.end_attempt(now_s, "not found")
        self.handle(NotFound(), now_s)

    def note_resumed(self, holder: InstanceLife, first_index: int, held_tokens: int) -> None:
        """The holder of the replica goes on from token `first_index`, and has the KV of so many tokens."""
        self.note_owner(None, holder)
        self.timing.resumes += 1
        self.timing.held_tokens += held_tokens
        self._note_gone_on("resumed", holder, first_index, held_tokens)

    def note_recomputed(self, prefill: InstanceLife) -> None:
        """The request goes to a prefill instance: what it has so far is computed again if an instance was lost."""
        if self.owner_change is not None:
            self._note_gone_on("recomputed", prefill, len(self.answer.token_ids), 0)

    def _note_gone_on(self, outcome: str, life: InstanceLife, first_index: int, held_tokens: int) -> None:
        recomputed_tokens = max(0, len(self.accepted.prompt_token_ids) + first_index - held_tokens)
        self.timing.recomputed_tokens += recomputed_tokens
        if (change := self.owner_change) is not None:
            change.outcome, change.instance_id = outcome, life.instance_id
            change.held_tokens += held_tokens
            change.recomputed_tokens += recomputed_tokens
            self._end_owner_change()

    def _note_hint(self, hint: OwnerHint) -> None:
        hint = replace(hint, suspect_until=self.suspect_until)
        if hint == self._hint:
            return
        self._hint = self.owner_news = hint
        if self.accepted.secret:
            self._hint_changed(hint)
        self.wake()

    def handle(self, event: Event, now_s: float) -> None:
        """Takes in what has happened. now_s: time.monotonic()."""
        event = self._without_unreported_prompt(event)
        self.state, actions = step(self.state, event, now_s)
        for action in actions:
            if type(action) is Append:
                self.answer.append(action.token_ids, action.logprobs, action.finish, now_s)
                if self.owner_change is not None:
                    self.owner_change.until_s = self.owner_change.until_s or now_s
                    self._end_owner_change()
            else:
                self._carry_out(action, now_s)
        if self.answer.stopped and not isinstance(self.state, _COMPLETE):
            self.handle(TextStopped(), now_s)
        if isinstance(self.state, Lost) and self.suspect_until != self._hint.suspect_until:
            # Before a later session is placed: it would end more instances.
            self._note_hint(self._hint)
        if isinstance(self.state, Lost) and self._client_may_be_ahead(event):
            cause = str(self.state.error)
            self.note_loss(cause, self.state.decode or self.state.attempt.prefill)
            self.handle(Superseded(Interrupted(cause)), now_s)
        if isinstance(self.state, Finishing):
            # A client that had a stop token, and not the end, would have more drawn behind it when this router and the
            # decode instance die.
            self.answer.withholds_last = self.state.finish is FinishReason.STOP
        if isinstance(self.state, Ended):
            self.answer.withholds_last = False
            self._end_owner_change()
            self._deadline.cancel()
            if self._grace is not None:
                self._grace.cancel()
        self.wake()

    def take_prompt_logprobs(self, first: int, entries: Sequence[Any]) -> None:
        """What prefill says of the prompt's tokens from position `first` on. A later attempt repeats it."""
        self.answer.append_prompt(first, entries)
        self.wake()

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the request can only go on where its prompt is computed."""
        return self.answer.lacks_prompt

    def _without_unreported_prompt(self, event: Event) -> Event:
        """No token may come before the report: such an attempt is lost. A decode instance that draws the first token
        has not computed the prompt, and instances from elsewhere may not know prompt_logprobs."""
        if self.answer.lacks_prompt:
            match event:
                case Tokens(first_index=0) if event.token_ids:
                    return GivenUp(event.attempt, event.source, _no_report(event.source))
                case FirstTokenReported() if isinstance(self.state, Prefilling | Placed):
                    return PrefillEnded(_no_report(self.state.attempt.prefill))
        return event

    def _client_may_be_ahead(self, event: Event) -> bool:
        """Whether the client may have tokens of the lost attempt that are not known here. A decode instance that moves
        a request, or has given it to another owner, says so behind all its tokens."""
        is_last_word = isinstance(event, GivenUp) and not isinstance(event.error, Unavailable)
        return self.direct is not None and not is_last_word and self.direct.may_be_ahead(self.attempt_number)

    def note_read_here(self, attempt: int, is_read: bool) -> None:
        """The decode instance of an attempt says whether the client reads the answer there."""
        if self.direct is not None:
            self.direct.note_read(attempt, is_read)
            self.wake()

    def _end_owner_change(self) -> None:
        """Once there are tokens again, and it is known how the request went on."""
        change = self.owner_change
        if change is None or not change.until_s or not (change.outcome or self.ended):
            return
        if not change.outcome:
            # The answer of the holder comes too late.
            change.outcome = "resumed"
            self.timing.resumes += 1
        self.owner_change = None
        self.timing.stall_s += change.report(self.request_id, self.accepted.session, self.attempt_number)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case CompleteAnswer():
                self.answer.flush()
                self.timing.decode_queue_s, self.timing.decode_s = action.decode_queue_s, action.decode_s
            case AwaitReport():
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(max(0.0, action.until_s - now_s), self._end_grace)
            case LeaveAttempt():
                if self.trace is not None:
                    self._end_traced_attempt(now_s)
                if self._attempt_over is not None and not self._attempt_over.done():
                    self._attempt_over.set_result(None)
                self._act(self, action)
            case _:
                self._act(self, action)

    def _end_traced_attempt(self, now_s: float) -> None:
        assert self.trace is not None
        error = self.state.error if isinstance(self.state, Lost) else self.error
        timing = self.timing
        self.trace.end_attempt(
            now_s,
            error,
            prefill_instance_id=timing.prefill_instance_id or None,
            decode_instance_id=timing.decode_instance_id or None,
        )

    def _end_grace(self) -> None:
        self.handle(GraceOver(), time.monotonic())

    def cancel(self) -> None:
        """Ends the request with FINISH_REASON_CANCELLED; what it has produced is still delivered."""
        self.handle(Cancelled(), time.monotonic())

    def fail(self, error: KaveriError) -> None:
        """Ends the request with an error. Ignored when it has ended."""
        self.handle(CannotAnswer(error), time.monotonic())

    def supersede(self) -> None:
        """Ends this session of the request, and leaves its instances to a later one."""
        self.handle(Superseded(RequestAlreadyExists(self.request_id)), time.monotonic())

    def send_away(self) -> None:
        """As supersede(): the later session will be at another router. Ignored when the client cannot re-attach."""
        if self.accepted.secret:
            self.handle(Superseded(SentAway()), time.monotonic())

    def release(self) -> None:
        """Ends the timers and the attempt; the client's RPC is over."""
        self.fail(Unavailable("the request was released"))

    async def wait_for_output(self, *, or_begun: bool = False) -> None:
        """Return when there is output that the client does not read at the decode instance, or the request has ended.
        One waiter at a time. or_begun: also once an instance has begun to compute the prompt."""
        while not (self._is_due or (or_begun and self.has_begun)):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        """Make wait_for_output() check again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _is_due(self) -> bool:
        if isinstance(self.state, Ended):
            return True
        if self.direct is not None and self.direct.is_read(self.attempt_number):
            # Tokens come from elsewhere, but who has the request only from here.
            return self.owner_news is not None
        # A client that re-attaches must bring a suspicion along, or the request would end more instances.
        has_suspicion = self.owner_news is not None and self.owner_news.suspect_until > 0
        return self.answer.has_output or (has_suspicion and bool(self.answer.token_ids))


def _no_report(life: InstanceLife) -> Unavailable:
    return Unavailable(f"{life.instance_id} sent a token before the prompt_logprobs, which it may not know")


def _aim(event: Sent | Sought | ResumeAsked) -> str:
    match event:
        case Sent(attempt):
            return f"to {attempt.prefill.instance_id}"
        case Sought():
            return "sought where its last session left it"
        case ResumeAsked(_, holder):
            return f"resumed at {holder.instance_id}"
