"""Counts work sent to instances that their heartbeats do not show yet. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kaveri.domain.view import ClusterView, ViewedInstance

KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class Unconfirmed:
    """Totals of one instance's unconfirmed pieces."""

    count: int = 0
    amount: int = 0
    """Prompt tokens, KV blocks or bytes, as the caller counts."""
    heavy_count: int = 0


NOTHING = Unconfirmed()
"""Totals of an instance that was sent nothing. Never mutated."""


_Piece = tuple[int, bool]
"""A piece of work: (amount, is heavy)."""


@dataclass(slots=True)
class _Sent(Generic[KeyT]):
    """Pieces sent to one incarnation of an instance."""

    incarnation: int
    sums: Unconfirmed = field(default_factory=Unconfirmed)
    by_heartbeat: dict[int, dict[KeyT, _Piece]] = field(default_factory=dict)
    """The pieces by the last heartbeat number known when they were sent."""
    confirmed_by: float = math.inf
    """Number of the first heartbeat that confirms some of the pieces."""

    def confirm(self, newest: int) -> None:
        """Remove the pieces that heartbeat `newest` confirms."""
        for heartbeat in [sent for sent in self.by_heartbeat if newest >= sent + 2]:
            for piece in self.by_heartbeat.pop(heartbeat).values():
                _count(self.sums, -1, piece)
        self.confirmed_by = min(self.by_heartbeat, default=math.inf) + 2


def _count(sums: Unconfirmed, sign: int, piece: _Piece) -> None:
    """Add a piece to the totals (1), or remove it (-1)."""
    sums.count += sign
    sums.amount += sign * piece[0]
    sums.heavy_count += sign * piece[1]


class UnconfirmedWork(Generic[KeyT]):
    """Work sent by one chooser, with running totals: a lookup costs the same however much was sent.

    A piece counts until it is removed, until the second heartbeat after it was sent (the first may predate its
    arrival), or until the instance has a new incarnation. The caller supplies the keys of pieces.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent[KeyT]] = {}

    def add(self, key: KeyT, target: ViewedInstance, amount: int, heavy: bool = False) -> None:
        """Count a piece for `target`, as the view shows it now; replaces a piece of the same key."""
        record = target.record
        self.remove(key, record.instance_id)
        sent = self._sent.get(record.instance_id)
        if sent is None or sent.incarnation != record.incarnation:
            sent = self._sent[record.instance_id] = _Sent(record.incarnation)
        heartbeat, piece = target.load.sequence_number, (amount, heavy)
        pieces = sent.by_heartbeat.get(heartbeat)
        if pieces is None:
            pieces = sent.by_heartbeat[heartbeat] = {}
            sent.confirmed_by = min(sent.confirmed_by, heartbeat + 2)
        pieces[key] = piece
        _count(sent.sums, 1, piece)

    def remove(self, key: KeyT, instance_id: str) -> None:
        """Remove a piece that was begun, refused or dropped. Unknown pieces are ignored."""
        sent = self._sent.get(instance_id)
        if sent is None:
            return
        for number, pieces in sent.by_heartbeat.items():
            piece = pieces.pop(key, None)
            if piece is not None:
                _count(sent.sums, -1, piece)
                if not pieces:
                    del sent.by_heartbeat[number]
                break
        if not sent.by_heartbeat:
            del self._sent[instance_id]

    def retain(self, view: ClusterView) -> None:
        """Forget the pieces of instances that are not in the view. at() does so for new incarnations."""
        if not all(map(view.instances.__contains__, self._sent)):
            self._sent = {name: sent for name, sent in self._sent.items() if name in view.instances}

    def __len__(self) -> int:
        """Number of pieces neither removed nor found confirmed."""
        return sum(sent.sums.count for sent in self._sent.values())

    def at(self, instance: ViewedInstance) -> Unconfirmed:
        """The totals for an instance. Read them at once: they change with the next call."""
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
