"""DrainService over gRPC: takes this process out of service and back. Routers forward calls for other processes."""

from typing import Any, Protocol

import grpc
from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, Role
from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.rpc.public_port import authorization_of
from kaveri.rpc.server import open_channel
from kaveri.security.callers import Callers
from kaveri.v1 import cluster_pb2
from kaveri.v1.cluster_pb2_grpc import DrainServiceServicer, DrainServiceStub
from kaveri.wire.status import abort, error_of

SERVICE_NAME = cluster_pb2.DESCRIPTOR.services_by_name["DrainService"].full_name
_PASS_ON_TIMEOUT_S = 5.0


class Drainable(Protocol):
    """Interface of a process that can be drained; ServiceHost implements it."""

    record: InstanceRecord

    async def drain(self) -> bool: ...
    async def undrain(self) -> bool: ...
    def load(self) -> InstanceLoad: ...


class DrainServer(DrainServiceServicer):
    """gRPC DrainService of one process: stops and resumes accepting requests. Not thread-safe: for one event loop."""

    def __init__(self, process: Drainable, store: ClusterStore, operators: Callers | None = None) -> None:
        """operators: checks that callers present an admin key; None: every caller that the port admits."""
        self._process = process
        self._store = store
        self._operators = operators

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.DrainResponse:
        try:
            if self._operators is not None:
                self._operators.check_admin(authorization_of(context.invocation_metadata()))
            record = self._named(request.instance_id)
            if record is not None:
                return await _passed_on(record, request)
            changed = await (self._process.undrain() if request.undo else self._process.drain())
        except KaveriError as error:
            await abort(context, error)
        load = self._process.load()
        return cluster_pb2.DrainResponse(changed=changed, requests=load.waiting_requests + load.running_requests)

    def _named(self, instance_id: str) -> InstanceRecord | None:
        """Record of the instance to forward to; None if it is this process. Raises InvalidArgument if unknown."""
        own = self._process.record
        if instance_id == own.instance_id:
            return None
        if own.role is not Role.ROUTER:
            # The caller meant the former instance at this address.
            raise InvalidArgument("instance_id", instance_id, f"{own.instance_id}, which answers at this address")
        instances = self._store.view().instances
        if instance_id not in instances:
            raise InvalidArgument("instance_id", instance_id, f"one of {', '.join(sorted(instances))}")
        record = instances[instance_id].record
        if record.role is Role.GATEWAY:
            raise Unavailable(f"{instance_id} is a gateway, which answers HTTP only: end it with SIGTERM")
        return record


async def _passed_on(record: InstanceRecord, request: cluster_pb2.DrainRequest) -> cluster_pb2.DrainResponse:
    async with open_channel(record.address) as channel:
        try:
            answer: cluster_pb2.DrainResponse = await DrainServiceStub(channel).Drain(
                request, timeout=_PASS_ON_TIMEOUT_S
            )
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                reason = f"{record.instance_id} at {record.address} did not answer in {_PASS_ON_TIMEOUT_S:g} s"
                raise Unavailable(reason) from error
            raise error_of(error, peer=record.address) from error
    return answer
