"""Every process of a cluster is restarted, or drained and put back, while clients ask: no request fails.

Real processes on the fake engine. Every answer is compared with the model's own. The full run, each process twice and
at least 1,000 requests, is benchmarks/serving/rolling_restart.py.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView, InstanceState
from kaveri.engine.stepwise.fake import FakeModel
from tests.support.local_cluster import LocalCluster, run_cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLIENTS = 6
STEP = ("--fake-step-s", "0.01")


class SteadyLoad:
    """Clients that ask without a break. One that fails fails the test."""

    def __init__(self, client: AsyncClient) -> None:
        self.answers = 0
        self._client = client
        self._model = FakeModel()
        self._is_over = False
        numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._ask(numbers)) for _ in range(CLIENTS)]

    async def more(self, count: int) -> None:
        """Waits for so many more answers."""
        target = self.answers + count
        async with asyncio.timeout(120):
            while self.answers < target:
                done = [task for task in self._tasks if task.done()]
                if done:
                    done[0].result()
                await asyncio.wait(self._tasks, timeout=0.05)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, numbers: Iterator[int]) -> None:
        while not self._is_over:
            number = next(numbers)
            prompt = tuple(1 + (7 * number + place * place) % 900 for place in range(100))
            params = SamplingParams(max_tokens=(20, 60, 120)[number % 3], temperature=0, ignore_eos=True)
            answer = await self._client.generate(prompt_token_ids=prompt, params=params)
            assert answer.token_ids == tuple(self._model.answer(prompt, 0, params.max_tokens or 0))
            self.answers += 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with run_cluster(
        router_count=2, prefill_count=2, decode_count=2, drain_timeout_s=30.0, prefill_flags=STEP, decode_flags=STEP
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def load(cluster: LocalCluster) -> AsyncIterator[SteadyLoad]:
    async with AsyncClient(cluster.stack.targets, timeout_s=60) as client:
        load = SteadyLoad(client)
        await load.more(CLIENTS)
        yield load
        await load.end()


async def test_every_process_can_be_restarted_under_load(cluster: LocalCluster, load: SteadyLoad) -> None:
    for name in cluster.stack.instance_ids:
        assert await cluster.stop(name, 40.0) == 0
        await load.more(CLIENTS)
        await cluster.restart(name)
        await load.more(CLIENTS)


@pytest.mark.parametrize("name", ["router-0", "prefill-0", "decode-0"])
async def test_an_instance_is_drained_and_put_back_by_command(
    cluster: LocalCluster, load: SteadyLoad, name: str
) -> None:
    def idle(view: ClusterView) -> bool:
        shown = view.instances[name].load
        return shown.state is InstanceState.DRAINING and not shown.running_requests and not shown.waiting_requests

    status, output, _ = await cluster.command("drain", name, "--wait")
    assert (status, output.splitlines()[-1]) == (0, f"{name} is drained")
    await cluster.wait_for_view(idle)
    await load.more(2 * CLIENTS)
    assert idle(cluster.view()), "it took a request"
    status, output, _ = await cluster.command("status", "--json")
    states = {shown["record"]["instance_id"]: shown["load"]["state"] for shown in json.loads(output)["instances"]}
    assert {each for each, state in states.items() if state == "draining"} == {name}
    assert (await cluster.command("drain", name))[:2] == (0, f"{name} drains already: 0 requests left\n")
    assert (await cluster.command("undrain", name))[:2] == (0, f"{name} takes requests again\n")
    assert (await cluster.command("undrain", name))[:2] == (0, f"{name} does not drain\n")
    await cluster.wait_for_view(lambda view: view.instances[name].load.running_requests > 0)


async def test_an_unknown_instance_is_refused_by_name(cluster: LocalCluster) -> None:
    for command in ("drain", "undrain"):
        status, _, errors = await cluster.command(command, "decode-9")
        assert status == 1
        assert "instance_id is 'decode-9'; it must be one of decode-0, decode-1, prefill-0" in errors
