"""Instances are drained and put back, and change their phase, by command while clients ask. The kill matrix restarts
processes under load."""

import asyncio
import json

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.view import ClusterView, InstanceState, Phase
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


@pytest.mark.timeout(180)
async def test_an_instance_changes_its_phase_by_command_under_load_and_no_answer_changes() -> None:
    counts = {"router_count": 2, "prefill_count": 1, "decode_count": 2}
    async with (
        run_cluster(**counts, drain_timeout_s=30.0, prefill_flags=STEP, decode_flags=STEP) as cluster,
        AsyncClient(cluster.stack.targets, timeout_s=60) as client,
    ):
        for to in (Phase.PREFILL, Phase.DECODE):

            def has_changed(view: ClusterView, to: Phase = to) -> bool:
                load = view.instances["decode-1"].load
                return (load.phases, load.ending_phases) == ((to,), ())

            asking = asyncio.create_task(_ask(client, 12))
            status, output, errors = await cluster.command("flip", "decode-1", "--to", to, "--wait")
            assert (status, output.splitlines()[-1:]) == (0, ["decode-1 serves nothing else any more"]), errors
            await cluster.wait_for_view(has_changed)
            await asking
            await _ask(client, 12)
            if to is Phase.PREFILL:
                status, _, errors = await cluster.command("flip", "decode-0", "--to", "prefill")
                assert status == 1
                assert "phases is 'prefill'; it must be with decode: no other instance serves it" in errors
        asking = asyncio.create_task(_ask(client, 12))
        await cluster.wait_for_view(lambda view: view.instances["decode-1"].load.running_requests > 0)
        flipped = await cluster.command("flip", "decode-1", "--to", "prefill", "--wait", "--deadline-s", "0.05")
        assert flipped[0] == 1
        assert "decode-1 serves decode again: requests of the phase that was to end were left" in flipped[2]
        await asking
        assert has_changed(cluster.view())
