"""The receiving process of kv.transfer: receivers of one transport, and bare links to compare with, one at a time."""

import contextlib
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.support.bare_links import BareSender, bare_receiver, bare_sender
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES, TLS, make_transports
from kaveri.kv.transports.tls import TlsFiles
from kaveri.telemetry.logs import configure_logs
from tests.support.certificates import Authority

WAIT_S = 60.0
DIGESTS = {"xxh3": Digests.ON, "none": Digests.OFF}
"""Of the receiver of this name."""


class ReceivingProcess:
    """The sending end of everything, and the process with the receiving end."""

    def __init__(
        self, control: Connection, transport: str, tls: TlsFiles | None, pool: KvPool, bare: dict[str, BareSender]
    ) -> None:
        """pool: to push from. bare: by kind."""
        self._control = control
        self._transport = transport
        self._tls = tls
        self._pool = pool
        self._bare = bare
        self._events: queue.Queue[PushAccepted | PushFailed] = queue.Queue()
        self._senders: dict[str, KvSender] = {}

    def cpu_s(self) -> float:
        """What both processes have used so far."""
        return float(str(self._ask("cpu"))) + time.process_time()

    def bare_copy(self, kind: str, source: Sequence[int], target: Sequence[int]) -> float:
        """Sends the blocks over a bare link; returns when that began."""
        self._ask("bare", list(target), kind)
        began_s = time.perf_counter()
        self._bare[kind].send(self._pool, source, target)
        return began_s

    def push(self, source: Sequence[int], target: Sequence[int], digest: str) -> float:
        """Pushes the blocks and waits for the acceptance; returns when that began."""
        ticket = self._ask("grant", list(target), digest)
        assert isinstance(ticket, Ticket)
        if digest not in self._senders:
            transports = make_transports((self._transport,), tls=self._tls)
            self._senders[digest] = KvSender(self._pool, self._events.put, transports=transports)
        sender = self._senders[digest]
        began_s = time.perf_counter()
        sender.open(ticket)
        for layer in range(self._pool.layout.layer_count):
            sender.write(ticket.transfer_id, layer, 0, source)
        sender.finish(ticket.transfer_id, b"")
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, PushAccepted), event
        return began_s

    def close(self) -> None:
        """Ends the connections and the process."""
        for sender in self._senders.values():
            sender.close()
        self._control.send(("end",))
        for bare in self._bare.values():
            bare.close()

    def _ask(self, *question: object) -> object:
        self._control.send(question)
        return self._control.recv()


@contextlib.contextmanager
def receiving_process(transport: str, bare_kinds: Sequence[str], pool: KvPool) -> Iterator[ReceivingProcess]:
    """Starts the other process, with a pool like this one; ends it."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        control, their_control = spawn.Pipe()
        tls = Authority(Path(folder)).certify("benchmark") if transport == TLS else None
        arguments = their_control, transport, tls, tuple(bare_kinds), folder, pool.layout, pool.block_count
        process = spawn.Process(target=_receive, args=arguments, daemon=True)
        process.start()
        their_control.close()
        bare = {kind: bare_sender(kind, pool, control.recv()) for kind in bare_kinds}
        receiving = ReceivingProcess(control, transport, tls, pool, bare)
        try:
            yield receiving
        finally:
            receiving.close()
            process.join(WAIT_S)
            control.close()


def _receive(
    control: Connection,
    transport: str,
    tls: TlsFiles | None,
    bare_kinds: Sequence[str],
    folder: str,
    layout: KvLayout,
    block_count: int,
) -> None:
    configure_logs("kv_transfer", "receiver", level="warning")
    pool = KvPool(layout, block_count)
    receivers: dict[str, KvReceiver] = {}
    for epoch, (name, digests) in enumerate(DIGESTS.items()):
        address = str(Path(folder) / f"{name}.sock") if transport in PATH_NAMES else "127.0.0.1:0"
        receivers[name] = KvReceiver(
            pool,
            lambda _: None,
            listen=[KvEndpoint(transport, address)],
            epoch=epoch,
            transports=make_transports((transport,), tls=tls),
            digests=digests,
        )
    bare = {}
    for kind in bare_kinds:
        bare[kind] = bare_receiver(kind, pool, folder)
        control.send(bare[kind].address)
        bare[kind].accept()
    while (order := control.recv())[0] != "end":
        if order[0] == "cpu":
            control.send(time.process_time())
        elif order[0] == "grant":
            control.send(receivers[order[2]].grant(order[1], 1, WAIT_S))
        else:
            control.send("ready")
            bare[order[2]].receive(order[1])
    for receiver in receivers.values():
        receiver.close()
    for link in bare.values():
        link.close()
