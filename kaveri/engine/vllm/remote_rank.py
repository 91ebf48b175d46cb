"""Tensor-parallel ranks in their own processes, as used by the engine; rank_server is the other end. vLLM starts the
processes and carries the orders of a step; all else uses one connection per rank, a Unix socket private to this user.
"""

import contextlib
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any

from kaveri.engine.vllm.rank import LostListener, RankListener, RankSetup
from kaveri.engine.vllm.rank_server import AskFlow, Detach, RankMessage
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.telemetry.logs import get_logger

_MEET_TIMEOUT_S = 60.0
"""Seconds for a rank to connect after vLLM reports all ranks as ready."""
_ANSWER_TIMEOUT_S = 60.0
_DETACH_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 10.0
"""Seconds after which a rank that accepts no call is lost."""
_QUIET_S = 15.0
"""Seconds without any message after which a rank is probed."""
_CALLS_MAX = 65_536
"""Most queued calls of a rank: a few for each request that can be in flight."""


class RankMeeting:
    """Context manager that accepts connections of an engine's tensor-parallel ranks. Raises ConfigError on failure."""

    def __init__(self, rank_count: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="kaveri-ranks-")
        self.path = os.path.join(self._folder, "ranks.sock")
        self._rank_count = rank_count
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(self.path)
        except OSError as error:
            self.__exit__()
            raise ConfigError("TMPDIR", f"ranks cannot be met at {self.path}: {error}") from error
        self._socket.listen(rank_count)

    def ranks(self) -> "tuple[RemoteRank, ...]":
        """Wait for all ranks to connect, and return them in order. Raises ConfigError if one does not."""
        self._socket.settimeout(_MEET_TIMEOUT_S)
        met: dict[int, RemoteRank] = {}
        try:
            while len(met) < self._rank_count:
                accepted, _ = self._socket.accept()
                accepted.settimeout(None)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_TIMEOUT_S), 0))
                connection: Connection[Any, Any] = Connection(accepted.detach())
                if not connection.poll(_MEET_TIMEOUT_S):
                    raise TimeoutError("one says nothing")
                rank, layout = connection.recv()
                met[rank] = RemoteRank(rank, layout, connection)
        except (OSError, EOFError) as error:
            for each in met.values():
                each.shutdown()
            raise ConfigError("engine", f"{len(met)} of {self._rank_count} ranks are there: {error!r}") from error
        return tuple(met[rank] for rank in range(self._rank_count))

    def __enter__(self) -> "RankMeeting":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RemoteRank:
    """Rank in another process. flow() returns the last received snapshot, so callers do not wait.

    One thread sends calls, another reads responses. A rank is lost when its process ends or after 2 * _QUIET_S without
    a response.
    """

    def __init__(self, rank: int, layout: KvLayout, connection: "Connection[Any, Any]") -> None:
        self.layout = layout
        self._rank = rank
        self._connection = connection
        self._calls: queue.Queue[RankMessage | None] = queue.Queue(_CALLS_MAX)
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._listener: RankListener | None = None
        self._on_lost: LostListener | None = None
        self._flow = KvFlow()
        self._is_lost = False
        self._ending = threading.Lock()
        self._writer = threading.Thread(target=self._write, name=f"kv-rank-{rank}-calls", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"kv-rank-{rank}", daemon=True).start()

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        self._listener, self._on_lost, self._flow = listener, on_lost, KvFlow()
        self.do(setup)
        try:
            kind, value = self._answers.get(timeout=_ANSWER_TIMEOUT_S)
        except queue.Empty:
            # A late response must not be taken for the response to another call.
            self.shutdown()
            kind, value = "refused", ("engine", f"rank {self._rank} does not answer")
        if kind != "attached":
            self._listener = self._on_lost = None
            raise ConfigError(*value)
        endpoints: tuple[KvEndpoint, ...] = value
        return endpoints

    def detach(self) -> None:
        self._on_lost = None
        if self._listener is not None and not self._is_lost:
            self.do(Detach())
            try:
                self._answers.get(timeout=_DETACH_TIMEOUT_S)
            except queue.Empty:
                self.shutdown()
        self._listener = None

    def flow(self) -> KvFlow:
        self.do(AskFlow())
        return self._flow

    def shutdown(self) -> None:
        self._on_lost = None
        self._end()

    def do(self, call: RankMessage) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lose("takes no calls")

    def _write(self) -> None:
        try:
            while (call := self._calls.get()) is not None and not self._is_lost:
                self._connection.send(call)
        except (BrokenPipeError, ConnectionResetError):
            self._lose("has ended")
        except OSError:
            # A message may be partly sent: the connection is unusable.
            self._lose("takes no calls")
        except Exception as error:
            self._lose(f"cannot be called: {error!r}")
            get_logger().exception("rank_send_failed", rank=self._rank)

    def _read(self) -> None:
        try:
            asked = False
            while not self._is_lost:
                if not self._connection.poll(_QUIET_S):
                    if asked:
                        self._lose("does not answer")
                        return
                    asked = True
                    self.do(AskFlow())
                    continue
                kind, value = self._connection.recv()
                asked = False
                if kind == "event":
                    if (listener := self._listener) is not None:
                        listener(value)
                elif kind == "flow":
                    self._flow = value
                else:
                    self._answers.put((kind, value))
        except (EOFError, OSError):
            self._lose("has ended")
        except Exception as error:
            self._lose(f"cannot be followed: {error!r}")
            get_logger().exception("rank_receive_failed", rank=self._rank)
        finally:
            self._end()
            # The writer may be inside a send, which ends within its timeout.
            self._writer.join()
            self._connection.close()

    def _lose(self, what: str) -> None:
        # First: the end makes the other thread fail, for another reason.
        on_lost, self._on_lost = self._on_lost, None
        self._end()
        self._answers.put(("refused", ("engine", f"rank {self._rank} {what}")))
        if on_lost is not None:
            on_lost(f"tensor-parallel rank {self._rank} {what}")

    def _end(self) -> None:
        # Others wait: the reader closes the connection afterwards.
        with self._ending:
            if self._is_lost:
                return
            self._is_lost = True
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
