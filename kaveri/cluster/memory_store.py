"""Cluster state in one process's memory, for tests and gateways without Redis. Passes redis_store's tests."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from kaveri.cluster.membership import Membership
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.cluster.store import HeartbeatAnswer, RequestClaim, ViewSource
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, LoadBroadcast

_TICK_S = 0.02


@dataclass(slots=True)
class _Held:
    record: InstanceRecord
    load: InstanceLoad
    registration: int
    expires_at_s: float


@dataclass(slots=True)
class _Leader:
    candidate_id: str
    fencing_token: int
    expires_at_s: float


class MemoryCluster:
    """Cluster state shared by the MemoryStore objects of one process, in place of a Redis. Not thread-safe."""

    def __init__(self) -> None:
        self._registration_numbers = itertools.count()
        self._registrations: dict[tuple[str, int], int] = {}
        self._held: dict[str, _Held] = {}
        self._requests: dict[str, tuple[RequestClaim, float]] = {}
        self._members: list[Membership] = []
        self._hears_heartbeats: list[Membership] = []
        self._fencing_tokens = itertools.count(1)
        self._leader: _Leader | None = None
        self.is_away = False
        self.refuses_heartbeats = False
        """True: heartbeats and writes fail, as with a Redis without memory."""

    def take_away(self) -> None:
        self.is_away = True
        for membership in self._members:
            membership.store_lost()

    def bring_back(self, *, empty: bool = False) -> None:
        """Make the state reachable again. empty: without its content, as after a restart of Redis."""
        self.is_away = False
        if empty:
            self._held.clear()
            self._requests.clear()
            self._leader = None
        for membership in self._members:
            membership.store_returned()

    def join(self, membership: Membership) -> None:
        """Load the current instances into `membership`, and push every later change to it."""
        self._members.append(membership)
        self.follow_heartbeats(membership)

    def leave(self, membership: Membership) -> None:
        self._members.remove(membership)
        if membership in self._hears_heartbeats:
            self._hears_heartbeats.remove(membership)

    def follow_heartbeats(self, membership: Membership) -> None:
        """Push every heartbeat to `membership`, from the current state on. Idempotent."""
        if membership in self._hears_heartbeats:
            return
        now_s = time.monotonic()
        for held in self._held.values():
            if held.expires_at_s > now_s:
                membership.learn(held.record, held.load, held.expires_at_s - now_s)
        self._hears_heartbeats.append(membership)

    @property
    def lost(self) -> bool:
        """True if the state is unreachable or refuses writes."""
        return self.is_away or self.refuses_heartbeats

    def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        life = (record.instance_id, record.incarnation)
        if life not in self._registrations:
            self._registrations[life] = next(self._registration_numbers)
        registration = self._registrations[life]
        now_s = time.monotonic()
        held = self._held.get(record.instance_id)
        other = None
        if held is not None and held.expires_at_s > now_s and held.registration != registration:
            other = held.record
            if held.registration > registration:
                return HeartbeatAnswer(holds=False, other=other)
        self._held[record.instance_id] = _Held(record, load, registration, now_s + record.lease_ttl_s)
        for membership in self._hears_heartbeats:
            membership.learn(record, load)
        return HeartbeatAnswer(other=other)

    def deregister(self, record: InstanceRecord) -> None:
        held = self._held.get(record.instance_id)
        if held is not None and held.record.incarnation == record.incarnation:
            del self._held[record.instance_id]
            for membership in self._members:
                membership.forget(record.instance_id, record.incarnation)

    def is_registered(self, instance_id: str, incarnation: int) -> bool:
        """Return True if this incarnation of the instance has a valid lease."""
        held = self._held.get(instance_id)
        return held is not None and held.record.incarnation == incarnation and held.expires_at_s > time.monotonic()

    def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        now_s = time.monotonic()
        leader = self._leader
        if leader is None or leader.expires_at_s <= now_s:
            leader = self._leader = _Leader(candidate_id, next(self._fencing_tokens), now_s)
        if leader.candidate_id != candidate_id:
            return None
        leader.expires_at_s = now_s + ttl_s
        return leader.fencing_token

    def resign(self, candidate_id: str) -> None:
        if self._leader is not None and self._leader.candidate_id == candidate_id:
            self._leader = None

    def broadcast(self, broadcast: LoadBroadcast) -> bool:
        leader = self._leader
        if leader is None or leader.expires_at_s <= time.monotonic():
            return False
        if leader.fencing_token != broadcast.fencing_token:
            return False
        for membership in self._members:
            if isinstance(membership, MonitoredMembership):
                membership.take_in(broadcast)
                if membership in self._hears_heartbeats:
                    self._hears_heartbeats.remove(membership)
        return True

    def request(self, request_id: str) -> RequestClaim | None:
        record, expires_at_s = self._requests.get(request_id, (None, 0.0))
        if expires_at_s > time.monotonic():
            return record
        # Delete the claim for good: a clock that jumps back must not revive it.
        self._requests.pop(request_id, None)
        return None

    def put_request(self, claim: RequestClaim, ttl_s: float) -> None:
        self._requests[claim.request_id] = (claim, time.monotonic() + ttl_s)

    def update_request(self, claim: RequestClaim) -> None:
        """Store the hint of a claim that is still held; claims are equal if only their hints differ."""
        if self.request(claim.request_id) == claim:
            self._requests[claim.request_id] = (claim, self._requests[claim.request_id][1])

    def remove_request(self, request_id: str) -> None:
        del self._requests[request_id]

    def requests(self) -> tuple[RequestClaim, ...]:
        """Return the claims of all requests in flight."""
        found = (self.request(request_id) for request_id in tuple(self._requests))
        return tuple(claim for claim in found if claim is not None)


class MemoryStore:
    def __init__(self, cluster: MemoryCluster, follow: ViewSource = ViewSource.HEARTBEATS) -> None:
        self.cluster = cluster
        kind = MonitoredMembership if follow is ViewSource.BROADCASTS else Membership
        self._membership = kind(time.monotonic)
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.cluster.join(self._membership)
        self._ticking = asyncio.create_task(self._tick(), name="memory store: leases")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ticking is not None, "left without being entered"
        self.cluster.leave(self._membership)
        self._ticking.cancel()
        await asyncio.wait([self._ticking])

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        if self.cluster.is_away:
            return HeartbeatAnswer()
        if self.cluster.refuses_heartbeats:
            self._membership.store_lost()
            return HeartbeatAnswer()
        self._membership.store_returned()
        return self.cluster.heartbeat(record, load)

    async def deregister(self, record: InstanceRecord) -> None:
        if not self.cluster.lost:
            self.cluster.deregister(record)

    def view(self) -> ClusterView:
        return self._membership.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        return await self._membership.wait_for_change(timeout_s)

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        return None if self.cluster.lost else self.cluster.campaign(candidate_id, ttl_s)

    async def resign(self, candidate_id: str) -> None:
        if not self.cluster.lost:
            self.cluster.resign(candidate_id)

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        return not self.cluster.lost and self.cluster.broadcast(broadcast)

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        if self.cluster.lost:
            return None
        holder = self.cluster.request(claim.request_id)
        if holder is not None and claim.is_later_session_of(holder):
            claim = replace(claim, hint=holder.hint)
        elif holder is not None and self.cluster.is_registered(holder.router_id, holder.router_incarnation):
            return holder
        self.cluster.put_request(claim, ttl_s)
        return None

    async def find_request(self, request_id: str) -> RequestClaim | None:
        return None if self.cluster.lost else self.cluster.request(request_id)

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        if not self.cluster.lost:
            for claim in claims:
                self.cluster.update_request(claim)

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        if self.cluster.lost:
            return False
        for claim in claims:
            if self.cluster.request(claim.request_id) == claim:
                self.cluster.remove_request(claim.request_id)
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            membership = self._membership
            is_led = isinstance(membership, MonitoredMembership) and not membership.is_silent()
            if not self.cluster.is_away and not is_led:
                self.cluster.follow_heartbeats(membership)
                membership.tick()
