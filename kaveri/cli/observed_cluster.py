"""A cluster's recent workload and present instances, from its routers: for `kaveri plan --from-cluster`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kaveri.cli import options

if TYPE_CHECKING:
    from kaveri.domain.view import ClusterView
    from kaveri.planner.observed_workload import RouterSample
    from kaveri.v1 import cluster_pb2
    from kaveri.workload.requests import RequestLengths

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCluster:
    """One model's part of a cluster."""

    model: str
    """Name of the model at its routers."""
    view: "ClusterView"
    samples: "tuple[RouterSample, ...]"
    """Samples of all routers of the model."""


async def observe_cluster(target: str) -> ObservedCluster:
    """Query a cluster. target: routers, HOST:PORT with commas between them. The first that answers shows the cluster;
    then all routers of its model are queried. Raises KaveriError when one of them does not answer: its arrivals would
    be missing. Sends the key in KAVERI_API_KEY."""
    from grpc import aio

    from kaveri.client.api_key import find_api_key, key_metadata
    from kaveri.client.targets import check_targets
    from kaveri.domain.view import ClusterView, Role
    from kaveri.errors import ConfigError, KaveriError
    from kaveri.planner.observed_workload import FLAG
    from kaveri.rpc.server import open_channel
    from kaveri.v1 import cluster_pb2
    from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
    from kaveri.wire.messages import status_from_proto
    from kaveri.wire.status import error_of

    failure: KaveriError | None = None
    given: dict[str, Any] = {"timeout": _TIMEOUT_S, "metadata": key_metadata(find_api_key(None))}
    for one in check_targets(options.targets_of(target)):
        async with open_channel(one) as channel:
            stub = ClusterServiceStub(channel)
            try:
                shown = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), **given)
                first = await stub.GetWorkload(cluster_pb2.GetWorkloadRequest(), **given)
            except aio.AioRpcError as error:
                failure = failure or error_of(error, peer=one)
                continue
        instances = {each.record.instance_id: each for each in map(status_from_proto, shown.instances)}
        router = instances.get(first.router_instance_id)
        if router is None:
            reason = f"is {one}; {first.router_instance_id} there is not in its own view: its lease has run out"
            failure = failure or ConfigError(FLAG, reason)
            continue
        view = ClusterView(instances, shown.store_connected)
        found = {first.router_instance_id: first}
        model = router.record.model
        for name, instance in instances.items():
            if instance.record.role is Role.ROUTER and instance.record.model == model and name not in found:
                found[name] = await _workload_of(instance.record.address, given)
        return ObservedCluster(model=model, view=view, samples=tuple(map(sample_from_proto, found.values())))
    assert failure is not None
    raise failure


def sample_from_proto(message: "cluster_pb2.GetWorkloadResponse") -> "RouterSample":
    """Convert a router's answer."""
    from kaveri.planner.observed_workload import RouterSample

    return RouterSample(
        observed_s=message.observed_s,
        arrived_ago_s=tuple(message.arrived_ago_s),
        answered=tuple(zip(message.answered.ended_ago_s, _lengths(message.answered), strict=True)),
        cut_short_ago_s=tuple(message.cut_short.ended_ago_s),
        running=tuple(_lengths(message.running)),
    )


def _lengths(some: "cluster_pb2.SampledRequests") -> "list[RequestLengths]":
    from kaveri.workload.requests import RequestLengths

    return [RequestLengths(*each) for each in zip(some.prompt_tokens, some.answer_tokens, strict=True)]


async def _workload_of(address: str, given: dict[str, Any]) -> "cluster_pb2.GetWorkloadResponse":
    from grpc import aio

    from kaveri.rpc.server import open_channel
    from kaveri.v1 import cluster_pb2
    from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
    from kaveri.wire.status import error_of

    async with open_channel(address) as channel:
        try:
            answer: cluster_pb2.GetWorkloadResponse = await ClusterServiceStub(channel).GetWorkload(
                cluster_pb2.GetWorkloadRequest(), **given
            )
        except aio.AioRpcError as error:
            raise error_of(error, peer=address) from error
        return answer
