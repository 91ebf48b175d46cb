"""A cluster for router tests: scripted prefill and decode instances on real gRPC servers, and routers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from grpc import aio

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.view import BOTH_PHASES, InstanceLoad, InstanceRecord, InstanceState, Phase, Role
from kaveri.hosting.service_host import ServiceHost
from kaveri.kv.layout.layout import KvLayout
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.text.generation_config import read_sampling_defaults
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import decode_pb2_grpc, feed_pb2_grpc, inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.router.config import RouterConfig
from services.router.peers import router_addresses
from services.router.service import Router, router_host
from tests.services.router.scripted_answers import MAX_MODEL_LEN, MODEL, ask, eventually
from tests.services.router.scripted_decode import ScriptedDecode
from tests.services.router.scripted_feed import ScriptedFeed
from tests.services.router.scripted_prefill import ScriptedPrefill


@dataclass
class ScriptedInstance:
    record: InstanceRecord
    load: InstanceLoad
    server: RpcServer
    heartbeat: Heartbeat
    task: "asyncio.Task[None]"

    async def kill(self) -> None:
        """Cut every connection and let the lease run out, as SIGKILL does."""
        self.task.cancel()
        await self.server.stop(0)

    async def die(self) -> None:
        """Cut every connection; heartbeats continue, as while the lease of a killed process still runs."""
        await self.server.stop(0)

    async def leave(self) -> None:
        self.heartbeat.stop()
        await self.task
        await self.server.stop(0)


@dataclass
class ScriptedCluster:
    tokenizer: ModelTokenizer
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    instances: dict[str, ScriptedInstance] = field(default_factory=dict)
    decodes: dict[str, ScriptedDecode] = field(default_factory=dict)
    prefills: dict[str, ScriptedPrefill] = field(default_factory=dict)
    colocated: dict[str, tuple[ScriptedPrefill, ScriptedDecode]] = field(default_factory=dict)
    incarnations: int = 0
    lease_ttl_s: float = 0.5
    layout: KvLayout | None = None
    """KV layout of instances that start from now on; their pools have 100 blocks."""
    place_on: str = ""
    """Decode instance for all placements; empty: the first live one."""

    def _decode(self) -> ScriptedDecode:
        if self.place_on:
            return self.decodes[self.place_on]
        return next(decode for name, decode in self.decodes.items() if name in self.instances)

    def _life(self, instance_id: str) -> int:
        return self.decodes[instance_id].incarnation if instance_id in self.decodes else 0

    async def add_decode(self, instance_id: str) -> ScriptedDecode:
        decode = self.decodes[instance_id] = ScriptedDecode(instance_id)
        await self._start(instance_id, (Phase.DECODE,), None, decode)
        return decode

    async def add_prefill(self, instance_id: str) -> ScriptedPrefill:
        prefill = self.prefills[instance_id] = ScriptedPrefill(instance_id, self._decode, self._life)
        await self._start(instance_id, (Phase.PREFILL,), prefill, None)
        return prefill

    async def add_colocated(self, instance_id: str) -> None:
        decode = ScriptedDecode(instance_id)
        prefill = ScriptedPrefill(instance_id, lambda: decode)
        self.colocated[instance_id] = prefill, decode
        await self._start(instance_id, BOTH_PHASES, prefill, decode)

    def taken(self) -> list[prefill_pb2.SubmitRequest]:
        return [request for prefill in self.prefills.values() for request in prefill.requests]

    def pausing(self, at: int = 7) -> ScriptedDecode:
        """decode-0, which pauses once, at token `at`."""
        decode = self.decodes["decode-0"]
        decode.pause_at = at
        return decode

    async def read_until_paused(self, call: Any) -> list[inference_pb2.GenerateResponse]:
        responses = [await call.read()]
        await eventually(lambda: self.decodes["decode-0"].is_paused)
        return responses

    def hold(self, step: str) -> None:
        for prefill in self.prefills.values():
            prefill.hold.add(step)

    async def until_held(self) -> None:
        await eventually(lambda: any(prefill.waiting_requests for prefill in self.prefills.values()))

    def let_all_go(self) -> None:
        for prefill in self.prefills.values():
            prefill.release.set()
        for decode in self.decodes.values():
            decode.may_step.set()

    async def kill(self, instance_id: str) -> None:
        await self.instances.pop(instance_id).kill()

    async def leave(self, instance_id: str) -> None:
        await self.instances.pop(instance_id).leave()

    async def close(self) -> None:
        for instance_id in tuple(self.instances):
            await self.kill(instance_id)

    @contextlib.asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator["RouterUnderTest"]:
        """Run a router with a client stub; check at the end that nothing leaked."""
        config = RouterConfig(**{"instance_id": "router-0", "heartbeat_interval_s": 0.02, **settings})
        async with MemoryStore(self.cluster) as store, _run_router(config, store, self.tokenizer) as under_test:
            router = under_test.router
            subscriber = router.router_id
            decodes = self.decodes | {name: decode for name, (_, decode) in self.colocated.items()}
            alive = [decode for name, decode in decodes.items() if name in self.instances]
            await eventually(
                lambda: all(any(name.startswith(subscriber) for name in decode.subscribers) for decode in alive)
            )
            yield under_test
            await under_test.check_integrity()

    async def _start(
        self,
        instance_id: str,
        phases: tuple[Phase, ...],
        prefill: ScriptedPrefill | None,
        decode: ScriptedDecode | None,
    ) -> None:
        self.incarnations += 1

        def register(server: aio.Server) -> None:
            if prefill is not None:
                prefill.incarnation = self.incarnations
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
            if decode is not None:
                decode.incarnation = self.incarnations
                decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
            feed_pb2_grpc.add_FeedServiceServicer_to_server(ScriptedFeed(prefill, decode), server)

        server = RpcServer("127.0.0.1", 0, ())
        server.add(register)
        await server.start()
        record = InstanceRecord(
            instance_id=instance_id,
            incarnation=self.incarnations,
            role=Role.ENGINE,
            address=f"127.0.0.1:{server.port}",
            model=MODEL,
            engine="fake",
            phases=phases,
            layout=self.layout,
            max_model_len=MAX_MODEL_LEN,
            lease_ttl_s=self.lease_ttl_s,
        )
        load = InstanceLoad(state=InstanceState.READY, free_blocks=100, total_blocks=100)
        store = MemoryStore(self.cluster)

        def load_now() -> InstanceLoad:
            stated = self.instances[instance_id].load if instance_id in self.instances else load
            scripted = self.prefills.get(instance_id)
            return stated if scripted is None else replace(stated, queue_room=scripted.queue_room)

        heartbeat = Heartbeat(store, record, load_now, 0.02)

        async def beat() -> None:
            async with store:
                await heartbeat.run()

        self.instances[instance_id] = ScriptedInstance(record, load, server, heartbeat, asyncio.create_task(beat()))


@contextlib.asynccontextmanager
async def scripted_cluster(
    tokenizer: ModelTokenizer, prefills: int = 1, decodes: int = 1, **settings: Any
) -> AsyncIterator[ScriptedCluster]:
    cluster = ScriptedCluster(tokenizer, **settings)
    for number in range(prefills):
        await cluster.add_prefill(f"prefill-{number}")
    for number in range(decodes):
        await cluster.add_decode(f"decode-{number}")
    try:
        yield cluster
    finally:
        await cluster.close()


@dataclass
class RouterUnderTest:
    router: Router
    host: ServiceHost
    stub: Any
    channel: aio.Channel
    stopping: asyncio.Event
    serving: asyncio.Task[int]

    @property
    def address(self) -> str:
        return self.host.address

    def ask(self, *prompt: Any, timeout_s: float = 60.0, **fields: Any) -> Any:
        return self.stub.Generate(ask(*prompt, **fields), timeout=timeout_s)

    def addresses(self, *, includes_own: bool = True, public: bool = False) -> list[str]:
        without = "" if includes_own else self.router.config.instance_id
        return router_addresses(self.router.store.view(), MODEL, without=without, public=public)

    async def drain(self) -> None:
        self.stopping.set()
        assert await self.serving == 0

    async def check_integrity(self) -> None:
        await eventually(lambda: len(self.router.table) == 0)
        await self.router.claims.close_all()
        await self.router.placer.close()
        await eventually(lambda: not any(task.get_name().startswith("request ") for task in asyncio.all_tasks()))
        self.router.claims.check_integrity()
        self.router.placer.check_integrity()
        self.router.feeds.check_integrity()
        assert isinstance(self.router.store, MemoryStore)
        assert self.router.store.cluster.requests() == ()


@contextlib.asynccontextmanager
async def _run_router(
    config: RouterConfig, store: MemoryStore, tokenizer: ModelTokenizer
) -> AsyncIterator[RouterUnderTest]:
    defaults = read_sampling_defaults(config.generation_config, config.model)
    router, stopping = Router(config, store, tokenizer, defaults), asyncio.Event()
    host = router_host(router)
    serving = asyncio.create_task(host.serve(stopping))
    started = asyncio.create_task(host.started.wait())
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    try:
        async with open_channel(host.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield RouterUnderTest(router, host, stub, channel, stopping, serving)
    finally:
        host.break_off("the test is over")
        await serving


async def read_once_placed(
    cluster: ScriptedCluster, router: RouterUnderTest, request_id: str, instance_id: str
) -> tuple[Any, list[inference_pb2.GenerateResponse]]:
    """Start a request. Returns its call and first response once the router has read its placement on the instance."""
    call = router.stub.Generate(ask(request_id=request_id), timeout=60)
    responses = [await call.read()]

    def is_placed() -> bool:
        entry = router.router.table.get(request_id)
        return entry is not None and (getattr(entry.state, "decode", None) or ("",))[0] == instance_id

    await eventually(is_placed)
    return call, responses
