"""Queries a cluster's routers for its instances and recent requests, for `kaveri plan --from-cluster`."""

from dataclasses import dataclass

from grpc import aio

from kaveri.cli.routers import call_options, cluster_view, first_answer, open_channels
from kaveri.domain.view import ClusterView, InstanceRecord, Role
from kaveri.errors import ConfigError
from kaveri.planner.observed_workload import FLAG, RouterSample
from kaveri.rpc.server import open_channel
from kaveri.v1.cluster_pb2 import GetWorkloadRequest, GetWorkloadResponse, SampledRequests
from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
from kaveri.wire.status import error_of
from kaveri.workload.requests import RequestLengths

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCluster:
    """Instances that serve one model, and the recent requests that each router reports."""

    model: str
    view: ClusterView
    samples: tuple[RouterSample, ...]


async def observe_cluster(target: str) -> ObservedCluster:
    """Query all routers of a model. target: HOST:PORT, comma-separated; the first router that answers lists the others.
    Raises KaveriError if one does not answer, because its requests would be missing."""
    async with open_channels(target) as channels:
        view, router, first = await first_answer(channels, _look)
    samples = [first]
    for name, instance in view.instances.items():
        record = instance.record
        if record.role is Role.ROUTER and record.model == router.model and name != router.instance_id:
            async with open_channel(record.address) as channel:
                try:
                    samples.append(await _workload(channel))
                except aio.AioRpcError as error:
                    raise error_of(error, peer=record.address) from error
    return ObservedCluster(model=router.model, view=view, samples=tuple(map(sample_from_proto, samples)))


async def _look(target: str, channel: aio.Channel) -> tuple[ClusterView, InstanceRecord, GetWorkloadResponse]:
    """Query a router for its view of the cluster, its own entry in that view, and its recent requests."""
    view, workload = await cluster_view(channel, _TIMEOUT_S), await _workload(channel)
    router = view.instances.get(workload.router_instance_id)
    if router is None:
        reason = f"is {target}; {workload.router_instance_id} there is not in its own view: its lease has run out"
        raise ConfigError(FLAG, reason)
    return view, router.record, workload


async def _workload(channel: aio.Channel) -> GetWorkloadResponse:
    answer: GetWorkloadResponse = await ClusterServiceStub(channel).GetWorkload(
        GetWorkloadRequest(), **call_options(_TIMEOUT_S)
    )
    return answer


def sample_from_proto(message: GetWorkloadResponse) -> RouterSample:
    return RouterSample(
        observed_s=message.observed_s,
        arrived_ago_s=tuple(message.arrived_ago_s),
        answered=tuple(zip(message.answered.ended_ago_s, _lengths(message.answered), strict=True)),
        cut_short_ago_s=tuple(message.cut_short.ended_ago_s),
        running=tuple(_lengths(message.running)),
    )


def _lengths(some: SampledRequests) -> list[RequestLengths]:
    return [RequestLengths(*each) for each in zip(some.prompt_tokens, some.answer_tokens, strict=True)]
