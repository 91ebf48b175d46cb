"""State machine of a KV copy, on the holder's side. Pure: no clock, no waiting, no I/O.

    Growing -> Orphan <-> BeingResumed -> Freed
       +----> Complete <----+

Every state may go to Freed; Growing and Complete may be resumed as well. step() returns the next state and the actions
for the holder, in order.
"""

import enum
from dataclasses import dataclass

from kaveri.domain.owner import Ownership
from kaveri.domain.replica import Resumption
from kaveri.errors import InvalidArgument, RequestNotFound
from kaveri.timeouts import COMPLETE_COPY_S


@dataclass(frozen=True, slots=True)
class Growing:
    """State: the copy's owner pushes KV."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """State: the copy's owner is lost or the copy was sealed; a router may resume the request."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Complete:
    """State: the owner gave the copy up, mostly because the answer is complete. The owner may die before the router has
    received the end."""

    until_s: float


@dataclass(frozen=True, slots=True)
class BeingResumed:
    """State: the request is being resumed from the sealed copy on this instance."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Freed:
    """State: the copy's memory was returned."""


Holding = Growing | Orphan | Complete | BeingResumed | Freed


class BareEvent(enum.Enum):
    OWNER_GAVE_UP = enum.auto()
    """The owner no longer needs the copy."""
    BLOCK_MISSED = enum.auto()
    """The copy waited too long for its next block."""


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """Event: the owner's connection ended, its marks stopped, or it left the cluster."""

    reason: str


@dataclass(frozen=True, slots=True)
class HolderDrains:
    """Event: the holder refuses new copies."""

    token_count: int
    """Watermark: number of tokens whose KV was verified."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: timer tick."""

    is_unused: bool = False
    """True if no block has arrived for too long."""
    is_expired: bool = False
    """True if the request's deadline has passed."""
    is_memory_scarce: bool = False


@dataclass(frozen=True, slots=True)
class ResumeBegun:
    """Event: a newer owner began to resume the request on this instance."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """Event: the resumption failed; the same or a newer owner may retry."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeLanded:
    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Event: the copy was closed, replaced, or others need its memory more."""

    cause: str


HoldingEvent = BareEvent | OwnerLost | HolderDrains | Looked | ResumeBegun | ResumeFailed | ResumeLanded | Unwanted


@dataclass(frozen=True, slots=True)
class Seal:
    """Refuse further writes of the owner, which then looks for another holder."""


@dataclass(frozen=True, slots=True)
class NoteOrphan:
    """Log that the copy's owner is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the copy's memory, and wake calls that wait for a resumption."""

    cause: str


HoldingAction = Seal | NoteOrphan | Drop
HoldingStep = tuple[Holding, tuple[HoldingAction, ...]]


def step(state: Holding, event: HoldingEvent, now_s: float, grace_s: float) -> HoldingStep:
    """Return the next state and the actions. Late events change nothing. grace_s: seconds to keep a copy without an
    owner."""
    match event, state:
        case _, Freed():
            return state, ()
        case Unwanted(cause), _:
            return _gone(cause)
        case Looked(), _:
            return _looked(state, event, now_s)
        case OwnerLost(reason), Growing():
            return Orphan(now_s + grace_s), (NoteOrphan(reason),)
        case BareEvent.OWNER_GAVE_UP, Growing():
            return Complete(now_s + min(COMPLETE_COPY_S, grace_s)), ()
        case BareEvent.BLOCK_MISSED, Growing():
            # The owner has the grace time to find another holder, and may be unable to close this copy.
            return Orphan(now_s + grace_s), (Seal(),)
        case HolderDrains(token_count), Growing():
            return (Orphan(now_s + grace_s), (Seal(),)) if token_count else _gone("draining")
        case HolderDrains(), Orphan(until_s):
            return Orphan(min(until_s, now_s + grace_s)), ()
        case HolderDrains(), Complete(until_s):
            return Complete(min(until_s, now_s + grace_s)), ()
        case ResumeBegun(ownership), _:
            return BeingResumed(ownership), ()
        case ResumeFailed(ownership), BeingResumed(present) if ownership == present:
            return Orphan(now_s + grace_s), ()
        case ResumeLanded(ownership), BeingResumed(present) if ownership == present:
            return _gone("resumed")
        case _:
            return state, ()


def _looked(state: Holding, looked: Looked, now_s: float) -> HoldingStep:
    match state:
        case Orphan(until_s) if until_s <= now_s:
            return _gone("orphaned")
        case Complete(until_s) if until_s <= now_s or looked.is_memory_scarce:
            return _gone("given_up")
        case Growing() if looked.is_unused:
            return _gone("unused")
        case Growing() | Orphan() if looked.is_expired:
            return _gone("deadline")
        case _:
            return state, ()


def _gone(cause: str) -> HoldingStep:
    return Freed(), (Drop(cause),)


def usable_tokens(held: tuple[int, ...], resumption: Resumption, block_tokens: int) -> int:
    """Count the leading tokens of a copy that a resumed request can use: whole blocks. held: the copy's token ids.
    Raises InvalidArgument (copy of another prompt) and RequestNotFound (no whole block)."""
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
