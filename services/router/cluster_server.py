"""The router's gRPC service for operators: the view of the cluster, and how single requests went."""

from kaveri.cluster.store import ClusterStore
from kaveri.errors import KaveriError
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_to_proto
from kaveri.wire.status import abort
from services.router.recent_requests import RecentRequests
from services.router.relay import ServicerContext


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """Answers for one router."""

    def __init__(self, store: ClusterStore, recent: RecentRequests) -> None:
        self._store = store
        self._recent = recent

    async def GetClusterView(  # noqa: N802
        self, request: cluster_pb2.GetClusterViewRequest, context: ServicerContext
    ) -> cluster_pb2.GetClusterViewResponse:
        view = self._store.view()
        return cluster_pb2.GetClusterViewResponse(
            instances=[status_to_proto(view.instances[instance_id]) for instance_id in sorted(view.instances)],
            store_connected=view.store_connected,
        )

    async def GetRequestAccount(  # noqa: N802
        self, request: cluster_pb2.GetRequestAccountRequest, context: ServicerContext
    ) -> cluster_pb2.GetRequestAccountResponse:
        try:
            return self._recent.account_of(request.request_id)
        except KaveriError as error:
            await abort(context, error)
