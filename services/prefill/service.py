"""Puts a prefill instance together from its settings, and serves it."""

import asyncio
import random
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from kaveri.cluster.store import ClusterStore, Follow
from kaveri.domain.view import Phase
from kaveri.engine.contract import PrefillEngine
from kaveri.hosting.config import load_engine
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import new_incarnation
from kaveri.hosting.store import open_store
from kaveri.policy.prompt_queue import PromptQueue
from kaveri.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from services.prefill.config import PrefillConfig
from services.prefill.decode_placer import DecodePlacer
from services.prefill.forecaster import LengthForecaster
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import PrefillRequest
from services.prefill.role import PrefillRole
from services.prefill.server import SERVICE_NAME, PrefillServer


async def serve(config: PrefillConfig, stopping: asyncio.Event) -> int:
    """Serves until `stopping`, then drains. Returns the exit status. Raises ConfigError."""
    async with open_store(config, stopping, Follow.BROADCASTS) as store:
        if store is None:
            return 0
        # The engine before the lease: no request should come here while a model loads.
        engine = await load_engine(config, stopping)
        if engine is None:
            return 0
        return await prefill_host(config, engine, store, random.Random()).serve(stopping)


def prefill_host(
    config: PrefillConfig,
    engine: PrefillEngine,
    store: ClusterStore,
    rng: random.Random,
    registry: CollectorRegistry = REGISTRY,
) -> EngineHost:
    """A prefill instance around `engine`, which it owns from now on. rng: for its choices of peers."""
    metrics = PrefillMetrics(engine, registry)

    decode_placer = DecodePlacer(
        engine,
        store,
        config.model_name,
        metrics,
        rng,
        policy=config.decode_placement,
        thresholds=config.heavy_thresholds,
    )
    queue = PromptQueue[PrefillRequest](
        config.prefill_policy, config.chunk_tokens, config.max_queue, config.prefill_sched_batch
    )
    forecaster = LengthForecaster.configured(config, store, metrics, rng)
    role = PrefillRole(engine, queue, decode_placer, forecaster, metrics, config.orphan_grace_s)
    register = partial(add_PrefillServiceServicer_to_server, PrefillServer(role))
    return EngineHost(
        config, engine, store, ServedPhases({Phase.PREFILL: role}), [SERVICE_NAME], register, new_incarnation()
    )
