"""States, events and actions of a request's life on the router; lifecycle.py has the transitions.

Tokens, Decoding and Append are named tuples because one of each is made for every batch of tokens; all others are
frozen dataclasses.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.errors import KaveriError
from kaveri.policy.retry import Setback


class InstanceLife(NamedTuple):
    """One life of an instance."""

    instance_id: str
    incarnation: int


NO_LIFE = InstanceLife("", 0)
"""The prefill instance of a resumed attempt, or an unknown one."""


def holder_of(replica: ReplicaLocation) -> InstanceLife:
    """The life that holds a replica."""
    return InstanceLife(replica.holder_id, replica.holder_incarnation)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A placement of the request on a prefill instance, or on the holder of its replica, which resumes it."""

    number: int
    prefill: InstanceLife
    first_index: int
    """Index of the first token that this placement draws."""
    most_tokens: int
    """Max tokens of the whole answer, and of those held."""
    taken_over: bool = False
    """True if it began in an earlier session: the decode instance sends its tokens elsewhere until it is attached."""
    suspect_until: int = 0
    """The request is a suspect until its answer has this many tokens, because an engine raised in a step with it. 0: it
    is no suspect. After a loss: that of the next attempt."""


class PrefillLeg(enum.Enum):
    """Progress of the prefill instance with an attempt that has a decode instance."""

    WORKING = enum.auto()
    HANDED_OVER = enum.auto()
    """Decode has accepted the KV. Prefill reports on."""
    COMPLETE = enum.auto()
    """Prefill's reports ended after the hand-over."""
    BROKEN = enum.auto()
    """Prefill's reports ended before the hand-over."""


# ---- events ----


class Tokens(NamedTuple):
    """A batch of tokens from a decode instance."""

    attempt: int
    source: InstanceLife
    first_index: int
    """Index of the first one in the answer."""
    token_ids: Sequence[int]
    logprobs: Sequence[object] = ()
    """One per token, or none; opaque here."""
    finish: FinishReason | None = None
    """Set if the instance has finished the request."""
    decode_queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A decode instance will not finish the request."""

    attempt: int
    source: InstanceLife
    error: KaveriError
    has_ended: bool = True
    """True if the instance has ended the request itself. False: it may go on, for instance because it has no token
    stream, left the cluster or restarted."""


class ReplicaNamed(NamedTuple):
    """The decode instance names the request's replica and its size."""

    attempt: int
    source: InstanceLife
    replica: ReplicaLocation | None
    """None: there is none anymore."""


@dataclass(frozen=True, slots=True)
class ReplicaForgone:
    """The request will not be resumed from its replica."""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """The holder of a replica is asked to resume the request."""

    attempt: Attempt
    holder: InstanceLife


@dataclass(frozen=True, slots=True)
class ResumeAnswered:
    """The holder has accepted or refused the request, or does not answer."""

    error: KaveriError | None = None
    """None: it goes on with the request."""
    may_have_begun: bool = False
    """True if the holder may go on with the request in spite of the error."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The request is sent to a prefill instance."""

    attempt: Attempt
    decode: InstanceLife | None = None
    """The instance that will decode, if known: one that does both phases."""


@dataclass(frozen=True, slots=True)
class Sought:
    """Instances are asked for the request of an earlier session."""

    attempt: Attempt
    """Has the number under which the instance will go on; the rest is unknown."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """No instance has the request of an earlier session."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """An instance has the request of an earlier session, and goes on for this router."""

    attempt: Attempt
    missing: Sequence[int] = ()
    """Tokens of earlier placements that the client lacks."""
    decode: InstanceLife | None = None
    """The decode instance, already attached. None: a prefill instance has the request."""


@dataclass(frozen=True, slots=True)
class DecodeNamed:
    """Prefill names the decode instance that has reserved room."""

    decode: InstanceLife


@dataclass(frozen=True, slots=True)
class FirstTokenReported:
    """The token that prefill drew."""

    token_ids: Sequence[int]
    logprobs: Sequence[object] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class HandOverReported:
    """Decode has accepted the KV."""


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """Prefill reports nothing more, or its report is not waited for any longer."""

    error: KaveriError | None = None
    was_reached: bool = True
    """False: there was no connection, so the instance does not know the request."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later session takes the request over, at this router or at another one."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class Stopped:
    """The router ends the request, and has its instances end it."""

    outcome: FinishReason | KaveriError
    """CANCELLED by its id, STOP at a stop text: the tokens so far are still delivered; or an error, such as its
    deadline."""


Event = (
    Tokens
    | GivenUp
    | ReplicaNamed
    | ReplicaForgone
    | ResumeAsked
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
    | Stopped
)


class HeldEvents(NamedTuple):
    """Events of decode instances that wait for a placement or the first token, in the order of arrival."""

    events: tuple[Tokens | GivenUp | ReplicaNamed, ...] = ()
    token_count: int = 0


NOTHING_HELD = HeldEvents()


# ---- states ----


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No instance has the request yet."""

    next_index: int = 0
    suspect_until: int = 0
    """As in Attempt."""


@dataclass(frozen=True, slots=True)
class SeekingOwner:
    """Instances are asked for the request of an earlier session. One may send tokens before it answers."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A prefill instance has the request, and has not named a decode instance."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Placed:
    """A decode instance has reserved room. The answer has none of its tokens."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg = PrefillLeg.WORKING
    left: tuple[InstanceLife, ...] = ()
    """Earlier decode instances of this attempt."""
    held: HeldEvents = NOTHING_HELD
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Resuming:
    """The holder of the replica is asked to resume the request, without a prefill instance."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    """The holder."""
    withheld: tuple["Abort", ...] = ()
    """As in Lost."""


class Decoding(NamedTuple):
    """A decode instance draws the tokens: the answer has some of them, or it has resumed the request."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Finishing:
    """The answer is complete. Its timing waits for prefill's report of the hand-over."""

    attempt: Attempt
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt cannot go on. The request may be placed again."""

    attempt: Attempt
    next_index: int
    error: KaveriError
    setback: Setback
    decode: InstanceLife | None
    leg: PrefillLeg
    replica: ReplicaLocation | None = None
    """Replica to resume the request from."""
    withheld: tuple["Abort", ...] = ()
    """Aborts for the former decode instance, which would have the holder drop the replica. Sent after its answer."""

    @property
    def is_prefills_fault(self) -> bool:
        """True if the prefill instance had not handed over, or was the decode instance as well."""
        same = self.decode is not None and self.decode.instance_id == self.attempt.prefill.instance_id
        return same or self.leg in (PrefillLeg.WORKING, PrefillLeg.BROKEN)


@dataclass(frozen=True, slots=True)
class Ended:
    """All events are ignored."""

    outcome: FinishReason | KaveriError
    attempt: Attempt | None
    """The last attempt; None: there was none."""


State = Unplaced | SeekingOwner | Prefilling | Placed | Resuming | Decoding | Finishing | Lost | Ended


# ---- actions ----


class Append(NamedTuple):
    """Append tokens to the end of the answer."""

    token_ids: Sequence[int]
    logprobs: Sequence[object]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """Release the text that is held back; no tokens follow."""

    decode_queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow the stream of this decode instance, and of no other. Report GivenUp if there is none, or if the instance
    does not have the request."""

    attempt: int
    decode: InstanceLife
    is_there: bool = True
    """True if the instance knows the request."""


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Stop following a stream."""


@dataclass(frozen=True, slots=True)
class AwaitReport:
    """Report PrefillEnded at `until_s`, unless the request ends earlier."""

    until_s: float


@dataclass(frozen=True, slots=True)
class LeaveAttempt:
    """End the attempt: stop reading prefill's reports, and unfollow."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Have decode instances end an attempt."""

    attempt: int
    decode: InstanceLife | None
    """None: all of them, as the instance is unknown."""


@dataclass(frozen=True, slots=True)
class Disown:
    """Have a decode instance that no placement named end an attempt."""

    attempt: int
    source: InstanceLife


Action = Append | CompleteAnswer | Follow | Unfollow | AwaitReport | LeaveAttempt | Abort | Disown
