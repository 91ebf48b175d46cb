"""Asks a router which instances answer the requests."""

from grpc import aio

from kaveri.domain.view import Role
from kaveri.rpc.server import open_channel
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_from_proto

_TIMEOUT_S = 5.0
_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


async def engine_roles(target: str, model: str) -> dict[str, Role]:
    """The role of each engine instance of a model, by instance id; empty when the router does not report them.

    target: a router, "host:port".
    """
    async with open_channel(target) as channel:
        stub: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            view = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), timeout=_TIMEOUT_S)
        except aio.AioRpcError:
            return {}
    records = [status_from_proto(status).record for status in view.instances]
    return {record.instance_id: record.role for record in records if record.role in _ROLES and record.model == model}
