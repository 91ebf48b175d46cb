import asyncio
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from kaveri import SamplingParams
from kaveri.models import resolve_model
from kaveri.text.tokenizer import ModelTokenizer
from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import CACHED_TOKENS, answer

PROMPT = (300, 301, 302)
GREEDY = SamplingParams(temperature=0, max_tokens=5)


async def test_a_completion_is_the_sdks(gateway: GatewayUnderTest) -> None:
    expected = await gateway.sdk.generate("Count from 1 to 9.", params=GREEDY)
    got = await gateway.complete(model="kaveri-tiny", prompt="Count from 1 to 9.", return_token_ids=True)
    assert got.status == 200
    (choice,) = got.json["choices"]
    assert choice == {
        "index": 0,
        "text": expected.text,
        "logprobs": None,
        "finish_reason": "length",
        "token_ids": list(expected.token_ids),
        "prompt_token_ids": list(await gateway.sdk.tokenize("Count from 1 to 9.")),
    }
    assert got.json["usage"] == {
        "prompt_tokens": expected.usage.prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": expected.usage.prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": expected.usage.cached_tokens},
    }
    assert (got.json["object"], got.json["model"]) == ("text_completion", "kaveri-tiny")


async def test_a_streamed_completion_has_the_same_tokens_and_text(gateway: GatewayUnderTest) -> None:
    whole = (await gateway.complete(return_token_ids=True, max_tokens=20)).json["choices"][0]
    events = (await gateway.complete(return_token_ids=True, max_tokens=20, stream=True)).events
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == answer(PROMPT, 20)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


async def test_the_openai_package_reads_whole_and_streamed_answers(gateway: GatewayUnderTest) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Count from"}, {"type": "text", "text": "1"}]}
    ]
    expected = await gateway.sdk.generate(messages=[{"role": "user", "content": "Count from\n1"}], params=GREEDY)
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["kaveri-tiny"]
        assert (await client.models.retrieve("kaveri-tiny")).id == "kaveri-tiny"
        whole = await client.chat.completions.create(
            model="kaveri-tiny", messages=messages, max_completion_tokens=5, temperature=0
        )
        stream = await client.chat.completions.create(
            model="kaveri-tiny",
            messages=messages,
            max_completion_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one", 1), (["one", "two"], 2), ([300, 301], 1), ([[300], [301, 302], [303]], 3)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
async def test_each_kind_of_prompt_is_answered_in_order(gateway: GatewayUnderTest, prompt: Any, count: int) -> None:
    each = [prompt] if count == 1 else prompt
    alone = [(await gateway.complete(prompt=one)).json["choices"][0]["text"] for one in each]
    got = (await gateway.complete(prompt=prompt)).json
    assert [choice["text"] for choice in got["choices"]] == alone
    assert [choice["index"] for choice in got["choices"]] == list(range(count))
    assert got["usage"]["completion_tokens"] == 5 * count


async def test_streams_of_several_answers_are_told_apart_by_their_index(gateway: GatewayUnderTest) -> None:
    prompts = [[300], [301, 302], [303]]
    got = await gateway.complete(prompt=prompts, n=2, stream=True, return_token_ids=True, max_tokens=12)
    tokens: dict[int, list[int]] = {}
    for event in got.events:
        (choice,) = event["choices"]
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert tokens == {index: answer(tuple(prompts[index // 2]), 12) for index in range(6)}


async def test_answers_of_one_prompt_have_seeds_of_their_own_that_repeat(
    gateway: GatewayUnderTest, cluster: Any
) -> None:
    for _ in range(2):
        assert (await gateway.complete(n=3, seed=7)).status == 200
    await gateway.complete(prompt=[[300], [301]], n=3, seed=7)
    seeds = [sorted(request.params.seed for request in cluster.taken()[first : first + 3]) for first in (0, 3)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert 7 in seeds[0]
    # A prompt in a list is answered as it is alone.
    assert sorted(request.params.seed for request in cluster.taken()[6:]) == sorted(2 * seeds[0])


async def test_usage_counts_a_prompt_with_several_answers_once(gateway: GatewayUnderTest) -> None:
    usage = (await gateway.complete(n=3)).json["usage"]
    details = {"cached_tokens": CACHED_TOKENS}
    assert usage == {"prompt_tokens": 3, "completion_tokens": 15, "total_tokens": 18, "prompt_tokens_details": details}
    events = (await gateway.complete(n=3, stream=True, stream_options={"include_usage": True})).events
    assert events[-1]["usage"] == usage


async def test_parameters_reach_the_router_as_the_sdk_would_send_them(gateway: GatewayUnderTest, cluster: Any) -> None:
    fields = {"top_p": 0.5, "top_k": 7, "seed": -1, "stop": "x", "stop_token_ids": [5], "ignore_eos": True}
    fields["skip_special_tokens"] = False
    await gateway.complete(temperature=0.25, min_tokens=3, **fields)
    (request,) = cluster.taken()
    params = request.params
    assert params.min_tokens == 3
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (2**64 - 1, 5, True)
    assert params.show_special_tokens
    assert list(params.stop_token_ids) == [5]


async def test_a_stop_text_ends_the_answer_before_it(gateway: GatewayUnderTest) -> None:
    whole = (await gateway.complete(max_tokens=30)).json["choices"][0]["text"]
    stop = whole[10:14]
    cut = (await gateway.complete(max_tokens=30, stop=[stop])).json["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")


async def test_completions_have_sixteen_tokens_where_none_are_asked_for(gateway: GatewayUnderTest) -> None:
    assert (await gateway.complete(max_tokens=None)).json["usage"]["completion_tokens"] == 16


async def test_the_request_id_comes_back_and_names_the_request_at_the_router(
    gateway: GatewayUnderTest, cluster: Any
) -> None:
    got = await gateway.ask("/v1/completions", {"prompt": [300], "max_tokens": 2}, headers={"X-Request-ID": "my-id"})
    assert got.headers["x-request-id"] == "my-id"
    assert got.json["id"] == "cmpl-my-id"
    (request,) = cluster.taken()
    assert request.request_id.startswith("my-id-")
    # A client's id traces requests and need not be unique.
    same = {"X-Request-ID": "same"}
    both = await asyncio.gather(*(gateway.ask("/v1/completions", {"prompt": [300]}, headers=same) for _ in range(2)))
    assert [answer.status for answer in both] == [200, 200]


async def test_health_version_and_metrics_answer_get_and_head(gateway: GatewayUnderTest) -> None:
    assert (await gateway.ask("/health")).status == 200
    assert (await gateway.ask("/version")).json["version"]
    await gateway.complete()
    assert b'kaveri_gateway_requests_total{path="/v1/completions",status="200"}' in (await gateway.ask("/metrics")).body
    reader, writer = await gateway.connect()
    writer.write(b"HEAD /metrics HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


@pytest.mark.parametrize("skips", [True, False])
async def test_a_stop_text_in_a_special_token_ends_the_answer_as_the_client_sees_it(
    cluster: ScriptedCluster, skips: bool
) -> None:
    plain = AutoTokenizer.from_pretrained(resolve_model("kaveri-tiny"))
    ids = answer(PROMPT, 20)
    name = plain.convert_ids_to_tokens(ids[9])
    plain.add_special_tokens({"additional_special_tokens": [name]})
    cluster.tokenizer = tokenizer = ModelTokenizer(plain, cluster.tokenizer.vocab_size)
    whole = tokenizer.backend.decode(ids, skip_special_tokens=skips)
    before = tokenizer.backend.decode(ids[:9])
    shown = tokenizer.token_piece(ids[9]).text
    async with run_gateway(cluster) as gateway:
        for stop in (None, shown, before[-2:] + shown, "never"):
            expected = whole
            if stop is not None and stop in whole:
                expected = whole[: whole.index(stop)]
            elif stop == shown:
                # Hidden, and found all the same.
                expected = before
            fields = {"max_tokens": 20, "stop": stop, "skip_special_tokens": skips, "return_token_ids": True}
            (choice,) = (await gateway.complete(**fields)).json["choices"]
            assert choice["text"] == expected, stop
            assert choice["finish_reason"] == ("length" if expected == whole else "stop")
            assert choice["token_ids"] == (ids if expected == whole else ids[:10])
            events = (await gateway.complete(**fields, stream=True)).events
            assert "".join(event["choices"][0]["text"] for event in events) == expected, stop
    tokenizer.close()
