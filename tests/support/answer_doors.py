"""Sends the same greedy prompts to all APIs ("doors") of a cluster, whole and streamed, and compares the answers: the
SDK through a router, vllm.grpc.engine on a router, and the SDK and a gateway that read tokens at decode instances."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kaveri import AsyncClient, Completion, SamplingParams
from tests.support.local_cluster import LocalCluster
from tests.support.metrics_pages import read_page, sum_of
from tests.support.redis_fixture import free_port
from tests.support.scripted_ports import plain_channel

WITHIN_S = 100.0
_MAX_TOKENS = 24
_VOCAB_SIZE = 1_536
_GREEDY = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
_WORDS = ("Count", "Spell", "from", "to", "turtle", "lamp", "a", "the", "near", "1", "9", "12", "umbrella", "kite", "?")


def door_settings() -> dict[str, Any]:
    """Return settings for run_cluster(): all APIs, on the bundled model in float32."""
    settings: dict[str, Any] = {"router_flags": ("--vllm-grpc",), "gateway_count": 1}
    settings |= {"gateway_flags": ("--direct", "on"), "metrics_port": free_port()}
    return settings | {"model": "kaveri-tiny", "dtype": "float32", "start_timeout_s": 300.0}


def make_prompts() -> list[str | list[int]]:
    """Return 20 texts and 20 lists of token ids, of 1 to 600 tokens."""
    rng = random.Random(7)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randrange(1, 60))) for _ in range(20)]
    lengths = [1, 2, 15, 16, 17, 511, 512, 513, *(rng.randrange(1, 600) for _ in range(12))]
    return [*texts, *([rng.randrange(3, _VOCAB_SIZE) for _ in range(length)] for length in lengths)]


@dataclass
class AskedDoors:
    """Cluster with prompts, and the answers to them that the SDK received from a router."""

    cluster: LocalCluster
    prompts: Sequence[str | list[int]]
    answers: Sequence[Completion]
    engine: Any
    """gRPC stub of VllmEngine at the router."""

    @property
    def expected(self) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in self.answers]

    async def check_router(self) -> None:
        """Assert that VllmEngine at the router gives the same answers."""
        for stream in (False, True):
            asking = (ask(self.engine, prompt, stream) for prompt in self.prompts)
            assert await asyncio.gather(*asking) == self.expected, f"stream={stream}"

    async def check_direct(self) -> None:
        """Assert that the SDK and a gateway, reading tokens at decode instances, give the same answers."""
        expected = [(answer.text, answer.token_ids) for answer in self.answers]
        assert not await read_tokens(self.cluster), "the other doors read at routers"
        async with AsyncClient(self.cluster.target, timeout_s=WITHIN_S, direct=True) as client:
            got = await asyncio.gather(*(client.generate(**_given(prompt), params=_GREEDY) for prompt in self.prompts))
        assert [(answer.text, answer.token_ids) for answer in got] == expected, "the SDK"
        after = await read_tokens(self.cluster)
        assert after > 0
        url = f"http://{self.cluster.stack.http_targets[0]}/v1"
        half = len(self.prompts) // 2
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=WITHIN_S) as http:
            for start in (0, half):
                fields: dict[str, Any] = {"model": "kaveri-tiny", "max_tokens": _MAX_TOKENS, "temperature": 0}
                fields |= {"prompt": self.prompts[start : start + half], "extra_body": {"return_token_ids": True}}
                whole = await http.completions.create(**fields)
                found = [(choice.text, tuple(choice.token_ids)) for choice in whole.choices]  # type: ignore[attr-defined]
                assert found == expected[start : start + half], "HTTP"
                streamed: list[tuple[str, tuple[int, ...]]] = [("", ())] * half
                async for event in await http.completions.create(**fields, stream=True):
                    (choice,) = event.choices
                    text, token_ids = streamed[choice.index]
                    streamed[choice.index] = (text + choice.text, (*token_ids, *choice.token_ids))
                assert streamed == expected[start : start + half], "HTTP, streamed"
        assert await read_tokens(self.cluster) > after


@contextlib.asynccontextmanager
async def asked_doors(cluster: LocalCluster) -> AsyncIterator[AskedDoors]:
    async with AsyncClient(cluster.target, timeout_s=WITHIN_S) as client, plain_channel(cluster.target) as channel:
        prompts = make_prompts()
        answers = await asyncio.gather(*(client.generate(**_given(prompt), params=_GREEDY) for prompt in prompts))
        doors = AskedDoors(cluster, prompts, answers, vllm_engine_pb2_grpc.VllmEngineStub(channel))
        assert len(set(doors.expected)) > 20, "the answers differ from one another"
        yield doors


async def read_tokens(cluster: LocalCluster) -> float:
    return sum((await read_tokens_at_each(cluster)).values())


async def read_tokens_at_each(cluster: LocalCluster) -> dict[str, float]:
    names = [name for name in cluster.stack.instance_ids if name.startswith("decode-")]
    ports = [cluster.stack.config.metrics_port_of(name) for name in names]
    pages = await asyncio.gather(*(asyncio.to_thread(read_page, f"127.0.0.1:{port}") for port in ports))
    counts = (sum_of("kaveri_decode_read_tokens_total", page) for page in pages)
    return dict(zip(names, counts, strict=True))


async def ask(stub: Any, prompt: str | list[int], stream: bool) -> tuple[int, ...]:
    responses = [each async for each in stub.Generate(_request(prompt, stream), timeout=WITHIN_S)]
    if stream:
        return tuple(token_id for response in responses for token_id in response.chunk.token_ids)
    (response,) = responses
    return tuple(response.complete.output_ids)


def _given(prompt: str | list[int]) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _request(prompt: str | list[int], stream: bool) -> Any:
    params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    made = vllm_engine_pb2.GenerateRequest(sampling_params=params, stream=stream)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.tokenized.input_ids.extend(prompt)
    return made
