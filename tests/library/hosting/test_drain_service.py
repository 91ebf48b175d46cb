import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from kaveri.client.api_key import key_metadata
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.view import InstanceLoad, InstanceState, Role
from kaveri.errors import InvalidArgument, KaveriError, Unauthenticated, Unavailable
from kaveri.hosting.service_host import ServiceHost, service_record
from kaveri.rpc.process import ServiceConfig
from kaveri.rpc.server import check_health, open_channel
from kaveri.security.api_keys import KeyLimits
from kaveri.security.callers import Callers, make_callers
from kaveri.security.keys_file import add_key
from kaveri.v1 import cluster_pb2
from kaveri.v1.cluster_pb2_grpc import DrainServiceStub
from kaveri.wire.status import error_of
from tests.library.hosting.idle_service import IdleService

SOON_S = 60.0


class Work(IdleService):
    """A service with three requests until it is made idle."""

    def __init__(self) -> None:
        super().__init__()
        self.drained = asyncio.Event()
        self.idle = asyncio.Event()

    def load(self) -> InstanceLoad:
        return InstanceLoad(waiting_requests=1, running_requests=2)

    def drain(self) -> None:
        super().drain()
        self.drained.set()

    async def wait_idle(self) -> None:
        await self.idle.wait()


@dataclass
class Process:
    host: ServiceHost
    work: Work
    stopping: asyncio.Event
    serving: asyncio.Task[int]
    stub: Any

    async def ask(self, method: str, instance_id: str, secret: str = "") -> Any:
        request = cluster_pb2.DrainRequest(instance_id=instance_id, undo=method == "undrain")
        try:
            return await self.stub.Drain(request, timeout=SOON_S, metadata=key_metadata(secret))
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
        host = ServiceHost(config, store, record, work, (), lambda _: None, operators=operators)
        serving = asyncio.create_task(host.serve(stopping))
        await asyncio.wait_for(host.started.wait(), SOON_S)
        async with open_channel(host.address) as channel:
            yield Process(host, work, stopping, serving, DrainServiceStub(channel))
        stopping.set()
        work.idle.set()
        await asyncio.wait_for(serving, SOON_S)


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
