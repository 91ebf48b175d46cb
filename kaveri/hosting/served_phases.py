"""The phases of one engine instance: supported ones, served ones, and the switch between them."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kaveri.domain.view import FIRST_ORDER, NO_ORDER, DrainWay, InstanceLoad, Phase, PhaseOrder
from kaveri.engine.contract import EngineEvent
from kaveri.errors import InvalidArgument
from kaveri.hosting.service_host import HostedService
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import DRAIN_RETRY_S


class PhaseService(HostedService, Protocol):
    """Interface of an instance's work in one phase, prefill or decode. All methods are called on the event loop."""

    def drain(self, retry_after_s: float = DRAIN_RETRY_S, way: DrainWay = DrainWay.MIGRATE) -> None:
        """Refuse new requests from now on, with this retry time. 0: the phase is served elsewhere. way: how
        present ones end. Idempotent."""

    @property
    def is_idle(self) -> bool:
        """True if no request is left."""

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Process a batch of the engine's events, ignoring those of the other phase. Does not block."""


class ServedPhases:
    """Serves prefill, decode or both on one engine, and switches between them. Not thread-safe.

    A phase that is switched off refuses new requests, finishes its own or hands them over, and is then not served."""

    def __init__(
        self, services: Mapping[Phase, PhaseService], first: Collection[Phase], *, is_paired: bool = False
    ) -> None:
        """services: one per phase that the engine supports, in the order in which requests pass through. first: the
        phases served from the start, as if by FIRST_ORDER. is_paired: the instance is to be in a pair."""
        self.services = services
        self.ordered = frozenset(first)
        """Phases of the newest order. Others may still have requests."""
        for phase, service in services.items():
            if phase not in self.ordered:
                service.drain(0.0)
        self._order = FIRST_ORDER
        self._settled = self.ordered
        """Phases of the last completed order, restored if the newest one is taken back."""
        self._fault = ""
        self._way = DrainWay.MIGRATE
        """What the newest order does with the requests of phases that it has switched off."""
        self._carrying: asyncio.Task[None] | None = None
        """Waits for the end of the phases that the newest order has switched off."""
        self._stopping = False
        self._partner_id = "" if is_paired else None
        self._partner_order = NO_ORDER
        self.on_change: Callable[[], object] = lambda: None
        """Called when the phases or the partner in load() change."""
        self.on_loads: Callable[[Mapping[Phase, InstanceLoad], Collection[Phase]], object] = lambda _, __: None
        """Called by load(), with the load of each served phase and the phases that accept requests."""

    def order(
        self,
        phases: Collection[Phase],
        order: PhaseOrder,
        deadline_s: float = 0.0,
        way: DrainWay = DrainWay.MIGRATE,
    ) -> bool:
        """Serve exactly these phases from now on; those that are switched off end with their last request. During a
        drain no phase starts; undrain() starts those of the newest order.

        order: ignored unless above all earlier ones. deadline_s: seconds for the requests of phases that are switched
        off, after which the order is taken back: those of the last order that was carried out are served again. 0: no
        limit. way: how these requests end. Returns False if a newer order is known, or other phases were
        ordered under its number. Raises InvalidArgument for a phase that the engine does not support."""
        unknown = [phase for phase in phases if phase not in self.services]
        if unknown:
            raise InvalidArgument("phases", unknown[0].value, f"one of {', '.join(self.services)}")
        if order <= self._order:
            return order == self._order and (self.ordered == frozenset(phases) or bool(self._fault))
        self._order, self._fault, self._way = order, "", way
        self._serve(frozenset(phases))
        if self._carrying is not None:
            self._carrying.cancel()
        self._carrying = asyncio.create_task(self._carry_out(deadline_s or None), name="phases end")
        return True

    async def switch(self, phases: Collection[Phase], order: PhaseOrder, deadline_s: float = 0.0) -> bool:
        """Like order(), but return once no request is left in phases that are switched off. Returns False if the order
        was ignored, overtaken by a newer one or taken back, or the instance drains. If cancelled, the order stands."""
        if order <= self._order or not self.order(phases, order, deadline_s) or self._carrying is None:
            return False
        await asyncio.wait((self._carrying,))
        return self._order == order and not self._fault and not self._stopping

    def set_partner(self, partner_id: str, order: PhaseOrder) -> bool:
        """Have this partner from now on. order: as in order(). Returns False if a newer order is known. Raises
        InvalidArgument if the instance is not to be in a pair."""
        if self._partner_id is None:
            raise InvalidArgument("partner_id", partner_id, "unset: this instance is not to be in a pair")
        if order <= self._partner_order:
            return order == self._partner_order and partner_id == self._partner_id
        self._partner_id, self._partner_order = partner_id, order
        get_logger().info("partner_ordered", partner_id=partner_id, order=order)
        self.on_change()
        return True

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for service in self.services.values():
                    tasks.create_task(service.run())
        finally:
            if self._carrying is not None:
                self._carrying.cancel()

    def _serve(self, phases: frozenset[Phase]) -> None:
        self.ordered = phases
        # During a drain none of them serves anything; undrain() comes here again.
        for phase, service in self.services.items() if not self._stopping else ():
            if phase in phases:
                service.undrain()
            else:
                service.drain(0.0, self._way)
        self.on_change()

    async def _carry_out(self, deadline_s: float | None) -> None:
        # Log only after order() has returned: writing a line takes as long as the change itself.
        get_logger().info("phases_ordered", phases=sorted(self.ordered), phase_order=self._order)
        ending = [service for phase, service in self.services.items() if phase not in self.ordered]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while any(not service.is_idle for service in ending):
                    for service in ending:
                        await service.wait_idle()
                    self.on_change()
                self._settled = self.ordered
                return
        self._fault = f"requests of the phase that was to end were left after {deadline_s:g} s"
        self._serve(self._settled)
        get_logger().warning("phases_taken_back", phases=sorted(self.ordered), phase_order=self._order)

    def load(self) -> InstanceLoad:
        ending = tuple(
            phase for phase, service in self.services.items() if phase not in self.ordered and not service.is_idle
        )
        served = tuple(phase for phase in self.services if phase in self.ordered or phase in ending)
        # load() also lets a service forget ended requests, so it is called for phases that are not served, too.
        all_loads = {phase: service.load() for phase, service in self.services.items()}
        # With no phase served, report through the first service: all services report the engine's blocks.
        loads = {phase: all_loads[phase] for phase in served or tuple(self.services)[:1]}
        self.on_loads(loads, () if self._stopping else self.ordered)
        combined, decode = _combined(loads), all_loads.get(Phase.DECODE)
        if decode is not None:
            # An instance may hold copies also while it does not decode.
            combined = replace(
                combined,
                replica_free_bytes=decode.replica_free_bytes,
                replica_total_bytes=decode.replica_total_bytes,
                replica_counts=decode.replica_counts,
            )
        return replace(
            combined,
            phases=served,
            ending_phases=ending,
            phase_order=self._order,
            phase_fault=self._fault,
            partner_id=self._partner_id,
        )

    def drain(self) -> None:
        self._stopping = True
        for service in self.services.values():
            service.drain()

    def undrain(self) -> None:
        self._stopping = False
        self._serve(self.ordered)

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
        prefill_tokens_per_s=prefill.prefill_tokens_per_s,
    )
