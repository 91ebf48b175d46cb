"""The engine seam on vLLM: our order, our admission, our transfers around its in-process engine.

Owns the calls of the seam and what the transfers tell. Leaves computing, batching and blocks to vLLM (host), stepping
it to the driver, what the threads share to the board, and KV to the ranks' ends of the data plane.

What vLLM does not offer is made of what it does: a prompt is a request for one token, whose blocks are kept when it
has ended until they are pushed; a reservation is a request that waits for its KV, its prompt followed by the token that
prefill has yet to draw, and is told that it is there when the service admits it.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
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
from kaveri.engine.limits import require_room
from kaveri.engine.phase import Phase
from kaveri.engine.pushes import first_token_of, ticket_refusal
from kaveri.engine.vllm.board import Board
from kaveri.engine.vllm.data_plane import DataPlane, DataPlaneEvent, Granted
from kaveri.engine.vllm.driver import Driver
from kaveri.engine.vllm.host import Host
from kaveri.engine.vllm.hosted import Hosted
from kaveri.engine.vllm.rank_plane import RankSetup
from kaveri.errors import ConfigError, EngineError, InvalidArgument, KaveriError, RequestCancelled
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import CREDIT_BYTES, TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.telemetry.logs import get_logger, log_settings

_CLOSE_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 30.0
_NUMBERS = itertools.count()
"""Of all engines of the process, as vLLM's logits processors are the process's."""


class VllmEngine:
    """Both PrefillEngine and DecodeEngine (contract.py).

    max_batch: most decode requests in the running batch; admitted ones beyond wait here, in order.
    listen: where to take pushes, best first. Empty for an engine that only prefills: reserve() fails there.
    transports: makes what carries KV, for each rank, in the order in which this engine's pushes prefer them; at the top
    of a module where ranks are in processes of their own. None for the socket transports.
    kv_credit_bytes: what all who push to one rank here may have under way together.
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
        kv_credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        layout, total_blocks = host.ranks[0].layout, host.free_blocks
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        require_room(host.max_model_len, layout, total_blocks)
        self._host = host
        self._layout = layout
        self._board = Board(total_blocks)
        self._account = self._board.account
        self._outbox = self._board.outbox
        self._push_owners: dict[bytes, Hosted] = {}
        self._landing_owners: dict[bytes, Hosted] = {}
        self._shut_down = False

        epoch = secrets.randbits(63)
        setup = RankSetup(tuple(listen), transports, epoch, kv_credit_bytes, log_settings())
        self._plane = DataPlane(host.ranks, setup, self._on_transfer, self._board.stop)
        self._info = EngineInfo(
            engine="vllm",
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=host.max_model_len,
            vocab_size=host.vocab_size,
            eos_token_ids=host.eos_token_ids,
            epoch=epoch,
            kv_endpoints=self._plane.endpoints,
        )
        self._driver = Driver(self._board, host, self._plane, self._info, max_batch, self._grant, self._plane.close)
        host.scheduler_side.desk = self._driver

    # Both sides.

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, listener: EngineListener) -> None:
        self._outbox.listener = listener
        self._driver.thread.start()
        # A rank may have been lost before there was anybody to tell.
        self._outbox.publish()

    def close(self) -> None:
        thread = self._driver.thread
        with self._board.lock:
            self._board.closing = True
            self._outbox.close()
            self._board.wake()
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_CLOSE_TIMEOUT_S)
        self._plane.close()
        self._board.fail_waiting("it is closed")
        if thread.is_alive():
            get_logger().warning("a step goes on past the engine's end", waited_s=_CLOSE_TIMEOUT_S)
            return
        self._host.scheduler_side.desk = None
        with self._board.lock:
            self._account.clear()
            self._push_owners.clear()
            self._landing_owners.clear()
        if not self._shut_down:
            self._shut_down = True
            self._host.shutdown()

    def stats(self) -> EngineStats:
        with self._board.lock:
            return self._account.stats()

    def kv_flow(self) -> KvFlow:
        return self._plane.flow()

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
            self._plane.abort_push(push_id)
        if landing_id is not None:
            self._plane.revoke(landing_id)

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
        self._info.require_servable(request)
        hosted = Hosted.prefill(f"kaveri-{next(_NUMBERS)}", request, self._layout)
        with self._board.lock:
            self._board.open(hosted)

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self._layout.require_same(ticket.layout)
        ticket.of_ranks()
        with self._board.lock:
            self._board.require_alive()
            hosted = self._account.prefills.get(key)
            if hosted is None:
                return
            if hosted.transfer_id is not None:
                raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the push before it has failed")
            refusal = ticket_refusal(ticket, len(hosted.request.token_ids))
            if ticket.transfer_id in self._push_owners:
                refusal = "the ticket is in use by another push"
            if refusal is not None:
                self._outbox.put(KvPushFailed(key, refusal))
            else:
                hosted.transfer_id = ticket.transfer_id
                self._push_owners[ticket.transfer_id] = hosted
        if refusal is None:
            self._plane.open_push(hosted.number, ticket)
            with self._board.lock:
                ended = hosted.done
            # The request ended before the data plane knew of its push, so nobody could abort it.
            if ended:
                self._plane.abort_push(ticket.transfer_id)
        self._outbox.publish()

    # The decode side.

    def reserve(self, request: EngineRequest, expires_in_s: float) -> "Future[Ticket]":
        granted: Future[Ticket] = Future()
        # Whoever waits for it gives up by abort(), so that there is one way to do so.
        granted.set_running_or_notify_cancel()
        try:
            self._info.require_servable(request)
            if not self._plane.listens:
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
                hosted.claim_next(self._layout.block_tokens)
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

    def _grant(self, hosted: Hosted, first_block: int) -> None:
        """vLLM has blocks for a reservation: a ticket is made for whoever waits for it."""
        transfer_id = secrets.token_bytes(16)
        with self._board.lock:
            if hosted.done:
                return
            hosted.transfer_id = transfer_id
            self._landing_owners[transfer_id] = hosted
        token_count = len(hosted.request.token_ids)
        expires_in_s = max(0.0, hosted.expires_at_s - time.monotonic())
        self._plane.grant(transfer_id, hosted.landing_blocks, token_count, expires_in_s, first_block)
        with self._board.lock:
            ended = hosted.done
        # It was aborted before the data plane knew of its transfer, so nobody could revoke it.
        if ended:
            self._plane.revoke(transfer_id)

    def _on_transfer(self, event: DataPlaneEvent) -> None:
        if isinstance(event, Granted):
            self._on_granted(event.ticket)
        elif isinstance(event, PushAccepted | PushFailed):
            self._on_push(event)
        else:
            self._on_landing(event)
        self._outbox.publish()

    def _on_granted(self, ticket: Ticket) -> None:
        with self._board.lock:
            hosted = self._landing_owners.get(ticket.transfer_id)
            if hosted is None:
                return
            granted, hosted.granted = hosted.granted, None
        if granted is not None:
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

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._board.lock:
            hosted = self._landing_owners.pop(event.transfer_id, None)
            if hosted is None:
                return
            hosted.transfer_id = None
            if hosted.done:
                self._board.wake()
                return
            granted, hosted.granted = hosted.granted, None
            failure: RequestFailed | LandingFailed | None = None
            if isinstance(event, TransferReleased):
                failure = LandingFailed(hosted.key, event.reason)
            else:
                first_token_id = first_token_of(event.note)
                # Its sender was told that it is accepted, and so cannot tell anybody that the request is lost.
                if first_token_id is None or first_token_id >= self._info.vocab_size:
                    failure = RequestFailed(hosted.key, "the hand-over names no token of this model")
                elif not hosted.goes_on(self._info.max_model_len):
                    failure = RequestFailed(hosted.key, f"no room behind {self._info.max_model_len} tokens")
                else:
                    hosted.computed = len(hosted.token_ids)
                    hosted.draw(first_token_id)
                    hosted.phase = Phase.LANDED
                    self._outbox.put(Landed(hosted.key, event.kv_bytes))
            if failure is not None:
                self._board.end(hosted)
                if granted is None:
                    self._outbox.put(failure)
        if granted is not None:
            # Nobody has the ticket yet.
            reason = event.reason if isinstance(event, TransferReleased) else "it landed before it was granted"
            granted.set_exception(EngineError(f"no ticket could be granted: {reason}"))
