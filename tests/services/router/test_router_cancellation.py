"""Cancel, lost clients, deadlines and drains, in every phase: nothing stays behind, here or at instances."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from kaveri.lives.request_values import Decoding, Placed
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import (
    PROMPT,
    SECRET,
    answer,
    ask,
    collect,
    eventually,
    finish,
    refused,
    rest_of,
    tokens_of,
)
from tests.support.scripted_ports import plain_channel

PHASES = ["queued", "prefilling", "pushing", "waiting", "decoding"]


async def bring_to(cluster: ScriptedCluster, phase: str) -> Callable[[], bool]:
    """Make every request stop in `phase`. Returns a condition that holds once one has."""
    step = {"queued": "started", "prefilling": "placed", "pushing": "first_token", "waiting": "handed_over"}.get(phase)
    decode = cluster.decodes["decode-0"]
    if step is None:
        decode.pause_at = 7
        return lambda: decode.is_paused
    cluster.hold(step)
    if step == "handed_over":
        decode.may_step.clear()
        return lambda: bool(decode.running)
    return lambda: any(prefill.waiting_requests for prefill in cluster.prefills.values())


async def read_placements(router: RouterUnderTest, phase: str) -> None:
    """Wait until the router knows where requests wait: the scripted prefill aborts no unknown place."""
    if phase in ("waiting", "decoding"):
        entries = router.router.table._entries
        await eventually(lambda: all(isinstance(entry.state, Placed | Decoding) for entry in entries.values()))


async def all_legs_are_over(cluster: ScriptedCluster, router: RouterUnderTest) -> None:
    await eventually(lambda: not any(prefill.open_requests for prefill in cluster.prefills.values()))
    await eventually(lambda: not any(decode.running for decode in cluster.decodes.values()))
    await router.check_integrity()


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_ends_the_stream_as_cancelled_and_every_leg_with_it(cluster: ScriptedCluster, phase: str) -> None:
    reached = await bring_to(cluster, phase)
    async with cluster.router() as router:
        collecting = asyncio.create_task(collect(router.ask(request_id="mine")))
        await eventually(reached)
        await read_placements(router, phase)
        response = await router.stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))
        assert response.found
        responses = await collecting
        assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert responses[-1].usage.completion_tokens == len(tokens_of(responses))
        assert tokens_of(responses) == answer(PROMPT, 20)[: len(tokens_of(responses))]
        await all_legs_are_over(cluster, router)
        again = await router.stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))
        assert not again.found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ["client goes", "deadline passes"])
async def test_a_client_that_goes_or_a_deadline_that_passes_ends_every_leg(
    cluster: ScriptedCluster, end: str, phase: str
) -> None:
    reached = await bring_to(cluster, phase)
    async with cluster.router() as router:
        call = router.ask() if end == "client goes" else router.stub.Generate(ask(), timeout=3)
        reading = asyncio.create_task(collect(call))
        await eventually(reached)
        await read_placements(router, phase)
        if end == "client goes":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await refused(reading, grpc.StatusCode.DEADLINE_EXCEEDED)
        await all_legs_are_over(cluster, router)


async def test_a_client_whose_connection_vanishes_ends_every_leg(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router() as router:
        channel = plain_channel(router.address, (("grpc.use_local_subchannel_pool", 1),))
        call = channel.unary_stream(
            "/kaveri.v1.InferenceService/Generate",
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )(ask(), timeout=60)
        await cluster.read_until_paused(call)
        await channel.close()
        await all_legs_are_over(cluster, router)


async def test_without_a_deadline_of_its_own_a_request_has_the_default_one(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router(default_timeout_s=0.4) as router:
        await refused(collect(router.stub.Generate(ask())), grpc.StatusCode.DEADLINE_EXCEEDED)
        await all_legs_are_over(cluster, router)


async def test_the_deadline_travels_to_the_prefill_instance(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await collect(router.stub.Generate(ask(), timeout=7))
        (remaining_s,) = [entry for prefill in cluster.prefills.values() for entry in prefill.remaining_s]
        assert remaining_s is not None
        assert 5 < remaining_s < 7.5, "gRPC rounds up by some milliseconds"


async def test_cancel_reaches_a_request_that_waits_for_an_instance(tokenizer: ModelTokenizer) -> None:
    async with ScriptedCluster(tokenizer).router() as router:
        collecting = asyncio.create_task(collect(router.ask(request_id="early")))
        await eventually(lambda: len(router.router.table) == 1)
        assert (await router.stub.Cancel(inference_pb2.CancelRequest(request_id="early"))).found
        (response,) = await collecting
        assert response.request_id == "early"
        assert response.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED


async def test_a_full_router_refuses_with_a_delay_and_takes_again_when_there_is_room(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router(max_requests=1) as router:
        call = router.ask()
        first = await call.read()
        caught = await refused(collect(router.ask()), grpc.StatusCode.RESOURCE_EXHAUSTED, "try again in")
        assert any(key == "grpc-status-details-bin" for key, _ in caught.trailing_metadata() or ())
        # A release before the pause would let it pause for good.
        await eventually(lambda: cluster.decodes["decode-0"].is_paused)
        cluster.let_all_go()
        await finish(call, [first])
        await eventually(lambda: len(router.router.table) == 0)
        await finish(router.ask())


async def test_a_request_id_in_flight_is_refused_here_and_at_another_router(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router() as router, cluster.router(instance_id="router-1") as other:
        call = router.ask(request_id="mine")
        await call.read()
        for stub in (router.stub, other.stub):
            await refused(collect(stub.Generate(ask(request_id="mine"), timeout=60)), grpc.StatusCode.ALREADY_EXISTS)
        call.cancel()
        await all_legs_are_over(cluster, router)


async def test_attempts_of_an_id_that_is_used_again_go_on_counting(cluster: ScriptedCluster) -> None:
    for decode in cluster.decodes.values():
        decode.pause_at = 7
    async with cluster.router() as router:
        call = router.ask(request_id="mine")
        await eventually(lambda: any(decode.is_paused for decode in cluster.decodes.values()))
        numbers = router.router.placer._numbers
        # Pretend that it began a minute ago, with others since.
        for request_id in ("mine", "other"):
            numbers.put(request_id, 1, time.monotonic())
        call.cancel()
        await eventually(lambda: len(router.router.table) == 0)
        cluster.let_all_go()
        await collect(router.ask(request_id="mine", max_tokens=3))
        assert sorted(request.term.attempt for request in cluster.taken()) == [1, 2]


async def test_a_draining_router_refuses_new_requests_and_finishes_those_in_flight(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router(drain_timeout_s=10) as router:
        call = router.ask()
        (first,) = await cluster.read_until_paused(call)
        draining = asyncio.create_task(router.drain())
        await eventually(lambda: router.router.draining)
        await refused(collect(router.ask()), grpc.StatusCode.UNAVAILABLE)
        assert not draining.done()
        cluster.let_all_go()
        await finish(call, [first])
        await draining


async def test_at_the_end_of_a_drain_clients_get_unavailable_in_every_phase(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router(drain_timeout_s=0.1) as router:
        decoding = router.ask()
        await decoding.read()
        cluster.hold("started")
        queued = asyncio.create_task(collect(router.ask(request_id="queued")))
        await cluster.until_held()
        # Without a view of limits, a new request waits before it has an entry.
        for name in ("prefill-0", "prefill-1"):
            await cluster.leave(name)
        early = asyncio.create_task(collect(router.ask(request_id="early")))
        await eventually(lambda: router.router.table.slot_of("early") is not None)
        started_s = time.monotonic()
        await router.drain()
        assert time.monotonic() - started_s < 10
        assert len(router.router.table) == 0
        for reading in (rest_of(decoding), queued, early):
            await refused(reading, grpc.StatusCode.UNAVAILABLE, "draining")


async def test_a_cancel_between_two_sessions_ends_the_next_one_of_its_own_client_alone(
    cluster: ScriptedCluster,
) -> None:
    ours, others = (ask(request_id="mine", session=1, secret=letter * 16) for letter in (b"s", b"o"))
    async with cluster.router() as router:
        former = router.router.claims.claim_of("mine", 0, ours.secret)
        cluster.cluster.put_request(replace(former, router_id="gone"), 60.0)
        await router.stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))
        assert tokens_of(await rest_of(router.stub.Generate(others, timeout=60))) == answer(PROMPT, 20)
        *_, last = await rest_of(router.stub.Generate(ours, timeout=60))
        assert last.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED


async def test_a_re_attached_request_that_is_cancelled_before_it_is_looked_for_ends_where_the_client_is(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulation seeds 200276 and 100842: the last response counted from 0 and lacked withheld text."""
    received = (70, 71, 72)
    async with cluster.router() as router:

        async def stand_still(*_: object) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(router.router.claims, "open", stand_still)
        request = ask(request_id="mine", session=1, secret=SECRET)
        request.received.token_ids.extend(received)
        # The last character may begin a stop text, so the former router held it back.
        detokenizer = router.router.intake.tokenizer.detokenizer(PROMPT, ())
        text = "".join(map(detokenizer.push, received)) + detokenizer.flush()
        request.params.stop.append(f"{text[-1]} and so on")
        request.received.characters = len(text) - 1
        reading = asyncio.create_task(rest_of(router.stub.Generate(request, timeout=60)))
        await eventually(lambda: len(router.router.table) == 1)
        assert (await router.stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))).found
        (response,) = await reading
        assert response.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert (response.index, response.usage.completion_tokens) == (3, 3)
        assert response.text == text[-1]
        assert response.usage.prompt_tokens == len(PROMPT)
        for decode in cluster.decodes.values():
            await eventually(lambda decode=decode: ("mine", 1) in decode.aborted)  # type: ignore[misc]
