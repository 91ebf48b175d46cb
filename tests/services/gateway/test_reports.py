"""Logprobs of prompts: without an answer, once for all answers, and their memory."""

import asyncio
from typing import Any

import pytest

from tests.services.gateway.conftest import GatewayUnderTest, HttpAnswer, run_gateway
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually

PROMPTS = ["hello world", [300, 301, 302], [[300, 301], [302]], ["hello", "world"]]
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_with_max_tokens_0_the_prompt_is_scored_and_nothing_is_shown_behind_it(
    gateway: GatewayUnderTest, prompt: Any
) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "return_token_ids": True}
    longer = (await gateway.complete(**fields, max_tokens=1)).json
    got = (await gateway.complete(**fields, max_tokens=0)).json
    assert len(got["choices"]) == len(longer["choices"])
    for choice, other in zip(got["choices"], longer["choices"], strict=True):
        count = len(choice["prompt_token_ids"])
        assert choice["logprobs"] == {key: other["logprobs"][key][:count] for key in KEYS}
        assert choice["text"] == "".join(choice["logprobs"]["tokens"])
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
    prompt_tokens = longer["usage"]["prompt_tokens"]
    assert got["usage"] == longer["usage"] | {"completion_tokens": 0, "total_tokens": prompt_tokens}
    streamed = await gateway.complete(**fields, max_tokens=0, stream=True, stream_options={"include_usage": True})
    for choice in got["choices"]:
        _assert_streamed(streamed, choice)
    assert streamed.events[-1]["usage"] == got["usage"]
    (choice, *_) = (await gateway.complete(prompt=prompt, echo=True, max_tokens=0)).json["choices"]
    assert (choice["text"], choice["logprobs"]) == (got["choices"][0]["text"], None)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", PROMPTS[:3])
async def test_a_prompt_with_several_answers_is_reported_on_once(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, prompt: Any
) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 1}
    single = (await gateway.complete(**fields)).json["choices"]
    requests = cluster.prefills["prefill-0"].requests
    requests.clear()
    for stream in (False, True):
        got = await gateway.complete(**fields, n=3, prompt_logprobs=None if stream else 1, stream=stream)
        assert sum(request.params.HasField("prompt_logprobs") for request in requests) == len(single)
        requests.clear()
        for index in range(3 * len(single)):
            expected = {**single[index // 3], "index": index}
            if stream:
                _assert_streamed(got, expected)
                continue
            choice = got.json["choices"][index]
            assert {key: choice[key] for key in expected} == expected
            assert choice["prompt_logprobs"] == got.json["choices"][index - index % 3]["prompt_logprobs"]
            assert choice["prompt_logprobs"]


async def test_answers_that_are_faster_than_the_report_on_their_prompt_wait_for_it(
    gateway: GatewayUnderTest, cluster: ScriptedCluster
) -> None:
    fields = {"echo": True, "logprobs": 1}
    (single,) = (await gateway.complete(**fields)).json["choices"]
    prefill = cluster.prefills["prefill-0"]
    prefill.hold = {"prompt_logprobs"}
    asking = asyncio.create_task(gateway.complete(**fields, n=3, stream=True))
    await eventually(lambda: any(_tokens_of_others(answers) for answers in gateway.gateway.app.answering))
    prefill.release.set()
    for index in range(3):
        _assert_streamed(await asking, {**single, "index": index})


async def test_reports_of_all_requests_together_are_limited(cluster: ScriptedCluster) -> None:
    cluster.decodes["decode-0"].may_step.clear()
    async with run_gateway(cluster, max_bodies_bytes=150_000) as gateway:
        asked = {"prompt": [300] * 100, "echo": True, "logprobs": 1, "max_tokens": 4}
        first = asyncio.create_task(gateway.complete(**asked))
        await eventually(lambda: bool(gateway.gateway.app.answering))
        second = await gateway.complete(**asked)
        assert (second.status, second.error["code"]) == (503, "service_unavailable")
        assert "--max-bodies-bytes" in second.error["message"]
        cluster.let_all_go()
        assert (await first).status == 200
        assert (await gateway.complete(**asked)).status == 200


async def test_a_request_whose_reports_never_fit_is_not_asked_to_come_again(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, max_bodies_bytes=50_000) as gateway:
        got = await gateway.complete(prompt=[300] * 100, echo=True, logprobs=1, max_tokens=4)
        assert (got.status, got.error["code"]) == (413, "request_too_large")
        assert "--max-bodies-bytes" in got.error["message"]
        assert "retry-after" not in got.headers
        assert (await gateway.complete()).status == 200


def _tokens_of_others(answers: Any) -> bool:
    return all(stream.completion_tokens for stream in answers.streams[1:])


def _assert_streamed(got: HttpAnswer, whole: dict[str, Any]) -> None:
    choices = [choice for event in got.events for choice in event["choices"] if choice["index"] == whole["index"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    reports = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert {key: [item for report in reports for item in report[key]] for key in KEYS} == whole["logprobs"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
