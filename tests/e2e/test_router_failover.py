"""Two routers, and the one that serves is killed, or stands still: clients get the same answers, computed once.

Each test begins and ends with an idle cluster of real processes. What is compared: tokens, text, log-probabilities and
finish reasons with an undisturbed run of the same requests. What is counted: prompt tokens that prefill has computed.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.domain.view import ClusterView
from tests.support.endless_client import start_endless_client
from tests.support.local_cluster import LocalCluster, run_cluster
from tests.support.metrics_pages import read_page, sum_of
from tests.support.reading import Reading
from tests.support.redis_fixture import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

ROUTERS = ("router-0", "router-1")
STOOD_STILL = ("went silent", "has left the cluster")
"""Why routers give up a decode instance that does not run: here the machine is too busy, or its lease has run out."""
TOKENS = 60
SLOW_PREFILL = ("--fake-step-s", "0.05", "--chunk-tokens", "64", "--orphan-grace-s", "3")
SLOW_DECODE = ("--fake-step-s", "0.02", "--orphan-grace-s", "3")
PROMPT = tuple(range(1, 601))
"""Half a second of prefill."""
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=7, ignore_eos=True),
}


class TwoRouters:
    """The cluster, a client of both routers, and the answers of an undisturbed run."""

    def __init__(self, cluster: LocalCluster, client: AsyncClient, metrics_port: int) -> None:
        self.cluster = cluster
        self.client = client
        self.undisturbed: dict[str, Completion] = {}
        self._metrics_port = metrics_port

    async def metric(self, instance_id: str, name: str) -> float:
        """The sum of one of its metrics over all labels."""
        port = self._metrics_port + self.cluster.stack.instance_ids.index(instance_id)
        return sum_of(name, await asyncio.to_thread(read_page, f"127.0.0.1:{port}"))

    async def computed_tokens(self) -> float:
        """Prompt tokens that prefill has computed."""
        return await self.metric("prefill-0", "kaveri_prefill_tokens_total")

    def recomputed(self) -> list[tuple[str, int]]:
        """Causes for which routers had requests computed again, with the tokens of each, from their logs, in order."""
        lines = [line for name in ROUTERS for line in self.cluster.log_text(name).splitlines()]
        events = [json.loads(line) for line in lines if '"event": "owner_changed"' in line]
        events.sort(key=lambda event: event["timestamp"])
        return [(one["cause"], one["recomputed_tokens"]) for one in events if one["outcome"] == "recomputed"]

    async def serving(self, count: int = 1) -> str:
        """The router that has `count` requests in its hands."""

        def found(view: ClusterView) -> list[str]:
            routers = [name for name in ROUTERS if name in view.instances]
            return [name for name in routers if view.instances[name].load.running_requests >= count]

        return found(await self.cluster.wait_for_view(lambda view: bool(found(view)), within_s=60))[0]

    async def instances_are_free(self, within_s: float) -> None:
        """Waits until no engine instance holds a block or a request, whatever routers there are."""

        def free(view: ClusterView) -> bool:
            loads = [view.instances[name].load for name in ("prefill-0", "decode-0", "decode-1")]
            return all(load.free_blocks == load.total_blocks and load.running_requests == 0 for load in loads)

        await self.cluster.wait_for_view(free, within_s=within_s)

    async def is_free(self, within_s: float) -> None:
        """Waits until all instances are there, and none holds a block or a request."""

        def free(view: ClusterView) -> bool:
            loads = [status.load for status in view.instances.values()]
            return len(loads) == len(self.cluster.stack.instance_ids) and all(
                load.free_blocks == load.total_blocks and load.running_requests == load.waiting_requests == 0
                for load in loads
            )

        await self.cluster.wait_for_view(free, within_s=within_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routers() -> AsyncIterator[TwoRouters]:
    metrics_port = free_port()
    async with (
        run_cluster(
            router_count=2,
            decode_count=2,
            prefill_flags=SLOW_PREFILL,
            decode_flags=SLOW_DECODE,
            metrics_port=metrics_port,
        ) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=60) as client,
    ):
        routers = TwoRouters(cluster, client, metrics_port)
        for name, params in REQUESTS.items():
            routers.undisturbed[name] = await client.generate(prompt_token_ids=PROMPT, params=params)
        yield routers


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def whole_again(routers: TwoRouters) -> AsyncIterator[None]:
    """Also a test that fails leaves the cluster whole and idle."""
    yield
    for name in ROUTERS:
        if name not in routers.cluster.pids():
            await routers.cluster.restart(name)
    await routers.is_free(20)


async def disturb(routers: TwoRouters, router: str, how: str) -> Callable[[], object]:
    """Kills or freezes a router; the result undoes a freeze."""
    if how == "killed":
        await routers.cluster.kill(router)
        return lambda: None
    routers.cluster.freeze(router)
    return lambda: routers.cluster.thaw(router)


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "streaming", "before the finish"])
async def test_answers_go_on_through_the_other_router_and_nothing_is_computed_again(
    routers: TwoRouters, phase: str, how: str
) -> None:
    cluster, client = routers.cluster, routers.client
    before, recomputed_count = await routers.computed_tokens(), len(routers.recomputed())
    prompts = len(PROMPT) * len(REQUESTS)
    if phase == "queued":
        # In front of it: a prompt of two seconds.
        long = SamplingParams(max_tokens=1, temperature=0)
        first = [1 + number % 900 for number in range(2400)]
        other = asyncio.create_task(client.generate(prompt_token_ids=first, params=long))
        prompts += 2400
        await cluster.wait_for_view(lambda view: view.instances["prefill-0"].load.running_requests > 0)
    # All by one router.
    only = next(target for target in client.targets)
    async with AsyncClient(only, timeout_s=60) as one:
        one._routers.learn(client.targets)
        readings = {
            name: Reading(one.stream(prompt_token_ids=PROMPT, params=params)) for name, params in REQUESTS.items()
        }
        serving = await routers.serving(len(REQUESTS))
        for reading in readings.values():
            match phase:
                case "streaming":
                    await reading.has(10)
                case "before the finish":
                    await reading.has(TOKENS - 3)
        if phase == "prefilling":
            # The router has its heartbeats behind it: prompts are under way.
            await cluster.wait_for_view(
                lambda view: 0 < view.instances["prefill-0"].load.queued_prefill_tokens < prompts
            )
        undo = await disturb(routers, serving, how)
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(reading.task for reading in readings.values()))
        finally:
            undo()
        for name, reading in readings.items():
            # Near the end the last tokens may have been on their way already.
            reading.check(routers.undisturbed[name], None if phase == "before the finish" else 1)
    if phase == "queued":
        await other
    if how == "killed":
        await cluster.restart(serving)
    await routers.is_free(10)
    # A router's death costs no prompt. A decode instance that the machine kept from running may cost some.
    recomputed = routers.recomputed()[recomputed_count:]
    excused = sum(tokens for cause, tokens in recomputed if any(reason in cause for reason in STOOD_STILL))
    computed = await routers.computed_tokens() - before
    assert computed == prompts + excused, f"a prompt was computed twice: {computed} tokens, of {prompts}; {recomputed}"


async def test_a_router_that_stood_still_suspects_no_instance(routers: TwoRouters) -> None:
    cluster = routers.cluster
    before = await routers.computed_tokens()
    suspected = {name: await routers.metric(name, "kaveri_router_suspicions_total") for name in ROUTERS}
    params = REQUESTS["greedy"]
    reading = Reading(routers.client.stream(prompt_token_ids=PROMPT, params=params))
    await reading.has(5)
    for name in ROUTERS:
        cluster.freeze(name)
    await asyncio.sleep(1.5)
    for name in ROUTERS:
        cluster.thaw(name)
    await reading.task
    reading.check(routers.undisturbed["greedy"], None)
    assert {name: await routers.metric(name, "kaveri_router_suspicions_total") for name in ROUTERS} == suspected
    assert await routers.computed_tokens() - before == len(PROMPT)


async def test_a_client_gone_with_its_router_frees_everything_within_the_grace(routers: TwoRouters) -> None:
    client_process = await start_endless_client(routers.cluster.stack.targets)
    try:
        await routers.cluster.wait_for_view(
            lambda view: any(view.instances[f"decode-{n}"].load.running_requests > 0 for n in (0, 1)), within_s=30
        )
        serving = await routers.serving()
        client_process.kill()
        await routers.cluster.kill(serving)
    finally:
        if client_process.returncode is None:
            client_process.kill()
        await client_process.wait()
    # The grace is 3 s; the rest is for heartbeats and a busy machine.
    await routers.instances_are_free(3 + 3)
    await routers.cluster.restart(serving)


async def test_a_client_gone_while_its_router_lives_frees_everything_at_once(routers: TwoRouters) -> None:
    client_process = await start_endless_client(routers.cluster.stack.targets)
    try:
        await routers.cluster.wait_for_view(
            lambda view: any(view.instances[f"decode-{n}"].load.running_requests > 0 for n in (0, 1)), within_s=30
        )
    finally:
        client_process.kill()
        await client_process.wait()
    began_s = time.monotonic()
    await routers.is_free(3)
    assert time.monotonic() - began_s < 2.5, "as long as an orphan is kept"


async def test_cancel_works_through_any_router(routers: TwoRouters) -> None:
    reading = Reading(
        routers.client.stream(prompt_token_ids=PROMPT, params=REQUESTS["greedy"], request_id="to be cancelled")
    )
    await reading.has(5)
    for target in routers.client.targets:
        async with AsyncClient(target) as another:
            assert await another.cancel("to be cancelled") is (target == routers.client.targets[0])
    await reading.task
    assert reading.chunks[-1].finish_reason == "cancelled"
    await routers.is_free(3)
