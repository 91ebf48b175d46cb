"""PrefillService over gRPC: messages to domain values and back, nothing else."""

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from kaveri.errors import KaveriError, Unavailable
from kaveri.v1 import decode_pb2, prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceServicer
from kaveri.wire.attempts import check_attempt
from kaveri.wire.messages import finish_to_proto, logprobs_to_proto, params_from_proto
from kaveri.wire.status import abort
from services.prefill.requests import FirstTokenDrawn, HandedOver, Placed, PrefillRequest, Progress, Started
from services.prefill.role import PrefillRole

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServer(PrefillServiceServicer):
    """Answers for one PrefillRole."""

    def __init__(self, role: PrefillRole) -> None:
        self._role = role

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        try:
            accepted = self._accept(request, context)
            while unread := await accepted.outbox.take():
                for progress in unread:
                    yield _to_proto(progress)
        except KaveriError as error:
            await abort(context, error)

    async def Attach(  # noqa: N802
        self, request: decode_pb2.AttachRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        await abort(context, Unavailable("re-attaching is not served yet"))
        yield prefill_pb2.PrefillResponse()

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AbortResponse:
        for attempt in request.attempts:
            self._role.abort(attempt.request_id, attempt.attempt, attempt.router_id)
        return decode_pb2.AbortResponse()

    def _accept(self, message: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]) -> PrefillRequest:
        check_attempt(message.request_id, message.attempt, message.router_id)
        accepted = self._role.accept(
            request_id=message.request_id,
            attempt=message.attempt,
            router_id=message.router_id,
            token_ids=tuple(message.token_ids),
            generated_count=message.generated_count,
            params=params_from_proto(message.params),
            timeout_s=context.time_remaining(),
        )
        # Called however the RPC ends, also when it is cancelled while a message is on its way out, where a `finally`
        # in the generator would wait for the garbage collector. After a regular end it does nothing.
        context.add_done_callback(lambda _: self._role.cancel(accepted))  # type: ignore[arg-type]
        return accepted


def _to_proto(progress: Progress) -> prefill_pb2.PrefillResponse:
    match progress:
        case Started():
            return prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(queue_s=progress.queue_s))
        case Placed():
            placed = prefill_pb2.PrefillPlaced(
                decode_instance_id=progress.decode_instance_id,
                decode_incarnation=progress.decode_incarnation,
                stream_losses=progress.stream_losses,
            )
            return prefill_pb2.PrefillResponse(placed=placed)
        case FirstTokenDrawn():
            first_token = prefill_pb2.PrefillFirstToken(
                token_id=progress.token_id,
                logprobs=logprobs_to_proto(progress.logprobs) if progress.logprobs is not None else None,
                finish_reason=finish_to_proto(progress.finish),
                prefill_s=progress.prefill_s,
            )
            return prefill_pb2.PrefillResponse(first_token=first_token)
        case HandedOver():
            handed_over = prefill_pb2.PrefillHandedOver(
                kv_bytes=progress.kv_bytes,
                kv_transfer_s=progress.kv_transfer_s,
                kv_tail_s=progress.kv_tail_s,
                kv_transport=progress.kv_transport,
            )
            return prefill_pb2.PrefillResponse(handed_over=handed_over)
