"""Puts a decode instance together from its settings, and serves it."""

import asyncio
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
from kaveri.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from services.decode.config import DecodeConfig
from services.decode.instance import DecodeInstance
from services.decode.metrics import DecodeMetrics
from services.decode.server import SERVICE_NAME, DecodeServer


async def serve(config: DecodeConfig, stopping: asyncio.Event) -> int:
    """Serves until `stopping`, then drains. Returns the exit status. Raises ConfigError."""
    async with open_store(config, stopping) as store:
        if store is None:
            return 0
        # Load before registering: prefill must not find this instance while the model loads.
        engine = await load_engine(config, stopping)
        if engine is None:
            return 0
        return await decode_host(config, engine, store).serve(stopping)


def decode_host(
    config: DecodeConfig, engine: DecodeEngine, store: ClusterStore, registry: CollectorRegistry = REGISTRY
) -> EngineHost:
    """A decode instance around `engine`, which it owns from now on."""
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
    register = partial(add_DecodeServiceServicer_to_server, DecodeServer(instance, incarnation))
    return EngineHost(
        config, engine, store, ServedPhases({Phase.DECODE: instance}), [SERVICE_NAME], register, incarnation
    )
