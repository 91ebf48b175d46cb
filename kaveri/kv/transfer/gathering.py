"""Combines transfers between pairs of ranks into a whole, which fails if one fails and ends when all have."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kaveri.kv.transfer.landing import TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.push import PushAccepted, PushExtended, PushFailed, PushMarked

_NO_NOTE = b"\xff"
"""Names nothing. KV that landed with differing notes cannot be used, and its sender counts it as accepted."""

TransferEnd = PushAccepted | PushFailed | TransferLanded | TransferReleased
TransferStep = PushMarked | PushExtended | TransferMarked
"""Progress events of an open transfer."""


@dataclass(eq=False, slots=True)
class Gathering:
    """Progress of a transfer that consists of one transfer per pair of source and destination rank. Guarded by its
    owner's lock."""

    transfer_id: bytes
    """Id of the whole transfer."""
    left: set[int]
    """Numbers of the parts that have not ended."""
    kv_bytes: int = 0
    transports: set[str] = field(default_factory=set)
    notes: set[bytes] = field(default_factory=set)
    failure: str | None = None
    given_up: bool = False
    """True if the sender cancelled what failed first, and said so."""
    part_count: int = field(init=False)
    steps: dict[TransferStep, int] = field(default_factory=dict)
    """Progress events that some of the parts have had, and how many of them."""

    def __post_init__(self) -> None:
        self.part_count = len(self.left)

    def step(self, event: TransferStep) -> TransferStep | None:
        """Record a progress event (mark or extension) of one transfer. Returns the event of the whole once all have had
        the same, else None."""
        step = replace(event, transfer_id=self.transfer_id)
        taken_count = self.steps.pop(step, 0) + 1
        if taken_count < self.part_count:
            self.steps[step] = taken_count
            return None
        return step

    def end(self, number: int, event: TransferEnd, of: str = "") -> bool:
        """Record the end of transfer `number`. Returns True if this makes the whole transfer fail. of: prefix for its
        reason."""
        self.left.discard(number)
        if isinstance(event, PushFailed | TransferReleased):
            if self.failure is not None:
                return False
            self.failure = of + event.reason
            self.given_up = isinstance(event, TransferReleased) and event.given_up
            return True
        self.kv_bytes += event.kv_bytes
        if isinstance(event, PushAccepted):
            self.transports.add(event.transport)
        else:
            self.notes.add(event.note)
        return False

    def drop(self, numbers: Iterable[int], reason: str) -> None:
        """Record that the transfers of these numbers cannot begin, so the whole transfer fails."""
        self.left.difference_update(numbers)
        self.failure = self.failure or reason

    def outcome(self, last: TransferEnd) -> TransferEnd:
        """Return the whole's end event, once all transfers have ended; `last` is any of their end events."""
        if isinstance(last, PushAccepted | PushFailed):
            if self.failure is not None:
                return PushFailed(self.transfer_id, self.failure)
            return PushAccepted(self.transfer_id, self.kv_bytes, " and ".join(sorted(self.transports - {""})))
        if self.failure is not None:
            return TransferReleased(self.transfer_id, self.failure, self.given_up)
        return TransferLanded(self.transfer_id, self.kv_bytes, self.notes.pop() if len(self.notes) == 1 else _NO_NOTE)
