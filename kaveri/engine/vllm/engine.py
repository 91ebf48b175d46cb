"""The engine seam on vLLM: our order, our admission, our transfers around its in-process engine.

Owns the calls of the seam and what the transfers tell. Leaves computing, batching and blocks to vLLM (host), stepping
it to the driver, what the threads share to the board, bytes to the KV sender and receiver, and what may be pushed to
stepwise_pushes.

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

from kaveri.engine.contract import (
    AttemptKey,
    EngineInfo,
    EngineListener,
    EngineRequest,
    EngineStats,
    KvPushed,
    KvPushFailed,
    Landed,
    LandingFailed,
    RequestFailed,
)
from kaveri.engine.stepwise_pushes import Pushes, first_token_of
from kaveri.engine.stepwise_sequence import Phase, Source, validate_request
from kaveri.engine.vllm.board import Board
from kaveri.engine.vllm.connector_scheduler import Placement
from kaveri.engine.vllm.driver import Driver
from kaveri.engine.vllm.host import Host
from kaveri.engine.vllm.hosted import Hosted
from kaveri.errors import ConfigError, EngineError, InvalidArgument, KaveriError, RequestCancelled
from kaveri.kv.flow import KvFlow, ReceiverFlow
from kaveri.kv.receiver import CREDIT_BYTES, KvReceiver, TransferLanded, TransferReleased
from kaveri.kv.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.transport import Transport
from kaveri.telemetry.logs import get_logger

_CLOSE_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 30.0
_NUMBERS = itertools.count()
"""Of all engines of the process, as vLLM's logits processors are the process's."""


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
        self._board = Board(total_blocks)
        self._account = self._board.account
        self._outbox = self._board.outbox
        self._push_owners: dict[bytes, Hosted] = {}
        self._landing_owners: dict[bytes, Hosted] = {}
        # What became of transfers before grant() had returned here.
        self._early_landings: dict[bytes, TransferLanded | TransferReleased] = {}
        self._shut_down = False

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
        self._driver = Driver(
            self._board, host, self._pushes, self._info, max_batch, self._grant, self._close_transfers
        )
        host.worker_side.pushes = self._pushes
        host.scheduler_side.desk = self._driver

    # Both sides.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, listener: EngineListener) -> None:
        self._outbox.listener = listener
        self._driver.thread.start()

    def close(self) -> None:
        thread = self._driver.thread
        with self._board.lock:
            self._board.closing = True
            self._outbox.close()
            self._board.wake()
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_CLOSE_TIMEOUT_S)
        self._close_transfers()
        if thread.is_alive():
            get_logger().warning("a step goes on past the engine's end", waited_s=_CLOSE_TIMEOUT_S)
            return
        self._board.fail_waiting("it is closed")
        self._host.worker_side.pushes = None
        self._host.scheduler_side.desk = None
        with self._board.lock:
            self._account.clear()
            self._push_owners.clear()
            self._landing_owners.clear()
            self._early_landings.clear()
        if not self._shut_down:
            self._shut_down = True
            self._host.shutdown()

    def stats(self) -> EngineStats:
        with self._board.lock:
            return self._account.stats()

    def kv_flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def abort(self, key: AttemptKey) -> None:
        refused: Future[Ticket] | None = None
        with self._board.lock:
            if self._board.closing:
                return
            push_id = landing_id = None
            if (prefill := self._account.prefills.get(key)) is not None:
                push_id = prefill.transfer_id
                self._board.end(prefill)
            if (decode := self._account.decodes.get(key)) is not None:
                landing_id = decode.transfer_id
                refused, decode.granted = decode.granted, None
                self._board.end(decode)
        if refused is not None:
            refused.set_exception(RequestCancelled(key.request_id))
        if push_id is not None:
            self._pushes.abort(push_id)
        if landing_id is not None and self._receiver is not None:
            self._receiver.revoke(landing_id)

    def check_integrity(self) -> None:
        """As the contract. Waits for the step under way, if any; must not be called by the listener."""
        check: Future[None] = Future()
        thread = self._driver.thread
        with self._board.lock:
            if self._board.closing:
                return
            if thread.is_alive():
                self._board.checks.append(check)
                self._board.wake()
        if thread.is_alive():
            check.result(_CHECK_TIMEOUT_S)
        else:
            self._driver.check()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        validate_request(request, self._info)
        hosted = Hosted.prefill(f"kaveri-{next(_NUMBERS)}", request, self._layout)
        with self._board.lock:
            self._board.open(hosted)

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self._layout.require_same(ticket.layout)
        with self._board.lock:
            self._board.require_alive()
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
        with self._board.lock:
            ended = hosted.done
        # The request ended before the sender knew of its push, so nobody could abort it.
        if ended:
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
            with self._board.lock:
                self._board.open(hosted)
        except KaveriError as error:
            granted.set_exception(error)
        return granted

    def adopt(self, key: AttemptKey) -> None:
        with self._board.lock:
            self._board.require_alive()
            hosted = self._account.prefills.get(key)
            if hosted is not None and hosted.phase is Phase.COMPUTED and hosted.transfer_id is None:
                self._account.adopt(hosted)
                self._board.wake()

    def admit(self, key: AttemptKey) -> None:
        """As the contract; also ignores a request that is not landed."""
        with self._board.lock:
            self._board.require_alive()
            hosted = self._account.decodes.get(key)
            if hosted is not None and hosted.phase is Phase.LANDED:
                hosted.phase = Phase.WAITING
                self._account.waiting.append(hosted)
                self._board.wake()

    # What the driver and the transfers tell.

    def _grant(self, placement: Placement) -> None:
        """vLLM has blocks for a reservation: whoever waits for it gets the ticket."""
        assert self._receiver is not None, "only an engine that listens reserves"
        hosted, first_block, block_ids = placement
        with self._board.lock:
            if hosted.done:
                return
        token_count = len(hosted.request.token_ids)
        expires_in_s = max(0.0, hosted.expires_at_s - time.monotonic())
        try:
            ticket = self._receiver.grant(block_ids[first_block:], token_count, expires_in_s, first_block=first_block)
        except KaveriError as error:
            self._driver.refuse(hosted, error)
            return
        with self._board.lock:
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

    def _on_push(self, event: PushAccepted | PushFailed) -> None:
        with self._board.lock:
            hosted = self._push_owners.pop(event.transfer_id, None)
            if hosted is None:
                return
            hosted.transfer_id = None
            if hosted.done:
                self._board.wake()
            elif isinstance(event, PushAccepted):
                self._board.end(hosted)
                self._outbox.put(KvPushed(hosted.key, event.kv_bytes, event.transport))
            else:
                self._outbox.put(KvPushFailed(hosted.key, event.reason))
        self._outbox.publish()

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._board.lock:
            self._settle_landing(event)
        self._outbox.publish()

    def _settle_landing(self, event: TransferLanded | TransferReleased) -> None:
        hosted = self._landing_owners.pop(event.transfer_id, None)
        if hosted is None:
            self._early_landings[event.transfer_id] = event
            return
        hosted.transfer_id = None
        if hosted.done:
            self._board.wake()
            return
        if isinstance(event, TransferLanded):
            first_token_id = first_token_of(event.note)
            if first_token_id is not None and first_token_id < self._info.vocab_size:
                hosted.computed = len(hosted.token_ids)
                hosted.draw(first_token_id)
                hosted.phase = Phase.LANDED
                self._outbox.put(Landed(hosted.key, event.kv_bytes))
                return
            # Its sender was told that it is accepted, and so cannot tell anybody that the request is lost.
            failure: RequestFailed | LandingFailed = RequestFailed(
                hosted.key, "the hand-over names no token of this model"
            )
        else:
            failure = LandingFailed(hosted.key, event.reason)
        self._board.end(hosted)
        self._outbox.put(failure)

    def _close_transfers(self) -> None:
        self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
