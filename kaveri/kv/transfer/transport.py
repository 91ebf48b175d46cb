"""The link between two pools, as a sender and a receiver see it. Owns the contract; they keep the state of transfers.

A transport moves blocks, named by their index in a registered pool and never by an address. Three events stay apart:

    local done      Link.write() has returned: the transport no longer reads the source blocks
    remote visible  TransferIntake hears of the blocks, and at last of the note, which is ordered behind every byte
    accepted        the receiver has verified the digest, if it wants one, and its answer has reached the sender

An open transfer (Ticket.is_open) may be marked before its end: the receiver verifies all that was sent up to the mark,
keeps it even if the rest fails, and confirms it. It may get more destination blocks, and end with fewer than it has.

The receiver limits what a sender may have in flight: it gives credit, in bytes, for all transfers of a connection.

The contract fits two-sided links (sockets, NCCL), whose receiving thread asks for each run of blocks before it lets
bytes in, and one-sided ones (shared memory, RDMA), which hold a landing's write permission from open to their fence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.errors import TransferFailed
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket

NOTE_BYTES_MAX = 4096
"""Most bytes of the note of a mark or of the end of a transfer."""


class LinkLost(TransferFailed):
    """The connection cannot be opened or is lost. It is fenced: this side neither reads nor writes blocks through
    it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a transport."""

    can_revoke: bool
    """The receiver alone can stop writes of one transfer, while the sender is silent and the link stays up."""
    is_byte_stream: bool
    """Bytes are copied through buffers, and a digest of them is worth its time; if False, the kernel or the network
    card writes them into the receiver's memory."""
    write_bytes: int
    """Most bytes of one write(), except for a larger block; bounds the padding that an abort may need."""
    path_addresses: bool = False
    """Addresses of its listeners are paths of Unix sockets, not HOST:PORT."""


class Landing(Protocol):
    """One transfer on the receiving side, while a link carries it. Called by that link's thread only.

    Every method raises TransferFailed when the transfer is refused or has ended; the landing is over then, the sender
    has been answered, and the link drops whatever else it brings.
    """

    @property
    def pool(self) -> KvPool:
        """The pool of the ticket's blocks: the listener's pool, or the same memory in smaller blocks. One connection
        carries blocks of one size, the sender's."""

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        """Permit writes into destination blocks [first_index, first_index + block_count) of some layers, until
        end_write.

        Returns the blocks in the pool, the same in each layer, and the transfer's digest, None without: the link gives
        it the bytes in the order in which the sender sends them, layer by layer, preferably while they are in the
        processor's cache. Within a layer blocks come in index order, each exactly once.
        """

    def hold(self) -> None:
        """Let a one-sided sender write into any of the ticket's blocks, until fence() or finish(). Called once and
        first. begin_write() and end_write() then report the blocks that it has written."""

    def fence(self) -> None:
        """End hold(): called by the transport once the sender can no longer write into the blocks. Never raises;
        idempotent."""

    def is_stopped(self) -> bool:
        """Return True if the transfer has ended meanwhile: write no more and call end_write at once. Never raises."""

    def end_write(self) -> None:
        """Record that nothing writes into the permitted blocks any more; unless stopped, they are complete."""

    def finish(self, note: bytes, sender_digest: int) -> None:
        """Handle the end mark, which came after every byte, with the sender's digest of them. Returns when the transfer
        has landed and its sender has been answered."""

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        """Handle a mark of blocks [0, block_count) of each layer, after their bytes, with the sender's digest of all
        bytes so far. Returns when the mark is kept and the sender answered. Refused in transfers that are not open."""

    def abort(self, reason: str, *, given_up: bool = False) -> None:
        """End it: cancelled or broken by the sender, or its link is gone. Answers it. Never raises; idempotent.

        given_up: the sender said so itself.
        """


class Credit(Protocol):
    """Credit of one connection's sender, as its receiving end sees it. Called by that end's thread, unless stated
    otherwise.

    A write is charged by its blocks, even if its transfer fails.
    """

    def spend(self, byte_count: int) -> None:
        """Record that this many bytes begin to arrive, or have arrived. Raises LinkLost if the sender had no credit for
        them: a two-sided link admits none of them, a one-sided one detects it once they have arrived."""

    def settle(self, byte_count: int) -> None:
        """Record that this many of the spent bytes are taken in or discarded. May give credit, to other senders too."""

    def expect(self, byte_count: int) -> None:
        """Expect this many more bytes over the connection; negative: fewer than announced. For landings, any thread.
        May give credit, to other senders too."""

    def arrived(self, byte_count: int) -> None:
        """Record that this many of the expected bytes have arrived, and settle() follows. For landings."""

    def close(self) -> None:
        """Record that the connection has ended, and nothing is written through it any more. Idempotent."""


GiveCredit = Callable[[int, int], None]
"""Tells the sender how many more bytes it may write, and how many it may have in flight now. Never blocks and never
raises."""

Answer = Callable[[bytes, str | None], None]
"""Tells the sender of a transfer id: accepted (None) or rejected (why). Never blocks and never raises."""


class Progress(Protocol):
    """Reports the progress of open transfers to their sender. Any thread; never blocks and never raises."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """Report that a mark is verified and kept."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """Report more destination blocks: block_ids[i] is number first_index + i."""


class TransferIntake(Protocol):
    """The receiver, as a transport's listener sees it. Safe to use from any thread."""

    @property
    def epoch(self) -> int:
        """The receiver's incarnation, shown to every sender that connects."""

    def admit(self, give: GiveCredit) -> Credit:
        """Add a connection. `give` is called for the first time before this returns, and then on any thread."""

    def wants_digests(self, capabilities: Capabilities) -> bool:
        """Return True if senders over a transport must send a digest of each transfer."""

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
        """Begin a transfer. Raises TransferFailed, having answered, if it may not begin.

        credit: of the connection that it comes over, from admit(). with_digest: what was agreed with its sender.
        progress: None when the sender's protocol has no open transfers.
        """


class Link(Protocol):
    """A sender's connection to one receiver. One thread calls all but break_off(), and may be blocked by the network.

    Each raises LinkLost when the connection is gone or has made no progress for the transport's time limit.
    """

    @property
    def wants_digest(self) -> bool:
        """True if the receiver verifies a digest of each transfer's bytes."""

    @property
    def has_marks(self) -> bool:
        """True if the receiver's protocol has open transfers."""

    @property
    def is_worn(self) -> bool:
        """True if the next transfer needs a new connection, once none is under way here. False on most links."""

    def open(self, ticket: Ticket) -> None:
        """Begin a transfer."""

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Move source_blocks[i] of each layer to ticket.block_ids[first_index + i] of the same layer; returns when the
        source is no longer read.

        The caller has the receiver's credit for them. Gives `digest` the bytes, layer by layer and in index order.
        Returns soon after is_stopped() turns true, even if the receiver is stuck; an abort of the transfer must follow
        then. Returns how many of the len(layers) * len(source_blocks) blocks are charged to the credit: all, unless it
        was stopped.
        """

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        """Mark blocks [0, block_count) of each layer, ordered after everything written, with the digest of all of it; 0
        without."""

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """Send the end mark, ordered after everything written, with the digest of all of it; 0 without."""

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        """Tell the receiver that the transfer is given up. keep_marked: the marked blocks are still useful."""

    def break_off(self) -> None:
        """End the connection: a blocked call raises LinkLost soon. Any thread; never blocks; idempotent."""

    def close(self) -> None:
        """End the connection and the link's own threads, and release all that it holds. Called once."""


class LinkListener(Protocol):
    """Callbacks of a link to its sender. Called on the link's own thread; must not block."""

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        """The receiver has accepted the transfer (None) or rejected it (the reason)."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """The receiver has verified a mark, and keeps it."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """The transfer has more destination blocks: block_ids[i] is number first_index + i."""

    def credited(self, byte_count: int, window_bytes: int) -> None:
        """The receiver gives credit for this many more bytes, and its window is now window_bytes. May be called before
        connect() has returned."""

    def lost(self, reason: str) -> None:
        """The connection is gone. Called at most once."""


class Listener(Protocol):
    """A transport's listening end."""

    @property
    def endpoint(self) -> KvEndpoint:
        """Address where senders connect; with the real port if 0 was requested."""

    def close(self) -> None:
        """End the listener, its connections (each aborts its landings) and its threads. Idempotent."""


class Transport(Protocol):
    """Makes links and listeners of one kind. Holds no connection itself."""

    @property
    def name(self) -> str:
        """The `transport` of its endpoints."""

    @property
    def label(self) -> str:
        """Name in logs and metrics: the transport's name, and how it is emulated if it is."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the transport."""

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> Link:
        """Register the pool if need be, and connect. Blocks; raises LinkLost, also when the receiver that answers has
        another epoch."""

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> Listener:
        """Register the pool if need be, and listen. Raises ConfigError when the address cannot be bound."""
