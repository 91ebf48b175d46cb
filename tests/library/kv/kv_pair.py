"""A KvSender and a KvReceiver in one process, and waits for the outcome of a push."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import xxh3
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports
from kaveri.testing.transport_peer import Recorder, fill_pool

TransportT = TypeVar("TransportT", bound=Transport)


class HookedDigest:
    def __init__(self, on_update: Callable[[memoryview], object]) -> None:
        self._on_update = on_update
        self._digest = xxh3()

    def update(self, data: memoryview, /) -> None:
        self._on_update(data)
        self._digest.update(data)

    def intdigest(self) -> int:
        return self._digest.intdigest()


def limited(transport: TransportT, **limits: float) -> TransportT:
    """Set attributes of a SocketTransport, such as progress_timeout_s."""
    for name, value in limits.items():
        setattr(transport, name, value)
    return transport


@dataclass
class KvPair:
    receiver: KvReceiver
    sender: KvSender
    landed: Recorder
    pushed: Recorder = field(repr=False)

    def push(self, block_ids: Sequence[int], source: Sequence[int], expires_in_s: float = 60.0) -> Ticket:
        token_count = len(block_ids) * self.receiver.pool.layout.block_tokens
        ticket = self.receiver.grant(block_ids, token_count, expires_in_s)
        push(self.sender, ticket, source)
        return ticket

    def accepted(self, ticket: Ticket) -> PushAccepted:
        event = self.pushed.wait(ticket)
        assert isinstance(event, PushAccepted), event
        return event


@contextlib.contextmanager
def receiving(
    pool: KvPool, *listen: KvEndpoint, transports: Sequence[Transport] = (), epoch: int = 1, **options: Any
) -> Iterator[tuple[KvReceiver, Recorder]]:
    """Run a KvReceiver and yield it with a recorder of its events. transports: empty for the default ones."""
    landed, spoken = Recorder(), transports or make_transports()
    receiver = KvReceiver(pool, landed, listen=listen, epoch=epoch, transports=spoken, **options)
    with contextlib.closing(receiver):
        yield receiver, landed


@contextlib.contextmanager
def sending(pool: KvPool, transports: Sequence[Transport] = (), **options: Any) -> Iterator[tuple[KvSender, Recorder]]:
    """Run a KvSender and yield it with a recorder of its events. transports: empty for the default ones."""
    pushed = Recorder()
    with contextlib.closing(KvSender(pool, pushed, transports=transports or make_transports(), **options)) as sender:
        yield sender, pushed


@contextlib.contextmanager
def kv_pair(
    source: KvPool, target: KvPool, listen: KvEndpoint, transports: Sequence[Transport] = ()
) -> Iterator[KvPair]:
    with (
        receiving(target, listen, transports=transports) as (receiver, landed),
        sending(source, transports) as (sender, pushed),
    ):
        yield KvPair(receiver, sender, landed, pushed)


def require_lands(
    receiver: KvReceiver, landed: Recorder, transport: Transport, address: str | None = None
) -> tuple[KvPool, PushAccepted]:
    """Push three blocks of each layer from a new sender's pool, and require that they land. address: overrides the
    receiver's."""
    source = KvPool(receiver.pool.layout, 8)
    fill_pool(source, 3)
    (endpoint, *_) = receiver.endpoints
    ticket = receiver.grant([1, 5, 2], 3 * source.layout.block_tokens, 60.0)
    ticket = replace(ticket, endpoints=(KvEndpoint(endpoint.transport, address or endpoint.address),))
    with sending(source, [transport]) as (sender, pushed):
        push(sender, ticket, [0, 3, 4])
        event = pushed.wait(ticket)
    assert isinstance(event, PushAccepted), event
    assert isinstance(landed.wait(ticket), TransferLanded)
    assert (receiver.pool.memory[:, [1, 5, 2]] == source.memory[:, [0, 3, 4]]).all()
    return source, event


def push(sender: KvSender, ticket: Ticket, source: Sequence[int]) -> None:
    sender.open(ticket)
    for layer in range(sender.pool.layout.layer_count):
        sender.write(ticket.transfer_id, layer, 0, source)
    sender.finish(ticket.transfer_id, b"")


def failure(pushed: Recorder, ticket: Ticket) -> str:
    event = pushed.wait(ticket)
    assert isinstance(event, PushFailed), event
    return event.reason


def release(landed: Recorder, ticket: Ticket) -> str:
    event = landed.wait(ticket)
    assert isinstance(event, TransferReleased), event
    return event.reason
