"""Requests of router tests, and what their answers must be.

Tokens are a function of the prompt and the index alone, as real engines' are for a seed, so that a test can say what
every answer must be however often it was placed again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from kaveri.v1 import (
    inference_pb2,
    sampling_pb2,
)

MODEL = "kaveri-tiny"
MAX_MODEL_LEN = 8_192
VOCAB_FLOOR = 300
"""Ids from here on are ordinary tokens of the bundled tokenizer."""


def token_at(prompt: tuple[int, ...], index: int) -> int:
    """The token at `index` of the answer to `prompt`."""
    return VOCAB_FLOOR + (sum(prompt) + 31 * index + index * index) % 1_000


def answer(prompt: tuple[int, ...], token_count: int) -> list[int]:
    """The whole answer."""
    return [token_at(prompt, index) for index in range(token_count)]


PROMPT = (300, 301, 302)


def ask(
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 20,
    stop: tuple[str, ...] = (),
    logprobs: int | None = None,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A greedy request."""
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop, logprobs=logprobs)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), params=params, **fields)


async def collect(call: AsyncIterator[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
    """All responses; fails on a gap or a duplicate."""
    responses = [response async for response in call]
    expected = 0
    for response in responses:
        assert response.index == expected
        expected += len(response.token_ids)
    return responses


async def rest_of(call: Any) -> list[inference_pb2.GenerateResponse]:
    """The responses after those that were read one by one."""
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    """All tokens of an answer."""
    return [token_id for response in responses for token_id in response.token_ids]


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    """The whole text of an answer."""
    return "".join(response.text for response in responses)


def logprobs_at(index: int, top_count: int) -> sampling_pb2.Logprobs:
    """Recognizable log-probabilities for the token at `index`."""
    top = [sampling_pb2.TokenLogprob(token_id=rank, logprob=-float(rank)) for rank in range(top_count)]
    return sampling_pb2.Logprobs(logprob=-float(index), top=top)


def prompt_logprobs_at(prompt: tuple[int, ...], place: int, top_count: int) -> sampling_pb2.Logprobs:
    """Recognizable log-probabilities for the token at this position of a prompt."""
    top = [sampling_pb2.TokenLogprob(token_id=VOCAB_FLOOR + rank, logprob=-float(rank)) for rank in range(top_count)]
    return sampling_pb2.Logprobs(logprob=-float(place) - prompt[place] / 1024, top=top)


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until `condition()` holds; fails when it does not within `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
