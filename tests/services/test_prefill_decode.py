"""Requests through prefill and decode servers: exact tokens, waiting for room, attempts, drain, failures."""

import asyncio
from typing import Any

import grpc
import pytest

from kaveri.feeds.expiring import ExpiringMap
from kaveri.v1 import predictor_pb2
from tests.services.conftest import OVER_EACH_TRANSPORT, TIGHT, eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses


@OVER_EACH_TRANSPORT
async def test_a_request_is_prefilled_pushed_and_decoded_with_exact_tokens(cluster: Any) -> None:
    prefill = await cluster.prefill()
    await cluster.decode(fake_step_s=0.002)
    router = await cluster.router()
    token_ids = prompt(1, 50)
    call = router.prefill(prefill, "a", token_ids, max_tokens=20)
    assert await router.answer(call, "a") == cluster.expected(token_ids, 20)
    kinds = call.kinds
    assert sorted(kinds) == ["first_token", "handed_over", "placed", "started"]
    assert kinds[-1] == "handed_over"
    assert call.get("placed").decode_instance_id == "decode-0"
    assert call.get("handed_over").kv_bytes > 0
    last = router.last["a", 1]
    assert last.timing.decode_s > 0
    assert router.incarnations["decode-0"] > 0
    await cluster.all_free()


@OVER_EACH_TRANSPORT
async def test_a_later_attempt_goes_on_where_the_earlier_one_stopped(cluster: Any) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    router = await cluster.router()
    token_ids = prompt(2, 30)
    whole = cluster.expected(token_ids, 20)
    call = router.prefill(prefill, "a", token_ids + whole[:8], max_tokens=20, attempt=2, generated_count=8)
    assert await router.answer(call, "a", attempt=2) == whole[8:]
    assert min(router.tokens["a", 2]) == 9


async def test_an_answer_of_one_token_needs_no_decode_instance(cluster: Any) -> None:
    prefill = await cluster.prefill()
    router = await cluster.router()
    token_ids = prompt(3, 700 // 2)
    call = router.prefill(prefill, "a", token_ids, max_tokens=1)
    assert await router.answer(call, "a") == cluster.expected(token_ids, 1)
    assert call.kinds == ["started", "first_token"]
    await cluster.all_free()


@OVER_EACH_TRANSPORT
async def test_a_stop_token_drawn_by_prefill_gives_the_reservation_back(cluster: Any) -> None:
    # Its place is looked for while its only chunk is computed, and must be found before that ends.
    prefill = await cluster.prefill(fake_step_s=1.0)
    decode = await cluster.decode()
    router = await cluster.router()
    token_ids = prompt(4, 40)
    first = cluster.expected(token_ids, 1)
    call = router.prefill(prefill, "a", token_ids, max_tokens=20, stop_token_ids=(first[0],))
    assert await router.answer(call, "a") == first
    assert call.seen("placed")
    assert not call.seen("handed_over")
    await cluster.all_free()
    assert decode.engine.stats().waiting_requests == 0


@OVER_EACH_TRANSPORT
async def test_without_room_the_first_token_comes_and_the_rest_when_there_is_room(cluster: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(**TIGHT)
    router = await cluster.router()
    await decode.reserve("taken", 12 * 16 - 33)
    await eventually(lambda: decode.held_blocks >= cluster.blocks(12 * 16 - 32), "the pool is taken")
    token_ids = prompt(5, 60)
    call = router.prefill(prefill, "a", token_ids, max_tokens=10)
    await eventually(lambda: call.seen("first_token"), "the first token comes without room")
    assert not call.seen("placed")
    assert prefill.held_blocks > 0
    await decode.abort("taken")
    assert await router.answer(call, "a") == cluster.expected(token_ids, 10)
    await cluster.all_free()


@pytest.mark.parametrize(("settings", "fields"), [({"reservation_ttl_s": 2.0}, {}), ({}, {"timeout_s": 2.0})])
async def test_a_request_ends_at_decode_when_its_time_is_over(
    cluster: Any, settings: dict[str, float], fields: dict[str, float]
) -> None:
    decode = await cluster.decode(**settings)
    await cluster.router()
    await decode.reserve("a", 50, **fields)
    assert decode.held_blocks == cluster.blocks(51)
    await cluster.all_free(within_s=60)


async def test_decode_ends_an_older_attempt_for_a_newer_and_refuses_the_older(cluster: Any) -> None:
    decode = await cluster.decode()
    await cluster.router()
    await decode.reserve("a", 15)
    await decode.reserve("a", 60, attempt=2)
    await eventually(lambda: decode.held_blocks == cluster.blocks(61), "the older attempt's block is free")
    await decode.abort("a", attempt=1)
    assert decode.held_blocks == cluster.blocks(61)
    with refuses(grpc.StatusCode.ABORTED):
        await decode.reserve("a", 15, attempt=1)
    # Also when the instance has forgotten which attempts it was told of.
    owners = decode.service.owners
    remembered, owners._newest = owners._newest, ExpiringMap(0)
    with refuses(grpc.StatusCode.ABORTED):
        await decode.reserve("a", 15, attempt=1)
    owners._newest = remembered
    await decode.abort("a", attempt=3)
    await decode.abort("a", attempt=3)
    await decode.abort("unknown")
    await cluster.all_free()
    with refuses(grpc.StatusCode.ABORTED):
        await decode.reserve("a", 15, attempt=1)


async def test_draining_instances_finish_what_they_have_and_take_nothing_new(cluster: Any) -> None:
    prefill = await cluster.prefill(chunk_tokens=16, fake_step_s=0.01)
    decode = await cluster.decode(fake_step_s=0.01)
    router = await cluster.router()
    token_ids = prompt(10, 100)
    call = router.prefill(prefill, "a", token_ids, max_tokens=30)
    await eventually(lambda: call.seen("placed"), "placed")
    prefill.stopping.set()
    decode.stopping.set()
    await eventually(lambda: "ready" not in (prefill.host.state, decode.host.state), "both show that they drain")
    late = router.prefill(prefill, "late", token_ids, max_tokens=30)
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await late.ended()
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await decode.reserve("late", 15)
    assert await router.answer(call, "a") == cluster.expected(token_ids, 30)
    assert await prefill.stop() == 0
    assert await decode.stop() == 0


async def test_a_drain_that_takes_too_long_ends_what_is_left(cluster: Any) -> None:
    prefill = await cluster.prefill(drain_timeout_s=0.1)
    decode = await cluster.decode(drain_timeout_s=0.1, fake_step_s=0.05)
    router = await cluster.router()
    call = router.prefill(prefill, "a", prompt(11, 20), max_tokens=400)
    await call.ended()
    await eventually(lambda: ("a", 1) in router.tokens, "it decodes")
    assert await decode.stop() == 0
    await eventually(lambda: router.finished("a"), "the router hears of it")
    assert router.last["a", 1].error
    assert await prefill.stop() == 0


@OVER_EACH_TRANSPORT
async def test_a_broken_engine_fails_its_requests_and_ends_the_instance(cluster: Any) -> None:
    cluster.needs_fake_engines("reaches into the engine; tests/vllm/engine breaks one")
    prefill = await cluster.prefill(fake_step_s=0.02, chunk_tokens=16)
    decode = await cluster.decode(fake_step_s=0.02)
    router = await cluster.router()
    decoding = router.prefill(prefill, "decoding", prompt(12, 20), max_tokens=400)
    await decoding.ended()
    await eventually(lambda: ("decoding", 1) in router.tokens, "it decodes")

    def broken(*_: Any) -> None:
        raise RuntimeError("the arithmetic broke")

    decode.engine._runner.run = broken
    assert await asyncio.wait_for(decode.serving, 10.0) == 1
    await eventually(lambda: router.finished("decoding"), "the router hears of it")
    assert "the arithmetic broke" in router.last["decoding", 1].error

    prefilling = router.prefill(prefill, "prefilling", prompt(13, 400), max_tokens=5)
    await eventually(lambda: prefilling.seen("started"), "it is prefilled")
    prefill.engine._runner.run = broken
    assert await asyncio.wait_for(prefill.serving, 10.0) == 1
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await prefilling.ended()


async def test_a_prediction_that_is_no_range_is_refused(cluster: Any) -> None:
    decode = await cluster.decode()
    with refuses(grpc.StatusCode.INVALID_ARGUMENT, "predicted_length"):
        await decode.reserve("a", 1, predicted_length=predictor_pb2.PredictedLength(low=5, high=5))
