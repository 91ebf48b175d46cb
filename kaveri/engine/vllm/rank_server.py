"""Serves the engine's calls to a tensor-parallel rank, in the rank's own process. The connection carries small calls
and events; KV is pushed directly to the other instance. When the connection ends, so do the rank's transfers."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

from kaveri.engine.vllm.rank import RankCall, RankSetup
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import configure_logs, get_logger

END_GRACE_S = 10.0
"""Seconds for a rank's process to exit by itself after its engine has ended."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Message to a rank: end all transfers. Response: ("detached", None)."""


@dataclass(frozen=True, slots=True)
class AskFlow:
    """Message to a rank: send a snapshot of the transfers. Response: ("flow", KvFlow)."""


RankMessage = RankSetup | Detach | AskFlow | RankCall
"""Message to a rank. RankSetup attaches it; response: ("attached", endpoints) or ("refused", (field, reason))."""


def serve_rank(plane: RankPlane, rank: int, path: str) -> None:
    """Connect a rank to the engine's socket at `path` and serve it on a thread. After the connection ends, the process
    is killed within END_GRACE_S: inside a collective it would wait for a killed rank forever."""
    connection = Client(path, "AF_UNIX")
    server = RankServer(plane, rank, connection)
    connection.send((rank, plane.layout))
    threading.Thread(target=_serve_until_the_end, args=(server,), name="kv-rank", daemon=True).start()


def _serve_until_the_end(server: "RankServer") -> None:
    server.run()
    time.sleep(END_GRACE_S)
    # The main thread may be in native code that handles no signal.
    os.kill(os.getpid(), signal.SIGKILL)


class RankServer:
    """Serves one rank over a connection: receives RankMessages, sends responses and events as (kind, value)."""

    def __init__(self, plane: RankPlane, rank: int, connection: "Connection[Any, Any]") -> None:
        self._plane = plane
        self._rank = rank
        self._connection = connection
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            while True:
                self._answer(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:
            # The engine detects the end of the connection.
            get_logger().exception("rank_data_plane_failed", error=repr(error))
        finally:
            self._plane.detach()
            self._connection.close()

    def _answer(self, message: RankMessage) -> None:
        match message:
            case RankSetup():
                self._attach(message)
            case Detach():
                self._plane.detach()
                self._send("detached", None)
            case AskFlow():
                self._send("flow", self._plane.flow())
            case _:
                self._plane.do(message)

    def _attach(self, setup: RankSetup) -> None:
        if setup.logs is not None:
            configure_logs(setup.logs.service, setup.logs.instance_id, setup.logs.level, self._rank)
        try:
            endpoints = self._plane.attach(setup, partial(self._send, "event"), lambda _: None)
        except ConfigError as error:
            self._send("refused", (error.field, error.reason))
        else:
            self._send("attached", endpoints)

    def _send(self, kind: str, value: object) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError:
            # The engine has ended; run() detects this as well.
            return
