"""Protocol of connections whose sender writes directly into the receiver's pool. shm.py and nixl.py do the write.

A socket carries the frames of frames.py. DATA without payload reports written blocks. Its end reveals the peer's death.

The receiver cannot stop a writing sender, only ask it to stop. So a transfer is written to only once the receiver has
granted it, and the blocks of a rejected one stay in quarantine until the sender confirms that it has stopped, or its
process is gone. Any process that may connect can write anywhere in the pool, by error or intent; digests detect that in
the transfer's own blocks only.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Landing, LinkListener, LinkLost
from kaveri.kv.transports.frames import Header, Kind, pack_frame
from kaveri.kv.transports.socket import SocketLink
from kaveri.kv.transports.socket_listener import ReceivingConnection
from kaveri.kv.transports.stream import CACHED_BYTES, ByteStream, batches

_LET_GO_WITHIN_S = 1.0
"""Time for senders to stop when the receiver closes. Afterwards the pool must not be reused."""


class OneSidedLink(SocketLink, ABC):
    """A sender's connection that writes directly into the receiver's pool; implements transport.Link.

    Only the peer's thread writes blocks, under the lock, and only while their transfer is granted; revoking the grant
    under the same lock ends the writes. target_block_count: blocks of the receiver's pool, per layer.
    """

    def __init__(
        self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint, target_block_count: int
    ) -> None:
        self._target_block_count = target_block_count
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._granted: set[bytes] = set()
        # The transfer whose opening has no answer yet.
        self._opening: bytes | None = None
        self._is_broken = False
        super().__init__(stream, pool, listener, endpoint)

    def open(self, ticket: Ticket) -> None:
        """Begin a transfer and wait for its grant: an invalid ticket's blocks may belong to another transfer by now."""
        with self._locked():
            self._opening = ticket.transfer_id
        super().open(ticket)
        give_up_at_s = time.monotonic() + self._stream.progress_timeout_s
        with self._locked():
            while self._opening is not None:
                left_s = give_up_at_s - time.monotonic()
                if self._is_broken or left_s <= 0:
                    raise LinkLost("the connection was closed" if self._is_broken else "no answer to an opening")
                self._changed.wait(left_s)

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        places = ticket.block_ids[first_index : first_index + len(source_blocks)]
        if max(places) >= self._target_block_count:
            raise LinkLost(f"a ticket for block {max(places)} of the receiver's {self._target_block_count}")
        if not self._put(ticket, layers, source_blocks, places, digest, is_stopped):
            return 0
        self._send(Header(Kind.DATA, ticket.transfer_id, 0, layers, first_index, len(source_blocks)))
        return len(layers) * len(source_blocks)

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """Send the end mark, after which nothing is written to the transfer, whatever the answer."""
        self._let_go(ticket.transfer_id)
        super().finish(ticket, note, digest)

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        self._let_go(ticket.transfer_id)
        super().abort(ticket, keep_marked=keep_marked)

    def break_off(self) -> None:
        self._is_broken = True
        # The socket's end promises that nothing more is written; the thread with the lock ends it then.
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()
            self._stream.break_off()

    @abstractmethod
    def _put(
        self,
        ticket: Ticket,
        layers: range,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> bool:
        """Write source_blocks[i] of each layer to target_blocks[i] of the receiver's pool, with _permission().

        Updates `digest`. Returns False once there is no permission. Raises LinkLost, after which nothing is written.
        """

    @contextlib.contextmanager
    def _permission(self, ticket: Ticket, is_stopped: Callable[[], bool]) -> Iterator[bool]:
        with self._locked():
            yield not self._is_broken and not is_stopped() and ticket.transfer_id in self._granted

    def _send(self, header: Header, payload: bytes = b"") -> None:
        # Two threads send: the peer's, and the one that reads the answers.
        with self._sending:
            super()._send(header, payload)

    def _take_answer(self, header: Header, payload: bytes | bytearray) -> None:
        if header.kind in (Kind.MARKED, Kind.EXTENDED):
            # These neither open nor end a transfer.
            super()._take_answer(header, payload)
            return
        transfer_id = header.transfer_id
        lets_go = False
        with self._locked():
            is_opening = transfer_id == self._opening
            if header.kind == Kind.GRANTED:
                if is_opening:
                    self._granted.add(transfer_id)
                # Rejected before it was granted.
                lets_go = not is_opening
            elif header.kind == Kind.REJECTED:
                lets_go = transfer_id in self._granted
                self._granted.discard(transfer_id)
            if is_opening:
                self._opening = None
                self._changed.notify_all()
        if lets_go:
            self._send(Header(Kind.FENCED, transfer_id))
        if header.kind != Kind.GRANTED:
            super()._take_answer(header, payload)

    def _let_go(self, transfer_id: bytes) -> None:
        # On return nothing writes into the transfer.
        with self._locked():
            self._granted.discard(transfer_id)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._changed:
                yield
        finally:
            if self._is_broken:
                self._stream.break_off()


class OneSidedReceivingConnection(ReceivingConnection):
    """Receiving side of a one-sided sender's connection. Keeps blocks until the sender has stopped writing them."""

    _last_resort: threading.Timer | None = None

    def break_off(self) -> None:
        """Ask the sender to stop, and end the connection once it has, or after _LET_GO_WITHIN_S seconds. Any thread."""
        self._stream.say_no_more()
        last_resort = threading.Timer(_LET_GO_WITHIN_S, self._stream.break_off)
        try:
            last_resort.start()
        except RuntimeError:
            # Without a timer thread, end the connection at once.
            self._stream.break_off()
        else:
            self._last_resort = last_resort

    def close(self) -> None:
        if self._last_resort is not None:
            self._last_resort.cancel()
            self._last_resort.join()
        super().close()

    def _opened(self, transfer_id: bytes, landing: Landing) -> None:
        landing.hold()
        super()._opened(transfer_id, landing)
        self._send(pack_frame(Header(Kind.GRANTED, transfer_id)))

    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        self._stream.discard(header.payload_bytes)
        if landing is None:
            return
        blocks, digest = landing.begin_write(header.layers, header.first_index, header.block_count)
        if digest is not None:
            for regions in batches(self._pool, header.layers, blocks, CACHED_BYTES):
                if landing.is_stopped():
                    break
                for region in regions:
                    digest.update(region)
        landing.end_write()

    def _finish(self, header: Header, landing: Landing | None) -> None:
        if landing is not None:
            landing.fence()
        try:
            super()._finish(header, landing)
        finally:
            self._landings.pop(header.transfer_id, None)

    def _take_other(self, header: Header, landing: Landing | None) -> None:
        if header.kind != Kind.FENCED:
            super()._take_other(header, landing)
        self._stream.discard(header.payload_bytes)
        self._let_go(header.transfer_id)

    def _let_go(self, transfer_id: bytes, *, keep_marked: bool = False) -> Landing | None:
        landing = super()._let_go(transfer_id, keep_marked=keep_marked)
        if landing is not None:
            landing.fence()
        return landing

    def _failed(self, transfer_id: bytes) -> None:
        """Do nothing: a rejected transfer's blocks stay in quarantine until its sender sends FENCED or is gone."""

    def _forget_stopped(self, transfer_id: bytes) -> None:
        """Do nothing: a stopped transfer's blocks stay in quarantine until its sender sends FENCED or is gone."""

    def _give_up(self) -> None:
        self._stream.say_no_more()

    def _end(self, reason: str) -> None:
        self._abort_landings(reason)
        self._shut()
        if self._landings:
            # This side cannot stop the sender's writes. The sender closes its end when it writes no more, and the
            # kernel closes it for a killed process once none of its threads is left.
            self._stream.say_no_more()
            self._stream.wait_for_end()
        self._stream.break_off()
        for landing in self._landings.values():
            landing.fence()

    def _shut(self) -> None:
        """Revoke the sender's access to the pool, if this side can: not to memory that the sender has mapped."""
