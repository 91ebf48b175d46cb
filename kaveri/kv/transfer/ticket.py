"""Ticket: permission to push one request's KV cache into another instance's pool. Pure values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kaveri.errors import InvalidArgument
from kaveri.kv.layout.layout import KvLayout, PartPlace, part_index, part_places, source_rank


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Address where a receiver listens for senders, and the transport to use there."""

    transport: str
    """A name of kaveri.kv.transports: "shm", "unix", "tcp", ..."""
    address: str
    """The path of a Unix socket for shm and unix, else "host:port"."""


@dataclass(frozen=True, slots=True)
class TicketPart:
    """Part of a ticket: the KV heads that one rank of the sender pushes to one rank of the receiver."""

    place: PartPlace
    endpoints: tuple[KvEndpoint, ...]
    """Addresses where that rank takes pushes, in its order of preference."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to push one request's KV into a receiver's blocks. Used once; expires `expires_in_s` seconds after its
    grant, unless the KV has landed by then."""

    transfer_id: bytes
    """16 random bytes; identifies the transfer over all receivers and incarnations."""
    secret: bytes = field(repr=False)
    """16 random bytes that the sender shows when it begins the transfer."""
    epoch: int
    """The receiver's incarnation; a restarted receiver refuses tickets of an earlier one."""
    endpoints: tuple[KvEndpoint, ...]
    """Addresses in the receiver's order of preference. Empty if there are parts."""
    block_ids: tuple[int, ...]
    """Destination blocks: block i takes the block_tokens tokens from (first_block + i) * block_tokens on."""
    token_count: int
    """Tokens of the request; those from first_block on are pushed, and the last block may be part full."""
    expires_in_s: float
    """Seconds from the grant, finite; void from the beginning if not above 0."""
    layout: KvLayout
    """The receiver's block layout; a sender that cannot convert its own blocks to it refuses."""
    first_block: int = 0
    """Blocks of the request that the receiver already has in its prefix cache: they are not pushed."""
    parts: tuple[TicketPart, ...] = ()
    """Transfers between one rank of the sender and one of the receiver (part_tickets). The KV has landed when all parts
    have. Empty if there is a single rank on both sides."""
    is_open: bool = False
    """True if the transfer may be marked, extended, and end early. Its time limit then counts from the last mark."""

    def part_tickets(self, is_wanted: Callable[[PartPlace], bool]) -> "tuple[Ticket, ...]":
        """Return a ticket for each part (heads for one pair of ranks) that is_wanted() selects, with block ids of a
        pool split by heads. A ticket without parts is its own single part."""
        if not self.parts:
            return (self,) if is_wanted(PartPlace(0, self.layout)) else ()
        return tuple(self._part_ticket(number) for number, part in enumerate(self.parts) if is_wanted(part.place))

    def _part_ticket(self, number: int) -> "Ticket":
        place, endpoints = self.parts[number].place, self.parts[number].endpoints
        return replace(
            self,
            # Each transfer has its own id, on both sides.
            transfer_id=(int.from_bytes(self.transfer_id) ^ number).to_bytes(len(self.transfer_id)),
            endpoints=endpoints,
            block_ids=part_blocks(self.layout, place, self.block_ids),
            layout=place.layout,
            parts=(),
        )


def part_blocks(destination: KvLayout, place: PartPlace, block_ids: Sequence[int]) -> tuple[int, ...]:
    """Convert block ids of a destination rank's pool to this part's ids in that pool split by heads (KvPool.split)."""
    index, ways = part_index(destination, place)
    return tuple(block_ids) if ways == 1 else tuple(block * ways + index for block in block_ids)


def ticket_parts(
    source: KvLayout, destination: KvLayout, endpoints: Sequence[tuple[KvEndpoint, ...]]
) -> tuple[TicketPart, ...]:
    """Return a ticket's parts (heads for one pair of ranks) for KV pushed from layout `source`; () if only one.

    endpoints: for each rank of the receiver. Raises LayoutMismatch.
    """
    if source == destination and source.tensor_ranks == 1:
        return ()
    places = part_places(source, destination)
    return tuple(TicketPart(place, endpoints[place.rank]) for place in places) if len(places) > 1 else ()


def require_pushable(source: KvLayout, ticket: Ticket) -> None:
    """Raise LayoutMismatch if `source` blocks cannot be converted to the ticket's layout, and InvalidArgument if the
    ticket's parts are not those of a push between these ranks."""
    if source == ticket.layout and source.tensor_ranks == 1 and not ticket.parts:
        return
    places = part_places(source, ticket.layout)
    given = [part.place for part in ticket.parts] or [PartPlace(0, ticket.layout)]
    if given != list(places):
        raise InvalidArgument("ticket.parts", len(ticket.parts), f"the {len(places)} of a push between these ranks")


def pushed_tickets(source: KvLayout, rank: int, ticket: Ticket) -> tuple[Ticket, ...]:
    """Return a ticket for each part (heads for one pair of ranks) that this sender rank pushes; empty if others push
    the same heads. Check the ticket by require_pushable() first."""
    return ticket.part_tickets(lambda place: source_rank(source, place) == rank)


def taken_tickets(rank: int, ticket: Ticket) -> tuple[Ticket, ...]:
    """Return a ticket for each part (heads for one pair of ranks) that this receiver rank takes in."""
    return ticket.part_tickets(lambda place: place.rank == rank)


def first_source_block(ticket: Ticket, layout: KvLayout) -> int:
    """Return the index of the request's first block, in blocks of `layout`, with a token that the ticket asks for."""
    return ticket.first_block * ticket.layout.block_tokens // layout.block_tokens
