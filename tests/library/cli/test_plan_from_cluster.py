import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest

from kaveri.cli.observed_cluster import observe_cluster
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.errors import ConfigError
from kaveri.rpc.server import RpcServer
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_to_proto
from tests.support.command import run_kaveri

COUNT = 40


class ScriptedClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Router that reports a request per second, of 64 prompt and `answer_tokens` answer tokens."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.instances: list[InstanceStatus] = []
        self.answer_tokens = 1000

    async def GetClusterView(  # noqa: N802
        self, request: cluster_pb2.GetClusterViewRequest, context: Any
    ) -> cluster_pb2.GetClusterViewResponse:
        return cluster_pb2.GetClusterViewResponse(
            instances=[status_to_proto(one) for one in self.instances], store_connected=True
        )

    async def GetWorkload(  # noqa: N802
        self, request: cluster_pb2.GetWorkloadRequest, context: Any
    ) -> cluster_pb2.GetWorkloadResponse:
        ago_s = [float(number) for number in range(COUNT)]
        answered = cluster_pb2.SampledRequests(
            ended_ago_s=ago_s, prompt_tokens=[64] * COUNT, answer_tokens=[self.answer_tokens] * COUNT
        )
        return cluster_pb2.GetWorkloadResponse(
            router_instance_id=self._name, observed_s=float(COUNT), arrived_ago_s=ago_s, answered=answered
        )


@contextlib.asynccontextmanager
async def scripted_router(name: str) -> AsyncIterator[tuple[ScriptedClusterService, str]]:
    service = ScriptedClusterService(name)
    server = RpcServer("127.0.0.1", 0, ["kaveri.v1.ClusterService"])
    server.add(partial(cluster_pb2_grpc.add_ClusterServiceServicer_to_server, service))
    await server.start()
    try:
        yield service, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0.0)


def instance(name: str, role: Role, address: str, phases: Sequence[Phase] = ()) -> InstanceStatus:
    return InstanceStatus(InstanceRecord(name, 1, role, address, "m", phases=tuple(phases)), InstanceLoad())


def running(address: str, count: int) -> list[InstanceStatus]:
    engines = [
        instance(f"{phase.value}-{number}", Role.ENGINE, "127.0.0.1:1", [phase])
        for phase in (Phase.PREFILL, Phase.DECODE)
        for number in range(count)
    ]
    return [instance("router-0", Role.ROUTER, address), *engines]


async def test_a_router_whose_own_lease_has_run_out_is_passed_over_and_named_where_there_is_no_other() -> None:
    async with scripted_router("router-9") as (_, lost), scripted_router("router-0") as (service, address):
        service.instances = running(address, 1)
        seen = await observe_cluster(f"{lost},{address}")
        assert (seen.model, len(seen.samples)) == ("m", 1)
        with pytest.raises(ConfigError, match=f"--from-cluster: is {lost}; router-9 there is not in its own view"):
            await observe_cluster(lost)


async def test_an_overloaded_cluster_without_a_plan_is_shown_to_miss_all_the_same() -> None:
    async with scripted_router("router-0") as (service, address):
        service.instances = running(address, 3)
        ended = await asyncio.to_thread(
            run_kaveri,
            *("plan", "--from-cluster", address, "--profile", "opt-13b-a100", "--requests", "50"),
            *("--rate", "4", "--prefill-tp-pp", "1,1", "--decode-tp-pp", "1,1", "--json"),
            # An instance answers at most 4 requests in 1,000 steps.
            *("--slo-ttft-s", "1", "--slo-tpot-s", "0.05", "--max-batch", "4"),
        )
    *found, error = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "what runs: 3 prefill x TP 1 and 3 decode x TP 1, 6 GPUs" in "\n".join(found)
    assert found[-1] == "what runs misses 90%; there is no plan to compare it with"
    assert "--gpus: is 12; 4 requests/s need at least" in error


async def test_a_cluster_is_planned_again_by_what_all_its_routers_were_asked_for() -> None:
    plan = ("--profile", "opt-13b-a100", "--prefill-tp-pp", "1,1", "--decode-tp-pp", "1,1", "--requests", "50")
    # Small batches keep the search short: it simulates what instances serve in some seconds.
    plan += ("--slo-ttft-s", "2", "--slo-tpot-s", "0.2", "--max-batch", "8", "--json")
    async with scripted_router("router-0") as (first, address), scripted_router("router-1") as (second, other):
        for service in (first, second):
            service.answer_tokens = 16
            service.instances = [*running(address, 1), instance("router-1", Role.ROUTER, other)]
            service.instances.append(instance("decode-1", Role.ENGINE, "127.0.0.1:1", [Phase.DECODE]))
        asking = (
            asyncio.to_thread(run_kaveri, "plan", *plan, "--from-cluster", target, *more)
            for target, more in ((address, ("--burstiness", "1")), (other, ("--recorded",)))
        )
        planned, recorded = await asyncio.gather(*asking)
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)
    observed, attainment = found["observed"], found["running"]["attainment"]
    counts = [observed[name] for name in ("routers", "arrivals", "answers", "cut_short", "running")]
    assert counts == [2, 2 * COUNT, 2 * COUNT, 0, 0]
    assert found["rate_per_s"] == pytest.approx(2 * COUNT / observed["period_s"])
    assert [found["running"][phase]["count"] for phase in ("prefill", "decode")] == [1, 2]
    assert (found["running"]["gpus"], found["gpus"], found["advice"]) == (3, 2, "change")
    assert "2 GPUs are enough, and 3 run" in found["reason"]
    assert attainment["low"] >= 0.9
    assert recorded.returncode == 0, recorded.stderr
    assert json.loads(recorded.stdout)["rate_per_s"] > found["rate_per_s"]
