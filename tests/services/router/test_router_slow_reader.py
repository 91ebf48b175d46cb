import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio
from prometheus_client import REGISTRY
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kaveri.errors import SlowReader
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.engine_door import asks
from tests.services.router.scripted_answers import (
    PROMPT,
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

TOKENS = 7_000
LIMIT_S = 0.5
WINDOW_BYTES = 2**16


@contextlib.asynccontextmanager
async def client(router: RouterUnderTest) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    """A client whose HTTP/2 window stays at 64 KiB, so that unread bytes block the router."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
    async with plain_channel(router.address, options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def large(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request with an answer of 1.5 MB, far above the window."""
    return ask(max_tokens=TOKENS, logprobs=20, **fields)


def ended_count(outcome: str) -> float:
    return REGISTRY.get_sample_value("kaveri_router_requests_total", {"outcome": outcome}) or 0.0


def unread_count() -> float:
    return REGISTRY.get_sample_value("kaveri_router_unread_answers") or 0.0


def all_is_free(cluster: ScriptedCluster, router: RouterUnderTest) -> bool:
    prefills, decodes = cluster.prefills.values(), cluster.decodes.values()
    legs = [*(prefill.open_requests for prefill in prefills), *(len(decode.running) for decode in decodes)]
    return not any(legs) and not len(router.router.table)


async def test_a_client_that_stops_reading_loses_its_request_and_frees_everything(cluster: ScriptedCluster) -> None:
    before = ended_count("slow_reader")
    # Only an abort ends it at decode.
    cluster.decodes["decode-0"].pause_at = TOKENS - 1
    async with cluster.router(slow_reader_s=LIMIT_S) as router, client(router) as stub:
        call = stub.Generate(large(request_id="mute"), timeout=60)
        first = await call.read()
        began_s = time.monotonic()
        await eventually(lambda: all_is_free(cluster, router), 20)
        assert time.monotonic() - began_s >= LIMIT_S / 2
        await router.check_integrity()
        assert ended_count("slow_reader") == before + 1
        assert any(request_id == "mute" for request_id, _ in cluster.decodes["decode-0"].aborted)
        again = ask(request_id="mute", max_tokens=3)
        cluster.let_all_go()
        assert tokens_of(await collect(router.stub.Generate(again, timeout=60))) == answer(PROMPT, 3)
        responses = [first]
        caught = await refused(rest_of(call, responses), grpc.StatusCode.ABORTED)
        error = error_of(caught)
        assert isinstance(error, SlowReader)
        assert error.limit_s == LIMIT_S
        read = tokens_of(responses)
        assert read == answer(PROMPT, TOKENS)[: len(read)]


async def test_a_client_that_reads_slowly_gets_its_whole_answer(cluster: ScriptedCluster) -> None:
    async with cluster.router(slow_reader_s=1.0) as router, client(router) as stub:
        call = stub.Generate(large(), timeout=60)
        responses, unpaused_bytes, pauses = [], 0, 0
        while (response := await call.read()) is not aio.EOF:
            responses.append(response)
            unpaused_bytes += response.ByteSize()
            if unpaused_bytes > WINDOW_BYTES:
                await asyncio.sleep(0.3)
                unpaused_bytes, pauses = 0, pauses + 1
        assert tokens_of(responses) == answer(PROMPT, TOKENS)
        assert pauses * 0.3 > 2 * 1.0


async def test_an_answer_that_pauses_longer_than_the_limit_is_not_cut_off(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    async with cluster.router(slow_reader_s=0.2) as router:
        collecting = asyncio.create_task(collect(router.ask()))
        await eventually(lambda: cluster.decodes["decode-0"].is_paused)
        await asyncio.sleep(0.7)
        assert not collecting.done()
        cluster.let_all_go()
        assert tokens_of(await collecting) == answer(PROMPT, 20)


async def test_clients_that_never_read_their_error_do_not_pile_up(cluster: ScriptedCluster) -> None:
    """gRPC keeps a call until its client reads the end or disconnects."""
    async with cluster.router(slow_reader_s=LIMIT_S, max_requests=2) as router, client(router) as stub:
        calls = [stub.Generate(large(request_id=f"mute-{number}"), timeout=60) for number in range(2)]
        for call in calls:
            await call.read()
        await eventually(lambda: all_is_free(cluster, router) and unread_count() == 2, 20)
        await refused(collect(router.ask()), grpc.StatusCode.RESOURCE_EXHAUSTED, "read")
        calls[0].cancel()
        await eventually(lambda: unread_count() == 1)
        await finish(router.ask())
        calls[1].cancel()
        await eventually(lambda: unread_count() == 0)


async def test_the_fields_grpc_gives_up_on_such_a_client_too(cluster: ScriptedCluster) -> None:
    before = ended_count("slow_reader")
    cluster.decodes["decode-0"].pause_at = TOKENS - 1
    asked = asks(stream=True, max_tokens=TOKENS, logprobs=20, n=2)
    options = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
    async with (
        cluster.router(slow_reader_s=LIMIT_S, vllm_grpc=True) as router,
        plain_channel(router.address, options) as channel,
    ):
        call = VllmEngineStub(channel).Generate(asked, timeout=60)
        await call.read()
        await eventually(lambda: all_is_free(cluster, router), 20)
        await router.check_integrity()
        assert ended_count("slow_reader") > before
        await eventually(lambda: unread_count() == 1)
        cluster.let_all_go()
        caught = await refused(rest_of(call), grpc.StatusCode.ABORTED)
        assert isinstance(error_of(caught), SlowReader)
        await eventually(lambda: unread_count() == 0)
