"""The engine seam on vLLM: our order, our admission, our transfers around its in-process engine.

Owns the calls of the seam. Leaves computing, batching and blocks to vLLM (host), stepping it to the driver, requests to
the board, and KV to transfers and the ranks' ends of the data plane.

What vLLM does not offer is made of what it does: a prompt is a request for one token, whose blocks are kept when it
has ended until they are pushed; a reservation is a request that waits for its KV, its prompt followed by the token that
prefill has yet to draw, and is told that it is there when the service admits it.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from kaveri.engine.contract import EngineInfo, EngineKey, EngineListener, EngineRequest, EngineStats
from kaveri.engine.limits import require_room
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm.board import Board
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.driver import Driver
from kaveri.engine.vllm.host import Host
from kaveri.engine.vllm.rank import RankSetup
from kaveri.errors import ConfigError
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import get_logger, log_settings

_CLOSE_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 30.0


class VllmEngine:
    """Both PrefillEngine and DecodeEngine (contract.py).

    max_batch: most decode requests in the running batch; admitted ones beyond wait here, in order.
    listen: where to take pushes, best first. Empty for an engine that only prefills: reserve() fails there.
    transports: makes what carries KV, for each rank, in the order in which this engine's pushes prefer them; at the top
    of a module where ranks are in processes of their own. None for the socket transports.
    receiving: how each rank takes pushes.
    Raises ConfigError when one request of the model's length does not fit into the empty pool, or when it cannot
    listen; the host is the caller's own then, and the engine's otherwise.
    """

    def __init__(
        self,
        host: Host,
        *,
        max_batch: int = 64,
        listen: Sequence[KvEndpoint] = (),
        transports: Callable[[], Sequence[Transport]] | None = None,
        receiving: ReceiverOptions = ReceiverOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        layout, total_blocks = host.ranks[0].layout, host.free_blocks
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        require_room(host.max_model_len, layout, total_blocks)
        self._host = host
        self._board = Board(layout, host.max_model_len, total_blocks)
        self._shut_down = False
        info = EngineInfo(
            engine="vllm",
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=host.max_model_len,
            vocab_size=host.vocab_size,
            eos_token_ids=host.eos_token_ids,
            epoch=secrets.randbits(63),
            kv_endpoints=(),
        )
        self._transfers = Transfers(info, self._board, self._board)
        setup = RankSetup(tuple(listen), transports, info.epoch, receiving, log_settings())
        plane = DataPlane(host.ranks, setup, self._transfers.hear, self._board.stop)
        self._transfers.attach(plane)
        self._info = replace(info, kv_endpoints=self._transfers.endpoints)
        self._driver = Driver(self._board, host, plane, self._transfers, self._info, max_batch)
        host.scheduler_side.desk = self._driver

    # Both sides.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, listener: EngineListener) -> None:
        self._board.outbox.listener = listener
        self._driver.thread.start()
        # A rank may have been lost before there was a listener.
        self._board.outbox.publish()

    def close(self) -> None:
        thread = self._driver.thread
        self._board.close()
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_CLOSE_TIMEOUT_S)
        self._transfers.close()
        if thread.is_alive():
            get_logger().warning("engine_close_timed_out", waited_s=_CLOSE_TIMEOUT_S)
            return
        self._host.scheduler_side.desk = None
        with self._board.lock:
            self._board.account.clear()
            self._transfers.forget()
        if not self._shut_down:
            self._shut_down = True
            self._host.shutdown()

    def stats(self) -> EngineStats:
        with self._board.lock:
            return self._board.account.stats()

    def kv_flow(self) -> KvFlow:
        return self._transfers.flow()

    def abort(self, key: EngineKey) -> None:
        self._transfers.abort(key)

    def check_integrity(self) -> None:
        """As the contract. Waits for the step under way, if any; must not be called by the listener."""
        thread = self._driver.thread
        check: Future[None] | None = None
        with self._board.lock:
            if self._board.closing:
                return
            if thread.is_alive():
                check = self._board.promise()
                self._board.checks.append(check)
                self._board.wake()
        if check is not None:
            check.result(_CHECK_TIMEOUT_S)
        else:
            self._driver.check()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self._info.require_servable(request)
        with self._board.lock:
            self._board.open_prefill(request)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        self._transfers.push_to(key, ticket)

    # The decode side.

    def reserve(self, request: EngineRequest, expires_in_s: float) -> "Future[Ticket]":
        """As the contract; the engine thread grants the ticket, when vLLM has given it blocks."""
        return self._transfers.reserve(request, expires_in_s)[1]

    def adopt(self, key: EngineKey) -> None:
        with self._board.lock:
            self._board.adopt(key)

    def admit(self, key: EngineKey) -> None:
        """As the contract; also ignores a request that is not landed."""
        with self._board.lock:
            self._board.admit(key)
