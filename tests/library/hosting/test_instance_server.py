import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from kaveri.client.api_key import key_metadata
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.view import BOTH_PHASES, FIRST_ORDER, DrainWay, InstanceLoad, InstanceState, Phase, PhaseOrder, Role
from kaveri.errors import InvalidArgument, KaveriError, Unauthenticated, Unavailable
from kaveri.hosting.orders import InstanceOrders
from kaveri.hosting.service_host import ServiceHost, service_record
from kaveri.policy.pairs import PartnerOrder
from kaveri.rpc.channels import Channels
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import check_health, open_channel
from kaveri.security.api_keys import KeyLimits
from kaveri.security.callers import Callers, make_callers
from kaveri.security.keys_file import add_key
from kaveri.v1 import instance_pb2
from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
from kaveri.wire.messages import drain_way_to_proto, phase_order_from_proto, phase_order_to_proto, phases_to_proto
from kaveri.wire.status import error_of
from tests.library.hosting.idle_service import IdleService

SOON_S = 60.0


class Work(IdleService):
    """A service with three requests until it is made idle."""

    def __init__(self) -> None:
        super().__init__()
        self.drained = asyncio.Event()
        self.idle = asyncio.Event()
        self.order = FIRST_ORDER
        self.phases = BOTH_PHASES
        self.way = DrainWay.MIGRATE
        self.fencing_token = 0
        self.next_order: Callable[[], PhaseOrder | None] = lambda: None

    def load(self) -> InstanceLoad:
        phases = self.phases if not self.fencing_token else ()
        return InstanceLoad(
            waiting_requests=1,
            running_requests=2,
            phases=phases,
            phase_order=self.order,
            fencing_token=self.fencing_token,
        )

    def drain(self) -> None:
        super().drain()
        self.drained.set()

    async def wait_idle(self) -> None:
        await self.idle.wait()


class OrderedHost(ServiceHost):
    """A host that records its orders; one of an engine accepts them."""

    def order_phases(self, phases: Collection[Phase], order: PhaseOrder, deadline_s: float, way: DrainWay) -> bool:
        if self.record.role is not Role.ENGINE:
            return super().order_phases(phases, order, deadline_s, way)
        work = self._hosted
        assert isinstance(work, Work)
        accepted = order >= work.order
        if accepted:
            work.order, work.phases, work.way = order, tuple(phases), way
        return accepted

    def set_partner(self, partner_id: str, order: PhaseOrder) -> bool:
        if self.record.role is not Role.ENGINE:
            return super().set_partner(partner_id, order)
        return partner_id == "decode-1"


@dataclass
class Process:
    host: ServiceHost
    work: Work
    stopping: asyncio.Event
    serving: asyncio.Task[int]
    stub: Any

    async def ask(self, method: str, instance_id: str, secret: str = "") -> Any:
        request = instance_pb2.DrainRequest(instance_id=instance_id, undo=method == "undrain")
        try:
            return await self.stub.Drain(request, timeout=SOON_S, metadata=key_metadata(secret))
        except aio.AioRpcError as error:
            raise error_of(error) from error

    async def set_phases(self, instance_id: str, *phases: Phase, secret: str = "", **fields: Any) -> Any:
        request = instance_pb2.SetPhasesRequest(instance_id=instance_id, phases=phases_to_proto(phases), **fields)
        try:
            return await self.stub.SetPhases(request, timeout=SOON_S, metadata=key_metadata(secret))
        except aio.AioRpcError as error:
            raise error_of(error) from error

    async def set_partner(self, instance_id: str, partner_id: str = "decode-1", **fields: Any) -> bool:
        request = instance_pb2.SetPartnerRequest(instance_id=instance_id, partner_id=partner_id, **fields)
        try:
            return (await self.stub.SetPartner(request, timeout=SOON_S)).accepted
        except aio.AioRpcError as error:
            raise error_of(error) from error


@contextlib.asynccontextmanager
async def running(
    cluster: MemoryCluster, instance_id: str, role: Role, operators: Callers | None = None
) -> AsyncIterator[Process]:
    config = ServiceConfig(instance_id=instance_id, heartbeat_interval_s=0.02)
    work, stopping = Work(), asyncio.Event()
    async with MemoryStore(cluster) as store:
        record = service_record(config, role, "model", 1)
        if role is Role.ENGINE:
            record = replace(record, phases=BOTH_PHASES)
        channels = Channels()
        orders = InstanceOrders(store, channels, lambda: work.next_order())  # noqa: PLW0108 - it is replaced
        host = OrderedHost(config, store, record, work, (), lambda _: None, operators=operators, orders=orders)
        serving = asyncio.create_task(host.serve(stopping))
        await asyncio.wait_for(host.started.wait(), SOON_S)
        async with open_channel(host.address) as channel:
            yield Process(host, work, stopping, serving, InstanceServiceStub(channel))
        stopping.set()
        work.idle.set()
        await asyncio.wait_for(serving, SOON_S)
        await channels.close()


async def shows(cluster: MemoryCluster, instance_id: str, state: InstanceState) -> None:
    """Wait until the cluster's view has the instance in `state`."""
    async with MemoryStore(cluster) as store, asyncio.timeout(SOON_S):
        while (status := store.view().instances.get(instance_id)) is None or status.load.state is not state:
            await store.wait_for_change(0.05)


async def test_a_process_is_drained_and_put_back_once_however_often_it_is_asked() -> None:
    cluster = MemoryCluster()
    async with running(cluster, "decode-0", Role.ENGINE) as decode:
        for method, state, told in (
            ("drain", InstanceState.DRAINING, ["drain"]),
            ("undrain", InstanceState.READY, ["drain", "undrain"]),
            ("drain", InstanceState.DRAINING, ["drain", "undrain", "drain"]),
        ):
            assert (await decode.ask(method, "decode-0")).changed
            again = await decode.ask(method, "decode-0")
            assert not again.changed
            assert again.requests == 3
            assert decode.work.calls == told
            await shows(cluster, "decode-0", state)
            assert await check_health(decode.host.address, SOON_S) is (state is InstanceState.READY)
        assert not decode.serving.done()


async def test_a_router_passes_on_what_concerns_others_and_names_those_that_there_are() -> None:
    cluster = MemoryCluster()
    async with running(cluster, "decode-0", Role.ENGINE) as decode, running(cluster, "router-0", Role.ROUTER) as router:
        await shows(cluster, "decode-0", InstanceState.READY)
        assert (await router.ask("drain", "decode-0")).requests == 3
        assert (decode.work.calls, router.work.calls) == (["drain"], [])
        assert (await router.ask("undrain", "decode-0")).changed
        assert (await router.ask("drain", "router-0")).changed
        for method in ("drain", "undrain"):
            with pytest.raises(InvalidArgument, match=r"'decode-9'; it must be one of decode-0, router-0"):
                await router.ask(method, "decode-9")
            with pytest.raises(InvalidArgument, match="which answers at this address"):
                await decode.ask(method, "decode-1")


async def test_a_process_that_is_ending_cannot_be_put_back() -> None:
    async with running(MemoryCluster(), "decode-0", Role.ENGINE) as decode:
        decode.stopping.set()
        await asyncio.wait_for(decode.work.drained.wait(), SOON_S)
        assert not (await decode.ask("drain", "decode-0")).changed
        with pytest.raises(Unavailable, match="decode-0 is ending"):
            await decode.ask("undrain", "decode-0")


async def test_an_instance_that_cannot_be_reached_is_named() -> None:
    cluster = MemoryCluster()
    async with running(cluster, "router-0", Role.ROUTER) as router, MemoryStore(cluster) as store:
        config = ServiceConfig(instance_id="decode-0")
        record = service_record(config, Role.ENGINE, "model", 1)
        await store.heartbeat(replace(record, address="127.0.0.1:1"), InstanceLoad(1))
        with pytest.raises(KaveriError, match=r"cannot reach 127\.0\.0\.1:1"):
            await router.ask("drain", "decode-0")


async def test_where_there_are_api_keys_a_drain_wants_the_key_of_an_operator(tmp_path: Path) -> None:
    keys_file = str(tmp_path / "keys.toml")
    user = add_key(keys_file, "user", KeyLimits())
    operator = add_key(keys_file, "operator", KeyLimits(), is_admin=True)
    cluster = MemoryCluster()
    operators = make_callers(keys_file, "", "cluster")
    async with (
        running(cluster, "router-0", Role.ROUTER, operators) as router,
        running(cluster, "decode-0", Role.ENGINE) as decode,
    ):
        await shows(cluster, "decode-0", InstanceState.READY)
        for method in ("drain", "undrain"):
            for secret, reason in (("", "no API key"), ("none", "unknown"), (user, "key user is no admin key")):
                for instance in ("router-0", "decode-0"):
                    with pytest.raises(Unauthenticated, match=reason):
                        await router.ask(method, instance, secret)
        assert not router.work.calls
        assert not decode.work.calls
        assert (await router.ask("drain", "router-0", operator)).changed
        assert (await router.ask("undrain", "router-0", operator)).changed
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(InvalidArgument):
                    assert (await router.ask("drain", "decode-0", operator)).changed
                    break
                await asyncio.sleep(0.02)


def leading(router: Process, token: int) -> None:
    """Make the router lead the cluster monitor with this token."""
    numbers = itertools.count(1)
    router.work.fencing_token = token
    router.work.next_order = lambda: PhaseOrder(token, next(numbers))


@contextlib.asynccontextmanager
async def two_routers(operators: Callers | None = None) -> AsyncIterator[tuple[Process, Process, Process, Process]]:
    """Two routers, of which the second leads, and two instances."""
    cluster = MemoryCluster()
    async with (
        running(cluster, "router-0", Role.ROUTER, operators) as follower,
        running(cluster, "router-1", Role.ROUTER, operators) as leader,
        running(cluster, "decode-0", Role.ENGINE) as first,
        running(cluster, "decode-1", Role.ENGINE) as second,
    ):
        leading(leader, 7)
        async with asyncio.timeout(SOON_S):
            for router in (follower, leader):
                view = router.host._store.view
                while len(view().instances) < 4 or view().leader() is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        yield follower, leader, first, second


async def test_the_router_that_leads_numbers_an_order_and_any_other_passes_it_on() -> None:
    async with two_routers() as (follower, leader, first, second):
        for number, router in enumerate((leader, follower), 1):
            answer = await router.set_phases("decode-0", Phase.DECODE)
            assert (answer.accepted, answer.incarnation) == (True, 1)
            assert phase_order_from_proto(answer.order) == PhaseOrder(7, number)
        assert (first.work.phases, second.work.phases) == ((Phase.DECODE,), BOTH_PHASES)
        # By an order that no heartbeat may show yet.
        with pytest.raises(InvalidArgument, match="no other instance serves it"):
            await follower.set_phases("decode-1", Phase.DECODE)


async def test_an_order_says_what_becomes_of_the_requests_of_a_phase_that_ends() -> None:
    async with two_routers() as (follower, _, first, _):
        for way in DrainWay:
            await follower.set_phases("decode-0", Phase.DECODE, drain=drain_way_to_proto(way))
            assert first.work.way is way
        # As a caller of a former version does not say it.
        first.work.way = DrainWay.FINISH
        await follower.set_phases("decode-0", Phase.DECODE)
        assert first.work.way is DrainWay.MIGRATE


async def test_an_order_that_was_not_carried_out_is_not_under_way() -> None:
    async with two_routers() as (_, leader, first, _):
        orders = leader.host.orders
        assert orders is not None
        record = first.host.record
        with pytest.raises(Unavailable):
            await orders.set_phases(replace(record, address="127.0.0.1:1"), (Phase.DECODE,))
        assert not orders.under_way
        first.work.order = PhaseOrder(9, 1)
        answer = await orders.set_phases(record, (Phase.DECODE,))
        assert answer is not None
        assert not answer.accepted
        assert not orders.under_way


async def test_without_a_leader_an_order_is_refused_with_a_time_to_try_again() -> None:
    async with two_routers() as (follower, leader, first, _):
        # It does not lead any more, which the other one does not know yet.
        leader.work.next_order = lambda: None
        for router in (follower, leader):
            with pytest.raises(Unavailable, match="no router leads") as refused:
                await router.set_phases("decode-0", Phase.DECODE)
            assert refused.value.retry_after_s
        assert first.work.order == FIRST_ORDER


async def test_an_instance_refuses_an_order_that_a_newer_one_has_replaced() -> None:
    async with two_routers() as (_, _, first, _):
        for order, accepted in ((PhaseOrder(7, 3), True), (PhaseOrder(6, 9), False), (PhaseOrder(7, 3), True)):
            answer = await first.set_phases("decode-0", Phase.DECODE, incarnation=1, order=phase_order_to_proto(order))
            assert answer.accepted is accepted
            assert phase_order_from_proto(answer.order) == PhaseOrder(7, 3)


async def test_only_an_instance_with_an_engine_takes_a_numbered_order_of_a_partner() -> None:
    order = {"order": phase_order_to_proto(PhaseOrder(7, 1))}
    async with two_routers() as (_, leader, first, _):
        assert await first.set_partner("decode-0", incarnation=1, **order)
        assert not await first.set_partner("decode-0", "decode-2", incarnation=1, **order)
        for field, process, name, fields in (
            ("instance_id", first, "decode-1", {"incarnation": 1} | order),
            ("instance_id", leader, "router-1", {"incarnation": 1} | order),
            ("instance_id", leader, "decode-0", {"incarnation": 1} | order),
            ("incarnation", first, "decode-0", order),
            ("order", first, "decode-0", {"incarnation": 1}),
        ):
            with pytest.raises(InvalidArgument) as refused:
                await process.set_partner(name, **fields)
            assert refused.value.field == field, (name, fields)


async def test_an_order_of_a_partner_that_fails_is_not_under_way() -> None:
    async with two_routers() as (_, leader, first, _):
        channels, record = Channels(), first.host.record
        orders = InstanceOrders(leader.host._store, channels, lambda: PhaseOrder(7, 1))
        assert await orders.set_partner(record, PartnerOrder("decode-0", 1, "decode-1"))
        assert orders.partners == {"decode-0": PartnerOrder("decode-0", 1, "decode-1")}
        assert not await orders.set_partner(record, PartnerOrder("decode-0", 1, "decode-2"))
        with pytest.raises(InvalidArgument):
            await orders.set_partner(record, PartnerOrder("decode-0", 9, "decode-1"))
        assert orders.partners == {}
        follower = InstanceOrders(leader.host._store, channels, lambda: None)
        assert await follower.set_partner(record, PartnerOrder("decode-0", 1, "decode-1")) is None
        await channels.close()


async def test_an_order_that_cannot_be_carried_out_is_refused_by_its_field() -> None:
    order = phase_order_to_proto(PhaseOrder(7, 1))
    async with two_routers() as (_, leader, first, second):
        for field, process, name, fields in (
            ("instance_id", leader, "decode-9", {}),
            ("instance_id", leader, "router-0", {}),
            ("instance_id", leader, "router-1", {}),
            ("instance_id", leader, "router-1", {"incarnation": 1, "order": order}),
            ("incarnation", leader, "decode-0", {"incarnation": 9}),
            ("incarnation", first, "decode-0", {"incarnation": 9, "order": order}),
            ("order", leader, "decode-0", {"order": order}),
            ("order", first, "decode-0", {}),
            ("deadline_s", leader, "decode-0", {"deadline_s": -1.0}),
            ("deadline_s", leader, "decode-0", {"deadline_s": math.nan}),
            ("deadline_s", leader, "decode-0", {"deadline_s": math.inf}),
        ):
            with pytest.raises(InvalidArgument) as refused:
                await process.set_phases(name, Phase.DECODE, **fields)
            assert refused.value.field == field, (name, fields)
        with pytest.raises(InvalidArgument, match="each once"):
            await leader.set_phases("decode-0", Phase.DECODE, Phase.DECODE)
        with pytest.raises(InvalidArgument, match="each once"):
            await first.set_phases("decode-0", Phase.DECODE, Phase.DECODE, incarnation=1, order=order)
        assert first.work.order == second.work.order == FIRST_ORDER


async def test_a_router_that_passes_an_order_on_shows_the_operators_key(tmp_path: Path) -> None:
    keys_file = str(tmp_path / "keys.toml")
    secret = add_key(keys_file, "operator", KeyLimits(), is_admin=True)
    operators = make_callers(keys_file, "", "cluster")
    async with two_routers(operators) as (follower, _, first, _):
        with pytest.raises(Unauthenticated):
            await follower.set_phases("decode-0", Phase.DECODE)
        assert (await follower.set_phases("decode-0", Phase.DECODE, secret=secret)).accepted
        assert first.work.phases == (Phase.DECODE,)
