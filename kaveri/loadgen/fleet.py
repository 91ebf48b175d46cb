"""Queries a router for the instances that answer the requests."""

from grpc import aio

from kaveri.client.api_key import find_api_key, key_metadata
from kaveri.domain.view import Phase, phases_now
from kaveri.rpc.server import open_channel
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_from_proto

_TIMEOUT_S = 5.0


async def engine_phases(target: str, model: str) -> dict[str, tuple[Phase, ...]]:
    """The phases of each engine instance of a model, by instance id; empty when the router does not report them.

    target: a router, "host:port". It is sent the key in KAVERI_API_KEY; one that asks for an admin key reports to no
    other. Raises InvalidArgument for a key that cannot be one.
    """
    metadata = key_metadata(find_api_key(None))
    async with open_channel(target) as channel:
        stub: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            request = cluster_pb2.GetClusterViewRequest()
            view = await stub.GetClusterView(request, timeout=_TIMEOUT_S, metadata=metadata)
        except aio.AioRpcError:
            return {}
    instances = [status_from_proto(status) for status in view.instances]
    return {
        one.record.instance_id: phases_now(one) for one in instances if one.record.phases and one.record.model == model
    }
