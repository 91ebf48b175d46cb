"""Limits that only apply in combination: a long prompt with a large n, a large body with many values."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kaveri.client.answer import Chunk
from kaveri.client.async_client import AsyncClient, AsyncStream
from kaveri.domain.sampling import MAX_COPIED_CHARACTERS, MAX_COPIED_TOKENS, FinishReason, SamplingParams
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2
from services.gateway import answers, app, body
from services.gateway.body import MAX_FRACTIONS, MAX_NESTED, MAX_VALUES, parse_object
from services.gateway.http_errors import HttpError
from services.gateway.parsed_request import ParsedRequest
from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.gateway.test_api_keys import _NO_REDIS, _bearer
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "one two three"}),
        ("/v1/completions", {"prompt": ["one two three", "four"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
    ],
)
async def test_a_prompt_with_several_answers_is_tokenized_once(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], stream: bool
) -> None:
    tokenized: list[str] = []
    for name in ("encode", "encode_chat"):
        original = getattr(ModelTokenizer, name)

        async def counted(self: ModelTokenizer, *args: Any, original: Callable[..., Any] = original) -> Any:
            tokenized.append(original.__name__)
            return await original(self, *args)

        monkeypatch.setattr(ModelTokenizer, name, counted)
    fields = {**asked, "max_tokens": 3, "temperature": 0}
    single = await gateway.ask(path, fields)
    assert single.status == 200
    prompts = len(tokenized)
    tokenized.clear()
    several = await gateway.ask(path, {**fields, "n": 5, "stream": stream})
    assert several.status == 200
    assert len(tokenized) == prompts
    if not stream:
        # Greedy: all answers to a prompt are the same.
        assert several.json["usage"]["prompt_tokens"] == single.json["usage"]["prompt_tokens"]
        assert len(several.json["choices"]) == 5 * prompts


async def test_n_is_refused_where_the_prompt_would_be_copied_too_often(gateway: GatewayUnderTest) -> None:
    tokens = MAX_COPIED_TOKENS // 128 + 1
    got = await gateway.complete(prompt=[300] * tokens, n=128)
    assert (got.status, got.error["param"]) == (400, "n")
    assert f"{tokens} tokens" in got.error["message"]
    characters = MAX_COPIED_CHARACTERS // 128 + 1
    for asked in (
        await gateway.complete(prompt="x" * characters, n=128),
        await gateway.chat(messages=[{"role": "user", "content": "x" * characters}], n=128),
    ):
        assert (asked.status, asked.error["param"]) == (400, "n")
        assert f"{characters} characters" in asked.error["message"]


async def test_a_prompt_alone_is_as_long_as_the_model_allows(gateway: GatewayUnderTest) -> None:
    got = await gateway.complete(prompt=[300] * (MAX_COPIED_TOKENS // 2 - 10))
    assert got.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1] * (MAX_VALUES + 2), "values"),
        ([[]] * (MAX_NESTED + 1), "objects, lists"),
        ({str(number): 1 for number in range(MAX_NESTED)}, "objects, lists"),
        ([0.5] * (MAX_FRACTIONS + 1), "fraction"),
    ],
)
def test_json_of_too_many_values_is_refused_before_it_is_made(value: Any, what: str) -> None:
    with pytest.raises(HttpError) as refused:
        parse_object(json.dumps({"prompt": value}).encode())
    assert refused.value.status == 400
    assert what in refused.value.message


@pytest.mark.parametrize("text", ["," * (MAX_VALUES + 10), "[{:" * MAX_NESTED, '\\",:"[{' * MAX_NESTED])
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_text_without_an_end_is_refused_in_linear_time() -> None:
    # Each escaped quote is a place where a search for texts could begin again.
    body = b'{"prompt": "' + b":" * (MAX_NESTED + 1) + b'", "user": "' + b'\\"' * 500_000
    with pytest.raises(HttpError) as refused:
        parse_object(body)
    assert refused.value.code == "invalid_json"


async def test_a_large_body_is_read_on_a_thread(gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parsed(data: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parse_object(data)

    monkeypatch.setattr(body, "parse_object", parsed)
    for size in (10, 1_000_000):
        asked = await gateway.complete(user="x" * size)
        assert asked.status == 200
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("body")


async def test_long_prompts_of_many_connections_are_packed_in_slices_one_prompt_after_another(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one turn of the event loop would encode the prompts of all connections."""
    slices: list[tuple[int, int]] = []
    original = answers.add_token_ids

    def counted(message: inference_pb2.TokenIds, items: Sequence[int]) -> None:
        slices.append((id(message), len(items)))
        original(message, items)

    monkeypatch.setattr(answers, "add_token_ids", counted)
    monkeypatch.setattr(answers, "_SLICE_TOKENS", 10)
    # All are ready to be packed before one is.
    barrier = asyncio.Barrier(4)
    original_shown = app.show_prompts

    async def together(*args: Any) -> Any:
        await barrier.wait()
        return await original_shown(*args)

    monkeypatch.setattr(app, "show_prompts", together)
    prompts = [[300 + number] * 35 for number in range(4)]
    asked = [gateway.ask("/v1/completions", {"prompt": prompt, "max_tokens": 3}) for prompt in prompts]
    assert [each.status for each in await asyncio.gather(*asked)] == [200] * 4
    assert [size for _, size in slices] == [10, 10, 10, 5] * 4
    assert len({message for message, _ in slices[:4]}) == 1


class ReadyStream:
    request_id = "ready"

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for index in range(10):
            finish = FinishReason.LENGTH if index == 9 else None
            yield Chunk(
                index=index, token_ids=(300,), text="a", logprobs=(), finish_reason=finish, usage=None, timing=None
            )


async def test_one_turn_of_the_event_loop_takes_some_of_the_chunks_that_are_there() -> None:
    """Otherwise a slow gateway would take one chunk of each answer per turn, however many wait."""
    asked = ParsedRequest(model="m", prompts=((1,),), params=SamplingParams(), n=128, stream=True)
    merged = answers.Answers(cast(AsyncClient, None), asked, "id", asyncio.Lock())
    merged.streams = cast(list[AsyncStream], [ReadyStream() for _ in range(128)])
    loop = asyncio.get_running_loop()
    taken: list[int] = [0]

    def next_turn() -> None:
        nonlocal ticking
        taken.append(0)
        ticking = loop.call_soon(next_turn)

    ticking = loop.call_soon(next_turn)
    async for _ in merged.chunks():
        taken[-1] += 1
    ticking.cancel()
    assert sum(taken) == 128 * 10
    assert max(taken) <= 32


async def test_a_key_that_holds_a_quarter_of_all_gets_503_and_the_others_go_on(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    keys_file = str(tmp_path / "keys.toml")
    greedy, other = (add_key(keys_file, name, KeyLimits()) for name in ("greedy", "other"))
    cluster.decodes["decode-0"].may_step.clear()
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS, max_bodies_bytes=16_384) as gateway:
        asked = {"prompt": "x " * 1_200, "max_tokens": 4}
        first = asyncio.create_task(gateway.ask("/v1/completions", asked, headers=_bearer(greedy)))
        await eventually(lambda: bool(gateway.gateway.app.answering))
        second = await gateway.ask("/v1/completions", asked, headers=_bearer(greedy))
        assert second.status == 503
        assert "API key greedy" in second.error["message"]
        assert int(second.headers["retry-after"]) >= 1
        others = asyncio.create_task(gateway.ask("/v1/completions", asked, headers=_bearer(other)))
        await eventually(lambda: len(gateway.gateway.app.answering) == 2)
        cluster.let_all_go()
        assert [(await each).status for each in (first, others)] == [200, 200]
