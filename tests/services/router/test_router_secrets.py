"""What opens a router's token stream is known to the instances that it calls, and to nothing else."""

from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import ask, collect


async def test_no_rpc_shows_what_opens_a_token_stream(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await collect(router.stub.Generate(ask(), timeout=60))
        (stream_id,) = {name for decode in cluster.decodes.values() for name in decode.subscribers}
        assert {request.router_id for request in cluster.taken()} == {stream_id}
        stub = cluster_pb2_grpc.ClusterServiceStub(router.channel)
        view = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), timeout=60)
        (record,) = [status.record for status in view.instances if status.record.role == cluster_pb2.ROLE_ROUTER]
        secret = stream_id.removeprefix(f"{record.instance_id}.{record.incarnation:016x}")
        assert len(secret) > 32
        assert secret.encode() not in view.SerializeToString()
