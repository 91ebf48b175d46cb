"""Serves DecodeService over gRPC: converts between messages and domain values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from grpc import aio

from kaveri.domain.sampling import ResolvedParams
from kaveri.errors import InvalidArgument, KaveriError, Unavailable, Unsupported
from kaveri.v1 import decode_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceServicer
from kaveri.wire.attempts import check_ownership
from kaveri.wire.messages import (
    FINISH_TO_PROTO,
    fault_to_proto,
    layout_from_proto,
    length_from_proto,
    logprobs_to_proto,
    params_from_proto,
    ticket_to_proto,
)
from kaveri.wire.replicas import offer_from_proto, replica_to_proto, resumed_to_proto, resumption_from_proto
from kaveri.wire.status import abort
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.requests import GainedTokens

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name

_MAX_TOKENS_BYTES = 2**13
"""Limit on the estimated size of a message, which a router decodes in one turn of its event loop, in milliseconds."""
_ENTRY_BYTES = 128
"""Size of an entry without ids, tokens and error."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
"""Size of each log-probability, alternatives included."""


class DecodeServer(DecodeServiceServicer):
    def __init__(
        self,
        instance: DecodeInstance,
        incarnation: int,
        holder: ReplicaHolder | None,
        prefills: Callable[[], bool],
    ) -> None:
        """holder: KV copies of other instances' requests; None if replication is off. prefills: returns True while the
        instance prefills and accepts no pushed KV."""
        self._instance = instance
        self._holder = holder
        self._incarnation = incarnation
        self._prefills = prefills

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        try:
            params = params_from_proto(request.params, ResolvedParams)
            if params.grammar is not None:
                await self._instance.prepare(params.grammar)
            if self._prefills():
                raise Unavailable("an instance that prefills takes no pushes", retry_after_s=0.0)
            ownership = check_ownership(request)
            if not request.token_ids:
                raise InvalidArgument("token_ids", [], "at least one token long")
            if not request.timeout_s > 0:
                raise InvalidArgument("timeout_s", request.timeout_s, "more than 0")
            ticket = await self._instance.reserve(
                request_id=request.request_id,
                ownership=ownership,
                token_ids=tuple(request.token_ids),
                generated_count=request.generated_count,
                params=params,
                timeout_s=request.timeout_s,
                layout=layout_from_proto(request.layout),
                predicted_length=(
                    length_from_proto(request.predicted_length) if request.HasField("predicted_length") else None
                ),
                waits=request.wait,
                placement=request.term.placement,
                traceparent=request.traceparent,
                placed_by=request.prefill_instance_id,
                suspect_until=request.suspect_until,
            )
        except KaveriError as error:
            await abort(context, error)
        return decode_pb2.ReserveResponse(ticket=ticket_to_proto(ticket), incarnation=self._incarnation)

    async def OpenReplica(  # noqa: N802
        self, request: decode_pb2.OpenReplicaRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.OpenReplicaResponse:
        try:
            holder = self._require_holder()
            if request.replica and not request.token_count:
                holder.update(request.request_id, check_ownership(request), request.replica)
                return decode_pb2.OpenReplicaResponse(incarnation=self._incarnation)
            ticket = holder.open(offer_from_proto(request))
        except KaveriError as error:
            await abort(context, error)
        return decode_pb2.OpenReplicaResponse(ticket=ticket_to_proto(ticket), incarnation=self._incarnation)

    async def Resume(  # noqa: N802
        self, request: decode_pb2.ResumeRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ResumeResponse:
        try:
            resumption = resumption_from_proto(request)
            if resumption.params.grammar is not None:
                await self._instance.prepare(resumption.params.grammar)
            resumed = await self._require_holder().resume(resumption)
        except KaveriError as error:
            await abort(context, error)
        return resumed_to_proto(resumed)

    async def AwaitResumed(  # noqa: N802
        self, request: decode_pb2.AwaitResumedRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AwaitResumedResponse:
        try:
            ownership = check_ownership(request.owner)
            await self._require_holder().await_resumed(request.owner.request_id, ownership, request.owner.replica)
        except KaveriError as error:
            await abort(context, error)
        return decode_pb2.AwaitResumedResponse()

    def _require_holder(self) -> ReplicaHolder:
        if self._holder is None:
            raise Unsupported("replicas are off here")
        return self._holder


def messages_of(batch: Sequence[GainedTokens]) -> Iterator[list[GainedTokens]]:
    """Split new tokens for a router into messages of limited size, in order; an entry that is too large is cut."""
    message: list[GainedTokens] = []
    room = _MAX_TOKENS_BYTES
    for gained in batch:
        size = _bytes(gained)
        if size <= room:
            # The usual case: nothing is cut.
            message.append(gained)
            room -= size
            continue
        for piece in _pieces(gained):
            piece_bytes = _bytes(piece)
            if piece_bytes > room and message:
                yield message
                message, room = [], _MAX_TOKENS_BYTES
            message.append(piece)
            room -= piece_bytes
    if message:
        yield message


def _pieces(gained: GainedTokens) -> Iterator[GainedTokens]:
    """Cut the tokens of one request into entries of limited size; only the last one has the end of the answer."""
    if _bytes(gained) <= _MAX_TOKENS_BYTES:
        yield gained
        return
    start, size = 0, 0
    for end in range(len(gained.token_ids)):
        token_bytes = _token_bytes(gained, end)
        if size + token_bytes > _MAX_TOKENS_BYTES // 2 and end > start:
            tokens, logprobs = gained.token_ids[start:end], gained.logprobs[start:end]
            yield GainedTokens(gained.request_id, gained.term, gained.index + start, tokens, logprobs)
            start, size = end, 0
        size += token_bytes
    rest, rest_logprobs = gained.token_ids[start:], gained.logprobs[start:]
    yield replace(gained, index=gained.index + start, token_ids=rest, logprobs=rest_logprobs)


def _bytes(gained: GainedTokens) -> int:
    # A character takes up to four bytes.
    size = _ENTRY_BYTES + 4 * (len(gained.request_id) + len(gained.end.error)) + _TOKEN_BYTES * len(gained.token_ids)
    if gained.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(logprobs.top) for logprobs in gained.logprobs)
    return size


def _token_bytes(gained: GainedTokens, position: int) -> int:
    if not gained.logprobs:
        return _TOKEN_BYTES
    return _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(gained.logprobs[position].top))


def tokens_to_proto(gained: GainedTokens) -> decode_pb2.RequestTokens:
    message = decode_pb2.RequestTokens(request_id=gained.request_id, index=gained.index, token_ids=gained.token_ids)
    message.term.attempt = gained.term.attempt
    # Set only what differs from the default: this runs for every request in every step.
    if gained.term.session:
        message.term.session = gained.term.session
    if gained.read_here:
        message.read_here = True
    if gained.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, gained.logprobs))
    if gained.replica is not None:
        message.replica.CopyFrom(replica_to_proto(gained.replica))
    end = gained.end
    if end.error:
        message.error = end.error
        message.replaced = end.replaced
        message.moved = end.moved
        if end.fault is not None:
            message.engine_fault.CopyFrom(fault_to_proto(end.fault))
    if end.finish is not None:
        message.finish_reason = FINISH_TO_PROTO[end.finish]
        if end.times is not None:
            message.timing.queue_s = end.times.queue_s
            message.timing.decode_s = end.times.decode_s
            message.timing.preemptions = end.times.preemptions
            message.timing.held_tokens = end.times.held_tokens
            message.timing.recomputed_tokens = end.times.recomputed_tokens
    return message
