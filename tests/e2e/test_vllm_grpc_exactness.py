"""Greedy answers over other doors are the SDK's token for token, whole and streamed.

The doors: vllm.grpc.engine on a router and over legs, and the SDK and a gateway that read tokens at decode instances.
"""

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kaveri import AsyncClient, Completion, SamplingParams
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.metrics_pages import read_page, sum_of
from tests.support.redis_fixture import free_port
from tests.support.scripted_ports import plain_channel

MAX_TOKENS = 24
VOCAB_SIZE = 1_536
WITHIN_S = 100.0
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
HELD = '{"do_remote_decode":true,"do_remote_prefill":false}'
LEGS_AT_ONCE = 32
LONG_TOKENS = 400
_WORDS = ("Count", "Spell", "from", "to", "turtle", "lamp", "a", "the", "near", "1", "9", "12", "umbrella", "kite", "?")


def make_prompts() -> list[str | list[int]]:
    """50 texts and 50 lists of token ids, of 1 to 600 tokens."""
    rng = random.Random(7)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randrange(1, 60))) for _ in range(50)]
    lengths = [1, 2, 15, 16, 17, 511, 512, 513, *(rng.randrange(1, 600) for _ in range(42))]
    return [*texts, *([rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths)]


def _given(prompt: str | list[int]) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def request(prompt: str | list[int], stream: bool, max_tokens: int = MAX_TOKENS, kv: str | None = None) -> Any:
    params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=max_tokens == 1)
    made = vllm_engine_pb2.GenerateRequest(sampling_params=params, stream=stream, kv_transfer_params_json=kv)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.tokenized.input_ids.extend(prompt)
    return made


async def ask(stub: Any, prompt: str | list[int], stream: bool, kv: str | None = None) -> tuple[int, ...]:
    responses = [each async for each in stub.Generate(request(prompt, stream, kv=kv), timeout=WITHIN_S)]
    if stream:
        return tuple(token_id for response in responses for token_id in response.chunk.token_ids)
    (response,) = responses
    return tuple(response.complete.output_ids)


async def hold(prefill: Any, prompt: str | list[int]) -> str:
    """The prefill leg, as smg sends it. Returns what it says of the KV."""
    (response,) = [each async for each in prefill.Generate(request(prompt, False, 1, HELD), timeout=WITHIN_S)]
    return str(response.complete.kv_transfer_params_json)


@pytest.mark.timeout(400)
async def test_100_greedy_answers_are_the_sdks_whole_and_streamed() -> None:
    prompts = make_prompts()
    flags = ("--vllm-grpc",)
    settings: dict[str, Any] = {"router_flags": flags, "prefill_flags": flags, "decode_flags": flags}
    settings |= {"engine": "transformers", "dtype": "float32", "prefill_count": 2, "decode_count": 2}
    settings |= {"gateway_count": 1, "gateway_flags": ("--direct", "on"), "metrics_port": free_port()}
    async with (
        run_cluster(model="kaveri-tiny", start_timeout_s=200.0, **settings) as cluster,
        AsyncClient(cluster.target, timeout_s=WITHIN_S) as client,
        contextlib.AsyncExitStack() as channels,
    ):
        answers = await asyncio.gather(*(client.generate(**_given(prompt), params=GREEDY) for prompt in prompts))
        expected = [answer.token_ids for answer in answers]
        stubs: dict[str, Any] = {}
        for name, status in cluster.view().instances.items():
            channel = await channels.enter_async_context(plain_channel(status.record.address))
            stubs[name] = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for stream in (False, True):
            got = await asyncio.gather(*(ask(stubs["router-0"], prompt, stream) for prompt in prompts))
            assert got == expected, f"stream={stream}"
        await _check_direct(cluster, prompts, answers)
        await _check_legs(cluster, stubs, prompts, expected)
        await _check_frozen(cluster, client)
    assert len(set(expected)) > 50, "the answers differ from one another"


async def _read_tokens(cluster: LocalCluster) -> float:
    """How many tokens clients have read at decode instances."""
    ports = [cluster.stack.config.metrics_port_of(name) for name in ("decode-0", "decode-1")]
    pages = await asyncio.gather(*(asyncio.to_thread(read_page, f"127.0.0.1:{port}") for port in ports))
    return sum(sum_of("kaveri_decode_read_tokens_total", page) for page in pages)


async def _check_frozen(cluster: LocalCluster, relayed: AsyncClient) -> None:
    """A decode instance freezes while the SDK and a gateway read there: the answers are those that it began."""
    prompts = [f"Count from {number} to {number + 40}." for number in range(1, 7)]
    params = SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)
    asking = (relayed.generate(prompt, params=params) for prompt in prompts)
    expected = [answer.text for answer in await asyncio.gather(*asking)]
    fields: dict[str, Any] = {"model": "kaveri-tiny", "max_tokens": LONG_TOKENS, "temperature": 0}
    url, before = f"http://{cluster.stack.http_targets[0]}/v1", await _read_tokens(cluster)
    async with (
        AsyncClient(cluster.target, timeout_s=WITHIN_S, direct=True) as client,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S) as http,
    ):
        by_sdk = [asyncio.create_task(client.generate(prompt, params=params)) for prompt in prompts]
        whole = asyncio.create_task(
            http.completions.create(**fields, prompt=prompts, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
        )
        async with asyncio.timeout(WITHIN_S):
            while await _read_tokens(cluster) < before + 8 * len(prompts):
                await asyncio.wait([*by_sdk, whole], timeout=0.02)
        cluster.freeze("decode-0")
        try:
            answers, by_http = await asyncio.gather(asyncio.gather(*by_sdk), whole)
        finally:
            cluster.thaw("decode-0")
    assert [answer.text for answer in answers] == expected, "the SDK"
    assert [choice.text for choice in by_http.choices] == expected, "HTTP"
    assert any(answer.timing.server.attempts > 1 for answer in answers), (
        "decode-0 had no request: the test has shown nothing"
    )


async def _check_direct(cluster: LocalCluster, prompts: Sequence[str | list[int]], answers: list[Completion]) -> None:
    """Asks again with what reads tokens at decode instances: the SDK, and a gateway with texts and lists in one request
    each."""
    expected = [(answer.text, answer.token_ids) for answer in answers]
    assert not await _read_tokens(cluster), "the other doors read at routers"
    async with AsyncClient(cluster.target, timeout_s=WITHIN_S, direct=True) as client:
        got = await asyncio.gather(*(client.generate(**_given(prompt), params=GREEDY) for prompt in prompts))
    assert [(answer.text, answer.token_ids) for answer in got] == expected, "the SDK"
    after = await _read_tokens(cluster)
    assert after > 0
    url = f"http://{cluster.stack.http_targets[0]}/v1"
    half = len(prompts) // 2
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S) as http:
        for start in (0, half):
            fields: dict[str, Any] = {"model": "kaveri-tiny", "max_tokens": MAX_TOKENS, "temperature": 0}
            fields |= {"prompt": prompts[start : start + half], "extra_body": {"return_token_ids": True}}
            whole = await http.completions.create(**fields)
            found = [(choice.text, tuple(choice.token_ids)) for choice in whole.choices]  # type: ignore[attr-defined]
            assert found == expected[start : start + half], "HTTP"
            streamed: list[tuple[str, tuple[int, ...]]] = [("", ())] * half
            async for event in await http.completions.create(**fields, stream=True):
                (choice,) = event.choices
                text, token_ids = streamed[choice.index]
                streamed[choice.index] = (text + choice.text, (*token_ids, *choice.token_ids))
            assert streamed == expected[start : start + half], "HTTP, streamed"
    assert await _read_tokens(cluster) > after


async def _check_legs(
    cluster: LocalCluster,
    stubs: Mapping[str, Any],
    prompts: Sequence[str | list[int]],
    expected: Sequence[tuple[int, ...]],
) -> None:
    turns = asyncio.Semaphore(LEGS_AT_ONCE)

    async def over_both(number: int, stream: bool) -> tuple[int, ...]:
        async with turns:
            kv = await hold(stubs[f"prefill-{number % 2}"], prompts[number])
            return await ask(stubs[f"decode-{number // 2 % 2}"], prompts[number], stream, kv)

    for stream in (False, True):
        got = await asyncio.gather(*(over_both(number, stream) for number in range(len(prompts))))
        assert got == expected, f"over both legs, stream={stream}"
    assert "hold_lost" not in cluster.log_text("decode-0") + cluster.log_text("decode-1"), "KV was pushed"
    held = [await hold(stubs["prefill-0"], prompt) for prompt in prompts[:4]]
    await cluster.kill("prefill-0")
    got = [await ask(stubs["decode-0"], prompt, True, kv) for prompt, kv in zip(prompts, held, strict=False)]
    assert got == expected[:4], "computed by the decode instance"
    assert cluster.log_text("decode-0").count("hold_lost") == 4
