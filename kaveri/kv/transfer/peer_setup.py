"""The values that all peers of one sender share."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory
from kaveri.kv.transfer.push import LocalDoneListener, PushEvent
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport

Route = tuple[Transport, KvEndpoint]


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """Pool, limits and callbacks that a sender passes to each of its peers."""

    pool: KvPool
    digest: DigestFactory
    idle_s: float
    credit_timeout_s: float
    lock: threading.Lock
    """The sender's lock."""
    reporter: Reporter[PushEvent]
    on_local_done: LocalDoneListener | None
    """Called without the lock."""
    forget_push: Callable[[bytes], None]
    """Called under the lock when the push has ended."""
