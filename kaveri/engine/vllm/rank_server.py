"""Serves the engine's calls to a tensor-parallel rank, in the rank's own process.

The connection carries calls and events, a few hundred bytes each; KV goes from this process to the other instance's.
When the connection ends, so does the data plane: the engine is gone.
"""

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
"""Seconds in which a rank's process may end by itself once its engine is gone."""


@dataclass(frozen=True, slots=True)
class Detach:
    """End the data plane. Answered ("detached", None)."""


@dataclass(frozen=True, slots=True)
class AskFlow:
    """Request a snapshot of the transfers. Answered ("flow", KvFlow)."""


RankMessage = RankSetup | Detach | AskFlow | RankCall
"""Message to a rank. A setup attaches it; answered ("attached", endpoints) or ("refused", (field, reason))."""


def serve_rank(plane: RankPlane, rank: int, path: str) -> None:
    """Connect to the engine, which listens at `path`, and serve it on a thread until the connection ends. Then this
    process ends, within END_GRACE_S: inside a collective it would wait for a killed rank without end."""
    connection = Client(path, "AF_UNIX")
    server = RankServer(plane, rank, connection)
    connection.send((rank, plane.layout))
    threading.Thread(target=_serve_until_the_end, args=(server,), name="kv-rank", daemon=True).start()


def _serve_until_the_end(server: "RankServer") -> None:
    server.run()
    time.sleep(END_GRACE_S)
    # Its main thread may be in native code that handles no signal.
    os.kill(os.getpid(), signal.SIGKILL)


class RankServer:
    """Takes messages (RankMessage), sends answers and events: (kind, value)."""

    def __init__(self, plane: RankPlane, rank: int, connection: "Connection[Any, Any]") -> None:
        self._plane = plane
        self._rank = rank
        self._connection = connection
        self._lock = threading.Lock()

    def run(self) -> None:
        """Serve until the engine is gone."""
        try:
            while True:
                self._answer(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:
            # The engine notices the end of the connection.
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
            # The engine is gone; run() notices it, too.
            return
