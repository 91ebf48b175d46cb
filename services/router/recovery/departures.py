"""Moves requests off decode instances that drain."""

import time

from kaveri.domain.view import ClusterView, InstanceState, Phase, phases_now
from kaveri.errors import NoCapacity
from kaveri.lives import request_values as lives
from kaveri.lives.request_values import InstanceLife, holder_of
from kaveri.policy.unconfirmed import UnconfirmedWork
from services.router.recovery.holders import Holders
from services.router.request_table import RequestTable
from services.router.requests import RequestEntry
from services.router.token_feeds import TokenFeeds

_OWNER_TIME_S = 3.0
"""A draining instance moves its requests itself, with all KV. The router does so after this long without a move."""
_MOST_LACKING_BLOCKS = 2
"""Max KV blocks that a moved request's replica may lack. Others catch up soon."""


class Departures:
    """Moves requests off draining decode instances that have moved none themselves for a while.

    The requests resume at the holders of their replicas (copies of the KV cache), which recompute at most two missing
    blocks. A move uses up no attempt. Requests without such a replica, or whose holder has no free memory, stay."""

    def __init__(self, table: RequestTable, holders: Holders, feeds: TokenFeeds) -> None:
        self._table = table
        self._holders = holders
        self._feeds = feeds
        self._unconfirmed: UnconfirmedWork[str] = UnconfirmedWork()
        """KV blocks of moved requests that no heartbeat of their holder includes yet."""
        self._since_s: dict[InstanceLife, float] = {}
        """time.monotonic() at which each instance was first seen draining."""

    def update(self, view: ClusterView) -> None:
        """Move all requests that can be moved now. Call it with each view, also when only loads have changed."""
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
            if isinstance(entry.state, lives.Decoding) and entry.state.decode in overdue:
                self._move(entry, entry.state.decode, view)

    def _move(self, entry: RequestEntry, decode: InstanceLife, view: ClusterView) -> None:
        replica = self._holders.replica_of(entry)
        if replica is None or not self._feeds.is_connected(holder_of(replica)):
            return
        holder = view.instances[replica.holder_id]
        if holder.load.state is not InstanceState.READY:
            return
        layout, context_tokens = holder.record.layout, entry.context_tokens
        if layout is None or context_tokens - replica.token_count > _MOST_LACKING_BLOCKS * layout.block_tokens:
            return
        needed_blocks = layout.block_count(context_tokens + 1)
        if holder.load.free_blocks - self._unconfirmed.at(holder).amount < needed_blocks:
            return
        self._unconfirmed.add(entry.request_id, holder, needed_blocks)
        cause = f"decode instance {decode.instance_id} drains"
        entry.note_loss(cause, decode)
        drained = NoCapacity("decode", 0.0, cause)
        entry.handle(lives.GivenUp(entry.attempt_number, decode, drained, has_ended=False), time.monotonic())


def _draining(view: ClusterView) -> frozenset[InstanceLife]:
    return frozenset(
        InstanceLife(instance_id, status.record.incarnation)
        for instance_id, status in view.instances.items()
        if status.load.state is InstanceState.DRAINING and Phase.DECODE in phases_now(status)
    )
