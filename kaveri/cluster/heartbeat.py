"""Heartbeats that keep an instance registered: frequent while its load changes, otherwise as the lease requires. A
heartbeat with a report of the load has the next number; one that only renews the lease repeats the last number."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, InstanceRecord
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

_MIN_PAUSE_S = 0.01
"""Min interval between heartbeats, even with beat_now() and note_work(): at most a hundred per second."""
_GATHER_S = 0.005
"""Delay of a heartbeat after beat_now(). Several changes share it, and the answer to an order is sent before all other
processes handle the new load."""
_LEASE_PARTS = 3
"""Heartbeats per lease while the load does not change."""
_MAX_PAUSE_S = 1.0
"""Max interval between heartbeats, for long leases: a store that lost its state learns all instances within it."""
_REPORTS = 2
"""Reports sent after a change. UnconfirmedWork counts work sent to an instance until the second report after it."""


class Heartbeat:
    """Sends the heartbeats of one run of an instance's process (incarnation). Not thread-safe."""

    def __init__(
        self, store: ClusterStore, record: InstanceRecord, load: Callable[[], InstanceLoad], interval_s: float = 0.1
    ) -> None:
        """load: returns the load, sequence_number ignored. interval_s: between heartbeats while the load changes."""
        self._store = store
        self._record = record
        self._load = load
        self._interval_s = interval_s
        self._reported = InstanceLoad()
        """Load in the last heartbeat."""
        self._unreported = _REPORTS
        """Reports still to be sent, each with a new number."""
        self._renew_at_s = 0.0
        self._pause_s = interval_s
        """Time until the load is checked again; doubles while it does not change."""
        self._due = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Keep the instance registered until stop(), then deregister it. If cancelled, the lease expires by itself.
        Raises ConfigError when another process has registered with the same instance id: the older one must end."""
        while not self._stopping:
            self._due.clear()
            await self._beat()
            await asyncio.sleep(min(_MIN_PAUSE_S, self._interval_s))
            try:
                async with asyncio.timeout(max(0.0, self._pause_s - _MIN_PAUSE_S)):
                    await self._due.wait()
                    await asyncio.sleep(_GATHER_S)
            except TimeoutError:
                pass
        await self._store.deregister(self._record)

    def beat_now(self) -> None:
        """Send a heartbeat at once, after a load change that others should know. Cheap; may be called often."""
        self._unreported = _REPORTS
        self._due.set()

    def note_work(self) -> None:
        """Send the load again soon even if unchanged: work may have come and gone. Cheap; may be called often."""
        self._unreported = _REPORTS
        if self._pause_s > self._interval_s:
            self._due.set()

    def stop(self) -> None:
        self._stopping = True
        self._due.set()

    async def _beat(self) -> None:
        number, now_s = self._reported.sequence_number, time.monotonic()
        load = replace(self._load(), sequence_number=number)
        if load != self._reported:
            self._unreported = _REPORTS
        if self._unreported:
            self._unreported -= 1
            load = replace(load, sequence_number=number + 1)
            self._pause_s = self._interval_s
        elif now_s + self._interval_s <= self._renew_at_s:
            self._pause_s = min(2 * self._pause_s, self._renew_at_s - now_s)
            return
        renewal_s = min(self._record.lease_ttl_s / _LEASE_PARTS, _MAX_PAUSE_S)
        self._renew_at_s = now_s + renewal_s
        if not self._unreported:
            self._pause_s = max(self._interval_s, min(2 * self._pause_s, renewal_s))
        self._reported = load
        answer = await self._store.heartbeat(self._record, load)
        if answer.holds and answer.other is None:
            return
        address = answer.other.address if answer.other is not None else "an unknown address"
        if answer.holds:
            get_logger().warning(
                "instance_id_taken_over", former_address=address, effect="if the former process still runs, it ends now"
            )
            return
        get_logger().error("instance_id_lost", new_address=address)
        instance_id = self._record.instance_id
        reason = f"another process has registered as {instance_id!r}, at {address}; this one ends. Ids must be unique"
        raise ConfigError("--instance-id", reason)
