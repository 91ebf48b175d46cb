"""An engine that drives a ModelRunner step by step, on either side of a hand-over or on both.

Owns the pool, the engine thread and the order in which things happen. Leaves arithmetic to the runner, bytes to the
KV sender and receiver, and beside this file: the forming of a step to stepwise_batch, the live requests and their
blocks to stepwise_account, which of them decode to stepwise_residency, what may be pushed to pushes, the calls of the
listener to outbox.

One lock guards the account. It is held for microseconds and nothing is called out while it is held: not the runner,
not the transfers, not the listener. Events are put in the outbox under that lock, so their order is the order in
which things happened, and whoever put one there publishes it after letting the lock go.
"""

import secrets
import threading
from collections.abc import Sequence as Ordered
from concurrent.futures import Future

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
from kaveri.engine.outbox import Outbox
from kaveri.engine.phase import Phase
from kaveri.engine.pushes import Pushes, Source, first_token_of, ticket_refusal
from kaveri.engine.runner import DrawnToken, ModelRunner
from kaveri.engine.stepwise_account import Account
from kaveri.engine.stepwise_batch import PlannedSlice, form_step
from kaveri.engine.stepwise_sequence import Sequence
from kaveri.engine.stopping import finish_reason
from kaveri.errors import (
    ConfigError,
    EngineError,
    InvalidArgument,
    KaveriError,
    RequestCancelled,
)
from kaveri.kv.flow import KvFlow, ReceiverFlow
from kaveri.kv.mapped_sender import MappedSender
from kaveri.kv.pool import KvPool
from kaveri.kv.receiver import CREDIT_BYTES, KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport
from kaveri.telemetry.logs import get_logger

_CLOSE_TIMEOUT_S = 5.0


class StepwiseEngine:
    """Both PrefillEngine and DecodeEngine (contract.py). Steps fail as a whole: RequestFailed means a bad hand-over.

    total_blocks: blocks of each layer; the whole pool is allocated and touched here.
    chunk_tokens: most prompt tokens of a step, prompts and recomputation together.
    max_batch: most decode requests of a step; admitted ones beyond wait here, in order.
    listen: where to take pushes, best first. Empty for an engine that only prefills: reserve() fails there.
    transports: what carries KV, in the order in which this engine's pushes prefer them; None for the socket transports.
    kv_credit_bytes: what all who push here may have under way together.
    Raises ConfigError when one request of the runner's max_model_len does not fit into the empty pool, or when it
    cannot listen.
    """

    def __init__(
        self,
        runner: ModelRunner,
        total_blocks: int,
        *,
        chunk_tokens: int = 512,
        max_batch: int = 64,
        listen: Ordered[KvEndpoint] = (),
        transports: Ordered[Transport] | None = None,
        kv_credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        layout = runner.layout
        if chunk_tokens < 1:
            raise ConfigError("chunk_tokens", f"is {chunk_tokens}; it must be at least 1")
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        if layout.block_count(runner.max_model_len) > total_blocks:
            reason = (
                f"{runner.max_model_len} tokens need {layout.block_count(runner.max_model_len)} KV blocks of "
                f"{layout.block_tokens} tokens; the pool has {total_blocks}"
            )
            raise ConfigError("max_model_len", reason)
        self._runner = runner
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._pool = KvPool(layout, total_blocks)
        runner.attach(self._pool)

        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._account = Account(layout, total_blocks, max_batch, on_free=self._work.notify)
        self._push_owners: dict[bytes, Sequence] = {}
        self._landing_owners: dict[bytes, Sequence] = {}
        self._outbox = Outbox(self._on_listener_error)
        self._closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)

        epoch = secrets.randbits(63)
        self._receiver: KvReceiver | None = None
        if listen:
            self._receiver = KvReceiver(
                self._pool,
                self._on_landing,
                listen=listen,
                epoch=epoch,
                transports=transports,
                credit_bytes=kv_credit_bytes,
            )
        self._sender = MappedSender(self._pool, self._on_push, transports=transports)
        self._pushes = Pushes(self._sender, layout)
        self._info = EngineInfo(
            engine=runner.name,
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
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
            self._closing = True
            self._outbox.close()
            self._work.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._close_transfers()
        if self._thread.is_alive():
            get_logger().warning("a step goes on past the engine's end", waited_s=_CLOSE_TIMEOUT_S)
            return
        with self._lock:
            self._account.clear()
            self._push_owners.clear()
            self._landing_owners.clear()

    def stats(self) -> EngineStats:
        with self._lock:
            return self._account.stats()

    def kv_flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def abort(self, key: AttemptKey) -> None:
        with self._lock:
            if self._closing:
                return
            push_id = landing_id = None
            if (prefill := self._account.prefills.get(key)) is not None:
                self._account.end(prefill)
                push_id = prefill.transfer_id
            if (decode := self._account.decodes.get(key)) is not None:
                self._account.end(decode)
                landing_id = decode.transfer_id
        if push_id is not None:
            self._pushes.abort(push_id)
        if landing_id is not None and self._receiver is not None:
            self._receiver.revoke(landing_id)

    def check_integrity(self) -> None:
        with self._lock:
            self._account.check_integrity()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self._info.require_servable(request)
        sequence = Sequence.of(request, Phase.PREFILLING)
        with self._lock:
            self._require_alive()
            self._account.open_prefill(sequence)
            sequence.source = Source(sequence.block_ids, len(request.token_ids))
            self._work.notify()

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self._layout.require_mappable(ticket.layout)
        with self._lock:
            self._require_alive()
            sequence = self._account.prefills.get(key)
            if sequence is None:
                return
            if sequence.transfer_id is not None:
                raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the push before it has failed")
            source = sequence.source
            assert source is not None
            refusal = ticket_refusal(ticket, source.token_count)
            if ticket.transfer_id in self._push_owners:
                refusal = "the ticket is in use by another push"
            if refusal is not None:
                self._outbox.put(KvPushFailed(key, refusal))
            else:
                sequence.transfer_id = ticket.transfer_id
                self._push_owners[ticket.transfer_id] = sequence
        if refusal is None:
            self._open_push(sequence, source, ticket)
        self._outbox.publish()

    def _open_push(self, sequence: Sequence, source: Source, ticket: Ticket) -> None:
        try:
            self._pushes.open(source, ticket)
        except KaveriError as error:
            self._on_push(PushFailed(ticket.transfer_id, str(error)))
            return
        with self._lock:
            ended = sequence.done
        # The request ended before the sender knew of its push, so nobody could abort it.
        if ended:
            self._pushes.abort(ticket.transfer_id)

    # The decode side.

    def reserve(self, request: EngineRequest, expires_in_s: float) -> "Future[Ticket]":
        """As the contract; the future is done when this returns."""
        future: Future[Ticket] = Future()
        try:
            future.set_result(self._reserve(request, expires_in_s))
        except KaveriError as error:
            future.set_exception(error)
        self._outbox.publish()
        return future

    def adopt(self, key: AttemptKey) -> None:
        with self._lock:
            self._require_alive()
            sequence = self._account.prefills.get(key)
            if sequence is not None and sequence.phase is Phase.COMPUTED and sequence.transfer_id is None:
                for preempted in self._account.adopt(sequence):
                    self._outbox.put(Preempted(preempted.key))
                # A preempted request may take the blocks of one that is not admitted yet.
                self._work.notify()
        self._outbox.publish()

    def admit(self, key: AttemptKey) -> None:
        """As the contract; also ignores a request that is not landed."""
        with self._lock:
            self._require_alive()
            sequence = self._account.decodes.get(key)
            if sequence is not None and sequence.phase is Phase.LANDED:
                self._account.residency.admit(sequence)
                self._work.notify()

    def _reserve(self, request: EngineRequest, expires_in_s: float) -> Ticket:
        self._info.require_servable(request)
        if self._receiver is None:
            raise EngineError("this engine takes no pushes")
        sequence = Sequence.of(request, Phase.RESERVED)
        token_count, transfer_id = len(request.token_ids), secrets.token_bytes(16)
        with self._lock:
            self._require_alive()
            self._account.open_decode(sequence)
            sequence.transfer_id = transfer_id
            self._landing_owners[transfer_id] = sequence
        blocks = sequence.block_ids[: self._layout.block_count(token_count)]
        try:
            ticket = self._receiver.grant(blocks, token_count, expires_in_s, transfer_id=transfer_id)
        except BaseException:
            with self._lock:
                self._landing_owners.pop(transfer_id, None)
                sequence.transfer_id = None
                if sequence.done:
                    self._account.settle(sequence)
                else:
                    self._account.end(sequence)
            raise
        with self._lock:
            aborted = sequence.done and sequence.transfer_id is not None
        # Before the receiver knew of its transfer, so that nobody could revoke it.
        if aborted:
            self._receiver.revoke(transfer_id)
            raise RequestCancelled(request.key.request_id)
        return ticket

    # What the transfers tell, on their threads.

    def _on_push(self, event: PushAccepted | PushFailed) -> None:
        with self._lock:
            sequence = self._push_owners.pop(event.transfer_id, None)
            if sequence is None:
                return
            sequence.transfer_id = None
            if sequence.done:
                self._account.settle(sequence)
            elif isinstance(event, PushAccepted):
                self._account.end(sequence)
                self._outbox.put(KvPushed(sequence.key, event.kv_bytes, event.transport))
            else:
                self._outbox.put(KvPushFailed(sequence.key, event.reason))
        self._outbox.publish()

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._lock:
            sequence = self._landing_owners.pop(event.transfer_id, None)
            if sequence is not None:
                self._settle_landing(sequence, event)
        self._outbox.publish()

    def _settle_landing(self, sequence: Sequence, event: TransferLanded | TransferReleased) -> None:
        sequence.transfer_id = None
        if sequence.done:
            self._account.settle(sequence)
            return
        if isinstance(event, TransferLanded):
            first_token_id = first_token_of(event.note)
            if first_token_id is not None and first_token_id < self._info.vocab_size:
                sequence.computed = len(sequence.token_ids)
                sequence.token_ids.append(first_token_id)
                sequence.draw_index += 1
                sequence.runner_unaware = True
                self._account.residency.land(sequence)
                # A preempted request may take the blocks of one that is not admitted yet.
                self._work.notify()
                self._outbox.put(Landed(sequence.key, event.kv_bytes))
                return
            # Its sender was told that it is accepted, and so cannot tell anybody that the request is lost.
            failure: RequestFailed | LandingFailed = RequestFailed(
                sequence.key, "the hand-over names no token of this model"
            )
        else:
            failure = LandingFailed(sequence.key, event.reason)
        self._account.end(sequence)
        self._outbox.put(failure)

    # The engine thread.

    def _loop(self) -> None:
        # Events that this thread has put and not published. Those of other threads are theirs to publish.
        news = False
        try:
            while True:
                with self._lock:
                    if self._closing:
                        return
                    put_count = self._outbox.put_count
                    planned = self._plan()
                    news = news or self._outbox.put_count > put_count
                    if not planned and not news:
                        # Whatever makes work notifies, close() too.
                        self._work.wait()
                        continue
                self._outbox.publish()
                news = bool(planned)
                if planned:
                    self._step(planned)
        # Whatever a step raises, the state of model and cache is unknown: nobody may be left waiting for tokens.
        except Exception as error:
            get_logger().exception("the engine stops", error=repr(error))
            self._break(repr(error))
        finally:
            if self._broken is not None:
                self._close_transfers()

    def _plan(self) -> list[PlannedSlice]:
        """Forms the next step and marks its sequences; empty when there is nothing to do."""
        for sequence in self._account.residency.prepare_step():
            self._outbox.put(Preempted(sequence.key))
        planned = form_step(self._account.residency.running, self._account.prefilling, self._chunk_tokens)
        for sequence, _ in planned:
            sequence.in_step = True
            if sequence.phase is Phase.PREFILLING and not sequence.started:
                sequence.started = True
                self._outbox.put(PrefillStarted(sequence.key))
        return planned

    def _step(self, planned: list[PlannedSlice]) -> None:
        advances = []
        batch = []
        for sequence, token_count in planned:
            batch.append(sequence.slice(token_count))
            if sequence.source is not None:
                advances.append((sequence.source, sequence.computed + token_count))
            if sequence.runner_unaware:
                self._runner.landed(sequence.block_ids[: self._layout.block_count(sequence.computed)])
                sequence.runner_unaware = False
        if advances:
            self._pushes.begin_step(advances)
            drawn = self._runner.run(batch, self._pushes.layer_done)
            self._pushes.end_step()
        else:
            drawn = self._runner.run(batch, None)
        with self._lock:
            computed, ended = self._apply(planned, drawn)
        # Nobody waits longer for a first token because its KV is handed over.
        if computed:
            self._outbox.publish()
        for source, first_token_id in computed:
            self._pushes.hand_over(source, first_token_id)
        for transfer_id in ended:
            self._pushes.abort(transfer_id)

    def _apply(
        self, planned: list[PlannedSlice], drawn: list[DrawnToken | None]
    ) -> tuple[list[tuple[Source, int]], list[bytes]]:
        """Accounts for a step. Returns the prompts that are computed, with the token drawn behind each, and the pushes
        that nobody wants any more."""
        computed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        steps: list[TokenStep] = []
        for (sequence, token_count), token in zip(planned, drawn, strict=True):
            sequence.in_step = False
            if sequence.done:
                self._account.settle(sequence)
                continue
            sequence.computed += token_count
            if sequence.pending > 0:
                if sequence.phase is Phase.PREFILLING:
                    self._outbox.put(PrefillProgress(sequence.key, sequence.computed))
                continue
            assert token is not None, "the runner has drawn no token at the end of a sequence"
            index = sequence.draw_index
            sequence.token_ids.append(token.token_id)
            sequence.draw_index = index + 1
            finish = finish_reason(
                sequence.params,
                self._info.eos_token_ids,
                token.token_id,
                index,
                len(sequence.token_ids),
                self._info.max_model_len,
            )
            if sequence.phase is Phase.PREFILLING:
                self._outbox.put(FirstToken(sequence.key, token.token_id, token.logprobs, finish))
                self._account.prefilling.remove(sequence)
                sequence.phase = Phase.COMPUTED
                assert sequence.source is not None
                computed.append((sequence.source, token.token_id))
            else:
                steps.append(TokenStep(sequence.key, index, token.token_id, token.logprobs, finish))
            if finish is not None:
                if sequence.phase is Phase.COMPUTED:
                    computed.pop()
                    if sequence.transfer_id is not None:
                        unwanted.append(sequence.transfer_id)
                self._account.end(sequence)
        if steps:
            self._outbox.put(StepTokens(tuple(steps)))
        return computed, unwanted

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
            self._work.notify()
        self._outbox.publish()

    def _close_transfers(self) -> None:
        self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
