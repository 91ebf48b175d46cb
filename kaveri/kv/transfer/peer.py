"""A sender's side of one receiver: the queues of its pushes, the thread that runs them, and its connection."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kaveri.errors import InvalidArgument, TransferFailed
from kaveri.kv.transfer.actions import (
    DropLost,
    LoseConnection,
    PeerAction,
    SendAbort,
    SendEnd,
    SendMark,
    SendOpening,
    SendWrite,
    TellUntold,
)
from kaveri.kv.transfer.connection import Connection
from kaveri.kv.transfer.flow import PeerFlow
from kaveri.kv.transfer.outgoing import Ending, Marking, Push, PushOpening, QueuedWrite, Untold
from kaveri.kv.transfer.peer_setup import PeerSetup, Route
from kaveri.kv.transfer.push import PushAccepted, PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import LinkLost
from kaveri.kv.transfer.turns import Turns
from kaveri.telemetry.logs import get_logger

_QUANTUM_BYTES = 4 << 20
"""Bytes that a push may send before other pushes have their turn; except for nixl and gloo: one write."""


class PeerOwner(Protocol):
    """Keeps peers. Called under the sender's lock."""

    def forget(self, peer: "Peer") -> None:
        """Remove a peer, so that it takes no more work. Idempotent."""

    def ended(self, peer: "Peer") -> None:
        """Record the end of a peer's thread; its last call."""


class Peer:
    """One receiver: the queues of its pushes, and the thread that runs them over one connection at a time.

    Within a push everything goes in order. Pushes take turns by bytes, so that a short one does not wait for all of a
    long one; the end of a push waits for no turn. The queues are bounded by the tickets.
    """

    def __init__(
        self, setup: PeerSetup, owner: PeerOwner, key: tuple[object, ...], routes: Sequence[Route], epoch: int
    ) -> None:
        self.key = key
        self._epoch = epoch
        self.credit_waits = 0
        self.credit_wait_s = 0.0
        self._setup = setup
        self._owner = owner
        self._lock = setup.lock
        self._block_bytes = setup.pool.layout.block_bytes
        self._pushes: dict[bytes, Push] = {}
        self._routes = routes
        self._connection: Connection | None = None
        # Pushes with something queued.
        self._turns: Turns[Push] = Turns(_QUANTUM_BYTES)
        # Time at which everything queued began to wait for credit, or at which credit last came meanwhile [s].
        self._waiting_since_s: float | None = None
        self._untold = Untold()
        # Time at which the last push ended.
        self._idle_since_s = time.monotonic()
        # Actions that skip the fair queue: at most an abort for each push, and the closing of a lost connection.
        self._urgent: deque[PeerAction] = deque()
        self._changed = threading.Condition(setup.lock)
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="kv-send", daemon=True)

    # Under the sender's lock.

    def start(self) -> None:
        """Start the thread. Call once and before anything else. Raises TransferFailed; the peer is unusable then."""
        try:
            self.thread.start()
        except RuntimeError as error:
            raise TransferFailed(f"no thread for a connection: {error}") from error

    def open(self, ticket: Ticket) -> Push:
        """Begin a push."""
        push = Push(ticket, self._setup.digest)
        self._pushes[push.transfer_id] = push
        self._queue_changed(push)
        return push

    def write(self, push: Push, layer: int, first_index: int, blocks: tuple[int, ...]) -> None:
        """Queue blocks of one layer, at least one, after the earlier ones. Ignored if the push was given up.

        Raises InvalidArgument for more blocks than the ticket has.
        """
        if push.stopped is None:
            assert first_index == push.queued[layer], "a block was left out or written twice"
            end, granted_count = first_index + len(blocks), len(push.ticket.block_ids)
            if end > granted_count:
                raise InvalidArgument("first_index", f"{first_index} with {len(blocks)} blocks", f"in {granted_count}")
            push.queued[layer] = end
            push.queue.append(QueuedWrite(layer, first_index, blocks))
            self._queue_changed(push)

    def mark(self, push: Push, block_count: int, note: bytes) -> None:
        """Queue a mark of an open push. Ignored if the push was given up, and after the end mark.

        Raises InvalidArgument unless block_count is above that of the mark before and so many blocks are queued.
        """
        if push.stopped is None and not push.is_ending:
            assert push.ticket.is_open, "only an open push is marked"
            low, high = push.marks.queued_count, min(push.queued)
            if not low < block_count <= high:
                raise InvalidArgument("block_count", block_count, f"above {low}, the last mark, and at most {high}")
            push.marks.queued_count = block_count
            push.queue.append(Marking(block_count, note))
            self._queue_changed(push)

    def finish(self, push: Push, note: bytes) -> None:
        """Queue the end mark. Ignored if the push was given up, and the second time."""
        if push.stopped is None and not push.is_ending:
            push.is_ending = True
            push.queue.append(Ending(note))
            self._queue_changed(push)

    def abort(self, push: Push, reason: str, *, keep_marked: bool) -> None:
        """Give a push up, and notify the receiver. Idempotent."""
        if push.stopped is None:
            push.keeps_marked = keep_marked
            self._stop(push, reason)
            # Before what other transfers have queued: the receiver's blocks wait for it.
            self._urgent.append(SendAbort(push))
            self._changed.notify()

    def flow(self) -> PeerFlow:
        """Snapshot of this receiver's pushes."""
        connection = self._connection
        pushes = self._pushes.values()
        queued_count = sum(sum(push.queued) for push in pushes if push.stopped is None)
        written_bytes = sum(push.kv_bytes for push in pushes if push.stopped is None)
        return PeerFlow(
            address=(connection.endpoint if connection is not None else self._routes[0][1]).address,
            transport=connection.transport.label if connection is not None else "",
            push_count=len(pushes),
            block_count=sum(len(push.ticket.block_ids) for push in pushes),
            queued_bytes=queued_count * self._block_bytes - written_bytes,
            unaccepted_bytes=sum(push.kv_bytes for push in pushes),
            credit_bytes=connection.credit_bytes if connection is not None else 0,
            is_waiting=self._waiting_since_s is not None,
        )

    def close(self) -> None:
        """Make the thread end soon."""
        self._closing = True
        self._changed.notify()
        if self._connection is not None:
            self._connection.link.break_off()

    # Callbacks of the link, on its own thread.

    def take_credit(self, connection: Connection, byte_count: int, window_bytes: int) -> None:
        """Record credit given to the connection, even if it is too little for a block."""
        with self._lock:
            connection.credit_bytes += byte_count
            connection.window_bytes = window_bytes
            if self._waiting_since_s is not None:
                self._waiting_since_s = time.monotonic()
                self._changed.notify()

    def take_answer(self, connection: Connection, transfer_id: bytes, rejection: str | None) -> None:
        """Record that the receiver has accepted or rejected a push."""
        with self._lock:
            push = self._live(connection, transfer_id)
            if push is None:
                return
            if rejection is not None:
                self._stop(push, f"rejected: {rejection}")
                return
            if not push.is_ended:
                self._stop(push, "accepted before its end")
                return
            self._forget(push)
        self._setup.reporter.tell(PushAccepted(transfer_id, push.kv_bytes, connection.transport.label))

    def take_mark(self, connection: Connection, transfer_id: bytes, block_count: int) -> None:
        """Record that the receiver keeps what was marked."""
        with self._lock:
            push = self._live(connection, transfer_id)
            if push is None:
                return
            if not push.marks.answered(block_count):
                self._stop(push, f"block {block_count} was marked by the receiver, and not by this side")
                return
            push.expires_at_s = time.monotonic() + push.ticket.expires_in_s
            # Under the lock: no end may be reported before it.
            self._setup.reporter.report(PushMarked(transfer_id, block_count))

    def take_extension(
        self, connection: Connection, transfer_id: bytes, first_index: int, block_ids: Sequence[int]
    ) -> None:
        """Record that the receiver has given a push more destination blocks."""
        with self._lock:
            push = self._live(connection, transfer_id)
            if push is None:
                return
            ticket = push.ticket
            if not ticket.is_open or first_index != len(ticket.block_ids):
                self._stop(push, f"extended at block {first_index}, not at {len(ticket.block_ids)}")
                return
            push.ticket = replace(ticket, block_ids=(*ticket.block_ids, *block_ids))
            self._setup.reporter.report(PushExtended(transfer_id, len(push.ticket.block_ids)))

    def lose(self, connection: Connection, reason: str) -> None:
        """Record that the connection and its pushes are lost. Any thread, without the lock."""
        with self._lock:
            if connection.lost_reason is not None:
                return
            connection.lost_reason = reason
            for push in tuple(self._pushes.values()):
                if push.connection is connection:
                    self._stop(push, f"connection lost: {reason}")
            self._urgent.append(DropLost())
            self._changed.notify()

    # Under the lock, too.

    def _live(self, connection: Connection, transfer_id: bytes) -> Push | None:
        """Return the push with this id on this connection, unless it was given up."""
        push = self._pushes.get(transfer_id)
        if push is None or push.connection is not connection or push.stopped is not None:
            return None
        return push

    def _queue_changed(self, push: Push) -> None:
        self._turns.join(push)
        self._changed.notify()

    def _stop(self, push: Push, reason: str) -> None:
        """Send no more of this push; it fails as soon as its blocks are not read."""
        if push.stopped is None and push.transfer_id in self._pushes:
            push.stopped = reason
            push.queue.clear()
            self._turns.leave(push)
            self._changed.notify()
            if not push.is_reading:
                self._fail(push, reason)

    def _fail(self, push: Push, reason: str) -> None:
        self._forget(push)
        self._setup.reporter.report(PushFailed(push.transfer_id, reason))

    def _forget(self, push: Push) -> None:
        del self._pushes[push.transfer_id]
        push.queue.clear()
        self._turns.leave(push)
        # The thread is not woken: it has nothing to do for it.
        self._idle_since_s = time.monotonic()
        self._setup.forget_push(push.transfer_id)

    def _next_action(self) -> PeerAction | None:
        """Wait for the next action. None: the thread is to end."""
        with self._lock:
            while not self._closing:
                if self._urgent:
                    return self._urgent.popleft()
                if self._untold.is_due():
                    return TellUntold()
                if (push := self._turns.next(self._can_go)) is not None:
                    return self._next_of(push)
                if self._turns:
                    if (lose := self._wait_for_credit()) is not None:
                        return lose
                    continue
                self._waiting_since_s = None
                if not self._changed.wait(self._rest_s()) and self._is_idle():
                    # In the same critical section as the check: no push may find this peer and queue after its end.
                    self._owner.forget(self)
                    return None
            return None

    def _rest_s(self) -> float:
        """Seconds for which there may be nothing to do."""
        if self._untold.pushes:
            return self._untold.rest_s()
        if self._pushes:
            return self._setup.idle_s
        return max(0.0, self._idle_since_s + self._setup.idle_s - time.monotonic())

    def _is_idle(self) -> bool:
        has_work = self._urgent or self._turns or self._pushes or self._untold.pushes
        return not has_work and time.monotonic() - self._idle_since_s >= self._setup.idle_s

    def _can_go(self, push: Push) -> bool:
        if not isinstance(push.queue[0], QueuedWrite):
            return True
        assert push.connection is not None, "a write of a push that is not open"
        return push.connection.credit_bytes >= self._block_bytes

    def _next_of(self, push: Push) -> PeerAction:
        action: PeerAction
        match push.queue[0]:
            case PushOpening():
                push.queue.popleft()
                action = SendOpening(push)
            case Marking(block_count, note):
                push.queue.popleft()
                action = SendMark(push, block_count, note)
            case Ending(note):
                push.queue.popleft()
                action = SendEnd(push, note)
            case QueuedWrite():
                action = self._take_write(push)
        if not push.queue:
            self._turns.leave(push)
        return action

    def _take_write(self, push: Push) -> SendWrite:
        """Take as much of the next write as there is credit for, and the following layers' writes of the same blocks: a
        frame and a system call for each layer would cost more than the bytes of a short push."""
        connection = push.connection
        assert connection is not None
        room = connection.room(self._block_bytes)
        layers, index, blocks = push.take_write(room, min(room, _QUANTUM_BYTES // self._block_bytes))
        byte_count = len(layers) * len(blocks) * self._block_bytes
        connection.credit_bytes -= byte_count
        self._turns.charge(push, byte_count)
        push.is_reading = True
        self._waiting_since_s = None
        return SendWrite(push, connection, layers, index, blocks)

    def _wait_for_credit(self) -> LoseConnection | None:
        """Wait while everything queued needs credit. A receiver that gives none until the timeout is presumed dead."""
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
            self.credit_waits += 1
        left_s = self._waiting_since_s + self._setup.credit_timeout_s - now_s
        if left_s > 0:
            self._changed.wait(left_s)
            self.credit_wait_s += time.monotonic() - now_s
            return None
        assert self._connection is not None
        return LoseConnection(self._connection, f"no credit came for {self._setup.credit_timeout_s:g} s")

    # The thread.

    def _run(self) -> None:
        reason = "the sender was ended"
        try:
            while (action := self._next_action()) is not None:
                try:
                    self._do(action)
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
            with self._lock:
                self._owner.forget(self)
                for push in tuple(self._pushes.values()):
                    push.is_reading = False
                    self._stop(push, reason)
            try:
                self._drop()
            finally:
                with self._lock:
                    # Actions keep this peer alive.
                    self._urgent.clear()
                    self._owner.ended(self)

    def _do(self, action: PeerAction) -> None:
        match action:
            case SendWrite():
                self._write(action)
            case SendOpening(push):
                self._open(push)
            case SendMark():
                self._mark(action)
            case SendEnd(push, note):
                self._end(push, note)
            case SendAbort(push):
                self._abort(push)
            case LoseConnection(connection, reason):
                self.lose(connection, reason)
            case DropLost():
                self._drop_lost()
            case TellUntold():
                self._tell_untold()

    def _open(self, push: Push) -> None:
        if push.is_stopped():
            return
        self._drop_lost()
        self._drop_worn()
        connection = self._connection or self._connect()
        if connection is None:
            return
        with self._lock:
            push.connection = connection
            if connection.lost_reason is not None:
                # Lost since it was made: its listener did not find this push on it.
                self._stop(push, f"connection lost: {connection.lost_reason}")
                return
            if push.ticket.is_open and not connection.link.has_marks:
                self._stop(push, "the receiver's version of the KV protocol has no open transfers")
                return
        connection.link.open(push.ticket)

    def _write(self, write: SendWrite) -> None:
        """Carry out a write. is_reading is set, and is cleared here."""
        push, connection = write.push, write.connection
        block_count = len(write.layers) * len(write.blocks)
        told_count = block_count
        digest = push.digest if connection.link.wants_digest else None
        try:
            told_count = connection.link.write(
                push.ticket, write.layers, write.first_index, write.blocks, digest, push.is_stopped
            )
        finally:
            with self._lock:
                push.is_reading = False
                connection.credit_bytes += (block_count - told_count) * self._block_bytes
                push.kv_bytes += told_count * self._block_bytes
                if push.stopped is not None:
                    self._fail(push, push.stopped)
        if push.is_stopped():
            self._abort(push)
        elif (on_local_done := self._setup.on_local_done) is not None:
            for layer in write.layers:
                on_local_done(push.transfer_id, layer, write.blocks)

    def _mark(self, mark: SendMark) -> None:
        push = mark.push
        with self._lock:
            if push.stopped is not None or push.connection is None:
                return
            push.marks.sent(mark.block_count)
            link = push.connection.link
        digest = push.digest.intdigest() if link.wants_digest else 0
        link.mark(push.ticket, mark.block_count, mark.note, digest)

    def _end(self, push: Push, note: bytes) -> None:
        with self._lock:
            if push.stopped is not None or push.connection is None:
                return
            push.is_ended = True
            link = push.connection.link
        link.finish(push.ticket, note, push.digest.intdigest() if link.wants_digest else 0)

    def _abort(self, push: Push) -> None:
        connection = push.connection
        if connection is None:
            self._untold.pushes.append(push)
            if self._untold.is_due():
                self._tell_untold()
        elif connection is self._connection and connection.lost_reason is None:
            connection.link.abort(push.ticket, keep_marked=push.keeps_marked)

    def _tell_untold(self) -> None:
        """Open pushes only to give them up: otherwise the receiver frees their blocks only when their tickets end."""
        untold = self._untold
        untold.drop_expired()
        self._drop_lost()
        try:
            connection = (self._connection or self._connect()) if untold.pushes else None
            while connection is not None and untold.pushes:
                ticket = untold.pushes[-1].ticket
                connection.link.open(ticket)
                connection.link.abort(ticket)
                untold.pushes.pop()
        finally:
            untold.attempt_made()

    def _connect(self) -> Connection | None:
        """Try the routes in turn. If none works, fail all pushes that wait for one: each alone would wait again."""
        problems: list[str] = []
        for transport, endpoint in self._routes:
            try:
                connection = Connection(self, transport, endpoint, self._epoch, self._setup.pool)
            except LinkLost as error:
                problems.append(error.reason)
                continue
            with self._lock:
                self._connection = connection
                # The predecessor's wait for credit does not count against it.
                self._waiting_since_s = None
                self._untold.tell_at_s = 0.0
                if self._closing:
                    connection.link.break_off()
            where = {"transport": transport.label, "address": endpoint.address}
            get_logger().info("kv_peer_connected", **where, passed_over=problems)
            return connection
        with self._lock:
            for push in tuple(self._pushes.values()):
                self._stop(push, f"cannot connect: {'; '.join(problems)}")
        get_logger().warning("kv_peer_unreachable", reasons=problems)
        return None

    def _drop_lost(self) -> None:
        if self._connection is not None and self._connection.lost_reason is not None:
            self._drop()

    def _drop_worn(self) -> None:
        """Close a connection that should not be used for long any more, when no push is on it."""
        connection = self._connection
        if connection is not None and connection.link.is_worn:
            with self._lock:
                is_used = any(push.connection is connection for push in self._pushes.values())
            if not is_used:
                self._drop()

    def _drop(self) -> None:
        with self._lock:
            # Before its descriptor is given back, so close() cannot shut down a reused one.
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
