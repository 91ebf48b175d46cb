"""PrefillService over gRPC: messages to domain values and back, nothing else."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from grpc import aio

from kaveri.errors import KaveriError
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceServicer
from kaveri.wire.attempts import attached_to_proto, attachment_from_proto, check_ownership, ownership_from_proto
from kaveri.wire.messages import (
    finish_to_proto,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    resolved_from_proto,
)
from kaveri.wire.status import abort
from services.prefill.requests import (
    FirstTokenDrawn,
    HandedOver,
    Progress,
    ProgressOutbox,
    PromptScored,
    RoomReserved,
    Started,
)
from services.prefill.role import PrefillRole

_REPORTED_TOGETHER = 512
SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServer(PrefillServiceServicer):
    """Answers for one PrefillRole."""

    def __init__(self, role: PrefillRole) -> None:
        self._role = role

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        try:
            outbox = self._accept(request, context)
            while unread := await outbox.take():
                for response in _responses(unread):
                    yield response
        except KaveriError as error:
            await abort(context, error)

    async def AttachPrefill(  # noqa: N802
        self, request: prefill_pb2.AttachPrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.AttachPrefillResponse]:
        try:
            attached, news = self._role.attach(attachment_from_proto(request.attach))
        except KaveriError as error:
            await abort(context, error)
        outbox = attached.outbox
        context.add_done_callback(lambda _: self._role.leave(attached, outbox))  # type: ignore[arg-type]
        first = prefill_pb2.PrefillResponse(attached=attached_to_proto(news))
        yield prefill_pb2.AttachPrefillResponse(progress=first)
        try:
            while unread := await outbox.take():
                for response in _responses(unread):
                    yield prefill_pb2.AttachPrefillResponse(progress=response)
        except KaveriError as error:
            await abort(context, error)

    async def AbortPrefill(  # noqa: N802
        self, request: prefill_pb2.AbortPrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.AbortPrefillResponse:
        end = self._role.give_back if request.give_back else self._role.abort
        for attempt in request.attempts:
            end(attempt.request_id, ownership_from_proto(attempt))
        return prefill_pb2.AbortPrefillResponse()

    async def BeatPrefill(  # noqa: N802
        self, request: prefill_pb2.BeatPrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.BeatPrefillResponse:
        return prefill_pb2.BeatPrefillResponse()

    def _accept(self, message: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]) -> ProgressOutbox:
        accepted = self._role.accept(
            request_id=message.request_id,
            ownership=check_ownership(message),
            token_ids=tuple(message.token_ids),
            generated_count=message.generated_count,
            params=resolved_from_proto(message.params),
            timeout_s=context.time_remaining(),
            silent_decode_ids=frozenset(message.silent_decode_ids),
            traceparent=message.traceparent,
            suspect_until=message.suspect_until,
        )
        # Called however the RPC ends, also when it is cancelled while a message is on its way out, where a `finally`
        # in the generator would wait for the garbage collector. After a regular end it does nothing.
        outbox = accepted.outbox
        context.add_done_callback(lambda _: self._role.leave(accepted, outbox))  # type: ignore[arg-type]
        return outbox


def _responses(unread: Iterable[Progress]) -> Iterator[prefill_pb2.PrefillResponse]:
    """Pack progress into as few responses as possible: at most one entry of each kind in a response."""
    response, kinds = prefill_pb2.PrefillResponse(), set[type[Progress]]()
    for progress in _in_parts(unread):
        if type(progress) in kinds:
            yield response
            response, kinds = prefill_pb2.PrefillResponse(), set()
        kinds.add(type(progress))
        response.MergeFrom(_to_proto(progress))
    yield response


def _in_parts(reported: Iterable[Progress]) -> Iterator[Progress]:
    """Split long prompt reports, so that no single message blocks the event loop for long."""
    for progress in reported:
        if isinstance(progress, PromptScored):
            for start in range(0, len(progress.entries), _REPORTED_TOGETHER):
                entries = progress.entries[start : start + _REPORTED_TOGETHER]
                yield PromptScored(progress.first + start, entries)
        else:
            yield progress


def _to_proto(progress: Progress) -> prefill_pb2.PrefillResponse:
    match progress:
        case Started():
            return prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(queue_s=progress.queue_s))
        case RoomReserved():
            placed = prefill_pb2.PrefillPlaced(
                decode_instance_id=progress.decode_instance_id,
                decode_incarnation=progress.decode_incarnation,
            )
            return prefill_pb2.PrefillResponse(placed=placed)
        case PromptScored():
            return prefill_pb2.PrefillResponse(
                prompt_logprobs=prompt_logprobs_to_proto(progress.first, progress.entries)
            )
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
