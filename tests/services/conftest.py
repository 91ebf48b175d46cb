"""Cluster of real prefill and decode servers in one process: real gRPC and KV sockets, no router. Engines are fake, or
with --engine vllm real ones, each in a process of its own that the tests share."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import InstanceLoad
from kaveri.engine.factory import BuiltEngine
from kaveri.hosting.engine_host import EngineHost
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.kv.transports import TRANSPORT_NAMES
from kaveri.models import KAVERI_TINY
from kaveri.rpc.server import open_channel
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import decode_pb2, feed_pb2, prefill_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import layout_to_proto, params_to_proto
from kaveri.wire.status import error_from_bytes, status_of
from services.decode.replicated import open_replicas
from services.instance.config import ColocatedConfig, DecodeConfig, PhasesConfig, PrefillConfig
from services.instance.service import instance_host
from tests.services.service_processes import ServiceProcesses
from tests.services.session_client import SessionRouters
from tests.support.redis_fixture import run_redis
from tests.support.service_engines import Engines, FakeEngines, VllmEngines

DEADLINE_S = 60.0
BLOCK_BYTES = 4096
"""Size of one block of 16 tokens in the fake engine's pool, over all layers."""
TIGHT = {"max_model_len": 160, "kv_cache_memory": 12 * BLOCK_BYTES}


async def eventually(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + deadline_s
    while not condition():
        assert loop.time() < until_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.002)


@dataclass(eq=False)
class RunningInstance:
    instance_id: str
    engine: BuiltEngine
    host: EngineHost
    stopping: asyncio.Event
    serving: asyncio.Task[int]
    channel: aio.Channel
    registry: CollectorRegistry

    @property
    def service(self) -> Any:
        phases = self.host._phases
        (phase,) = phases.ordered
        return phases.services[phase]

    @property
    def held_blocks(self) -> int:
        return self.engine.info.total_blocks - self.engine.stats().free_blocks

    def free(self) -> bool:
        return self.held_blocks == 0

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def load(self) -> InstanceLoad:
        return self.host.load()

    async def stop(self) -> int:
        self.stopping.set()
        return await asyncio.wait_for(self.serving, DEADLINE_S)

    async def reserve(
        self,
        request_id: str,
        token_count: int,
        *,
        layout: KvLayout | None = None,
        rpc_timeout_s: float = DEADLINE_S,
        session: int = 0,
        attempt: int = 1,
        placement: int = 0,
        **fields: Any,
    ) -> decode_pb2.ReserveResponse:
        """Reserve room as a prefill instance does, without a push."""
        params = params_to_proto(SamplingParams(max_tokens=5, seed=0))
        named = {"router_id": "router-0", "timeout_s": DEADLINE_S, "params": params, **fields}
        message = decode_pb2.ReserveRequest(
            request_id=request_id,
            term=term_pb2.Term(session=session, attempt=attempt, placement=placement),
            token_ids=[1] * token_count,
            layout=layout_to_proto(layout or self.engine.info.layout),
            **named,
        )
        reserving: Any = DecodeServiceStub(self.channel).Reserve(message, timeout=rpc_timeout_s)
        response: decode_pb2.ReserveResponse = await reserving
        return response

    async def abort(
        self,
        request_id: str,
        attempt: int = 1,
        router_id: str = "router-0",
        by_router: bool = True,
        placement: int = 0,
    ) -> None:
        term = term_pb2.Term(attempt=attempt, placement=placement)
        name = decode_pb2.AttemptId(request_id=request_id, term=term, router_id=router_id)
        message = feed_pb2.AbortRequest(attempts=[name], by_router=by_router)
        await FeedServiceStub(self.channel).Abort(message, timeout=DEADLINE_S)


@dataclass(eq=False)
class PrefillCall:
    """Submitted request and its reports."""

    instance: RunningInstance
    name: decode_pb2.AttemptId
    events: list[prefill_pb2.PrefillReport] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, message: prefill_pb2.SubmitRequest) -> None:
        await PrefillServiceStub(self.instance.channel).Submit(message, timeout=DEADLINE_S)
        while not self.seen("ended"):
            self.changed.clear()
            await self.changed.wait()
        if error := self.get("ended").error:
            code, details, metadata = status_of(error_from_bytes(error))
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), details)

    async def cancel(self) -> None:
        message = feed_pb2.AbortRequest(attempts=[self.name], by_router=True)
        await FeedServiceStub(self.instance.channel).Abort(message, timeout=DEADLINE_S)

    def seen(self, kind: Any) -> bool:
        return any(event.HasField(kind) for event in self.events)

    def get(self, kind: str) -> Any:
        return next(getattr(event, kind) for event in reversed(self.events) if event.HasField(kind))

    @property
    def kinds(self) -> list[str]:
        named = [
            field.name
            for event in self.events
            for field, _ in event.ListFields()
            if field.message_type and field.name != "term"
        ]
        return [name for name in named if name != "ended"]

    async def ended(self) -> None:
        """Wait for the end; raise its error as that of an RPC."""
        assert self.reading is not None
        await asyncio.wait_for(asyncio.shield(self.reading), DEADLINE_S)


class RouterStub:
    """Minimal router: follows instances' streams and submits requests."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.tokens: dict[tuple[str, int], dict[int, int]] = {}
        self.last: dict[tuple[str, int], decode_pb2.RequestTokens] = {}
        self.batch_sizes: list[int] = []
        self.incarnations: dict[str, int] = {}
        self.replicas: dict[tuple[str, int], decode_pb2.Replica] = {}
        self.duplicates = 0
        self._streams: dict[str, Any] = {}
        self._prompts: dict[tuple[str, int], PrefillCall] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def subscribe(self, instance: RunningInstance) -> None:
        stream = FeedServiceStub(instance.channel).Follow(feed_pb2.FollowRequest(router_id=self.router_id))
        self._streams[instance.instance_id] = stream
        first = await asyncio.wait_for(stream.read(), DEADLINE_S)
        self.incarnations[instance.instance_id] = first.incarnation
        self._tasks.append(asyncio.create_task(self._follow(stream)))

    def unsubscribe(self, instance: RunningInstance) -> None:
        self._streams.pop(instance.instance_id).cancel()

    def prefill(
        self,
        instance: RunningInstance,
        request_id: str,
        token_ids: list[int],
        max_tokens: int,
        attempt: int = 1,
        generated_count: int = 0,
        timeout_s: float = DEADLINE_S,
        secret: bytes = b"",
        **params: Any,
    ) -> PrefillCall:
        term = term_pb2.Term(attempt=attempt)
        message = prefill_pb2.SubmitRequest(
            request_id=request_id,
            term=term,
            router_id=self.router_id,
            token_ids=token_ids,
            generated_count=generated_count,
            params=params_to_proto(SamplingParams(max_tokens=max_tokens, seed=0, **params)),
            timeout_s=timeout_s,
            secret=secret,
        )
        name = decode_pb2.AttemptId(request_id=request_id, term=term, router_id=self.router_id, secret=secret)
        call = self._prompts[request_id, attempt] = PrefillCall(instance, name)
        call.reading = asyncio.create_task(self._submit(call, message))
        self._tasks.append(call.reading)
        return call

    async def _submit(self, call: PrefillCall, message: prefill_pb2.SubmitRequest) -> None:
        if call.instance.instance_id not in self._streams:
            await self.subscribe(call.instance)
        await call.read(message)

    def finished(self, request_id: str, attempt: int = 1) -> bool:
        return (request_id, attempt) in self.last

    async def answer(self, call: PrefillCall, request_id: str, attempt: int = 1) -> list[int]:
        await call.ended()
        first = call.get("first_token")
        if first.finish_reason:
            return [first.token_id]
        await eventually(lambda: self.finished(request_id, attempt), f"{request_id} finishes")
        gained = self.tokens[request_id, attempt]
        start = min(gained)
        assert sorted(gained) == list(range(start, start + len(gained))), "a gap in the answer"
        return [first.token_id, *self.drawn(request_id, attempt)]

    def drawn(self, request_id: str, attempt: int = 1) -> list[int]:
        gained = self.tokens[request_id, attempt]
        return [gained[index] for index in sorted(gained)]

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, stream: Any) -> None:
        try:
            while (message := await stream.read()) is not aio.EOF:
                for report in message.reports:
                    if (call := self._prompts.get((report.request_id, report.term.attempt))) is not None:
                        call.events.append(report)
                        call.changed.set()
                self.batch_sizes.append(len(message.requests))
                for gained in message.requests:
                    key = gained.request_id, gained.term.attempt
                    tokens = self.tokens.setdefault(key, {})
                    for offset, token_id in enumerate(gained.token_ids):
                        self.duplicates += gained.index + offset in tokens
                        tokens[gained.index + offset] = token_id
                    if gained.HasField("replica"):
                        self.replicas[key] = gained.replica
                    if gained.finish_reason or gained.error:
                        self.last[key] = gained
        except aio.AioRpcError:
            pass  # its tests look at what the other side does


class InProcessCluster:
    def __init__(self, kv_transports: tuple[str, ...], engines: Engines) -> None:
        self.kv_transports = kv_transports
        self.engines = engines
        self.state = MemoryCluster()
        self.instances: list[RunningInstance] = []
        self.replicas: dict[str, ReplicaStore] = {}
        self._resources = contextlib.AsyncExitStack()
        self.routers: list[RouterStub] = []
        self._stores: list[MemoryStore] = []

    async def prefill(self, instance_id: str = "prefill-0", **settings: Any) -> RunningInstance:
        settings = {"kv_transports": self.kv_transports, **settings}
        return await self._start(PrefillConfig(instance_id=instance_id, **_small(settings)))

    async def decode(self, instance_id: str = "decode-0", **settings: Any) -> RunningInstance:
        settings = {"kv_transports": self.kv_transports, **settings}
        return await self._start(DecodeConfig(instance_id=instance_id, **_small(settings)))

    async def colocated(self, instance_id: str = "colocated-0", **settings: Any) -> RunningInstance:
        return await self._start(ColocatedConfig(instance_id=instance_id, **_small(settings)))

    async def router(self, router_id: str = "router-0") -> RouterStub:
        router = RouterStub(router_id)
        self.routers.append(router)
        for instance in self.instances:
            if instance.instance_id.startswith(("decode", "colocated")) and not instance.serving.done():
                await router.subscribe(instance)
        return router

    def expected(self, token_ids: list[int], token_count: int, generated_count: int = 0) -> list[int]:
        """Return the correct answer for the parameters of RouterStub, computed without an engine."""
        return self.engines.answer(token_ids, token_count, generated_count)

    def blocks(self, token_count: int) -> int:
        return -(-token_count // self.engines.block_tokens)

    def needs_fake_engines(self, why: str) -> None:
        if not isinstance(self.engines, FakeEngines):
            pytest.skip(why)

    async def all_free(self, within_s: float = 1.0) -> None:
        """Wait until every KV block is free, and check integrity."""
        within_s = max(within_s, self.engines.free_within_s)
        for instance in self.instances:
            if not instance.serving.done():
                await eventually(instance.free, f"{instance.instance_id} frees its blocks", within_s)
                instance.engine.check_integrity()

    async def close(self) -> None:
        for router in self.routers:
            await router.close()
        for instance in self.instances:
            if not instance.serving.done():
                await eventually(instance.free, f"{instance.instance_id} frees its blocks", self.engines.free_within_s)
                instance.engine.check_integrity()
                await instance.stop()
            await instance.channel.close()
        for store in self._stores:
            await store.__aexit__(None, None, None)
        await self._resources.aclose()

    async def _start(self, config: PhasesConfig) -> RunningInstance:
        engine = self.engines.make(config)
        registry = CollectorRegistry()
        replicas = await self._resources.enter_async_context(open_replicas(config, engine))
        if replicas is not None:
            self.replicas[config.instance_id] = replicas
        host = instance_host(config, engine, await self.store(), random.Random(0), registry, replicas)
        return await self._run(config.instance_id, engine, host, registry)

    async def store(self) -> MemoryStore:
        store = MemoryStore(self.state)
        await store.__aenter__()
        self._stores.append(store)
        return store

    async def _run(
        self, instance_id: str, engine: BuiltEngine, host: EngineHost, registry: CollectorRegistry
    ) -> RunningInstance:
        stopping = asyncio.Event()
        serving = asyncio.create_task(host.serve(stopping))
        started = asyncio.create_task(host.started.wait())
        await asyncio.wait((serving, started), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        assert host.started.is_set()
        instance = RunningInstance(instance_id, engine, host, stopping, serving, open_channel(host.address), registry)
        self.instances.append(instance)
        return instance


def _small(settings: dict[str, Any]) -> dict[str, Any]:
    small = {"max_model_len": 512, "kv_cache_memory": 2**21, "heartbeat_interval_s": 0.02, "drain_timeout_s": 5.0}
    small["orphan_grace_s"] = 0.3
    return {"engine": "fake", "model": "fake", **small, **settings}


@pytest.fixture
def kv_transports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    only: str | None = getattr(request, "param", None)
    if only == "nixl":
        pytest.importorskip("nixl_cu13")
    return TRANSPORT_NAMES if only is None else (only,)


OVER_EACH_TRANSPORT = pytest.mark.parametrize("kv_transports", [*TRANSPORT_NAMES, "nixl", "gloo"], indirect=True)
"""Run a test of the push over each transport of this machine; tls, which needs certificates, has tests of its own."""
_WITH_VLLM = ("shm", "tcp")
"""A transport that writes into the receiver's memory, and one that sends it a stream."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--engine") == "vllm":
        kept = [item for item in items if _transport_of(item) in (None, *_WITH_VLLM)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        for item in items:
            # Whichever comes first waits for vLLM to load its model, a minute where much else runs.
            item.add_marker(pytest.mark.timeout(600))


def _transport_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("kv_transports")


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    if request.config.getoption("--engine") == "fake":
        yield FakeEngines()
        return
    made = VllmEngines(request.getfixturevalue("tmp_path_factory").mktemp("model"))
    yield made
    made.close()


@pytest.fixture
async def cluster(kv_transports: tuple[str, ...], engines: Engines) -> AsyncIterator[InProcessCluster]:
    cluster = InProcessCluster(kv_transports, engines)
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[ModelTokenizer]:
    tokenizer = ModelTokenizer.load(KAVERI_TINY)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def fake_blocks(cluster: InProcessCluster) -> None:
    cluster.needs_fake_engines("counts blocks of 16 tokens")


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[ServiceProcesses]:
    async with run_redis() as redis, RedisStore(redis.url) as store:
        processes = ServiceProcesses(redis.url, store, tmp_path)
        try:
            yield processes
        finally:
            for child in processes.children:
                if child.exit_status is None:
                    await child.kill()


@pytest.fixture
async def routers(cluster: InProcessCluster, tokenizer: ModelTokenizer) -> AsyncIterator[SessionRouters]:
    routers = SessionRouters(cluster, tokenizer)
    yield routers
    await routers.close()
