"""Legs whose prefill instance answers oddly, whose callers abort twice, and prompts and deadlines at their limits."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from smg_grpc_proto import vllm_engine_pb2

from kaveri.errors import Unavailable
from kaveri.kv.transfer.ticket import Ticket
from services.decode.lifecycle import Broken
from services.instance.decode_leg import DecodeLegs
from services.instance.hold_peers import PeerHold
from services.instance.vllm_grpc import _LegCall
from services.prefill.holds import Holds
from tests.services.conftest import DEADLINE_S, InProcessCluster, RunningInstance, eventually
from tests.services.instance.test_vllm_legs import PROMPT, answer, hold, holds_of, leg, recomputes, rest_of, stub


@pytest.fixture
def kv_transports() -> tuple[str, ...]:
    return ("tcp",)


@pytest.fixture
async def both(cluster: InProcessCluster) -> tuple[RunningInstance, RunningInstance]:
    return await cluster.prefill(vllm_grpc=True), await cluster.decode(vllm_grpc=True)


Both = tuple[RunningInstance, RunningInstance]


async def abort(instance: RunningInstance, *request_ids: str) -> None:
    await stub(instance).Abort(vllm_engine_pb2.AbortRequest(request_ids=request_ids), timeout=DEADLINE_S)


async def test_a_hold_is_asked_for_at_the_registered_address_where_that_is_known(
    cluster: InProcessCluster, both: Both
) -> None:
    prefill, decode = both
    given = json.loads((await hold(prefill)).kv_transfer_params_json)
    elsewhere = json.dumps({**given, "remote_port": 1})
    assert await answer(decode, leg("one", PROMPT, 20, elsewhere)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {}
    # As where the monitor's broadcasts leave the prefill instance out.
    given = json.loads((await hold(prefill)).kv_transfer_params_json)
    unknown = json.dumps({**given, "remote_engine_id": "unknown"})
    assert await answer(decode, leg("two", PROMPT, 20, unknown)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {}
    await cluster.all_free()


async def test_a_prefill_instance_that_breaks_over_a_hold_costs_a_computation(
    cluster: InProcessCluster, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = both
    kv = (await hold(prefill)).kv_transfer_params_json
    monkeypatch.setattr(Holds, "resolve", lambda *_: 1 / 0)
    assert await answer(decode, leg("one", PROMPT, 20, kv)) == cluster.expected(PROMPT, 20)
    assert recomputes(decode) == {"unreachable": 1}
    await cluster.all_free(DEADLINE_S)


async def test_a_hold_counts_once_while_its_answer_is_written(
    cluster: InProcessCluster, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = both
    writing, goes_on, write = asyncio.Event(), asyncio.Event(), _LegCall.write

    async def write_later(self: _LegCall, message: Any) -> None:
        writing.set()
        await goes_on.wait()
        await write(self, message)

    monkeypatch.setattr(_LegCall, "write", write_later)
    asking = asyncio.create_task(hold(prefill))
    await asyncio.wait_for(writing.wait(), DEADLINE_S)
    assert prefill.metric("kaveri_prefill_hold_blocks") == cluster.blocks(len(PROMPT))
    goes_on.set()
    await asking
    await abort(prefill, "one")
    await cluster.all_free()


async def test_the_longest_prompt_is_answered_with_its_only_token_and_no_hold(
    cluster: InProcessCluster, both: Both
) -> None:
    prefill, _ = both
    prompt = [7] * (prefill.engine.info.max_model_len - 1)
    answered = await hold(prefill, "one", prompt)
    assert list(answered.output_ids) == cluster.expected(prompt, 1)
    assert (answered.finish_reason, answered.kv_transfer_params_json) == ("length", "")
    assert holds_of(prefill) == 0
    await cluster.all_free(DEADLINE_S)


async def test_a_leg_has_all_the_time_that_its_caller_gives(cluster: InProcessCluster) -> None:
    decode = await cluster.decode(vllm_grpc=True, fake_step_s=0.05)
    call = stub(decode).Generate(leg("one", PROMPT, 400, stream=True), timeout=3000)
    await asyncio.wait_for(call.read(), DEADLINE_S)
    (request,) = decode.service.landed()
    assert request.expires_s - request.came_s > 2000
    call.cancel()
    await cluster.all_free(DEADLINE_S)


async def test_an_answer_that_is_complete_is_not_completed_again_by_an_abort(
    cluster: InProcessCluster, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode = both
    begin, waiting = DecodeLegs.answer, asyncio.Event()

    async def answer_first(self: DecodeLegs, request: Any) -> AsyncIterator[Any]:
        if request.request_id != "one-0":
            waiting.set()
            await asyncio.Event().wait()
        async for drawn in begin(self, request):
            yield drawn

    monkeypatch.setattr(DecodeLegs, "answer", answer_first)
    call = stub(decode).Generate(leg("one", PROMPT, 5, n=2, stream=True), timeout=DEADLINE_S)
    while not (await asyncio.wait_for(call.read(), DEADLINE_S)).HasField("complete"):
        pass
    await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    await abort(decode, "one", "one")
    rest = await asyncio.wait_for(rest_of(call), DEADLINE_S)
    assert [(each.complete.index, each.complete.finish_reason) for each in rest] == [(1, "abort")]
    await cluster.all_free(DEADLINE_S)


def fails_when(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> None:
    """The next push arrives, and its answer is lost when `happens` returns."""
    push = PeerHold.push

    async def push_and_fail(self: PeerHold, ticket: Ticket, timeout_s: float) -> None:
        await push(self, ticket, timeout_s)
        await happens()
        raise Unavailable("the connection broke")

    monkeypatch.setattr(PeerHold, "push", push_and_fail)


@pytest.mark.parametrize("max_tokens", [3, 400])
async def test_an_answer_goes_on_where_its_kv_has_landed_though_the_answer_to_its_push_was_lost(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """It computed the prompt again, and took the end of the first answer for that of the second."""
    prefill, decode = await cluster.prefill(vllm_grpc=True), await cluster.decode(vllm_grpc=True, fake_step_s=0.001)

    async def has_drawn() -> None:
        def has_come_far() -> bool:
            has_finished = decode.metric("kaveri_decode_requests_total", outcome="finished") == 1
            return has_finished or any(len(request.log.token_ids) > 3 for request in decode.service.landed())

        await eventually(has_come_far, "it draws")

    fails_when(monkeypatch, has_drawn)
    kv = (await hold(prefill)).kv_transfer_params_json
    assert await answer(decode, leg("one", PROMPT, max_tokens, kv)) == cluster.expected(PROMPT, max_tokens)
    assert recomputes(decode) == {}
    await cluster.all_free(DEADLINE_S)


async def test_a_prompt_is_computed_again_where_what_has_landed_failed_before_its_push_was_answered(
    cluster: InProcessCluster, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = both

    handle, failed = decode.service.handle, asyncio.Event()

    def handle_and_fail_the_first(events: Any) -> None:
        handle(events)
        for request in [] if failed.is_set() else list(decode.service.landed()):
            decode.service._take(request, Broken(Unavailable("the engine has failed it")))
            failed.set()

    decode.service.handle = handle_and_fail_the_first

    async def has_failed() -> None:
        await asyncio.wait_for(failed.wait(), DEADLINE_S)

    fails_when(monkeypatch, has_failed)
    kv = (await hold(prefill)).kv_transfer_params_json
    assert await answer(decode, leg("one", PROMPT, 400, kv)) == cluster.expected(PROMPT, 400)
    assert recomputes(decode) == {"push_failed": 1}


async def test_an_abort_of_a_call_that_ends_by_an_abort_is_ignored() -> None:
    nothing = cast(Any, None)

    async def aborted_twice() -> None:
        async with asyncio.timeout(None) as scope:
            call = _LegCall(nothing, nothing, nothing, 0.0, scope)
            call.abort()
            try:
                await asyncio.Event().wait()
            finally:
                call.abort()

    with pytest.raises(TimeoutError):
        await aborted_twice()
