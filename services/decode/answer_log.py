"""Log of one answer: its tokens, and the number of them already sent to the router. No I/O."""

from array import array
from dataclasses import dataclass, field

from kaveri.domain.owner import Owner
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import TokenStep
from kaveri.errors import EngineBroke, EngineError
from services.decode.lifecycle import RequestTimes


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer on this instance: a finish reason or an error."""

    finish: FinishReason | None = None
    times: RequestTimes | None = None
    error: str = ""
    replaced: bool = False
    moved: bool = False
    fault: EngineError | EngineBroke | None = None
    """Exception raised by the engine; set together with `error`."""

    @property
    def is_final(self) -> bool:
        """Return True if the request must not be placed again."""
        return isinstance(self.fault, EngineError)


GOING_ON = End()
READ_HERE_TOKENS = 32
"""Tokens per message to the router while a client reads the answer directly from this instance."""


@dataclass(eq=False, slots=True)
class GainedTokens:
    """Unsent tokens of one request, as a message to its router."""

    request_id: str
    owner: Owner
    index: int
    """Index of the first token within the answer."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    end: End = GOING_ON
    replica: ReplicaLocation | None = None
    """New location of the request's KV copy; None: unchanged."""
    read_here: bool = False
    """True while a client reads the answer directly from this instance."""


@dataclass(eq=False, slots=True)
class AnswerLog:
    """Tokens of one answer from first_index on."""

    first_index: int
    sent: int
    """Index of the next token to send."""
    # An array: the garbage collector visits each item of a list, which would block the event loop.
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[Logprobs] = field(default_factory=list)
    """Log-probabilities, one entry per token; empty if not requested."""
    end: End = GOING_ON
    end_sent: bool = False
    replica: ReplicaLocation | None = None
    """Location of the request's KV copy; None: no copy yet."""
    replica_sent: bool = True

    @classmethod
    def drawn_here(cls, index: int) -> "AnswerLog":
        """Create the log of a request whose next token, at `index`, is sampled on this instance."""
        return cls(index, index)

    @property
    def next_index(self) -> int:
        return self.first_index + len(self.token_ids)

    @property
    def has_unsent(self) -> bool:
        return self.sent < self.next_index or (self.end is not GOING_ON and not self.end_sent)

    @property
    def has_ended(self) -> bool:
        return self.end is not GOING_ON

    @property
    def is_due(self) -> bool:
        """Return True if the router needs a message now although a client reads the answer directly."""
        return self.has_ended or not self.replica_sent or self.next_index - self.sent >= READ_HERE_TOKENS

    def begin_with(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Insert the first token, sampled by prefill, before any token of this instance."""
        assert not self.token_ids, self
        self.first_index -= 1
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def gain(self, step: TokenStep, times: RequestTimes | None) -> None:
        self.token_ids.append(step.token_id)
        if step.logprobs is not None:
            self.logprobs.append(step.logprobs)
        if step.finish is not None:
            self.end = End(step.finish, times)

    def send_from(self, index: int) -> None:
        """Mark the tokens from `index` on, and the end, as unsent. `index` lies within the log or is the next index."""
        assert self.first_index <= index <= self.next_index, (index, self)
        self.sent = index
        self.end_sent = False
        self.replica_sent = self.replica is None

    def note_replica(self, replica: ReplicaLocation) -> None:
        """Record a new location or size of the request's KV copy."""
        self.replica, self.replica_sent = replica, False

    def take(self, request_id: str, owner: Owner) -> GainedTokens:
        """Return the unsent tokens and mark them as sent."""
        start = self.sent - self.first_index
        token_ids = self.token_ids[start:].tolist()
        gained = GainedTokens(request_id, owner, self.sent, token_ids, self.logprobs[start:], self.end)
        # The copy of an ended request is dropped, unless the request was moved to it.
        if not self.replica_sent and (self.end is GOING_ON or self.end.moved):
            gained.replica, self.replica_sent = self.replica, True
        self.sent = self.next_index
        self.end_sent = self.end is not GOING_ON
        return gained
