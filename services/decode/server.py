"""DecodeService over gRPC: messages to domain values and back, nothing else."""

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.v1 import decode_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceServicer
from kaveri.wire.attempts import check_attempt, check_router_id
from kaveri.wire.messages import (
    finish_to_proto,
    layout_from_proto,
    length_from_proto,
    logprobs_to_proto,
    params_from_proto,
    ticket_to_proto,
)
from kaveri.wire.status import abort
from services.decode.instance import DecodeInstance
from services.decode.token_messages import messages_of
from services.decode.token_streams import BEAT_S, GainedTokens

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
_BEAT = decode_pb2.StreamTokensResponse()


class DecodeServer(DecodeServiceServicer):
    """Answers for one DecodeInstance."""

    def __init__(self, instance: DecodeInstance, incarnation: int) -> None:
        self._instance = instance
        self._incarnation = incarnation

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        try:
            check_attempt(request.request_id, request.attempt, request.router_id)
            if not request.token_ids:
                raise InvalidArgument("token_ids", [], "at least one token long")
            if not request.timeout_s > 0:
                raise InvalidArgument("timeout_s", request.timeout_s, "more than 0")
            ticket = await self._instance.reserve(
                request_id=request.request_id,
                attempt=request.attempt,
                router_id=request.router_id,
                token_ids=tuple(request.token_ids),
                generated_count=request.generated_count,
                params=params_from_proto(request.params),
                timeout_s=request.timeout_s,
                layout=layout_from_proto(request.layout),
                predicted_length=(
                    length_from_proto(request.predicted_length) if request.HasField("predicted_length") else None
                ),
                waits=request.wait,
                reservation=request.reservation,
            )
        except KaveriError as error:
            await abort(context, error)
        return decode_pb2.ReserveResponse(
            ticket=ticket_to_proto(ticket),
            incarnation=self._incarnation,
            stream_losses=self._instance.streams.losses,
        )

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AbortResponse:
        for name in request.attempts:
            self._instance.abort(name.request_id, name.attempt, name.router_id, request.by_router, name.reservation)
        return decode_pb2.AbortResponse()

    async def Attach(  # noqa: N802
        self, request: decode_pb2.AttachRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AttachResponse:
        await abort(context, Unavailable("re-attaching is not served yet"))

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        try:
            check_router_id(request.router_id)
        except InvalidArgument as error:
            await abort(context, error)
        stream = self._instance.streams.open(request.router_id)
        # Called however the RPC ends, also when it is cancelled while a message is on its way out, where a `finally`
        # here would wait for the garbage collector.
        context.add_done_callback(lambda _: self._instance.streams.close(stream))  # type: ignore[arg-type]
        yield decode_pb2.StreamTokensResponse(incarnation=self._incarnation, stream_losses=stream.losses, beat_s=BEAT_S)
        while not stream.has_ended:
            batch = await stream.next_batch()
            if not batch:
                yield _BEAT
            for entries in messages_of(batch):
                yield decode_pb2.StreamTokensResponse(requests=map(_to_proto, entries))


def _to_proto(gained: GainedTokens) -> decode_pb2.RequestTokens:
    message = decode_pb2.RequestTokens(
        request_id=gained.request_id, attempt=gained.attempt, index=gained.index, token_ids=gained.token_ids
    )
    # Set only where there is something to set: this runs for every request in every step.
    if gained.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, gained.logprobs))
    if gained.error:
        message.error = gained.error
        message.replaced = gained.replaced
    if gained.finish is not None:
        message.finish_reason = finish_to_proto(gained.finish)
        if gained.times is not None:
            message.timing.queue_s = gained.times.queue_s
            message.timing.decode_s = gained.times.decode_s
            message.timing.preemptions = gained.times.preemptions
    return message
