"""One request in flight: its state, its answer, and the actions of its life.

Its state changes by lifecycle.step alone. The entry carries out the actions that step returns: it appends to the
answer, keeps the timers, wakes the client's RPC, and passes on to the placer what concerns instances.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import DeadlineExceeded, KaveriError, RequestAlreadyExists, Unavailable
from kaveri.text.answer import Answer
from services.router import lifecycle_values as lives
from services.router.accepted_request import AcceptedRequest, OwnerHint
from services.router.lifecycle import step
from services.router.request_account import RequestAccount

_COMPLETE = (lives.Finishing, lives.Ended)
_MOST_AHEAD = 32
"""Max tokens of an instance's last steps that its router may lack."""
_LEAST_LEFT = 8
"""An answer with fewer tokens to come is not worth a call to the decode instance."""


class SentAway(Unavailable):
    """The router drains, and the client should re-attach through another one. The instances go on meanwhile."""

    def __init__(self) -> None:
        super().__init__("this router is draining: the request goes on through another router", retry_after_s=0.0)


class Interrupted(SentAway):
    """A decode instance was lost while the client read there. The client re-attaches with its tokens."""

    def __init__(self, cause: str) -> None:
        Unavailable.__init__(self, "the decode instance was lost while its tokens were read there", retry_after_s=0.0)
        self.cause = cause


class DirectReading:
    """Attempts of a session that the client may read, or reads, at a decode instance. No I/O.

    The router follows such a request as any other. It tells the client once per attempt where the answer is drawn, and
    keeps tokens back while the decode instance says that the client reads there. Meanwhile the client may have tokens
    that the router lacks, so a lost attempt is not placed again here, unless the instance has moved the request: other
    tokens could be drawn in their place. The client re-attaches with what it has.
    """

    def __init__(self) -> None:
        self.offered = 0
        """Last attempt whose decode instance the client knows. It may have tokens of it that the router lacks."""
        self.read = 0
        """Attempt that the client reads at its decode instance; 0: none."""

    def offer(self, state: lives.State) -> lives.InstanceLife | None:
        """The decode instance to name to the client, if any. It has sent a token, so prefill will not place the
        attempt elsewhere."""
        if not isinstance(state, lives.Decoding):
            return None
        is_worth_it = state.attempt.most_tokens - state.next_index >= _LEAST_LEFT
        return state.decode if is_worth_it and state.attempt.number > self.offered else None

    def note_read(self, attempt: int, is_read: bool) -> None:
        """Record whether the client reads at the attempt's decode instance."""
        if is_read:
            self.read = attempt
        elif self.read == attempt:
            self.read = 0


class RequestEntry:
    """One session of a request. Not thread-safe."""

    def __init__(
        self,
        accepted: AcceptedRequest,
        answer: Answer,
        account: RequestAccount,
        act: "Callable[[RequestEntry, lives.Action], None]",
        hint_changed: Callable[[OwnerHint], object],
    ) -> None:
        """act: carries out the actions that concern instances. hint_changed: called with the new owner of a request
        that its client may re-attach."""
        self.request_id = accepted.request_id
        self.accepted = accepted
        self.answer = answer
        self.account = account
        received = accepted.received
        # Bounded: the client's hint may be newer than the store's, but clients are not trusted.
        suspect_until = min(
            max(received.owner.suspect_until, received.told.suspect_until), len(received.token_ids) + _MOST_AHEAD
        )
        self.state: lives.State = lives.Unplaced(len(answer.token_ids), suspect_until)
        self.begun_s = 0.0
        """time.monotonic() when the present attempt began."""
        self.owner_news: OwnerHint | None = None
        """The owner, if the client does not know it yet."""
        # The router keeps all that a client reads at decode, and logprobs are large.
        is_offered = accepted.direct and accepted.params.logprobs is None
        self.direct = DirectReading() if is_offered else None
        self.has_begun = False
        """True once an instance computes the prompt."""
        self.delay_noted = False
        """True once the log says that the request could not be placed at once."""
        self._hint = OwnerHint()
        self._act = act
        self._hint_changed = hint_changed
        self._attempt_over: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        remaining_s = max(0.0, accepted.deadline_s - time.monotonic())
        self._deadline = asyncio.get_running_loop().call_later(remaining_s, lambda: self.stop(DeadlineExceeded()))
        self._grace: asyncio.TimerHandle | None = None

    @property
    def attempt_number(self) -> int:
        """Number of the present attempt, or of the last one; 0: there was none."""
        attempt = None if isinstance(self.state, lives.Unplaced) else self.state.attempt
        return 0 if attempt is None else attempt.number

    @property
    def suspect_until(self) -> int:
        """suspect_until of the present attempt, or of the next one."""
        if isinstance(self.state, lives.Unplaced):
            return self.state.suspect_until
        return 0 if self.state.attempt is None else self.state.attempt.suspect_until

    @property
    def most_tokens(self) -> int:
        """Max tokens of the answer."""
        assert self.accepted.params.max_tokens is not None
        return min(self.accepted.params.max_tokens, self.accepted.room)

    @property
    def is_superseded(self) -> bool:
        """True if a later session has taken the request over, here or at another router."""
        return isinstance(self.error, RequestAlreadyExists | SentAway)

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of a complete answer."""
        match self.state:
            case lives.Finishing(_, finish) | lives.Ended(FinishReason() as finish):
                stopped = self.answer.stopped and finish is not FinishReason.CANCELLED
                return FinishReason.STOP if stopped else finish
            case _:
                return None

    @property
    def error(self) -> KaveriError | None:
        """Error of a failed request."""
        outcome = self.state.outcome if isinstance(self.state, lives.Ended) else None
        return outcome if isinstance(outcome, KaveriError) else None

    def adopt(self, resolved: SamplingParams) -> None:
        """Take the sampling parameters that the request's first router has resolved."""
        self.accepted = replace(self.accepted, params=replace(self.accepted.params, **resolved.chosen))

    def ownership(self, attempt: int, router_id: str) -> Ownership:
        """Name of an attempt, as instances know it."""
        return Ownership(Owner(self.accepted.session, attempt), router_id, self.accepted.secret)

    def attempt_at(self, number: int, prefill: lives.InstanceLife = lives.NO_LIFE) -> lives.Attempt:
        """An attempt that goes on after the tokens so far."""
        count = len(self.answer.token_ids)
        return lives.Attempt(number, prefill, count, self.most_tokens, suspect_until=self.suspect_until)

    def attachment(
        self, attempt: int, router_id: str, *, landed: bool = False, at_prefill: bool = False, placed_by: str = ""
    ) -> Attachment:
        """Message that makes this router the owner of the request, from the answer's next token on."""
        token_ids = (*self.accepted.prompt_token_ids, *self.answer.token_ids)
        ownership = self.ownership(attempt, router_id)
        count = len(self.answer.token_ids)
        return Attachment(self.request_id, ownership, token_ids, count, landed, at_prefill, placed_by)

    def begin(self, event: lives.Sent | lives.Sought | lives.ResumeAsked) -> asyncio.Future[None]:
        """Start an attempt. The future is done when the request has ended or the attempt is lost."""
        over = self._attempt_over = asyncio.get_running_loop().create_future()
        self.begun_s = time.monotonic()
        match event:
            case lives.Sent(attempt):
                aim = f"to {attempt.prefill.instance_id}"
            case lives.Sought():
                aim = "sought where its last session left it"
            case lives.ResumeAsked(_, holder):
                aim = f"resumed at {holder.instance_id}"
        self.account.timing.attempts += 1
        self.account.steps.append((self.begun_s, f"attempt {event.attempt.number} {aim}"))
        if self.account.span is not None:
            self.account.begin_span(event.attempt.number, self.begun_s)
        if isinstance(event, lives.Sent):
            self.note_owner(event.attempt.prefill, event.decode)
        self.handle(event, self.begun_s)
        return over

    def note_owner(self, prefill: lives.InstanceLife | None, decode: lives.InstanceLife | None) -> None:
        """Record the attempt's instances, for the timing, the client and a later session. prefill: None if the attempt
        needs none; the timing keeps the last one."""
        self._note_hint(OwnerHint(prefill, decode))
        if prefill is not None:
            self.account.timing.prefill_instance_id = prefill.instance_id
        self.account.timing.decode_instance_id = decode.instance_id if decode is not None else ""

    def note_holder(self) -> None:
        """Record a new holder of the replica for a later session."""
        if not isinstance(self.state, lives.Placed | lives.Decoding):
            return
        replica = self.state.replica
        holder = None if replica is None else lives.holder_of(replica)
        if holder != self._hint.holder:
            self._note_hint(replace(self._hint, holder=holder))

    def note_loss(self, cause: str, former: lives.InstanceLife) -> None:
        """Record the loss of an instance."""
        self.account.note_loss(cause, former, self.answer.last_token_s)

    def note_resumed(self, holder: lives.InstanceLife, first_index: int, held_tokens: int) -> None:
        """Record that the replica's holder goes on from token `first_index` with the KV of `held_tokens` tokens."""
        self.note_owner(None, holder)
        self.account.timing.resumes += 1
        context_tokens = len(self.accepted.prompt_token_ids) + first_index
        self.account.note_new_owner("resumed", holder, self.attempt_number, held_tokens, context_tokens)

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.accepted.prompt_token_ids) + len(self.answer.token_ids)

    def _note_hint(self, hint: OwnerHint) -> None:
        hint = replace(hint, suspect_until=self.suspect_until)
        if hint == self._hint:
            return
        self._hint = self.owner_news = hint
        if self.accepted.secret:
            self._hint_changed(hint)
        self.wake()

    def handle(self, event: lives.Event, now_s: float) -> None:
        """Apply an event to the state, and carry out what follows. now_s: time.monotonic()."""
        if self.answer.lacks_prompt:
            event = self._without_unreported_prompt(event)
        self.state, actions = step(self.state, event, now_s)
        for action in actions:
            if type(action) is lives.Append:
                self.answer.append(action.token_ids, action.logprobs, action.finish, now_s)
                if self.account.owner_change is not None:
                    self.account.note_tokens(self.attempt_number, now_s)
            else:
                self._carry_out(action, now_s)
        if self.answer.stopped and not isinstance(self.state, _COMPLETE):
            self.handle(lives.Stopped(FinishReason.STOP), now_s)
        if isinstance(self.state, lives.Lost):
            if self.suspect_until != self._hint.suspect_until:
                # A later session without the suspicion would break more engines.
                self._note_hint(self._hint)
            if self._client_may_be_ahead(event):
                cause = str(self.state.error)
                self.note_loss(cause, self.state.decode or self.state.attempt.prefill)
                self.handle(lives.Superseded(Interrupted(cause)), now_s)
        if isinstance(self.state, lives.Finishing):
            # If this router and the decode instance died now, a client with the stop token but no end would get more
            # tokens.
            self.answer.withholds_last = self.state.finish is FinishReason.STOP
        if isinstance(self.state, lives.Ended):
            self.answer.withholds_last = False
            if self.account.owner_change is not None:
                self.account.end_owner_change(self.attempt_number, has_ended=True)
            self._deadline.cancel()
            if self._grace is not None:
                self._grace.cancel()
        self.wake()

    def _without_unreported_prompt(self, event: lives.Event) -> lives.Event:
        """The event, or the loss of its attempt if it is a token that comes before the prompt's logprobs. A decode
        instance that draws the first token has not computed the prompt, and some do not know prompt_logprobs."""
        match event:
            case lives.Tokens(first_index=0) if event.token_ids:
                return lives.GivenUp(event.attempt, event.source, _no_report(event.source))
            case lives.FirstTokenReported() if isinstance(self.state, lives.Prefilling | lives.Placed):
                return lives.PrefillEnded(_no_report(self.state.attempt.prefill))
            case _:
                return event

    def _client_may_be_ahead(self, event: lives.Event) -> bool:
        """True if the client may have tokens of the lost attempt that the router lacks. A decode instance that moves
        a request, or gives it to another owner, says so after all its tokens."""
        is_last_word = isinstance(event, lives.GivenUp) and event.has_ended and not isinstance(event.error, Unavailable)
        return self.direct is not None and not is_last_word and self.direct.offered == self.attempt_number

    def _carry_out(self, action: lives.Action, now_s: float) -> None:
        match action:
            case lives.CompleteAnswer():
                self.answer.flush()
                self.account.timing.decode_queue_s = action.decode_queue_s
                self.account.timing.decode_s = action.decode_s
            case lives.AwaitReport():
                loop = asyncio.get_running_loop()
                delay_s = max(0.0, action.until_s - now_s)
                self._grace = loop.call_later(delay_s, lambda: self.handle(lives.PrefillEnded(), time.monotonic()))
            case lives.LeaveAttempt():
                if self.account.span is not None:
                    self.account.end_span(
                        now_s,
                        self.state.error if isinstance(self.state, lives.Lost) else self.error,
                        prefill_instance_id=self.account.timing.prefill_instance_id or None,
                        decode_instance_id=self.account.timing.decode_instance_id or None,
                    )
                if self._attempt_over is not None and not self._attempt_over.done():
                    self._attempt_over.set_result(None)
                self._act(self, action)
            case _:
                self._act(self, action)

    def stop(self, outcome: FinishReason | KaveriError) -> None:
        """End the request, with an error or as CANCELLED; tokens so far are still delivered. No-op if it has ended."""
        self.handle(lives.Stopped(outcome), time.monotonic())

    def supersede(self) -> None:
        """End this session and leave its instances to a later one."""
        self.handle(lives.Superseded(RequestAlreadyExists(self.request_id)), time.monotonic())

    def send_away(self) -> None:
        """End this session for one at another router; no-op if the client cannot re-attach."""
        if self.accepted.secret:
            self.handle(lives.Superseded(SentAway()), time.monotonic())

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
        if isinstance(self.state, lives.Ended):
            return True
        if self.direct is not None and self.direct.read == self.attempt_number:
            # Tokens come from elsewhere, but who has the request only from here.
            return self.owner_news is not None
        # A client that re-attaches must bring a suspicion along, or the request would end more instances.
        has_suspicion = self.owner_news is not None and self.owner_news.suspect_until > 0
        return self.answer.has_output or (has_suspicion and bool(self.answer.token_ids))


def _no_report(life: lives.InstanceLife) -> Unavailable:
    return Unavailable(f"{life.instance_id} sent a token before the prompt_logprobs, which it may not know")
