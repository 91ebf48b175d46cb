"""The pushing side of a transfer: reads blocks of its own pool, writes them where a ticket says."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import DigestFactory, xxh3
from kaveri.kv.transfer.flow import SenderFlow
from kaveri.kv.transfer.peer import Peer, Push, QueuedWrite
from kaveri.kv.transfer.reporter import Reporter
from kaveri.kv.transfer.ticket import Ticket
from kaveri.kv.transfer.transport import Transport, require_note

_ANSWER_GRACE_S = 1.0
"""A landing just before the ticket's expiry is answered just after it."""


@dataclass(frozen=True, slots=True)
class PushAccepted:
    """The receiver has every byte, verified. The source blocks are no longer read."""

    transfer_id: bytes
    kv_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The push ended without acceptance. The source blocks are no longer read."""

    transfer_id: bytes
    reason: str


PushListener = Callable[[PushAccepted | PushFailed], None]
"""Called on a thread of the sender, once per opened transfer, in the order in which things happened."""

LocalDoneListener = Callable[[bytes, int, Sequence[int]], None]
"""Called with (transfer id, layer, source blocks) on the receiver's own thread of the sender; must not block."""


class KvSender:
    """Pushes blocks of `pool`. Every method may be called from any thread, close() not from the listener.

    An opened transfer ends in exactly one event. A PushFailed does not say that the receiver has not landed it: the
    acceptance may have been lost on its way, so whoever pushes again must give the hand-over a new attempt number.

    One thread and one connection per receiver, made when needed and given up after `idle_s` without a transfer. Blocks
    are written as far as the receiver has given credit; one that gives none for `credit_timeout_s` seconds, while
    something waits for it, is taken for gone.
    transports: in the order of preference. on_local_done: hears of source blocks that are
    not read any more, before their transfer ends; of those of a push that fails PushFailed alone may tell.
    """

    def __init__(
        self,
        pool: KvPool,
        listener: PushListener,
        *,
        transports: Sequence[Transport],
        digest: DigestFactory = xxh3,
        idle_s: float = 60.0,
        credit_timeout_s: float = 10.0,
        on_local_done: LocalDoneListener | None = None,
    ) -> None:
        self.pool = pool
        self.transports = tuple(transports)
        self.digest = digest
        self.idle_s = idle_s
        self.credit_timeout_s = credit_timeout_s
        self.on_local_done = on_local_done
        self.lock = threading.Lock()
        # Of all peers, those of former times included. Guarded by the lock.
        self.credit_waits = 0
        self.credit_wait_s = 0.0
        self._pushes: dict[bytes, Push] = {}
        self._peers: dict[tuple[object, ...], Peer] = {}
        # Of peers, those that are on their way out included.
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._reporter = Reporter[PushAccepted | PushFailed]("kv-sender", listener)

    def open(self, ticket: Ticket) -> None:
        """Begins a transfer; connects in the background. Raises LayoutMismatch, or TransferFailed when the two ends
        have no transport in common, the sender is closed, or the process can start no thread more."""
        self.pool.layout.require_same(ticket.layout)
        routes = tuple(
            (transport, endpoint)
            for transport in self.transports
            for endpoint in ticket.endpoints
            if endpoint.transport == transport.name
        )
        if not routes:
            offered = ", ".join(endpoint.transport for endpoint in ticket.endpoints) or "none"
            spoken = ", ".join(transport.name for transport in self.transports)
            raise TransferFailed(f"no transport in common: {offered} there, {spoken} here")
        with self.lock:
            if self._closed:
                raise TransferFailed("the sender is closed")
            assert ticket.transfer_id not in self._pushes, "a ticket is used once"
            # A receiver that was restarted at the same address is another peer.
            key = (ticket.endpoints, ticket.epoch)
            peer = self._peers.get(key)
            if peer is None:
                peer = Peer(self, key, routes, ticket.epoch)
                peer.start()
                # Its thread waits for the lock meanwhile.
                self._peers[key] = peer
                self._threads.add(peer.thread)
            push = Push(ticket, peer, self.digest)
            self._pushes[ticket.transfer_id] = push
            peer.pushes.add(push)
            peer.submit(push, partial(peer.open, push))
        deadline_s = ticket.expires_in_s + _ANSWER_GRACE_S
        self._reporter.call_after(deadline_s, partial(self._give_up, ticket.transfer_id, "the ticket expired"))

    def write(self, transfer_id: bytes, layer: int, first_index: int, source_blocks: Sequence[int]) -> None:
        """Queues blocks of one layer: source_blocks[i] goes to ticket.block_ids[first_index + i].

        Per layer, blocks are written in index order, each exactly once. The source blocks must not change until
        PushAccepted or PushFailed. Never blocks on the network. Unknown (already failed) transfers are ignored.

        The queue holds block numbers, never bytes: what it can grow to is bounded by the tickets' blocks.
        Raises InvalidArgument for a block outside the pool.
        """
        # Its bytes would be missing from a frame, and the receiver take those of other pushes for them.
        self.pool.require_blocks("source_blocks", source_blocks)
        with self.lock:
            push = self._pushes.get(transfer_id)
            if push is not None and push.stopped is None and source_blocks:
                assert first_index == push.queued[layer], "a block was left out or written twice"
                push.queued[layer] += len(source_blocks)
                assert push.queued[layer] <= len(push.ticket.block_ids), "more blocks than the ticket has"
                push.peer.submit(push, QueuedWrite(layer, first_index, tuple(source_blocks)))

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        """All blocks of all layers are queued. `note`, at most 4 KiB, arrives with the landing, behind all bytes."""
        require_note(note)
        with self.lock:
            push = self._pushes.get(transfer_id)
            if push is not None and push.stopped is None and not push.ending:
                push.ending = True
                push.peer.submit(push, partial(push.peer.finish, push, note))

    def abort(self, transfer_id: bytes) -> None:
        """Gives up. PushFailed follows once the source blocks are no longer read; unknown ids are ignored."""
        self._give_up(transfer_id, "aborted")

    def flow(self) -> SenderFlow:
        """What is under way."""
        with self.lock:
            peers = tuple(peer.flow() for peer in self._peers.values())
            return SenderFlow(peers, self.credit_waits, self.credit_wait_s)

    def close(self) -> None:
        """Breaks all connections, fails what is under way, ends threads. Idempotent. Waits for a connection attempt
        under way."""
        with self.lock:
            self._closed = True
            for peer in self._peers.values():
                peer.close()
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()
        self._reporter.close()

    def stop(self, push: Push, reason: str) -> None:
        """For peers, under the lock: no more of this push is sent; it fails as soon as its blocks are not read."""
        if push.stopped is None and push.transfer_id in self._pushes:
            push.stopped = reason
            push.peer.drop_queue(push)
            if not push.reading:
                self.fail(push, reason)

    def accept(self, push: Push, transport: str) -> None:
        """For peers, under the lock: the receiver has all of it."""
        self._conclude(push, PushAccepted(push.transfer_id, push.kv_bytes, transport))

    def fail(self, push: Push, reason: str) -> None:
        """For peers, under the lock: the push has ended, and its blocks are not read any more."""
        self._conclude(push, PushFailed(push.transfer_id, reason))

    def find(self, transfer_id: bytes) -> Push | None:
        """For peers, under the lock."""
        return self._pushes.get(transfer_id)

    def forget(self, peer: Peer) -> None:
        """For peers, under the lock: the peer takes no more work."""
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def ended(self, peer: Peer) -> None:
        """For peers, under the lock: the last thing that the peer's thread does."""
        self._threads.remove(peer.thread)

    def _conclude(self, push: Push, event: PushAccepted | PushFailed) -> None:
        del self._pushes[push.transfer_id]
        push.peer.drop_queue(push)
        push.peer.pushes.remove(push)
        self._reporter.report(event)

    def _give_up(self, transfer_id: bytes, reason: str) -> None:
        with self.lock:
            push = self._pushes.get(transfer_id)
            if push is not None and push.stopped is None:
                self.stop(push, reason)
                # Before what other transfers have queued: the receiver's blocks wait for it.
                push.peer.submit_urgent(partial(push.peer.abort, push))
