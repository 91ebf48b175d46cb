"""Talks to decode instances: reserves room, takes reservations back."""

from typing import NamedTuple

from grpc import StatusCode, aio

from kaveri.domain.view import ViewedInstance
from kaveri.errors import KaveriError, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import Ticket
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import decode_pb2, feed_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.messages import layout_to_proto, length_to_proto, params_to_proto, ticket_from_proto
from kaveri.wire.status import error_of
from services.prefill.requests import PrefillRequest

_ABORT_TIMEOUT_S = 1.0


class Reservation(NamedTuple):
    """Room at a decode instance."""

    ticket: Ticket
    incarnation: int
    """The life that granted it: not always the one that the view named."""


class DecodePeers:
    """The decode instances that one prefill instance talks to."""

    def __init__(self, layout: KvLayout, own_id: str = "") -> None:
        """layout: of the pool that is pushed from. own_id: the instance that asks."""
        self._own_id = own_id
        self._layout = layout_to_proto(layout)
        self.channels = Channels()

    async def reserve(
        self, target: ViewedInstance, request: PrefillRequest, reservation: int, timeout_s: float, waits: bool
    ) -> Reservation:
        """Asks `target` for room; with `waits`, waits there in line until it has room. reservation: the number of this
        call among the request's. timeout_s: what is left of the request's time.

        Raises what the instance answers, or Unavailable or DeadlineExceeded when it does not. A frozen instance is
        found by the channel's keep-alive. Cancelled, or without an answer, the room may have been granted nevertheless:
        abort() takes it back.
        """
        predicted = request.predicted_length
        message = decode_pb2.ReserveRequest(
            request_id=request.request_id,
            attempt=request.owner.attempt,
            session=request.owner.session,
            router_id=request.ownership.router_id,
            secret=request.ownership.secret,
            token_ids=request.engine_request.token_ids,
            generated_count=request.engine_request.generated_count,
            params=params_to_proto(request.engine_request.params),
            timeout_s=timeout_s,
            layout=self._layout,
            predicted_length=length_to_proto(predicted) if predicted is not None else None,
            wait=waits,
            reservation=reservation,
            traceparent=request.traceparent,
            prefill_instance_id=self._own_id,
            suspect_until=request.engine_request.suspect_until,
        )
        answer_s = timeout_s if waits else min(timeout_s, CALL_TIMEOUT_S)
        with self.channels.calling(DecodeServiceStub, target.record.address) as stub:
            try:
                response = await stub.Reserve(message, timeout=answer_s)
            except aio.AioRpcError as error:
                if error.code() is StatusCode.DEADLINE_EXCEEDED and answer_s < timeout_s:
                    # The request has time left: it is this instance that does not answer.
                    reason = f"the decode instance gave no answer within {answer_s} s"
                    raise Unavailable(reason) from error
                raise error_of(error) from error
        return Reservation(ticket_from_proto(response.ticket), response.incarnation)

    async def abort(self, target: ViewedInstance, request: PrefillRequest, reservation: int) -> None:
        """Ends the request at `target`, up to that reservation: a later one stays, however late this arrives. What
        cannot be reached is left to the reservation's expiry."""
        attempt = decode_pb2.AttemptId(
            request_id=request.request_id,
            session=request.owner.session,
            attempt=request.owner.attempt,
            router_id=request.ownership.router_id,
            secret=request.ownership.secret,
            reservation=reservation,
        )
        with self.channels.calling(FeedServiceStub, target.record.address) as stub:
            try:
                await stub.Abort(feed_pb2.AbortRequest(attempts=[attempt]), timeout=_ABORT_TIMEOUT_S)
            except aio.AioRpcError as error:
                reason: KaveriError = error_of(error)
                get_logger().warning(
                    "abort_failed",
                    request_id=request.request_id,
                    attempt=request.owner.attempt,
                    decode_instance_id=target.record.instance_id,
                    reason=str(reason),
                )
