"""Sends orders from a router to other processes of the cluster: drains, phases and partners. Numbers the latter two."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import DrainWay, InstanceRecord, Phase, PhaseOrder, Role
from kaveri.errors import Unavailable
from kaveri.policy.flipping import OrderedPhases, check_order
from kaveri.policy.pairs import PartnerOrder
from kaveri.rpc.channels import Channels
from kaveri.timeouts import LEADER_LEASE_S
from kaveri.v1 import instance_pb2
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.wire.messages import drain_way_to_proto, phase_order_to_proto, phases_to_proto
from kaveri.wire.status import error_of

_FORWARD_TIMEOUT_S, _CALL_TIMEOUT_S = 5.0, 3.0


class InstanceOrders:
    """A router's orders to other processes. Not thread-safe."""

    def __init__(self, store: ClusterStore, channels: Channels, next_order: Callable[[], PhaseOrder | None]) -> None:
        """next_order: returns the number of the next order; None unless this router leads the cluster monitor."""
        self._store = store
        self._channels = channels
        self._next_order = next_order
        self.under_way: dict[str, OrderedPhases] = {}
        """This router's newest order to each instance, by id: loads may not show it yet."""
        self.partners: dict[str, PartnerOrder] = {}
        """This router's newest order of a partner to each instance, by id."""

    async def set_phases(
        self,
        record: InstanceRecord,
        phases: tuple[Phase, ...],
        deadline_s: float = 0.0,
        way: DrainWay = DrainWay.MIGRATE,
    ) -> instance_pb2.SetPhasesResponse | None:
        """Order an instance to serve exactly these phases. Returns None, without an order, unless this router leads.
        deadline_s, way: as in ServedPhases.order(). Raises InvalidArgument if the instance cannot serve them, or the
        last one of a phase would leave it, and Unavailable if the instance does not answer."""
        order = self._next_order()
        if order is None:
            return None
        check_order(self._store.view(), record.instance_id, phases, self.under_way)
        ordered = self.under_way[record.instance_id] = OrderedPhases(record.incarnation, order, phases)
        request = instance_pb2.SetPhasesRequest(
            instance_id=record.instance_id,
            incarnation=record.incarnation,
            phases=phases_to_proto(phases),
            deadline_s=deadline_s,
            drain=drain_way_to_proto(way),
            order=phase_order_to_proto(order),
        )
        response: instance_pb2.SetPhasesResponse
        accepted = False
        try:
            response = await self.call(record, "SetPhases", request)
            accepted = response.accepted
        finally:
            # If it failed, no load will ever show it; if only its answer was lost, the load shows it by now.
            if not accepted and self.under_way.get(record.instance_id) is ordered:
                del self.under_way[record.instance_id]
        return response

    async def set_partner(self, record: InstanceRecord, ordered: PartnerOrder) -> bool | None:
        """Pair an instance with another. Returns None, without an order, unless this router leads, and False if the
        instance has a newer order. Raises Unavailable if the instance does not answer."""
        order, accepted = self._next_order(), False
        if order is None:
            return None
        self.partners[record.instance_id] = ordered
        request = instance_pb2.SetPartnerRequest(
            instance_id=record.instance_id,
            incarnation=ordered.incarnation,
            partner_id=ordered.partner_id,
            order=phase_order_to_proto(order),
        )
        response: instance_pb2.SetPartnerResponse
        try:
            response = await self.call(record, "SetPartner", request)
            accepted = response.accepted
        finally:
            if not accepted and self.partners.get(record.instance_id) is ordered:
                del self.partners[record.instance_id]
        return accepted

    async def call(self, record: InstanceRecord, method: str, request: Any, authorization: bytes | None = None) -> Any:
        """Call a method of another process's InstanceService. Raises KaveriError."""
        metadata = (("authorization", authorization.decode()),) if authorization else None
        # Longer for a router: it may forward the call, so that the time covers two hops.
        timeout_s = _FORWARD_TIMEOUT_S if record.role is Role.ROUTER else _CALL_TIMEOUT_S
        with self._channels.calling(InstanceServiceStub, record.address) as stub:
            try:
                return await getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
            except aio.AioRpcError as rpc_error:
                error = error_of(rpc_error, peer=record.address)
                if rpc_error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    error = Unavailable(f"{record.instance_id} at {record.address} did not answer in {timeout_s:g} s")
                if isinstance(error, Unavailable) and error.retry_after_s is None:
                    error = Unavailable(error.reason, retry_after_s=LEADER_LEASE_S)
                raise error from rpc_error
