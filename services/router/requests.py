"""One request in flight: its state, its answer, and the actions of its state machine.

Only `step` of kaveri.lives.request changes the state. The entry carries out the actions that step returns: it appends
to the answer, keeps the timers, wakes the client's RPC, and passes actions on instances to the placer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import DeadlineExceeded, KaveriError, RequestAlreadyExists, Unavailable
from kaveri.lives import request_values as lives
from kaveri.lives.request import step
from kaveri.telemetry.logs import get_logger
from kaveri.text.answer import Answer
from services.router.accepted_request import AcceptedRequest, OwnerHint
from services.router.request_account import RequestAccount

_COMPLETE = (lives.Finishing, lives.Ended)
_MOST_AHEAD = 32
"""Max tokens of an instance's last steps that its router may lack."""
_LEAST_LEFT = 8
"""Min tokens to come for which reading at the decode instance is worth the client's call."""


class SentAway(Unavailable):
    """Ends a session at a draining router: its client should re-attach at another one. Instances continue meanwhile."""

    def __init__(self) -> None:
        super().__init__("this router is draining: the request goes on through another router", retry_after_s=0.0)


class Interrupted(SentAway):
    """Ends a session that lost its decode instance while its client read there. The client re-attaches."""

    def __init__(self, cause: str) -> None:
        Unavailable.__init__(self, "the decode instance was lost while its tokens were read there", retry_after_s=0.0)
        self.cause = cause


class DirectReading:
    """Tracks whether a session's client may read, or reads, its answer directly at a decode instance. No I/O.

    The router receives the answer too. It names the decode instance to the client once per attempt, and holds tokens
    back while the instance reports that the client reads there. The client may then have tokens that the router lacks.
    A lost attempt is therefore not placed again here (other tokens could be drawn), unless the instance has moved the
    request: the client re-attaches with its tokens."""

    def __init__(self) -> None:
        self.offered = 0
        """Last attempt whose decode instance was named to the client, which may have tokens that the router lacks."""
        self.read = 0
        """Attempt whose tokens the client reads directly at the decode instance; 0: none."""

    def offer(self, state: lives.State) -> lives.InstanceLife | None:
        """Decode instance to name to the client; None if already named, not decoding yet, or few tokens are left."""
        if not isinstance(state, lives.Decoding):
            return None
        is_worth_it = state.attempt.most_tokens - state.next_index >= _LEAST_LEFT
        return state.decode if is_worth_it and state.attempt.number > self.offered else None

    def note_read(self, attempt: int, is_read: bool) -> None:
        """Record whether the client reads the attempt's tokens directly at the decode instance."""
        if is_read:
            self.read = attempt
        elif self.read == attempt:
            self.read = 0


class RequestEntry:
    """One session of a request in flight: its state machine, answer and account. Not thread-safe."""

    def __init__(
        self,
        accepted: AcceptedRequest,
        answer: Answer,
        account: RequestAccount,
        act: "Callable[[RequestEntry, lives.Action], None]",
        hint_changed: Callable[[OwnerHint], object],
    ) -> None:
        """act: carries out actions that concern instances. hint_changed: called with the new owner hint (the request's
        instances) if the client may re-attach."""
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
        """Owner hint that the client was not sent yet."""
        # The router keeps all that a client reads at decode, and logprobs are large.
        is_offered = accepted.direct and accepted.params.logprobs is None
        self.direct = DirectReading() if is_offered else None
        self.has_begun = False
        """True once an instance computes the prompt."""
        self.delay_noted = False
        """True once it was logged that the request waits for an instance."""
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
        """Number of the present or last attempt (placement); 0: there was none."""
        attempt = None if isinstance(self.state, lives.Unplaced) else self.state.attempt
        return 0 if attempt is None else attempt.number

    @property
    def suspect_until(self) -> int:
        """Answer length in tokens until which the request is suspected of breaking engines; 0: it is not."""
        if isinstance(self.state, lives.Unplaced):
            return self.state.suspect_until
        return 0 if self.state.attempt is None else self.state.attempt.suspect_until

    @property
    def most_tokens(self) -> int:
        """Max tokens of the answer, by the request and the model's context length."""
        assert self.accepted.params.max_tokens is not None
        return min(self.accepted.params.max_tokens, self.accepted.room)

    @property
    def is_superseded(self) -> bool:
        """True if this session ended in favour of a later one, here or at another router."""
        return isinstance(self.error, RequestAlreadyExists | SentAway)

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of a complete answer, else None."""
        match self.state:
            case lives.Finishing(_, finish) | lives.Ended(FinishReason() as finish):
                stopped = self.answer.stopped and finish is not FinishReason.CANCELLED
                return FinishReason.STOP if stopped else finish
            case _:
                return None

    @property
    def error(self) -> KaveriError | None:
        """Error of a failed request, else None."""
        outcome = self.state.outcome if isinstance(self.state, lives.Ended) else None
        return outcome if isinstance(outcome, KaveriError) else None

    def adopt(self, resolved: SamplingParams) -> None:
        """Use the sampling parameters that the request's first router resolved."""
        self.accepted = replace(self.accepted, params=replace(self.accepted.params, **resolved.chosen))

    def ownership(self, attempt: int, router_id: str) -> Ownership:
        """Identify an attempt to instances: by session, attempt number, router and secret."""
        return Ownership(Term(self.accepted.session, attempt), router_id, self.accepted.secret)

    def attempt_at(self, number: int, prefill: lives.InstanceLife = lives.NO_LIFE) -> lives.Attempt:
        """Create attempt `number`, which continues after the tokens so far."""
        count = len(self.answer.token_ids)
        return lives.Attempt(number, prefill, count, self.most_tokens, suspect_until=self.suspect_until)

    def attachment(
        self, attempt: int, router_id: str, *, landed: bool = False, at_prefill: bool = False, placed_by: str = ""
    ) -> Attachment:
        """Build the message that makes an instance send this router the request's tokens, from the next one on. For
        landed, at_prefill and placed_by, which restrict the match, see Attachment."""
        token_ids = (*self.accepted.prompt_token_ids, *self.answer.token_ids)
        ownership = self.ownership(attempt, router_id)
        count = len(self.answer.token_ids)
        return Attachment(self.request_id, ownership, token_ids, count, landed, at_prefill, placed_by)

    def begin(self, event: lives.Sent | lives.Sought | lives.ResumeRequested) -> asyncio.Future[None]:
        """Start an attempt. The future is done when the attempt is lost or the request has ended."""
        over = self._attempt_over = asyncio.get_running_loop().create_future()
        self.begun_s = time.monotonic()
        match event:
            case lives.Sent(attempt):
                aim = f"to {attempt.prefill.instance_id}"
            case lives.Sought():
                aim = "sought where its last session left it"
            case lives.ResumeRequested(_, holder):
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
        """Record the attempt's instances, for the timing, the client and a later session. prefill: None: the attempt
        needs none, and the timing keeps the last one."""
        self._note_hint(OwnerHint(prefill, decode))
        if prefill is not None:
            self.account.timing.prefill_instance_id = prefill.instance_id
        self.account.timing.decode_instance_id = decode.instance_id if decode is not None else ""

    def note_holder(self) -> None:
        """Record the present holder of the request's replica (KV cache copy), as a hint for a later session."""
        if not isinstance(self.state, lives.Placed | lives.Decoding):
            return
        replica = self.state.replica
        holder = None if replica is None else lives.holder_of(replica)
        if holder != self._hint.holder:
            self._note_hint(replace(self._hint, holder=holder))

    def note_delay(self, reason: str) -> None:
        """Log, once per request, that it waits for an instance."""
        if not self.delay_noted:
            self.delay_noted = True
            get_logger().info("placement_delayed", request_id=self.request_id, attempt=0, reason=reason)

    def note_loss(self, cause: str, former: lives.InstanceLife) -> None:
        """Record the loss of instance `former`."""
        self.account.note_loss(cause, former, self.answer.last_token_s)

    def note_resumed(self, holder: lives.InstanceLife, first_index: int, held_tokens: int) -> None:
        """Record that a replica's holder continues at answer token `first_index`, with KV of `held_tokens` tokens."""
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
        """Apply an event to the state machine, and carry out the actions. now_s: time.monotonic()."""
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
            self.handle(lives.EndRequested(FinishReason.STOP), now_s)
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
        """Turn a token event before the prompt's logprobs into the loss of its attempt. A decode instance that
        generates the first token has not computed the prompt, and old versions do not know prompt_logprobs."""
        match event:
            case lives.TokensReceived(first_index=0) if event.token_ids:
                return lives.GivenUp(event.attempt, event.source, _no_report(event.source))
            case lives.FirstTokenReported() if isinstance(self.state, lives.Prefilling | lives.Placed):
                return lives.PrefillEnded(_no_report(self.state.attempt.prefill))
            case _:
                return event

    def _client_may_be_ahead(self, event: lives.Event) -> bool:
        """True if the client may have tokens of the lost attempt that the router lacks. A decode instance sends all its
        tokens before it reports that it moves a request or gives it to another owner."""
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
        """End the request: with an error, or as CANCELLED with the tokens so far. No-op if it has ended."""
        self.handle(lives.EndRequested(outcome), time.monotonic())

    def supersede(self) -> None:
        """End this session; its instances continue for a later one, as the client has re-attached."""
        self.handle(lives.Superseded(RequestAlreadyExists(self.request_id)), time.monotonic())

    def send_away(self) -> None:
        """End this session so that the client re-attaches at another router. No-op if the client cannot."""
        if self.accepted.secret:
            self.handle(lives.Superseded(SentAway()), time.monotonic())

    async def wait_for_output(self, *, or_begun: bool = False) -> None:
        """Wait for output to send, or the end of the request. Output that the client reads at a decode instance does
        not count. One waiter at a time. or_begun: return also once an instance has begun to compute the prompt."""
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
            # Tokens come from the decode instance, but owner hints only from this router.
            return self.owner_news is not None
        # A client that re-attaches must name a suspicion, or the request would break more engines.
        has_suspicion = self.owner_news is not None and self.owner_news.suspect_until > 0
        return self.answer.has_output or (has_suspicion and bool(self.answer.token_ids))


def _no_report(life: lives.InstanceLife) -> Unavailable:
    return Unavailable(f"{life.instance_id} sent a token before the prompt_logprobs, which it may not know")
