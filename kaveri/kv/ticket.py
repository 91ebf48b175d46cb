"""The permission to push one request's KV cache into another instance's pool. Pure values."""

from dataclasses import dataclass, field

from kaveri.kv.layout import KvLayout


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where a receiver listens."""

    transport: str
    """A name of kaveri.kv.transports: "shm", "unix", "tcp", ..."""
    address: str
    """The path of a Unix socket for shm and unix, else "host:port"."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Granted once by a receiver, used once by a sender, void after `expires_in_s` unless the KV has landed."""

    transfer_id: bytes
    """16 random bytes; names the transfer over all receivers and incarnations."""
    secret: bytes = field(repr=False)
    """16 random bytes that the sender shows on the data plane."""
    epoch: int
    """The receiver's incarnation; a restarted receiver refuses tickets of its former life."""
    endpoints: tuple[KvEndpoint, ...]
    """In the receiver's order of preference."""
    block_ids: tuple[int, ...]
    """Destination blocks: block i takes the block_tokens tokens from (first_block + i) * block_tokens on."""
    token_count: int
    """Tokens of the request; those from first_block on are pushed, and the last block may be part full."""
    expires_in_s: float
    """Seconds from the grant."""
    layout: KvLayout
    """The receiver's layout; a sender whose own differs refuses."""
    first_block: int = 0
    """Blocks of the request that the receiver has already, in its prefix cache: they are not pushed."""
