"""Puts a decode instance together from its settings, and serves it."""

import asyncio
import random
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import Phase
from kaveri.engine.contract import DecodeEngine
from kaveri.hosting.config import load_engine
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import new_incarnation
from kaveri.hosting.store import open_store
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from services.decode.config import DecodeConfig
from services.decode.instance import DecodeInstance
from services.decode.metrics import DecodeMetrics
from services.decode.replicated import follow_of, open_replicas, with_replicas
from services.decode.server import SERVICE_NAME, DecodeServer


async def serve(config: DecodeConfig, stopping: asyncio.Event) -> int:
    """Serves until `stopping`, then drains. Returns the exit status. Raises ConfigError."""
    async with open_store(config, stopping, follow_of(config)) as store:
        if store is None:
            return 0
        # Load before registering: prefill must not find this instance while the model loads.
        engine = await load_engine(config, stopping)
        if engine is None:
            return 0
        async with open_replicas(config, engine) as replicas:
            return await decode_host(config, engine, store, replicas=replicas).serve(stopping)


def decode_host(
    config: DecodeConfig,
    engine: DecodeEngine,
    store: ClusterStore,
    registry: CollectorRegistry = REGISTRY,
    rng: random.Random | None = None,
    replicas: ReplicaStore | None = None,
) -> EngineHost:
    """A decode instance around `engine`, which it owns from now on.

    rng: for the choice of holders; None: a new one. replicas: where it holds copies of other instances' requests; None:
    it neither holds copies nor has any.
    """
    instance = DecodeInstance(
        engine,
        config.decode_policy,
        config.max_batch,
        config.reservation_ttl_s,
        config.orphan_grace_s,
        DecodeMetrics(engine, registry),
        range_end=config.decode_range_end,
        thresholds=config.heavy_thresholds,
    )
    incarnation = new_incarnation()
    served, holder = with_replicas(
        config, engine, store, instance, incarnation, rng or random.Random(), registry, replicas
    )
    register = partial(add_DecodeServiceServicer_to_server, DecodeServer(instance, incarnation, holder))
    return EngineHost(
        config, engine, store, ServedPhases({Phase.DECODE: served}), [SERVICE_NAME], register, incarnation
    )
