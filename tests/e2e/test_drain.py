"""Instances are drained and put back by command while clients ask. The kill matrix restarts processes under load."""

import asyncio
import json

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView, InstanceState
from kaveri.engine.stepwise.fake import FakeModel
from tests.support.local_cluster import run_cluster

STEP = ("--fake-step-s", "0.02")
MODEL = FakeModel()


async def _ask(client: AsyncClient, count: int) -> None:
    async def ask(number: int) -> None:
        prompt = tuple(1 + (7 * number + place * place) % 900 for place in range(100))
        params = SamplingParams(max_tokens=(20, 60, 120)[number % 3], temperature=0, ignore_eos=True)
        answer = await client.generate(prompt_token_ids=prompt, params=params)
        assert answer.token_ids == tuple(MODEL.answer(prompt, 0, params.max_tokens or 0))

    await asyncio.gather(*map(ask, range(count)))


@pytest.mark.timeout(180)
async def test_instances_are_drained_and_put_back_by_command_under_load() -> None:
    counts = {"router_count": 2, "prefill_count": 2, "decode_count": 2}
    async with (
        run_cluster(**counts, drain_timeout_s=30.0, prefill_flags=STEP, decode_flags=STEP) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=60) as client,
    ):
        for name in ("router-0", "prefill-0", "decode-0"):

            def is_drained(view: ClusterView, name: str = name) -> bool:
                load = view.instances[name].load
                return load.state is InstanceState.DRAINING and not load.running_requests and not load.waiting_requests

            asking = asyncio.create_task(_ask(client, 8))
            status, output, _ = await cluster.command("drain", name, "--wait")
            assert (status, output.splitlines()[-1]) == (0, f"{name} is drained")
            await cluster.wait_for_view(is_drained)
            await _ask(client, 8)
            assert is_drained(cluster.view()), "it took a request"
            await asking
            status, output, _ = await cluster.command("status", "--json")
            states = {each["record"]["instance_id"]: each["load"]["state"] for each in json.loads(output)["instances"]}
            assert {each for each, state in states.items() if state == "draining"} == {name}
            assert (await cluster.command("drain", name))[:2] == (0, f"{name} drains already: 0 requests left\n")
            assert (await cluster.command("undrain", name))[:2] == (0, f"{name} takes requests again\n")
            assert (await cluster.command("undrain", name))[:2] == (0, f"{name} does not drain\n")
            asking = asyncio.create_task(_ask(client, 32))
            await cluster.wait_for_view(lambda view, name=name: view.instances[name].load.running_requests > 0)  # type: ignore[misc]
            await asking
        for command in ("drain", "undrain"):
            status, _, errors = await cluster.command(command, "decode-9")
            assert status == 1
            assert "instance_id is 'decode-9'; it must be one of decode-0, decode-1, prefill-0" in errors
