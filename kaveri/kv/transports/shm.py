"""The shared-memory transport, "shm": the sender maps the receiver's pool and copies blocks into it.

One copy, by the sender, and no byte of payload through the kernel. A Unix socket carries the frames of frames.py: the
receiver's hello hands its pool's descriptor over, DATA is the doorbell, and the socket's end is the sign of life.

One-sided: the receiver cannot stop a sender that writes, it can only ask. So a transfer is written to only once the
receiver has granted it, and a rejected one keeps its blocks in quarantine until the sender says that it has let go of
them, or its process is gone. Whoever may connect can write anywhere in the pool, by error or by intent, and digests
find that in the transfer's own blocks only: the socket is open to the same user alone.
"""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kaveri.kv.digest import Digest
from kaveri.kv.pool import KvPool, is_run
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Capabilities, Intake, Landing, LinkListener, LinkLost
from kaveri.kv.transports.frames import HELLO_BYTES, Header, Kind, pack_hello, unpack_hello
from kaveri.kv.transports.socket import SocketLink, SocketTransport
from kaveri.kv.transports.socket_listener import ReceivingConnection, SocketListener
from kaveri.kv.transports.stream import Stream, batches

_LET_GO_WITHIN_S = 1.0
"""How long a closing receiver waits for its senders. After it the pool must not be used for anything else."""


class ShmTransport(SocketTransport):
    """Makes links and listeners between processes of one host and one user. Addresses are paths of Unix sockets."""

    def __init__(
        self, *, connect_timeout_s: float = 2.0, progress_timeout_s: float = 10.0, connection_limit: int = 256
    ) -> None:
        super().__init__(
            "unix",
            connect_timeout_s=connect_timeout_s,
            progress_timeout_s=progress_timeout_s,
            connection_limit=connection_limit,
        )
        self.name = self.label = "shm"
        self.capabilities = Capabilities(
            one_sided=True,
            needs_posted_receives=False,
            memory_kinds=frozenset({"host"}),
            same_host_only=True,
            can_revoke=False,
            write_bytes=4 << 20,
        )

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> "ShmLink":
        """See Transport.connect. Maps the receiver's whole pool."""
        connection = self._connected(endpoint)
        try:
            stream = self.stream(connection, self.connect_timeout_s)
            stream.send_bytes(pack_hello(0))
            hello, descriptor = stream.receive_descriptor(HELLO_BYTES)
            try:
                self._require_epoch(unpack_hello(hello), epoch, endpoint)
                target = _map_pool(descriptor, pool)
            finally:
                os.close(descriptor)
            return ShmLink(
                self.stream(connection, self.progress_timeout_s),
                pool,
                target,
                listener,
                endpoint,
                self.progress_timeout_s,
            )
        except BaseException:
            connection.close()
            raise

    def listen(self, address: str, pool: KvPool, intake: Intake) -> SocketListener:
        """See Transport.listen."""
        return self._listener(address, pool, intake, ShmReceivingConnection)


class ShmLink(SocketLink):
    """A sender's connection; see Link.

    Blocks are written by the peer's thread only, a batch at a time and under the lock, and only while their transfer is
    granted. Whoever wants the writing to end takes the grant away under the same lock.
    """

    def __init__(
        self,
        stream: Stream,
        pool: KvPool,
        target: npt.NDArray[np.uint8],
        listener: LinkListener,
        endpoint: KvEndpoint,
        open_timeout_s: float,
    ) -> None:
        """target: the receiver's pool, [layer_count, block_count, block_bytes]."""
        self._target = target
        self._open_timeout_s = open_timeout_s
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._granted: set[bytes] = set()
        # The transfer whose opening waits for its answer.
        self._opening: bytes | None = None
        self._is_broken = False
        super().__init__(stream, pool, listener, endpoint)

    def open(self, ticket: Ticket) -> None:
        """See Link.open. Waits for the receiver: blocks of a ticket that is void may be somebody else's by now."""
        with self._locked():
            self._opening = ticket.transfer_id
        super().open(ticket)
        give_up_at_s = time.monotonic() + self._open_timeout_s
        with self._locked():
            while self._opening is not None:
                left_s = give_up_at_s - time.monotonic()
                if self._is_broken or left_s <= 0:
                    raise LinkLost("the connection was closed" if self._is_broken else "no answer to an opening")
                self._changed.wait(left_s)

    def write(
        self,
        ticket: Ticket,
        layer: int,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest,
        is_stopped: Callable[[], bool],
    ) -> None:
        """See Link.write."""
        source, target = self._pool.memory[layer], self._target[layer]
        for start, batch in batches(source_blocks, self._pool.layout.block_bytes):
            places = ticket.block_ids[first_index + start : first_index + start + len(batch)]
            if max(places) >= len(target):
                raise LinkLost(f"a ticket for block {max(places)} of the receiver's {len(target)}")
            with self._locked():
                if self._is_broken or is_stopped() or ticket.transfer_id not in self._granted:
                    return
                for from_block, to_block, count in _runs(batch, places):
                    np.copyto(target[to_block : to_block + count], source[from_block : from_block + count])
            for region in self._pool.regions(layer, batch):
                digest.update(region)
        self._send(Header(Kind.DATA, ticket.transfer_id, 0, layer, first_index, len(source_blocks)))

    def finish(self, ticket: Ticket, note: bytes) -> None:
        """See Link.finish. The end mark says that nothing is written any more, whatever the answer."""
        self._let_go(ticket.transfer_id)
        super().finish(ticket, note)

    def abort(self, ticket: Ticket) -> None:
        """See Link.abort."""
        self._let_go(ticket.transfer_id)
        super().abort(ticket)

    def break_off(self) -> None:
        """See Link.break_off."""
        self._is_broken = True
        # The socket's end tells the receiver that nothing is written any more: whoever holds the lock says it then.
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()
            self._stream.break_off()

    def close(self) -> None:
        """See Link.close."""
        super().close()
        # Unmapped now, not when the garbage collector comes by: it is another process's whole pool.
        self._target = np.empty((0, 0, 0), np.uint8)

    def _send(self, header: Header, payload: bytes = b"") -> None:
        # Two threads send: the peer's, and the one that reads the answers.
        with self._sending:
            super()._send(header, payload)

    def _take_answer(self, header: Header, payload: bytes | bytearray) -> None:
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
        """Returns once nothing is written into the transfer any more."""
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


class ShmReceivingConnection(ReceivingConnection):
    """One sender's connection, on the receiving side. A landing stays here until its sender has let go of it."""

    _last_resort: threading.Timer | None = None

    def break_off(self) -> None:
        """See ReceivingConnection.break_off. Asks the sender to let go first; it gets a moment for that."""
        self._stream.say_no_more()
        self._last_resort = threading.Timer(_LET_GO_WITHIN_S, self._stream.break_off)
        self._last_resort.start()

    def close(self) -> None:
        """See ReceivingConnection.close."""
        if self._last_resort is not None:
            self._last_resort.cancel()
            self._last_resort.join()
        super().close()

    def _greet(self, hello: bytes) -> None:
        self._stream.send_descriptor(hello, self._pool.descriptor)

    def _opened(self, transfer_id: bytes, landing: Landing) -> None:
        landing.hold()
        super()._opened(transfer_id, landing)
        self._say(Header(Kind.GRANTED, transfer_id))

    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        self._stream.discard(header.payload_bytes)
        if landing is None:
            return
        blocks, digest = landing.begin_write(header.layer, header.first_index, header.block_count)
        for _, batch in batches(blocks, self._pool.layout.block_bytes):
            if landing.is_stopped():
                break
            for region in self._pool.regions(header.layer, batch):
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

    def _let_go(self, transfer_id: bytes) -> Landing | None:
        landing = super()._let_go(transfer_id)
        if landing is not None:
            landing.fence()
        return landing

    def _failed(self, transfer_id: bytes) -> None:
        """Rejected. Its blocks stay in quarantine until the sender says FENCED, or is gone."""

    def _give_up(self) -> None:
        self._stream.say_no_more()

    def _end(self, reason: str) -> None:
        for landing in self._landings.values():
            landing.abort(reason)
        if self._landings:
            # Nothing here can keep the sender from writing. It closes its end of the connection when it does not write
            # any more, and the kernel closes it for a killed process once none of its threads is left.
            self._stream.say_no_more()
            self._stream.wait_for_end()
        self._stream.break_off()
        for landing in self._landings.values():
            landing.fence()


def _map_pool(descriptor: int, own: KvPool) -> npt.NDArray[np.uint8]:
    """The receiver's pool, [layer_count, block_count, block_bytes], which has the layout of one's own."""
    layout = own.layout
    total_bytes = os.fstat(descriptor).st_size
    block_count, rest_bytes = divmod(total_bytes, layout.layer_count * layout.block_bytes)
    if rest_bytes or not block_count:
        raise LinkLost(f"the receiver's pool of {total_bytes} bytes is not of this layout")
    try:
        # Its pages are there, and each faults once here when it is first written. Mapping them all now would take that
        # off the first requests, and count another process's whole pool as resident in this one.
        memory = np.frombuffer(mmap.mmap(descriptor, total_bytes), np.uint8)
    except OSError as error:
        raise LinkLost(f"the receiver's pool cannot be mapped: {error.strerror}") from error
    return memory.reshape(layout.layer_count, block_count, layout.block_bytes)


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first source block, first target block, count) of each run that is contiguous on both sides."""
    if is_run(sources) and is_run(targets):
        return [(sources[0], targets[0], len(sources))]
    runs: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            runs.append((sources[start], targets[start], i - start))
            start = i
    return runs
