"""State machine of a KV copy on the instance that holds it for a request of another instance (the copy's owner).

    Growing -> Orphan <-> Resuming -> Ended
       +----> Complete <----+

Every state may go to Ended; Growing and Complete may be resumed as well. step() returns the next state and the actions
for the holder, in order. Pure: no clock, no waiting, no I/O.
"""

import enum
from dataclasses import dataclass

from kaveri.domain.owner import Ownership
from kaveri.domain.replica import Resumption
from kaveri.errors import InvalidArgument, RequestNotFound
from kaveri.timeouts import COMPLETE_COPY_S


@dataclass(frozen=True, slots=True)
class Growing:
    """State of a held KV copy: the instance that decodes the request (the owner) pushes KV into it."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """State of a held KV copy: its owner instance is lost or may not write; the request may be resumed from it."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Complete:
    """State of a held KV copy: its owner instance needs it no longer, mostly because the answer is complete. Kept for a
    while, as the owner may die before the router has received the end."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Resuming:
    """State of a held KV copy: the request is being resumed from it on this instance."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Ended:
    """State of a held KV copy: its memory was returned."""


State = Growing | Orphan | Complete | Resuming | Ended


class BareEvent(enum.Enum):
    OWNER_GAVE_UP = enum.auto()
    """The owner no longer needs the copy."""
    BLOCK_MISSED = enum.auto()
    """The copy waited too long for its next block."""


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """Event for a held KV copy: its owner instance is disconnected, silent for too long, or gone from the cluster."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """Event for a held KV copy: this instance drains and refuses new copies."""

    token_count: int
    """Watermark: number of tokens whose KV was verified."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Event for a held KV copy: periodic check, with reasons to drop it."""

    is_unused: bool = False
    """True if no block has arrived for too long."""
    is_expired: bool = False
    """True if the request's deadline has passed."""
    is_memory_scarce: bool = False


@dataclass(frozen=True, slots=True)
class ResumeBegun:
    """Event for a held KV copy: a newer attempt or session began to resume the request from it."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """Event for a held KV copy: the resumption failed; the same or a newer attempt may retry."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeDone:
    ownership: Ownership


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Event for a held KV copy: it was closed or replaced, or others need its memory more."""

    cause: str


Event = BareEvent | OwnerLost | DrainBegun | Checked | ResumeBegun | ResumeFailed | ResumeDone | EndRequested


@dataclass(frozen=True, slots=True)
class Seal:
    """Action for a held KV copy: refuse further KV from its owner instance, which then looks for another holder."""


@dataclass(frozen=True, slots=True)
class RecordOrphan:
    """Action for a held KV copy: log that its owner instance is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Action for a held KV copy: free its memory, and wake calls that wait for a resumption."""

    cause: str


Action = Seal | RecordOrphan | Drop
Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float, grace_s: float) -> Step:
    """Return the next state of a held KV copy and the actions. Events that no longer apply change nothing. grace_s:
    seconds to keep a copy whose owner instance is lost."""
    match event, state:
        case _, Ended():
            return state, ()
        case EndRequested(cause), _:
            return _gone(cause)
        case Checked(), _:
            return _checked(state, event, now_s)
        case OwnerLost(reason), Growing():
            return Orphan(now_s + grace_s), (RecordOrphan(reason),)
        case BareEvent.OWNER_GAVE_UP, Growing():
            return Complete(now_s + min(COMPLETE_COPY_S, grace_s)), ()
        case BareEvent.BLOCK_MISSED, Growing():
            # The owner has the grace time to find another holder, and may be unable to close this copy.
            return Orphan(now_s + grace_s), (Seal(),)
        case DrainBegun(token_count), Growing():
            return (Orphan(now_s + grace_s), (Seal(),)) if token_count else _gone("draining")
        case DrainBegun(), Orphan(until_s):
            return Orphan(min(until_s, now_s + grace_s)), ()
        case DrainBegun(), Complete(until_s):
            return Complete(min(until_s, now_s + grace_s)), ()
        case ResumeBegun(ownership), _:
            return Resuming(ownership), ()
        case ResumeFailed(ownership), Resuming(present) if ownership == present:
            return Orphan(now_s + grace_s), ()
        case ResumeDone(ownership), Resuming(present) if ownership == present:
            return _gone("resumed")
        case _:
            return state, ()


def _checked(state: State, event: Checked, now_s: float) -> Step:
    match state:
        case Orphan(until_s) if until_s <= now_s:
            return _gone("orphaned")
        case Complete(until_s) if until_s <= now_s or event.is_memory_scarce:
            return _gone("given_up")
        case Growing() if event.is_unused:
            return _gone("unused")
        case Growing() | Orphan() if event.is_expired:
            return _gone("deadline")
        case _:
            return state, ()


def _gone(cause: str) -> Step:
    return Ended(), (Drop(cause),)


def usable_tokens(held: tuple[int, ...], resumption: Resumption, block_tokens: int) -> int:
    """Return the number of leading tokens whose KV a resumed request can take from a held copy. held: token ids of the
    copy. Raises InvalidArgument (copy of another prompt) and RequestNotFound (no whole block is usable)."""
    token_ids = resumption.token_ids
    common = _common_prefix(held, token_ids)
    prompt_tokens = len(token_ids) - resumption.generated_count
    if common < min(len(held), prompt_tokens):
        raise InvalidArgument(f"token_ids[{common}]", token_ids[common], "the token whose KV is held here")
    # The last token is always computed here: the next token is sampled from its logits.
    usable = min(common, len(token_ids) - 1)
    if usable < len(held):
        # A copy may end within a block only where its owner released the request.
        usable -= usable % block_tokens
    if not usable:
        raise RequestNotFound(resumption.request_id, "no whole block of it is held here")
    return usable


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(index for index in range(count) if one[index] != other[index])
