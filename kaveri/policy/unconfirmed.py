"""What a chooser has sent to instances and their heartbeats do not show yet. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kaveri.domain.view import ClusterView, ViewedInstance

KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class Unconfirmed:
    """Sums over the pieces of one instance that its last heartbeat does not show yet."""

    count: int = 0
    amount: int = 0
    """Tokens of prompts, or blocks: as the chooser counts."""
    heavy_count: int = 0


NOTHING = Unconfirmed()
"""Of an instance to which nothing was sent. Never changed."""


_Piece = tuple[int, bool]
"""Its amount, and whether it is heavy."""


@dataclass(slots=True)
class _Sent(Generic[KeyT]):
    """What was sent to one life of an instance."""

    incarnation: int
    sums: Unconfirmed = field(default_factory=Unconfirmed)
    by_heartbeat: dict[int, dict[KeyT, _Piece]] = field(default_factory=dict)
    """The pieces by the number of the last heartbeat that was known when they were sent."""
    confirmed_by: float = math.inf
    """The first heartbeat that shows some of them."""

    def add(self, heartbeat: int, key: KeyT, piece: _Piece) -> None:
        pieces = self.by_heartbeat.get(heartbeat)
        if pieces is None:
            pieces = self.by_heartbeat[heartbeat] = {}
            if heartbeat + 2 < self.confirmed_by:
                self.confirmed_by = heartbeat + 2
        pieces[key] = piece
        sums = self.sums
        sums.count += 1
        sums.amount += piece[0]
        sums.heavy_count += piece[1]

    def confirm(self, newest: int) -> None:
        """Takes out what heartbeat `newest` shows."""
        for heartbeat in [sent for sent in self.by_heartbeat if newest >= sent + 2]:
            for piece in self.by_heartbeat.pop(heartbeat).values():
                self.take(piece)
        self.confirmed_by = min(self.by_heartbeat, default=math.inf) + 2

    def take(self, piece: _Piece) -> None:
        sums = self.sums
        sums.count -= 1
        sums.amount -= piece[0]
        sums.heavy_count -= piece[1]


class UnconfirmedWork(Generic[KeyT]):
    """What one chooser has sent, with running sums: asking costs the same however much was sent.

    A piece counts until it is removed, until the second heartbeat after it was sent (the first may have been made while
    the piece was on its way), or until the instance starts a new life. The caller names pieces by its own keys.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent[KeyT]] = {}

    def add(self, key: KeyT, target: ViewedInstance, amount: int, heavy: bool = False) -> None:
        """Counts a piece for `target`, as the view shows it now. A piece of the same key is replaced."""
        record = target.record
        self.remove(key, record.instance_id)
        sent = self._sent.get(record.instance_id)
        if sent is None or sent.incarnation != record.incarnation:
            sent = self._sent[record.instance_id] = _Sent(record.incarnation)
        sent.add(target.load.sequence_number, key, (amount, heavy))

    def remove(self, key: KeyT, instance_id: str) -> None:
        """Stops counting a piece: it was begun, refused or dropped. Unknown pieces are ignored."""
        sent = self._sent.get(instance_id)
        if sent is None:
            return
        for number, pieces in sent.by_heartbeat.items():
            piece = pieces.pop(key, None)
            if piece is not None:
                sent.take(piece)
                if not pieces:
                    del sent.by_heartbeat[number]
                break
        if not sent.by_heartbeat:
            del self._sent[instance_id]

    def retain(self, view: ClusterView) -> None:
        """Forgets what was sent to instances that are not in the view. at() does it for those that began a new life."""
        if not all(map(view.instances.__contains__, self._sent)):
            self._sent = {name: sent for name, sent in self._sent.items() if name in view.instances}

    def __len__(self) -> int:
        """Pieces that were neither removed nor found confirmed."""
        return sum(sent.sums.count for sent in self._sent.values())

    def at(self, instance: ViewedInstance) -> Unconfirmed:
        """The sums for an instance, to be read at once: they change with the next call."""
        if not self._sent:
            return NOTHING
        instance_id = instance.record.instance_id
        sent = self._sent.get(instance_id)
        if sent is None:
            return NOTHING
        if sent.incarnation != instance.record.incarnation:
            del self._sent[instance_id]
            return NOTHING
        newest = instance.load.sequence_number
        if newest >= sent.confirmed_by:
            sent.confirm(newest)
            if not sent.by_heartbeat:
                del self._sent[instance_id]
                return NOTHING
        return sent.sums
