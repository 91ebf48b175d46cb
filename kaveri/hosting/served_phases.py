"""The phases of one engine instance: supported ones, served ones, and the switch between them."""

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
"""Number of the initial order: the command that says which phases to serve."""


class PhaseService(HostedService, Protocol):
    """Interface of an instance's work in one phase, prefill or decode. All methods are called on the event loop."""

    @property
    def is_idle(self) -> bool:
        """True if no request is left."""

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Process a batch of the engine's events, ignoring those of the other phase. Does not block."""


class ServedPhases:
    """Serves prefill, decode or both on one engine, and switches between them. For one event loop.

    A phase that is switched off refuses new requests, finishes its own or hands them over, and is then not served."""

    def __init__(self, services: Mapping[Phase, PhaseService], first: Collection[Phase]) -> None:
        """services: one per phase that the engine supports, in the order in which requests pass through. first: the
        phases served from the start, as if by an order numbered FIRST_ORDER."""
        self.services = services
        self.ordered = frozenset(first)
        """Phases of the newest order. Others may still have requests."""
        for phase, service in services.items():
            if phase not in self.ordered:
                service.drain()
        self._order = FIRST_ORDER
        self._stopping = False
        self.on_change: Callable[[], object] = lambda: None
        """Called when the phases in load() change."""
        self.on_loads: Callable[[Mapping[Phase, InstanceLoad], Collection[Phase]], object] = lambda _, __: None
        """Called by load(), with the load of each served phase and the phases that accept requests."""

    async def switch(self, phases: Sequence[Phase], order: int) -> bool:
        """Serve exactly these phases. Returns once no request is left in phases that are switched off.

        order: number of this command, ignored unless above all earlier ones. During a drain no phase starts; undrain()
        starts those of the newest order. Returns False if it was ignored or overtaken by a newer one, or the instance
        drains. Raises InvalidArgument for a phase that the engine does not support. If cancelled, the order stands."""
        unknown = [phase for phase in phases if phase not in self.services]
        if unknown:
            raise InvalidArgument("phases", unknown[0].value, f"one of {', '.join(self.services)}")
        if order <= self._order:
            return False
        self._order, self.ordered = order, frozenset(phases)
        get_logger().info("phases_ordered", phases=sorted(self.ordered), phase_order=order)
        for phase, service in self.services.items():
            if phase not in self.ordered:
                service.drain()
            elif not self._stopping:
                service.undrain()
        self.on_change()
        for phase, service in self.services.items():
            if phase not in self.ordered:
                await service.wait_idle()
                if self._order != order:
                    return False
                self.on_change()
        return not self._stopping

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for service in self.services.values():
                tasks.create_task(service.run())

    def load(self) -> InstanceLoad:
        ending = tuple(
            phase for phase, service in self.services.items() if phase not in self.ordered and not service.is_idle
        )
        served = tuple(phase for phase in self.services if phase in self.ordered or phase in ending)
        # Without a phase it still has an engine, whose blocks every phase reports.
        loads = {phase: self.services[phase].load() for phase in served or tuple(self.services)[:1]}
        self.on_loads(loads, () if self._stopping else self.ordered)
        return replace(_combined(loads), phases=served, ending_phases=ending, phase_order=self._order)

    def drain(self) -> None:
        self._stopping = True
        for service in self.services.values():
            service.drain()

    def undrain(self) -> None:
        self._stopping = False
        for phase, service in self.services.items():
            if phase in self.ordered:
                service.undrain()

    async def wait_idle(self) -> None:
        # New requests are already refused.
        for service in self.services.values():
            await service.wait_idle()

    def fail_all(self, reason: str) -> None:
        for service in self.services.values():
            service.fail_all(reason)


def _combined(loads: Mapping[Phase, InstanceLoad]) -> InstanceLoad:
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
