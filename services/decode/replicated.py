"""Decode instance that has its requests' KV copied to other instances, and holds copies for them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import cast

from prometheus_client import CollectorRegistry

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import DrainWay, InstanceLoad, InstanceRecord, Role
from kaveri.engine.contract import DecodeEngine, EngineEvent, KeepingEngine, Replicated
from kaveri.engine.factory import listen_endpoints, transports_maker
from kaveri.errors import ConfigError
from kaveri.hosting.config import name_flag
from kaveri.hosting.served_phases import PhaseService
from kaveri.hosting.service_host import new_incarnation
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.policy.replication import CopyRules, ReplicationMode
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import DRAIN_RETRY_S
from services.decode.config import BatchConfig
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.replica_metrics import ReplicaMetrics
from services.decode.replicator import Replicator


class ReplicatedDecode:
    """Decode side of an instance that holds KV copies for others and has its own requests copied."""

    def __init__(
        self, instance: DecodeInstance, holder: ReplicaHolder, replicator: Replicator, *, always_holds: bool
    ) -> None:
        """always_holds: hold copies also while the instance does not decode."""
        self._always_holds = always_holds
        self._instance = instance
        self._holder = holder
        self._replicator = replicator

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for part in (self._instance, self._holder, self._replicator):
                tasks.create_task(part.run())

    def handle(self, events: Sequence[EngineEvent]) -> None:
        # Replicated events come for each block and do not concern the instance.
        if not all(isinstance(event, Replicated) for event in events):
            self._instance.handle(events)
        self._holder.handle(events)
        self._replicator.handle(events)

    def load(self) -> InstanceLoad:
        counts = replace(self._replicator.counts, resumed=self._holder.resumed_count)
        return replace(self._holder.with_room(self._instance.load()), replica_counts=counts)

    def drain(self, retry_after_s: float = DRAIN_RETRY_S, way: DrainWay = DrainWay.MIGRATE) -> None:
        self._instance.drain(retry_after_s, way)
        if self._always_holds and retry_after_s == 0:
            # Only the phase ends. An earlier drain of the whole instance may have been undone.
            self._holder.undrain()
        else:
            self._holder.drain()
        self._replicator.drain(way)

    def undrain(self) -> None:
        self._instance.undrain()
        self._holder.undrain()
        self._replicator.undrain()

    @property
    def is_idle(self) -> bool:
        return self._instance.is_idle and self._holder.is_idle

    async def wait_idle(self) -> None:
        while True:
            await self._instance.wait_idle()
            await self._holder.wait_idle()
            # A request may have been resumed from a copy meanwhile.
            if self.is_idle:
                return

    def fail_all(self, reason: str) -> None:
        self._instance.fail_all(reason)


@contextlib.asynccontextmanager
async def open_replicas(config: BatchConfig, engine: DecodeEngine) -> AsyncIterator[ReplicaStore | None]:
    """Open a store for KV copies of other instances' requests, closed at exit. Yields None if replication is off or the
    engine cannot copy KV. Raises ConfigError."""
    if config.replication is ReplicationMode.OFF:
        yield None
        return
    if not engine.info.can_replicate:
        get_logger().warning("replication_unavailable", engine=engine.info.engine)
        yield None
        return
    if config.replica_place == "pool" and not engine.info.can_keep:
        raise ConfigError("--replica-place", f"is pool; {engine.info.engine} keeps copies in host memory only")
    store = await asyncio.to_thread(_make_store, config, engine)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


def keeper_of(config: BatchConfig, engine: DecodeEngine) -> KeepingEngine | None:
    """Return the engine if KV copies are kept in its KV pool; None: they have memory of their own."""
    return cast(KeepingEngine, engine) if config.replica_place == "pool" else None


def with_replicas(
    config: BatchConfig,
    engine: DecodeEngine,
    store: ClusterStore,
    instance: DecodeInstance,
    incarnation: int,
    rng: random.Random,
    registry: CollectorRegistry,
    replicas: ReplicaStore | None,
) -> tuple[PhaseService, ReplicaHolder | None]:
    """Add replication to a decode instance; return its service and its holder of KV copies. replicas: store
    of these copies; None disables replication. rng: for the choice of other holders."""
    if replicas is None:
        return instance, None
    metrics = ReplicaMetrics(registry)
    own = InstanceRecord(
        config.instance_id,
        incarnation,
        Role.ENGINE,
        address="",
        model=config.model_name,
        layout=engine.info.layout,
        failure_domain=config.failure_domain,
    )
    rules = CopyRules(config.replica_min_tokens, mode=config.replication, keeps=config.keeps_kv)

    def is_there(instance_id: str, life: int) -> bool:
        status = store.view().instances.get(instance_id)
        return status is not None and status.record.incarnation == life

    keeper = keeper_of(config, engine)
    holder = ReplicaHolder(instance, replicas, incarnation, config.orphan_grace_s, is_there, metrics, keeper)
    replicator = Replicator(engine, instance, store, own, rules, rng, metrics, holder)
    return ReplicatedDecode(instance, holder, replicator, always_holds=config.keeps_kv), holder


def _make_store(config: BatchConfig, engine: DecodeEngine) -> ReplicaStore:
    # A configured port belongs to the engine.
    settings = replace(config, kv_port=0)
    listen, epoch, keeper = listen_endpoints(settings), new_incarnation(), keeper_of(config, engine)
    try:
        if keeper is not None:
            return keeper.keep_replicas(listen, epoch)
        return HostReplicas(
            engine.info.layout,
            config.replica_memory,
            listen=listen,
            transports=transports_maker(settings)(),
            epoch=epoch,
            receiving=settings.receiving,
        )
    except ConfigError as error:
        raise name_flag(error) from error
