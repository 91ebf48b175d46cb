"""The values of a request's life on the router: its states, what happens to it, and what is then to be done.

lifecycle.py says how they follow from one another. Tokens, Decoding and Append are named tuples because one of each is
made for every batch of tokens; all others are frozen dataclasses.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.domain.view import InstanceRecord
from kaveri.errors import KaveriError
from kaveri.policy.retry import Setback


class InstanceLife(NamedTuple):
    """One life of an instance."""

    instance_id: str
    incarnation: int


NO_LIFE = InstanceLife("", 0)
"""The prefill instance of a resumed attempt, or an unknown one."""


def life_of(record: InstanceRecord) -> InstanceLife:
    """The life that a record describes."""
    return InstanceLife(record.instance_id, record.incarnation)


def holder_of(replica: ReplicaLocation) -> InstanceLife:
    """The life that holds a replica."""
    return InstanceLife(replica.holder_id, replica.holder_incarnation)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of the request: on a prefill instance, or on the holder of its replica, where it is resumed."""

    number: int
    prefill: InstanceLife
    first_index: int
    """Index of the first token that this placement draws: prefill draws it, or the holder of the replica."""
    most_tokens: int
    """Most tokens of the whole answer. At most this many tokens are held."""
    taken_over: bool = False
    """It was begun in an earlier session: the decode instance sends its tokens elsewhere until it is attached."""
    suspect_until: int = 0
    """The request is a suspect until its answer has so many tokens: an engine has raised in a step with it. 0: it is
    no suspect. After a loss: as of the next attempt."""


class PrefillLeg(enum.Enum):
    """How far the prefill instance has come with an attempt that has a decode instance."""

    WORKING = enum.auto()
    HANDED_OVER = enum.auto()
    """Decode has accepted the KV. The stream is still open."""
    COMPLETE = enum.auto()
    """The stream has ended after the hand-over."""
    BROKEN = enum.auto()
    """The stream has ended before the hand-over was reported."""

    @property
    def is_open(self) -> bool:
        """Whether the prefill stream is open."""
        return self in (PrefillLeg.WORKING, PrefillLeg.HANDED_OVER)

    @property
    def has_handed_over(self) -> bool:
        """Whether prefill has done its part."""
        return self in (PrefillLeg.HANDED_OVER, PrefillLeg.COMPLETE)


# ---- events ----


class Tokens(NamedTuple):
    """Tokens that a decode instance drew, as one batch."""

    attempt: int
    source: InstanceLife
    first_index: int
    """Index of the first of them within the answer."""
    token_ids: Sequence[int]
    logprobs: Sequence[object] = ()
    """One for each token, or none at all; not looked into."""
    finish: FinishReason | None = None
    """Set when decode has ended the request by itself."""
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
    """The decode instance says where a replica of the request is, and how much of it."""

    attempt: int
    source: InstanceLife
    replica: ReplicaLocation | None
    """None: there is none any more."""


@dataclass(frozen=True, slots=True)
class ReplicaForgone:
    """The request is not resumed, though it has a replica."""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """The holder of a replica is asked to go on with the request."""

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
    """The request goes to a prefill instance."""

    attempt: Attempt
    decode: InstanceLife | None = None
    """The instance that will decode, where that is known already: one that does both phases."""


@dataclass(frozen=True, slots=True)
class Sought:
    """The instances are asked which of them has the request from an earlier session."""

    attempt: Attempt
    """Its number is the one under which the instance will go on; the rest is not known yet."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """None of them has it."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """An instance has the request from an earlier session, and goes on for this router."""

    attempt: Attempt
    missing: Sequence[int] = ()
    """Tokens that earlier placements have drawn and the client lacks."""
    decode: InstanceLife | None = None
    """The decode instance, which is attached already. None: prefill has it."""


@dataclass(frozen=True, slots=True)
class DecodeNamed:
    """Prefill says which decode instance has reserved room."""

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
    """False: there was no connection, so the instance knows nothing of the request."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later session of the request takes the attempt over. It has come to this router, or its client was sent to
    another one."""

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
    """Events of decode instances that cannot be taken yet, in the order in which they came."""

    events: tuple[Tokens | GivenUp | ReplicaNamed, ...] = ()
    token_count: int = 0


NOTHING_HELD = HeldEvents()


# ---- states ----


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No instance has the request yet."""

    next_index: int = 0
    suspect_until: int = 0
    """As of Attempt."""


@dataclass(frozen=True, slots=True)
class SeekingOwner:
    """The instances that may have the request are asked. One of them may send tokens before it has answered."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A prefill instance has the request. It has not named a decode instance."""

    attempt: Attempt
    next_index: int
    held: HeldEvents = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class Placed:
    """A decode instance has reserved room. None of its tokens is part of the answer."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg = PrefillLeg.WORKING
    left: tuple[InstanceLife, ...] = ()
    """Decode instances that this attempt was placed on before."""
    held: HeldEvents = NOTHING_HELD
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Resuming:
    """The holder of the request's replica is asked to go on with it, without a prefill instance."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    """The holder."""
    withheld: tuple["Abort", ...] = ()
    """As in Lost."""


class Decoding(NamedTuple):
    """A decode instance draws the tokens, and the answer has some of them; or it has resumed the request."""

    attempt: Attempt
    next_index: int
    decode: InstanceLife
    leg: PrefillLeg
    replica: ReplicaLocation | None = None


@dataclass(frozen=True, slots=True)
class Finishing:
    """The answer is complete. Its timing waits for the end of the prefill stream."""

    attempt: Attempt
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt cannot go on. The request may be sent again."""

    attempt: Attempt
    next_index: int
    error: KaveriError
    setback: Setback
    decode: InstanceLife | None
    leg: PrefillLeg
    replica: ReplicaLocation | None = None
    """Where the request may be resumed."""
    withheld: tuple["Abort", ...] = ()
    """For the former decode instance. It would tell the holder to drop the replica, so the holder is asked first."""

    @property
    def is_prefills_fault(self) -> bool:
        """Whether the prefill instance had not done its part, or was to decode as well."""
        same = self.decode is not None and self.decode.instance_id == self.attempt.prefill.instance_id
        return same or not self.leg.has_handed_over


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is taken in any more."""

    outcome: FinishReason | KaveriError
    attempt: Attempt | None
    """The last one; None: there was none."""


State = Unplaced | SeekingOwner | Prefilling | Placed | Resuming | Decoding | Finishing | Lost | Ended


# ---- actions ----


class Append(NamedTuple):
    """Append tokens to the answer. They follow the last one."""

    token_ids: Sequence[int]
    logprobs: Sequence[object]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """No more tokens will come: release the text that is held back."""

    decode_queue_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Follow:
    """The attempt needs the token stream of this decode instance, and of no other: report GivenUp when it cannot be
    had, or when the instance does not have the request."""

    attempt: int
    decode: InstanceLife
    is_there: bool = True
    """Whether the instance has reserved room, so that it knows the request."""


@dataclass(frozen=True, slots=True)
class Unfollow:
    """The attempt does not depend on a token stream any more."""


@dataclass(frozen=True, slots=True)
class AwaitReport:
    """Report PrefillEnded at `until_s`, unless the request ends earlier."""

    until_s: float


@dataclass(frozen=True, slots=True)
class LeaveAttempt:
    """The attempt is over: stop reading its prefill stream, and unfollow."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell decode instances to end an attempt."""

    attempt: int
    decode: InstanceLife | None
    """None: the instance is unknown, so all of them."""


@dataclass(frozen=True, slots=True)
class Disown:
    """A decode instance that no placement named has an attempt that has ended: tell it to end that attempt."""

    attempt: int
    source: InstanceLife


Action = Append | CompleteAnswer | Follow | Unfollow | AwaitReport | LeaveAttempt | Abort | Disown
