"""A push from a sender to a receiver in one process, and how it ends."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports
from kaveri.testing.transport_peer import Recorder


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
        """Wait for the acceptance of a push."""
        event = self.pushed.wait(ticket)
        assert isinstance(event, PushAccepted), event
        return event


@contextlib.contextmanager
def kv_pair(
    source: KvPool, target: KvPool, listen: KvEndpoint, transports: Sequence[Transport] = ()
) -> Iterator[KvPair]:
    """Closed at the end. transports: of both; () for the usual ones."""
    transports = transports or make_transports()
    landed, pushed = Recorder(), Recorder()
    with (
        contextlib.closing(KvReceiver(target, landed, listen=[listen], epoch=1, transports=transports)) as receiver,
        contextlib.closing(KvSender(source, pushed, transports=transports)) as sender,
    ):
        yield KvPair(receiver, sender, landed, pushed)


def push(sender: KvSender, ticket: Ticket, source: Sequence[int]) -> None:
    """Push the same source blocks of each layer, layer by layer."""
    sender.open(ticket)
    for layer in range(sender.pool.layout.layer_count):
        sender.write(ticket.transfer_id, layer, 0, source)
    sender.finish(ticket.transfer_id, b"")


def failure(pushed: Recorder, ticket: Ticket) -> str:
    event = pushed.wait(ticket)
    assert isinstance(event, PushFailed), event
    return event.reason


def release(landed: Recorder, ticket: Ticket) -> str:
    """Wait until a transfer was released; returns the reason."""
    event = landed.wait(ticket)
    assert isinstance(event, TransferReleased), event
    return event.reason
