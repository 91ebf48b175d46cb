"""The link between two pools, as a sender and a receiver see it. Owns the contract; bookkeeping of transfers is theirs.

A transport moves blocks, named by their index in a registered pool and never by an address. Three events stay apart:

    local done      Link.write() has returned: the transport no longer reads the source blocks
    remote visible  TransferIntake hears of the blocks, and at last of the note, which is ordered behind every byte
    accepted        the receiver has verified the digest, if it wants one, and its answer has reached the sender

An open transfer (Ticket.is_open) may be marked on its way: the receiver verifies all that was sent up to the mark,
keeps it whatever happens afterwards, and says so. It may get more destination blocks, and end with fewer than it has.

What a sender may have under way is the receiver's to say: it gives credit, in bytes, for all transfers of a connection.

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
"""Most that travels with a mark, and with the end of a transfer."""


def require_note(note: bytes) -> None:
    """Raises ValueError for one that is too long."""
    if len(note) > NOTE_BYTES_MAX:
        raise ValueError(f"a note of {len(note)} bytes; at most {NOTE_BYTES_MAX} travel")


class LinkLost(TransferFailed):
    """The connection cannot be opened or is gone. It is fenced: this side neither reads nor writes blocks through
    it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a transport, for planning."""

    one_sided: bool
    """The sender writes into the receiver's memory by itself."""
    needs_posted_receives: bool
    """The receiver must post a receive before the sender may send (NCCL, gloo)."""
    memory_kinds: frozenset[str]
    """"host"; "cuda" when one takes device memory, which none does today."""
    same_host_only: bool
    can_revoke: bool
    """The receiver alone can stop writes of one transfer, while the sender is silent and the link stays up."""
    is_byte_stream: bool
    """Bytes are copied through buffers on their way, and a digest of them is worth its time; else the kernel or the
    network card writes them into the receiver's memory itself."""
    write_bytes: int
    """Most bytes of one write(), except for a larger block: what may have to be filled up after an abort."""
    path_addresses: bool = False
    """Its listeners' addresses are paths of Unix sockets, not HOST:PORT."""


class Landing(Protocol):
    """One transfer on the receiving side, while a link carries it. Called by that link's thread only.

    Every method raises TransferFailed when the transfer is refused or has ended; the landing is over then, the sender
    has been answered, and the link drops whatever else it brings.
    """

    @property
    def pool(self) -> KvPool:
        """What the ticket's blocks are of: the listener's pool, or the same memory in smaller blocks. One connection
        carries blocks of one size, the sender's."""

    def begin_write(self, layers: range, first_index: int, block_count: int) -> tuple[Sequence[int], Digest | None]:
        """Permits writes into destination blocks [first_index, first_index + block_count) of some layers, until
        end_write.

        Returns the blocks in the pool, the same in each layer, and the transfer's digest, None without: the link gives
        it the bytes in the order in which the sender sends them, layer by layer, best while they are in the processor's
        cache. Within a layer blocks come in index order, each exactly once.
        """

    def hold(self) -> None:
        """For one-sided links, once and first: the sender writes by itself, into any of the ticket's blocks, until
        fence() or finish(). begin_write() and end_write() then say which blocks it has written."""

    def fence(self) -> None:
        """Ends hold(): the sender cannot write any more. Never raises; idempotent."""

    def is_stopped(self) -> bool:
        """The transfer ended meanwhile: write no more and call end_write at once. Never raises."""

    def end_write(self) -> None:
        """Nothing writes into the permitted blocks any more, and unless stopped all their bytes are there."""

    def finish(self, note: bytes, sender_digest: int) -> None:
        """The end mark came, behind every byte, with the sender's digest of them. Returns when the transfer has landed
        and its sender been answered."""

    def mark(self, block_count: int, note: bytes, sender_digest: int) -> None:
        """The sender marked blocks [0, block_count) of each layer, behind their bytes, with its digest of all bytes so
        far. Returns when the mark is kept and its sender been answered. Refused in transfers that are not open."""

    def abort(self, reason: str, *, given_up: bool = False) -> None:
        """Ends it: the sender gave up or broke the rules, or its link is gone. Answers it. Never raises; idempotent.

        given_up: the sender said so itself.
        """


class Credit(Protocol):
    """What one connection's sender may write, as its receiving end sees it. Called by that end's thread, where nothing
    else is said.

    A write is charged by its blocks, whatever becomes of its transfer.
    """

    def spend(self, byte_count: int) -> None:
        """So many bytes begin to arrive, or are there. Raises LinkLost when the sender had no credit for them: a
        two-sided link lets none of them in, a one-sided one finds out when they are there."""

    def settle(self, byte_count: int) -> None:
        """So many of the bytes that were spent are taken in or thrown away. May give credit, to other senders too."""

    def expect(self, byte_count: int) -> None:
        """For landings, any thread: so many bytes are to come over the connection; fewer than was said before, where
        negative. May give credit, to other senders too."""

    def arrived(self, byte_count: int) -> None:
        """For landings: so many of the bytes that were to come are here, and settle() follows."""

    def close(self) -> None:
        """The connection has ended, and nothing is written through it any more. Idempotent."""


GiveCredit = Callable[[int, int], None]
"""Tells the sender that it may write so many bytes more, and how many it may have under way now. Never blocks and never
raises."""

Answer = Callable[[bytes, str | None], None]
"""Tells the sender of a transfer id: accepted (None) or rejected (why). Never blocks and never raises."""


class Progress(Protocol):
    """Tells the sender of open transfers how they go. Any thread; never blocks and never raises."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """A mark is verified and kept."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """The transfer has more destination blocks: block_ids[i] is number first_index + i."""


class TransferIntake(Protocol):
    """The receiver, as a transport's listener sees it. Safe to use from any thread."""

    @property
    def epoch(self) -> int:
        """The receiver's incarnation, shown to every sender that connects."""

    def admit(self, give: GiveCredit) -> Credit:
        """One connection more. `give` is called for the first time before this returns, and then on any thread."""

    def wants_digests(self, capabilities: Capabilities) -> bool:
        """Whether senders over a transport are to send a digest of each transfer."""

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
        """Begins a transfer. Raises TransferFailed, having answered, when it may not begin.

        credit: of the connection that it comes over, from admit(). with_digest: what was agreed with its sender.
        progress: None when the sender's protocol has no open transfers.
        """


class Link(Protocol):
    """A sender's connection to one receiver. One thread calls all but break_off(), and may be blocked by the network.

    Each raises LinkLost when the connection is gone or has made no progress for the transport's time limit.
    """

    @property
    def wants_digest(self) -> bool:
        """Whether the receiver verifies a digest of each transfer's bytes."""

    @property
    def has_marks(self) -> bool:
        """Whether the receiver's protocol has open transfers."""

    @property
    def is_worn(self) -> bool:
        """Whether the next transfer is to have a new connection, if none is under way here. False on most links."""

    def open(self, ticket: Ticket) -> None:
        """Begins a transfer."""

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Moves source_blocks[i] of each layer to ticket.block_ids[first_index + i] of the same layer, and returns when
        the source is no longer read.

        The caller has the receiver's credit for them. Gives `digest` the bytes, layer by layer and in index order.
        Returns soon after is_stopped() turns true, whatever the receiver does; an abort of the transfer must follow
        then. Returns how many of the len(layers) * len(source_blocks) blocks the receiver hears of, so that they cost
        credit: all, unless it was stopped.
        """

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        """Marks blocks [0, block_count) of each layer, ordered behind everything written, with the digest of all of it;
        0 without."""

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """Sends the end mark, ordered behind everything written, with the digest of all of it; 0 without."""

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        """Tells the receiver that the transfer is given up. keep_marked: what is marked is still of use."""

    def break_off(self) -> None:
        """Ends the connection: a blocked call raises LinkLost soon. Any thread; never blocks; idempotent."""

    def close(self) -> None:
        """Ends the connection and the link's own threads, and gives all it holds back. Called once."""


class LinkListener(Protocol):
    """The sender, as a link sees it. Called on the link's own thread; must not block."""

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        """The receiver accepted the transfer (None) or rejected it (why)."""

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """The receiver has verified a mark, and keeps it."""

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """The transfer has more destination blocks: block_ids[i] is number first_index + i."""

    def credited(self, byte_count: int, window_bytes: int) -> None:
        """The receiver lets so many bytes more be written, and would let so many be under way at once. May be called
        before connect() has returned."""

    def lost(self, reason: str) -> None:
        """The connection is gone. Called at most once."""


class Listener(Protocol):
    """A transport's listening end."""

    @property
    def endpoint(self) -> KvEndpoint:
        """Where senders connect; with the real port where 0 was asked for."""

    def close(self) -> None:
        """Ends the listener, its connections (each aborts its landings) and its threads. Idempotent."""


class Transport(Protocol):
    """Makes links and listeners of one kind. Holds no connection itself."""

    @property
    def name(self) -> str:
        """The `transport` of its endpoints."""

    @property
    def label(self) -> str:
        """What logs and metrics call it: its name, and how it is emulated where it is."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> Link:
        """Registers the pool where need be, and connects. Blocks; raises LinkLost, also when the receiver that answers
        is not of this epoch."""

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> Listener:
        """Registers the pool where need be, and listens. Raises ConfigError when the address cannot be bound."""
