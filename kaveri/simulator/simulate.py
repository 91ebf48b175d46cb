"""Runs a simulation: a cluster, and the requests that it is sent. Pure: the same spec and requests give the same table.

No decision is made in this room: placement, ordering, admission, room and retries are those of kaveri.policy, steps
those of kaveri.engine.stepwise. What the services do between two decisions is written down again, event by event.
"""

import random
from collections.abc import Sequence

from kaveri.domain.view import ClusterView, InstanceRecord, Phase, Role
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.simulator.attempt import SimulatedRequest
from kaveri.simulator.decode import DecodeInstance
from kaveri.simulator.member import HeardMember
from kaveri.simulator.prefill import PrefillInstance
from kaveri.simulator.router import Router
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.table import RunTable
from kaveri.simulator.timeline import Timeline
from kaveri.workload.requests import PlannedRequest

_MODEL = "model"


def simulate(spec: ClusterSpec, requests: Sequence[PlannedRequest], concurrency: int | None = None) -> RunTable:
    """Sends the requests at their times, or in a closed loop of `concurrency`, and runs until all have ended.

    Raises ConfigError for requests that do not come in the order of their times.
    """
    return Simulation(spec, requests, concurrency).run()


class Simulation:
    """One run. `router`, `prefills` and `decodes` may be looked at after it."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[PlannedRequest], concurrency: int | None = None) -> None:
        if not requests:
            raise ConfigError("requests", "are none; there must be at least 1")
        if concurrency is not None and concurrency < 1:
            raise ConfigError("concurrency", f"is {concurrency}; it must be at least 1")
        self._requests = requests
        self._concurrency = concurrency
        self.timeline = Timeline()
        rng = random.Random(spec.seed)
        prefill_ids = [f"prefill-{number}" for number in range(spec.prefill_count)]
        decode_ids = [f"decode-{number}" for number in range(spec.decode_count)]
        self.table = RunTable(len(requests), (*prefill_ids, *decode_ids))
        self.router = Router(self.timeline, spec, _MODEL, self.table, random.Random(rng.random()))

        def record(instance_id: str, phase: Phase) -> InstanceRecord:
            pool = spec.prefill.engine if phase is Phase.PREFILL else spec.decode.engine
            layout = KvLayout("simulated", spec.layer_count, pool.block_tokens, 1, 8, "float32")
            return InstanceRecord(
                instance_id, 1, Role.ENGINE, "", _MODEL, "simulated", layout, (), pool.max_model_len, phases=(phase,)
            )

        def beat_s() -> float:
            # The first heartbeats were made before the first request came.
            return -rng.random() * spec.heartbeat_interval_s

        self.decodes = {
            name: DecodeInstance(self.timeline, spec, record(name, Phase.DECODE), beat_s(), self.router)
            for name in decode_ids
        }
        self.prefills = {
            name: PrefillInstance(
                self.timeline,
                spec,
                record(name, Phase.PREFILL),
                beat_s(),
                self.router,
                random.Random(rng.random()),
            )
            for name in prefill_ids
        }
        members = {name: one.member for name, one in self.prefills.items()}
        members |= {name: one.member for name, one in self.decodes.items()}
        self.router.view = ClusterView(members)
        self.router.prefills = self.prefills
        heard = ClusterView(
            {name: HeardMember(one.member, self.router.broadcasts) for name, one in self.decodes.items()}
        )
        for prefill in self.prefills.values():
            prefill.view, prefill.peers = heard, self.decodes

    def run(self) -> RunTable:
        """Until every request has ended."""
        if self._concurrency is None:
            self._run_open()
        else:
            self._run_closed(self._concurrency)
        return self.table

    def _run_open(self) -> None:
        timeline, generate = self.timeline, self.router.generate
        for number, planned in enumerate(self._requests):
            arrival_s = planned.arrival_s
            if arrival_s < timeline.now_s and not arrival_s >= self._former_s(number):
                raise ConfigError("requests", f"{number} comes at {arrival_s} s, before the one in front of it")
            while timeline.next_s <= arrival_s:
                timeline.step()
            timeline.now_s = arrival_s
            generate(self._request(number, planned, arrival_s))
        self._run_out()

    def _former_s(self, number: int) -> float:
        return self._requests[number - 1].arrival_s if number else 0.0

    def _run_closed(self, concurrency: int) -> None:
        waiting = iter(enumerate(self._requests))

        def send(_: object = None) -> None:
            number, planned = next(waiting, (-1, None))
            if planned is not None:
                self.router.generate(self._request(number, planned, self.timeline.now_s))

        self.router.on_end = lambda: self.timeline.after(0.0, send)
        for _ in range(concurrency):
            send()
        self._run_out()

    def _run_out(self) -> None:
        timeline = self.timeline
        while timeline.next_s < float("inf"):
            timeline.step()

    def _request(self, number: int, planned: PlannedRequest, due_s: float) -> SimulatedRequest:
        lengths = planned.lengths
        return SimulatedRequest(number, due_s, lengths.prompt_tokens, lengths.output_tokens, None)

    def check_conservation(self) -> None:
        """Asserts that every request ended once, and that nothing is left."""
        assert all(ends == 1 for ends in self.table.ends), "a request ended never, or more than once"
        empty = {name: one.is_empty() for name, one in self.prefills.items()}
        empty |= {name: one.is_empty() for name, one in self.decodes.items()}
        assert all(empty.values()), f"something is left at an instance: {empty}"
        assert self.router.is_empty(), "something is left at the router"
