"""Simulates a cluster and its requests. Pure: the same spec and requests give the same table.

Decisions are those of kaveri.policy (placement, ordering, admission, reservation, retries), steps those of
kaveri.engine.stepwise. The services' work between decisions is written anew, event by event.
"""

import gc
import math
import random
from collections.abc import Sequence

from kaveri.domain.view import BOTH_PHASES, ClusterView, InstanceRecord, PhaseOrder, Role, ViewedInstance
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.flipping import FlipOrder, FlipState, OrderedPhases, observe
from kaveri.policy.pairs import pair_up
from kaveri.simulator.colocated import SimulatedColocated
from kaveri.simulator.decode import DecodeSide, SimulatedDecode
from kaveri.simulator.dynamic import SimulatedDynamic
from kaveri.simulator.instance import SimulatedRequest
from kaveri.simulator.member import HEARTBEAT_INTERVAL_S, HeardMember
from kaveri.simulator.prefill import SimulatedPrefill
from kaveri.simulator.router import MODEL, SimulatedRouter
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.table import RunTable
from kaveri.simulator.timeline import Timeline
from kaveri.workload.requests import PlannedRequest


def simulate(spec: ClusterSpec, requests: Sequence[PlannedRequest], concurrency: int | None = None) -> RunTable:
    """Simulate requests at their arrival times, or `concurrency` at a time, until all have ended.

    Raises ConfigError for requests that are not in order of arrival.
    """
    return Simulation(spec, requests, concurrency).run()


class Simulation:
    """One simulation run of a cluster. `router`, `prefills` and `decodes` can be inspected after run()."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[PlannedRequest], concurrency: int | None = None) -> None:
        if not requests:
            raise ConfigError("requests", "are none; there must be at least 1")
        if concurrency is not None and concurrency < 1:
            raise ConfigError("concurrency", f"is {concurrency}; it must be at least 1")
        self._requests = requests
        self._concurrency = concurrency
        self._spec = spec
        self.timeline = Timeline(spec.overheads.hop_s)
        self._rng = random.Random(spec.seed)
        self.table = RunTable(len(requests), spec.instance_ids)
        self.router = SimulatedRouter(self.timeline, spec, self.table, self._rng)
        self.prefills = self.router.prefills
        self.decodes: dict[str, SimulatedDecode] = {}
        self._present: set[str] = set()
        """Instances whose leases are valid."""
        self._heard: dict[str, HeardMember] = {}
        """Present instances as of the monitor's last broadcast."""
        self._flips = FlipState()
        self._partners: dict[str, str] = {}
        self._under_way: dict[str, OrderedPhases] = {}
        self.flip_count = 0
        for instance_id in (*spec.decode_ids, *spec.prefill_ids, *spec.colocated_ids, *spec.dynamic_ids):
            # The first heartbeats were made before the first request came.
            self._start(instance_id, 1, -self._rng.random() * HEARTBEAT_INTERVAL_S)
        self._show_members()
        self._plan_deaths()
        self.router.on_phases = self._show_members
        if spec.dynamic_count:
            self.timeline.after(spec.router.monitor_interval_s, self._observe)

    def _start(self, instance_id: str, incarnation: int, first_beat_s: float) -> None:
        spec, router = self._spec, self.router
        phases = spec.first_phases(instance_id)
        is_prefill, is_dynamic = instance_id in spec.prefill_ids, instance_id in spec.dynamic_ids
        pool = spec.prefill.engine if is_prefill else spec.decode.engine
        record = InstanceRecord(
            instance_id,
            incarnation,
            Role.ENGINE,
            "",
            MODEL,
            "simulated",
            KvLayout("simulated", spec.prefill.layer_count, pool.block_tokens, 1, 8, "float32"),
            max_model_len=pool.max_model_len,
            phases=BOTH_PHASES if is_dynamic else phases,
        )
        started: SimulatedPrefill | SimulatedDecode
        if is_dynamic:
            started = self.prefills[instance_id] = self.decodes[instance_id] = SimulatedDynamic(router, record, phases)
        elif is_prefill or len(phases) > 1:
            kind = SimulatedPrefill if is_prefill else SimulatedColocated
            started = self.prefills[instance_id] = kind(router, record)
        else:
            started = self.decodes[instance_id] = SimulatedDecode(router, record)
        started.start(first_beat_s)
        self._heard[instance_id] = HeardMember(started.member, router.broadcasts)
        if isinstance(started, DecodeSide) and started.copies is not None:
            router.holders[instance_id] = started.copies
        self._present.add(instance_id)

    def _show_members(self) -> None:
        """Give router and prefill instances new cluster views, after instances joined or left."""
        members: dict[str, ViewedInstance] = {}
        heard: dict[str, ViewedInstance] = {}
        for instance_id, prefill in self.prefills.items():
            if instance_id in self._present:
                members[instance_id] = prefill.member
                heard[instance_id] = self._heard[instance_id]
        for instance_id, decode in self.decodes.items():
            if instance_id in self._present:
                members[instance_id] = decode.member
                heard[instance_id] = self._heard[instance_id]
        self.router.view = ClusterView(members)
        view = ClusterView(heard)
        for prefill in self.prefills.values():
            prefill.view, prefill.peers = view, self.decodes
        if self.router.holders:
            self._show_holders(view)

    def _show_holders(self, decodes: ClusterView) -> None:
        """Tell instances which others can hold KV copies. decodes: view as of the monitor's last broadcast."""
        holding, broadcasts = self.router.holders, self.router.broadcasts
        heard: dict[str, ViewedInstance] = {
            name: HeardMember(one.member, broadcasts)
            for name, one in self.prefills.items()
            if name in holding and name in self._present
        }
        view = ClusterView(heard) if heard else decodes
        holders = {name: copies.held for name, copies in holding.items()}
        able = [one for name, one in sorted(view.instances.items()) if name in holding]
        # Kept from one call to the next: a pair lasts until one of the two leaves.
        self._partners = pair_up(able, self._partners)
        for name, copies in holding.items():
            choice = copies.owned.choice
            choice.view, choice.holders, choice.partner_id = view, holders, self._partners.get(name, "")

    # Changes of phases, decided by the router that leads.

    def _observe(self, _: None) -> None:
        now_s, rules = self.timeline.now_s, self._spec.flips
        orders, self._flips = observe(self.router.view, MODEL, rules, self._under_way, now_s, self._flips)
        for order in orders:
            self.flip_count += 1
            number = PhaseOrder(1, self.flip_count)
            self._under_way[order.instance_id] = OrderedPhases(order.incarnation, number, order.phases)
            self.timeline.send(self._carry_out, (order, number))
        if not all(self.table.ends):
            self.timeline.after(self._spec.router.monitor_interval_s, self._observe)

    def _carry_out(self, ordered: tuple[FlipOrder, PhaseOrder]) -> None:
        order, number = ordered
        instance = self._instance(order.instance_id)
        if isinstance(instance, SimulatedDynamic) and instance.record.incarnation == order.incarnation:
            instance.order(order.phases, number)

    # Deaths.

    def _plan_deaths(self) -> None:
        failures = self._spec.failures
        for death in failures.deaths:
            self.timeline.at(death.at_s, self._die, death.instance_id)
        if failures.mtbf_s is not None:
            for instance_id in self._spec.instance_ids:
                self._draw_death(instance_id)

    def _draw_death(self, instance_id: str) -> None:
        assert self._spec.failures.mtbf_s is not None
        self.timeline.after(self._rng.expovariate(1 / self._spec.failures.mtbf_s), self._die, instance_id)

    def _instance(self, instance_id: str) -> SimulatedPrefill | SimulatedDecode:
        return self.prefills[instance_id] if instance_id in self.prefills else self.decodes[instance_id]

    def _die(self, instance_id: str) -> None:
        instance, failures = self._instance(instance_id), self._spec.failures
        if instance.is_dead or all(self.table.ends):
            return
        instance.die()
        record = instance.member.record
        lease_ends_s = instance.member.last_beat_s + record.lease_ttl_s
        self.timeline.at(max(self.timeline.now_s, lease_ends_s), self._leave, record)
        if failures.repair_s is not None:
            self.timeline.after(failures.repair_s, self._restart, record)

    def _leave(self, record: InstanceRecord) -> None:
        if self._instance(record.instance_id).member.record.incarnation == record.incarnation:
            self._present.discard(record.instance_id)
            self._show_members()

    def _restart(self, record: InstanceRecord) -> None:
        self._start(record.instance_id, record.incarnation + 1, self.timeline.now_s)
        self._show_members()
        if self._spec.failures.mtbf_s is not None:
            self._draw_death(record.instance_id)

    def run(self) -> RunTable:
        """Run until every request has ended."""
        # A run makes millions of objects and no reference cycles: garbage collection would take a tenth of its time.
        collects = gc.isenabled()
        gc.disable()
        try:
            if self._concurrency is None:
                self._run_open()
            else:
                self._run_closed(self._concurrency)
        finally:
            if collects:
                gc.enable()
        return self.table

    def _run_open(self) -> None:
        timeline, generate = self.timeline, self.router.generate
        for number, planned in enumerate(self._requests):
            arrival_s = planned.arrival_s
            if arrival_s < timeline.now_s:
                raise ConfigError("requests", f"{number} comes at {arrival_s} s, before the one in front of it")
            timeline.run_until(arrival_s)
            timeline.now_s = arrival_s
            generate(self._request(number, planned, arrival_s))
        timeline.run_until(math.inf)

    def _run_closed(self, concurrency: int) -> None:
        waiting = iter(enumerate(self._requests))

        def send(_: object = None) -> None:
            number, planned = next(waiting, (-1, None))
            if planned is not None:
                self.router.generate(self._request(number, planned, self.timeline.now_s))

        self.router.on_end = lambda _: self.timeline.after(0.0, send)
        for _ in range(concurrency):
            send()
        self.timeline.run_until(math.inf)

    def _request(self, number: int, planned: PlannedRequest, due_s: float) -> SimulatedRequest:
        lengths = planned.lengths
        return SimulatedRequest(number, due_s, lengths.prompt_tokens, lengths.output_tokens)
