"""Decode instance at its limits: seats that come free, a full pool, quarantined blocks."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.policy.decode_room import MAX_OVERTAKES
from tests.services.conftest import BLOCK_BYTES, eventually
from tests.services.prompts import prompt

pytestmark = pytest.mark.usefixtures("fake_blocks")

POOL_BLOCKS = 12
POOL_TOKENS = POOL_BLOCKS * 16
SMALL_POOL = {"max_model_len": POOL_TOKENS, "kv_cache_memory": POOL_BLOCKS * BLOCK_BYTES}
SOON_S = 60.0


async def status_of(reserving: Any) -> grpc.StatusCode:
    try:
        await reserving
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["aborted", "deadline", "router_gone"])
async def test_a_seat_that_comes_free_admits_the_next_landed_request(cluster: Any, how: str) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(max_batch=1, fake_step_s=0.02)
    former, router = await cluster.router("former"), await cluster.router()
    seated = former.prefill(
        prefill, "seated", prompt(1, 60), max_tokens=400, ignore_eos=True, timeout_s=2.0 if how == "deadline" else 60.0
    )
    await seated.ended()
    await eventually(lambda: decode.load().running_requests == 1, "it runs")
    waiting = router.prefill(prefill, "waiting", prompt(2, 60), max_tokens=10)
    await waiting.ended()
    await eventually(lambda: decode.load().waiting_requests == 1, "the next one has landed")
    if how == "aborted":
        await decode.abort("seated", router_id="former")
    elif how == "router_gone":
        former.unsubscribe(decode)
    await eventually(
        lambda: decode.metric("kaveri_decode_requests_total", outcome=how) == 1, "the seat is free", SOON_S
    )
    async with asyncio.timeout(SOON_S):
        assert await router.answer(waiting, "waiting") == cluster.expected(prompt(2, 60), 10)


async def test_a_request_as_large_as_the_whole_pool_is_served(cluster: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(**SMALL_POOL)
    router = await cluster.router()
    await decode.reserve("taken", 1)
    token_ids = prompt(3, POOL_TOKENS - 2)
    call = router.prefill(prefill, "whole", token_ids, max_tokens=2, ignore_eos=True)
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "it waits")
    await decode.abort("taken")
    assert await router.answer(call, "whole") == cluster.expected(token_ids, 2)
    await cluster.all_free()


async def test_nothing_is_kept_for_a_request_that_must_wait_for_a_frozen_sender(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await cluster.decode(**SMALL_POOL)
    await cluster.router()
    engine = decode.service._engine
    flow = engine.kv_flow()
    quarantined = 5

    def kv_flow() -> Any:
        return replace(flow, receiving=replace(flow.receiving, quarantined_block_count=quarantined))

    monkeypatch.setattr(engine, "kv_flow", kv_flow)
    await decode.reserve("taken", 79)
    # Eight blocks of the seven that are not in quarantine.
    large = asyncio.create_task(decode.reserve("large", 127, wait=True))
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "it waits")
    for number in range(MAX_OVERTAKES + 2):
        await decode.reserve(f"overtakes {number}", 1)
        await decode.abort(f"overtakes {number}")
        await eventually(lambda: decode.held_blocks == 5, "its block is free")
    assert decode.load().free_blocks == 7
    # The sender wakes: what is free is for the first in line now.
    quarantined = 4
    assert decode.load().free_blocks == 0
    assert await status_of(decode.reserve("small", 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await decode.abort("taken")
    assert await status_of(large) is grpc.StatusCode.OK
    await decode.abort("large")
    await cluster.all_free()
