"""What KV transfers need from a network: connections that keep order and may break. And one within a process.

The simulated engine speaks through this protocol only. A simulation's network implements it with delays, cuts, kills
and freezes; LoopWire is enough for tests of the engine alone.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

TRANSPORT = "simulated"
"""What endpoints of this wire name."""


@dataclass(frozen=True, slots=True)
class OpenPush:
    """Sender: begins a push with a ticket."""

    transfer_id: bytes
    secret: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class PushOpened:
    """Receiver: the ticket is valid. From now on the sender may write into its blocks."""

    transfer_id: bytes


class KvBlock(NamedTuple):
    """What stands for the KV of one block."""

    start: int
    """Position of its first token."""
    token_ids: tuple[int, ...]
    chain_before: int
    """Digest of all tokens before the block."""
    chain: int
    """Digest of all tokens up to the block's last one."""


DAMAGED = -1
"""The chain of a block that was damaged on its way. No tokens lead to it."""


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Sender: blocks of KV for the receiver's pool. Written without looking at the transfer, as RDMA writes are."""

    blocks: tuple[tuple[int, KvBlock], ...]
    """Block ids at the receiver, and what to write there."""


@dataclass(frozen=True, slots=True)
class MarkPush:
    """Sender: the first `block_count` blocks of an open push are written, and full."""

    transfer_id: bytes
    block_count: int
    note: bytes


@dataclass(frozen=True, slots=True)
class PushKept:
    """Receiver: what was marked is verified and kept."""

    transfer_id: bytes
    block_count: int


@dataclass(frozen=True, slots=True)
class ExtendPush:
    """Receiver: an open push has more destination blocks, behind the first `first_index`."""

    transfer_id: bytes
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishPush:
    """Sender: every block is written. note: the hand-over."""

    transfer_id: bytes
    block_count: int
    note: bytes


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """Receiver: how a push ended. reason: None when it was accepted."""

    transfer_id: bytes
    reason: str | None


@dataclass(frozen=True, slots=True)
class PushFenced:
    """Sender: no write of this push follows. Also gives up a push that is still open."""

    transfer_id: bytes
    keep_marked: bool = False
    """See KvSender.abort."""


KvMessage = (
    OpenPush | PushOpened | WriteBlocks | MarkPush | PushKept | ExtendPush | FinishPush | PushAnswer | PushFenced
)


class KvEnd(Protocol):
    """One end of a connection. Called in the context of the process that made it."""

    def received(self, message: KvMessage) -> None:
        """Takes one message, in the order in which they were sent."""

    def lost(self, reason: str) -> None:
        """The connection is gone: nothing that was sent to this end arrives any more. Called once, last."""


class KvLink(Protocol):
    """What one end of a connection holds."""

    def send(self, message: KvMessage) -> None:
        """Queues a message; never waits. Ignored once the connection is gone."""

    def close(self) -> None:
        """Ends the connection. The other end hears lost(), this end nothing more. Idempotent."""


class KvWire(Protocol):
    """The KV network as seen by one process."""

    def listen(self, accept: Callable[[KvLink], KvEnd]) -> str:
        """Takes connections from now on, and returns the address. A process that starts again may get the same one.

        accept: called for each connection, in the context of the caller of listen().
        """

    def connect(self, address: str, end: KvEnd) -> KvLink:
        """Opens a connection. Messages may be sent at once. Where nothing listens, `end.lost` is called soon."""

    def stop_listening(self, address: str) -> None:
        """Takes no more connections at the address and ends those that stand. Idempotent."""


class LoopWire:
    """A KvWire for engines on one asyncio loop. Every message takes one turn of the loop; no connection breaks."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._listeners: dict[str, _Listener] = {}

    def listen(self, accept: Callable[[KvLink], KvEnd]) -> str:
        address = f"loop-{next(self._numbers)}"
        self._listeners[address] = _Listener(accept, contextvars.copy_context(), [])
        return address

    def connect(self, address: str, end: KvEnd) -> KvLink:
        context = contextvars.copy_context()
        listener = self._listeners.get(address)
        if listener is None:
            link = _LoopLink(None)
            link.opposite = _LoopLink(_Reader(end, context))
            link.opposite.tell_lost("connection refused")
            return link
        near, far = _LoopLink(None), _LoopLink(_Reader(end, context))
        near.opposite, far.opposite = far, near
        near.reader = _Reader(listener.context.run(listener.accept, far), listener.context)
        listener.links.append(far)
        return near

    def stop_listening(self, address: str) -> None:
        listener = self._listeners.pop(address, None)
        if listener is not None:
            for link in listener.links:
                link.close()


@dataclass(slots=True)
class _Reader:
    end: KvEnd
    context: contextvars.Context


@dataclass(slots=True)
class _Listener:
    accept: Callable[[KvLink], KvEnd]
    context: contextvars.Context
    links: "list[_LoopLink]"


class _LoopLink:
    """Carries messages to `reader`; `opposite` carries them back."""

    def __init__(self, reader: _Reader | None) -> None:
        self.reader = reader
        self.opposite: _LoopLink | None = None
        self._closed = False

    def send(self, message: KvMessage) -> None:
        if not self._closed and self.reader is not None:
            asyncio.get_running_loop().call_soon(self._deliver, message, context=self.reader.context)

    def close(self) -> None:
        self.tell_lost("the other end closed the connection")
        if self.opposite is not None:
            self.opposite._closed = True

    def tell_lost(self, reason: str) -> None:
        """Nothing is carried any more; the reader hears why."""
        if not self._closed:
            self._closed = True
            if self.reader is not None:
                asyncio.get_running_loop().call_soon(self.reader.end.lost, reason, context=self.reader.context)

    def _deliver(self, message: KvMessage) -> None:
        if not self._closed:
            assert self.reader is not None
            self.reader.end.received(message)
