"""Broken calls and streams between a real router and prefill instance, which both recover."""

import asyncio
from typing import Any

import grpc
import pytest

from kaveri.v1 import prefill_pb2
from services.prefill.server import PrefillServer
from tests.services.breakable_link import breakable_link
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.session_client import GRACE_S, SECRET, WAIT_S, SessionClient, SessionRouters, computed


@pytest.mark.parametrize("phase", ["queued", "computed", "waiting for room"])
@pytest.mark.parametrize("secret", [b"", SECRET], ids=["no secret", "secret"])
async def test_a_stream_that_breaks_between_living_processes_costs_no_attempt(
    cluster: Any, routers: SessionRouters, phase: str, secret: bytes
) -> None:
    prefill = await cluster.prefill(orphan_grace_s=GRACE_S, fake_step_s=0.03, chunk_tokens=16)
    await cluster.decode(orphan_grace_s=GRACE_S, fake_step_s=0.01, max_model_len=400, kv_cache_memory=30 * 4096)
    router = await routers.start("router-0")
    async with breakable_link(router, prefill.host.address) as link:
        ahead = SessionClient(prompt(20, 300), {"max_tokens": 50}, request_id="ahead")
        client = SessionClient(prompt(21, 200), {"max_tokens": 20, "logprobs": 1}, secret=secret)
        calls = [routers.generate("router-0", each.message()) for each in (ahead, client)]
        reached = {"queued": 16, "computed": 320, "waiting for room": 500}[phase]
        await eventually(lambda: computed(cluster) >= reached, phase)
        link.reset()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(each.finish(call) for each, call in zip((ahead, client), calls, strict=True)))
    assert client.token_ids == cluster.expected(prompt(21, 200), 20)
    assert len(client.logprobs) == 20
    for each in (ahead, client):
        assert each.last is not None
        assert each.last.timing.attempts == 1
    assert computed(cluster) == 500, "each prompt once"
    await cluster.all_free()


@pytest.mark.parametrize("computed_tokens", [0, 16], ids=["at once", "once it is computed"])
async def test_a_submission_whose_answer_is_lost_is_repeated_and_computed_once(
    cluster: Any, routers: SessionRouters, monkeypatch: pytest.MonkeyPatch, computed_tokens: int
) -> None:
    submit, lost = PrefillServer.Submit, []

    async def lose_the_first_answer(
        self: PrefillServer, request: prefill_pb2.SubmitRequest, context: Any
    ) -> prefill_pb2.SubmitResponse:
        response = await submit(self, request, context)
        if not lost:
            lost.append(request.request_id)
            await eventually(lambda: computed(cluster) >= computed_tokens, "the first chunk is computed")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)")
        return response

    monkeypatch.setattr(PrefillServer, "Submit", lose_the_first_answer)
    await cluster.prefill(fake_step_s=0.03, chunk_tokens=16)
    await cluster.decode()
    await routers.start("router-0")
    client = SessionClient(prompt(23, 200), {"max_tokens": 20})
    await client.finish(routers.generate("router-0", client.message()))
    assert lost == ["a"]
    assert client.last is not None
    assert client.last.timing.attempts == 1
    assert client.token_ids == cluster.expected(prompt(23, 200), 20)
    assert computed(cluster) == 200
    await cluster.all_free()
