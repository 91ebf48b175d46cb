"""Runs one side of KV transfers, in this process or in another one, which a test can kill, stop and continue.

    python -m kaveri.testing.transport_peer FACTORY DESCRIPTOR

runs a nursery for PeerNursery: a process that has imported the transport, and forks a peer process for each socket
received over DESCRIPTOR. FACTORY, "module:callable", creates the Transport. Processes exchange pickled messages, one
per packet; each ends when its socket does.
"""

import contextlib
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.gathering import TransferStep
from kaveri.kv.transfer.receiver import KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports.extra.emulated import EmulatedTransport
from kaveri.kv.transports.socket import SocketTransport
from kaveri.telemetry.logs import configure_logs

WAIT_S = 60.0
"""Timeout of each wait in seconds, far above what a busy machine needs."""
_PACKET_BYTES = 1 << 18

Event = PushAccepted | PushFailed | TransferLanded | TransferReleased


def fill_pool(pool: KvPool, seed: int) -> None:
    noise = np.random.default_rng(seed).bytes(pool.memory.nbytes)
    pool.memory[:] = np.frombuffer(noise, np.uint8).reshape(pool.memory.shape)


def load_transport(factory: str) -> Transport:
    """Create a transport by calling "module:callable"."""
    module, _, name = factory.partition(":")
    return cast(Transport, getattr(importlib.import_module(module), name)())


def load_patient_transport(factory: str) -> Transport:
    """Create a transport by calling "module:callable", with a connect timeout too long for a busy machine to reach."""
    transport = load_transport(factory)
    connecting = transport.inner if isinstance(transport, EmulatedTransport) else transport
    if isinstance(connecting, SocketTransport):
        connecting.connect_timeout_s = WAIT_S
    return transport


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.002)


class Recorder:
    """Records the end of each transfer of a sender or receiver, and the steps (extensions, marks) of open ones.
    doubled: events that came after a transfer's end. on_event: called with each end."""

    def __init__(self, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._changed = threading.Condition()
        self._on_event = on_event
        self.events: dict[bytes, Event] = {}
        self.steps: dict[bytes, list[TransferStep]] = {}
        self.doubled: list[Event | TransferStep] = []

    def __call__(self, event: Event | TransferStep) -> None:
        if isinstance(event, TransferStep):
            with self._changed:
                if event.transfer_id in self.events:
                    self.doubled.append(event)
                self.steps.setdefault(event.transfer_id, []).append(event)
                self._changed.notify_all()
            return
        self._on_event(event)
        with self._changed:
            if event.transfer_id in self.events:
                self.doubled.append(event)
            self.events[event.transfer_id] = event
            self._changed.notify_all()

    def wait(self, ticket: Ticket) -> Event:
        with self._changed:
            arrived = self._changed.wait_for(lambda: ticket.transfer_id in self.events, WAIT_S)
            assert arrived, f"no event of the transfer within {WAIT_S:g} s"
            return self.events[ticket.transfer_id]

    def wait_for_step(self, step: TransferStep) -> None:
        with self._changed:
            told = self._changed.wait_for(lambda: step in self.steps.get(step.transfer_id, ()), WAIT_S)
            seen = self.steps.get(step.transfer_id), self.events.get(step.transfer_id)
            assert told, f"no {step} within {WAIT_S:g} s, but {seen}"


class Side:
    """KV sender or receiver in this process."""

    def __init__(self, factory: str, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._factory = factory
        self._side: KvSender | KvReceiver | None = None
        self._threads: set[threading.Thread] = set()
        self._descriptors: set[tuple[str, str]] = set()
        self.recorder = Recorder(on_event)

    def start_sender(self, layout: KvLayout, block_count: int, seed: int) -> KvPool:
        """Start a KV sender. Returns its pool, which fill_pool() has filled."""
        self._begin()
        pool = KvPool(layout, block_count)
        fill_pool(pool, seed)
        self._side = KvSender(pool, self.recorder, transports=[load_patient_transport(self._factory)])
        return pool

    def start_receiver(
        self, layout: KvLayout, block_count: int, address: str, epoch: int, credit_bytes: int
    ) -> tuple[KvPool, tuple[KvEndpoint, ...]]:
        """Start a KV receiver. Returns its pool and its addresses."""
        self._begin()
        pool, transport = KvPool(layout, block_count), load_transport(self._factory)
        self._side = KvReceiver(
            pool,
            self.recorder,
            listen=[KvEndpoint(transport.name, address)],
            epoch=epoch,
            transports=[transport],
            digests=Digests.ON,
            credit_bytes=credit_bytes,
        )
        return pool, self._side.endpoints

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the KvSender or KvReceiver; "grant_open": grant() with is_open=True."""
        if method == "grant_open":
            assert isinstance(self._side, KvReceiver)
            return self._side.grant(*arguments, is_open=True)
        return getattr(self._side, method)(*arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        self.ask(method, *arguments)

    def wait(self, ticket: Ticket) -> Event:
        return self.recorder.wait(ticket)

    def end(self) -> list[str]:
        """Close the sender or receiver. Returns the names of threads and descriptors that are left."""
        if self._side is not None:
            self._side.close()
            self._side = None
        left = [f"the thread {thread.name}" for thread in set(threading.enumerate()) - self._threads]
        return left + [f"the descriptor {target}" for _, target in open_descriptors() - self._descriptors]

    def _begin(self) -> None:
        # Once for the process: what the transport starts for good.
        load_transport(self._factory)
        self._threads, self._descriptors = set(threading.enumerate()), open_descriptors()


class PeerProcess:
    """KV sender or receiver in another process, with the methods of Side. Context manager that kills the process."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        # Identifies this very process, even after its id has been reused.
        self._process = os.pidfd_open(pid)
        self.is_alive = True
        # Commands for a stopped process, which would eventually fill the socket.
        self._held: list[tuple[str, tuple[Any, ...], bool]] | None = None
        self.recorder = Recorder()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_sender(self, layout: KvLayout, block_count: int, seed: int) -> None:
        self.recorder = Recorder()
        self.ask("start_sender", layout, block_count, seed)

    def start_receiver(
        self,
        layout: KvLayout,
        block_count: int,
        address: str,
        epoch: int,
        credit_bytes: int,
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> tuple[KvPool, tuple[KvEndpoint, ...]]:
        """Start a KV receiver. Returns its pool, as memory shared with the process, and its addresses. on_event: called
        with each end of a transfer, during ask() and wait()."""
        self.recorder = Recorder(on_event)
        self._send("start_receiver", layout, block_count, address, epoch, credit_bytes)
        endpoints, (descriptor,) = self._answer()
        shape = (layout.layer_count, block_count, layout.block_bytes)
        with os.fdopen(descriptor):
            mapped = mmap.mmap(descriptor, int(np.prod(shape)))
        return KvPool.over(layout, np.frombuffer(mapped, np.uint8).reshape(shape)), endpoints

    def ask(self, method: str, *arguments: Any) -> Any:
        self._send(method, *arguments)
        return self._answer()[0]

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for its result."""
        self._send(method, *arguments, is_asked=False)

    def wait(self, ticket: Ticket) -> Event:
        while ticket.transfer_id not in self.recorder.events:
            self._hear()
        return self.recorder.events[ticket.transfer_id]

    def end(self) -> list[str]:
        """Close the sender or receiver; another may be started then. Returns threads and descriptors that are left."""
        return cast(list[str], self.ask("end"))

    def signal(self, number: signal.Signals) -> None:
        """Send SIGKILL, SIGSTOP or SIGCONT. After the first two, wait until all threads have ended or stopped."""
        signal.pidfd_send_signal(self._process, number)
        if number == signal.SIGKILL:
            # Readable once the last of its threads has ended. Its socket ends earlier, when others may still be open.
            assert select.select([self._process], [], [], WAIT_S)[0], "a killed process does not end"
            with contextlib.suppress(EOFError):
                while True:
                    self._hear()
            self.is_alive = False
        if number == signal.SIGSTOP:
            # On a busy machine its threads continue until one of them has taken the signal.
            wait_until(self._stands_still, "the process stands still")
            self._held = []
        if number == signal.SIGCONT:
            held, self._held = self._held or [], None
            for message in held:
                _send(self._channel, message)

    def close(self) -> None:
        """Kill the process. Idempotent."""
        if self.is_alive:
            self.signal(signal.SIGKILL)
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        self._channel.close()

    def _stands_still(self) -> bool:
        states = [
            stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{self._pid}/task").glob("*/stat")
        ]
        return set(states) == {"T"}

    def _send(self, method: str, *arguments: Any, is_asked: bool = True) -> None:
        if self._held is not None:
            self._held.append((method, arguments, is_asked))
            return
        # The process may have been killed.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            _send(self._channel, (method, arguments, is_asked))

    def _answer(self) -> tuple[Any, list[int]]:
        while (heard := self._hear()) is None:
            pass
        return heard

    def _hear(self) -> tuple[Any, list[int]] | None:
        """Receive one message: pass an event to the recorder, or return a response and its descriptors."""
        (kind, content), descriptors = _receive(self._channel)
        assert kind != "error", f"the peer process: {content}"
        if kind == "answer":
            return content, descriptors
        self.recorder(content)
        return None


class PeerNursery:
    """Starts peer processes in milliseconds by forking a process that has loaded the transport. Context manager."""

    def __init__(self, factory: str) -> None:
        self._channel, theirs = _channels()
        command = [sys.executable, "-P", "-m", "kaveri.testing.transport_peer", factory, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def __enter__(self) -> "PeerNursery":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def start(self) -> PeerProcess:
        """Start another peer process; the caller closes it."""
        ours, theirs = _channels()
        with theirs:
            _send(self._channel, (), [theirs.fileno()])
            return PeerProcess(ours, _receive(self._channel)[0])


def open_descriptors() -> set[tuple[str, str]]:
    """Return (number, target) of each open descriptor of this process, memory of KV pools excepted."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    # Pools are memory files, which close with their last reference: pytest still has one.
    return {(number, target) for number, target in descriptors if not target.startswith("/memfd:kaveri-kv")}


def _channels() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair[0].settimeout(WAIT_S)
    return pair


def _send(channel: socket.socket, message: Any, descriptors: list[int] | None = None) -> None:
    socket.send_fds(channel, [pickle.dumps(message)], descriptors or [])


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    try:
        packet, descriptors, _, _ = socket.recv_fds(channel, _PACKET_BYTES, 1)
    except ConnectionResetError:
        packet = b""
    if not packet:
        raise EOFError("the process has ended")
    return pickle.loads(packet), descriptors


def _nurse(factory: str, channel: socket.socket) -> None:
    # Peers are not waited for: their sockets close when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    load_transport(factory)
    while True:
        _, descriptors = _receive(channel)
        with socket.socket(fileno=descriptors[0]) as theirs:
            pid = os.fork()
            if pid == 0:
                channel.close()
                _serve(factory, theirs)
        _send(channel, pid)


def _serve(factory: str, channel: socket.socket) -> None:
    try:
        side = Side(factory)
        while True:
            (method, arguments, is_asked), _ = _receive(channel)
            answer: object = None
            descriptors: list[int] = []
            if method.startswith("start"):
                side = Side(factory, lambda event: _send(channel, ("event", event)))
            if method == "start_receiver":
                pool, answer = side.start_receiver(*arguments)
                descriptors = [pool.descriptor]
            elif method == "start_sender":
                side.start_sender(*arguments)
            elif method == "end":
                answer = side.end()
            else:
                answer = side.ask(method, *arguments)
            if is_asked:
                _send(channel, ("answer", answer), descriptors)
    except BaseException as error:
        if not isinstance(error, EOFError):
            with contextlib.suppress(OSError):
                _send(channel, ("error", traceback.format_exc()))
    finally:
        # Do not close anything of the nursery's here.
        os._exit(0)


def main() -> None:
    factory, descriptor = sys.argv[1:]
    configure_logs("kv-peer", factory, "error")
    with contextlib.suppress(EOFError):
        _nurse(factory, socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
