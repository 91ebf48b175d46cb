"""InstanceService over gRPC: orders to this process. Routers forward orders to other processes."""

from typing import Any, Protocol

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import DrainWay, InstanceLoad, InstanceRecord, Phase, PhaseOrder, Role
from kaveri.errors import InvalidArgument, KaveriError, Unavailable
from kaveri.hosting.orders import InstanceOrders
from kaveri.rpc.public_port import authorization_of
from kaveri.seconds import require_seconds
from kaveri.security.callers import Callers
from kaveri.timeouts import LEADER_LEASE_S
from kaveri.v1 import instance_pb2
from kaveri.v1.instance_pb2_grpc import InstanceServiceServicer
from kaveri.wire.messages import drain_way_from_proto, phase_order_from_proto, phase_order_to_proto, phases_from_proto
from kaveri.wire.status import abort

SERVICE_NAME = instance_pb2.DESCRIPTOR.services_by_name["InstanceService"].full_name


class OrderedProcess(Protocol):
    """Interface of a process that takes orders; ServiceHost implements it."""

    record: InstanceRecord

    async def drain(self) -> bool: ...
    async def undrain(self) -> bool: ...
    def order_phases(self, phases: tuple[Phase, ...], order: PhaseOrder, deadline_s: float, way: DrainWay) -> bool: ...
    def set_partner(self, partner_id: str, order: PhaseOrder) -> bool: ...
    def load(self) -> InstanceLoad: ...


class InstanceServer(InstanceServiceServicer):
    """gRPC InstanceService of one process. Not thread-safe: for one event loop."""

    def __init__(
        self,
        process: OrderedProcess,
        store: ClusterStore,
        operators: Callers | None = None,
        orders: InstanceOrders | None = None,
    ) -> None:
        """operators: checks that callers present an admin key; None: every caller that the port admits. orders: of a
        router, to forward orders."""
        self._process = process
        self._store = store
        self._orders = orders
        self._operators = operators

    async def SetPhases(  # noqa: N802
        self, request: instance_pb2.SetPhasesRequest, context: aio.ServicerContext[Any, Any]
    ) -> instance_pb2.SetPhasesResponse:
        try:
            self._check_operator(context)
            require_seconds("deadline_s", request.deadline_s)
            record = self._named(request.instance_id)
            if record is not None:
                return await self._forward(record, request, context)
            accepted = self._order(request)
        except KaveriError as error:
            await abort(context, error)
        newest = request.order if accepted else phase_order_to_proto(self._process.load().phase_order)
        incarnation = self._process.record.incarnation
        return instance_pb2.SetPhasesResponse(accepted=accepted, order=newest, incarnation=incarnation)

    async def SetPartner(  # noqa: N802
        self, request: instance_pb2.SetPartnerRequest, context: aio.ServicerContext[Any, Any]
    ) -> instance_pb2.SetPartnerResponse:
        try:
            self._check_operator(context)
            if request.instance_id != self._process.record.instance_id:
                raise InvalidArgument("instance_id", request.instance_id, f"{self._process.record.instance_id}, here")
            accepted = self._process.set_partner(request.partner_id, self._order_of(request))
        except KaveriError as error:
            await abort(context, error)
        return instance_pb2.SetPartnerResponse(accepted=accepted)

    async def Drain(  # noqa: N802
        self, request: instance_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> instance_pb2.DrainResponse:
        try:
            self._check_operator(context)
            record = self._named(request.instance_id)
            if record is not None:
                assert self._orders is not None, "only routers forward"
                response: instance_pb2.DrainResponse = await self._orders.call(record, "Drain", request)
                return response
            changed = await (self._process.undrain() if request.undo else self._process.drain())
        except KaveriError as error:
            await abort(context, error)
        load = self._process.load()
        return instance_pb2.DrainResponse(changed=changed, requests=load.waiting_requests + load.running_requests)

    def _check_operator(self, context: aio.ServicerContext[Any, Any]) -> None:
        if self._operators is not None:
            self._operators.check_admin(authorization_of(context.invocation_metadata()))

    def _order(self, request: instance_pb2.SetPhasesRequest) -> bool:
        """Apply an order to this process."""
        order, way = self._order_of(request), drain_way_from_proto(request.drain)
        return self._process.order_phases(_phases(request), order, request.deadline_s, way)

    def _order_of(self, request: instance_pb2.SetPhasesRequest | instance_pb2.SetPartnerRequest) -> PhaseOrder:
        """Return the number of an order to this process. Raises InvalidArgument unless it is meant for its engine."""
        own = self._process.record
        if own.role is not Role.ENGINE:
            raise InvalidArgument("instance_id", own.instance_id, f"of an engine, not of a {own.role}")
        if not request.HasField("order"):
            raise InvalidArgument("order", "unset", "set here: the router that leads numbers orders; ask a router")
        if request.incarnation != own.incarnation:
            raise InvalidArgument("incarnation", request.incarnation, f"{own.incarnation}, the one that answers")
        return phase_order_from_proto(request.order)

    async def _forward(
        self,
        record: InstanceRecord,
        request: instance_pb2.SetPhasesRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> instance_pb2.SetPhasesResponse:
        """Number an operator's order and send it to its instance; or send it to the router that leads."""
        if request.HasField("order"):
            raise InvalidArgument("order", "set", "unset: the router that leads numbers the order")
        phases = _phases(request)
        if request.incarnation not in (0, record.incarnation):
            raise InvalidArgument("incarnation", request.incarnation, f"{record.incarnation}, its present one")
        orders = self._orders
        assert orders is not None, "only routers forward"
        response = await orders.set_phases(record, phases, request.deadline_s, drain_way_from_proto(request.drain))
        if response is not None:
            return response
        leader, forwarded = self._store.view().leader(), instance_pb2.SetPhasesRequest()
        if leader is None or request.forwarded or leader.record.instance_id == self._process.record.instance_id:
            raise Unavailable("no router leads the cluster now", retry_after_s=LEADER_LEASE_S)
        forwarded.CopyFrom(request)
        forwarded.forwarded = True
        # The leader checks the caller as well.
        authorization = authorization_of(context.invocation_metadata())
        passed_on: instance_pb2.SetPhasesResponse
        passed_on = await orders.call(leader.record, "SetPhases", forwarded, authorization)
        return passed_on

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


def _phases(request: instance_pb2.SetPhasesRequest) -> tuple[Phase, ...]:
    try:
        phases = phases_from_proto(request.phases)
    except KeyError:
        phases = ()
    if len(set(phases)) < len(request.phases):
        raise InvalidArgument("phases", str(list(request.phases)), f"of {', '.join(Phase)}, each once")
    return phases
