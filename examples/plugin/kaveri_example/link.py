"""A KV transport: `--kv-transports counted`. TCP, with a count of the bytes of KV that each link has moved."""

from collections.abc import Callable, Sequence

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Link, LinkListener, Listener, TransferIntake
from kaveri.kv.transports import tcp_transport
from kaveri.telemetry.logs import get_logger


class CountedTransport:
    """A Transport around another one."""

    name = label = "counted"

    def __init__(self, advertise_host: str | None = None) -> None:
        """advertise_host: given by Kaveri, because the parameter has this name."""
        self._inner = tcp_transport(advertise_host)
        # Endpoints in tickets carry the name, and peers look for a transport of that name.
        self._inner.name = self._inner.label = self.name
        self.capabilities = self._inner.capabilities

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> "CountedLink":
        """See Transport.connect."""
        return CountedLink(self._inner.connect(endpoint, epoch, pool, listener), endpoint, pool.layout.block_bytes)

    def listen(self, address: str, pool: KvPool, intake: TransferIntake) -> Listener:
        """See Transport.listen."""
        return self._inner.listen(address, pool, intake)


class CountedLink:
    """A Link that counts. One thread calls all but break_off()."""

    def __init__(self, inner: Link, endpoint: KvEndpoint, block_bytes: int) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._block_bytes = block_bytes
        self.moved_bytes = 0

    @property
    def wants_digest(self) -> bool:
        """See Link.wants_digest."""
        return self._inner.wants_digest

    @property
    def has_marks(self) -> bool:
        """See Link.has_marks."""
        return self._inner.has_marks

    @property
    def is_worn(self) -> bool:
        """See Link.is_worn."""
        return self._inner.is_worn

    def open(self, ticket: Ticket) -> None:
        """See Link.open."""
        self._inner.open(ticket)

    def write(
        self,
        ticket: Ticket,
        layers: range,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> int:
        """See Link.write."""
        heard_count = self._inner.write(ticket, layers, first_index, source_blocks, digest, is_stopped)
        self.moved_bytes += heard_count * self._block_bytes
        return heard_count

    def mark(self, ticket: Ticket, block_count: int, note: bytes, digest: int) -> None:
        """See Link.mark."""
        self._inner.mark(ticket, block_count, note, digest)

    def finish(self, ticket: Ticket, note: bytes, digest: int) -> None:
        """See Link.finish."""
        self._inner.finish(ticket, note, digest)

    def abort(self, ticket: Ticket, *, keep_marked: bool = False) -> None:
        """See Link.abort."""
        self._inner.abort(ticket, keep_marked=keep_marked)

    def break_off(self) -> None:
        """See Link.break_off."""
        self._inner.break_off()

    def close(self) -> None:
        """See Link.close."""
        get_logger().info("example_link_closed", peer=self._endpoint.address, moved_bytes=self.moved_bytes)
        self._inner.close()
