"""Reserves KV blocks on decode instances for prompts: asks where kaveri.policy.room_search says, waits, gives back."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode, aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.owner import Term
from kaveri.domain.view import ClusterView, ViewedInstance
from kaveri.engine.contract import EngineKey, KvPushFailed
from kaveri.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.retry import bounded_retry_s
from kaveri.policy.room_search import Ask, Hopeless, NoInstance, RoomSearch, Seeker, StopWaiting
from kaveri.policy.waits import (
    NO_DECODE_INSTANCE_S,
    ROOM_LOOK_S,
    ROOM_PATIENCE_S,
    ROOM_REST_WHEN_FAILED_S,
    ROOM_REST_WHEN_REFUSED_S,
)
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import decode_pb2, feed_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.attempts import ownership_fields, ownership_to_proto
from kaveri.wire.messages import layout_to_proto, length_to_proto, params_to_proto, ticket_from_proto
from kaveri.wire.status import error_of
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import PrefillRequest

_VIEW_TIMEOUT_S = 1.0
_ABORT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """KV blocks that a decode instance has reserved for a request, with the ticket for the push."""

    target: ViewedInstance
    ticket: Ticket
    incarnation: int
    """Incarnation of the instance that granted it; the view may show another."""


@dataclass(eq=False, slots=True)
class _ReserveCall:
    """Pending Reserve call to a decode instance."""

    target: ViewedInstance
    term: Term
    """Session and attempt of the request at that time."""
    waits: bool
    patient_until_s: float
    answer: asyncio.Task[Room | Exception]


@dataclass(eq=False, slots=True)
class Placement:
    """Search of one request for KV blocks at decode instances, and its result."""

    request: PrefillRequest
    heavy: bool = False
    unfit: dict[str, KaveriError] = field(default_factory=dict)
    """Instances that can never take it, with the cause; by id."""
    calls: dict[str, _ReserveCall] = field(default_factory=dict)
    """By instance id. At most one waits in line, and at most one other is pending."""
    target: ViewedInstance | None = None
    """The instance with its room."""
    push_failure: asyncio.Future[KvPushFailed] | None = None
    work: asyncio.Task[None] | asyncio.Handle | None = None
    """Places the request, or adopts it soon."""


class RoomFinder:
    """Reserves KV blocks (room) at decode instances for one prefill instance's requests. Not thread-safe."""

    def __init__(
        self,
        store: ClusterStore,
        search: RoomSearch[EngineKey],
        layout: KvLayout,
        own_id: str,
        metrics: PrefillMetrics,
    ) -> None:
        """search: says which instance to ask. layout: of the KV pool that is pushed from. own_id: this instance."""
        self._store = store
        self._search = search
        self._layout = layout_to_proto(layout)
        self._own_id = own_id
        self._channels = Channels()
        self._metrics = metrics
        self.on_view: Callable[[ClusterView], object] = lambda _: None
        """Called with each view of the cluster."""
        self._changed: asyncio.Future[None] | None = None
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Follow changes of the cluster until cancelled; the other methods are called only while this runs."""
        try:
            async with self._tasks:
                while True:
                    view = await self._store.wait_for_change(_VIEW_TIMEOUT_S)
                    if self._changed is not None:
                        # Waiters wake in the order in which they began to wait.
                        self._changed.set_result(None)
                        self._changed = None
                    self.on_view(view)
                    self._search.retain(view)
                    self._channels.retain(view.incarnations())
        finally:
            await self._channels.close()

    async def find(self, placement: Placement) -> Room:
        """Wait until a decode instance has reserved KV blocks for the request; give up those of others, and places in
        line. Raises StaleAttempt and RequestAlreadyExists (decode knows a newer attempt or session), InvalidArgument
        and LayoutMismatch (no instance can ever take the request), Unavailable (no decode instance), DeadlineExceeded.
        On errors and cancellation the caller must call give_up()."""
        request = placement.request
        none_since_s: float | None = None
        while True:
            now_s = time.monotonic()
            # Its caller may end it later, and it would ask without a pause until then.
            if now_s >= request.deadline_s:
                raise DeadlineExceeded
            wake_s = now_s + ROOM_LOOK_S
            patient_until_s = max((call.patient_until_s for call in placement.calls.values()), default=now_s)
            if now_s < patient_until_s:
                wake_s = min(wake_s, patient_until_s)
            else:
                waits_at = next((name for name, call in placement.calls.items() if call.waits), None)
                length = request.predicted_length
                seeker = Seeker(
                    request.engine_request.key,
                    request.token_count,
                    0 if length is None else request.engine_request.prompt_tokens + length.low,
                    placement.heavy,
                    waits_at,
                    placement.unfit,
                    request.silent_decode_ids,
                )
                found = self._search.look(seeker, self._store.view(), now_s)
                match found:
                    case Ask():
                        self._ask(placement, found, now_s)
                        continue
                    case StopWaiting():
                        assert waits_at is not None
                        self._drop(placement, waits_at)
                        continue
                    case Hopeless():
                        raise found.error
                    case NoInstance():
                        none_since_s = now_s if none_since_s is None else none_since_s
                        if now_s - none_since_s > NO_DECODE_INSTANCE_S:
                            raise Unavailable(found.reason, retry_after_s=1.0)
                    case None:
                        none_since_s = None
                rest_ends_s = self._search.next_rest_ends_s()
                wake_s = wake_s if rest_ends_s is None else min(wake_s, rest_ends_s)
            # Until an answer, or a change of the view.
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            awaited: list[asyncio.Future[Any]] = [self._changed]
            awaited += [call.answer for call in placement.calls.values()]
            await asyncio.wait(awaited, timeout=wake_s - now_s, return_when=asyncio.FIRST_COMPLETED)
            room = self._take_answers(placement)
            if room is not None:
                return room

    def give_up(self, placement: Placement) -> None:
        """End a request's search: leave lines at decode instances, give back blocks granted meanwhile. Idempotent."""
        for instance_id in list(placement.calls):
            self._drop(placement, instance_id)

    def give_back(self, request: PrefillRequest, target: ViewedInstance) -> None:
        """Give back KV blocks that the request has, or may have, at decode instance `target`, without waiting."""
        self._search.forget(request.engine_request.key, target.record.instance_id)
        # A task of its own: it must be sent even if the caller is cancelled.
        self._tasks.create_task(self._abort(target, request, request.placement_count))

    def failed_there(self, request: PrefillRequest, target: ViewedInstance, outcome: str, reason: str) -> None:
        """Count and log a failure at decode instance `target`, and avoid it for a while. outcome: metric label."""
        self._metrics.placements.labels(outcome).inc()
        self._search.rest(target.record.instance_id, time.monotonic() + ROOM_REST_WHEN_FAILED_S)
        get_logger().warning(
            "placement_failed",
            request_id=request.request_id,
            attempt=request.ownership.term.attempt,
            decode_instance_id=target.record.instance_id,
            outcome=outcome,
            reason=reason,
        )

    def _ask(self, placement: Placement, ask: Ask, now_s: float) -> None:
        request = placement.request
        patience_s = ROOM_PATIENCE_S if ask.shows_room else 0.0
        # A call without a wait is answered soon, or fails.
        patient_until_s = now_s + patience_s if ask.waits else request.deadline_s
        request.placement_count += 1
        answer = self._tasks.create_task(self._reserve(request, ask, request.placement_count))
        instance_id = ask.target.record.instance_id
        term = request.ownership.term
        placement.calls[instance_id] = _ReserveCall(ask.target, term, ask.waits, patient_until_s, answer)

    async def _reserve(self, request: PrefillRequest, ask: Ask, placement: int) -> Room | Exception:
        """Call Reserve. placement: number of this call among the request's. Returns errors: the instance's, or
        Unavailable or DeadlineExceeded without a response; the channel's keep-alive finds a frozen instance. After an
        error or cancellation, room may be reserved nevertheless."""
        try:
            timeout_s = request.deadline_s - time.monotonic()
            predicted = request.predicted_length
            message = decode_pb2.ReserveRequest(
                **ownership_fields(request.request_id, request.ownership, placement),
                token_ids=request.engine_request.token_ids,
                generated_count=request.engine_request.generated_count,
                params=params_to_proto(request.engine_request.params),
                timeout_s=timeout_s,
                layout=self._layout,
                predicted_length=length_to_proto(predicted) if predicted is not None else None,
                wait=ask.waits,
                traceparent=request.traceparent,
                prefill_instance_id=self._own_id,
                suspect_until=request.engine_request.suspect_until,
            )
            answer_s = timeout_s if ask.waits else min(timeout_s, CALL_TIMEOUT_S)
            with self._channels.calling(DecodeServiceStub, ask.target.record.address) as stub:
                try:
                    response = await stub.Reserve(message, timeout=answer_s)
                except aio.AioRpcError as error:
                    if error.code() is StatusCode.DEADLINE_EXCEEDED and answer_s < timeout_s:
                        # The request has time left: it is this instance that does not answer.
                        reason = f"the decode instance gave no answer within {answer_s} s"
                        raise Unavailable(reason) from error
                    raise error_of(error) from error
            return Room(ask.target, ticket_from_proto(response.ticket), response.incarnation)
        except Exception as error:  # A task that fails would end all others.
            return error

    async def _abort(self, target: ViewedInstance, request: PrefillRequest, placement: int) -> None:
        """Free the room of this and earlier placements at `target`. If unreachable, it frees the room on expiry."""
        attempt = ownership_to_proto(request.request_id, request.ownership, placement)
        with self._channels.calling(FeedServiceStub, target.record.address) as stub:
            try:
                await stub.Abort(feed_pb2.AbortRequest(attempts=[attempt]), timeout=_ABORT_TIMEOUT_S)
            except aio.AioRpcError as error:
                get_logger().warning(
                    "abort_failed",
                    request_id=request.request_id,
                    attempt=request.ownership.term.attempt,
                    decode_instance_id=target.record.instance_id,
                    reason=str(error_of(error)),
                )

    def _take_answers(self, placement: Placement) -> Room | None:
        request = placement.request
        for instance_id, call in list(placement.calls.items()):
            if not call.answer.done():
                continue
            match call.answer.result():
                case Room() as room:
                    del placement.calls[instance_id]
                    self.give_up(placement)
                    self._metrics.placements.labels("reserved").inc()
                    return room
                case StaleAttempt() | RequestAlreadyExists() if call.term < request.ownership.term:
                    # It knew the new owner, who has attached the request since and may ask it.
                    self._forget(placement, instance_id)
                case StaleAttempt() | RequestAlreadyExists() as error:
                    raise error
                case InvalidArgument() | LayoutMismatch() as error:
                    self._forget(placement, instance_id)
                    placement.unfit[instance_id] = error
                case NoCapacity() as error:
                    self._forget(placement, instance_id)
                    self._metrics.placements.labels("no_room").inc()
                    self._search.rest(instance_id, time.monotonic() + bounded_retry_s(error.retry_after_s))
                case Unavailable(retry_after_s=0.0):
                    # It serves prefill now, which the next view shows, and has not failed.
                    self._drop(placement, instance_id)
                    self._metrics.placements.labels("no_room").inc()
                    self._search.rest(instance_id, time.monotonic() + ROOM_REST_WHEN_REFUSED_S)
                case KaveriError() as error:
                    # It may have reserved nevertheless.
                    self._drop(placement, instance_id)
                    self.failed_there(request, call.target, "unavailable", str(error))
                case error:
                    raise error
        return None

    def _forget(self, placement: Placement, instance_id: str) -> None:
        del placement.calls[instance_id]
        self._search.forget(placement.request.engine_request.key, instance_id)

    def _drop(self, placement: Placement, instance_id: str) -> None:
        """Cancel a Reserve call, and give back the room that it may have reserved."""
        call = placement.calls.pop(instance_id)
        call.answer.cancel()
        self.give_back(placement.request, call.target)
