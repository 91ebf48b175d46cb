"""Requests of a decode instance, each with the log of its answer: tokens, and how many its router was sent. No I/O."""

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import EngineRequest, TokenStep
from kaveri.errors import EngineBroke, EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives.decoding import RequestTimes, Running, State
from kaveri.policy.growth import BatchMember
from services.decode.spans import DecodeSpans


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer on this decode instance: a finish reason or an error. Without either, the answer continues."""

    finish: FinishReason | None = None
    times: RequestTimes | None = None
    error: str = ""
    replaced: bool = False
    moved: bool = False
    fault: EngineError | EngineBroke | None = None
    """The exception that the engine raised; set with error."""

    @property
    def is_final(self) -> bool:
        """True if the engine failed on the request, which must not be placed again."""
        return isinstance(self.fault, EngineError)


GOING_ON = End()
READ_HERE_TOKENS = 32
"""Tokens per message to the router of an answer that a client reads directly from this instance."""


@dataclass(eq=False, slots=True)
class GainedTokens:
    """Message entry for a router: new tokens of one request, its end, or the location of its KV copy."""

    request_id: str
    term: Term
    index: int
    """Index of the first token within the answer."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    end: End = GOING_ON
    replica: ReplicaLocation | None = None
    """New location of the request's KV copy; None: unchanged."""
    read_here: bool = False
    """True if a client reads the answer directly from this instance."""


@dataclass(eq=False, slots=True)
class AnswerLog:
    """Tokens of one answer from index first_index on, and how many of them its router was sent."""

    first_index: int
    sent: int
    """Index, within the answer, of the next token to send to the router."""
    # An array, because garbage collection visits each item of a list, of all answers in one turn of the event loop.
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[Logprobs] = field(default_factory=list)
    """One for each token, or none at all."""
    end: End = GOING_ON
    end_sent: bool = False
    replica: ReplicaLocation | None = None
    """Location of the request's KV copy; None: none so far."""
    replica_sent: bool = True

    @property
    def next_index(self) -> int:
        """Index, within the answer, of the next token to be sampled."""
        return self.first_index + len(self.token_ids)

    @property
    def has_unsent(self) -> bool:
        """True if tokens, or the answer's end, were not sent to the router yet."""
        return self.sent < self.next_index or (self.end is not GOING_ON and not self.end_sent)

    @property
    def has_ended(self) -> bool:
        """True if no more tokens will be added here."""
        return self.end is not GOING_ON

    @property
    def is_due(self) -> bool:
        """True if the router needs a message even while a client reads the answer here: end, KV copy, many tokens."""
        return self.has_ended or not self.replica_sent or self.next_index - self.sent >= READ_HERE_TOKENS

    def begin_with(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Insert the first token, sampled by prefill, before any token is sampled here."""
        assert not self.token_ids, self
        self.first_index -= 1
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def gain(self, step: TokenStep, times: RequestTimes | None) -> None:
        """Append one sampled token. times: the request's durations, stored with the last token."""
        self.token_ids.append(step.token_id)
        if step.logprobs is not None:
            self.logprobs.append(step.logprobs)
        if step.finish is not None:
            self.end = End(step.finish, times)

    def send_from(self, index: int) -> None:
        """Mark tokens from answer index `index` on, and the end, as unsent. index: in [first_index, next_index]."""
        assert self.first_index <= index <= self.next_index, (index, self)
        self.sent = index
        self.end_sent = False
        self.replica_sent = self.replica is None

    def note_replica(self, replica: ReplicaLocation) -> None:
        """Record the location and size of the request's KV copy at another instance."""
        self.replica, self.replica_sent = replica, False

    def take(self, request_id: str, term: Term, read_here: bool = False) -> GainedTokens:
        """Return unsent tokens and mark them as sent. read_here: True if a client reads the answer here."""
        start = self.sent - self.first_index
        token_ids = self.token_ids[start:].tolist()
        gained = GainedTokens(
            request_id, term, self.sent, token_ids, self.logprobs[start:], self.end, read_here=read_here
        )
        # The copy of a request that has ended is gone, unless the request was moved to it.
        if not self.replica_sent and (self.end is GOING_ON or self.end.moved):
            gained.replica, self.replica_sent = self.replica, True
        self.sent = self.next_index
        self.end_sent = self.end is not GOING_ON
        return gained


@dataclass(frozen=True, slots=True)
class ResumedHere:
    """KV copy from which a request was resumed on this instance."""

    held_tokens: int
    landed: asyncio.Future[bool]
    """Done when the KV has landed. False: the request ended before."""
    former_id: str = ""
    """Id of the instance that decoded the request before and may have kept its KV; empty: none."""


class Reader(Protocol):
    """Client that reads an answer directly from this decode instance."""

    def changed(self) -> None:
        """Handle growth or end of the request's log of tokens."""

    def leave(self) -> None:
        """End the client's read: the router sends the rest, or the request was aborted."""


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """One attempt of a request on a decode instance, from its reservation to its end. Times are time.monotonic()'s, as
    uvloop's clock counts in milliseconds."""

    request_id: str
    engine_request: EngineRequest
    ownership: Ownership
    came_s: float
    expires_s: float
    member: BatchMember
    """The request's weight in the batch at its arrival."""
    state: State
    log: AnswerLog
    source: KvLayout | None = None
    """Layout of the engine that pushes the request's KV."""
    heavy: bool = False
    """True if the request counts as heavy in the load."""
    placement: int = 0
    """Number of the Reserve call within the attempt; 0: not counted."""
    placed_by: str = ""
    """Id of the prefill instance that reserved the room; empty: unknown or none."""
    answer: asyncio.Future[Ticket] | None = None
    """Result of the Reserve call; None: prefilled on this instance."""
    deadline: asyncio.TimerHandle | None = None
    resumed: ResumedHere | None = None
    spans: DecodeSpans | None = None
    reader: Reader | None = None
    """Client that reads the answer directly; None: only the router reads it."""

    @property
    def came_from(self) -> str:
        """Id of the instance that computed the prompt or decoded the request before, and may have kept the KV; empty:
        unknown or none."""
        return self.placed_by if self.resumed is None else self.resumed.former_id

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the prompt and the answer so far."""
        return self.engine_request.prompt_tokens + self.log.next_index

    @property
    def rest_tokens(self) -> int | None:
        """Remaining answer tokens: the lower of prediction and max_tokens; None if neither is known."""
        drawn = self.state.drawn if isinstance(self.state, Running) else 0
        predicted = self.member.remaining_tokens - drawn
        most = self.engine_request.params.max_tokens
        limits = [predicted] if predicted > 0 else []
        limits += [most - self.log.next_index] if most is not None else []
        return min(limits, default=None)
