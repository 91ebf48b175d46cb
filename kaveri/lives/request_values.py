"""States, events and actions of a request's state machine, whose transitions are in request.py.

Frozen dataclasses, but named tuples where one is made per batch of tokens: TokensReceived, Decoding, Append."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.errors import KaveriError
from kaveri.policy.retry import Setback


class InstanceLife(NamedTuple):
    """One run of an instance's process. A restart keeps the id and changes the incarnation."""

    instance_id: str
    incarnation: int


NO_LIFE = InstanceLife("", 0)
"""Stands for an unknown prefill instance, or for none: a resumed attempt needs none."""


def holder_of(replica: ReplicaLocation) -> InstanceLife:
    """The instance, by id and process run, that holds this replica: a copy of a request's KV cache."""
    return InstanceLife(replica.holder_id, replica.holder_incarnation)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a request: on a prefill instance, or on a replica's holder, which resumes decoding."""

    number: int
    prefill: InstanceLife
    first_index: int
    """Index in the answer of the first token that this attempt generates."""
    most_tokens: int
    """Max tokens of the whole answer, and of events held back."""
    taken_over: bool = False
    """True if an earlier session began it: the decode instance's tokens go elsewhere until this router attaches."""
    suspect_until: int = 0
    """Answer length in tokens until which the request is suspected of breaking engines, as one raised in a step with
    it; 0: it is not. After a loss: the value for the next attempt."""


class PrefillLeg(enum.Enum):
    """Progress of the prefill instance in an attempt (placement) whose decode instance is known."""

    WORKING = enum.auto()
    HANDED_OVER = enum.auto()
    """The decode instance has accepted the KV cache. Prefill's reports continue."""
    COMPLETE = enum.auto()
    """Prefill's reports ended after the hand-over."""
    BROKEN = enum.auto()
    """Prefill's reports ended before the hand-over."""


# ---- events ----


class TokensReceived(NamedTuple):
    """Event of a request: a decode instance has sent a batch of its tokens."""

    attempt: int
    source: InstanceLife
    first_index: int
    """Index in the answer of the batch's first token."""
    token_ids: Sequence[int]
    logprobs: Sequence[object] = ()
    """One per token, or empty; opaque here."""
    finish: FinishReason | None = None
    """Set if these are the answer's last tokens."""
    decode_queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Event of a request: a decode instance will not finish it."""

    attempt: int
    source: InstanceLife
    error: KaveriError
    has_ended: bool = True
    """True if the instance has ended the request. False: it may still run it, for instance because its stream broke."""


class ReplicaNamed(NamedTuple):
    """Event of a request: its decode instance has reported the holder and size of a replica: a copy of its KV cache."""

    attempt: int
    source: InstanceLife
    replica: ReplicaLocation | None
    """The replica's location and size; None: it is gone."""


@dataclass(frozen=True, slots=True)
class ReplicaForgone:
    """Event of a request: the router will not resume it from its replica, a copy of its KV cache."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Event of a request: the router asks the holder of its replica (KV cache copy) to resume it."""

    attempt: Attempt
    holder: InstanceLife


@dataclass(frozen=True, slots=True)
class ResumeAnswered:
    """Event of a request: the holder of its KV replica has accepted or refused to resume it, or does not answer."""

    error: KaveriError | None = None
    """Reason of the refusal; None: the holder has resumed the request."""
    may_have_begun: bool = False
    """True if the holder may have resumed the request in spite of the error."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Event of a request: the router sends it to a prefill instance."""

    attempt: Attempt
    decode: InstanceLife | None = None
    """Decode instance if known already: the prefill instance itself, where it serves both phases."""


@dataclass(frozen=True, slots=True)
class Sought:
    """Event of a request: after its client has re-attached, the router asks instances whether they have it."""

    attempt: Attempt
    """Only its number is final, under which the instance will continue; the rest is unknown."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """Event of a request: after its client has re-attached, no instance has it."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """Event of a request: after its client has re-attached, an instance that has it continues it for this router."""

    attempt: Attempt
    missing: Sequence[int] = ()
    """Tokens of earlier attempts that the client lacks."""
    decode: InstanceLife | None = None
    """The decode instance, already attached. None: a prefill instance has the request."""


@dataclass(frozen=True, slots=True)
class DecodeNamed:
    """Event of a request: prefill has reported the decode instance that has reserved memory for it."""

    decode: InstanceLife


@dataclass(frozen=True, slots=True)
class FirstTokenReported:
    """Event of a request: prefill has reported the token that it generated."""

    token_ids: Sequence[int]
    logprobs: Sequence[object] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class HandOverReported:
    """Event of a request: prefill has reported that the decode instance accepted the KV cache."""


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """Event of a request: prefill sends no more reports on it, with `error` because it failed."""

    error: KaveriError | None = None
    was_reached: bool = True
    """False: no connection was made, so the instance does not know the request."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Event of a request: its client has re-attached, so a later session takes over, here or at another router."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Event of a request: the router ends it, also at its instances."""

    outcome: FinishReason | KaveriError
    """CANCELLED (by id) or STOP (at a stop text), which deliver the tokens so far; or an error, such as a deadline."""


Event = (
    TokensReceived
    | GivenUp
    | ReplicaNamed
    | ReplicaForgone
    | ResumeRequested
    | ResumeAnswered
    | Sent
    | Sought
    | NotFound
    | TookOver
    | DecodeNamed
    | FirstTokenReported
    | HandOverReported
    | PrefillEnded
    | Superseded
    | EndRequested
)


class HeldEvents(NamedTuple):
    """Events of decode instances, held in order of arrival until the request's placement or first token is known."""

    events: tuple[TokensReceived | GivenUp | ReplicaNamed, ...] = ()
    token_count: int = 0


NOTHING_HELD = HeldEvents()


# ---- states ----


@dataclass(frozen=True, slots=True)
class Unplaced:
    """State of a request: no instance has it yet."""

    next_index: int = 0
    suspect_until: int = 0
    """Attempt.suspect_until of the next attempt."""


@dataclass(frozen=True, slots=True)
class SeekingOwner:
    """State of a request: after a re-attach, instances are asked whether they have it; tokens may come first."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Prefilling:
    """State of a request: a prefill instance has it, and has not named a decode instance."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Placed:
    """State of a request: a decode instance has reserved memory for it, and the answer has no token from there."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg = PrefillLeg.WORKING
    left: tuple[InstanceLife, ...] = ()
    """Former decode instances of this attempt."""
    held: HeldEvents = NOTHING_HELD
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Resuming:
    """State of a request: the holder of a replica of its KV cache is asked to resume decoding, without prefill."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    """The holder."""
    withheld: tuple["Abort", ...] = ()
    """Aborts for the former decode instance, sent once the holder has answered."""


class Decoding(NamedTuple):
    """State of a request: its decode instance has generated tokens of the answer, or has resumed the request."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Finishing:
    """State of a request: the answer is complete, and its timing waits for prefill's report of the KV hand-over."""

    attempt: Attempt
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Lost:
    """State of a request: its attempt has failed, and it may be placed again."""

    attempt: Attempt
    next_index: int
    error: KaveriError
    setback: Setback
    decode: InstanceLife | None
    leg: PrefillLeg
    replica: ReplicaLocation | None = None
    """Replica from which the request may be resumed."""
    withheld: tuple["Abort", ...] = ()
    """Aborts for the former decode instance, sent once the holder has answered: they also make it drop the replica."""

    @property
    def is_prefills_fault(self) -> bool:
        """True if the prefill instance is to blame: it reported no KV hand-over, or it was the decode instance too."""
        same = self.decode is not None and self.decode.instance_id == self.attempt.prefill.instance_id
        return same or self.leg in (PrefillLeg.WORKING, PrefillLeg.BROKEN)


@dataclass(frozen=True, slots=True)
class Ended:
    """State of a request: final, every event is ignored."""

    outcome: FinishReason | KaveriError
    attempt: Attempt | None
    """The last attempt; None: there was none."""


State = Unplaced | SeekingOwner | Prefilling | Placed | Resuming | Decoding | Finishing | Lost | Ended


# ---- actions ----


class Append(NamedTuple):
    """Action for a request: append tokens to the answer."""

    token_ids: Sequence[int]
    logprobs: Sequence[object]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """Action for a request: release text withheld as a possible stop text, since no tokens follow."""

    decode_queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Follow:
    """Action for a request: receive the attempt's tokens from this decode instance only. If it has no stream to this
    router, or does not have the request, the event GivenUp follows."""

    attempt: int
    decode: InstanceLife
    is_there: bool = True
    """True if the instance is known to have the request."""


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Action for a request: stop receiving its tokens."""


@dataclass(frozen=True, slots=True)
class AwaitReport:
    """Action for a request: apply PrefillEnded at `until_s`, a time.monotonic(), unless it has ended by then."""

    until_s: float


@dataclass(frozen=True, slots=True)
class LeaveAttempt:
    """Action for a request: stop receiving the attempt's tokens and prefill reports."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Action for a request: have decode instances abort an attempt."""

    attempt: int
    decode: InstanceLife | None
    """The decode instance; None: every one, as the right one is unknown."""


@dataclass(frozen=True, slots=True)
class Disown:
    """Action for a request: abort an attempt at an instance that sent its tokens but was never named for decode."""

    attempt: int
    source: InstanceLife


Action = Append | CompleteAnswer | Follow | Unfollow | AwaitReport | LeaveAttempt | Abort | Disown
