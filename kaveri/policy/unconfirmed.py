"""Counts requests sent to instances whose heartbeats do not show them yet. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kaveri.domain.view import ClusterView, ViewedInstance

KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class Unconfirmed:
    """Totals of the requests sent to one instance that its heartbeats do not show yet."""

    count: int = 0
    amount: int = 0
    """Prompt tokens, KV blocks or bytes, as the caller counts."""
    heavy_count: int = 0


NOTHING = Unconfirmed()
"""Totals of an instance that was sent nothing. Never mutated."""


_Piece = tuple[int, bool]
"""A request's share: (amount, is heavy)."""


@dataclass(slots=True)
class _Sent(Generic[KeyT]):
    """Requests sent to one incarnation (process run) of an instance."""

    incarnation: int
    sums: Unconfirmed = field(default_factory=Unconfirmed)
    by_heartbeat: dict[int, dict[KeyT, _Piece]] = field(default_factory=dict)
    """Requests by the number of the last heartbeat received before they were sent."""
    confirmed_by: float = math.inf
    """Number of the first heartbeat that confirms some of the requests."""

    def confirm(self, newest: int) -> None:
        for heartbeat in [sent for sent in self.by_heartbeat if newest >= sent + 2]:
            for piece in self.by_heartbeat.pop(heartbeat).values():
                _count(self.sums, -1, piece)
        self.confirmed_by = min(self.by_heartbeat, default=math.inf) + 2


def _count(sums: Unconfirmed, sign: int, piece: _Piece) -> None:
    sums.count += sign
    sums.amount += sign * piece[0]
    sums.heavy_count += sign * piece[1]


class UnconfirmedWork(Generic[KeyT]):
    """Requests that one sender has placed on instances and that their heartbeats do not show yet, with running totals:
    a lookup costs the same however many there are.

    A request counts until it is removed, until the second heartbeat after it was sent (the first may predate its
    arrival), or until the instance restarts. Keys of requests are chosen by the caller.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent[KeyT]] = {}

    def add(self, key: KeyT, target: ViewedInstance, amount: int, heavy: bool = False) -> None:
        """Count a request of `amount` tokens, KV blocks or bytes as sent to `target`; replaces one of the same key."""
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
        """Stop counting a request that the instance has started or refused, or that was dropped. Idempotent."""
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
        """Forget the requests sent to instances that are not in the view."""
        if not all(map(view.instances.__contains__, self._sent)):
            self._sent = {name: sent for name, sent in self._sent.items() if name in view.instances}

    def __len__(self) -> int:
        return sum(sent.sums.count for sent in self._sent.values())

    def at(self, instance: ViewedInstance) -> Unconfirmed:
        """Return the totals of an instance's unconfirmed requests; valid only until the next call."""
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
