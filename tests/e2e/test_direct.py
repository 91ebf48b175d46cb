"""Clients that read answers at the decode instances get what routers would have sent them, whatever dies."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.domain.view import InstanceState
from kaveri.engine.stepwise.fake import FakeModel
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.metrics_pages import read_page, sum_of
from tests.support.reading import Reading
from tests.support.redis_fixture import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PROMPT_COUNT = 100
SEED = 14
READ = "kaveri_decode_read_tokens_total"
DECODES = ("decode-0", "decode-1")
PROMPTS = [[number + 1] * 20 for number in range(8)]
DRAWN = SamplingParams(max_tokens=300, temperature=0.7, seed=SEED, ignore_eos=True)
MODEL = FakeModel(eos_probability=0.01)
WITHIN_S = 60.0


class DirectCluster:
    """The cluster, and a client of each kind."""

    def __init__(self, cluster: LocalCluster, relayed: AsyncClient, direct: AsyncClient, metrics_port: int) -> None:
        self.cluster = cluster
        self.relayed = relayed
        self.direct = direct
        self._metrics_port = metrics_port
        self._undisturbed: list[Completion] = []

    async def undisturbed(self) -> list[Completion]:
        """Drawn answers to PROMPTS, as routers relay them."""
        if not self._undisturbed:
            asking = (self.relayed.generate(prompt_token_ids=prompt, params=DRAWN) for prompt in PROMPTS)
            self._undisturbed = await asyncio.gather(*asking)
        return self._undisturbed

    async def read_tokens(self) -> float:
        """Tokens that clients have read at decode instances."""
        ids = self.cluster.stack.instance_ids
        ports = [self._metrics_port + ids.index(name) for name in DECODES if name in self.cluster.pids()]
        pages = await asyncio.gather(*(asyncio.to_thread(read_page, f"127.0.0.1:{port}") for port in ports))
        return sum(sum_of(READ, page) for page in pages)

    async def is_free(self) -> None:
        """Waits until no instance holds a block or a request."""
        await self.cluster.wait_for_view(
            lambda view: all(
                status.load.free_blocks == status.load.total_blocks and status.load.running_requests == 0
                for status in view.instances.values()
            ),
            within_s=60,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[DirectCluster]:
    metrics_port = free_port()
    eos = ("--fake-eos-probability", str(MODEL.eos_probability))
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


async def _are_read(cluster: DirectCluster, readings: list[Reading], tokens_before: float) -> None:
    """Waits until clients have read some tokens of each answer, or as many, at decode instances."""
    async with asyncio.timeout(WITHIN_S):
        while await cluster.read_tokens() < tokens_before + 8 * len(readings):
            assert not any(reading.task.done() for reading in readings)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("victim", ["decode", "router"])
async def test_answers_that_are_read_directly_survive_the_loss_of_a_process(
    cluster: DirectCluster, victim: str, how: str
) -> None:
    expected, before = await cluster.undisturbed(), await cluster.read_tokens()
    processes, name = cluster.cluster, f"{victim}-0"
    async with _direct_client(processes) as client:
        readings = [Reading(client.stream(prompt_token_ids=prompt, params=DRAWN)) for prompt in PROMPTS]
        await _are_read(cluster, readings, before)
        if how == "killed":
            await processes.kill(name)
        else:
            processes.freeze(name)
        try:
            await asyncio.gather(*(reading.task for reading in readings))
        finally:
            if how == "frozen":
                processes.thaw(name)
    if how == "killed":
        await processes.restart(name)
    for reading, answer in zip(readings, expected, strict=True):
        reading.check(answer)
    assert any(reading.timing.reattaches for reading in readings), f"{name} had no request: the test has shown nothing"
    await cluster.is_free()


@pytest.mark.parametrize("name", ["decode-0", "router-0"])
async def test_answers_that_are_read_directly_go_on_while_an_instance_is_drained_by_command(
    cluster: DirectCluster, name: str
) -> None:
    # Far more than there is time for: they are left.
    params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    prompts = PROMPTS[:4]
    before = await cluster.read_tokens()
    processes = cluster.cluster
    async with _direct_client(processes) as client:
        readings = [Reading(client.stream(prompt_token_ids=prompt, params=params)) for prompt in prompts]
        await _are_read(cluster, readings, before)
        status, output, errors = await processes.command("drain", name)
        assert status == 0, output + errors
        try:
            if name == "router-0":
                await processes.wait_for_view(lambda view: not view.instances[name].load.running_requests)
            counts, before = [reading.token_count for reading in readings], await cluster.read_tokens()
            await asyncio.gather(
                *(reading.has(count + 40) for reading, count in zip(readings, counts, strict=True)),
                _are_read(cluster, readings, before),
            )
            another = await client.generate(prompt_token_ids=[9] * 20, params=SamplingParams(max_tokens=20))
            assert another.timing.server.decode_instance_id != name
        finally:
            status, output, errors = await processes.command("undrain", name)
        for reading in readings:
            reading.task.cancel()
        await asyncio.gather(*(reading.task for reading in readings), return_exceptions=True)
    assert status == 0, output + errors
    for reading, prompt in zip(readings, prompts, strict=True):
        token_ids = [token_id for chunk in reading.chunks for token_id in chunk.token_ids]
        assert token_ids == MODEL.answer(prompt, 0, len(token_ids))
    await processes.wait_for_view(lambda view: view.instances[name].load.state is InstanceState.READY)
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
