"""Greedy answers of vllm.grpc.engine on a router are the SDK's token for token, whole and streamed."""

import asyncio
import random
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kaveri import AsyncClient, SamplingParams
from tests.support.local_cluster import run_cluster
from tests.support.scripted_ports import plain_channel

MAX_TOKENS = 24
VOCAB_SIZE = 1_536
WITHIN_S = 100.0
_WORDS = ("Count", "Spell", "from", "to", "turtle", "lamp", "a", "the", "near", "1", "9", "12", "umbrella", "kite", "?")


def make_prompts() -> list[str | list[int]]:
    """50 texts and 50 lists of token ids, of 1 to 600 tokens."""
    rng = random.Random(7)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randrange(1, 60))) for _ in range(50)]
    lengths = [1, 2, 15, 16, 17, 511, 512, 513, *(rng.randrange(1, 600) for _ in range(42))]
    return [*texts, *([rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths)]


async def ask(stub: Any, prompt: str | list[int], stream: bool) -> tuple[int, ...]:
    params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    request = vllm_engine_pb2.GenerateRequest(sampling_params=params, stream=stream)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    responses = [response async for response in stub.Generate(request, timeout=WITHIN_S)]
    if stream:
        return tuple(token_id for response in responses for token_id in response.chunk.token_ids)
    (response,) = responses
    return tuple(response.complete.output_ids)


@pytest.mark.timeout(300)
async def test_100_greedy_answers_are_the_sdks_whole_and_streamed() -> None:
    prompts = make_prompts()
    settings = {"engine": "transformers", "dtype": "float32", "prefill_count": 2, "decode_count": 2}
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    async with (
        run_cluster(model="kaveri-tiny", router_flags=("--vllm-grpc",), **settings) as cluster,
        AsyncClient(cluster.target, timeout_s=WITHIN_S) as client,
        plain_channel(cluster.target) as channel,
    ):
        answers = await asyncio.gather(
            *(
                client.generate(prompt, params=greedy)
                if isinstance(prompt, str)
                else client.generate(prompt_token_ids=prompt, params=greedy)
                for prompt in prompts
            )
        )
        expected = [answer.token_ids for answer in answers]
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for stream in (False, True):
            got = await asyncio.gather(*(ask(stub, prompt, stream) for prompt in prompts))
            assert got == expected, f"stream={stream}"
    assert len(set(expected)) > 50, "the answers differ from one another"
