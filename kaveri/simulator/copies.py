"""Copies of a simulated instance's KV in other instances' memory, to resume its requests after its death, and to move
them while it lives. Pure.

They mirror services/decode/replicator.py and holder.py, and kaveri/engine/copier.py. No request waits for a copy. Sent
blocks are counted every 0.1 s, as the services poll, and when the instance dies, without an event per block.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, ViewedInstance
from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.errors import KaveriError, NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.lives import copy_owner
from kaveri.policy.balance import RunningRequest, plan_moves
from kaveri.policy.replication import CopyRules, ReplicationMode, choose_holder, copy_bytes, has_room_to_run
from kaveri.policy.retry import bounded_retry_s
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.policy.waits import COPY_LOOK_S, COPY_REQUESTS_MAX, HOLDER_REST_S, NO_HOLDER_S
from kaveri.simulator.held_copies import HeldCopies, HeldKv
from kaveri.simulator.instance import InstanceRouter, SimulatedAttempt, SimulatedInstance
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline

_MOST_MOVES = 2
"""Max requests that an instance moves in COPY_LOOK_S, as services/decode/replicator.py has that many on the way."""
_MOST_LACKING_BLOCKS, _LEAST_REST_TOKENS, _SETTLED_S = 2, 4, 1.0
"""As services/decode/replicator.py."""

IsFit = Callable[[ViewedInstance], bool]


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """A request that decodes on this instance, with the state of its KV copies at others."""

    attempt: SimulatedAttempt
    sequence: CountedSequence
    held: HeldKv | None = None
    """Copy that still receives blocks."""
    former: HeldKv | None = None
    """Earlier copy that receives no more blocks."""
    unsent_from: int = 0
    """Number of computed tokens that completes the next block to send."""
    failures: int = 0
    """Consecutive failures; each doubles the pause before the next holder search."""
    none_before_s: float = 0.0
    """Earliest time of the next search for an instance to hold a copy."""


class _BlockSender:
    """Sends KV blocks to copies in the background, round robin over the requests."""

    def __init__(self, timeline: Timeline, instance: SimulatedInstance, layout: KvLayout, blocks_per_s: float) -> None:
        """blocks_per_s: 0 for no limit."""
        self.line: deque[OwnedRequest] = deque()
        """Requests with a growing copy, in the order in which they send."""
        self._timeline = timeline
        self._instance = instance
        self._block_tokens = layout.block_tokens
        self._blocks_per_s = blocks_per_s
        self._sent_until_s = 0.0
        self._unsent_blocks = 0.0

    def add(self, owned: OwnedRequest, held: HeldKv) -> None:
        self.send()
        owned.held = held
        owned.unsent_from = self._block_tokens
        self.line.append(owned)

    def send(self) -> None:
        """Mark the blocks that were sent since the last call, at the rate limit, as received by the copies."""
        now_s = self._timeline.now_s
        elapsed_s, self._sent_until_s = now_s - self._sent_until_s, now_s
        if not self.line:
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
        """Return the requests with complete unsent blocks and the number of these; rotate the round-robin order."""
        self.line.rotate(-1)
        more = self._instance.engine.computed_by_run
        found: list[tuple[OwnedRequest, int]] = []
        for owned in self.line:
            sequence = owned.sequence
            if more is None or sequence.phase is not SequencePhase.RUNNING:
                computed = sequence.computed
            else:
                computed = sequence.offset_tokens + more
            if computed >= owned.unsent_from:
                found.append((owned, (computed - owned.unsent_from) // self._block_tokens + 1))
        return found

    def _send_of(self, owned: OwnedRequest, blocks: int) -> int:
        """Send at most `blocks` blocks of a request. Returns the number sent."""
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
            owned.unsent_from = (held.sent_blocks + 1) * self._block_tokens
            held.holder.grow(held)
        return sent


class _HolderChoice:
    """Chooses instances to hold KV copies (holders), by their reported loads and recent refusals."""

    def __init__(self, mode: ReplicationMode, owner: InstanceRecord, rng: random.Random) -> None:
        self.view = ClusterView()
        self.holders: dict[str, HeldCopies] = {}
        """KV copies that each instance holds for others, by its id. A dead instance raises Unavailable."""
        self.asked_count = 0
        self.partner_id = ""
        """The other instance of the pair; empty: none."""
        self._mode = mode
        self._owner = owner
        self._rng = rng
        self._unconfirmed: UnconfirmedWork[int] = UnconfirmedWork()
        self._resting_until_s: dict[str, float] = {}
        self._none_before_s = 0.0

    def choose(
        self, number: int, needed_bytes: int, now_s: float, target: InstanceRecord | None, is_fit: IsFit
    ) -> ViewedInstance | None:
        """Choose an instance to ask for memory for request `number`'s copy; None if none can be asked now. target: the
        only one that comes into question, as the request is to move there. is_fit: additional condition."""
        if self.asked_count >= COPY_REQUESTS_MAX or now_s < self._none_before_s:
            return None
        found = choose_holder(
            self._mode if target is None else ReplicationMode.SPREAD,
            self.view,
            self._owner,
            needed_bytes,
            self._unconfirmed,
            self._rng,
            self._resting_until_s,
            lambda one: (target is None or one.record is target) and is_fit(one),
            partner_id=self.partner_id,
        )
        if found is None and target is not None:
            return None
        if found is None:
            self._none_before_s = now_s + NO_HOLDER_S
            return None
        self._unconfirmed.add(number, found, needed_bytes)
        self.asked_count += 1
        return found

    def takes_copy(self, instance: ViewedInstance, needed_bytes: int) -> bool:
        """Return True if the instance has memory for a copy of so many bytes, and has not refused one lately."""
        free_bytes = instance.load.replica_free_bytes - self._unconfirmed.at(instance).amount
        return free_bytes >= needed_bytes and instance.record.instance_id not in self._resting_until_s

    def refused(self, number: int, instance_id: str, rests_until_s: float) -> None:
        self._unconfirmed.remove(number, instance_id)
        self._resting_until_s[instance_id] = rests_until_s

    def pause_s(self, failures: int) -> float:
        """Draw the pause, in seconds, after consecutive failures to copy a request: exponential, with jitter."""
        return copy_owner.pause_s(failures, self._rng.random())

    def forget_old(self, now_s: float) -> None:
        """Forget expired refusals, and memory requests that reported loads include by now."""
        self._unconfirmed.retain(self.view)
        if self._resting_until_s:
            rests = self._resting_until_s
            self._resting_until_s = {name: until_s for name, until_s in rests.items() if until_s > now_s}


class OwnedCopies:
    """Copies, at other instances, of the requests of one incarnation (run of the process) of an instance."""

    def __init__(self, router: InstanceRouter, instance: SimulatedInstance, layout: KvLayout) -> None:
        timeline, spec = router.timeline, router.spec
        record, copies = instance.record, spec.decode.copies
        self._router = router
        self._timeline = timeline
        self._instance = instance
        self._push_tail_s = spec.overheads.push_tail_s
        self._rules = CopyRules(copies.replica_min_tokens)
        self._layout = layout
        self._engine = instance.engine
        # Separate, so that other draws are the same with copies as without.
        rng = random.Random(f"{spec.seed} {record.instance_id} {record.incarnation}")
        self.choice = _HolderChoice(copies.replication, record, rng)
        self._sender = _BlockSender(timeline, instance, layout, _blocks_per_s(spec, layout))
        self._owned: dict[int, OwnedRequest] = {}
        self._alone: dict[OwnedRequest, None] = {}
        """Requests that have no copy and have not asked a holder for one."""
        self._looks = False
        self._looked_s = -COPY_LOOK_S
        self.is_leaving = False
        """The instance ceases to decode: all requests move that can."""
        self._moved: UnconfirmedWork[int] = UnconfirmedWork()
        """Blocks of moved requests that no heartbeat reports yet."""
        self._target: InstanceRecord | None = None
        """Target of the last plan of moves."""

    def follow(self, attempt: SimulatedAttempt, sequence: CountedSequence) -> None:
        """Start to copy the KV of a request that decodes on this instance."""
        owned = self._owned[attempt.request.number] = OwnedRequest(attempt, sequence)
        self._alone[owned] = None
        self._look_soon()

    def end(self, attempt: SimulatedAttempt) -> None:
        """Drop the copies of a request whose answer is complete."""
        owned = self._owned.pop(attempt.request.number)
        for held in (owned.held, owned.former):
            if held is not None:
                self._close(held)
        if owned.held is not None:
            self._sender.line.remove(owned)
        self._alone.pop(owned, None)
        owned.held = owned.former = None

    def die(self) -> None:
        """Stop as the process dies. Each request can resume from the blocks sent to its copy so far."""
        self._sender.send()
        for owned in self._owned.values():
            held = owned.held or owned.former
            if owned.held is not None:
                owned.held.holder.shut(owned.held)
            if held is not None and not held.is_gone and held.sent_blocks:
                holder, tokens = held.holder.record, held.sent_blocks * self._layout.block_tokens
                owned.attempt.replica = ReplicaLocation(holder.instance_id, holder.incarnation, tokens)
        self._owned.clear()
        self._alone.clear()
        self._sender.line.clear()

    def is_empty(self) -> bool:
        return not self._owned and not self._sender.line

    def copy_lost(self, held: HeldKv) -> None:
        """Handle a copy that accepts no more blocks: search for another holder after a pause."""
        owned = self._owned.get(held.number)
        if owned is None or owned.held is not held:
            return
        self._sender.line.remove(owned)
        owned.held, owned.former = None, held
        self._pause(owned)

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            self._timeline.at(max(self._timeline.now_s, self._looked_s + COPY_LOOK_S), self._look)

    def _look(self, _: None) -> None:
        self._looks = False
        now_s = self._looked_s = self._timeline.now_s
        self._sender.send()
        targets = self._plan_moves()
        self._move_some(targets)
        for owned in tuple(self._alone):
            number = owned.attempt.request.number
            if owned.none_before_s <= now_s and (number in targets or self._is_worth_a_copy(owned)):
                tokens = self._engine.token_count(owned.sequence)
                moves, needed_bytes = number in targets, copy_bytes(self._layout, tokens)

                def is_fit(instance: ViewedInstance, tokens: int = tokens, moves: bool = moves) -> bool:
                    return not moves or self._has_room(instance, tokens)

                found = self.choice.choose(number, needed_bytes, now_s, targets.get(number), is_fit)
                if found is not None:
                    del self._alone[owned]
                    self._timeline.post(self._ask, (owned, found))
        self.choice.forget_old(now_s)
        self._moved.retain(self.choice.view)
        if self._owned:
            self._look_soon()

    def _plan_moves(self) -> dict[int, InstanceRecord | None]:
        """Return the requests that should leave now, by number, with their target; None: wherever the copy is."""
        if self.is_leaving:
            return {number: None for number, owned in self._owned.items() if self._can_move(owned, _LEAST_REST_TOKENS)}
        settled_s, least_tokens = self._timeline.now_s - _SETTLED_S, self._rules.min_rest_tokens
        requests = (
            RunningRequest(number, self._engine.token_count(owned.sequence), _holder_id(owned))
            for number, owned in self._owned.items()
            if owned.attempt.landed_s <= settled_s and self._can_move(owned, least_tokens)
        )
        own, view = self._instance.record, self.choice.view
        plan = plan_moves(view, own, requests, self._unconfirmed_tokens, self._takes, self._target)
        self._target = plan.target if plan is not None else None
        return dict.fromkeys(plan.keys, plan.target) if plan is not None else {}

    def _takes(self, instance: ViewedInstance, running: RunningRequest[int]) -> bool:
        holds_copy = running.holder_id == instance.record.instance_id
        needed_bytes = 0 if holds_copy else copy_bytes(self._layout, running.context_tokens)
        return self.choice.takes_copy(instance, needed_bytes) and self._has_room(instance, running.context_tokens)

    def _can_move(self, owned: OwnedRequest, least_rest_tokens: int) -> bool:
        has_begun = owned.sequence.phase is SequencePhase.RUNNING and owned.sequence.first_step_s >= 0
        return has_begun and self._rest_tokens(owned) >= least_rest_tokens

    def _unconfirmed_tokens(self, instance: ViewedInstance) -> int:
        return self._moved.at(instance).amount * self._layout.block_tokens

    def _move_some(self, targets: dict[int, InstanceRecord | None]) -> None:
        moved_count = 0
        for number, target in targets.items():
            owned = self._owned[number]
            if owned.held is None:
                continue
            record = owned.held.holder.record
            if target is not None and record is not target:
                self._sender.line.remove(owned)
                self._close(owned.held)
                owned.held = None
                self._alone[owned] = None
                continue
            viewed, tokens = (
                self.choice.view.instances.get(record.instance_id),
                self._engine.token_count(owned.sequence),
            )
            is_there = viewed is not None and viewed.record is record and self._has_room(viewed, tokens)
            if moved_count < _MOST_MOVES and self._lacks_little(owned) and viewed is not None and is_there:
                moved_count += 1
                self._moved.add(number, viewed, self._layout.block_count(tokens + 1))
                self._move(owned)

    def _lacks_little(self, owned: OwnedRequest) -> bool:
        assert owned.held is not None
        copied_tokens = owned.held.sent_blocks * self._layout.block_tokens
        lacking = self._engine.token_count(owned.sequence) - copied_tokens
        return (
            owned.held.is_growing
            and not owned.held.is_gone
            and lacking <= _MOST_LACKING_BLOCKS * self._layout.block_tokens
        )

    def _has_room(self, instance: ViewedInstance, context_tokens: int) -> bool:
        return has_room_to_run(instance, self._layout.block_count(context_tokens + 1), self._moved)

    def _move(self, owned: OwnedRequest) -> None:
        """Stop a request and send the rest of its KV to its copy, from which it goes on."""
        attempt, held = owned.attempt, owned.held
        assert held is not None
        del self._owned[attempt.request.number]
        self._sender.line.remove(owned)
        token_count = self._instance.let_go(owned.sequence)
        held.holder.finish(held, token_count - 1)
        holder = held.holder.record
        attempt.replica = ReplicaLocation(holder.instance_id, holder.incarnation, token_count - 1)
        self._timeline.after(self._push_tail_s + self._timeline.hop_s, self._router.moved, attempt)

    def _is_worth_a_copy(self, owned: OwnedRequest) -> bool:
        context_tokens = self._engine.token_count(owned.sequence)
        return self._rules.is_worth_a_copy(context_tokens, self._rest_tokens(owned))

    def _rest_tokens(self, owned: OwnedRequest) -> int:
        request = owned.attempt.request
        return request.output_tokens - (self._engine.token_count(owned.sequence) - request.prompt_tokens)

    def _ask(self, asked: tuple[OwnedRequest, ViewedInstance]) -> None:
        owned, found = asked
        number = owned.attempt.request.number
        holder = self.choice.holders.get(found.record.instance_id)
        answer: HeldKv | KaveriError | None = None
        if holder is not None and self._owned.get(number) is owned:
            answer = holder.open(self.copy_lost, number, self._engine.token_count(owned.sequence))
        self._timeline.post(self._asked, (owned, found, answer))

    def _asked(self, answered: tuple[OwnedRequest, ViewedInstance, HeldKv | KaveriError | None]) -> None:
        owned, found, answer = answered
        self.choice.asked_count -= 1
        number = owned.attempt.request.number
        is_here = self._owned.get(number) is owned
        if not isinstance(answer, HeldKv):
            rest_s = bounded_retry_s(answer.retry_after_s) if isinstance(answer, NoCapacity) else HOLDER_REST_S
            self.choice.refused(number, found.record.instance_id, self._timeline.now_s + rest_s)
            if is_here:
                self._pause(owned)
        elif not is_here:
            # It has ended meanwhile, or this instance has died.
            answer.holder.drop(answer)
        elif answer.is_gone:
            self._pause(owned)
        else:
            if owned.former is not None:
                self._close(owned.former)
                owned.former = None
            self._sender.add(owned, answer)

    def _pause(self, owned: OwnedRequest) -> None:
        owned.none_before_s = self._timeline.now_s + self.choice.pause_s(owned.failures)
        owned.failures += 1
        self._alone[owned] = None

    def _close(self, held: HeldKv) -> None:
        held.is_growing = False
        self._timeline.post(held.holder.drop, held)


class InstanceCopies:
    """Copies of an instance's requests at others (`owned`), and its copies of others' requests (`held`)."""

    def __init__(self, router: InstanceRouter, instance: SimulatedInstance) -> None:
        layout = instance.record.layout
        assert isinstance(layout, KvLayout)
        self.record = instance.record
        self.owned = OwnedCopies(router, instance, layout)
        self.held = HeldCopies(router.timeline, router.spec.decode.copies, instance, layout)
        self._router = router
        self._instance = instance
        self._resuming: dict[SimulatedAttempt, None] = {}
        """Attempts whose copies are being moved into blocks of the engine."""

    @property
    def is_dead(self) -> bool:
        return self.held.is_dead

    def resume(self, attempt: SimulatedAttempt) -> None:
        """Resume another instance's request from its copy here, `attempt.replica`, or report that it cannot be."""
        router, replica, held = self._router, attempt.replica, self.held.find(attempt.request.number)
        assert replica is not None
        sequence, held_tokens = None, 0
        if not self.is_dead and held is not None and replica.holder_incarnation == self.record.incarnation:
            if held.is_growing:
                self.held.shut(held)
            held_tokens = self.held.usable_tokens(held, attempt.token_count)
            sequence = self._instance.reserve_resumed(attempt) if held_tokens else None
        if sequence is None:
            router.timeline.post(router.not_resumed, attempt)
        else:
            self._resuming[attempt] = None
            router.timeline.after(router.spec.overheads.push_tail_s, self._land, (sequence, held_tokens))

    def die(self) -> None:
        self.owned.die()
        self.held.die()
        for attempt in self._resuming:
            self._router.timeline.post(self._router.resume_lost, attempt)
        self._resuming.clear()

    def is_empty(self) -> bool:
        return self.owned.is_empty() and self.held.is_empty() and not self._resuming

    def _land(self, resumed: tuple[CountedSequence, int]) -> None:
        sequence, held_tokens = resumed
        attempt: SimulatedAttempt = sequence.owner
        if attempt not in self._resuming:
            return  # the process was killed
        del self._resuming[attempt]
        attempt.replica = None
        attempt.landed_s = self._router.timeline.now_s
        self._instance.land_resumed(sequence, held_tokens)
        held = self.held.find(attempt.request.number)
        if held is not None:
            self.held.drop(held)
        if attempt.request.losses is not None:
            attempt.request.losses.resumed(attempt.token_count, held_tokens)
        self.owned.follow(attempt, sequence)


def _holder_id(owned: OwnedRequest) -> str | None:
    return owned.held.holder.record.instance_id if owned.held is not None else None


def _blocks_per_s(spec: ClusterSpec, layout: KvLayout) -> float:
    rates = [spec.decode.copies.blocks_per_s] if spec.decode.copies.blocks_per_s else []
    if spec.link is not None and spec.link.token_bytes:
        rates.append(spec.link.bytes_per_s / (spec.link.token_bytes * layout.block_tokens))
    return min(rates, default=0.0)
