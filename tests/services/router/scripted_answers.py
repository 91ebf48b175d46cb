"""Requests of router tests and their expected answers. Tokens depend on prompt and index alone, as with a seed on real
engines, so every answer is known however often it is placed again."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.errors import InvalidArgument
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.status import error_of
from services.router.accepted_request import OwnerHint, hint_to_proto

MODEL = "kaveri-tiny"
MAX_MODEL_LEN = 8_192
VOCAB_FLOOR = 300
"""Lowest id of ordinary tokens in the bundled tokenizer."""


CACHED_TOKENS = 2
"""Tokens of each prompt that scripted prefill instances have from earlier ones."""
SCRIPTED: list[int] = []
"""Tokens that all answers begin with, whatever the prompt. A test that fills it empties it."""


def token_at(prompt: tuple[int, ...], index: int) -> int:
    if index < len(SCRIPTED):
        return SCRIPTED[index]
    return VOCAB_FLOOR + (sum(prompt) + 31 * index + index * index) % 1_000


def answer(prompt: tuple[int, ...], token_count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(token_count)]


PROMPT = (300, 301, 302)
SECRET = b"s" * 16


def ask(
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 20,
    stop: tuple[str, ...] = (),
    logprobs: int | None = None,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A greedy request, with a seed if its client can re-attach."""
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop, logprobs=logprobs)
    if "secret" in fields:
        params.seed = 1
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), params=params, **fields)


def ask_again(received: Iterable[int], owner: OwnerHint | None = None, **fields: Any) -> inference_pb2.GenerateRequest:
    """Session 1 of request "one" for 20 tokens, of which the client has `received`."""
    request = ask(**{"request_id": "one", "secret": SECRET, "session": 1} | fields)
    request.received.token_ids.extend(received)
    request.received.max_tokens = 20
    if owner is not None:
        request.received.owner.CopyFrom(hint_to_proto(owner))
    return request


async def collect(call: AsyncIterator[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
    """All responses; fails on a gap or a duplicate."""
    responses = [response async for response in call]
    expected = 0
    for response in responses:
        assert response.index == expected
        expected += len(response.token_ids)
    return responses


async def rest_of(
    call: Any, responses: list[inference_pb2.GenerateResponse] | None = None
) -> list[inference_pb2.GenerateResponse]:
    """Remaining responses, appended to `responses` even if an error follows."""
    responses = [] if responses is None else responses
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


async def read_tokens(call: Any, count: int) -> list[inference_pb2.GenerateResponse]:
    responses: list[inference_pb2.GenerateResponse] = []
    while len(tokens_of(responses)) < count:
        responses.append(await call.read())
    return responses


async def finish(call: Any, responses: Iterable[inference_pb2.GenerateResponse] = ()) -> inference_pb2.GenerateResponse:
    """Last response of a request of ask(), whose answer must be complete. responses: those already read."""
    responses = [*responses, *await rest_of(call)]
    assert [response.index for response in responses] == [
        len(tokens_of(responses[:number])) for number in range(len(responses))
    ]
    assert tokens_of(responses) == answer(PROMPT, 20)
    return responses[-1]


async def refused(asking: Awaitable[object], code: grpc.StatusCode, *details: str) -> aio.AioRpcError:
    """The error of a call that must fail with this status and these texts in its details."""
    with pytest.raises(aio.AioRpcError) as caught:
        await asking
    assert caught.value.code() is code, caught.value.details()
    assert all(text in (caught.value.details() or "") for text in details), caught.value.details()
    return caught.value


async def invalid(asking: Awaitable[object]) -> InvalidArgument:
    error = error_of(await refused(asking, grpc.StatusCode.INVALID_ARGUMENT))
    assert isinstance(error, InvalidArgument)
    return error


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def logprobs_at(index: int, top_count: int) -> sampling_pb2.Logprobs:
    top = [sampling_pb2.TokenLogprob(token_id=rank, logprob=-float(rank)) for rank in range(top_count)]
    return sampling_pb2.Logprobs(logprob=-float(index), top=top)


def prompt_logprobs_at(prompt: tuple[int, ...], place: int, top_count: int) -> sampling_pb2.Logprobs:
    top = [sampling_pb2.TokenLogprob(token_id=VOCAB_FLOOR + rank, logprob=-float(rank)) for rank in range(top_count)]
    return sampling_pb2.Logprobs(logprob=-float(place) - prompt[place] / 1024, top=top)


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
