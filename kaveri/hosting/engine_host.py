"""Life of one engine instance: start the engine, try it, serve phases with it, close it.

The engine's events reach the event loop in one call per batch, so that neither waits for the other."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.running_clock import RunningClock
from kaveri.domain.view import DrainWay, Phase, PhaseOrder, Role
from kaveri.engine.contract import Engine, EngineEvent, EngineStats, EngineStopped
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.service_host import ServiceHost, first_of, service_record
from kaveri.hosting.trial import Trial
from kaveri.telemetry.logs import get_logger

LOOK_EVERY_S = 0.25
_USUAL_STEPS = 20
_FIRST_STEP_S = 300.0
"""Limit of an engine's first step, in seconds: it may compile kernels or read weights for minutes."""


class EngineHost(ServiceHost):
    """Host process of an engine instance: serves prefill, decode or both with one engine, which it owns."""

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        store: ClusterStore,
        phases: ServedPhases,
        service_names: Sequence[str],
        register: Callable[[aio.Server], None],
        incarnation: int,
    ) -> None:
        """incarnation: number of this process run, from new_incarnation(). Others: as in ServiceHost."""
        info = engine.info
        record = replace(
            service_record(config, Role.ENGINE, config.model_name, incarnation),
            engine=info.engine,
            layout=info.layout,
            kv_endpoints=info.kv_endpoints,
            max_model_len=info.max_model_len,
            phases=tuple(phases.services),
            failure_domain=config.failure_domain,
        )
        self._engine = engine
        self._stuck_after_s = config.stuck_after_s
        self._phases = phases
        super().__init__(config, store, record, phases, service_names, register)
        phases.on_change = self.beat_now
        self._trial: Trial | None = None
        """Receives the engine's events until the engine has proved that it can run its model."""

    def order_phases(self, phases: Collection[Phase], order: PhaseOrder, deadline_s: float, way: DrainWay) -> bool:
        """Serve exactly these phases from now on. See ServedPhases.order(). Raises Unavailable if the process is
        ending."""
        self.require_going_on()
        return self._phases.order(phases, order, deadline_s, way)

    def set_partner(self, partner_id: str, order: PhaseOrder) -> bool:
        """See ServedPhases.set_partner()."""
        return self._phases.set_partner(partner_id, order)

    async def switch(self, phases: Collection[Phase], order: PhaseOrder) -> bool:
        """Serve exactly these phases, and return when the others have ended. See ServedPhases.switch()."""
        return await self._phases.switch(phases, order)

    async def serve(self, stopping: asyncio.Event) -> int:
        """Test the engine with dummy requests, serve until `stopping` is set, then drain; or until a failure. Returns
        the exit status.

        Raises ConfigError if the engine cannot run its model, which is tested before the instance registers, or the
        address cannot be bound. The engine is closed when this returns, however it ends."""
        self._trial = Trial(self._engine, Phase.DECODE in self._phases.services)
        loop = asyncio.get_running_loop()

        def forward(events: Sequence[EngineEvent]) -> None:
            loop.call_soon_threadsafe(self._handle, events)

        self._engine.start(forward)
        try:
            if not await self._engine_works(stopping):
                return 0
            watching = asyncio.create_task(self._watch_engine(), name="engine watch")
            try:
                return await super().serve(stopping)
            finally:
                watching.cancel()
        finally:
            await asyncio.to_thread(self._engine.close)

    async def _engine_works(self, stopping: asyncio.Event) -> bool:
        """Test the engine. Returns False if `stopping` was set first. Raises ConfigError if the engine fails."""
        assert self._trial is not None
        trying = asyncio.ensure_future(self._trial.run())
        await first_of(stopping.wait(), asyncio.wait((trying,)), timeout_s=None)
        if not trying.done():
            trying.cancel()
            return False
        trying.result()
        self._trial = None
        return not stopping.is_set()

    async def _watch_engine(self) -> None:
        watch = EngineWatch(self._stuck_after_s, time.monotonic())
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            stats = self._engine.stats()
            stuck_s = watch.look(stats, time.monotonic())
            if stuck_s is not None:
                self.break_off(f"the engine is stuck: no step for {stuck_s:.1f} s")
                get_logger().error("engine_stuck", stuck_s=stuck_s, limit_s=watch.limit_s)
                return

    def _handle(self, events: Sequence[EngineEvent]) -> None:
        try:
            if self._trial is not None:
                self._trial.handle(events)
            else:
                for service in self._phases.services.values():
                    service.handle(events)
                if self._heartbeat is not None:
                    self._heartbeat.note_work()
        except Exception as error:
            # The lost events are unknown, and a request without them would wait forever.
            self.break_off(f"the instance lost its engine's events: {error!r}")
            get_logger().exception("engine_events_lost", error=repr(error))
        # By contract the last event of an engine.
        if events and isinstance(last := events[-1], EngineStopped):
            self.break_off(f"the engine stopped: {last.reason}")
            get_logger().error("engine_stopped", reason=last.reason)


class EngineWatch:
    """Detects a stuck engine: it has work and makes no step. Pure; call look() every LOOK_EVERY_S seconds."""

    def __init__(self, stuck_after_s: float, now_s: float) -> None:
        """stuck_after_s: min seconds without a step after which an engine is stuck, however short its steps are."""
        self._stuck_after_s = stuck_after_s
        self.limit_s = _FIRST_STEP_S
        """Max duration of a step at the last look(), in seconds."""
        # A process that is stopped as a whole is not a stuck engine.
        self._clock = RunningClock(now_s, 2 * LOOK_EVERY_S)
        self._turn_count = 0
        self._since_s: float | None = None
        """Time on the clock when the current turn was first seen; None if the engine was idle."""

    def look(self, stats: EngineStats, now_s: float) -> float | None:
        """Seconds for which the engine has been stuck; None if it is not. now_s: time.monotonic()."""
        self._clock.tick(now_s)
        at_s = self._clock.elapsed_s
        if not stats.is_busy:
            self._since_s = None
            return None
        if self._since_s is None or stats.turn_count != self._turn_count:
            self._since_s, self._turn_count = at_s, stats.turn_count
        busy_s = at_s - self._since_s
        # The longest step, not the mean: a prompt's chunk takes many times a token's step.
        usual_s = stats.longest_step_s
        self.limit_s = max(self._stuck_after_s, _USUAL_STEPS * usual_s if usual_s > 0 else _FIRST_STEP_S)
        return busy_s if busy_s > self.limit_s else None
