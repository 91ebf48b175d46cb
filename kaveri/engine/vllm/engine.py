"""The engine seam on vLLM: our loop around its in-process engine, our order, our admission, our transfers.

Owns the engine thread and the order in which things happen. Leaves computing, batching and blocks to vLLM (host), who
holds what beside it to the account, bytes to the KV sender and receiver, and what may be pushed to stepwise_pushes.

vLLM is called by the engine thread alone. One lock guards the account; it is held for microseconds, and neither vLLM
nor the transfers nor the listener are called while it is held. Events are put in the outbox under that lock, so their
order is the order in which things happened, and whoever put one there publishes it after letting the lock go.

What vLLM does not offer is made of what it does: a prompt is a request for one token, whose blocks are kept when it
has ended until they are pushed; a reservation is a request that waits for its KV, and is told that it is there when
the service admits it.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from kaveri.engine.contract import (
    AttemptKey,
    EngineInfo,
    EngineListener,
    EngineRequest,
    EngineStats,
    EngineStopped,
    FirstToken,
    KvPushed,
    KvPushFailed,
    Landed,
    LandingFailed,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.engine.stepwise_outbox import Outbox
from kaveri.engine.stepwise_pushes import Pushes
from kaveri.engine.stepwise_sequence import Phase, Source, validate_request
from kaveri.engine.stopping import finish_reason
from kaveri.engine.vllm.account import Account
from kaveri.engine.vllm.connector_scheduler import Advance, Placement
from kaveri.engine.vllm.connector_worker import StepAdvances
from kaveri.engine.vllm.draws import FIRST_TOKENS
from kaveri.engine.vllm.host import Host
from kaveri.engine.vllm.hosted import Hosted
from kaveri.engine.vllm.sampling import decode_params, logprobs_of, prefill_params, refusal_of
from kaveri.errors import ConfigError, EngineError, InvalidArgument, KaveriError, NoCapacity, RequestCancelled
from kaveri.kv.flow import KvFlow, ReceiverFlow
from kaveri.kv.receiver import CREDIT_BYTES, KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import kv_pb2

_CLOSE_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 30.0
_STALLED_S = 0.05
"""How long the engine sleeps at most when nothing that vLLM has can run: what changes that wakes it."""
_RETRY_AFTER_S = 0.1
_NUMBERS = itertools.count()
"""Of all engines of the process: FIRST_TOKENS is the process's."""


class VllmEngine:
    """Both PrefillEngine and DecodeEngine (contract.py).

    max_batch: most decode requests in the running batch; admitted ones beyond wait here, in order.
    listen: where to take pushes, best first. Empty for an engine that only prefills: reserve() fails there.
    transports: what carries KV, in the order in which this engine's pushes prefer them; None for the socket transports.
    kv_credit_bytes: what all who push here may have under way together.
    Raises ConfigError when one request of the model's length does not fit into the empty pool, or when it cannot
    listen; the host is the caller's own then, and the engine's otherwise.
    """

    def __init__(
        self,
        host: Host,
        *,
        max_batch: int = 64,
        listen: Sequence[KvEndpoint] = (),
        transports: Sequence[Transport] | None = None,
        kv_credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        pool = host.worker_side.pool
        layout, total_blocks = pool.layout, host.free_blocks
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        if layout.block_count(host.max_model_len) > total_blocks:
            reason = (
                f"{host.max_model_len} tokens need {layout.block_count(host.max_model_len)} KV blocks of "
                f"{layout.block_tokens} tokens; the pool has {total_blocks}"
            )
            raise ConfigError("max_model_len", reason)
        self._host = host
        self._layout = layout
        self._max_batch = max_batch
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._account = Account(total_blocks)
        self._by_number: dict[str, Hosted] = {}
        self._push_owners: dict[bytes, Hosted] = {}
        self._landing_owners: dict[bytes, Hosted] = {}
        # What became of transfers before grant() had returned here.
        self._early_landings: dict[bytes, TransferLanded | TransferReleased] = {}
        # Work for the engine thread, beside what the account shows.
        self._added: list[Hosted] = []
        self._checks: list[Future[None]] = []
        self._woken = False
        self._advances: Sequence[Advance] = ()
        self._outbox = Outbox(self._on_listener_error)
        self._closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)

        epoch = secrets.randbits(63)
        self._receiver: KvReceiver | None = None
        if listen:
            self._receiver = KvReceiver(
                pool,
                self._on_landing,
                listen=listen,
                epoch=epoch,
                transports=transports,
                credit_bytes=kv_credit_bytes,
            )
        self._sender = KvSender(pool, self._on_push, transports=transports)
        self._pushes = Pushes(self._sender, layout)
        host.worker_side.pushes = self._pushes
        host.scheduler_side.desk = self
        self._info = EngineInfo(
            engine="vllm",
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=host.max_model_len,
            vocab_size=host.vocab_size,
            eos_token_ids=host.eos_token_ids,
            epoch=epoch,
            kv_endpoints=self._receiver.endpoints if self._receiver is not None else (),
        )

    # Both sides.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, listener: EngineListener) -> None:
        self._outbox.listener = listener
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            first = not self._closing
            self._closing = True
            self._outbox.close()
            self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._close_transfers()
        if self._thread.is_alive():
            get_logger().warning("a step goes on past the engine's end", waited_s=_CLOSE_TIMEOUT_S)
            return
        self._fail_waiting("it is closed")
        if first and self._broken is None:
            self._host.vacate()
        self._host.worker_side.pushes = None
        with self._lock:
            self._account.clear()
            self._by_number.clear()
            self._push_owners.clear()
            self._landing_owners.clear()
            self._early_landings.clear()
        if first:
            self._host.shutdown()

    def stats(self) -> EngineStats:
        with self._lock:
            return self._account.stats()

    def kv_flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def abort(self, key: AttemptKey) -> None:
        refused: Future[Ticket] | None = None
        with self._lock:
            if self._closing:
                return
            push_id = landing_id = None
            if (prefill := self._account.prefills.get(key)) is not None:
                push_id = prefill.transfer_id
                self._end(prefill)
            if (decode := self._account.decodes.get(key)) is not None:
                landing_id = decode.transfer_id
                refused, decode.granted = decode.granted, None
                self._end(decode)
        if refused is not None:
            refused.set_exception(RequestCancelled(key.request_id))
        if push_id is not None:
            self._pushes.abort(push_id)
        if landing_id is not None and self._receiver is not None:
            self._receiver.revoke(landing_id)

    def check_integrity(self) -> None:
        """As the contract. Waits for the step under way, if any; must not be called by the listener."""
        check: Future[None] = Future()
        with self._lock:
            running = self._thread.is_alive() and not self._closing
            if running:
                self._checks.append(check)
                self._wake()
        if running and self._thread is not threading.current_thread():
            check.result(_CHECK_TIMEOUT_S)
        elif not self._closing:
            self._check()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        validate_request(request, self._info)
        hosted = Hosted.prefill(f"kaveri-{next(_NUMBERS)}", request, self._layout)
        with self._lock:
            self._require_alive()
            self._open(hosted)

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self._layout.require_same(ticket.layout)
        with self._lock:
            self._require_alive()
            hosted = self._account.prefills.get(key)
            if hosted is None:
                return
            if hosted.transfer_id is not None:
                raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the push before it has failed")
            source = hosted.source
            assert source is not None
            pushed = self._layout.block_count(source.token_count) - ticket.first_block
            if (ticket.token_count, len(ticket.block_ids)) != (source.token_count, pushed):
                reason = f"the ticket is for {ticket.token_count} tokens, the request has {source.token_count}"
                self._outbox.put(KvPushFailed(key, reason))
                source = None
            elif ticket.transfer_id in self._push_owners:
                self._outbox.put(KvPushFailed(key, "the ticket is in use by another push"))
                source = None
            else:
                hosted.transfer_id = ticket.transfer_id
                self._push_owners[ticket.transfer_id] = hosted
        if source is not None:
            self._open_push(hosted, source, ticket)
        self._outbox.publish()

    def _open_push(self, hosted: Hosted, source: Source, ticket: Ticket) -> None:
        try:
            self._pushes.open(source, ticket)
        except KaveriError as error:
            self._on_push(PushFailed(ticket.transfer_id, str(error)))
            return
        with self._lock:
            # The request ended, or lost its blocks, before the sender knew of its push, so nobody could abort it.
            lost = hosted.done or hosted.source is not source
        if lost:
            self._pushes.abort(ticket.transfer_id)

    # The decode side.

    def reserve(self, request: EngineRequest, expires_in_s: float) -> "Future[Ticket]":
        granted: Future[Ticket] = Future()
        # Whoever waits for it gives up by abort(), so that there is one way to do so.
        granted.set_running_or_notify_cancel()
        try:
            validate_request(request, self._info)
            if self._receiver is None:
                raise EngineError("this engine takes no pushes")
            number = f"kaveri-{next(_NUMBERS)}"
            hosted = Hosted.decode(number, request, self._layout, expires_in_s, granted)
            with self._lock:
                self._require_alive()
                self._open(hosted)
        except KaveriError as error:
            granted.set_exception(error)
        return granted

    def adopt(self, key: AttemptKey) -> None:
        with self._lock:
            self._require_alive()
            hosted = self._account.prefills.get(key)
            if hosted is not None and hosted.phase is Phase.COMPUTED and hosted.transfer_id is None:
                self._account.adopt(hosted)
                self._wake()

    def admit(self, key: AttemptKey) -> None:
        """As the contract; also ignores a request that is not landed."""
        with self._lock:
            self._require_alive()
            hosted = self._account.decodes.get(key)
            if hosted is not None and hosted.phase is Phase.LANDED:
                hosted.phase = Phase.WAITING
                self._account.waiting.append(hosted)
                self._wake()

    # What vLLM's scheduler tells, on the engine thread, within a step.

    def find(self, number: str) -> Hosted | None:
        """See Desk.find."""
        return self._by_number.get(number)

    def stepping(
        self, placements: Sequence[Placement], advances: Sequence[Advance], preempted: Sequence[Hosted]
    ) -> StepAdvances:
        """See Desk.stepping."""
        followed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        with self._lock:
            for hosted in preempted:
                hosted.preempted = True
                hosted.computed = 0
                if hosted.done:
                    continue
                self._outbox.put(Preempted(hosted.key))
                if hosted.is_prefill:
                    # Its blocks are written by others from now on: what was queued of them must not be accepted.
                    if hosted.transfer_id is not None:
                        unwanted.append(hosted.transfer_id)
                    hosted.restart()
            for hosted, computed, block_ids in advances:
                hosted.preempted = hosted.behind = False
                if hosted.source is not None:
                    hosted.take(block_ids)
                    followed.append((hosted.source, computed))
                    if not hosted.started and not hosted.done:
                        self._outbox.put(PrefillStarted(hosted.key))
                hosted.started = True
            for hosted, _, block_ids in placements:
                hosted.take(block_ids)
            self._account.unused_blocks = self._host.free_blocks
        for transfer_id in unwanted:
            self._pushes.abort(transfer_id)
        for placement in placements:
            self._grant(placement)
        self._advances = advances
        # A request that has begun says so before the step that begins it is computed.
        self._outbox.publish()
        return followed

    def _grant(self, placement: Placement) -> None:
        """vLLM has blocks for a reservation: whoever waits for it gets the ticket."""
        assert self._receiver is not None, "only an engine that listens reserves"
        hosted, first_block, block_ids = placement
        with self._lock:
            if hosted.done:
                return
        token_count = len(hosted.request.token_ids)
        expires_in_s = max(0.0, hosted.expires_at_s - time.monotonic())
        try:
            ticket = self._receiver.grant(block_ids[first_block:], token_count, expires_in_s, first_block=first_block)
        except KaveriError as error:
            self._refuse(hosted, error)
            return
        with self._lock:
            hosted.transfer_id = ticket.transfer_id
            self._landing_owners[ticket.transfer_id] = hosted
            ended = hosted.done
            granted, hosted.granted = hosted.granted, None
            early = self._early_landings.pop(ticket.transfer_id, None)
            if early is not None:
                self._settle_landing(early)
        if ended:
            # It was aborted before its ticket could be revoked.
            self._receiver.revoke(ticket.transfer_id)
        elif granted is not None:
            granted.set_result(ticket)

    def keeps_blocks(self, hosted: Hosted, token_id: int | None) -> bool:
        """See Desk.keeps_blocks."""
        with self._lock:
            if hosted.source is None:
                # vLLM itself keeps those of a request that still waits for its KV.
                return False
            if hosted.transfer_id is not None:
                return True
            return not hosted.done and token_id is not None and self._finish(hosted, token_id) is None

    # What the transfers tell, on their threads.

    def _on_push(self, event: PushAccepted | PushFailed) -> None:
        with self._lock:
            hosted = self._push_owners.pop(event.transfer_id, None)
            if hosted is None:
                return
            hosted.transfer_id = None
            if hosted.done:
                self._wake()
            elif isinstance(event, PushAccepted):
                self._end(hosted)
                self._outbox.put(KvPushed(hosted.key, event.kv_bytes, event.transport))
            else:
                self._outbox.put(KvPushFailed(hosted.key, event.reason))
        self._outbox.publish()

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._lock:
            self._settle_landing(event)
        self._outbox.publish()

    def _settle_landing(self, event: TransferLanded | TransferReleased) -> None:
        hosted = self._landing_owners.pop(event.transfer_id, None)
        if hosted is None:
            self._early_landings[event.transfer_id] = event
            return
        hosted.transfer_id = None
        if hosted.done:
            self._wake()
            return
        if isinstance(event, TransferLanded):
            first_token_id = _first_token_id(event.note)
            if first_token_id is not None and first_token_id < self._info.vocab_size:
                hosted.computed = len(hosted.token_ids)
                hosted.token_ids.append(first_token_id)
                hosted.draw_index += 1
                hosted.phase = Phase.LANDED
                self._outbox.put(Landed(hosted.key, event.kv_bytes))
                return
            # Its sender was told that it is accepted, and so cannot tell anybody that the request is lost.
            failure: RequestFailed | LandingFailed = RequestFailed(
                hosted.key, "the hand-over names no token of this model"
            )
        else:
            failure = LandingFailed(hosted.key, event.reason)
        self._end(hosted)
        self._outbox.put(failure)

    # The engine thread.

    def _loop(self) -> None:
        stalled = False
        try:
            while True:
                with self._lock:
                    while not (self._closing or self._woken):
                        if self._host.worker_side.has_reports or (self._runnable_count() and not stalled):
                            break
                        timeout_s = _STALLED_S if self._runnable_count() else None
                        if not self._work.wait(timeout_s) and timeout_s is not None:
                            break
                    if self._closing:
                        return
                    self._woken = False
                    added, self._added = self._added, []
                    checks, self._checks = self._checks, []
                self._outbox.publish()
                stalled = not self._turn(added)
                for check in checks:
                    self._answer(check)
        # Whatever a step raises, the state of model and cache is unknown: nobody may be left waiting for tokens.
        except Exception as error:
            get_logger().exception("the engine stops", error=repr(error))
            self._break(repr(error))
        finally:
            if self._broken is not None:
                self._close_transfers()

    def _runnable_count(self) -> int:
        return self._host.unfinished_count - self._account.idle_count()

    def _turn(self, added: Sequence[Hosted]) -> bool:
        """Tells vLLM what has changed and lets it make a step. Whether anything came of it."""
        for hosted in added:
            self._add(hosted)
        self._release_ended()
        self._admit_waiting()
        if not (self._host.worker_side.has_reports or self._runnable_count()):
            self._settle_step([])
            return bool(added)
        reporting = self._host.worker_side.has_reports
        outputs = self._host.step()
        advanced = bool(self._advances)
        self._settle_step(outputs)
        self._refuse_unplaced(added)
        return reporting or advanced or bool(added)

    def _add(self, hosted: Hosted) -> None:
        """Gives vLLM a request for the first time."""
        if hosted.done:
            return
        try:
            if hosted.is_prefill:
                self._host.add(hosted.number, hosted.request.token_ids, prefill_params(hosted.request))
            else:
                params = decode_params(hosted.request, self._info.eos_token_ids, hosted.number)
                self._host.add(hosted.number, hosted.request.token_ids, params)
        except Exception as error:  # vLLM has no one class for what it refuses
            self._refuse(hosted, refusal_of(error))

    def _refuse(self, hosted: Hosted, error: KaveriError) -> None:
        with self._lock:
            if hosted.done:
                return
            granted, hosted.granted = hosted.granted, None
            if granted is None:
                self._outbox.put(RequestFailed(hosted.key, str(error)))
            self._end(hosted)
        if granted is not None:
            granted.set_exception(error)
        self._outbox.publish()

    def _refuse_unplaced(self, added: Sequence[Hosted]) -> None:
        """Nothing waits for room inside vLLM: it would be granted when nobody wants it any more."""
        for hosted in added:
            if hosted.by_transfer and not hosted.placed and not hosted.done:
                self._refuse(hosted, NoCapacity("decode", _RETRY_AFTER_S, "the blocks were taken meanwhile"))

    def _release_ended(self) -> None:
        """Has vLLM end what we have ended, and take back the blocks that no transfer can touch any more."""
        with self._lock:
            ended = [(hosted, hosted.transfer_id is None) for hosted in self._account.ended]
        gone = []
        for hosted, untouched in ended:
            if hosted.vllm_id and not hosted.stopped:
                self._host.abort(hosted.vllm_id)
            if not hosted.vllm_id or not self._host.holds(hosted.vllm_id):
                if untouched:
                    gone.append(hosted)
            elif untouched and not hosted.released:
                hosted.released = True
                self._host.worker_side.report_released(hosted.vllm_id)
        with self._lock:
            for hosted in gone:
                self._account.ended.discard(hosted)
                self._by_number.pop(hosted.number, None)
                FIRST_TOKENS.forget(hosted.number)

    def _admit_waiting(self) -> None:
        """Lets vLLM compute admitted requests, as many as the batch has room for."""
        while True:
            with self._lock:
                if self._account.short_of_blocks:
                    self._give_up_adopted()
                if not self._account.waiting or self._account.running_count() >= self._max_batch:
                    return
                hosted = self._account.waiting.popleft()
                hosted.phase = Phase.RUNNING
            if hosted.by_transfer:
                FIRST_TOKENS.put(hosted.number, hosted.token_ids[-1])
                self._host.worker_side.report_received(hosted.vllm_id)
                hosted.received = True
            else:
                self._continue_adopted(hosted)

    def _continue_adopted(self, hosted: Hosted) -> None:
        """vLLM has ended a prompt with its first token, so what follows is another request to it.

        It finds the prompt's blocks in vLLM's prefix cache: those in use are given back at the end of the very step
        that places it.
        """
        with self._lock:
            self._part(hosted)
            hosted.behind = True
            request = replace(hosted.request, token_ids=tuple(hosted.token_ids), generated_count=hosted.draw_index)
        try:
            self._host.add(hosted.number, request.token_ids, decode_params(request, self._info.eos_token_ids))
        except Exception as error:  # vLLM has no one class for what it refuses
            self._refuse(hosted, refusal_of(error))

    def _give_up_adopted(self) -> None:
        """Adopted requests that are not computed make room for those that were, and wait for blocks."""
        for hosted in self._account.decodes.values():
            if hosted.phase in (Phase.LANDED, Phase.WAITING) and not hosted.by_transfer and hosted.vllm_id:
                self._part(hosted)
                self._outbox.put(Preempted(hosted.key))

    def _part(self, hosted: Hosted) -> None:
        """Parts a request from the blocks that it has: vLLM takes them back."""
        if hosted.vllm_id:
            husk = Hosted(hosted.number + "-kept", hosted.request, hosted.phase, 0, [], 0)
            husk.done = husk.stopped = True
            husk.vllm_id, husk.released = hosted.vllm_id, True
            self._account.ended.add(husk)
            self._host.worker_side.report_released(hosted.vllm_id)
        hosted.vllm_id, hosted.vllm_request = "", None
        hosted.stopped = hosted.released = False
        hosted.block_ids = []
        hosted.computed = 0

    def _settle_step(self, outputs: Sequence[Any]) -> None:
        """Accounts for a step and tells what it drew."""
        computed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        with self._lock:
            for hosted, computed_tokens, _ in self._advances:
                if hosted.done:
                    continue
                hosted.computed = computed_tokens
                if hosted.phase is Phase.PREFILLING and computed_tokens < len(hosted.request.token_ids):
                    self._outbox.put(PrefillProgress(hosted.key, computed_tokens))
            self._advances = ()
            steps: list[TokenStep] = []
            for output in outputs:
                told = self._by_number.get(output.request_id)
                if told is not None and not told.done:
                    self._settle_output(told, output, steps, computed, unwanted)
            if steps:
                self._outbox.put(StepTokens(tuple(steps)))
            for hosted in self._account.decodes.values():
                # It found no room in this step: others must not take what it waits for.
                hosted.preempted = hosted.preempted or hosted.behind
            self._account.unused_blocks = self._host.free_blocks
        # Nobody waits longer for a first token because its KV is handed over.
        self._outbox.publish()
        for source, first_token_id in computed:
            self._pushes.hand_over(source, first_token_id)
        for transfer_id in unwanted:
            self._pushes.abort(transfer_id)

    def _settle_output(
        self,
        hosted: Hosted,
        output: Any,
        steps: list[TokenStep],
        computed: list[tuple[Source, int]],
        unwanted: list[bytes],
    ) -> None:
        """Accounts for what vLLM tells of one request."""
        drawn = output.outputs[0]
        if not drawn.token_ids:
            if output.finished:
                # It ended without a token: vLLM could not compute it.
                self._outbox.put(RequestFailed(hosted.key, f"vLLM ended it for the reason {drawn.finish_reason!r}"))
                self._end(hosted)
            return
        (token_id,) = drawn.token_ids
        params = hosted.request.params
        if hosted.phase is Phase.RUNNING and hosted.by_transfer and not hosted.resumed:
            # The token that prefill drew and told of, drawn again.
            hosted.resumed = True
            FIRST_TOKENS.forget(hosted.number)
            if token_id != hosted.token_ids[-1]:
                raise EngineError(f"vLLM drew {token_id} where {hosted.token_ids[-1]} was handed over")
            return
        logprobs = logprobs_of(drawn.logprobs[0] if drawn.logprobs else None, token_id, params.logprobs)
        index, finish = hosted.draw_index, self._finish(hosted, token_id)
        hosted.token_ids.append(token_id)
        hosted.draw_index += 1
        if hosted.phase is Phase.PREFILLING:
            assert hosted.source is not None
            hosted.phase = Phase.COMPUTED
            self._outbox.put(FirstToken(hosted.key, token_id, logprobs, finish))
            if finish is None:
                computed.append((hosted.source, token_id))
            elif hosted.transfer_id is not None:
                unwanted.append(hosted.transfer_id)
        else:
            steps.append(TokenStep(hosted.key, index, token_id, logprobs, finish))
            assert (finish is None) == (not output.finished), f"vLLM says {drawn.finish_reason!r}, we {finish!r}"
        if finish is not None:
            self._end(hosted)

    def _check(self) -> None:
        """Asserts that vLLM's blocks and the account agree. On the engine thread, between steps."""
        tables, counts = self._host.tables(), self._host.reference_counts()
        held: dict[int, int] = {}
        for block_ids in tables.values():
            for block in block_ids:
                held[block] = held.get(block, 0) + 1
        assert held == counts, f"vLLM's tables {tables} do not account for {counts}"
        assert self._host.free_blocks + len(counts) == self._info.total_blocks, "blocks are lost"
        with self._lock:
            known = {
                hosted.vllm_id
                for hosted in (
                    *self._account.prefills.values(),
                    *self._account.decodes.values(),
                    *self._account.ended,
                )
            }
            for vllm_id in tables:
                assert vllm_id in known, f"vLLM keeps {vllm_id}, which nobody knows"
            assert len(self._account.waiting) == len(set(self._account.waiting)), "a request waits twice"

    def _answer(self, check: "Future[None]") -> None:
        try:
            self._check()
        except AssertionError as error:
            check.set_exception(error)
        else:
            check.set_result(None)

    def _open(self, hosted: Hosted) -> None:
        self._account.open(hosted)
        self._by_number[hosted.number] = hosted
        self._added.append(hosted)
        self._wake()

    def _end(self, hosted: Hosted) -> None:
        self._account.end(hosted)
        self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._work.notify()

    def _finish(self, hosted: Hosted, token_id: int) -> Any:
        """Why the request ends with this token, its next; None when it goes on."""
        return finish_reason(
            hosted.request.params,
            self._info.eos_token_ids,
            token_id,
            hosted.draw_index,
            len(hosted.token_ids) + 1,
            self._info.max_model_len,
        )

    def _require_alive(self) -> None:
        if self._broken is not None:
            raise EngineError(self._broken)
        if self._closing:
            raise EngineError("it is closed")

    def _on_listener_error(self, error: Exception) -> None:
        get_logger().error("the engine stops: its listener raised", exc_info=error)
        self._break(f"the listener raised {error!r}")

    def _break(self, reason: str) -> None:
        """Nothing can be trusted any more. Every request is lost, EngineStopped is the last event."""
        with self._lock:
            if self._broken is not None or self._closing:
                return
            self._outbox.close(EngineStopped(reason))
            self._broken = reason
            self._closing = True
            self._wake()
        self._outbox.publish()
        self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        """Whoever waits for a ticket or a check waits no longer."""
        with self._lock:
            waiting: list[Future[Any]] = [hosted.granted for hosted in self._account.decodes.values() if hosted.granted]
            for hosted in self._account.decodes.values():
                hosted.granted = None
            waiting += self._checks
            self._checks = []
        for future in waiting:
            future.set_exception(EngineError(reason))

    def _close_transfers(self) -> None:
        self._sender.close()
        if self._receiver is not None:
            self._receiver.close()


def _first_token_id(note: bytes) -> int | None:
    try:
        return kv_pb2.HandOver.FromString(note).first_token_id
    except DecodeError:
        return None
