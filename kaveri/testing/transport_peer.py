"""A sender or a receiver in a process of its own, told what to do line by line: something to kill, stop and wake.

    python -m kaveri.testing.transport_peer send|receive FACTORY ADDRESS

FACTORY is "module:callable", which makes the Transport. Commands and events are JSON objects, one per line, on stdin
and stdout. The pools have PEER_LAYOUT; a sender's is filled by fill_pool.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, cast

import numpy as np

from kaveri.kv.layout import KvLayout
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import KvReceiver
from kaveri.kv.sender import KvSender
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport
from kaveri.telemetry.logs import configure_logs

PEER_LAYOUT = KvLayout("conformance", 4, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float32")
"""16 KiB blocks."""
PEER_BLOCKS = 512


def fill_pool(pool: KvPool, seed: int) -> None:
    """Random bytes, the same for the same seed."""
    generator = np.random.default_rng(seed)
    pool.memory[:] = generator.integers(0, 256, pool.memory.shape, dtype=np.uint8)


def load_transport(factory: str) -> Transport:
    """Calls "module:callable"."""
    module, _, name = factory.partition(":")
    return cast(Transport, getattr(importlib.import_module(module), name)())


class PeerProcess:
    """The parent's handle on such a process. Use as a context manager: it is killed at the end."""

    def __init__(self, role: str, factory: str, address: str = "") -> None:
        command = [sys.executable, "-P", "-m", "kaveri.testing.transport_peer", role, factory, address]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._unread = b""

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        # Broken: a command that the killed process has not read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def tell(self, command: str, **arguments: Any) -> None:
        """Sends a command; see _send and _receive."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The next event. Raises TimeoutError."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not select.select([self._process.stdout], [], [], remaining_s)[0]:
                raise TimeoutError("the peer process says nothing")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError("the peer process has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return cast(dict[str, Any], json.loads(line))

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL, SIGSTOP or SIGCONT."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()
        if number == signal.SIGSTOP:
            # On a busy machine its threads go on until one of them has taken the signal.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    """A ticket as JSON can carry it."""
    names = {"transfer_id": ticket.transfer_id.hex(), "secret": ticket.secret.hex()}
    return {**dataclasses.asdict(ticket), **names}


def ticket_from_json(value: dict[str, Any]) -> Ticket:
    """The inverse."""
    return Ticket(
        transfer_id=bytes.fromhex(value["transfer_id"]),
        secret=bytes.fromhex(value["secret"]),
        epoch=value["epoch"],
        endpoints=tuple(KvEndpoint(**endpoint) for endpoint in value["endpoints"]),
        block_ids=tuple(value["block_ids"]),
        token_count=value["token_count"],
        expires_in_s=value["expires_in_s"],
        layout=KvLayout(**value["layout"]),
    )


def _say(event: object) -> None:
    text = {"event": type(event).__name__}
    for name, value in dataclasses.asdict(event).items():  # type: ignore[call-overload]
        text[name] = value.hex() if isinstance(value, bytes) else value
    print(json.dumps(text), flush=True)


def _send(factory: str) -> None:
    pool = KvPool(PEER_LAYOUT, PEER_BLOCKS)
    fill_pool(pool, 0)
    sender = KvSender(pool, _say, transports=[load_transport(factory)])
    for line in sys.stdin:
        order = json.loads(line)
        if order["command"] == "open":
            ticket = ticket_from_json(order["ticket"])
            sender.open(ticket)
        elif order["command"] == "write":
            sender.write(ticket.transfer_id, order["layer"], order["first_index"], order["source_blocks"])
        else:
            assert order["command"] == "finish", order
            sender.finish(ticket.transfer_id, b"")
    sender.close()


def _receive(factory: str, address: str) -> None:
    transport = load_transport(factory)
    pool = KvPool(PEER_LAYOUT, PEER_BLOCKS)
    listen = [KvEndpoint(transport.name, address)]
    receiver = KvReceiver(pool, _say, listen=listen, epoch=1, transports=[transport])
    for line in sys.stdin:
        order = json.loads(line)
        assert order["command"] == "grant", order
        ticket = receiver.grant(order["block_ids"], order["token_count"], order["expires_in_s"])
        print(json.dumps(ticket_to_json(ticket)), flush=True)
    receiver.close()


def main() -> None:
    """Runs until stdin ends."""
    role, factory, address = sys.argv[1:]
    # To stderr: stdout is for events.
    configure_logs("kv-peer", role)
    if role == "send":
        _send(factory)
    else:
        _receive(factory, address)


if __name__ == "__main__":
    main()
