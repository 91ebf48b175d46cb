"""Writes answers to clients, domain -> proto, and reports how each request has ended."""

from collections.abc import Callable
from typing import Any

from grpc import aio

from kaveri.domain.sampling import FinishReason
from kaveri.errors import KaveriError
from kaveri.hosting.read_limit import read_limit
from kaveri.lives.request_values import Ended, InstanceLife
from kaveri.parsers.answer import PLAIN
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import trace_fields
from kaveri.text.answer import AnswerPart
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.messages import FINISH_TO_PROTO, drawing_to_proto, form_to_proto, name_tokens
from services.router import metrics
from services.router.accepted_request import hint_to_proto
from services.router.requests import Interrupted, RequestEntry, SentAway

ServicerContext = aio.ServicerContext[Any, Any]


async def write_answer(
    entry: RequestEntry,
    context: ServicerContext,
    slow_reader_s: float,
    routers: Callable[[], list[str]],
    token_piece: Callable[[int], tuple[str, bytes]] | None,
    address_of: Callable[[InstanceLife], str],
) -> None:
    """Write a request's output to its client until it has ended. Raises the request's error, and SlowReader if the
    client takes longer than `slow_reader_s` seconds to read one response.

    routers: returns addresses for re-attaching. token_piece: text and bytes of a token id, to name tokens in logprobs;
    None: unnamed. address_of: where clients can read a decode instance's tokens directly; empty: nowhere now.

    A slow client costs the memory of one response and of its answer's tokens. A client that is sent to another router
    first gets all output so far, and the addresses once more."""
    answer = entry.answer
    is_first = True
    await entry.wait_for_output(or_begun=True)
    if not (isinstance(entry.state, Ended) or answer.has_output):
        # Before the first token: a gRPC client starts to read messages only after it has received the metadata.
        await context.send_initial_metadata(())
    async with read_limit(slow_reader_s) as writes:
        while True:
            await entry.wait_for_output()
            outcome = entry.state.outcome if isinstance(entry.state, Ended) else None
            error = outcome if isinstance(outcome, KaveriError) else None
            if error is not None and not isinstance(error, SentAway):
                raise error
            part = answer.take()
            response = inference_pb2.GenerateResponse(index=part.first_index, token_ids=part.token_ids, text=part.text)
            if part.logprobs:
                response.logprobs.extend(part.logprobs)
                for report, text_offset in zip(response.logprobs, part.text_offsets, strict=True):
                    report.text_offset = text_offset
                if token_piece is not None:
                    name_tokens(part.token_ids, response.logprobs, token_piece)
            if part.prompt_logprobs:
                _report_prompt(part, response, token_piece)
            ended = outcome is not None and not answer.has_output
            if is_first or (ended and error is not None):
                response.routers.extend(routers())
            if is_first:
                is_first = False
                response.request_id = entry.request_id
                response.max_tokens = entry.most_tokens
                response.resolved_params.CopyFrom(drawing_to_proto(entry.accepted.params))
                response.usage.prompt_tokens = len(entry.accepted.prompt_token_ids)
                if entry.accepted.form != PLAIN:
                    response.answer_form.CopyFrom(form_to_proto(entry.accepted.form))
            if entry.owner_news is not None:
                response.owner.CopyFrom(hint_to_proto(entry.owner_news))
                entry.owner_news = None
            if entry.direct is not None:
                response.first_character = part.first_character
                # The prompt's logprobs come from the router alone, before the client reads elsewhere.
                decode = None if part.prompt_logprobs else entry.direct.offer(entry.state)
                if decode is not None and (address := address_of(decode)):
                    response.tokens_at.address, response.tokens_at.incarnation = address, decode.incarnation
                    entry.direct.offered = entry.attempt_number
                response.interrupted = ended and isinstance(error, Interrupted)
            if ended and error is None:
                _complete(entry, response)
            writes.ticks = 0
            await context.write(response)
            writes.ticks = None
            if ended and error is not None:
                raise error
            if ended:
                return


def _report_prompt(
    part: AnswerPart, response: inference_pb2.GenerateResponse, token_piece: Callable[[int], tuple[str, bytes]] | None
) -> None:
    report = response.prompt_logprobs
    report.first = part.first_position
    report.token_ids.extend(part.prompt_token_ids)
    report.logprobs.extend(sampling_pb2.Logprobs() if entry is None else entry for entry in part.prompt_logprobs)
    if token_piece is not None:
        name_tokens(part.prompt_token_ids, report.logprobs, token_piece)


async def write_cancelled(
    request_id: str, prompt_tokens: int, token_count: int, text: str, context: ServicerContext
) -> None:
    """Write the only response of a request that was cancelled before this router began it.

    token_count: tokens that the client has from earlier sessions. prompt_tokens: 0 if it has none. text: what the
    client lacks of the text of these tokens."""
    outcome = FinishReason.CANCELLED
    metrics.REQUESTS.labels(outcome=outcome.value).inc()
    get_logger().info("request_finished", request_id=request_id, attempt=0, finish_reason=outcome.value)
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=token_count,
        text=text,
        finish_reason=FINISH_TO_PROTO[outcome],
        usage=inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=token_count),
        timing=inference_pb2.Timing(),
    )
    await context.write(response)


def _complete(entry: RequestEntry, response: inference_pb2.GenerateResponse) -> None:
    answer, accepted, finish = entry.answer, entry.accepted, entry.finish
    assert finish is not None
    token_count = len(answer.token_ids)
    timing = response.timing
    timing.CopyFrom(entry.account.timing)
    timing.reattaches = accepted.session
    if answer.first_token_s is not None:
        timing.ttft_s = answer.first_token_s - accepted.arrived_s
        timing.e2e_s = answer.last_token_s - accepted.arrived_s
        metrics.TTFT_S.observe(timing.ttft_s)
        metrics.E2E_S.observe(timing.e2e_s)
        if token_count > 1:
            metrics.TPOT_S.observe((answer.last_token_s - answer.first_token_s) / (token_count - 1))
    response.finish_reason = FINISH_TO_PROTO[finish]
    response.usage.prompt_tokens = len(accepted.prompt_token_ids)
    response.usage.completion_tokens = token_count
    metrics.REQUESTS.labels(outcome=finish.value).inc()
    get_logger().info(
        "request_finished",
        request_id=entry.request_id,
        attempt=entry.attempt_number,
        finish_reason=finish.value,
        prompt_tokens=len(accepted.prompt_token_ids),
        completion_tokens=token_count,
        **{field.name: value for field, value in timing.ListFields()},
        **trace_fields(entry.account.span),
    )
