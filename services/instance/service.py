"""Builds and runs an engine instance, and hands its prompts over to its own or another decode side."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from grpc import aio
from prometheus_client import REGISTRY, CollectorRegistry

from kaveri.cluster.store import ClusterStore, ViewSource
from kaveri.domain.replica import ReplicaOffer
from kaveri.domain.view import ClusterView, Phase
from kaveri.engine.factory import BuiltEngine
from kaveri.errors import ConfigError
from kaveri.feeds.feed import RouterFeeds
from kaveri.hosting.config import load_engine
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.metrics import PhaseMetrics, register_engine_metrics
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import new_incarnation
from kaveri.hosting.store import open_store
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.lives.prompt import Adopted, RoomReserved
from kaveri.policy.levelling import queue_surplus
from kaveri.policy.prompt_queue import PromptQueue, prompt_fits
from kaveri.policy.replication import ReplicationMode
from kaveri.telemetry.logs import get_logger
from kaveri.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kaveri.v1.feed_pb2_grpc import add_FeedServiceServicer_to_server
from kaveri.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from services.decode import server as decode_server
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.metrics import DecodeMetrics
from services.decode.replicated import open_replicas, with_replicas
from services.instance import feed_server
from services.instance.config import PhasesConfig
from services.prefill import server as prefill_server
from services.prefill.decode_placer import DecodePlacer
from services.prefill.forecaster import LengthForecaster
from services.prefill.metrics import PrefillMetrics
from services.prefill.predictors import Predictors
from services.prefill.requests import PrefillRequest
from services.prefill.role import PrefillRole
from services.prefill.room_finder import Room

if TYPE_CHECKING:
    from kaveri.text.tokenizer import ModelTokenizer

_SERVICE_NAMES = (feed_server.SERVICE_NAME, prefill_server.SERVICE_NAME, decode_server.SERVICE_NAME)


async def serve(config: PhasesConfig, stopping: asyncio.Event) -> int:
    """Run an engine instance until `stopping` is set, then drain it. Returns the exit status. Raises ConfigError."""
    async with open_store(config, stopping, ViewSource.BROADCASTS) as store:
        if store is None:
            return 0
        # Load before registering: routers must not find this instance while the model loads.
        engine = await load_engine(config, stopping)
        if engine is None:
            return 0
        tokenizer = await _load_tokenizer(config)
        async with open_replicas(config, engine) as replicas:
            host = instance_host(config, engine, store, random.Random(), replicas=replicas, tokenizer=tokenizer)
            return await host.serve(stopping)


async def _load_tokenizer(config: PhasesConfig) -> "ModelTokenizer | None":
    """Load the tokenizer for clients that read answers here; None: they read at routers. At the start, as loading a
    large vocabulary blocks the interpreter for longer than an instance may be silent."""
    if not (config.reads_directly and Phase.DECODE in config.phases):
        return None
    # Takes seconds to import where no engine has done so.
    from kaveri.text.tokenizer import ModelTokenizer

    try:
        return await asyncio.to_thread(ModelTokenizer.load, config.model)
    except ConfigError as error:
        if config.direct_answers == "on":
            raise
        get_logger().warning("direct_answers_off", reason=str(error))
        return None


def instance_host(
    config: PhasesConfig,
    engine: BuiltEngine,
    store: ClusterStore,
    rng: random.Random,
    registry: CollectorRegistry = REGISTRY,
    replicas: ReplicaStore | None = None,
    tokenizer: "ModelTokenizer | None" = None,
) -> EngineHost:
    """Build an instance around `engine`, which it then owns. rng: for choosing among other instances.

    replicas: memory for copies of other instances' KV caches; None: no replication. tokenizer: for clients that
    read answers directly here; None: they cannot."""
    incarnation, serials = new_incarnation(), itertools.count(1)
    register_engine_metrics(engine, registry, config.model_name)
    feeds = RouterFeeds(config.orphan_grace_s)
    decode = DecodeInstance(
        engine,
        config.decode_policy,
        config.max_batch,
        config.reservation_ttl_s,
        config.orphan_grace_s,
        metrics=DecodeMetrics(registry),
        range_end=config.decode_range_end,
        thresholds=config.heavy_thresholds,
        serials=serials,
        tokenizer=tokenizer,
        feeds=feeds,
    )
    metrics = PrefillMetrics(registry)
    decode_placer = DecodePlacer(
        engine,
        store,
        config.model_name,
        metrics,
        rng,
        policy=config.decode_placement,
        thresholds=config.heavy_thresholds,
        own_id=config.instance_id,
        decodes_here=lambda: Phase.DECODE in phases.ordered,
        adopt=partial(_adopt, decode, Adopted(RoomReserved(config.instance_id, incarnation))),
    )
    predictors = Predictors(store, config.model_name, config.predictor_address, rng)
    prefill = PrefillRole(
        engine,
        PromptQueue[PrefillRequest](
            config.prefill_policy, config.chunk_tokens, config.max_queue, config.prefill_sched_batch
        ),
        decode_placer,
        LengthForecaster(predictors, config.prediction, config.prediction_budget_s, metrics),
        metrics,
        orphan_grace_s=config.orphan_grace_s,
        has_room=partial(_has_room, engine, decode, decode_placer.at_first_token),
        serials=serials,
        feeds=feeds,
    )
    decode_placer.finder.on_view = partial(_level, config, prefill)
    served, holder = with_replicas(config, engine, store, decode, incarnation, rng, registry, replicas)
    decode_placer.keeps = _HolderOfPrompts(config, engine, holder) if holder and config.keeps_kv else None
    is_paired = holder is not None and config.replication is ReplicationMode.PAIR
    phases = ServedPhases({Phase.PREFILL: prefill, Phase.DECODE: served}, config.phases, is_paired=is_paired)
    phases.on_loads = PhaseMetrics(config.model_name, registry).note

    def register(server: aio.Server) -> None:
        feed_service = feed_server.FeedServer(feeds, prefill, decode, incarnation, holder)
        add_FeedServiceServicer_to_server(feed_service, server)
        add_PrefillServiceServicer_to_server(prefill_server.PrefillServer(prefill, incarnation), server)
        decode_service = decode_server.DecodeServer(
            decode, incarnation, holder, lambda: Phase.PREFILL in phases.ordered
        )
        add_DecodeServiceServicer_to_server(decode_service, server)

    return EngineHost(config, engine, store, phases, _SERVICE_NAMES, register, incarnation)


class _HolderOfPrompts:
    """Implements PromptKeeper with the instance's ReplicaHolder."""

    def __init__(self, config: PhasesConfig, engine: BuiltEngine, holder: ReplicaHolder) -> None:
        self._min_tokens = config.replica_min_tokens
        self._layout = engine.info.layout
        self._holder = holder

    def keep(self, request: PrefillRequest, room: Room) -> None:
        if request.token_count < self._min_tokens:
            return
        owner_id, left_s = room.target.record.instance_id, request.deadline_s - time.monotonic()
        offer = ReplicaOffer(
            request.request_id, request.ownership, owner_id, room.incarnation, self._layout, request.token_count, left_s
        )
        self._holder.keep(request.engine_request.key, offer)

    def forget(self, request: PrefillRequest) -> None:
        self._holder.forget(request.engine_request.key)


def _level(config: PhasesConfig, prefill: PrefillRole, view: ClusterView) -> None:
    """Return prompts for a shorter queue elsewhere, if the view shows one."""
    if prefill.has_waiting_prompts:
        prefill.level(queue_surplus(view, config.model_name, config.instance_id, prefill.queued_tokens))


def _has_room(
    engine: BuiltEngine,
    decode: DecodeInstance,
    decodes_here: Callable[[], bool],
    request: PrefillRequest,
    computing: Collection[PrefillRequest],
) -> bool:
    """True if a prompt fits next to the KV blocks that the admission policy reserves for answers."""
    # Without running and new answers, the engine alone decides.
    if decode.is_idle and not decodes_here():
        return True
    first = next(iter(computing), None)
    kept_blocks = decode.kept_blocks((first.engine_request, first.predicted_length) if first is not None else None)
    return prompt_fits(
        request.token_count,
        (other.token_count for other in computing),
        kept_blocks,
        engine.stats().free_blocks,
        engine.info.layout.block_tokens,
    )


def _adopt(decode: DecodeInstance, adopted: Adopted, request: PrefillRequest) -> Adopted:
    first = request.log.first_token
    assert first is not None, request
    decode.adopt(
        request.engine_request,
        request.ownership,
        request.deadline_s - time.monotonic(),
        (first.token_id, first.logprobs),
        request.predicted_length,
        request.traceparent,
    )
    return adopted
