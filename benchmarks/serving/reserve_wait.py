"""How long it takes from room on a full decode instance to its grant: requests that wait in line, and ones that poll.

A real decode instance with the fake engine behind gRPC on loopback. Requests hold the whole pool, and the same number
of others want room. Then one that holds room is aborted, again and again. The time runs from the Abort call to the
answer that grants the room. Waiting requests have asked once, with `wait`. Of polling ones the first in line asks every
100 ms, as those of a prefill instance did before Reserve could wait. Both take turns. The abort is the slow case: its
blocks come free without an event at the service.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry

from benchmarks.support.harness import Options, Report, run
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.sampling import SamplingParams
from kaveri.engine.factory import build_engine
from kaveri.rpc.server import open_channel
from kaveri.telemetry.logs import configure_logs
from kaveri.v1 import decode_pb2, feed_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.messages import layout_to_proto, params_to_proto
from services.instance.config import DecodeConfig
from services.instance.service import instance_host

BLOCK_BYTES = 4096
BLOCKS_EACH = 4
PROMPT_TOKENS = 16 * BLOCKS_EACH - 1
"""With the token that follows they fill their blocks."""
POLL_S = 0.1
TARGET_S = 0.005
ROUTER_ID = "router"
TERM = term_pb2.Term(attempt=1)


class Decode:
    """One decode instance, asked by hand."""

    def __init__(self, stub: DecodeServiceStub, layout: object) -> None:
        self._stub = stub
        self._layout = layout

    async def reserve(self, request_id: str, wait: bool) -> bool:
        """Whether there is room."""
        message = decode_pb2.ReserveRequest(
            request_id=request_id,
            term=TERM,
            router_id=ROUTER_ID,
            token_ids=[1] * PROMPT_TOKENS,
            params=params_to_proto(SamplingParams(max_tokens=5, seed=0)),
            timeout_s=600.0,
            layout=self._layout,
            wait=wait,
        )
        try:
            await self._stub.Reserve(message, timeout=600.0)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False
        return True

    async def abort(self, request_id: str) -> None:
        attempt = decode_pb2.AttemptId(request_id=request_id, term=TERM, router_id=ROUTER_ID)
        await self._stub.Abort(feed_pb2.AbortRequest(attempts=[attempt]), timeout=60.0)


@contextlib.asynccontextmanager
async def decode_instance(holders: int) -> AsyncIterator[Decode]:
    """Its pool holds so many requests."""
    config = DecodeConfig(
        instance_id="decode",
        engine="fake",
        model="fake",
        max_model_len=16 * BLOCKS_EACH,
        kv_cache_memory=holders * BLOCKS_EACH * BLOCK_BYTES,
        reservation_ttl_s=600.0,
    )
    engine = build_engine(config)
    stopping = asyncio.Event()
    async with MemoryStore(MemoryCluster()) as store:
        host = instance_host(config, engine, store, random.Random(0), CollectorRegistry())
        serving = asyncio.create_task(host.serve(stopping))
        await host.started.wait()
        async with open_channel(host.address) as channel:
            stub = DecodeServiceStub(channel)
            stream = FeedServiceStub(channel).Follow(feed_pb2.FollowRequest(router_id=ROUTER_ID))
            await stream.read()
            yield Decode(stub, layout_to_proto(engine.info.layout))
            stream.cancel()
        stopping.set()
        await serving


async def granted_s(decode: Decode, request_id: str, wait: bool, first: asyncio.Lock) -> float:
    """When the request gets room."""
    if wait:
        assert await decode.reserve(request_id, wait)
        return time.perf_counter()
    async with first:
        while not await decode.reserve(request_id, wait):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    return time.perf_counter()


async def delays_s(holders: int, wait: bool) -> list[float]:
    """From each abort to the next grant."""
    async with decode_instance(holders) as decode:
        for number in range(holders):
            assert await decode.reserve(f"holds {number}", wait=False)
        first = asyncio.Lock()
        asking = {asyncio.create_task(granted_s(decode, f"wants {number}", wait, first)) for number in range(holders)}
        await asyncio.sleep(2 * POLL_S)
        found = []
        for number in range(holders):
            begin_s = time.perf_counter()
            await decode.abort(f"holds {number}")
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            found.append(min(task.result() for task in done) - begin_s)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return found


async def measure_async(options: Options, report: Report) -> None:
    repeats = options.choose(5, 1)
    report.workload = {"engine": "fake", "blocks_per_request": BLOCKS_EACH, "poll_s": POLL_S}
    for holders in (1, 16, 64):
        found: dict[bool, list[float]] = {True: [], False: []}
        await delays_s(holders, wait=True)
        for _ in range(repeats * (8 if holders == 1 else 1)):
            for wait, delays in found.items():
                delays += await delays_s(holders, wait)
        p50_s = {}
        for wait, delays in found.items():
            kind = "waiting" if wait else "polling"
            p50_s[wait] = report.row(
                "room to grant", [1e3 * delay_s for delay_s in delays], "ms", kind=kind, requests=holders
            )
        report.ratio(f"asked for (5 ms) / p50, {holders} waiting", 1e3 * TARGET_S / p50_s[True], 1.0)
        report.ratio(f"p50, polling / waiting, {holders} requests", p50_s[False] / p50_s[True])
        p99_ms = 1e3 * statistics.quantiles(found[True], n=100)[98]
        report.note(f"{holders} waiting: p99 {p99_ms:.1f} ms")
    report.note("client and decode instance share one process and event loop; a network adds its round trip")


def measure(options: Options, report: Report) -> None:
    """Waiting and polling requests on instances of their own, in turn."""
    configure_logs("benchmark", "reserve_wait", "error")
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.reserve_wait", measure, description=__doc__)
