"""The life of a request's copy at its holder. Pure: no clock, no waiting, no I/O.

    Growing -> Orphan <-> BeingResumed -> Freed
       +----> Complete <----+

Every state but Freed may go to Freed, and Growing and Complete may be resumed as well. step() returns the next state
and the actions for the holder, in order.
"""

import enum
from dataclasses import dataclass

from kaveri.domain.owner import Ownership
from kaveri.domain.replica import Resumption
from kaveri.errors import InvalidArgument, RequestNotFound
from kaveri.timeouts import COMPLETE_COPY_S

# ---- states ----


@dataclass(frozen=True, slots=True)
class Growing:
    """Its owner pushes."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """Its owner is gone, or it was sealed. It waits for a router that resumes the request."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Its owner gave it up, mostly because the answer is complete. The owner may die before the router has the end."""

    until_s: float


@dataclass(frozen=True, slots=True)
class BeingResumed:
    """The request is resumed from it here. It is sealed."""

    ownership: Ownership
    """The new owner."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Its memory was given back."""


Holding = Growing | Orphan | Complete | BeingResumed | Freed

# ---- events ----


class BareEvent(enum.Enum):
    """Events without data."""

    OWNER_GAVE_UP = enum.auto()
    """The owner gave it up."""
    BLOCK_MISSED = enum.auto()
    """There was no room for its next block for too long."""


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The owner's connection ended, it marked nothing for too long, or it left the cluster."""

    reason: str


@dataclass(frozen=True, slots=True)
class HolderDrains:
    """The holder takes no new copies."""

    token_count: int
    """The watermark."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Some time has passed."""

    is_unused: bool = False
    """No block has come for too long."""
    is_expired: bool = False
    """The request's deadline is over."""
    is_memory_scarce: bool = False


@dataclass(frozen=True, slots=True)
class ResumeBegun:
    """A newer owner resumes the request here."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """The same owner may try again, or a newer one."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class ResumeLanded:
    """The resumed request has landed."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Unwanted:
    """It was closed, replaced, or others need its memory more."""

    cause: str


HoldingEvent = BareEvent | OwnerLost | HolderDrains | Looked | ResumeBegun | ResumeFailed | ResumeLanded | Unwanted

# ---- actions ----


@dataclass(frozen=True, slots=True)
class Seal:
    """Refuse further writes of its owner, which looks for another holder."""


@dataclass(frozen=True, slots=True)
class NoteOrphan:
    """Log that its owner is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give its memory back, and wake calls that wait for a resumption."""

    cause: str


HoldingAction = Seal | NoteOrphan | Drop
HoldingStep = tuple[Holding, tuple[HoldingAction, ...]]


def step(state: Holding, event: HoldingEvent, now_s: float, grace_s: float) -> HoldingStep:
    """The next state and the actions. Late events change nothing. grace_s: time to keep a copy without an owner."""
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
            # Its owner has the grace time to find another holder. It may not be able to close this copy.
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
    """Number of a copy's tokens that a resumed request uses: whole blocks. held: the copy's token ids.

    Raises InvalidArgument (the copy is of another prompt) and RequestNotFound (it has no whole block).
    """
    token_ids = resumption.token_ids
    common = _common_prefix(held, token_ids)
    prompt_tokens = len(token_ids) - resumption.generated_count
    if common < min(len(held), prompt_tokens):
        raise InvalidArgument(f"token_ids[{common}]", token_ids[common], "the token whose KV is held here")
    # The last token is computed here in any case: the next one is drawn on it.
    usable = min(common, len(token_ids) - 1)
    if usable < len(held):
        # Only the end of a copy may lie within a block: where its owner has let the request go.
        usable -= usable % block_tokens
    if not usable:
        raise RequestNotFound(resumption.request_id, "no whole block of it is held here")
    return usable


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(index for index in range(count) if one[index] != other[index])
