"""Serves PrefillService over gRPC: converts between messages and domain values."""

from collections.abc import Iterator
from typing import Any

from grpc import aio

from kaveri.domain.sampling import ResolvedParams
from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.lives.prompt import FirstTokenDrawn, HandedOver, Progress, PromptScored, RoomReserved, Started
from kaveri.v1 import prefill_pb2, term_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceServicer
from kaveri.wire.attempts import check_ownership
from kaveri.wire.messages import FINISH_TO_PROTO, logprobs_to_proto, params_from_proto, prompt_logprobs_to_proto
from kaveri.wire.status import abort, error_to_bytes
from services.prefill.requests import PromptNews
from services.prefill.role import PrefillRole

_REPORTED_TOGETHER = 512
SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServer(PrefillServiceServicer):
    """Serves the gRPC calls of PrefillService for one prefill instance."""

    def __init__(self, role: PrefillRole, incarnation: int) -> None:
        self._role, self._incarnation = role, incarnation

    async def Submit(  # noqa: N802
        self, request: prefill_pb2.SubmitRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.SubmitResponse:
        try:
            if request.incarnation not in (0, self._incarnation):
                raise Unavailable("the instance has restarted", retry_after_s=0.0)
            if not request.timeout_s > 0:
                raise InvalidArgument("timeout_s", request.timeout_s, "more than 0")
            params = params_from_proto(request.params, ResolvedParams)
            if params.grammar is not None:
                await self._role.prepare(params.grammar)
            self._role.accept(
                request_id=request.request_id,
                ownership=check_ownership(request),
                token_ids=tuple(request.token_ids),
                generated_count=request.generated_count,
                params=params,
                timeout_s=request.timeout_s,
                silent_decode_ids=frozenset(request.silent_decode_ids),
                traceparent=request.traceparent,
                suspect_until=request.suspect_until,
            )
        except KaveriError as error:
            await abort(context, error)
        return prefill_pb2.SubmitResponse()


def reports_of(news: PromptNews) -> Iterator[prefill_pb2.PrefillReport]:
    """Pack a request's reports into as few messages as possible, with at most one report of each kind in a message."""
    kinds = set[type[Progress]]()
    name, (session, attempt) = news.request_id, news.term
    term = term_pb2.Term(session=session, attempt=attempt)
    report = prefill_pb2.PrefillReport(request_id=name, term=term)
    for entry in news.progress:
        for progress in _parts(entry) if isinstance(entry, PromptScored) else (entry,):
            if type(progress) in kinds:
                yield report
                report = prefill_pb2.PrefillReport(request_id=name, term=term)
                kinds.clear()
            kinds.add(type(progress))
            _fill(report, progress)
    if news.ended:
        report.ended.error = b"" if news.error is None else error_to_bytes(news.error)
    if kinds or news.ended:
        yield report


def _parts(scored: PromptScored) -> Iterator[PromptScored]:
    """Split a long report of log-probabilities, so that no message blocks the event loop for long."""
    for start in range(0, len(scored.entries), _REPORTED_TOGETHER):
        yield PromptScored(scored.first + start, scored.entries[start : start + _REPORTED_TOGETHER])


def _fill(report: prefill_pb2.PrefillReport, progress: Progress) -> None:
    match progress:
        case Started():
            report.started.queue_s = progress.queue_s
        case RoomReserved():
            report.placed.decode_instance_id = progress.decode_instance_id
            report.placed.decode_incarnation = progress.decode_incarnation
        case PromptScored():
            report.prompt_logprobs.CopyFrom(prompt_logprobs_to_proto(progress.first, progress.entries))
        case FirstTokenDrawn():
            first = report.first_token
            first.token_id, first.prefill_s = progress.token_id, progress.prefill_s
            first.finish_reason, first.cached_tokens = FINISH_TO_PROTO[progress.finish], progress.cached_tokens
            if progress.logprobs is not None:
                first.logprobs.CopyFrom(logprobs_to_proto(progress.logprobs))
        case HandedOver():
            handed_over = report.handed_over
            handed_over.kv_bytes, handed_over.kv_transfer_s = progress.kv_bytes, progress.kv_transfer_s
            handed_over.kv_tail_s, handed_over.kv_transport = progress.kv_tail_s, progress.kv_transport
            handed_over.kept_tokens = progress.kept_tokens
