"""Wires one router: its parts, what they do while it serves, and how they end."""

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, Role
from kaveri.errors import Unavailable
from kaveri.hosting.orders import InstanceOrders
from kaveri.hosting.service_host import ServiceHost, new_incarnation, service_record
from kaveri.hosting.store import open_store
from kaveri.hosting.vllm_grpc_extra import require_vllm_grpc
from kaveri.policy.byte_budget import ByteBudget
from kaveri.rpc.channels import Channels
from kaveri.rpc.public_port import PublicPort
from kaveri.rpc.server import RpcServer
from kaveri.rpc.tls import RpcTls, process_tls
from kaveri.security.callers import make_callers
from kaveri.security.settings import PUBLIC_PREFIX
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.metrics import set_discovery
from kaveri.text.generation_config import SamplingDefaults, read_sampling_defaults
from kaveri.text.grammar_check import GrammarChecker
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.router import metrics
from services.router.answer_forms import model_form
from services.router.claims import RequestClaims
from services.router.cluster_server import ClusterServicer
from services.router.config import RouterConfig
from services.router.flipper import Flipper
from services.router.intake import CheckGrammar, Intake
from services.router.metrics import metrics_targets
from services.router.monitor import Monitor
from services.router.pairing import Pairing
from services.router.peers import has_another_router, router_addresses
from services.router.public_server import PublicServicer
from services.router.recovery.departures import Departures
from services.router.recovery.holders import Holders
from services.router.request_placer import RequestPlacer
from services.router.request_table import RecentRequests, RequestTable
from services.router.server import InferenceServicer
from services.router.token_feeds import TokenFeeds

_WATCH_TIMEOUT_S = 0.5
"""Seconds after which ended leases are noticed at the latest."""
_OTHERS_DRAIN_WITHIN_S = 0.25
"""Seconds for other routers to begin a drain too, before clients are sent to them."""


async def serve(config: RouterConfig, stopping: asyncio.Event) -> int:
    """Run a router until `stopping` is set and its requests have ended. Returns the exit status. Raises ConfigError."""
    if config.vllm_grpc:
        # Fails early.
        _vllm_grpc()
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(config, stopping))
        if store is None:
            return 0
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, config.model, config.chat_template_content_format)
        stack.callback(tokenizer.close)
        defaults = await asyncio.to_thread(read_sampling_defaults, config.generation_config, config.model)
        return await router_host(Router(config, store, tokenizer, defaults)).serve(stopping)
    return 0


def router_host(router: "Router") -> ServiceHost:
    """Create the host process of a router: its gRPC services, lease and drain. Raises ConfigError for unusable
    certificates, or if --vllm-grpc lacks its package."""
    config = router.config
    servicer = InferenceServicer(router)
    # With mutual TLS a certificate is enough. The public port has neither service.
    operators = router.callers if process_tls() is None else None
    shows = ClusterServicer(router.store, router.recent, operators)
    services = (inference_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR)
    names = [service.full_name for file in services for service in file.services_by_name.values()]
    vllm_grpc = _vllm_grpc() if config.vllm_grpc else None
    if vllm_grpc is not None:
        names.append(vllm_grpc.VllmEngineServicer.service_name)

    def register(server: aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(shows, server)
        if vllm_grpc is not None:
            vllm_grpc.VllmEngineServicer(router, servicer).register(server)

    # Prometheus needs to know one router only.
    set_discovery(router.metrics_targets)
    record = service_record(config, Role.ROUTER, config.model_name, router.incarnation)
    record = replace(record, public_address=config.advertised_public_address)
    public: RpcServer | None = None
    if config.public_port and router.callers is not None:
        public = _public_server(config, PublicServicer(servicer, router.callers))
    host = ServiceHost(
        config,
        router.store,
        record,
        router,
        names,
        register,
        public=public,
        operators=operators,
        orders=router.orders,
    )
    # Others forward orders to the leader that they see.
    router.monitor.on_lead = host.beat_now
    return host


def _vllm_grpc() -> ModuleType:
    require_vllm_grpc()
    from services.router import vllm_grpc

    return vllm_grpc


def _public_server(config: RouterConfig, servicer: PublicServicer) -> RpcServer:
    tls = None if config.public_tls is None else RpcTls(config.public_tls, PUBLIC_PREFIX)
    names = [service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()]
    server = RpcServer(config.public_listen_host, config.public_port, names, PublicPort(tls, servicer.callers))
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer))
    return server


class Router:
    """A router with all its parts: the work that its ServiceHost (server, lease, drain) runs."""

    def __init__(
        self,
        config: RouterConfig,
        store: ClusterStore,
        tokenizer: ModelTokenizer,
        defaults: SamplingDefaults | None = None,
        check_grammar: CheckGrammar | None = None,
    ) -> None:
        """defaults: sampling parameters that requests leave unset. check_grammar: None: in a
        process of its own. Raises ConfigError for an unreadable keys file, and unknown parsers."""
        self.incarnation = incarnation = new_incarnation()
        self.router_id = f"{config.instance_id}.{incarnation:016x}"
        # Partly secret: whoever knows it can take over this router's streams.
        stream_id = f"{self.router_id}.{secrets.token_hex(16)}"
        self.config = config
        self.store = store
        self._draining_since_s = 0.0
        self.channels = Channels()
        self.table = RequestTable(config.max_requests)
        self.bodies = ByteBudget("router", config.max_bodies_bytes, metrics.BODY_BYTES.set)
        self.recent = RecentRequests(config.instance_id, self.table, time.monotonic())
        holders = Holders(store, self.channels, stream_id, config.model_name)
        self.feeds = TokenFeeds(stream_id, self.channels, self.table, config.suspect_after_s, holders)
        self.departures = Departures(self.table, holders, self.feeds)
        self.claims = RequestClaims(store, config.instance_id, incarnation)
        rng = random.Random(incarnation)
        self.placer = RequestPlacer(config, stream_id, store, self.channels, self.feeds, holders, rng)
        self.monitor = Monitor(store, self.router_id, config.monitor_interval_s)
        self.orders = InstanceOrders(store, self.channels, self.monitor.next_order)
        rules, dry_run = config.flip_rules, config.flip_dry_run
        self.flipper = Flipper(rules, dry_run, config.model_name, store, self.orders, self.monitor)
        self.pairing = Pairing(store, self.orders, self.monitor)
        self._grammars = GrammarChecker(tokenizer.backend, tokenizer.vocab_size)
        check_grammar = check_grammar or self._grammars.check
        form = model_form(config.tool_parser, config.reasoning_parser, tokenizer.chat_template)
        defaults = defaults or SamplingDefaults()
        self.intake = Intake(config.model_name, tokenizer, self.placer, defaults, check_grammar, form)
        self.callers = make_callers(config.keys_file, config.redis_url, config.cluster_name)
        """API keys of the public port and of operators; None: there are none."""
        self._serving = asyncio.Event()
        """Cleared while the router drains."""
        self._serving.set()
        self._resigned = asyncio.Event()
        """Cleared while the router may lead the cluster monitor."""
        self._resigned.set()

    @property
    def draining(self) -> bool:
        """True between drain() and undrain()."""
        return not self._serving.is_set()

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Prometheus targets of the whole cluster, which /sd serves for service discovery."""
        return metrics_targets(self.store.view())

    async def run(self) -> None:
        """Do the background work until cancelled. Cancel it only after the last call of a client has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._monitor(), name="cluster monitor")
                group.create_task(self.feeds.watch())
                group.create_task(self.flipper.run(self.config.monitor_interval_s), name="flips")
                group.create_task(self.pairing.run(self.config.monitor_interval_s), name="pairs")
                if self.callers is not None:
                    group.create_task(self.callers.run(), name="keys file")
                await self._watch()
        finally:
            await self.claims.end()
            await self._grammars.close()
            await self.placer.close()
            await self.feeds.close()
            await self.channels.close()

    def load(self) -> InstanceLoad:
        return InstanceLoad(running_requests=len(self.table), fencing_token=self.monitor.fencing_token)

    def drain(self) -> None:
        if not self.draining:
            self._draining_since_s = time.monotonic()
        self._serving.clear()
        self.monitor.stop()

    def undrain(self) -> None:
        self._serving.set()
        self.table.stay()
        self.monitor.go_on()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight and the router has resigned from leading the cluster monitor."""
        await self.table.wait_until_empty()
        await self._resigned.wait()

    def fail_all(self, reason: str) -> None:
        if not len(self.table):
            return
        timeout_s = self.config.drain_timeout_s
        get_logger().warning("drain_timed_out", requests=len(self.table), drain_timeout_s=timeout_s)
        self.table.send_away()
        reason = f"the router is draining, and the request did not end within its drain timeout of {timeout_s:g} s"
        self.table.fail_all(Unavailable(reason, retry_after_s=0.0))

    def _send_away(self) -> None:
        if not self.draining:
            return
        view = self.store.view()
        if has_another_router(view, self.config, self._draining_since_s + _OTHERS_DRAIN_WITHIN_S):
            self.table.send_away()
        elif not router_addresses(view, self.config.model_name, without=self.config.instance_id):
            self.table.stay()

    async def _monitor(self) -> None:
        while True:
            self._resigned.clear()
            await self.monitor.run()
            self._resigned.set()
            await self._serving.wait()

    async def _watch(self) -> None:
        while True:
            view = await self.store.wait_for_change(_WATCH_TIMEOUT_S)
            # First: an instance that has restarted needs a new channel before it is called.
            self.channels.retain(view.incarnations())
            self.feeds.update(view)
            self.placer.update(view)
            self.departures.update(view)
            self.claims.update(view)
            self.monitor.update(view)
            self._send_away()
