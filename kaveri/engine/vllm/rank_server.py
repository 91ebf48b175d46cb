"""The end of the data plane of a tensor-parallel rank in a process of its own: does what the engine says.

What goes over the connection are calls and events, a few hundred bytes each; KV goes from this process to the other
instance's. When the connection ends, so does the data plane: the engine is gone.
"""

import threading
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from kaveri.engine.vllm.rank_plane import RankPlane, RankSetup
from kaveri.errors import ConfigError
from kaveri.kv.transfer.flow import KvFlow
from kaveri.telemetry.logs import configure_logs, get_logger

if TYPE_CHECKING:
    from kaveri.engine.vllm.connector_worker import WorkerSide

CALLS = frozenset({"grant", "revoke", "open_push", "abort_push", "hand_over", "forget"})
"""Methods of RankPlane that the engine may call from its own process."""


def serve_rank(worker_side: "WorkerSide", rank: int, path: str) -> None:
    """Connects to the engine, which listens at `path`, and serves it on a thread until the connection ends."""
    connection = Client(path, "AF_UNIX")
    server = RankServer(worker_side, rank, connection)
    connection.send((rank, worker_side.layout))
    threading.Thread(target=server.run, name="kv-rank", daemon=True).start()


class RankServer:
    """Messages here: (name of a call, arguments). Answers and news: (kind, value)."""

    def __init__(self, worker_side: "WorkerSide", rank: int, connection: "Connection[Any, Any]") -> None:
        self._worker_side = worker_side
        self._rank = rank
        self._connection = connection
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until the engine is gone."""
        try:
            while True:
                self._answer(*self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:
            # The engine hears of it by the end of the connection.
            get_logger().exception("the rank's data plane ends", error=repr(error))
        finally:
            self._detach()
            self._connection.close()

    def _answer(self, call: str, arguments: tuple[Any, ...]) -> None:
        worker_side = self._worker_side
        if call == "attach":
            setup: RankSetup = arguments[0]
            if setup.logs is not None:
                configure_logs(setup.logs.service, setup.logs.instance_id, setup.logs.level, self._rank)
            try:
                worker_side.plane = RankPlane(worker_side.pool, setup, partial(self._tell, "event"))
            except ConfigError as error:
                self._tell("refused", (error.field, error.reason))
            else:
                self._tell("attached", worker_side.plane.endpoints)
        elif call == "detach":
            self._detach()
            self._tell("detached", None)
        elif call == "flow":
            self._tell("flow", worker_side.plane.flow() if worker_side.plane is not None else KvFlow())
        elif call in CALLS and worker_side.plane is not None:
            getattr(worker_side.plane, call)(*arguments)

    def _detach(self) -> None:
        plane, self._worker_side.plane = self._worker_side.plane, None
        if plane is not None:
            plane.close()

    def _tell(self, kind: str, value: object) -> None:
        try:
            with self._lock:
                self._connection.send((kind, value))
        except OSError:
            # The engine is gone; run() finds out, too.
            return
