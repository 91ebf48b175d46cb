"""The router's gRPC services, proto <-> domain, and the life of the process's parts."""

import asyncio
import contextlib
import dataclasses
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from grpc import aio

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, Role
from kaveri.errors import InternalError, KaveriError, ModelNotFound, Unavailable
from kaveri.hosting.store import open_store
from kaveri.rpc.server import RpcServer
from kaveri.telemetry.logs import get_logger
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES, check_request_id
from kaveri.wire.messages import finish_to_proto, params_from_proto, status_to_proto
from kaveri.wire.status import abort, status_of
from services.router import metrics
from services.router.answer import Answer
from services.router.channels import Channels
from services.router.config import RouterConfig
from services.router.intake import (
    Conversation,
    Intake,
    OfferedRequest,
    Prompt,
    is_ready,
    max_model_len,
)
from services.router.monitor import Monitor
from services.router.request_placer import RequestPlacer
from services.router.requests import RequestEntry, RequestTable
from services.router.token_feeds import TokenFeeds

_WATCH_TIMEOUT_S = 0.5
"""Longest time until a lease that ran out is acted upon, when nothing else changes."""
_FAREWELL_S = 1.0
"""At the end of a drain: time for the clients that are left to get their error."""

ServicerContext = aio.ServicerContext[Any, Any]


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
        self.feeds = TokenFeeds(stream_id, self.channels, self.table, metrics.RELAYED_TOKENS.inc)
        self.placer = RequestPlacer(
            model=config.model_name,
            router_id=config.instance_id,
            router_incarnation=incarnation,
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
        self._server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, _Inference(self)))
        self._server.add(partial(cluster_pb2_grpc.add_ClusterServiceServicer_to_server, _Cluster(store)))

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
                watch = group.create_task(router._watch())
                await router._server.ready()
                get_logger().info("service_started", address=router.address, router_id=router.router_id)
                try:
                    yield router
                finally:
                    router.monitor.stop()
                    heartbeat.stop()
                    await router._server.stop(0)
                    watch.cancel()
        finally:
            await router._server.stop(0)
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
        # Calls that came in at the last moment have yet to be told that the router is draining.
        await self._server.stop(_FAREWELL_S)

    async def _watch(self) -> None:
        addresses: set[str] = set()
        while True:
            view = await self.store.wait_for_change(_WATCH_TIMEOUT_S)
            self.feeds.update(view)
            self.placer.update(view)
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


@dataclass(slots=True)
class _Progress:
    """How far one Generate has come, for the log line about its end."""

    request_id: str
    entry: RequestEntry | None = None

    def log_fields(self) -> dict[str, object]:
        # The id is the caller's, and may be of any length as long as it is not checked.
        return {
            "request_id": self.request_id[:MAX_REQUEST_ID_BYTES],
            "attempt": self.entry.attempt_number if self.entry is not None else 0,
        }


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    # A coroutine that writes, not a generator: cancellation then always arrives inside it, so its clean-up always runs.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: ServicerContext
    ) -> None:
        arrived_s = time.monotonic()
        progress = _Progress(request.request_id or secrets.token_hex(16))
        try:
            await self._generate(request, progress, context, arrived_s)
        except KaveriError as error:
            code = status_of(error)[0].name
            metrics.REQUESTS.labels(outcome=code.lower()).inc()
            get_logger().info("request_failed", **progress.log_fields(), code=code, error=str(error))
            await abort(context, error)
        except asyncio.CancelledError:
            metrics.REQUESTS.labels(outcome="client_gone").inc()
            get_logger().info("request_abandoned", **progress.log_fields())
            raise
        except Exception:
            if context.cancelled():
                # Writing to a client that has gone fails in ways of its own.
                metrics.REQUESTS.labels(outcome="client_gone").inc()
                get_logger().info("request_abandoned", **progress.log_fields())
                raise
            metrics.REQUESTS.labels(outcome="internal").inc()
            get_logger().exception("request_failed_unexpectedly", **progress.log_fields())
            reason = f"the router failed while it served request {progress.request_id!r:.140}"
            await abort(context, InternalError(reason))

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: ServicerContext
    ) -> inference_pb2.CancelResponse:
        place = self._router.table.place_of(request.request_id)
        if place is not None:
            place.cancel()
        return inference_pb2.CancelResponse(found=place is not None)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: ServicerContext
    ) -> inference_pb2.GetModelResponse:
        if request.model != self._router.config.model_name:
            await abort(context, ModelNotFound(request.model, (self._router.config.model_name,)))
        return inference_pb2.GetModelResponse(model=self._model())

    def _model(self) -> inference_pb2.Model:
        router = self._router
        view = router.store.view()
        return inference_pb2.Model(
            name=router.config.model_name,
            max_model_len=max_model_len(view, router.config.model_name),
            vocab_size=router.tokenizer.vocab_size,
            has_chat_template=router.tokenizer.has_chat_template,
            ready=is_ready(view, router.config.model_name) and not router.draining,
        )

    async def _generate(
        self, request: inference_pb2.GenerateRequest, progress: "_Progress", context: ServicerContext, arrived_s: float
    ) -> None:
        router, request_id = self._router, progress.request_id
        if router.draining:
            raise Unavailable("this router is draining", retry_after_s=0.0)
        router.intake.check_model(request.model)
        check_request_id(request_id)
        remaining_s = context.time_remaining()
        offered = OfferedRequest(
            model=request.model,
            request_id=request_id,
            prompt=_prompt(request),
            params=params_from_proto(request.params) if request.HasField("params") else SamplingParams(),
            arrived_s=arrived_s,
            timeout_s=router.config.default_timeout_s if remaining_s is None else remaining_s,
        )
        task = asyncio.current_task()
        assert task is not None
        place = router.table.reserve(request_id, task)
        claiming = False
        metrics.IN_FLIGHT.inc()
        try:
            accepted = await router.intake.accept(offered)
            claiming = True
            await router.placer.claim_request(request_id, offered.timeout_s)
            detokenizer = router.tokenizer.detokenizer(accepted.prompt_token_ids, accepted.params.stop)
            entry = RequestEntry(accepted, Answer(detokenizer), router.placer.act)
            progress.entry = entry
            router.table.enter(place, entry)
            await self._dispatch(entry, context)
        except asyncio.CancelledError:
            if not place.interrupted:
                raise
            task.uncancel()
            if place.error is not None:
                raise place.error from None
            await context.write(_cancelled_early(request_id))
        finally:
            if claiming:
                # Also when the claim was refused or interrupted: only this router's own claim is closed.
                router.placer.close_request(request_id)
            router.table.release(place)
            metrics.IN_FLIGHT.dec()

    async def _dispatch(self, entry: RequestEntry, context: ServicerContext) -> None:
        router = self._router
        try:
            async with asyncio.TaskGroup() as group:
                dispatch = group.create_task(router.placer.run(entry), name=f"request {entry.request_id}")
                await _relay(entry, context)
                dispatch.cancel()
        finally:
            entry.release()
        if entry.error is not None:
            raise entry.error


class _Cluster(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, store: ClusterStore) -> None:
        self._store = store

    async def GetClusterView(  # noqa: N802
        self, request: cluster_pb2.GetClusterViewRequest, context: ServicerContext
    ) -> cluster_pb2.GetClusterViewResponse:
        view = self._store.view()
        return cluster_pb2.GetClusterViewResponse(
            instances=[status_to_proto(view.instances[instance_id]) for instance_id in sorted(view.instances)],
            store_connected=view.store_connected,
        )


async def _relay(entry: RequestEntry, context: ServicerContext) -> None:
    """Writes the entry's output until it has ended. Returns without a word when it ended with an error."""
    first = True
    while True:
        await entry.wait_for_output()
        if entry.error is not None:
            return
        part = entry.answer.take()
        response = inference_pb2.GenerateResponse(
            index=part.first_index, token_ids=part.token_ids, text=part.text, logprobs=part.logprobs
        )
        ended = entry.ended and not entry.answer.has_output
        if first:
            response.request_id = entry.request_id
            first = False
        if ended:
            _complete(entry, response)
        await context.write(response)
        if ended:
            return


def _cancelled_early(request_id: str) -> inference_pb2.GenerateResponse:
    """The only response of a request that Cancel reached before its input was checked."""
    outcome = FinishReason.CANCELLED
    metrics.REQUESTS.labels(outcome=outcome.value).inc()
    get_logger().info("request_finished", request_id=request_id, attempt=0, finish_reason=outcome.value)
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        finish_reason=finish_to_proto(outcome),
        usage=inference_pb2.Usage(),
        timing=inference_pb2.Timing(),
    )


def _complete(entry: RequestEntry, response: inference_pb2.GenerateResponse) -> None:
    """Fills in what the last response carries, and reports the request."""
    answer, accepted, finish = entry.answer, entry.accepted, entry.finish
    assert finish is not None
    token_count = len(answer.token_ids)
    timing = {field: value for field, value in dataclasses.asdict(entry.timing).items() if value}
    if answer.first_token_s is not None:
        timing["ttft_s"] = answer.first_token_s - accepted.arrived_s
        timing["e2e_s"] = answer.last_token_s - accepted.arrived_s
        metrics.TTFT_S.observe(timing["ttft_s"])
        metrics.E2E_S.observe(timing["e2e_s"])
        if token_count > 1:
            metrics.TPOT_S.observe((answer.last_token_s - answer.first_token_s) / (token_count - 1))
    response.finish_reason = finish_to_proto(finish)
    response.usage.prompt_tokens = len(accepted.prompt_token_ids)
    response.usage.completion_tokens = token_count
    response.timing.CopyFrom(inference_pb2.Timing(**timing))
    metrics.REQUESTS.labels(outcome=finish.value).inc()
    get_logger().info(
        "request_finished",
        request_id=entry.request_id,
        attempt=entry.attempt_number,
        finish_reason=finish.value,
        prompt_tokens=len(accepted.prompt_token_ids),
        completion_tokens=token_count,
        **timing,
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return request.token_ids.ids
        case "messages":
            return Conversation(request.messages.messages)
        case _:
            return None
