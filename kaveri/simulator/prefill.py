"""A simulated prefill instance: prompt queue, engine, and search for free KV blocks at decode instances. Pure.

It mirrors services/prefill: role.py, room_finder.py and decode_placer.py, event by event.
"""

import random
from dataclasses import dataclass, field
from functools import partial

from kaveri.domain.view import ClusterView, InstanceRecord, ViewedInstance
from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, Unavailable
from kaveri.policy.levelling import LEVEL_INTERVAL_S, queue_surplus
from kaveri.policy.prompt_queue import PromptQueue
from kaveri.policy.retry import Setback, bounded_retry_s
from kaveri.policy.room_search import (
    Ask,
    Hopeless,
    NoInstance,
    PlaceSearch,
    RoomSearch,
    Seeker,
    StopWaiting,
    draws_more,
    place_search,
)
from kaveri.policy.waits import (
    NO_DECODE_INSTANCE_S,
    PROMPT_BLOCKS_RETRY_S,
    QUEUE_FULL_RETRY_S,
    ROOM_LOOK_S,
    ROOM_PATIENCE_S,
    ROOM_REST_WHEN_FAILED_S,
    ROOM_REST_WHEN_REFUSED_S,
)
from kaveri.simulator.decode import SimulatedDecode
from kaveri.simulator.instance import InstanceRouter, KvPush, SimulatedAttempt, SimulatedInstance
from kaveri.simulator.member import SimulatedLoad
from kaveri.simulator.sequence import CountedSequence


@dataclass(slots=True, eq=False)
class _PendingReserve:
    """A call under way that reserves KV blocks at a decode instance."""

    attempt: SimulatedAttempt
    target: ViewedInstance
    waits: bool
    patient_until_s: float
    decode: SimulatedDecode | None = None
    """Incarnation of `target` that received the call."""
    reserved: CountedSequence | None = None
    """Reserved blocks, while the answer is in flight."""
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class SeekingRequest:
    """A prefill instance's request that searches for a decode instance with free KV blocks."""

    attempt: SimulatedAttempt
    questions: dict[str, _PendingReserve] = field(default_factory=dict)
    unfit: dict[str, KaveriError] = field(default_factory=dict)
    none_since_s: float = -1.0
    version: int = 0
    reserved: CountedSequence | None = None
    """Sequence reserved at the decode instance found."""

    def seeker(self) -> Seeker[str]:
        attempt = self.attempt
        waits_at = None
        for name, question in self.questions.items():
            if question.waits:
                waits_at = name
        request = attempt.request
        predicted_tokens = 0 if request.length is None else request.prompt_tokens + request.length.low
        return Seeker(attempt.key, attempt.token_count, predicted_tokens, attempt.heavy, waits_at, self.unfit)


class SimulatedPrefill(SimulatedInstance):
    """Simulated prefill instance, or the prefill half of a colocated instance."""

    def __init__(self, router: InstanceRouter, record: InstanceRecord) -> None:
        super().__init__(router, record)
        assert record.layout is not None
        settings = router.spec.prefill
        self._queue: PromptQueue[SimulatedAttempt] = PromptQueue(
            settings.prefill_policy, self.pool.chunk_tokens, settings.max_queue, settings.prefill_sched_batch
        )
        rng = random.Random(router.seeds.random())
        self._search: RoomSearch[str] = RoomSearch(record.model, record.layout, settings.decode_placement, rng)
        self._live: set[SimulatedAttempt] = set()
        self._waiting_count = 0
        self._retries = False
        self._level_at_s = 0.0
        self._searches: dict[SimulatedAttempt, SeekingRequest] = {}
        """Searches for a decode instance, by live attempt."""
        self._seeking: dict[SeekingRequest, None] = {}
        """Searches that wait for an answer or a new broadcast."""
        self.view = ClusterView()
        """Instances as of the monitor's last broadcast."""
        self.peers: dict[str, SimulatedDecode] = {}

    # Calls of the router.

    def accept(self, attempt: SimulatedAttempt) -> None:
        """Queue a request for prefill, or refuse it if the queue is full or the instance is dead."""
        if self.is_dead:
            error = Unavailable(f"{self.record.instance_id} cannot be reached")
            self._router.lost(attempt, error, Setback.UNREACHED)
            return
        now_s = self._timeline.now_s
        self.member.take_beats(now_s)
        if not self._queue.room:
            reason = f"{self._queue.max_waiting} requests are queued already"
            full = NoCapacity("prefill", QUEUE_FULL_RETRY_S, reason)
            self._router.lost(attempt, full, Setback.FULL, QUEUE_FULL_RETRY_S)
            return
        request, pool, tokens = attempt.request, self.pool, attempt.token_count
        attempt.arrived_s = now_s
        more = draws_more(tokens, attempt.generated, request.output_tokens, pool.max_model_len)
        attempt.place_search = place_search(tokens, pool.chunk_tokens, more, at_first_token=False)
        attempt.heavy = self._spec.prefill.thresholds.is_heavy(request.length, request.prompt_tokens)
        self._live.add(attempt)
        self._waiting_count += 1
        self._queue.hold(attempt)
        self._queue.release(attempt)
        self._submit()
        if self._waiting_count:
            self._router.wake_at_broadcast()

    def die(self) -> None:
        super().die()
        for attempt in sorted(self._live, key=lambda one: one.request.number):
            attempt.is_over = True
            if (seeking := self._searches.get(attempt)) is not None:
                for instance_id in list(seeking.questions):
                    self._drop(seeking, instance_id)
                if seeking.reserved is not None and isinstance(attempt.decode, SimulatedDecode):
                    attempt.decode.give_back(seeking.reserved)
            error = Unavailable(f"{self.record.instance_id} has died")
            self._timeline.post(partial(self._router.lost, attempt), error)
        self._live.clear()
        self._searches.clear()
        self._seeking.clear()

    def _submit(self) -> None:
        while (attempt := self._queue.next()) is not None:
            self._serial += 1
            remaining = attempt.request.output_tokens - attempt.generated
            sequence = CountedSequence(self._serial, attempt, attempt.token_count, remaining, SequencePhase.PREFILLING)
            if not (self._has_room(attempt) and self.engine.open(sequence, attempt.token_count)):
                if not self._retries:
                    self._retries = True
                    self._timeline.after(PROMPT_BLOCKS_RETRY_S, self._submit_again)
                return
            attempt.sequence = sequence
            self._queue.submitted(attempt)
            self.engine.prefill(sequence)

    def _has_room(self, attempt: SimulatedAttempt) -> bool:
        return True

    def _submit_again(self, _: None) -> None:
        self._retries = False
        if self.is_dead:
            return
        self.member.take_beats(self._timeline.now_s)
        self._submit()

    # Events of the engine.

    def prefill_started(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        attempt.started_s = self._timeline.now_s
        self._waiting_count -= 1
        self._router.started(attempt)
        if attempt.place_search is PlaceSearch.AT_START:
            self._begin_search(attempt)

    def prefill_advanced(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        self._queue.advance(attempt, sequence.computed)
        if attempt.push is not None:
            self._push_chunk(attempt, attempt.push)
        if attempt not in self._searches and attempt.place_search is PlaceSearch.AFTER_FIRST_CHUNK:
            self._begin_search(attempt)

    def first_token(self, sequence: CountedSequence) -> None:
        attempt: SimulatedAttempt = sequence.owner
        now_s = self._timeline.now_s
        self._queue.advance(attempt, attempt.token_count)
        attempt.first_token_s = now_s
        if attempt.generated:
            self._router.gaps(now_s - attempt.request.last_token_s, 1)
        self._router.drew_first(attempt, now_s)
        if sequence.done:
            self._live.discard(attempt)
            self._router.finished(attempt)
            return
        if attempt not in self._searches:
            self._begin_search(attempt)
        elif attempt.push is not None:
            self._push_chunk(attempt, attempt.push)
            self._finish_push(attempt, attempt.push)

    def stepped(self) -> None:
        self._submit()

    # The search for room.

    def _begin_search(self, attempt: SimulatedAttempt) -> None:
        seeking = self._searches[attempt] = SeekingRequest(attempt)
        self._look(seeking)

    def broadcast_heard(self) -> None:
        """Repeat the waiting searches for decode instances after a broadcast of loads, longest wait first."""
        self._level()
        waiting, self._seeking = self._seeking, {}
        self._search.retain(self.view)
        for seeking in waiting:
            if seeking.reserved is None and not seeking.attempt.is_over:
                self._look(seeking)

    def _level(self) -> None:
        """Return waiting prompts to the router if another queue is shorter."""
        if self.is_dead or not self._waiting_count:
            return
        now_s = self._timeline.now_s
        surplus_tokens = queue_surplus(self.view, self.record.model, self.record.instance_id, self._queue.queued_tokens)
        if now_s >= self._level_at_s and (moved := self._queue.to_level(surplus_tokens)):
            self._level_at_s = now_s + LEVEL_INTERVAL_S
            self._return_prompts(moved)
        if self._waiting_count:
            self._router.wake_at_broadcast()

    def _return_prompts(self, moved: list[SimulatedAttempt]) -> None:
        self.member.take_beats(self._timeline.now_s)
        for attempt in moved:
            self._queue.remove(attempt)
            self._live.discard(attempt)
            self._waiting_count -= 1
            self._timeline.post(self._report_moved, attempt)

    def _report_moved(self, attempt: SimulatedAttempt) -> None:
        error = NoCapacity("prefill", 0.0, "returned for another instance")
        self._router.lost(attempt, error, Setback.FULL)

    def _look(self, seeking: SeekingRequest) -> None:
        now_s = self._timeline.now_s
        wake_s = now_s + ROOM_LOOK_S
        while True:
            if seeking.questions:
                patient_until_s = max(one.patient_until_s for one in seeking.questions.values())
                if now_s < patient_until_s:
                    wake_s = min(wake_s, patient_until_s)
                    break
            seeker = seeking.seeker()
            found = self._search.look(seeker, self.view, now_s)
            match found:
                case Ask():
                    self._ask(seeking, found, now_s)
                    if seeking.reserved is not None or seeking.attempt.is_over:
                        return
                    continue
                case StopWaiting():
                    assert seeker.waits_at is not None
                    self._drop(seeking, seeker.waits_at)
                    continue
                case Hopeless():
                    self._fail(seeking.attempt, found.error)
                    return
                case NoInstance():
                    seeking.none_since_s = now_s if seeking.none_since_s < 0 else seeking.none_since_s
                    if now_s - seeking.none_since_s > NO_DECODE_INSTANCE_S:
                        self._fail(seeking.attempt, Unavailable(found.reason, retry_after_s=1.0))
                        return
                case None:
                    seeking.none_since_s = -1.0
            rest_ends_s = self._search.next_rest_ends_s()
            wake_s = wake_s if rest_ends_s is None else min(wake_s, rest_ends_s)
            break
        seeking.version += 1
        self._seeking[seeking] = None
        self._router.wake_at_broadcast()
        self._timeline.at(max(wake_s, now_s), self._wake, (seeking, seeking.version))

    def _wake(self, waiting: tuple[SeekingRequest, int]) -> None:
        seeking, version = waiting
        if seeking.version == version and seeking.reserved is None and not seeking.attempt.is_over:
            self._seeking.pop(seeking, None)
            self._look(seeking)

    def _ask(self, seeking: SeekingRequest, ask: Ask, now_s: float) -> None:
        attempt = seeking.attempt
        patience_s = ROOM_PATIENCE_S if ask.shows_room else 0.0
        patient_until_s = now_s + patience_s if ask.waits else float("inf")
        question = _PendingReserve(attempt, ask.target, ask.waits, patient_until_s)
        seeking.questions[ask.target.record.instance_id] = question
        self._timeline.send(self._reserve_arrives, question)

    def _reserve_arrives(self, question: _PendingReserve) -> None:
        if question.is_dropped:
            return
        decode = question.decode = self.peers[question.target.record.instance_id]
        decode.reserve(question.attempt, question.waits, lambda result: self._decided(question, result))

    def _decided(self, question: _PendingReserve, result: CountedSequence | KaveriError) -> None:
        if isinstance(result, CountedSequence):
            question.reserved = result
        self._timeline.send(self._answered, (question, result))

    def _answered(self, answer: tuple[_PendingReserve, CountedSequence | KaveriError]) -> None:
        question, result = answer
        seeking, instance_id = self._searches.get(question.attempt), question.target.record.instance_id
        if question.is_dropped or question.attempt.is_over:
            return  # the room was given back with it
        assert question.decode is not None
        assert seeking is not None
        if isinstance(result, CountedSequence) and question.decode.is_dead:
            result = Unavailable(f"{instance_id} has died")
        if isinstance(result, CountedSequence):
            question.reserved = None
            del seeking.questions[instance_id]
            for other in list(seeking.questions):
                self._drop(seeking, other)
            seeking.reserved = result
            self._seeking.pop(seeking, None)
            self._placed(question.attempt, question.decode)
            return
        del seeking.questions[instance_id]
        self._search.forget(question.attempt.key, instance_id)
        if isinstance(result, Unavailable):
            is_there = result.retry_after_s is not None
            rest_s = ROOM_REST_WHEN_REFUSED_S if is_there else ROOM_REST_WHEN_FAILED_S
            self._search.rest(instance_id, self._timeline.now_s + rest_s)
        elif isinstance(result, NoCapacity):
            self._search.rest(instance_id, self._timeline.now_s + bounded_retry_s(result.retry_after_s))
        elif isinstance(result, InvalidArgument):
            seeking.unfit = {**seeking.unfit, instance_id: result}
        if seeking in self._seeking:
            self._seeking.pop(seeking)
            self._look(seeking)

    def _drop(self, seeking: SeekingRequest, instance_id: str) -> None:
        """Cancel a Reserve call, and release the decode instance's blocks that it may have reserved."""
        question = seeking.questions.pop(instance_id)
        question.is_dropped = True
        self._search.forget(seeking.attempt.key, instance_id)
        if question.decode is None:
            return
        question.decode.leave_line(seeking.attempt)
        if question.reserved is not None:
            question.decode.give_back(question.reserved)
            question.reserved = None

    def _fail(self, attempt: SimulatedAttempt, error: KaveriError) -> None:
        self.member.take_beats(self._timeline.now_s)
        self._live.discard(attempt)
        self._searches.pop(attempt, None)
        if attempt.sequence is not None:
            if attempt.first_token_s < 0:
                self._queue.remove(attempt)
            self.engine.end(attempt.sequence)
        self._router.lost(attempt, error)
        self._submit()

    # The push.

    def _placed(self, attempt: SimulatedAttempt, decode: SimulatedDecode) -> None:
        sequence, now_s = attempt.sequence, self._timeline.now_s
        assert sequence is not None
        attempt.decode = decode
        sequence.transfer_open = True
        tokens = min(sequence.computed, attempt.token_count)
        attempt.push = KvPush(now_s, tokens, now_s + self._link_s(tokens))
        if attempt.first_token_s >= 0:
            self._finish_push(attempt, attempt.push)

    def _push_chunk(self, attempt: SimulatedAttempt, push: KvPush) -> None:
        """Send the KV that the ending step computed to the decode instance."""
        assert attempt.sequence is not None
        now_s, layers = self._timeline.now_s, self._spec.prefill.layer_count
        computed = min(attempt.sequence.computed, attempt.token_count)
        chunk_s = self._link_s(computed - push.tokens)
        push.tokens = computed
        if self._spec.link is None:
            push.link_free_s = now_s
            return
        began_s = max(self.engine.last_step_began_s, push.since_s)
        first_layer_s = max(push.link_free_s, began_s + (now_s - began_s) / layers)
        push.link_free_s = max(first_layer_s + chunk_s, now_s + chunk_s / layers)

    def _link_s(self, token_count: int) -> float:
        link = self._spec.link
        return token_count * (link.token_bytes or 0) / link.bytes_per_s if link is not None else 0.0

    def _finish_push(self, attempt: SimulatedAttempt, push: KvPush) -> None:
        link = self._spec.link
        latency_s = link.latency_s if link is not None else 0.0
        lands_s = max(self._timeline.now_s, push.link_free_s) + latency_s + self._spec.overheads.push_tail_s
        self._timeline.at(lands_s, self._landed, self._searches[attempt].reserved)

    def push_failed(self, reserved: CountedSequence) -> None:
        """Handle the death of the decode instance during a KV push: search for another, as the KV is still here."""
        attempt: SimulatedAttempt = reserved.owner
        seeking = self._searches.get(attempt)
        if attempt.is_over or seeking is None or seeking.reserved is not reserved:
            return
        assert attempt.sequence is not None
        assert attempt.decode is not None
        instance_id = attempt.decode.record.instance_id
        seeking.reserved = attempt.decode = attempt.push = None
        attempt.sequence.transfer_open = False
        self._search.forget(attempt.key, instance_id)
        self._search.rest(instance_id, self._timeline.now_s + ROOM_REST_WHEN_FAILED_S)
        self._look(seeking)

    def _landed(self, reserved: CountedSequence) -> None:
        attempt: SimulatedAttempt = reserved.owner
        sequence, seeking, decode = attempt.sequence, self._searches.get(attempt), attempt.decode
        if attempt.is_over or seeking is None or seeking.reserved is not reserved:
            return
        assert sequence is not None
        assert isinstance(decode, SimulatedDecode)
        if decode.is_dead:
            return  # push_failed() is on its way
        self.member.take_beats(self._timeline.now_s)
        decode.land(reserved)
        self._live.discard(attempt)
        sequence.transfer_open = False
        self.engine.end(sequence)
        # Objects here refer to the attempt: drop references that are not needed any more.
        attempt.sequence = None
        del self._searches[attempt]
        if self._retries:
            # A prompt waits for blocks.
            self._submit()

    def is_empty(self) -> bool:
        return super().is_empty() and not self._live and not self._seeking

    def _load_at(self, _: float, sequence_number: int) -> SimulatedLoad:
        queue, waiting = self._queue, self._waiting_count
        running = len(self._live) - waiting
        free, total = self.engine.free_blocks, self.pool.total_blocks
        return SimulatedLoad(sequence_number, waiting, running, queue.queued_tokens, queue.room, free, total)
