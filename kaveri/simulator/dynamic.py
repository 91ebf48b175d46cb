"""A simulated instance that changes the phases it serves, by order of the cluster monitor. Pure.

It mirrors kaveri/hosting/served_phases.py around services/instance: a phase that is switched off ends with its last
request, beside the work of the other one.
"""

from collections.abc import Collection

from kaveri.domain.view import FIRST_ORDER, InstanceRecord, Phase, PhaseOrder
from kaveri.errors import KaveriError, NoCapacity, Unavailable
from kaveri.policy.retry import FIRST_PAUSE_S, Setback
from kaveri.simulator.colocated import SimulatedColocated
from kaveri.simulator.decode import Answer, SimulatedDecode
from kaveri.simulator.instance import InstanceRouter, SimulatedAttempt
from kaveri.simulator.member import SimulatedLoad
from kaveri.simulator.prefill import SimulatedPrefill
from kaveri.simulator.sequence import CountedSequence


class SimulatedDynamic(SimulatedDecode, SimulatedColocated):
    """Simulated instance that serves prefill, decode or both, as ordered."""

    def __init__(self, router: InstanceRouter, record: InstanceRecord, phases: Collection[Phase]) -> None:
        self._ordered = frozenset(phases)
        self._order = FIRST_ORDER
        self._shown: tuple[tuple[Phase, ...], tuple[Phase, ...]] = (tuple(phases), ())
        self._shown_order = FIRST_ORDER
        self._tells = False
        """True while a heartbeat that shows other phases is on its way."""
        super().__init__(router, record)
        chunk, overheads = self.pool.chunk_tokens, router.spec.overheads
        self._prefill_tokens_per_s = chunk / (self.pool.latency.step_s([(0, chunk)]) + overheads.prefill_step_s)

    def order(self, phases: Collection[Phase], order: PhaseOrder) -> None:
        """Serve exactly these phases from now on; an order that is not above all earlier ones is ignored."""
        if self.is_dead or order <= self._order:
            return
        self.touch()
        self._order, self._ordered = order, frozenset(phases)
        if Phase.PREFILL not in self._ordered:
            self._return_prompts(self._queue.to_level(1 << 62))
        if self.copies is not None:
            self.copies.owned.is_leaving = Phase.DECODE not in self._ordered
            self.copies.held.drain(Phase.DECODE not in self._ordered)
        if Phase.DECODE not in self._ordered:
            for waiting in list(self._in_line.values()):
                self.leave_line(waiting.attempt)
                waiting.answer(self._not_served())
        self._show_phases()

    def accept(self, attempt: SimulatedAttempt) -> None:
        if self.is_dead or Phase.PREFILL in self._ordered:
            super().accept(attempt)
            return
        refused = NoCapacity("prefill", FIRST_PAUSE_S, "the instance does not serve prefill now")
        self._router.lost(attempt, refused, Setback.FULL, FIRST_PAUSE_S)

    def reserve(self, attempt: SimulatedAttempt, waits: bool, answer: Answer) -> None:
        if self.is_dead or self._ordered == {Phase.DECODE}:
            super().reserve(attempt, waits, answer)
        else:
            answer(self._not_served())

    def land(self, reserved: CountedSequence) -> None:
        super().land(reserved)
        self._settle()

    def give_back(self, reserved: CountedSequence) -> None:
        super().give_back(reserved)
        self._settle()

    def stepped(self) -> None:
        SimulatedColocated.stepped(self)
        if self._in_line:
            self._give_room()
        self._settle()

    def _landed(self, reserved: CountedSequence) -> None:
        self.touch()
        super()._landed(reserved)
        self._settle()

    def _fail(self, attempt: SimulatedAttempt, error: KaveriError) -> None:
        self.touch()
        super()._fail(attempt, error)
        self._settle()

    def _begin_search(self, attempt: SimulatedAttempt) -> None:
        if Phase.DECODE in self._ordered and Phase.PREFILL in self._ordered:
            SimulatedColocated._begin_search(self, attempt)
        else:
            SimulatedPrefill._begin_search(self, attempt)

    def _settle(self) -> None:
        """Show the end of a phase whose last request has left."""
        if self._shown[1] and self._phases_now() != self._shown:
            self._show_phases()

    def _show_phases(self) -> None:
        if not self._tells:
            self._tells = True
            # To the store, and with the monitor's broadcast to the others: all views change in one event.
            self._timeline.after(2 * self._timeline.hop_s, self._phases_arrive)

    def _phases_arrive(self, _: None) -> None:
        self._tells = False
        if self.is_dead:
            return
        self._shown, self._shown_order = self._phases_now(), self._order
        self.member.beat_now()
        self._router.phases_changed()

    def _phases_now(self) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
        """Phases served, and those of them that only end."""
        busy = {Phase.PREFILL: bool(self._live), Phase.DECODE: bool(self._decoding)}
        ending = tuple(phase for phase in Phase if phase not in self._ordered and busy[phase])
        return tuple(phase for phase in Phase if phase in self._ordered or phase in ending), ending

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        load = SimulatedColocated._load_at(self, time_s, sequence_number)
        load.waiting_requests += len(self._in_line)
        load.phases, load.ending_phases = self._shown
        load.phase_order = self._shown_order
        load.prefill_tokens_per_s = self._prefill_tokens_per_s
        load.step_s = self.engine.decode_step_s
        return load

    def _not_served(self) -> Unavailable:
        return Unavailable(f"{self.record.instance_id} does not decode now", retry_after_s=0.0)
