"""The engine seam on vLLM: our order, our admission, our transfers around its in-process engine.

Owns the calls of the seam and the engine thread, which alone calls vLLM. Leaves computing, batching and blocks to vLLM
(core), its turns to steps, requests to requests, and KV to transfers and the ranks' ends of the data plane.

The calls are mapped to vLLM's requests: a prompt is a request for the whole answer, which is left out of vLLM's steps
after its first token until it is adopted, and continues, or pushed, and ends; a reservation is a request that waits for
its KV, its prompt followed by the token that prefill has yet to draw; vLLM is notified of the KV when the service
admits the request.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from kaveri.engine.contract import EngineInfo, EngineKey, EngineListener, EngineRequest, EngineStats
from kaveri.engine.copier import ReplicaOptions
from kaveri.engine.copier_thread import CopierThread, slots_of
from kaveri.engine.limits import require_room
from kaveri.engine.shared import Shared
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm.core import VllmCore
from kaveri.engine.vllm.data_plane import DataPlane, RankCopies
from kaveri.engine.vllm.rank import RankSetup
from kaveri.engine.vllm.requests import Requests
from kaveri.engine.vllm.steps import Steps
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import get_logger, log_settings

_CLOSE_TIMEOUT_S = 5.0
_STALLED_S = 0.05
"""Longest sleep of the engine thread when nothing in vLLM can run: whatever changes that wakes it."""
_CHECK_TIMEOUT_S = 30.0


class VllmEngine:
    """Both PrefillEngine and DecodeEngine (contract.py).

    max_batch: most decode requests in the running batch; admitted ones beyond wait here, in order. listen: where to
    take pushes, best first. Empty for an engine that only prefills: reserve() fails there. transports: makes the
    transports of KV, for each rank, in the order in which this engine's pushes prefer them; at the top of a module
    where ranks are in processes of their own. None for the socket transports. receiving: how each rank takes pushes.
    replicas: how requests are copied to the holders of their replicas. Raises ConfigError when one request of the
    model's length does not fit into the empty pool, or when it cannot listen; the core is the caller's own then, and
    the engine's otherwise.
    """

    def __init__(
        self,
        core: VllmCore,
        *,
        max_batch: int = 64,
        listen: Sequence[KvEndpoint] = (),
        transports: Callable[[], Sequence[Transport]] | None = None,
        receiving: ReceiverOptions = ReceiverOptions(),  # noqa: B008 - it is frozen
        replicas: ReplicaOptions = ReplicaOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        layout, total_blocks = core.ranks[0].layout, core.free_blocks
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        require_room(core.max_model_len, layout, total_blocks)
        self._core = core
        self._shut_down = False
        info = EngineInfo(
            engine="vllm",
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=core.max_model_len,
            vocab_size=core.vocab_size,
            eos_token_ids=core.eos_token_ids,
            epoch=secrets.randbits(63),
            kv_endpoints=(),
            # Heads that several ranks hold are pushed by one of them, and each rank marks its own pushes.
            can_replicate=layout.kv_head_count % layout.tensor_ranks == 0,
            runs_ahead=True,
        )
        self._shared = Shared()
        put, wake = self._shared.outbox.put, self._shared.wake
        self._requests = Requests(layout, core.max_model_len, total_blocks, put, on_work=wake)
        self._transfers = Transfers(info, self._shared, self._requests)
        copy_slots = slots_of(layout, replicas)
        setup = RankSetup(tuple(listen), transports, info.epoch, receiving, copy_slots, logs=log_settings())
        plane = DataPlane(core.ranks, setup, self._transfers.hear, self._shared.stop)
        self._transfers.attach(plane)
        self.info = replace(info, kv_endpoints=self._transfers.endpoints)
        self._copier = CopierThread(
            layout, RankCopies(plane), self._shared, self._requests, replicas, self._transfers.is_pushing
        )
        self._steps = Steps(
            self._shared, self._requests, core, plane, self._transfers, self.info, max_batch, self._copier.wake
        )
        self._thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)
        # Integrity checks that wait for the thread.
        self._checks: list[Future[None]] = []
        core.scheduler_side.hooks = self._steps

    # Both sides.

    def start(self, listener: EngineListener) -> None:
        self._shared.outbox.listener = listener
        self._thread.start()
        # A rank may have been lost before there was a listener.
        self._shared.outbox.publish()

    def close(self) -> None:
        self._shared.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        # First, while the ranks still answer it.
        self._copier.close()
        self._transfers.close()
        if self._thread.is_alive():
            get_logger().warning("engine_close_timed_out", waited_s=_CLOSE_TIMEOUT_S)
            return
        self._core.scheduler_side.hooks = None
        with self._shared.lock:
            self._requests.clear(self.info.total_blocks)
            self._transfers.forget()
        if not self._shut_down:
            self._shut_down = True
            self._core.shutdown()

    def stats(self) -> EngineStats:
        with self._shared.lock:
            return self._shared.counted(self._requests.stats())

    def kv_flow(self) -> KvFlow:
        return self._transfers.flow()

    def abort(self, key: EngineKey) -> None:
        self._transfers.abort(key)
        self._copier.wake()

    def check_integrity(self) -> None:
        """See the contract. Waits for the step under way, if any; must not be called by the listener."""
        check: Future[None] | None = None
        with self._shared.lock:
            if self._shared.closing:
                return
            if self._thread.is_alive():
                check = self._shared.promise()
                self._checks.append(check)
                self._shared.wake()
        if check is not None:
            check.result(_CHECK_TIMEOUT_S)
        else:
            self._steps.check_integrity()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self.info.require_servable(request)
        with self._shared.lock:
            self._shared.require_alive()
            self._requests.open_prefill(request)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        self._transfers.push_to(key, ticket)

    # The decode side.

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        """See the contract; the engine thread grants the ticket, when vLLM has allocated the blocks."""
        return self._transfers.reserve(request, expires_in_s, source, held_tokens)[1]

    def adopt(self, key: EngineKey) -> None:
        with self._shared.lock:
            self._shared.require_alive()
            self._requests.adopt(key)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        """See the contract. Engines with more tensor-parallel ranks than KV heads refuse."""
        if not self.info.can_replicate:
            raise InvalidArgument("engine", "of more ranks than KV heads", "one that copies KV to replicas")
        self._copier.replicate(key, ticket)

    def release(self, key: EngineKey, timeout_s: float) -> None:
        self._copier.release(key, timeout_s)

    def admit(self, key: EngineKey) -> None:
        """See the contract; also ignores a request that is not landed."""
        with self._shared.lock:
            self._shared.require_alive()
            self._requests.admit(key)

    # The engine thread.

    def _loop(self) -> None:
        stalled = False
        try:
            while True:
                with self._shared.lock:
                    self._sleep(stalled)
                    if self._shared.closing:
                        return
                    self._shared.woken = False
                    self._shared.turn_count += 1
                    added = self._requests.take_added()
                    checks, self._checks = self._checks, []
                began_s = time.monotonic()
                stalled = not self._steps.turn(added, stalled)
                if not stalled:
                    self._shared.stepped(time.monotonic() - began_s)
                for check in checks:
                    self._answer_check(check)
        # After any exception in a step, even SystemExit, the state of model and cache is unknown: no request may be
        # left waiting for tokens.
        except BaseException as error:
            self._shared.stop(repr(error), self._steps.members())
            get_logger().exception("engine_failed", error=repr(error))
        finally:
            if self._shared.broken is not None:
                self._transfers.close()

    def _sleep(self, stalled: bool) -> None:
        """Sleep until there is something to do. The caller holds the lock."""
        while not (self._shared.closing or self._shared.woken or self._steps.has_reports):
            runnable = self._steps.can_compute(self._steps.held())
            if runnable and not stalled:
                return
            self._shared.sleep(_STALLED_S if runnable else None)
            stalled = False

    def _answer_check(self, check: "Future[None]") -> None:
        failure: AssertionError | None = None
        try:
            self._steps.check_integrity()
        except AssertionError as error:
            failure = error
        with self._shared.lock:
            if check not in self._shared.promises:
                return
            self._shared.promises.remove(check)
        if failure is not None:
            check.set_exception(failure)
        else:
            check.set_result(None)
