"""A sender's side of one receiver, over links that do what a test says."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kaveri.kv.digest import Digest
from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Capabilities, LinkListener
from kaveri.testing.transport_conformance import WAIT_S, Recorder, wait_until

LAYOUT = KvLayout("m", 1, block_tokens=4, kv_head_count=1, head_dim=8, dtype="float32")
TICKET = Ticket(bytes(16), bytes(16), 1, (KvEndpoint("scripted", "here"),), (0,), 4, 60.0, LAYOUT)


class ScriptedLink:
    """Takes all that it is given credit for, and accepts at the end."""

    def __init__(self, listener: LinkListener, on_close: Callable[[], None]) -> None:
        self._listener = listener
        self._on_close = on_close

    def open(self, ticket: Ticket) -> None:
        """Nothing to do."""

    def write(
        self,
        ticket: Ticket,
        layer: int,
        first_index: int,
        source_blocks: Sequence[int],
        digest: Digest,
        is_stopped: Callable[[], bool],
    ) -> int:
        return len(source_blocks)

    def end_layer(self, ticket: Ticket, layer: int, layer_digest: int) -> None:
        """Nothing to do."""

    def finish(self, ticket: Ticket, note: bytes) -> None:
        self._listener.answered(ticket.transfer_id, None)

    def abort(self, ticket: Ticket) -> None:
        """Nothing to do."""

    def break_off(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        self._on_close()


class ScriptedTransport:
    """Makes links; what happens when one is made and closed is the test's."""

    name = label = "scripted"
    capabilities = Capabilities(
        one_sided=False,
        needs_posted_receives=False,
        memory_kinds=frozenset({"host"}),
        same_host_only=True,
        can_revoke=True,
        write_bytes=1 << 20,
    )

    def __init__(self, on_connect: Callable[[LinkListener], None], on_close: Callable[[], None]) -> None:
        self._on_connect = on_connect
        self._on_close = on_close

    def connect(self, endpoint: KvEndpoint, epoch: int, pool: KvPool, listener: LinkListener) -> ScriptedLink:
        self._on_connect(listener)
        return ScriptedLink(listener, self._on_close)

    def listen(self, address: str, pool: KvPool, intake: object) -> None:
        raise AssertionError


def push(sender: KvSender, ticket: Ticket) -> None:
    sender.open(ticket)
    sender.write(ticket.transfer_id, 0, 0, [0])
    sender.finish(ticket.transfer_id, b"")


def test_a_new_connection_has_all_its_time_to_give_credit_though_the_last_one_gave_none() -> None:
    second = replace(TICKET, transfer_id=bytes([2] * 16))
    listeners: list[LinkListener] = []
    closing, closed = threading.Event(), threading.Event()

    def on_close() -> None:
        closing.set()
        # The next push comes while the connection that gave no credit is on its way out.
        assert closed.wait(WAIT_S)

    pushed = Recorder()
    transport = ScriptedTransport(listeners.append, on_close)
    sender = KvSender(KvPool(LAYOUT, 1), pushed, transports=[transport], credit_timeout_s=1.0)
    with contextlib.closing(sender):
        push(sender, TICKET)
        failed = pushed.wait(TICKET)
        assert isinstance(failed, PushFailed)
        assert "no credit" in failed.reason
        assert closing.wait(WAIT_S)
        push(sender, second)
        closed.set()
        wait_until(lambda: sender.flow().credit_waits == 2 or second.transfer_id in pushed.events, "a wait for credit")
        listeners[1].credited(2 * LAYOUT.block_bytes, 2 * LAYOUT.block_bytes)
        event = pushed.wait(second)
    assert isinstance(event, PushAccepted), event
