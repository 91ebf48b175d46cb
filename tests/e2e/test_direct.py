"""Clients that read answers at the decode instances get what routers would have sent them, whatever dies."""

import asyncio
import random
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kaveri import AsyncClient, Completion, SamplingParams
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.redis_fixture import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROMPT_COUNT = 100
SEED = 14
READ = "kaveri_decode_read_tokens_total"
DECODES = ("decode-0", "decode-1")


class DirectCluster:
    """The cluster, and a client of each kind."""

    def __init__(self, cluster: LocalCluster, relayed: AsyncClient, direct: AsyncClient, metrics_port: int) -> None:
        self.cluster = cluster
        self.relayed = relayed
        self.direct = direct
        self._metrics_port = metrics_port

    async def read_tokens(self) -> float:
        """Tokens that clients have read at decode instances."""
        ids = self.cluster.stack.instance_ids
        ports = [self._metrics_port + ids.index(name) for name in DECODES if name in self.cluster.pids()]
        texts = [await asyncio.to_thread(_metrics, port) for port in ports]
        lines = (line for text in texts for line in text.splitlines())
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(READ))

    async def is_free(self) -> None:
        """Waits until no instance holds a block or a request."""
        await self.cluster.wait_for_view(
            lambda view: all(
                status.load.free_blocks == status.load.total_blocks and status.load.running_requests == 0
                for status in view.instances.values()
            ),
            within_s=60,
        )


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[DirectCluster]:
    metrics_port = free_port()
    eos = ("--fake-eos-probability", "0.01")
    decode_flags = (*eos, "--fake-step-s", "0.01", "--direct-answers", "on")
    async with (
        run_cluster(
            router_count=2,
            decode_count=2,
            prefill_flags=eos,
            decode_flags=decode_flags,
            metrics_port=metrics_port,
            start_timeout_s=240.0,
        ) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=90) as relayed,
        _direct_client(cluster) as direct,
    ):
        yield DirectCluster(cluster, relayed, direct, metrics_port)


def _direct_client(cluster: LocalCluster) -> AsyncClient:
    """One that leaves no instance alone yet."""
    return AsyncClient(cluster.stack.targets, timeout_s=90, direct=True)


def _requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and drawn, with stop texts, stop tokens, reports and min_tokens among them."""
    rng = random.Random(SEED)
    found = []
    for number in range(PROMPT_COUNT):
        params = SamplingParams(
            max_tokens=rng.randint(1, 60),
            temperature=0.0 if number % 2 else 1.0,
            seed=number,
            stop=("e", "the") if number % 3 == 0 else (),
            stop_token_ids=(40, 41, 42) if number % 5 == 0 else (),
            logprobs=2 if number % 4 == 0 else None,
        )
        found.append(([rng.randrange(1, 250) for _ in range(rng.randint(1, 80))], params))
    return found


async def _ask_all(client: AsyncClient, *, streamed: bool) -> list[Completion]:
    async def ask(prompt: list[int], params: SamplingParams) -> Completion:
        if not streamed:
            return await client.generate(prompt_token_ids=prompt, params=params)
        async with client.stream(prompt_token_ids=prompt, params=params) as stream:
            return await stream.collect()

    return await asyncio.gather(*(ask(prompt, params) for prompt, params in _requests()))


def _shown(answer: Completion) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.usage


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_hundred_answers_equal_those_that_routers_relay(cluster: DirectCluster, streamed: bool) -> None:
    before = await cluster.read_tokens()
    expected = await _ask_all(cluster.relayed, streamed=streamed)
    assert await cluster.read_tokens() == before
    answers = await _ask_all(cluster.direct, streamed=streamed)
    assert list(map(_shown, answers)) == list(map(_shown, expected))
    assert await cluster.read_tokens() > before
    await cluster.is_free()


@pytest.mark.parametrize("victim", ["decode", "router"])
async def test_answers_that_are_read_directly_survive_a_killed_process(cluster: DirectCluster, victim: str) -> None:
    params = SamplingParams(max_tokens=150, temperature=0.7, seed=SEED, ignore_eos=True)
    prompts = [[number + 1] * 20 for number in range(8)]
    expected = await asyncio.gather(
        *(cluster.relayed.generate(prompt_token_ids=prompt, params=params) for prompt in prompts)
    )
    before = await cluster.read_tokens()
    async with _direct_client(cluster.cluster) as client:
        streams = [client.stream(prompt_token_ids=prompt, params=params) for prompt in prompts]
        reading = [asyncio.create_task(stream.collect()) for stream in streams]
        while await cluster.read_tokens() < before + 8 * len(prompts):
            assert not any(task.done() for task in reading)
            await asyncio.sleep(0.01)
        name = f"{victim}-0"
        await cluster.cluster.kill(name)
        answers = await asyncio.gather(*reading)
        await cluster.cluster.restart(name)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    await cluster.is_free()


async def test_a_cancelled_answer_frees_everything(cluster: DirectCluster) -> None:
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    before = await cluster.read_tokens()
    async with (
        _direct_client(cluster.cluster) as client,
        client.stream(prompt_token_ids=[5] * 30, params=params) as stream,
    ):
        async for chunk in stream:
            if chunk.index >= 20:
                break
    assert await cluster.read_tokens() > before
    await cluster.is_free()
