"""Implements the engine contract on vLLM's in-process engine, with Kaveri's own order, admission and transfers.

Owns the contract's calls and the engine thread, which alone calls vLLM. vLLM (core) computes, batches and allocates
blocks; steps, requests, transfers and the ranks' data planes do the rest.

Mapping to vLLM's requests: a prompt is a request for the whole answer, left out of vLLM's steps after its first token
until it is adopted and continues, or is pushed and ends. A reservation is a request that waits for its KV: its prompt
plus the token that prefill samples later. vLLM learns of landed KV when the service admits the request.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kaveri.engine.blame import StepMember
from kaveri.engine.contract import EngineInfo, EngineRequest
from kaveri.engine.copier import ReplicaOptions
from kaveri.engine.copier_thread import CopierThread, slots_of
from kaveri.engine.limits import require_room
from kaveri.engine.shared import Shared
from kaveri.engine.threaded import ThreadedEngine
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm.core import VllmCore
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.rank import RankSetup
from kaveri.engine.vllm.request import VllmRequest
from kaveri.engine.vllm.requests import Requests
from kaveri.engine.vllm.steps import Steps
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.receiver import ReceiverOptions
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import log_settings
from kaveri.text.grammars import grammars_of

_STALLED_S = 0.05
"""Longest sleep of the engine thread, in seconds, if vLLM can run nothing; any relevant change wakes it earlier."""
_CHECK_TIMEOUT_S = 30.0


class VllmEngine(ThreadedEngine[VllmRequest]):
    """Prefill and decode engine (contract.py) on vLLM.

    max_batch: most decode requests in the running batch; further admitted ones wait here, in order. listen: addresses
    for incoming KV, best first; if empty, reserve() fails. transports: returns each rank's KV transports, in order of
    preference; a module-level function if ranks have their own processes; None for the socket transports. Raises
    ConfigError if one request of the model's length does not fit into the empty pool, or if listening fails; the caller
    then still owns the core.
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
        grammars = grammars_of(core.model, core.vocab_size, core.eos_token_ids)
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
            # Heads held by several ranks are pushed by one of them, but each rank marks its own pushes.
            can_replicate=layout.kv_head_count % layout.tensor_ranks == 0,
            runs_ahead=True,
        )
        shared = Shared()
        self._requests = Requests(info, shared.put, on_work=shared.wake)
        transfers = Transfers(info, shared, self._requests)
        copy_slots = slots_of(layout, replicas)
        setup = RankSetup(tuple(listen), transports, info.epoch, receiving, copy_slots, logs=log_settings())
        plane = DataPlane(core.ranks, setup, transfers.hear, shared.stop)
        transfers.attach(plane)
        copier = CopierThread(layout, plane, shared, self._requests, replicas)
        super().__init__(info, shared, self._requests, transfers, copier, grammars)
        self._steps = Steps(shared, self._requests, core, plane, transfers, self.info, max_batch, copier.wake)
        # Integrity checks to run on the engine thread.
        self._checks: list[Future[None]] = []
        core.scheduler_side.attach(self._requests, self._steps.stepping)

    def close(self) -> None:
        super().close()
        if not self._thread.is_alive() and not self._shut_down:
            self._shut_down = True
            self._core.scheduler_side.detach()
            self._core.shutdown()

    def check_integrity(self) -> None:
        """Assert that no KV block is leaked or shared. Waits for the current step; not for use in the listener."""
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

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        """Reserve KV blocks for a request to decode. Its ticket is granted once vLLM has allocated the blocks."""
        return self._transfers.reserve(request, expires_in_s, source, held_tokens)[1]

    # The engine thread.

    def _loop(self) -> None:
        stalled = False
        while True:
            with self._shared.lock:
                self._sleep(stalled)
                if self._shared.closing:
                    return
                self._shared.woken = False
                self._shared.turns.turn_count += 1
                added = self._requests.take_added()
                checks, self._checks = self._checks, []
            began_s = time.monotonic()
            stalled = not self._steps.turn(added, stalled)
            if not stalled:
                self._shared.stepped(time.monotonic() - began_s)
            for check in checks:
                self._answer_check(check)

    def _members(self) -> list[StepMember]:
        return self._steps.members()

    def _sleep(self, stalled: bool) -> None:
        while not (self._shared.closing or self._shared.woken or self._core.scheduler_side.has_reports):
            runnable = self._steps.can_compute()
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
            # Only now: another error fails the promises that are left.
            if check not in self._shared.promises:
                return
            self._shared.promises.remove(check)
        if failure is not None:
            check.set_exception(failure)
        else:
            check.set_result(None)
