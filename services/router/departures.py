"""Moves requests off decode instances that drain and do not let them go by themselves for a while.

Their replicas' holders go on with them, as after a loss. Nothing counts as a failure. What the replica lacks, two
blocks at most, is computed again. Requests without such a replica, and those whose holder has no room, go on where
they are.
"""

import time

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceState, Phase, ViewedInstance, phases_now
from kaveri.errors import NoCapacity
from kaveri.policy.unconfirmed import UnconfirmedWork
from services.router.holders import Holders
from services.router.lifecycle_values import DecodeLost, Decoding, InstanceLife
from services.router.request_table import RequestTable
from services.router.requests import RequestEntry
from services.router.token_feeds import TokenFeeds

_OWNER_TIME_S = 3.0
"""An instance that drains lets its requests go with all their KV. They are moved from here only when it has let none
go for so long."""
_MOST_LACKING_BLOCKS = 2
"""Of a replica from which a request is moved. One that lacks more soon will not."""


class Departures:
    """Of one router."""

    def __init__(self, table: RequestTable, holders: Holders, feeds: TokenFeeds) -> None:
        self._table = table
        self._holders = holders
        self._feeds = feeds
        self._unconfirmed: UnconfirmedWork[str] = UnconfirmedWork()
        """Blocks of requests that were moved to holders and that no heartbeat shows yet."""
        self._since_s: dict[InstanceLife, float] = {}
        """time.monotonic() when each was first seen to drain."""

    def update(self, view: ClusterView) -> None:
        """Moves what can be moved now. Called with each view, also when only loads have changed."""
        draining = view.derive("draining decode instances", _draining, view)
        now_s = time.monotonic()
        self._since_s = {life: self._since_s.get(life, now_s) for life in draining}
        overdue = {
            life
            for life, since_s in self._since_s.items()
            if now_s - max(since_s, self._feeds.let_go_s(life)) >= _OWNER_TIME_S
        }
        if not overdue:
            return
        self._unconfirmed.retain(view)
        for entry in self._table.entries():
            if isinstance(entry.state, Decoding) and entry.state.decode in overdue:
                self._move(entry, entry.state.decode, view)

    def _move(self, entry: RequestEntry, decode: InstanceLife, view: ClusterView) -> None:
        replica = self._holders.replica_of(entry)
        if replica is None or not self._feeds.is_connected(InstanceLife(replica.holder_id, replica.holder_incarnation)):
            return
        holder = view.instances[replica.holder_id]
        if holder.load.state is not InstanceState.READY:
            return
        needed_blocks = self._needed_blocks(entry, replica, holder)
        if needed_blocks is None or holder.load.free_blocks - self._unconfirmed.at(holder).amount < needed_blocks:
            return
        self._unconfirmed.add(entry.request_id, holder, needed_blocks)
        cause = f"decode instance {decode.instance_id} drains"
        entry.note_loss(cause, decode)
        entry.handle(DecodeLost(NoCapacity("decode", 0.0, cause)), time.monotonic())

    def _needed_blocks(self, entry: RequestEntry, replica: ReplicaLocation, holder: ViewedInstance) -> int | None:
        """Of the request at the holder; None: the replica lacks too much."""
        layout = holder.record.layout
        context_tokens = len(entry.accepted.prompt_token_ids) + len(entry.answer.token_ids)
        if layout is None or context_tokens - replica.token_count > _MOST_LACKING_BLOCKS * layout.block_tokens:
            return None
        return layout.block_count(context_tokens + 1)


def _draining(view: ClusterView) -> frozenset[InstanceLife]:
    return frozenset(
        InstanceLife(instance_id, status.record.incarnation)
        for instance_id, status in view.instances.items()
        if status.load.state is InstanceState.DRAINING and Phase.DECODE in phases_now(status)
    )
