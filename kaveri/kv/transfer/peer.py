"""A sender's side of one receiver: its queues of operations, the thread that carries them out, and its connection."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kaveri.errors import TransferFailed
from kaveri.kv.transfer.digest import DigestFactory
from kaveri.kv.transfer.flow import PeerFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Link, LinkLost, Transport
from kaveri.kv.transfer.turns import Turns
from kaveri.telemetry.logs import get_logger

if TYPE_CHECKING:
    from kaveri.kv.transfer.sender import KvSender

_QUANTUM_BYTES = 4 << 20
"""What a push may send before the others of its receiver have their turn; but for nixl and gloo, one write."""
_TELL_AGAIN_S = 0.25
_TELL_AGAIN_MAX_S = 4.0
"""After so long, twice as long each time, a receiver that could not be reached is told again of what was given up."""

Operation = Callable[[], None]


class QueuedWrite:
    """Blocks of one layer that wait to be sent: [first_index, first_index + len(blocks)) of the ticket's."""

    __slots__ = ("_blocks", "_start", "first_index", "layer")

    def __init__(self, layer: int, first_index: int, blocks: tuple[int, ...]) -> None:
        """blocks: at least one."""
        self.layer = layer
        self.first_index = first_index
        self._blocks = blocks
        self._start = 0

    def __len__(self) -> int:
        return len(self._blocks) - self._start

    def take(self, count_max: int) -> tuple[int, ...]:
        """The next blocks, which do not wait any more."""
        taken = self._blocks[self._start : self._start + count_max]
        self._start += len(taken)
        self.first_index += len(taken)
        return taken


class Push:
    """One transfer under way. Guarded by the sender's lock, but for the digests, which are the peer thread's."""

    def __init__(self, ticket: Ticket, peer: "Peer", digest: DigestFactory) -> None:
        self.ticket = ticket
        self.expires_at_s = time.monotonic() + ticket.expires_in_s
        self.peer = peer
        self.digests = [digest() for _ in range(ticket.layout.layer_count)]
        self.queued = [0] * ticket.layout.layer_count
        # What is to be done, in order: one opening, for each layer at most a write for each block, one end.
        self.queue: deque[Operation | QueuedWrite] = deque()
        self.kv_bytes = 0
        self.connection: Connection | None = None
        """Set once the transfer is open there."""
        self.reading = False
        """The peer's thread may read source blocks."""
        self.ending = False
        """The end mark is queued, or on its way."""
        self.finished = False
        """The end mark is on its way."""
        self.stopped: str | None = None

    @property
    def transfer_id(self) -> bytes:
        return self.ticket.transfer_id

    def is_stopped(self) -> bool:
        return self.stopped is not None


class Connection:
    """A link with the pushes that it carries told apart from those of its successor; the link's listener."""

    def __init__(self, peer: "Peer", transport: Transport, endpoint: KvEndpoint) -> None:
        self.transport = transport
        self.endpoint = endpoint
        self.lost_reason: str | None = None
        """Why it was lost; None while it stands."""
        self.credit_bytes = 0
        """What may be written now."""
        self._window_bytes = 0
        self._peer = peer
        # Last: it may be given credit at once.
        self.link: Link = transport.connect(endpoint, peer.epoch, peer.sender.pool, self)

    def take_credit(self, block_count: int) -> int:
        """Under the lock: how many of these blocks one write may have. It has their credit now; there must be some.

        A write takes no more than half of what may be under way: while it is, credit for the next one comes back.
        """
        write_bytes = min(self.transport.capabilities.write_bytes, self._window_bytes // 2)
        block_bytes = self._peer.sender.pool.layout.block_bytes
        count = min(block_count, max(1, write_bytes // block_bytes), self.credit_bytes // block_bytes)
        self.credit_bytes -= count * block_bytes
        return count

    def credited(self, byte_count: int, window_bytes: int) -> None:
        with self._peer.sender.lock:
            self.credit_bytes += byte_count
            self._window_bytes = window_bytes
            self._peer.credit_changed()

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        sender = self._peer.sender
        with sender.lock:
            push = sender.find(transfer_id)
            if push is None or push.connection is not self or push.stopped is not None:
                return
            if rejection is not None:
                sender.stop(push, f"rejected: {rejection}")
            elif not push.finished:
                sender.stop(push, "accepted before its end")
            else:
                sender.accept(push, self.transport.label)

    def lost(self, reason: str) -> None:
        self._peer.lose(self, reason)

    def close(self) -> None:
        """Ends the link. The last call."""
        link = self.link
        # It holds on to this listener, and the two on to the sender and its pool, until the garbage collector comes by.
        del self.link
        link.close()


class Peer:
    """One receiver: the queues of its pushes, and the thread that carries them out over one connection at a time.

    Within a push everything goes in order. Pushes take turns by bytes, so that a short one does not wait for all of a
    long one; what ends a push waits for none. The queues are bounded by the tickets: see Push.queue.

    Its methods open, finish and abort run on that thread, the others under the sender's lock where they say so.
    """

    def __init__(
        self,
        sender: "KvSender",
        key: tuple[object, ...],
        routes: Sequence[tuple[Transport, KvEndpoint]],
        epoch: int,
    ) -> None:
        self.sender = sender
        self.key = key
        self.epoch = epoch
        self.pushes: set[Push] = set()
        self._routes = routes
        self._connection: Connection | None = None
        # Of those with something queued.
        self._turns: Turns[Push] = Turns(_QUANTUM_BYTES)
        # Since when all that is queued waits for credit, or when credit last came meanwhile [s].
        self._waiting_since_s: float | None = None
        # Given up before they were open: unless their receiver is told, it keeps blocks for them until their tickets
        # end, and they are forgotten then. Used by the thread only, like the two beside it.
        self._untold: list[Push] = []
        self._tell_again_s = _TELL_AGAIN_S
        self._tell_at_s = 0.0
        # What is not to wait for a turn: at most an abort for each push, and the dropping of a lost connection.
        self._urgent: deque[Operation] = deque()
        self._changed = threading.Condition(sender.lock)
        self._closing = False
        self.thread = threading.Thread(target=self._run, name="kv-send", daemon=True)

    def start(self) -> None:
        """Under the lock, once and before anything else. Raises TransferFailed; the peer is of no use then."""
        try:
            self.thread.start()
        except RuntimeError as error:
            raise TransferFailed(f"no thread for a connection: {error}") from error

    def submit(self, push: Push, operation: Operation | QueuedWrite) -> None:
        """Under the lock: behind what the push has queued."""
        push.queue.append(operation)
        self._turns.join(push)
        self._changed.notify()

    def submit_urgent(self, operation: Operation) -> None:
        """Under the lock; for an operation that is not to wait for its turn."""
        self._urgent.append(operation)
        self._changed.notify()

    def credit_changed(self) -> None:
        """Under the lock: the connection was given credit, be it too little for a block."""
        if self._waiting_since_s is not None:
            self._waiting_since_s = time.monotonic()
            self._changed.notify()

    def flow(self) -> PeerFlow:
        """Under the lock: what is under way."""
        connection = self._connection
        block_bytes = self.sender.pool.layout.block_bytes
        unaccepted_bytes = sum(push.kv_bytes for push in self.pushes)
        queued_count = sum(sum(push.queued) for push in self.pushes if push.stopped is None)
        written_bytes = sum(push.kv_bytes for push in self.pushes if push.stopped is None)
        return PeerFlow(
            address=(connection.endpoint if connection is not None else self._routes[0][1]).address,
            transport=connection.transport.label if connection is not None else "",
            push_count=len(self.pushes),
            block_count=sum(len(push.ticket.block_ids) for push in self.pushes),
            queued_bytes=queued_count * block_bytes - written_bytes,
            unaccepted_bytes=unaccepted_bytes,
            credit_bytes=connection.credit_bytes if connection is not None else 0,
            is_waiting=self._waiting_since_s is not None,
        )

    def drop_queue(self, push: Push) -> None:
        """Under the lock: nothing more of the push is sent."""
        push.queue.clear()
        self._turns.leave(push)
        self._changed.notify()

    def close(self) -> None:
        """Under the lock: makes the thread end soon."""
        self._closing = True
        self._changed.notify()
        if self._connection is not None:
            self._connection.link.break_off()

    def lose(self, connection: Connection, reason: str) -> None:
        """The connection is gone, and with it what it carries. Any thread, without the lock."""
        with self.sender.lock:
            if connection.lost_reason is not None:
                return
            connection.lost_reason = reason
            for push in tuple(self.pushes):
                if push.connection is connection:
                    self.sender.stop(push, f"connection lost: {reason}")
            self.submit_urgent(self._drop_lost)

    def open(self, push: Push) -> None:
        if push.is_stopped():
            return
        self._drop_lost()
        connection = self._connection or self._connect()
        if connection is None:
            return
        with self.sender.lock:
            push.connection = connection
            if connection.lost_reason is not None:
                # Lost since it was made: its listener did not find this push on it.
                self.sender.stop(push, f"connection lost: {connection.lost_reason}")
                return
        connection.link.open(push.ticket)

    def finish(self, push: Push, note: bytes) -> None:
        with self.sender.lock:
            if push.stopped is not None or push.connection is None:
                return
            push.finished = True
            link = push.connection.link
        link.finish(push.ticket, note)

    def abort(self, push: Push) -> None:
        connection = push.connection
        if connection is None:
            self._untold.append(push)
            if time.monotonic() >= self._tell_at_s:
                self._tell_untold()
        elif connection is self._connection and connection.lost_reason is None:
            connection.link.abort(push.ticket)

    def _tell_untold(self) -> None:
        """Opens pushes only to give them up: nobody else tells the receiver before their tickets end."""
        now_s = time.monotonic()
        self._untold = [push for push in self._untold if push.expires_at_s > now_s]
        self._drop_lost()
        try:
            connection = (self._connection or self._connect()) if self._untold else None
            while connection is not None and self._untold:
                ticket = self._untold[-1].ticket
                connection.link.open(ticket)
                connection.link.abort(ticket)
                self._untold.pop()
        finally:
            if self._untold:
                self._tell_at_s = time.monotonic() + self._tell_again_s
                self._tell_again_s = min(2 * self._tell_again_s, _TELL_AGAIN_MAX_S)
            else:
                self._tell_at_s, self._tell_again_s = 0.0, _TELL_AGAIN_S

    def _write(
        self, push: Push, connection: Connection, layer: int, first_index: int, source_blocks: tuple[int, ...]
    ) -> None:
        """push.reading is set, and ends here."""
        block_bytes = self.sender.pool.layout.block_bytes
        told_count = len(source_blocks)
        try:
            told_count = connection.link.write(
                push.ticket, layer, first_index, source_blocks, push.digests[layer], push.is_stopped
            )
        finally:
            with self.sender.lock:
                push.reading = False
                connection.credit_bytes += (len(source_blocks) - told_count) * block_bytes
                if push.stopped is not None:
                    self.sender.fail(push, push.stopped)
        if push.is_stopped():
            self.abort(push)
            return
        if self.sender.on_local_done is not None:
            self.sender.on_local_done(push.transfer_id, layer, source_blocks)
        push.kv_bytes += len(source_blocks) * block_bytes
        if first_index + len(source_blocks) == len(push.ticket.block_ids):
            connection.link.end_layer(push.ticket, layer, push.digests[layer].intdigest())

    def _run(self) -> None:
        reason = "the sender was ended"
        try:
            while (operation := self._next_operation()) is not None:
                try:
                    operation()
                except LinkLost as error:
                    assert self._connection is not None
                    self.lose(self._connection, error.reason)
            reason = "the sender was closed"
        except Exception as error:
            # No other code sees it: all pushes of this receiver end with this thread.
            reason = f"the sender broke: {error!r}"
            get_logger().exception("kv peer broke", address=self._routes[0][1].address)
        finally:
            with self.sender.lock:
                self.sender.forget(self)
                for push in tuple(self.pushes):
                    # No write is under way on this thread any more.
                    push.reading = False
                    self.sender.stop(push, reason)
            try:
                self._drop()
            finally:
                with self.sender.lock:
                    # Operations hold on to this peer.
                    self._urgent.clear()
                    self.sender.ended(self)

    def _next_operation(self) -> Operation | None:
        with self.sender.lock:
            while not self._closing:
                if self._urgent:
                    operation: Operation | None = self._urgent.popleft()
                elif self._untold and time.monotonic() >= self._tell_at_s:
                    operation = self._tell_untold
                elif (push := self._turns.next(self._can_go)) is not None:
                    operation = self._next_of(push)
                elif self._turns:
                    operation = self._wait_for_credit()
                else:
                    self._waiting_since_s = operation = None
                    rest_s = max(0.0, self._tell_at_s - time.monotonic()) if self._untold else self.sender.idle_s
                    is_busy = self._changed.wait(rest_s) or self._urgent or self._turns or self.pushes or self._untold
                    if not is_busy:
                        # In the same breath as the check: nobody may find this peer and queue behind its end.
                        self.sender.forget(self)
                        break
                if operation is not None:
                    return operation
            return None

    def _can_go(self, push: Push) -> bool:
        if not isinstance(push.queue[0], QueuedWrite):
            return True
        assert push.connection is not None, "a write of a push that is not open"
        return push.connection.credit_bytes >= self.sender.pool.layout.block_bytes

    def _next_of(self, push: Push) -> Operation:
        head = push.queue[0]
        if isinstance(head, QueuedWrite):
            connection = push.connection
            assert connection is not None
            index, blocks = head.first_index, head.take(connection.take_credit(len(head)))
            self._turns.charge(push, len(blocks) * self.sender.pool.layout.block_bytes)
            push.reading = True
            self._waiting_since_s = None
            operation: Operation = partial(self._write, push, connection, head.layer, index, blocks)
            if not head:
                push.queue.popleft()
        else:
            operation = head
            push.queue.popleft()
        if not push.queue:
            self._turns.leave(push)
        return operation

    def _wait_for_credit(self) -> Operation | None:
        """All that is queued waits for credit. A receiver that takes nothing in for so long is as good as gone."""
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
            self.sender.credit_waits += 1
        left_s = self._waiting_since_s + self.sender.credit_timeout_s - now_s
        if left_s > 0:
            self._changed.wait(left_s)
            self.sender.credit_wait_s += time.monotonic() - now_s
            return None
        assert self._connection is not None
        return partial(self.lose, self._connection, f"no credit came for {self.sender.credit_timeout_s:g} s")

    def _connect(self) -> Connection | None:
        """Tries the routes in turn. When none works, fails all pushes that wait for one: each alone would wait anew."""
        problems: list[str] = []
        for transport, endpoint in self._routes:
            try:
                connection = Connection(self, transport, endpoint)
            except LinkLost as error:
                problems.append(error.reason)
                continue
            with self.sender.lock:
                self._connection = connection
                # How long its predecessor gave none is not held against it.
                self._waiting_since_s = None
                self._tell_at_s = 0.0
                if self._closing:
                    connection.link.break_off()
            where = {"transport": transport.label, "address": endpoint.address}
            get_logger().info("kv peer connected", **where, passed_over=problems)
            return connection
        with self.sender.lock:
            for push in tuple(self.pushes):
                self.sender.stop(push, f"cannot connect: {'; '.join(problems)}")
        get_logger().warning("kv peer unreachable", reasons=problems)
        return None

    def _drop_lost(self) -> None:
        if self._connection is not None and self._connection.lost_reason is not None:
            self._drop()

    def _drop(self) -> None:
        with self.sender.lock:
            # Before its descriptor is given back, so that close() cannot break somebody else's off.
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
