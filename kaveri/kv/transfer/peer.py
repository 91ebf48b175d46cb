"""A sender's side of each receiver: a thread, which runs the queued operations of pushes, and its connection."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory
from kaveri.kv.transfer.flow import PeerFlow
from kaveri.kv.transfer.outgoing import Connection, Push, QueuedWrite, Turns
from kaveri.kv.transfer.push import (
    IsIntact,
    LocalDoneListener,
    OpenPush,
    PushAccepted,
    PushExtended,
    PushFailed,
    PushListener,
    PushMarked,
)
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import LinkLost, Transport
from kaveri.telemetry.logs import get_logger

Route = tuple[Transport, KvEndpoint]
PeerKey = tuple[tuple[KvEndpoint, ...], int]
"""A receiver's addresses and epoch; restarted at the same addresses, it is another peer."""

_QUANTUM_BYTES = 4 << 20
"""Bytes that a push may send before other pushes have their turn; except for nixl and gloo: one write."""


_RETRY_S = 0.25
_RETRY_MAX_S = 4.0
"""First delay, doubled each time, before an unreachable receiver is notified again of pushes that were given up."""


@dataclass(eq=False, slots=True)
class _UnsentAborts:
    """Given-up pushes whose receiver is not notified yet: it reserves blocks for them until then, or until their
    tickets expire. Used on the peer's thread only."""

    pushes: list[Push] = field(default_factory=list)
    retry_at_s: float = 0.0
    retry_s: float = _RETRY_S


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options of a KvSender that apply to each receiver. Its listeners are called without the lock."""

    digest: DigestFactory
    idle_s: float
    credit_timeout_s: float
    on_local_done: LocalDoneListener | None
    is_intact: IsIntact | None


@dataclass(eq=False, slots=True)
class SenderState:
    """State that a KvSender shares with its receivers' threads. Guarded by the lock.

    Must not refer to the sender: its pool is freed with the last reference to it, not by the garbage collector.
    """

    pool: KvPool
    options: PeerOptions
    reporter: Reporter
    pushes: dict[bytes, OpenPush] = field(default_factory=dict)
    """Pushes of all kinds, by transfer id."""
    peers: "dict[PeerKey, Peer]" = field(default_factory=dict)
    threads: set[threading.Thread] = field(default_factory=set)
    """Threads of peers, including those that are ending."""
    credit_waits: int = 0
    credit_wait_s: float = 0.0
    """See SenderFlow."""
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Peer:
    """One receiver, on the sending side: the queues of its pushes, and the thread that runs them over one connection.

    A push's operations run in order. Pushes take turns by bytes, so that a short one does not wait for all of a long
    one. The queues are bounded by the tickets' block counts.
    """

    def __init__(self, state: SenderState, key: PeerKey, routes: Sequence[Route]) -> None:
        self.pushes: dict[bytes, Push] = {}
        self.lock = state.lock
        self.reporter = state.reporter
        self._state = state
        self._key = key
        self._routes = routes
        self._block_bytes = state.pool.layout.block_bytes
        self._connection: Connection | None = None
        # The push whose source blocks the thread may read now.
        self._reading: Push | None = None
        # Pushes with something queued.
        self._turns: Turns[Push] = Turns(_QUANTUM_BYTES)
        # Time at which everything queued began to wait for credit, or at which credit last came meanwhile [s].
        self._waiting_since_s: float | None = None
        self._unsent_aborts = _UnsentAborts()
        # Time at which the last push ended.
        self._idle_since_s = time.monotonic()
        # Actions that skip the fair queue: at most an abort for each push, and the closing of a lost connection.
        self._urgent: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition(self.lock)
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="kv-send", daemon=True)

    # The caller holds the lock.

    def open(self, ticket: Ticket, listener: PushListener) -> None:
        """Begin a push to this receiver."""
        push = Push(ticket, self._state.options.digest(), listener, self, self._state.options.is_intact)
        self.pushes[ticket.transfer_id] = self._state.pushes[ticket.transfer_id] = push
        push.queue.append(partial(self._open, push))
        self.on_queued(push)

    def flow(self) -> PeerFlow:
        """Return a flow-control snapshot of the pushes to this receiver."""
        connection = self._connection
        pushes = self.pushes.values()
        live = [push.progress for push in pushes if push.stopped is None]
        return PeerFlow(
            address=(connection.endpoint if connection is not None else self._routes[0][1]).address,
            transport=connection.transport.label if connection is not None else "",
            push_count=len(pushes),
            block_count=sum(len(push.ticket.block_ids) for push in pushes),
            queued_bytes=sum(sum(each.queued) * self._block_bytes - each.kv_bytes for each in live),
            unaccepted_bytes=sum(push.progress.kv_bytes for push in pushes),
            credit_bytes=connection.credit_bytes if connection is not None else 0,
            is_waiting=self._waiting_since_s is not None,
        )

    def close(self) -> None:
        """Ask the thread to end, and break off the connection. The caller holds the lock."""
        self._closing = True
        self._changed.notify()
        if self._connection is not None:
            self._connection.link.break_off()

    def stop(self, push: Push, reason: str) -> None:
        """Stop a push; it fails as soon as its source blocks are not being read. The caller holds the lock."""
        if push.stopped is None and push.ticket.transfer_id in self.pushes:
            push.stopped = reason
            push.queue.clear()
            self._turns.leave(push)
            self._changed.notify()
            if push is not self._reading:
                self._fail(push, reason)

    def forget(self, push: Push) -> None:
        """Remove a push that has ended. The caller holds the lock."""
        del self.pushes[push.ticket.transfer_id], self._state.pushes[push.ticket.transfer_id]
        push.queue.clear()
        self._turns.leave(push)
        # The thread is not woken: it has nothing to do for it.
        self._idle_since_s = time.monotonic()

    def credited(self) -> None:
        """Record that the receiver has given credit (bytes that may be sent), even if less than a block."""
        if self._waiting_since_s is not None:
            self._waiting_since_s = time.monotonic()
            self._changed.notify()

    def on_queued(self, push: Push) -> None:
        self._turns.join(push)
        self._changed.notify()

    def give_up(self, push: Push, reason: str) -> None:
        if push.ticket.transfer_id in self.pushes:
            self.stop(push, reason)
            # Before what other transfers have queued: the receiver's blocks wait for it.
            self._urgent.append(partial(self._abort, push))
            self._changed.notify()

    def _fail(self, push: Push, reason: str) -> None:
        self.forget(push)
        self.reporter.report(partial(push.listener, PushFailed(push.ticket.transfer_id, reason)))

    def _leave(self) -> None:
        if self._state.peers.get(self._key) is self:
            del self._state.peers[self._key]

    def _next_action(self) -> Callable[[], None] | None:
        # None: the thread is to end.
        with self.lock:
            while not self._closing:
                if self._urgent:
                    return self._urgent.popleft()
                if self._unsent_aborts.pushes and time.monotonic() >= self._unsent_aborts.retry_at_s:
                    return self._send_aborts
                if (push := self._turns.next(self._can_go)) is not None:
                    return self._next_of(push)
                if self._turns:
                    if (lose := self._wait_for_credit()) is not None:
                        return lose
                    continue
                self._waiting_since_s = None
                if not self._changed.wait(self._rest_s()) and self._is_idle():
                    # In the same critical section as the check: no push may find this peer and queue after its end.
                    self._leave()
                    return None
            return None

    def _rest_s(self) -> float:
        if self._unsent_aborts.pushes:
            return max(0.0, self._unsent_aborts.retry_at_s - time.monotonic())
        if self.pushes:
            return self._state.options.idle_s
        return max(0.0, self._idle_since_s + self._state.options.idle_s - time.monotonic())

    def _is_idle(self) -> bool:
        has_work = self._urgent or self._turns or self.pushes or self._unsent_aborts.pushes
        return not has_work and time.monotonic() - self._idle_since_s >= self._state.options.idle_s

    def _can_go(self, push: Push) -> bool:
        if not isinstance(push.queue[0], QueuedWrite):
            return True
        assert push.connection is not None, "a write of a push that is not open"
        return push.connection.credit_bytes >= self._block_bytes

    def _next_of(self, push: Push) -> Callable[[], None]:
        # As much of a write as there is credit for, with the next layers' writes of the same blocks: a frame and a
        # system call for each layer would cost more than the bytes of a short push.
        head = push.queue[0]
        if not isinstance(head, QueuedWrite):
            push.queue.popleft()
            if not push.queue:
                self._turns.leave(push)
            return head
        connection = push.connection
        assert connection is not None
        # At most half of the window, so that credit for the next write returns while this one is in flight.
        write_bytes = min(connection.transport.capabilities.write_bytes, connection.window_bytes // 2)
        room = min(max(1, write_bytes // self._block_bytes), connection.credit_bytes // self._block_bytes)
        layers, index, blocks = push.take_write(room, min(room, _QUANTUM_BYTES // self._block_bytes))
        byte_count = len(layers) * len(blocks) * self._block_bytes
        connection.credit_bytes -= byte_count
        self._turns.charge(push, byte_count)
        if not push.queue:
            self._turns.leave(push)
        self._reading = push
        self._waiting_since_s = None
        return partial(self._write, push, connection, layers, index, blocks)

    def _wait_for_credit(self) -> Callable[[], None] | None:
        # A receiver that gives none until the timeout is presumed dead.
        now_s, timeout_s = time.monotonic(), self._state.options.credit_timeout_s
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
            self._state.credit_waits += 1
        left_s = self._waiting_since_s + timeout_s - now_s
        if left_s > 0:
            self._changed.wait(left_s)
            self._state.credit_wait_s += time.monotonic() - now_s
            return None
        assert self._connection is not None
        return partial(self.lose, self._connection, f"no credit came for {timeout_s:g} s")

    # Any thread, without the lock.

    def lose(self, connection: Connection, reason: str) -> None:
        """Record the loss of a connection, and fail its pushes. Any thread, without the lock."""
        with self.lock:
            if connection.lost_reason is not None:
                return
            connection.lost_reason = reason
            for push in tuple(self.pushes.values()):
                if push.connection is connection:
                    self.stop(push, f"connection lost: {reason}")
            self._urgent.append(self._drop_lost)
            self._changed.notify()

    # The thread.

    def _run(self) -> None:
        reason = "the sender was ended"
        try:
            while (action := self._next_action()) is not None:
                try:
                    action()
                except LinkLost as error:
                    assert self._connection is not None
                    self.lose(self._connection, error.reason)
                # It keeps a push alive.
                del action
            reason = "the sender was closed"
        except Exception as error:
            # Not visible to other code: all pushes of this receiver end with this thread.
            reason = f"the sender broke: {error!r}"
            get_logger().exception("kv_peer_failed", address=self._routes[0][1].address)
        finally:
            with self.lock:
                self._leave()
                self._reading = None
                for push in tuple(self.pushes.values()):
                    self.stop(push, reason)
            try:
                self._drop()
            finally:
                with self.lock:
                    # Actions and pushes keep this peer alive.
                    self._urgent.clear()
                    self._unsent_aborts.pushes.clear()
                    self._state.threads.remove(self.thread)

    def _open(self, push: Push) -> None:
        if push.is_stopped():
            return
        self._drop_lost()
        self._drop_worn()
        connection = self._connection or self._connect()
        if connection is None:
            return
        with self.lock:
            push.connection = connection
            if connection.lost_reason is not None:
                # Lost since it was made: its listener did not find this push on it.
                self.stop(push, f"connection lost: {connection.lost_reason}")
                return
            if push.ticket.is_open and not connection.link.has_marks:
                self.stop(push, "the receiver's version of the KV protocol has no open transfers")
                return
        connection.link.open(push.ticket)

    def _write(
        self, push: Push, connection: Connection, layers: range, first_index: int, blocks: tuple[int, ...]
    ) -> None:
        block_count = len(layers) * len(blocks)
        charged_count = block_count
        digest = push.digest if connection.link.wants_digest else None
        try:
            charged_count = connection.link.write(push.ticket, layers, first_index, blocks, digest, push.is_stopped)
        finally:
            with self.lock:
                self._reading = None
                connection.credit_bytes += (block_count - charged_count) * self._block_bytes
                push.progress.kv_bytes += charged_count * self._block_bytes
                if push.stopped is not None:
                    self._fail(push, push.stopped)
        if push.is_stopped():
            self._abort(push)
        elif (on_local_done := self._state.options.on_local_done) is not None:
            for layer in layers:
                on_local_done(push.ticket.transfer_id, layer, blocks)

    def _abort(self, push: Push) -> None:
        connection = push.connection
        if connection is None:
            self._unsent_aborts.pushes.append(push)
            if time.monotonic() >= self._unsent_aborts.retry_at_s:
                self._send_aborts()
        elif connection is self._connection and connection.lost_reason is None:
            connection.link.abort(push.ticket, keep_marked=push.progress.keeps_marked)

    def _send_aborts(self) -> None:
        # Opened only to be given up: otherwise the receiver frees their blocks only when their tickets end.
        unsent, now_s = self._unsent_aborts, time.monotonic()
        unsent.pushes = [push for push in unsent.pushes if push.expires_at_s > now_s]
        self._drop_lost()
        try:
            connection = (self._connection or self._connect()) if unsent.pushes else None
            while connection is not None and unsent.pushes:
                ticket = unsent.pushes[-1].ticket
                connection.link.open(ticket)
                connection.link.abort(ticket)
                unsent.pushes.pop()
        finally:
            if unsent.pushes:
                unsent.retry_at_s = time.monotonic() + unsent.retry_s
                unsent.retry_s = min(2 * unsent.retry_s, _RETRY_MAX_S)
            else:
                unsent.retry_at_s, unsent.retry_s = 0.0, _RETRY_S

    def _connect(self) -> Connection | None:
        # If no route works, all waiting pushes fail: each alone would wait again.
        problems: list[str] = []
        for transport, endpoint in self._routes:
            connection = Connection(transport, endpoint)
            try:
                answers = _Answers(self, connection)
                connection.link = transport.connect(endpoint, self._key[1], self._state.pool, answers)
            except LinkLost as error:
                problems.append(error.reason)
                continue
            with self.lock:
                self._connection = connection
                # The predecessor's wait for credit does not count against it.
                self._waiting_since_s = None
                self._unsent_aborts.retry_at_s = 0.0
                if self._closing:
                    connection.link.break_off()
            where = {"transport": transport.label, "address": endpoint.address}
            get_logger().info("kv_peer_connected", **where, passed_over=problems)
            return connection
        with self.lock:
            for push in tuple(self.pushes.values()):
                self.stop(push, f"cannot connect: {'; '.join(problems)}")
        get_logger().warning("kv_peer_unreachable", reasons=problems)
        return None

    def _drop_lost(self) -> None:
        if self._connection is not None and self._connection.lost_reason is not None:
            self._drop()

    def _drop_worn(self) -> None:
        connection = self._connection
        if connection is not None and connection.link.is_worn:
            with self.lock:
                is_used = any(push.connection is connection for push in self.pushes.values())
            if not is_used:
                self._drop()

    def _drop(self) -> None:
        with self.lock:
            # Before its descriptor is given back, so close() cannot shut down a reused one.
            connection, self._connection = self._connection, None
        if connection is not None:
            link = connection.link
            # The link refers to its listener, and both to the sender and its pool, until the next garbage collection.
            del connection.link
            link.close()


@dataclass(frozen=True, slots=True)
class _Answers:
    """Applies the receiver's messages over one connection to its pushes. Called on the link's thread."""

    _peer: Peer
    _connection: Connection

    def credited(self, byte_count: int, window_bytes: int) -> None:
        with self._peer.lock:
            self._connection.credit_bytes += byte_count
            self._connection.window_bytes = window_bytes
            self._peer.credited()

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        peer = self._peer
        with peer.lock:
            push = self._live(transfer_id)
            if push is None:
                return
            if rejection is not None:
                peer.stop(push, f"rejected: {rejection}")
                return
            if not push.is_finished or push.queue:
                peer.stop(push, "accepted before its end")
                return
            peer.forget(push)
        accepted = PushAccepted(transfer_id, push.progress.kv_bytes, self._connection.transport.label)
        peer.reporter.tell(partial(push.listener, accepted))

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        with self._peer.lock:
            push = self._live(transfer_id)
            if push is None:
                return
            if not push.take_mark(block_count):
                self._peer.stop(push, f"block {block_count} was marked by the receiver, and not by this side")
                return
            # Under the lock: no end may be reported before it.
            self._peer.reporter.report(partial(push.listener, PushMarked(transfer_id, block_count)))

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        with self._peer.lock:
            push = self._live(transfer_id)
            if push is None:
                return
            ticket = push.ticket
            if not ticket.is_open or first_index != len(ticket.block_ids):
                self._peer.stop(push, f"extended at block {first_index}, not at {len(ticket.block_ids)}")
                return
            push.ticket = replace(ticket, block_ids=(*ticket.block_ids, *block_ids))
            extended = PushExtended(transfer_id, len(push.ticket.block_ids))
            self._peer.reporter.report(partial(push.listener, extended))

    def lost(self, reason: str) -> None:
        self._peer.lose(self._connection, reason)

    def _live(self, transfer_id: bytes) -> Push | None:
        # None if the push is not on this connection, or was stopped.
        push = self._peer.pushes.get(transfer_id)
        if push is None or push.connection is not self._connection or push.stopped is not None:
            return None
        return push
