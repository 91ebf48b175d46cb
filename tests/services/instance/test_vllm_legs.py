"""Prefill and decode instances as the two workers of a gateway that places requests itself, on real instances."""

import asyncio
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from kaveri.domain.view import InstanceState, Phase
from kaveri.models import KAVERI_TINY, resolve_model
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from services.instance.hold_params import HoldAt, write_hold
from services.prefill.holds import HoldName
from tests.services.conftest import DEADLINE_S, InProcessCluster, RunningInstance, eventually, reserve

MARK = '{"do_remote_decode":true,"do_remote_prefill":false}'
"""What smg sends on the prefill leg to workers whose connector is NixlConnector."""
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def kv_transports() -> tuple[str, ...]:
    return ("tcp",)


def leg(request_id: str, prompt: list[int], max_tokens: int, kv: str = "", stream: bool = False, **params: Any) -> Any:
    sampling = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "seed": 0, **params}
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, skip_special_tokens=True, **sampling),
        stream=stream,
        kv_transfer_params_json=kv or None,
    )


def text_leg(request_id: str, text: str, max_tokens: int, kv: str = "", **params: Any) -> Any:
    request = leg(request_id, [], max_tokens, kv, **params)
    request.ClearField("tokenized")
    request.text = text
    return request


def stub(instance: RunningInstance) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(instance.channel)


async def ask(instance: RunningInstance, request: Any) -> list[Any]:
    return [response async for response in stub(instance).Generate(request, timeout=DEADLINE_S)]


async def rest_of(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


async def hold(instance: RunningInstance, request_id: str = "one", prompt: list[int] = PROMPT) -> Any:
    """The prefill leg, as smg sends it."""
    (response,) = await ask(instance, leg(request_id, prompt, 1, MARK, ignore_eos=True))
    return response.complete


@pytest.fixture
async def legs(cluster: InProcessCluster) -> tuple[RunningInstance, RunningInstance]:
    return await cluster.prefill(vllm_grpc=True), await cluster.decode(vllm_grpc=True)


CAUSES = ("no_hold", "hold_gone", "unreachable", "push_failed", "barred_token")
Legs = tuple[RunningInstance, RunningInstance]


def recomputes(instance: RunningInstance) -> dict[str, float]:
    counts = {cause: instance.metric("kaveri_leg_recomputes_total", cause=cause) for cause in CAUSES}
    return {cause: count for cause, count in counts.items() if count}


def holds_of(instance: RunningInstance) -> float:
    return instance.metric("kaveri_prefill_holds")


async def refusal(instance: RunningInstance, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as refused:
        await ask(instance, request)
    return refused.value.code(), refused.value.details() or ""


async def answer(instance: RunningInstance, request: Any) -> list[int]:
    (response,) = await ask(instance, request)
    return list(response.complete.output_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_request_over_both_legs(cluster: InProcessCluster, legs: Legs, stream: bool) -> None:
    prefill, decode = legs
    held = await hold(prefill)
    expected = cluster.expected(PROMPT, 20)
    assert list(held.output_ids) == expected[:1]
    assert (held.finish_reason, held.prompt_tokens) == ("length", len(PROMPT))
    assert prefill.held_blocks == cluster.blocks(len(PROMPT)), "its KV stays"
    responses = await ask(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json, stream))
    if stream:
        got = [token_id for each in responses for token_id in each.chunk.token_ids]
    else:
        got = list(responses[-1].complete.output_ids)
    assert got == expected
    assert responses[-1].complete.finish_reason == "length"
    assert prefill.metric("kaveri_prefill_hold_ends_total", outcome="pushed") == 1
    assert decode.metric("kaveri_kv_received_bytes_total") > 0
    assert recomputes(decode) == {}
    await cluster.all_free()


async def test_a_hold_that_expired_is_computed_again_and_counted(cluster: InProcessCluster) -> None:
    prefill, decode = await cluster.prefill(vllm_grpc=True, hold_ttl_s=0.05), await cluster.decode(vllm_grpc=True)
    held = await hold(prefill)
    await eventually(prefill.free, "the hold expires and frees its blocks")
    assert prefill.metric("kaveri_prefill_hold_ends_total", outcome="expired") == 1
    assert await answer(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {"hold_gone": 1}
    await cluster.all_free()


async def test_a_hold_is_pushed_once(cluster: InProcessCluster, legs: Legs) -> None:
    prefill, decode = legs
    kv = (await hold(prefill)).kv_transfer_params_json
    expected = cluster.expected(PROMPT, 20)
    assert await answer(decode, leg("one", PROMPT, 20, kv)) == expected
    assert await answer(decode, leg("again", PROMPT, 20, kv)) == expected
    assert recomputes(decode) == {"hold_gone": 1}
    await cluster.all_free()


async def test_a_hold_of_a_former_life_is_computed_again(cluster: InProcessCluster, legs: Legs) -> None:
    prefill, decode = legs
    params = json.loads((await hold(prefill)).kv_transfer_params_json)
    params["remote_incarnation"] = str(int(params["remote_incarnation"]) ^ 1)
    former = json.dumps(params)
    assert await answer(decode, leg("one", PROMPT, 20, former)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {"hold_gone": 1}
    assert holds_of(prefill) == 1, "the hold of the present life is another one"
    await stub(prefill).Abort(vllm_engine_pb2.AbortRequest(request_ids=["one"]), timeout=DEADLINE_S)
    await cluster.all_free()


async def test_a_prefill_instance_asked_for_a_hold_of_a_former_life_says_so(legs: Legs) -> None:
    name = prefill_pb2.HoldName(incarnation=1, hold_id=b"h" * 16)
    request = prefill_pb2.ResolveHoldRequest(hold=name, token_ids=PROMPT)
    with pytest.raises(aio.AioRpcError) as refused:
        await PrefillServiceStub(legs[0].channel).ResolveHold(request, timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "in a former life of this instance" in (refused.value.details() or "")


async def test_a_prefill_instance_that_has_gone_costs_a_computation(cluster: InProcessCluster) -> None:
    prefill, decode = await cluster.prefill(vllm_grpc=True, drain_timeout_s=0.1), await cluster.decode(vllm_grpc=True)
    held = await hold(prefill)
    await prefill.stop()
    assert await answer(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json)) == cluster.expected(PROMPT, 20)
    assert sum(recomputes(decode).values()) == 1
    await cluster.all_free()


async def test_a_push_that_is_broken_off_is_computed_again(cluster: InProcessCluster, legs: Legs) -> None:
    prefill, decode = legs
    held = await hold(prefill)
    for life in prefill.service._lives.values():
        prefill.engine.abort(life.request.key)  # the engine knows it no more, and never pushes it
    asking = asyncio.create_task(answer(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json)))
    await eventually(lambda: decode.held_blocks > 0, "room is reserved")
    await asyncio.wait_for(prefill.stop(), DEADLINE_S)
    assert await asyncio.wait_for(asking, DEADLINE_S) == cluster.expected(PROMPT, 20)
    assert sum(recomputes(decode).values()) == 1
    await cluster.all_free()


async def test_holds_have_a_share_of_the_pool_and_more_prompts_wait_for_it(cluster: InProcessCluster) -> None:
    prefill = await cluster.prefill(vllm_grpc=True, hold_share=0.05, max_queue=1)
    decode = await cluster.decode(vllm_grpc=True)
    most = int(prefill.engine.info.total_blocks * 0.05)
    prompt = [7] * (prefill.engine.info.layout.block_tokens * most)
    code, details = await refusal(prefill, leg("large", [*prompt, 7], 1, MARK))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "tokenized.input_ids" in details
    assert "--hold-share" in details
    held = await hold(prefill, "all", prompt)
    given_up = stub(prefill).Generate(leg("given-up", PROMPT, 1, MARK), timeout=DEADLINE_S)
    await eventually(lambda: in_line(prefill) == 1, "it waits for a part of the share")
    code, details = await refusal(prefill, leg("more", PROMPT, 1, MARK))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 prompts wait for a part" in details
    given_up.cancel()
    await eventually(lambda: in_line(prefill) == 0, "it leaves the line")
    waiting = asyncio.create_task(hold(prefill, "waits"))
    await eventually(lambda: in_line(prefill) == 1, "another one has its place")
    assert prefill.metric("kaveri_prefill_hold_blocks") == most
    # Without a hold the pool is there for all.
    assert len((await ask(prefill, leg("none", PROMPT, 1)))[0].complete.output_ids) == 1
    assert not waiting.done()
    assert await answer(decode, leg("all", prompt, 5, held.kv_transfer_params_json)) == cluster.expected(prompt, 5)
    kv = (await asyncio.wait_for(waiting, DEADLINE_S)).kv_transfer_params_json
    assert await answer(decode, leg("waits", PROMPT, 5, kv)) == cluster.expected(PROMPT, 5)
    assert recomputes(decode) == {}
    assert prefill.metric("kaveri_prefill_hold_blocks") == 0
    await cluster.all_free(DEADLINE_S)


def in_line(prefill: RunningInstance) -> float:
    return prefill.metric("kaveri_prefill_hold_line_requests")


@pytest.mark.parametrize("by_abort", [False, True])
async def test_cancelled_decode_legs_free_both_sides(cluster: InProcessCluster, by_abort: bool) -> None:
    """While the answer runs, and while it waits for room with its KV held."""
    prefill = await cluster.prefill(vllm_grpc=True)
    decode = await cluster.decode(vllm_grpc=True, kv_cache_memory=2**17, fake_step_s=0.2)
    large = [9] * (decode.engine.info.layout.block_tokens * decode.engine.info.total_blocks * 5 // 8)
    calls = {}
    for request_id, prompt in (("runs", large), ("waits", [*large, 9])):
        held = await hold(prefill, request_id, prompt)
        request = leg(request_id, prompt, 150, held.kv_transfer_params_json, stream=True)
        calls[request_id] = stub(decode).Generate(request, timeout=DEADLINE_S)
        if request_id == "runs":
            await asyncio.wait_for(calls[request_id].read(), DEADLINE_S)
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "the second waits for room")
    assert holds_of(prefill) == 1
    for request_id in ("waits", "runs"):
        if by_abort:
            await stub(decode).Abort(vllm_engine_pb2.AbortRequest(request_ids=[request_id]), timeout=DEADLINE_S)
            responses = await asyncio.wait_for(rest_of(calls[request_id]), DEADLINE_S)
            assert responses[-1].complete.finish_reason == "abort"
        else:
            calls[request_id].cancel()
    await cluster.all_free(DEADLINE_S)
    assert holds_of(prefill) == 0


async def test_a_cancelled_prefill_leg_frees_its_blocks(cluster: InProcessCluster) -> None:
    prefill = await cluster.prefill(vllm_grpc=True, fake_step_s=0.05, chunk_tokens=16)
    call = stub(prefill).Generate(leg("one", [7] * 400, 1, MARK), timeout=DEADLINE_S)
    await eventually(lambda: prefill.held_blocks > 0, "its prompt is computed")
    call.cancel()
    await cluster.all_free(DEADLINE_S)
    assert prefill.metric("kaveri_prefill_hold_blocks") == 0


async def test_the_abort_of_a_prefill_leg_ends_the_decode_leg_that_comes_later(
    cluster: InProcessCluster, legs: Legs
) -> None:
    prefill, decode = legs
    held = await hold(prefill)
    await stub(prefill).Abort(vllm_engine_pb2.AbortRequest(request_ids=["one"]), timeout=DEADLINE_S)
    await cluster.all_free()
    (response,) = await ask(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json))
    assert (response.complete.finish_reason, list(response.complete.output_ids)) == ("abort", [])
    assert recomputes(decode) == {}
    await cluster.all_free()


async def test_a_decode_instance_that_dies_gives_the_hold_up(cluster: InProcessCluster) -> None:
    prefill = await cluster.prefill(vllm_grpc=True)
    decode = await cluster.decode(
        vllm_grpc=True, drain_timeout_s=0.1, kv_cache_memory=2**17, orphan_grace_s=2 * DEADLINE_S
    )
    large = [9] * (decode.engine.info.layout.block_tokens * decode.engine.info.total_blocks * 5 // 8)
    await reserve(decode, "other", len(large))
    held = await hold(prefill, "one", large)
    asking = asyncio.create_task(ask(decode, leg("one", large, 20, held.kv_transfer_params_json)))
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "it waits for room")
    await decode.stop()
    with pytest.raises(aio.AioRpcError):
        await asking
    await cluster.all_free(DEADLINE_S)


async def test_a_drain_waits_for_holds(cluster: InProcessCluster, legs: Legs) -> None:
    prefill, decode = legs
    held = await hold(prefill)
    stopping = asyncio.create_task(prefill.stop())
    await eventually(lambda: prefill.host.state is InstanceState.DRAINING, "it drains")
    assert await answer(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {}
    assert await asyncio.wait_for(stopping, DEADLINE_S) == 0


async def test_a_leg_ends_at_its_draining_instance_with_replication(cluster: InProcessCluster) -> None:
    """No router would resume it from a copy."""
    prefill = await cluster.prefill(vllm_grpc=True)
    settings = {"replication": "ring", "replica_min_tokens": 16, "replica_memory": 2**21, "fake_step_s": 0.01}
    decode = await cluster.decode("decode-0", vllm_grpc=True, **settings)
    await cluster.decode("decode-1", vllm_grpc=True, **settings)
    kv = (await hold(prefill)).kv_transfer_params_json
    call = stub(decode).Generate(leg("one", PROMPT, 400, kv, stream=True), timeout=DEADLINE_S)
    responses = [await asyncio.wait_for(call.read(), DEADLINE_S)]
    decode.service.drain()
    responses += await asyncio.wait_for(rest_of(call), DEADLINE_S)
    assert [token for each in responses for token in each.chunk.token_ids] == cluster.expected(PROMPT, 400)
    assert decode.metric("kaveri_replica_copied_tokens_total") == 0, "copies that no router resumes from"
    assert decode.metric("kaveri_decode_kept_answers") == 0, "an answer that no router attaches"
    await cluster.all_free()


async def test_a_draining_decode_instance_refuses_legs_and_leaves_their_holds(
    cluster: InProcessCluster, legs: Legs
) -> None:
    prefill, decode = legs
    kv = (await hold(prefill)).kv_transfer_params_json
    decode.service.drain()
    for given in (kv, ""):
        code, details = await refusal(decode, leg("one", PROMPT, 20, given))
        assert (code, "draining" in details) == (grpc.StatusCode.UNAVAILABLE, True), details
    other = await cluster.decode("decode-1", vllm_grpc=True)
    assert await answer(other, leg("one", PROMPT, 20, kv)) == cluster.expected(PROMPT, 20)
    assert recomputes(other) == {}


@pytest.fixture
def pushes(legs: Legs, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The pushes that the prefill instance was asked for. Each begins when it is called."""
    asked: list[Callable[[], None]] = []
    push_to = legs[0].engine.push_to
    monkeypatch.setattr(legs[0].engine, "push_to", lambda *args: asked.append(partial(push_to, *args)))
    return asked


async def test_a_second_decode_leg_leaves_the_push_of_the_first_alone(
    cluster: InProcessCluster, legs: Legs, pushes: list[Callable[[], None]]
) -> None:
    prefill, decode = legs
    other = await cluster.decode("decode-1", vllm_grpc=True)
    kv, expected = (await hold(prefill)).kv_transfer_params_json, cluster.expected(PROMPT, 20)
    first = asyncio.create_task(answer(decode, leg("one", PROMPT, 20, kv)))
    await eventually(lambda: len(pushes) == 1, "the first leg's push is asked for")
    assert await answer(other, leg("two", PROMPT, 20, kv)) == expected
    # Its answer ends with the first token: it asks for no push.
    assert await answer(other, leg("three", PROMPT, 1, kv)) == expected[:1]
    await PrefillServiceStub(prefill.channel).ReleaseHold(release_of(kv), timeout=DEADLINE_S)
    pushes[0]()
    assert await asyncio.wait_for(first, DEADLINE_S) == expected
    assert recomputes(decode) == {}
    assert recomputes(other) == {"push_failed": 1}
    await cluster.all_free(DEADLINE_S)


def release_of(kv: str) -> prefill_pb2.ReleaseHoldRequest:
    given = json.loads(kv)
    name = prefill_pb2.HoldName(
        incarnation=int(given["remote_incarnation"]), hold_id=bytes.fromhex(given["remote_hold_id"])
    )
    return prefill_pb2.ReleaseHoldRequest(hold=name)


async def test_a_leg_in_place_of_one_that_was_cancelled_computes_the_prompt(
    cluster: InProcessCluster, legs: Legs, pushes: list[Callable[[], None]]
) -> None:
    prefill, decode = legs
    other = await cluster.decode("decode-1", vllm_grpc=True)
    kv = (await hold(prefill)).kv_transfer_params_json
    call = stub(decode).Generate(leg("one", PROMPT, 20, kv), timeout=DEADLINE_S)
    await eventually(lambda: len(pushes) == 1, "its push is asked for")
    call.cancel()
    await eventually(lambda: holds_of(prefill) == 0, "the hold is given up")
    assert prefill.metric("kaveri_prefill_hold_ends_total", outcome="released") == 1
    assert await answer(other, leg("one", PROMPT, 20, kv)) == cluster.expected(PROMPT, 20)
    assert recomputes(other) == {"hold_gone": 1}
    await cluster.all_free(DEADLINE_S)


async def test_without_a_hold_a_decode_instance_computes_the_prompt(cluster: InProcessCluster, legs: Legs) -> None:
    _, decode = legs
    expected = cluster.expected(PROMPT, 20)
    assert await answer(decode, leg("one", PROMPT, 20)) == expected
    responses = await ask(decode, leg("many", PROMPT, 20, n=2, stream=True))
    completes = {each.complete.index for each in responses if each.HasField("complete")}
    assert completes == {0, 1}
    first = [token_id for each in responses if each.chunk.index == 0 for token_id in each.chunk.token_ids]
    assert first == expected
    assert recomputes(decode) == {"no_hold": 3}
    await cluster.all_free()


async def test_an_instance_that_computes_for_itself_takes_pushes_all_the_while(cluster: InProcessCluster) -> None:
    decode = await cluster.decode(vllm_grpc=True, fake_step_s=0.2, chunk_tokens=16)
    asking = asyncio.create_task(answer(decode, leg("one", [7] * 400, 2)))
    await eventually(lambda: decode.held_blocks > 0, "the prompt is computed")
    assert decode.load().phases == (Phase.DECODE,)
    assert not decode.load().ending_phases
    assert await asking == cluster.expected([7] * 400, 2)


async def test_an_instance_of_both_phases_answers_both_legs(cluster: InProcessCluster) -> None:
    both, decode = await cluster.colocated(vllm_grpc=True), await cluster.decode(vllm_grpc=True)
    expected = cluster.expected(PROMPT, 20)
    held = await hold(both)
    assert await answer(decode, leg("one", PROMPT, 20, held.kv_transfer_params_json)) == expected
    assert recomputes(decode) == {}
    assert await answer(both, leg("two", PROMPT, 20)) == expected
    # Also of one request.
    held = await hold(both, "three")
    assert await answer(both, leg("three", PROMPT, 20, held.kv_transfer_params_json)) == expected
    await cluster.all_free()


WRONG = [
    ("{", "kv_transfer_params_json"),
    ("[1]", "kv_transfer_params_json"),
    ("[" * 2_000, "kv_transfer_params_json"),
    (" " * 3_000, "at most 2048 characters"),
    ('{"do_remote_prefill": false}', "do_remote_decode or do_remote_prefill true"),
    ('{"do_remote_prefill": true}', "kv_transfer_params_json.remote_engine_id"),
    ({"remote_hold_id": "x"}, "kv_transfer_params_json.remote_hold_id"),
    ({"remote_hold_id": 7}, "kv_transfer_params_json.remote_hold_id"),
    ({"remote_incarnation": "-1"}, "kv_transfer_params_json.remote_incarnation"),
    ({"remote_incarnation": "9" * 60}, "kv_transfer_params_json.remote_incarnation"),
    ({"remote_host": "127.0\ud800.1"}, "kv_transfer_params_json.remote_host"),
    ({"remote_host": "unix:/tmp/a"}, "kv_transfer_params_json.remote_host"),
    ({"remote_port": "50051"}, "kv_transfer_params_json.remote_port"),
    ({"remote_port": 99_999}, "kv_transfer_params_json.remote_port"),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=range(len(WRONG)))
async def test_wrong_words_about_the_kv_are_refused_by_name(given: Any, named: str, legs: Legs) -> None:
    good = write_hold(HoldAt("prefill-0", "127.0.0.1:1", HoldName(1, bytes(16))))
    text = given if isinstance(given, str) else json.dumps({**json.loads(good), **given})
    code, details = await refusal(legs[1], leg("one", PROMPT, 5, text))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in details


async def test_a_leg_at_the_wrong_instance_is_refused_by_name(legs: Legs) -> None:
    prefill, decode = legs
    for instance, request, named in (
        (decode, leg("one", PROMPT, 1, MARK), "do_remote_decode"),
        (prefill, leg("one", PROMPT, 5), "sampling_params.max_tokens"),
        (prefill, leg("one", PROMPT, 5, MARK), "sampling_params.max_tokens"),
        (prefill, leg("one", PROMPT, 1, MARK, n=2), "sampling_params.n"),
        (decode, leg("one", [], 5), "tokenized.input_ids"),
        (decode, leg("one", [10**6], 5), "tokenized.input_ids"),
        (decode, leg("one", PROMPT, 5, stop_token_ids=[10**6]), "sampling_params.stop_token_ids"),
        (decode, leg("one", PROMPT, 10**6), "sampling_params.max_tokens"),
        (decode, leg("one", PROMPT, 5, min_p=0.5), "sampling_params.min_p"),
    ):
        code, details = await refusal(instance, request)
        assert (code, named in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


async def test_a_leg_of_text_is_held_to_the_same_vocabulary(cluster: InProcessCluster) -> None:
    prefill = await cluster.prefill(vllm_grpc=True, model=KAVERI_TINY)
    decode = await cluster.decode(vllm_grpc=True, model=KAVERI_TINY)
    for instance, request in (
        (decode, text_leg("one", "hello", 5, stop_token_ids=[10**6])),
        (prefill, text_leg("one", "hello", 1, MARK, stop_token_ids=[10**6])),
    ):
        code, details = await refusal(instance, request)
        assert (code, "stop_token_ids" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


async def test_a_hold_for_another_prompt_is_refused(cluster: InProcessCluster, legs: Legs) -> None:
    prefill, decode = legs
    held = await hold(prefill)
    code, details = await refusal(decode, leg("one", [*PROMPT[:-1], 3], 5, held.kv_transfer_params_json))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "the prompt that the hold was made for" in details
    await cluster.all_free(DEADLINE_S)


async def test_gateways_are_shown_the_form_that_they_know(legs: Legs) -> None:
    for instance, role in zip(legs, ("kv_producer", "kv_consumer"), strict=True):
        info = await stub(instance).GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=DEADLINE_S)
        assert (info.kv_connector, info.kv_role, info.kv_engine_id) == ("NixlConnector", role, instance.instance_id)
        health = await stub(instance).HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert (health.healthy, health.message) == (True, "")
        loads = await stub(instance).GetLoads(vllm_engine_pb2.GetLoadsRequest(), timeout=DEADLINE_S)
        assert loads.loads[0].max_total_num_tokens > 0
        with pytest.raises(aio.AioRpcError) as refused:
            await stub(instance).Embed(vllm_engine_pb2.EmbedRequest(), timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_gateways_are_told_the_sampling_defaults_of_the_models_file(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    folder = shutil.copytree(resolve_model(KAVERI_TINY), tmp_path / "model")
    told = []
    for number, values in enumerate(({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "min_p": 0.1}, {})):
        (folder / "generation_config.json").write_text(json.dumps(values))
        instance = await cluster.prefill(f"prefill-{number}", vllm_grpc=True, model=str(folder))
        info = await stub(instance).GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=DEADLINE_S)
        told.append(info.default_sampling_params_json)
    assert told == ['{"temperature":0.6,"top_k":20}', ""]
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    instance = await cluster.prefill("prefill-2", vllm_grpc=True, model=str(folder))
    with pytest.raises(aio.AioRpcError) as refused:
        await stub(instance).GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=DEADLINE_S)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "temperature 'hot'" in (refused.value.details() or "")
