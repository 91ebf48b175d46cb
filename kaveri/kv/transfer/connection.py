"""A sender's connection to one receiver: a link, and the credit for it."""

from collections.abc import Sequence
from typing import Protocol

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Link, Transport


class ConnectionOwner(Protocol):
    """The user of a connection. Called on the link's own thread."""

    def take_credit(self, connection: "Connection", byte_count: int, window_bytes: int) -> None:
        """See LinkListener.credited."""

    def take_answer(self, connection: "Connection", transfer_id: bytes, rejection: str | None) -> None:
        """See LinkListener.answered."""

    def take_mark(self, connection: "Connection", transfer_id: bytes, block_count: int) -> None:
        """See LinkListener.marked."""

    def take_extension(
        self, connection: "Connection", transfer_id: bytes, first_index: int, block_ids: Sequence[int]
    ) -> None:
        """See LinkListener.extended."""

    def lose(self, connection: "Connection", reason: str) -> None:
        """See LinkListener.lost."""


class Connection:
    """A link and its credit; the link's listener. A push belongs to one connection, and not to its successor."""

    def __init__(
        self, owner: ConnectionOwner, transport: Transport, endpoint: KvEndpoint, epoch: int, pool: KvPool
    ) -> None:
        """epoch: the receiver's. Raises LinkLost."""
        self.transport = transport
        self.endpoint = endpoint
        self.lost_reason: str | None = None
        """Why the connection was lost; None while it stands."""
        self.credit_bytes = 0
        """Bytes that may be written now."""
        self.window_bytes = 0
        """Bytes that may be in flight."""
        self._owner = owner
        # Last: credit may arrive at once.
        self.link: Link = transport.connect(endpoint, epoch, pool, self)

    def room(self, block_bytes: int) -> int:
        """Return how many blocks one write may take. The caller holds the lock.

        A write takes at most half of the window, so that credit for the next one returns while it is in flight.
        """
        write_bytes = min(self.transport.capabilities.write_bytes, self.window_bytes // 2)
        return min(max(1, write_bytes // block_bytes), self.credit_bytes // block_bytes)

    def credited(self, byte_count: int, window_bytes: int) -> None:
        """See LinkListener.credited."""
        self._owner.take_credit(self, byte_count, window_bytes)

    def answered(self, transfer_id: bytes, rejection: str | None) -> None:
        """See LinkListener.answered."""
        self._owner.take_answer(self, transfer_id, rejection)

    def marked(self, transfer_id: bytes, block_count: int) -> None:
        """See LinkListener.marked."""
        self._owner.take_mark(self, transfer_id, block_count)

    def extended(self, transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> None:
        """See LinkListener.extended."""
        self._owner.take_extension(self, transfer_id, first_index, block_ids)

    def lost(self, reason: str) -> None:
        """See LinkListener.lost."""
        self._owner.lose(self, reason)

    def close(self) -> None:
        """End the link. The last call."""
        link = self.link
        # The link refers to this listener, and both to the sender and its pool, until the next garbage collection.
        del self.link
        link.close()
