"""The permission to push one request's KV cache into another instance's pool. Pure values."""

from dataclasses import dataclass, field, replace

from kaveri.errors import InvalidArgument
from kaveri.kv.layout.layout import KvLayout
from kaveri.seconds import DAY_S, require_seconds


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where a receiver listens."""

    transport: str
    """A name of kaveri.kv.transports: "shm", "unix", "tcp", ..."""
    address: str
    """The path of a Unix socket for shm and unix, else "host:port"."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Granted once by a receiver, used once by a sender, void after `expires_in_s` unless the KV has landed.

    Raises InvalidArgument for an `expires_in_s` that is no number of seconds up to a day.
    """

    transfer_id: bytes
    """16 random bytes; names the transfer over all receivers and incarnations."""
    secret: bytes = field(repr=False)
    """16 random bytes that the sender shows on the data plane."""
    epoch: int
    """The receiver's incarnation; a restarted receiver refuses tickets of its former life."""
    endpoints: tuple[KvEndpoint, ...]
    """In the receiver's order of preference. Empty where there are parts."""
    block_ids: tuple[int, ...]
    """Destination blocks: block i takes the block_tokens tokens from (first_block + i) * block_tokens on."""
    token_count: int
    """Tokens of the request; those from first_block on are pushed, and the last block may be part full."""
    expires_in_s: float
    """Seconds from the grant; void from the beginning where that is not above 0."""
    layout: KvLayout
    """The receiver's layout; a sender whose own differs refuses."""
    first_block: int = 0
    """Blocks of the request that the receiver has already, in its prefix cache: they are not pushed."""
    parts: tuple[tuple[KvEndpoint, ...], ...] = ()
    """Of a receiver with several tensor-parallel ranks: where each of them takes its heads, in the order of ranks."""

    def __post_init__(self) -> None:
        require_seconds("ticket.expires_in_s", self.expires_in_s, least_s=-DAY_S)

    def of_ranks(self) -> "tuple[Ticket, ...]":
        """What each rank of the receiver has granted: a ticket for its heads; the transfer's name, the secret and the
        numbers of the blocks are the same in all. Raises InvalidArgument when parts and layout do not agree."""
        ranks = self.layout.tensor_ranks
        if ranks == 1 and not self.parts:
            return (self,)
        if len(self.parts) != ranks:
            raise InvalidArgument("ticket.parts", len(self.parts), f"one for each of {ranks} tensor-parallel ranks")
        return tuple(
            replace(self, endpoints=endpoints, layout=self.layout.rank(rank), parts=())
            for rank, endpoints in enumerate(self.parts)
        )


def first_source_block(ticket: Ticket, layout: KvLayout) -> int:
    """The first of a request's blocks, of `layout`, that holds a token which the ticket asks for."""
    return ticket.first_block * ticket.layout.block_tokens // layout.block_tokens
