"""Copies of a simulated instance's requests at others: holders are chosen, blocks sent in the background. Pure.

They mirror services/decode/replicator.py and holder.py, and kaveri/engine/copier.py. Nothing waits for a copy. Sent
blocks are computed at the services' polls, every 0.1 s, and when the instance dies: no block takes an event of its own.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, ViewedInstance
from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.errors import KaveriError, NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.replication import CopyRules, choose_holder, copy_bytes
from kaveri.policy.retry import bounded_retry_s
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.policy.waits import COPY_LOOK_S, COPY_REQUESTS_MAX, HOLDER_REST_S, NO_HOLDER_S
from kaveri.simulator.attempt import SimulatedAttempt
from kaveri.simulator.held_copies import HeldCopies, HeldKv
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline

if TYPE_CHECKING:
    from kaveri.simulator.decode import DecodeSide
    from kaveri.simulator.router import SimulatedRouter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _DOUBLINGS = 0.1, 5.0, 6


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """A request that decodes here. Hashed by identity."""

    attempt: SimulatedAttempt
    sequence: CountedSequence
    held: HeldKv | None = None
    """Its growing copy."""
    former: HeldKv | None = None
    """A copy that grows no more."""
    unsent_from: int = 0
    """Number of computed tokens at which the next block can be sent."""
    failures: int = 0
    """Consecutive failures; they double the pauses."""
    none_before_s: float = 0.0
    """Earliest time of the next holder search."""


class OwnedCopies:
    """Copies of the requests of one incarnation of an instance."""

    def __init__(self, timeline: Timeline, spec: ClusterSpec, record: InstanceRecord, instance: "DecodeSide") -> None:
        layout, copies = record.layout, spec.decode.copies
        assert isinstance(layout, KvLayout)
        self._timeline = timeline
        self._mode = copies.replication
        self._rules = CopyRules(copies.replica_min_tokens)
        self._hop_s = spec.overheads.hop_s
        self._layout = layout
        self._blocks_per_s = _blocks_per_s(spec, layout)
        self._record = record
        # Separate, so that other draws are the same with copies as without.
        self._rng = random.Random(f"{spec.seed} {record.instance_id} {record.incarnation}")
        self._instance = instance
        self._engine = instance.engine
        self.view = ClusterView()
        """View as of the monitor's last broadcast."""
        self.holders: dict[str, HeldCopies] = {}
        """Holders by instance id. One that has died answers that it cannot be reached."""
        self._owned: dict[int, OwnedRequest] = {}
        """Owned requests by number."""
        self._alone: dict[OwnedRequest, None] = {}
        """Owned requests that have no copy, and for which no holder is asked."""
        self._unconfirmed: UnconfirmedWork[int] = UnconfirmedWork()
        self._resting_until_s: dict[str, float] = {}
        self._none_before_s = 0.0
        self._asked_count = 0
        self._looks = False
        self._looked_s = -COPY_LOOK_S
        # Round-robin order in which copies send blocks.
        self._line: deque[OwnedRequest] = deque()
        self._sent_until_s = 0.0
        self._unsent_blocks = 0.0
        """Sent fraction of the next block."""
        self.is_dead = False

    def follow(self, attempt: SimulatedAttempt, sequence: CountedSequence) -> None:
        """Start to copy a request that decodes here."""
        owned = self._owned[attempt.request.number] = OwnedRequest(attempt, sequence)
        self._alone[owned] = None
        self._look_soon()

    def end(self, attempt: SimulatedAttempt) -> None:
        """End a request whose answer is complete."""
        owned = self._owned.pop(attempt.request.number)
        for held in (owned.held, owned.former):
            if held is not None:
                self._close(held)
        if owned.held is not None:
            self._line.remove(owned)
        self._alone.pop(owned, None)
        owned.held = owned.former = None

    def die(self) -> None:
        """Kill the process. Requests can be resumed from the present state of their copies."""
        self._send()
        self.is_dead = True
        for owned in self._owned.values():
            held = owned.held or owned.former
            if owned.held is not None:
                owned.held.holder.shut(owned.held)
            if held is not None and not held.is_gone and held.sent_blocks:
                owned.attempt.replica = self._location(held)
        self._owned.clear()
        self._alone.clear()
        self._line.clear()

    def is_empty(self) -> bool:
        """True if no request is followed."""
        return not self._owned and not self._line

    def copy_lost(self, held: HeldKv) -> None:
        """Handle the end of a copy: the holder takes no more of it."""
        owned = self._owned.get(held.number)
        if owned is None or owned.held is not held:
            return
        self._line.remove(owned)
        owned.held, owned.former = None, held
        self._pause(owned)

    # Holders.

    def _look_soon(self) -> None:
        if not self._looks and not self.is_dead:
            self._looks = True
            self._timeline.at(max(self._timeline.now_s, self._looked_s + COPY_LOOK_S), self._look)

    def _look(self, _: None) -> None:
        self._looks = False
        if self.is_dead:
            return
        now_s = self._looked_s = self._timeline.now_s
        self._send()
        for owned in tuple(self._alone):
            if owned.none_before_s <= now_s and self._is_worth_a_copy(owned):
                self._choose(owned, now_s)
        self._unconfirmed.retain(self.view)
        if self._resting_until_s:
            rests = self._resting_until_s
            self._resting_until_s = {name: until_s for name, until_s in rests.items() if until_s > now_s}
        if self._owned:
            self._look_soon()

    def _is_worth_a_copy(self, owned: OwnedRequest) -> bool:
        request, context_tokens = owned.attempt.request, self._engine.token_count(owned.sequence)
        rest_tokens = request.output_tokens - (context_tokens - request.prompt_tokens)
        return self._rules.is_worth_a_copy(context_tokens, rest_tokens)

    def _choose(self, owned: OwnedRequest, now_s: float) -> None:
        if self._asked_count >= COPY_REQUESTS_MAX or now_s < self._none_before_s:
            return
        needed_bytes = copy_bytes(self._layout, self._engine.token_count(owned.sequence))
        found = choose_holder(
            self._mode, self.view, self._record, needed_bytes, self._unconfirmed, self._rng, self._resting_until_s
        )
        if found is None:
            self._none_before_s = now_s + NO_HOLDER_S
            return
        self._unconfirmed.add(owned.attempt.request.number, found, needed_bytes)
        del self._alone[owned]
        self._asked_count += 1
        self._timeline.after(self._hop_s, self._ask, (owned, found))

    def _ask(self, asked: tuple[OwnedRequest, ViewedInstance]) -> None:
        """Deliver a question to its holder."""
        owned, found = asked
        number = owned.attempt.request.number
        holder = self.holders.get(found.record.instance_id)
        answer: HeldKv | KaveriError | None = None
        if holder is not None and self._owned.get(number) is owned:
            answer = holder.open(self, number, self._engine.token_count(owned.sequence))
        self._timeline.after(self._hop_s, self._asked, (owned, found, answer))

    def _asked(self, answered: tuple[OwnedRequest, ViewedInstance, HeldKv | KaveriError | None]) -> None:
        owned, found, answer = answered
        self._asked_count -= 1
        number, instance_id = owned.attempt.request.number, found.record.instance_id
        is_here = self._owned.get(number) is owned
        if isinstance(answer, HeldKv):
            if not is_here:
                # It has ended meanwhile, or this instance has died.
                answer.holder.drop(answer)
            elif answer.is_gone:
                self._pause(owned)
            else:
                if owned.former is not None:
                    self._close(owned.former)
                    owned.former = None
                self._send()
                owned.held = answer
                owned.unsent_from = self._layout.block_tokens
                self._line.append(owned)
            return
        self._unconfirmed.remove(number, instance_id)
        rest_s = bounded_retry_s(answer.retry_after_s) if isinstance(answer, NoCapacity) else HOLDER_REST_S
        self._resting_until_s[instance_id] = self._timeline.now_s + rest_s
        if is_here:
            self._pause(owned)

    def _pause(self, owned: OwnedRequest) -> None:
        pause_s = _FIRST_PAUSE_S * (0.5 + self._rng.random() / 2) * 2 ** min(owned.failures, _DOUBLINGS)
        owned.none_before_s = self._timeline.now_s + min(_LONGEST_PAUSE_S, pause_s)
        owned.failures += 1
        self._alone[owned] = None

    def _close(self, held: HeldKv) -> None:
        held.is_growing = False
        self._timeline.after(self._hop_s, held.holder.drop, held)

    def _location(self, held: HeldKv) -> ReplicaLocation:
        record = held.holder.record
        return ReplicaLocation(record.instance_id, record.incarnation, held.sent_blocks * self._layout.block_tokens)

    # Blocks.

    def _send(self) -> None:
        """Account for blocks sent since the last call. Blocks go one by one, round robin over copies."""
        now_s = self._timeline.now_s
        elapsed_s, self._sent_until_s = now_s - self._sent_until_s, now_s
        line = self._line
        if not line:
            self._unsent_blocks = 0.0
            return
        self._instance.touch()
        due = self._unsent_blocks + elapsed_s * self._blocks_per_s if self._blocks_per_s else math.inf
        ready = self._ready()
        while ready and due >= 1:
            turn = max(1, int(due) // len(ready)) if due < math.inf else 1 << 62
            left: list[tuple[OwnedRequest, int]] = []
            for owned, blocks in ready:
                sent = self._send_of(owned, min(turn, blocks, int(due) if due < math.inf else blocks))
                due -= sent
                if sent and blocks > sent:
                    left.append((owned, blocks - sent))
            ready = left
        # Unused capacity is lost.
        self._unsent_blocks = due if due < 1 else 0.0

    def _ready(self) -> list[tuple[OwnedRequest, int]]:
        """Return the requests that have complete blocks to send, with their number, in rotated order."""
        self._line.rotate(-1)
        more, block_tokens = self._engine.computed_by_run, self._layout.block_tokens
        found: list[tuple[OwnedRequest, int]] = []
        for owned in self._line:
            sequence = owned.sequence
            if more is None or sequence.phase is not SequencePhase.RUNNING:
                computed = sequence.computed
            else:
                computed = sequence.offset_tokens + more
            if computed >= owned.unsent_from:
                found.append((owned, (computed - owned.unsent_from) // block_tokens + 1))
        return found

    def _send_of(self, owned: OwnedRequest, blocks: int) -> int:
        """Send at most `blocks` blocks of a request. Returns how many."""
        held = owned.held
        assert held is not None
        if held.is_gone or not held.is_growing:
            return 0  # copy_lost() is on its way
        sent = 0
        while sent < blocks:
            if held.sent_blocks >= held.blocks and not held.holder.grow(held):
                break
            count = min(blocks - sent, held.blocks - held.sent_blocks)
            held.sent_blocks += count
            sent += count
        if sent:
            owned.failures = 0
            owned.unsent_from = (held.sent_blocks + 1) * self._layout.block_tokens
            held.holder.grow(held)
        return sent


class InstanceCopies:
    """Copies at and from one incarnation of an instance."""

    def __init__(
        self,
        timeline: Timeline,
        spec: ClusterSpec,
        record: InstanceRecord,
        instance: "DecodeSide",
        router: "SimulatedRouter",
    ) -> None:
        self.record = record
        self.owned = OwnedCopies(timeline, spec, record, instance)
        self.held = HeldCopies(timeline, spec.decode.copies, record, instance, spec.overheads.hop_s)
        self._timeline = timeline
        self._spec = spec
        self._instance = instance
        self._router = router
        self._resuming: dict[SimulatedAttempt, None] = {}
        """Attempts that have room, and whose copies are being moved into the engine."""
        self.is_dead = False

    def resume(self, attempt: SimulatedAttempt) -> None:
        """Resume a request from the copy in `attempt.replica`."""
        replica, held = attempt.replica, self.held.find(attempt.request.number)
        assert replica is not None
        if self.is_dead or held is None or replica.holder_incarnation != self.record.incarnation:
            self._refuse(attempt)
            return
        if held.is_growing:
            self.held.shut(held)
        held_tokens = self.held.usable_tokens(held, attempt.token_count)
        sequence = self._instance.reserve_resumed(attempt) if held_tokens else None
        if sequence is not None:
            self._resuming[attempt] = None
            self._timeline.after(self._spec.overheads.push_tail_s, self._land, (sequence, held_tokens))
        else:
            self._refuse(attempt)

    def die(self) -> None:
        """Kill the process."""
        self.is_dead = True
        self.owned.die()
        self.held.die()
        for attempt in self._resuming:
            self._timeline.after(self._spec.overheads.hop_s, self._router.resume_lost, attempt)
        self._resuming.clear()

    def is_empty(self) -> bool:
        """True if nothing is left here."""
        return self.owned.is_empty() and self.held.is_empty() and not self._resuming

    def _land(self, resumed: tuple[CountedSequence, int]) -> None:
        sequence, held_tokens = resumed
        attempt: SimulatedAttempt = sequence.owner
        if attempt not in self._resuming:
            return  # the process was killed
        del self._resuming[attempt]
        attempt.replica = None
        attempt.landed_s = self._timeline.now_s
        self._instance.land_resumed(sequence, held_tokens)
        held = self.held.find(attempt.request.number)
        if held is not None:
            self.held.drop(held)
        assert attempt.request.losses is not None
        attempt.request.losses.resumed(attempt.token_count, held_tokens)
        self.owned.follow(attempt, sequence)

    def _refuse(self, attempt: SimulatedAttempt) -> None:
        self._timeline.after(self._spec.overheads.hop_s, self._router.not_resumed, attempt)


def _blocks_per_s(spec: ClusterSpec, layout: KvLayout) -> float:
    """Blocks that one instance copies per second. 0: no limit."""
    rates = [spec.decode.copies.blocks_per_s] if spec.decode.copies.blocks_per_s else []
    if spec.link is not None and spec.link.token_bytes:
        rates.append(spec.link.bytes_per_s / (spec.link.token_bytes * layout.block_tokens))
    return min(rates, default=0.0)
