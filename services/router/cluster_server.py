"""The router's gRPC service for operators: the cluster's view, accounts of requests, and the recent workload."""

import time
from collections.abc import Mapping

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ViewedInstance
from kaveri.errors import KaveriError, Unauthenticated
from kaveri.rpc.public_port import authorization_of
from kaveri.security.callers import Callers
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.wire.messages import status_to_proto
from kaveri.wire.status import abort
from services.router.relay import ServicerContext
from services.router.request_table import RecentRequests


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """gRPC ClusterService of a router, for operators: cluster view, timing and steps of requests, recent workload."""

    def __init__(self, store: ClusterStore, recent: RecentRequests, operators: Callers | None = None) -> None:
        """operators: checks that callers present an admin key; None: every caller is allowed."""
        self._store = store
        self._recent = recent
        self._operators = operators

    async def GetClusterView(  # noqa: N802
        self, request: cluster_pb2.GetClusterViewRequest, context: ServicerContext
    ) -> cluster_pb2.GetClusterViewResponse:
        await self._check(context)
        view = self._store.view()
        return cluster_pb2.GetClusterViewResponse(
            instances=_statuses(view.instances),
            store_connected=view.store_connected,
            incompatible=_statuses(view.incompatible),
        )

    async def GetRequestAccount(  # noqa: N802
        self, request: cluster_pb2.GetRequestAccountRequest, context: ServicerContext
    ) -> cluster_pb2.GetRequestAccountResponse:
        await self._check(context)
        try:
            return self._recent.account_of(request.request_id)
        except KaveriError as error:
            await abort(context, error)

    async def GetWorkload(  # noqa: N802
        self, request: cluster_pb2.GetWorkloadRequest, context: ServicerContext
    ) -> cluster_pb2.GetWorkloadResponse:
        await self._check(context)
        return self._recent.workload(time.monotonic())

    async def _check(self, context: ServicerContext) -> None:
        try:
            if self._operators is not None:
                self._operators.check_admin(authorization_of(context.invocation_metadata()))
        except Unauthenticated as error:
            await abort(context, error)


def _statuses(instances: Mapping[str, ViewedInstance]) -> list[cluster_pb2.InstanceStatus]:
    return [status_to_proto(instances[instance_id]) for instance_id in sorted(instances)]
