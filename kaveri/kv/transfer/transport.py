"""Contract of a transport: the connection between a sender's and a receiver's pool. It keeps no state of transfers.

A transport moves blocks, named by their index in a registered pool and never by an address. Three events stay apart:

    local done      Link.write() has returned: the transport no longer reads the source blocks
    remote visible  the receiver knows of the blocks, and at last of the note, which follows every byte
    accepted        the receiver has verified the digest, if it wants one, and its answer has reached the sender

An open transfer (Ticket.is_open) may be marked before its end: the receiver verifies all that was sent before the mark,
keeps it even if the rest fails, and confirms it. It may get more destination blocks, and end with fewer than it has.

The receiver limits what a sender may have in flight: it gives credit, in bytes, for all transfers of a connection.

The contract fits two-sided links (sockets, NCCL), whose receiving thread asks for each run of blocks before it lets
bytes in, and one-sided ones (shared memory, RDMA), which may write into a transfer's blocks until it is fenced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket

NOTE_BYTES_MAX = 4096
"""Max bytes of the note that a sender attaches to a mark or to the end of a transfer."""


class LinkLost(TransferFailed):
    """Error: a connection cannot be opened or is lost. This side no longer reads or writes blocks through it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a transport."""

    can_revoke: bool
    """True if the receiver alone can stop one transfer's writes, while the connection stays up."""
    is_byte_stream: bool
    """True if bytes are copied through buffers, so that a digest is worth its time; False if the kernel or the network
    card writes them into the receiver's memory."""
    write_bytes: int
    """Most bytes of one write(), except for a larger block; bounds the padding that an abort may need."""
    path_addresses: bool = False
    """Addresses of its listeners are paths of Unix sockets, not HOST:PORT."""


class Landing(Protocol):
    """Receiving side of one transfer, as used by the connection that carries it, on that connection's thread only.

    Methods raise TransferFailed if it is refused or has ended: the sender is answered, the rest of its data discarded.
    """

    @property
    def pool(self) -> KvPool:
        """Pool of the ticket's blocks, perhaps split into smaller ones; of one block size for all transfers of a
        connection."""

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        """Permit writes into blocks [first_index, first_index + block_count) of `layers`, until end_write().

        Returns the blocks' pool ids, the same in each layer, and the digest, None if not verified. It must be updated
        with the bytes in sending order: layer by layer, within a layer in index order, each block once.
        """

    def hold(self) -> None:
        """Let a one-sided sender write into all the ticket's blocks, until fence() or finish(). Called once, first.
        begin_write() and end_write() then report the blocks that it has written."""

    def fence(self) -> None:
        """Revoke the write permission of hold(), once the sender can no longer write. Never raises; idempotent."""

    def is_stopped(self) -> bool:
        """True if the transfer has ended: write no more and call end_write() at once. Never raises."""

    def end_write(self) -> None:
        """Record that the writes permitted by begin_write() have ended; the blocks are complete unless is_stopped()."""

    def finish(self, note: bytes, sender_digest: int) -> None:
        """Verify the transfer at its end, after all bytes, against the sender's digest. note: bytes for the receiver's
        listener. Returns when the transfer has landed and its sender is answered."""

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        """Verify and keep blocks [0, block_count) of each layer, at an open transfer's mark; sender_digest is over all
        bytes so far, note: bytes for the receiver's listener. Returns when the sender is answered."""

    def abort(self, reason: str, *, given_up: bool = False) -> None:
        """End the transfer and answer its sender. given_up: True if the sender cancelled it. Never raises;
        idempotent."""


class Credit(Protocol):
    """Account, at the receiver, of the bytes that one connection's sender may have in flight. Called on the
    connection's thread, unless stated otherwise. A write is charged by its blocks, even if its transfer fails."""

    def spend(self, byte_count: int) -> None:
        """Charge bytes that begin to arrive, or have arrived. Raises LinkLost if the sender had no credit for them: a
        two-sided connection then admits none, a one-sided one only detects it."""

    def settle(self, byte_count: int) -> None:
        """Return the credit of spent bytes that were stored or discarded. May give credit to any sender."""

    def expect(self, byte_count: int) -> None:
        """Add to the bytes still to come; negative: subtract. For landings, on any thread. May give credit to any
        sender."""

    def arrived(self, byte_count: int) -> None:
        """Subtract arrived bytes from those expected, before settle(). Called by landings."""

    def close(self) -> None:
        """Close the account: the connection has ended, and nothing is written through it any more. Idempotent."""


GiveCredit = Callable[[int, int], None]
"""Sends a sender (how many more bytes it may write, how many it may have in flight). Never blocks and never raises."""

Answer = Callable[[bytes, str | None], None]
"""Sends the outcome of a transfer id to its sender: None if accepted, or why rejected. Never blocks or raises."""


class Progress(Protocol):
    """Sends the progress of open transfers to their sender. Any thread; never blocks and never raises."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """Report to the sender that the transfer's blocks [0, block_count) are verified and kept."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """Report to the sender more destination blocks: block_ids[i] is the transfer's block first_index + i."""


class TransferIntake(Protocol):
    """The receiver, as used by a transport's listener. Thread-safe."""

    @property
    def epoch(self) -> int:
        """Incarnation number of the receiver, shown to every sender that connects."""

    def admit(self, give: GiveCredit) -> Credit:
        """Open a credit account for a new connection. `give` is called once before this returns, then on any thread."""

    def wants_digests(self, capabilities: Capabilities) -> bool:
        """True if senders must send a digest of each transfer over a transport with these capabilities."""

    def open(
        self,
        transfer_id: bytes,
        secret: bytes,
        epoch: int,
        answer: Answer,
        credit: Credit,
        with_digest: bool,
        progress: Progress | None,
    ) -> Landing:
        """Begin a transfer that a sender asks for. If it may not begin, answers the sender and raises TransferFailed.

        secret, epoch: as the sender shows them. credit: the connection's, from admit(). with_digest: as agreed with the
        sender. progress: None if the sender's protocol version has no open transfers.
        """


class Link(Protocol):
    """A sender's connection to one receiver. One thread calls all methods but break_off(); they may block.

    They raise LinkLost when the connection is lost or has made no progress for the transport's time limit.
    """

    @property
    def wants_digest(self) -> bool:
        """True if the receiver verifies transfers by a digest of their bytes."""

    @property
    def has_marks(self) -> bool:
        """True if the receiver's protocol version has open transfers, with marks and extensions."""

    @property
    def is_worn(self) -> bool:
        """True if the connection should be replaced once no transfer is active on it. False on most links."""

    def open(self, ticket: Ticket) -> None:
        """Ask the receiver to begin the ticket's transfer."""

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Send source_blocks[i] of each layer to ticket.block_ids[first_index + i]; return when they may change.

        The caller has the receiver's credit for them. Updates `digest` with the bytes, layer by layer and in index
        order. Returns soon after is_stopped() turns true, even if the receiver is stuck; abort() must follow then.
        Returns how many of the len(layers) * len(source_blocks) blocks use up credit: all, unless stopped.
        """

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        """Ask the receiver to verify and keep blocks [0, block_count) of each layer, after all written bytes. digest:
        of these; 0 unless wants_digest."""

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """Send the end of the transfer, after all written bytes. digest: of these; 0 unless wants_digest."""

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        """Notify the receiver that the transfer is given up. keep_marked: it should keep the marked blocks."""

    def break_off(self) -> None:
        """End the connection: a blocked call raises LinkLost soon. Any thread; never blocks; idempotent."""

    def close(self) -> None:
        """End the connection and its threads, and release its resources. Called once."""


class LinkListener(Protocol):
    """Handles a receiver's messages to a sender, on the link's own thread. Must not block."""

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        """Handle the receiver's answer: the transfer is accepted (None) or rejected (the reason)."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """Handle the confirmation of a mark: the receiver has verified blocks [0, block_count) and keeps them."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """Handle a grant of more destination blocks: block_ids[i] is the transfer's block first_index + i."""

    def credited(self, byte_count: int, window_bytes: int) -> None:
        """Handle credit for byte_count more bytes; window_bytes: max bytes in flight now. May come before connect()
        returns."""

    def lost(self, reason: str) -> None:
        """Handle the loss of the connection. Called at most once."""


class Listener(Protocol):
    """Listening end of a transport: accepts senders' connections."""

    @property
    def endpoint(self) -> KvEndpoint:
        """Address where senders connect, with the actual port."""

    def close(self) -> None:
        """Stop listening, end all connections (each aborts its transfers) and threads. Idempotent."""


class Transport(Protocol):
    """Factory of links and listeners of one kind. Holds no connection itself."""

    @property
    def name(self) -> str:
        """Name in KvEndpoint.transport, such as "tcp"."""

    @property
    def label(self) -> str:
        """Name in logs and metrics: the transport's name, and how it is emulated if it is."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the transport."""

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> Link:
        """Connect the sender of `pool` to a receiver. Blocks. Raises LinkLost, also for a receiver of another epoch."""

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> Listener:
        """Listen at `address` for pushes into `pool`, and pass them to the receiver (`intake`). Raises ConfigError when
        the address cannot be bound."""
