"""An engine that drives a ModelRunner step by step, on either side of a hand-over or on both.

Owns the pool, the engine thread and the order in which things happen. Leaves arithmetic to the runner, bytes to the
KV sender and receiver, and beside this file: what happens to requests to stepwise_lifecycle, the forming of a step to
stepwise_batch, the live requests and their blocks to stepwise_account, which of them decode to stepwise_residency, what
may be pushed to pushes, the calls of the listener to outbox.

One lock guards the lifecycle. It is held for microseconds and nothing is called out while it is held: not the runner,
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
)
from kaveri.engine.limits import require_room
from kaveri.engine.outbox import Outbox
from kaveri.engine.pushes import Pushes
from kaveri.engine.stepwise.batch import PlannedSlice
from kaveri.engine.stepwise.lifecycle import Lifecycle
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.sequence import Sequence
from kaveri.errors import ConfigError, EngineError, KaveriError, RequestCancelled
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow
from kaveri.kv.transfer.mapped_sender import MappedSender
from kaveri.kv.transfer.receiver import CREDIT_BYTES, KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports
from kaveri.telemetry.logs import get_logger

_CLOSE_TIMEOUT_S = 5.0


class StepwiseEngine:
    """Both PrefillEngine and DecodeEngine (contract.py). RequestFailed means a bad hand-over, or that no token could
    be drawn; whatever else goes wrong in a step stops the engine.

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
        require_room(runner.max_model_len, layout, total_blocks)
        self._runner = runner
        self._layout = layout
        self._pool = _allocated(layout, total_blocks)
        runner.attach(self._pool)

        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._outbox = Outbox(self._on_listener_error)
        self._closing = False
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)

        epoch = secrets.randbits(63)
        transports = make_transports() if transports is None else transports
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
        self._lifecycle = Lifecycle(self._info, chunk_tokens, max_batch, self._outbox.put, on_work=self._work.notify)

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
            self._lifecycle.clear()

    def stats(self) -> EngineStats:
        with self._lock:
            return self._lifecycle.stats()

    def kv_flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def abort(self, key: AttemptKey) -> None:
        with self._lock:
            if self._closing:
                return
            push_id, landing_id = self._lifecycle.abort(key)
        if push_id is not None:
            self._pushes.abort(push_id)
        if landing_id is not None and self._receiver is not None:
            self._receiver.revoke(landing_id)

    def check_integrity(self) -> None:
        with self._lock:
            self._lifecycle.check_integrity()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self._info.require_servable(request)
        with self._lock:
            self._require_alive()
            self._lifecycle.open_prefill(request)

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self._layout.require_mappable(ticket.layout)
        with self._lock:
            self._require_alive()
            sequence = self._lifecycle.open_push(key, ticket)
        if sequence is not None:
            self._open_push(sequence, ticket)
        self._outbox.publish()

    def _open_push(self, sequence: Sequence, ticket: Ticket) -> None:
        assert sequence.source is not None
        try:
            self._pushes.open(sequence.source, ticket)
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
            self._lifecycle.adopt(key)
        self._outbox.publish()

    def admit(self, key: AttemptKey) -> None:
        """As the contract; also ignores a request that is not landed."""
        with self._lock:
            self._require_alive()
            self._lifecycle.admit(key)

    def _reserve(self, request: EngineRequest, expires_in_s: float) -> Ticket:
        self._info.require_servable(request)
        if self._receiver is None:
            raise EngineError("this engine takes no pushes")
        token_count, transfer_id = len(request.token_ids), secrets.token_bytes(16)
        with self._lock:
            self._require_alive()
            sequence = self._lifecycle.open_landing(request, transfer_id)
        blocks = sequence.block_ids[: self._layout.block_count(token_count)]
        try:
            ticket = self._receiver.grant(blocks, token_count, expires_in_s, transfer_id=transfer_id)
        except BaseException:
            with self._lock:
                self._lifecycle.cancel_landing(sequence, transfer_id)
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
            self._lifecycle.end_push(event)
        self._outbox.publish()

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._lock:
            self._lifecycle.end_landing(event)
        self._outbox.publish()

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
                    planned = self._lifecycle.plan()
                    news = news or self._outbox.put_count > put_count
                    if not planned and not news:
                        # Whatever makes work notifies, close() too.
                        self._work.wait()
                        continue
                self._outbox.publish()
                news = bool(planned)
                if planned:
                    self._step(planned)
        # Whatever a step raises, SystemExit too, the state of model and cache is unknown: no request may be left
        # waiting for tokens.
        except BaseException as error:
            self._break(repr(error))
            get_logger().exception("the engine stops", error=repr(error))
        finally:
            if self._broken is not None:
                self._close_transfers()

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
            computed, unwanted = self._lifecycle.apply(planned, drawn)
        # Nobody waits longer for a first token because its KV is handed over.
        if computed:
            self._outbox.publish()
        for source, first_token_id in computed:
            self._pushes.hand_over(source, first_token_id)
        for transfer_id in unwanted:
            self._pushes.abort(transfer_id)

    def _require_alive(self) -> None:
        if self._broken is not None:
            raise EngineError(self._broken)
        if self._closing:
            raise EngineError("it is closed")

    def _on_listener_error(self, error: Exception) -> None:
        self._break(f"the listener raised {error!r}")
        get_logger().error("the engine stops: its listener raised", exc_info=error)

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


def _allocated(layout: KvLayout, total_blocks: int) -> KvPool:
    try:
        return KvPool(layout, total_blocks)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        pool_bytes = layout.layer_count * total_blocks * layout.block_bytes
        raise ConfigError("kv_cache_memory_bytes", f"{pool_bytes} bytes cannot be allocated here: {error}") from error
