"""What the decisions about one request cost, in clusters of 8 and of 1,000 instances, and admission at a batch of 256.

CPU time of this process, median of repeats. Half of the instances prefill, half decode. Each has loads that differ and
unconfirmed work. The limits are 5 us for each choice, 50 us for the views and all choices of one request, and 20 us for
each landed request at admission. Least-loaded looks at every instance, and is outside the limits.
"""

import random
import time
from collections.abc import Callable
from functools import partial

from benchmarks.support.harness import Options, Report, run
from kaveri.cluster.membership import Membership
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, Phase, Role
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.admission import AdmissionPolicy, admitted_count
from kaveri.policy.demand import Demand
from kaveri.policy.growth import BatchGrowth, BatchMember
from kaveri.policy.placement import (
    DecodePlacementPolicy,
    PlacementPolicy,
    blocks_there,
    choose_decode,
    choose_prefill,
    largest_prompt,
    max_model_len,
    missing_phases,
)
from kaveri.policy.unconfirmed import UnconfirmedWork
from tests.library.policy import reference_admission

MODEL = "kaveri-tiny"
SIZES = (8, 1_000)
PIECES = 4
CHOICE_LIMIT_US, REQUEST_LIMIT_US, ADMISSION_LIMIT_US = 5.0, 50.0, 20.0
BATCH = 256
LANDED = (1, 16)
BLOCK_TOKENS = 16
_GROWING = (PlacementPolicy.LEAST_LOADED, DecodePlacementPolicy.LEAST_LOADED)


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    repeats, calls = options.choose(15, 5), options.choose(2_000, 500)
    report.workload = {"instances": SIZES, "unconfirmed pieces per instance": PIECES, "batch": BATCH, "calls": calls}
    for size in SIZES:
        _Cluster(size, report, repeats, calls).measure()
    for policy in AdmissionPolicy:
        _admission(policy, report, repeats, max(1, calls // 20))


def _timed(call: Callable[[], object], repeats: int, calls: int) -> list[float]:
    """CPU microseconds of one call, once per repeat, after a warm-up that is not counted."""
    times = []
    for _ in range(repeats + 1):
        started_s = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - started_s) / calls * 1e6)
    return times[1:]


class _Cluster:
    """As many instances as one process would see, and the work that one chooser has sent to them."""

    def __init__(self, size: int, report: Report, repeats: int, calls: int) -> None:
        self.size = size
        self.report = report
        self.repeats = repeats
        self.calls = calls
        self.rng = random.Random(size)
        self.membership = Membership(time.monotonic)
        self.tokens: UnconfirmedWork[int] = UnconfirmedWork()
        self.blocks: UnconfirmedWork[int] = UnconfirmedWork()
        self.demand = Demand(tokens=600, predicted=900, heavy=True, layout=_layout())
        self.turn = 0
        for number in range(size):
            self._join(number)

    @property
    def view(self) -> ClusterView:
        return self.membership.view()

    def measure(self) -> None:
        for policy in PlacementPolicy:
            self._limited(f"choose_prefill, {policy}", partial(self._prefill, policy), policy not in _GROWING)
        for decode_policy in DecodePlacementPolicy:
            choose = partial(self._decode, decode_policy)
            self._limited(f"choose_decode, {decode_policy}", choose, decode_policy not in _GROWING)
        self._limited("view and all choices of one request", self._request, True, REQUEST_LIMIT_US)
        self._limited("one heartbeat", self._heartbeat, False)
        self._limited("an instance comes or goes, and the next request", self._restart, False)

    def _limited(self, name: str, call: Callable[[], object], limited: bool, limit_us: float = CHOICE_LIMIT_US) -> None:
        # A call that looks at everyone takes long enough to be timed with fewer of them.
        calls = self.calls if limited else max(10, self.calls // 20)
        cost_us = self.report.row(name, _timed(call, self.repeats, calls), "us", instances=self.size)
        if limited:
            self.report.ratio(f"{limit_us:g} us / {name}, {self.size} instances", limit_us / cost_us, target=1.0)

    def _join(self, number: int, incarnation: int = 1) -> None:
        phase = Phase.DECODE if number % 2 else Phase.PREFILL
        record = InstanceRecord(
            f"{phase}-{number}",
            incarnation,
            Role.ENGINE,
            "h:1",
            MODEL,
            layout=_layout(),
            max_model_len=8192,
            phases=(phase,),
        )
        load = InstanceLoad(
            sequence_number=1,
            queued_prefill_tokens=self.rng.randrange(4096),
            queue_room=100,
            running_requests=self.rng.randrange(32),
            free_blocks=self.rng.randrange(200, 1_000),
            total_blocks=1_000,
            context_tokens=self.rng.randrange(100_000),
            heavy_requests=self.rng.randrange(16),
            light_requests=self.rng.randrange(16),
        )
        self.membership.learn(record, load)
        instance = self.view.instances[record.instance_id]
        for key in range(PIECES):
            work = self.blocks if phase is Phase.DECODE else self.tokens
            work.add(key, instance, 1, heavy=key % 2 == 0)

    def _prefill(self, policy: PlacementPolicy) -> object:
        self.turn += 1
        return choose_prefill(self.view, MODEL, self.tokens, policy, self.rng, self.turn)

    def _decode(self, policy: DecodePlacementPolicy) -> object:
        self.turn += 1
        return choose_decode(self.view, MODEL, self.demand, self.blocks, policy, self.rng, self.turn)

    def _request(self) -> None:
        """What router and prefill decide for one request, and what they note about it."""
        view, key = self.view, PIECES
        assert not missing_phases(view, MODEL)
        assert max_model_len(view, MODEL)
        assert largest_prompt(view, MODEL)
        prefill = choose_prefill(view, MODEL, self.tokens, PlacementPolicy.POWER_OF_TWO, self.rng)
        assert prefill is not None
        self.tokens.add(key, prefill, 600)
        demand = Demand(tokens=600, predicted=900, heavy=True, layout=self.demand.layout)
        decode = choose_decode(self.view, MODEL, demand, self.blocks, DecodePlacementPolicy.HEAVY_LIGHT, self.rng)
        assert decode is not None
        self.blocks.add(key, decode, blocks_there(decode, demand.tokens), demand.heavy)
        self.tokens.remove(key, prefill.record.instance_id)
        self.blocks.remove(key, decode.record.instance_id)

    def _heartbeat(self) -> None:
        instance = self.view.ready(Phase.PREFILL, MODEL)[0]
        self.membership.learn(instance.record, instance.load)

    def _restart(self) -> None:
        self._join(0, incarnation=self.rng.getrandbits(63))
        self._request()


def _layout() -> KvLayout:
    """An object of its own, as the layouts of records that came in messages are."""
    return KvLayout("fingerprint", 2, BLOCK_TOKENS, 2, 32, "float32")


def _admission(policy: AdmissionPolicy, report: Report, repeats: int, calls: int) -> None:
    """A full batch except the seats of the landed requests, and blocks for all of them."""
    rng = random.Random(7)
    for landed_count in LANDED:
        contexts = [rng.randrange(50, 900) for _ in range(BATCH)]
        remaining = [rng.randrange(20, 400) for _ in range(BATCH)]
        members = [BatchMember(*pair) for pair in zip(contexts, remaining, strict=True)]
        running = BATCH - landed_count
        batch = BatchGrowth(BLOCK_TOKENS)
        for number, member in enumerate(members[:running]):
            batch.add(number, member)
        landed, free_blocks = members[running:], 100_000
        ask = partial(admitted_count, policy, batch, landed, landed_count, free_blocks)
        assert ask() == landed_count
        times = [cost_us / landed_count for cost_us in _timed(ask, repeats, calls)]
        cost_us = report.row("admission, for each landed request", times, "us", policy=policy, landed=landed_count)
        name = f"{policy}, {landed_count} landed at batch {BATCH}"
        report.ratio(f"{ADMISSION_LIMIT_US:g} us / admission, {name}", ADMISSION_LIMIT_US / cost_us, target=1.0)

        arguments = members[:running], landed, landed_count, free_blocks, BLOCK_TOKENS
        ask_plainly = partial(reference_admission.admitted_count, policy, *arguments)
        assert ask_plainly() == landed_count
        plain = [cost_us / landed_count for cost_us in _timed(ask_plainly, repeats, max(1, calls // 10))]
        plain_us = report.row("admission, over all members", plain, "us", policy=policy, landed=landed_count)
        if policy is not AdmissionPolicy.GREEDY:
            report.ratio(f"over all members / kept up to date, {name}", plain_us / cost_us)
    everyone = set(range(BATCH - LANDED[-1]))
    report.row("a step of the batch", _timed(lambda: batch.step(everyone), repeats, calls), "us", policy=policy)


if __name__ == "__main__":
    run("serving.decisions", measure, description=__doc__)
