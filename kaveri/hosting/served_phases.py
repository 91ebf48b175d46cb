"""The phases that one engine instance serves: which it can, which it does now, and the switch between them."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kaveri.domain.view import InstanceLoad, Phase
from kaveri.engine.contract import EngineEvent
from kaveri.errors import InvalidArgument
from kaveri.hosting.service_host import HostedService
from kaveri.telemetry.logs import get_logger

FIRST_ORDER = 1
"""The number of what an instance serves from its start."""


class PhaseService(HostedService, Protocol):
    """What an instance does in one phase. Every method is called on the event loop."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Takes one batch of the engine's events, and ignores those of the other phase. Does not block."""


class ServedPhases:
    """The HostedService of one engine. For one event loop.

    A phase that stops takes no new requests, finishes those that it has or hands them on, and is then served no more.
    """

    def __init__(self, services: Mapping[Phase, PhaseService], first: Collection[Phase]) -> None:
        """services: of the phases that the engine can serve, in the order in which requests pass through. first: those
        that are served from the start, as if an order of FIRST_ORDER had come."""
        self._services = services
        self._ordered = frozenset(first)
        for phase, service in services.items():
            if phase not in self._ordered:
                service.drain()
        self._order = FIRST_ORDER
        self._stopping = False
        self.on_change: Callable[[], object] = _ignore
        """Called when the load shows other phases."""
        self.on_loads: Callable[[Mapping[Phase, InstanceLoad], Collection[Phase]], object] = lambda _, __: None
        """Called whenever load() is: with the load of each phase that is served, and the phases that take requests."""

    @property
    def can_serve(self) -> tuple[Phase, ...]:
        """The phases of the record."""
        return tuple(self._services)

    def is_ordered(self, phase: Phase) -> bool:
        """Whether the newest order names the phase. A phase that it does not name may still have requests."""
        return phase in self._ordered

    async def switch(self, phases: Sequence[Phase], order: int) -> bool:
        """Serves these phases and no others. Returns when the requests of phases that stop have ended here.

        order: its number; an order counts only if no order of this or a greater number has come. During a drain no
        phase starts; the end of the drain starts those of the newest order. False: it does not count, a newer one came
        while it was carried out, or the instance drains. Raises InvalidArgument for a phase that the engine cannot
        serve here. Cancelled, the order stands.
        """
        unknown = [phase for phase in phases if phase not in self._services]
        if unknown:
            raise InvalidArgument("phases", unknown[0].value, f"one of {', '.join(self._services)}")
        if order <= self._order:
            return False
        self._order, self._ordered = order, frozenset(phases)
        get_logger().info("phases_ordered", phases=sorted(self._ordered), phase_order=order)
        for phase, service in self._services.items():
            if phase not in self._ordered:
                service.drain()
            elif not self._stopping:
                service.undrain()
        self.on_change()
        for phase, service in self._services.items():
            if phase not in self._ordered:
                await service.wait_idle()
                if self._order != order:
                    return False
                self.on_change()
        return not self._stopping

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Takes one batch of the engine's events."""
        # In this order: requests that prefill hands over here are admitted in the same turn.
        for service in self._services.values():
            service.handle(events)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for service in self._services.values():
                tasks.create_task(service.run())

    def load(self) -> InstanceLoad:
        ending = tuple(
            phase for phase, service in self._services.items() if phase not in self._ordered and not service.is_idle
        )
        served = tuple(phase for phase in self._services if phase in self._ordered or phase in ending)
        # Without a phase it still has an engine, whose blocks every phase shows.
        loads = {phase: self._services[phase].load() for phase in served or tuple(self._services)[:1]}
        self.on_loads(loads, () if self._stopping else self._ordered)
        return replace(
            _combined(loads),
            phases=served,
            ending_phases=ending,
            phase_order=self._order,
        )

    def drain(self) -> None:
        self._stopping = True
        for service in self._services.values():
            service.drain()

    def undrain(self) -> None:
        self._stopping = False
        for phase, service in self._services.items():
            if phase in self._ordered:
                service.undrain()

    async def wait_idle(self) -> None:
        # New requests are refused by now.
        for service in self._services.values():
            await service.wait_idle()

    def fail_all(self, reason: str) -> None:
        for service in self._services.values():
            service.fail_all(reason)


def _combined(loads: Mapping[Phase, InstanceLoad]) -> InstanceLoad:
    """One load for all phases. They share the engine and its blocks."""
    prefill, decode = loads.get(Phase.PREFILL), loads.get(Phase.DECODE)
    if prefill is None or decode is None:
        return next(iter(loads.values()))
    return replace(
        decode,
        waiting_requests=prefill.waiting_requests + decode.waiting_requests,
        running_requests=prefill.running_requests + decode.running_requests,
        queued_prefill_tokens=prefill.queued_prefill_tokens,
        queue_room=prefill.queue_room,
    )


def _ignore() -> None:
    pass
