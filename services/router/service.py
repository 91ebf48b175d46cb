"""Wires one router: its parts, their life, and how they end."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.metadata import version

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, Role
from kaveri.errors import Unavailable
from kaveri.hosting.store import open_store
from kaveri.rpc.server import RpcServer
from kaveri.telemetry.logs import get_logger
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.router import metrics
from services.router.channels import Channels
from services.router.claims import RequestClaims
from services.router.config import RouterConfig
from services.router.intake import Intake
from services.router.monitor import Monitor
from services.router.request_placer import RequestPlacer
from services.router.requests import RequestTable
from services.router.server import ClusterServicer, InferenceServicer
from services.router.token_feeds import TokenFeeds

_WATCH_TIMEOUT_S = 0.5
"""Longest time until a lease that ran out is acted upon, when nothing else changes."""
_FAREWELL_S = 1.0
"""At the end of a drain: time for the clients that are left to get their error."""


async def serve(config: RouterConfig, stopping: asyncio.Event) -> int:
    """Runs a router until `stopping` is set and the requests in flight have ended. Raises ConfigError."""
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(config, stopping))
        if store is None:
            return 0
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, config.model)
        stack.callback(tokenizer.close)
        await serve_requests(config, store, tokenizer, stopping)
    return 0


async def serve_requests(
    config: RouterConfig,
    store: ClusterStore,
    tokenizer: ModelTokenizer,
    stopping: asyncio.Event,
    started: Callable[["Router"], object] | None = None,
) -> None:
    """serve() around a store that is connected and a tokenizer that is loaded. started: told when it listens."""
    async with Router.run(config, store, tokenizer) as router:
        if started is not None:
            started(router)
        await stopping.wait()
        await router.drain(config.drain_timeout_s)


class Router:
    """One router: its parts, wired."""

    def __init__(self, config: RouterConfig, store: ClusterStore, tokenizer: ModelTokenizer) -> None:
        incarnation = secrets.randbits(64)
        self.router_id = f"{config.instance_id}.{incarnation:016x}"
        # With it anyone can take over the token streams: the cluster view shows the rest, so a part is secret.
        stream_id = f"{self.router_id}.{secrets.token_hex(16)}"
        self.config = config
        self.store = store
        self.tokenizer = tokenizer
        self.draining = False
        self.channels = Channels()
        self.table = RequestTable(config.max_requests)
        relayed = metrics.RELAYED_TOKENS.inc
        self.feeds = TokenFeeds(stream_id, self.channels, self.table, relayed, config.suspect_after_s)
        self.claims = RequestClaims(store, config.instance_id, incarnation)
        self.placer = RequestPlacer(
            model=config.model_name,
            stream_id=stream_id,
            policy=config.placement_policy,
            max_attempts=config.max_attempts,
            unavailable_after_s=config.unavailable_after_s,
            store=store,
            channels=self.channels,
            feeds=self.feeds,
            rng=random.Random(incarnation),
        )
        self.monitor = Monitor(store, self.router_id, config.monitor_interval_s)
        self.intake = Intake(config.model_name, tokenizer, self.placer)
        self._incarnation = incarnation
        services = (inference_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR)
        names = [service.full_name for file in services for service in file.services_by_name.values()]
        self._server = RpcServer(config.host, config.port, names)
        self._server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, InferenceServicer(self)))
        self._server.add(partial(cluster_pb2_grpc.add_ClusterServiceServicer_to_server, ClusterServicer(store)))

    @classmethod
    @contextlib.asynccontextmanager
    async def run(cls, config: RouterConfig, store: ClusterStore, tokenizer: ModelTokenizer) -> "AsyncIterator[Router]":
        """A router that listens and is registered; everything it started has ended when the context does."""
        router = cls(config, store, tokenizer)
        await router._server.start()
        heartbeat = Heartbeat(store, router._record(), router._load, config.heartbeat_interval_s)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(heartbeat.run())
                group.create_task(router.monitor.run(), name="cluster monitor")
                watches = [group.create_task(router._watch()), group.create_task(router.feeds.watch())]
                await router._server.ready()
                get_logger().info("service_started", address=router.address, router_id=router.router_id)
                try:
                    yield router
                finally:
                    router.monitor.stop()
                    heartbeat.stop()
                    await router._server.stop(0)
                    for watch in watches:
                        watch.cancel()
        finally:
            await router._server.stop(0)
            await router.claims.end()
            await router.placer.close()
            await router.feeds.close()
            await router.channels.close()

    @property
    def address(self) -> str:
        """Where others reach it."""
        return self.config.advertised_address(self._server.port)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until those in flight have ended, `timeout_s` seconds at most; those that are
        left then end with Unavailable."""
        self.draining = True
        self.monitor.stop()
        await self._server.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.table.wait_until_empty()
        if len(self.table):
            get_logger().warning("drain_timed_out", requests=len(self.table), drain_timeout_s=timeout_s)
            reason = f"the router is draining, and the request did not end within its drain timeout of {timeout_s:g} s"
            self.table.fail_all(Unavailable(reason, retry_after_s=0.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self.table.wait_until_empty()
        # Calls that arrived at the last moment still need the answer that the router is draining.
        await self._server.stop(_FAREWELL_S)

    async def _watch(self) -> None:
        addresses: set[str] = set()
        while True:
            view = await self.store.wait_for_change(_WATCH_TIMEOUT_S)
            self.feeds.update(view)
            self.placer.update(view)
            self.claims.update(view)
            self.monitor.update(view)
            present = {status.record.address for status in view.instances.values()}
            if not addresses <= present:
                await self.channels.retain(present)
            addresses = present

    def _record(self) -> InstanceRecord:
        return InstanceRecord(
            instance_id=self.config.instance_id,
            incarnation=self._incarnation,
            role=Role.ROUTER,
            address=self.address,
            model=self.config.model_name,
            lease_ttl_s=self.config.lease_ttl_s,
            version=version("kaveri"),
        )

    def _load(self) -> InstanceLoad:
        state = InstanceState.DRAINING if self.draining else InstanceState.READY
        return InstanceLoad(state=state, running_requests=len(self.table))
