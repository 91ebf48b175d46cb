"""A simulated engine: KV blocks are counted, and a latency model gives the duration of each step. Pure.

Consecutive steps of an unchanged decode batch form a run, which is one event: their durations are an arithmetic series.
A request that joins or ends, or a shortage of blocks, cuts the run at the right step. Each step with prompt chunks is
one event. While a preempted request waits or is recomputed, each step is simulated with kaveri.engine.stepwise's own
Residency and form_step.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from kaveri.engine.stepwise.residency import Residency
from kaveri.engine.stepwise.sequence import SequencePhase, form_step
from kaveri.kv.layout.layout import KvLayout
from kaveri.simulator.running_batch import RunningBatch
from kaveri.simulator.sequence import CountedBlocks, CountedSequence
from kaveri.simulator.spec import Overheads, PoolSpec
from kaveri.simulator.timeline import Timeline

_ALMOST = 1e-9
"""Tolerance for the end of a step in floating point, as a share of the step."""


class EngineListener:
    """Interface for a simulated engine's events, called at their times. By default each method does nothing."""

    def before_step_ends(self) -> None:
        """Called before the results of an ended step are reported; those calls may change the engine."""

    def prefill_started(self, sequence: CountedSequence) -> None:
        """Called when a prompt's first chunk begins."""

    def prefill_advanced(self, sequence: CountedSequence) -> None:
        """Called when a chunk of a prompt other than the last has been computed."""

    def first_token(self, sequence: CountedSequence) -> None:
        """Called when a prompt is computed and its first token sampled, which may be the only one."""

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        """Called after `steps` decode steps of `step_s` seconds on average. gap_count: sampled tokens, without each
        request's first decode step here. resting: admitted requests that wait outside the batch."""

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        """Called after a step in which only these requests sampled a token. gap_count: those after a first one here."""

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        """Called after the first decode step of a request, which ended at `time_s`."""

    def ended(self, sequence: CountedSequence) -> None:
        """Called when a request has sampled its last token."""

    def preempted(self, sequence: CountedSequence) -> None:
        """Called when a request has lost its KV blocks; it is recomputed later."""

    def stepped(self) -> None:
        """Called after all results of a step have been reported."""


class _StepTimes:
    """Computes the seconds of a step: latency model plus overheads of the services."""

    def __init__(self, pool: PoolSpec, overheads: Overheads) -> None:
        self._latency = pool.latency
        self._overheads = overheads
        self._fits = [pool.latency.decode_fit(count) for count in range(pool.max_batch + 1)]

    def decode_s(self, count: int, context: int) -> tuple[float, float]:
        """Return the seconds of a decode-only step and the increase per further step. context: tokens in the batch."""
        fit = self._fits[count]
        step_s = fit.step_s + (context * fit.context_token_s + count * fit.request_s) + self._overheads.decode_step_s
        return step_s, count * fit.context_token_s

    def mixed_s(self, spans: list[tuple[int, int]], count: int, context: int) -> float:
        """Return the seconds of a step with prompt chunks (first position, token count) and `count` decodes."""
        return self._latency.mixed_step_s(spans, count, context) + self._overheads.prefill_step_s

    def step_s(self, spans: list[tuple[int, int]], has_chunks: bool) -> float:
        """Return the seconds of a step given as (first position, token count) of each sequence."""
        overhead_s = self._overheads.prefill_step_s if has_chunks else self._overheads.decode_step_s
        return self._latency.step_s(spans) + overhead_s


class _Run:
    """Consecutive steps simulated as one event: step j takes first_step_s + j * more_s."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.steps = 0
        """1: a single step, which cannot be shortened."""
        self.first_step_s = 0.0
        self.more_s = 0.0

    def seconds(self, steps: int) -> float:
        return steps * self.first_step_s + self.more_s * (steps * (steps - 1) // 2)

    def ended_steps(self, time_s: float) -> int:
        """Return the number of steps ended by `time_s`, without the run's last, whose end is an event."""
        elapsed_s, first, more_s = time_s - self.began_s, self.first_step_s, self.more_s
        if elapsed_s < first:
            return 0
        half = more_s / 2
        if half * self.steps < first * _ALMOST:
            steps = int(elapsed_s / first)
        else:
            linear = first - half
            steps = int((math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half))
        while (steps + 1) * first + more_s * ((steps + 1) * steps // 2) <= elapsed_s:
            steps += 1
        while steps * first + more_s * (steps * (steps - 1) // 2) > elapsed_s:
            steps -= 1
        return min(steps, self.steps - 1)


class CountedEngine:
    """Simulated engine for prefill and decode that counts tokens and blocks instead of storing them."""

    def __init__(
        self, timeline: Timeline, pool: PoolSpec, layout: KvLayout, overheads: Overheads, listener: EngineListener
    ) -> None:
        self._timeline = timeline
        self._pool = pool
        self._listener = listener
        self._times = _StepTimes(pool, overheads)
        self.blocks = CountedBlocks(pool.total_blocks)
        self.prefilling: deque[CountedSequence] = deque()
        residency = Residency(cast(Any, self.blocks), layout, pool.max_batch)
        # As Any on the path of each step: the sequences are counted ones, and a cast() would cost a call.
        self._residency: Any = residency
        self._waiting = cast(list[CountedSequence], residency.waiting)
        self._batch = RunningBatch(cast(list[CountedSequence], residency.running), pool.block_tokens)
        self._by_steps = False
        """True while a request is preempted or recomputed: each step is one event, and sequences store their tokens."""
        self._run = _Run()
        self._busy = False
        self._dead = False
        self._version = 0
        """Version of the scheduled step end; ends scheduled with an older one are void."""
        self._planned: list[tuple[CountedSequence, int]] = []
        """Sequences and token counts of the current step; prompt chunks only, unless _by_steps."""
        self._lands_parts = False
        """True once a request has been resumed with part of its KV."""
        self.last_step_began_s = 0.0
        """Start of the step that ends now; within a run, of any of its steps."""

    # Blocks.

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks after the last step that sync() has applied."""
        return self.blocks.free_count

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that decodes the present batch and nothing else; 0 if the batch is empty."""
        batch = self._batch
        count = len(batch.members)
        context = sum(one.tokens for one in batch.members) if self._by_steps else batch.context_tokens
        return self._times.decode_s(count, context)[0] if count else 0.0

    @property
    def admitted_count(self) -> int:
        """Number of decoding requests in the batch or waiting for a place in it."""
        return len(self._batch.members) + len(self._waiting)

    def open(self, sequence: CountedSequence, token_count: int) -> bool:
        """Allocate blocks for `token_count` tokens. False if too few are free, or a preempted request needs them."""
        wanted, blocks = -(-token_count // self._pool.block_tokens), self.blocks
        if wanted > blocks.free_count or (self._waiting and self._residency.short_of_blocks):
            return False
        blocks.free_count -= wanted
        sequence.block_ids = [0] * wanted
        if self._run.steps > 1:
            self._shorten()
        return True

    # Requests.

    def prefill(self, sequence: CountedSequence) -> None:
        """Queue a prompt whose blocks open() has allocated."""
        self.prefilling.append(sequence)
        self._work_came()

    def land(self, sequence: CountedSequence) -> None:
        """Add a request that has its prompt's KV and first token; it decodes once admit() is called."""
        sequence.computed = sequence.tokens
        sequence.tokens += 1
        self._residency.land(sequence)
        self._blocks_may_be_taken()

    def land_partly(self, sequence: CountedSequence, held_tokens: int) -> None:
        """Add a resumed request that has the KV of its first `held_tokens` tokens; after admit(), steps compute the
        rest."""
        assert 0 < held_tokens < sequence.tokens
        self._lands_parts = True
        sequence.computed = held_tokens
        # Runs of steps take the next token's block with the step before it.
        spare_blocks = len(sequence.block_ids) - -(-sequence.tokens // self._pool.block_tokens)
        del sequence.block_ids[len(sequence.block_ids) - spare_blocks :]
        self.blocks.free_count += spare_blocks
        self._residency.land(sequence)
        self._blocks_may_be_taken()

    def adopt(self, sequence: CountedSequence) -> bool:
        """Let a computed prompt decode once admit() is called. False if it was preempted for lack of a block."""
        self._residency.land(sequence)
        preempted = self._residency.make_whole(sequence)
        if not preempted and self._run.steps > 1:
            self._shorten()
        self._blocks_may_be_taken()
        return not preempted

    def admit(self, sequence: CountedSequence) -> None:
        """Let a request added by land(), land_partly() or adopt() decode from the next step on."""
        self._residency.admit(sequence)
        self._work_came()

    def end(self, sequence: CountedSequence) -> None:
        """End a request; its blocks are freed once no step or transfer uses them."""
        if sequence.done:
            return
        sequence.done = True
        phase = sequence.phase
        if phase is SequencePhase.PREFILLING:
            self.prefilling.remove(sequence)
        elif phase is SequencePhase.RUNNING and not self._by_steps:
            # It leaves with the step under way.
            self._batch.ended_outside.append(sequence)
            self._cut()
            return
        elif phase is not SequencePhase.COMPUTED:
            self._residency.remove(sequence)
        self._settle(sequence)

    def token_count(self, sequence: CountedSequence) -> int:
        """Return the tokens of prompt and answer after the last step that sync() has applied."""
        if sequence.phase is SequencePhase.RUNNING and not self._by_steps:
            return sequence.offset_tokens + self._batch.steps
        return sequence.tokens

    @property
    def computed_by_run(self) -> int | None:
        """Number to add to a running request's `offset_tokens` to get its tokens with KV, as of sync(). None: use its
        `computed` instead."""
        return None if self._by_steps else self._batch.steps - 1

    @property
    def step_began_s(self) -> float:
        """Start time of the current step."""
        return self._run.began_s

    def stop(self) -> None:
        """Stop the engine: it raises no further events."""
        self._dead = True
        self._version += 1

    # Runs.

    def sync(self, time_s: float) -> None:
        """Apply the steps that ended by `time_s`, except the last one scheduled, whose end is an event of its own."""
        run, batch = self._run, self._batch
        if run.steps <= 1 or not (steps := run.ended_steps(time_s)):
            return
        self.blocks.free_count -= batch.growth(steps)
        first_count = self._note_first_steps() if batch.joined else 0
        seconds = run.seconds(steps)
        self._listener.drew(steps, steps * len(batch.members) - first_count, seconds / steps, self._waiting)
        batch.steps += steps
        run.began_s += seconds
        run.first_step_s += steps * run.more_s
        run.steps -= steps

    def room_at(self, time_s: float) -> tuple[int, int]:
        """Return the free blocks, and the KV tokens of all decoding requests, after the steps ended by `time_s`."""
        free, batch = self.blocks.free_count, self._batch
        context = 0
        if self._residency.landed or self._waiting:
            context = sum(sequence.computed for sequence in (*self._residency.landed, *self._waiting))
        if self._by_steps:
            return free, context + sum(sequence.computed for sequence in batch.members)
        # A member's last token has no KV yet.
        context += batch.context_tokens - len(batch.members)
        if self._run.steps > 1 and (steps := self._run.ended_steps(time_s)):
            return free - batch.growth(steps), context + steps * len(batch.members)
        return free, context

    def _settle(self, sequence: CountedSequence) -> None:
        """Free an ended request's blocks, unless a step or transfer still uses them."""
        if sequence.done and not (sequence.in_step or sequence.transfer_open):
            self.blocks.release(sequence)
            self._blocks_may_be_taken()

    def _blocks_may_be_taken(self) -> None:
        """Begin a step if the engine is idle and requests wait, as a preempted one may get blocks now."""
        if self._waiting and not self._busy:
            self._begin()

    def _work_came(self) -> None:
        if self._dead:
            return
        if not self._busy:
            self._begin()
        elif not self._by_steps and not self._planned:
            self._cut()

    def _cut(self) -> None:
        if self._run.steps > 1:
            self.sync(self._timeline.now_s)
            if self._run.steps > 1:
                self._run.steps = 1
                self._schedule()

    def _shorten(self) -> None:
        """Shorten the run of steps if blocks that it needs were taken."""
        # sync() was called before blocks were taken.
        steps = self._batch.steps_with_blocks(self._run.steps, self.blocks.free_count)
        if steps < self._run.steps:
            self._run.steps = max(1, steps)
            self._schedule()

    def _schedule(self) -> None:
        self._version += 1
        self._timeline.at(self._run.began_s + self._run.seconds(self._run.steps), self._over, self._version)

    def _begin(self) -> None:
        # A prompt that begins may cause the arrival of another, which must not begin a second step.
        self._busy, self._run.steps = True, 1
        waiting, batch = self._waiting, self._batch
        if self._by_steps:
            self._begin_step()
            return
        if waiting:
            if self._residency.short_of_blocks or (self._lands_parts and any(one.pending > 1 for one in waiting)):
                self._begin_step()
                return
            while waiting and len(batch.members) < self._pool.max_batch:
                batch.join(waiting.pop(0))
        self._begin_run()

    def _begin_run(self) -> None:
        run, batch = self._run, self._batch
        count = len(batch.members)
        if self.prefilling:
            self._planned = cast(Any, form_step((), cast(Any, self.prefilling), self._pool.chunk_tokens))
            self._mark_planned()
        elif not count:
            self._busy = False
            return
        run.began_s = self._timeline.now_s
        if self._planned:
            spans = [(sequence.computed, tokens) for sequence, tokens in self._planned]
            run.first_step_s, run.more_s = self._times.mixed_s(spans, count, batch.context_tokens), 0.0
        else:
            run.first_step_s, run.more_s = self._times.decode_s(count, batch.context_tokens)
            run.steps = batch.steps_with_blocks(batch.ends[0][0] - batch.steps, self.blocks.free_count)
        self._schedule()

    def _mark_planned(self) -> None:
        for sequence, _ in self._planned:
            sequence.in_step = True
            if sequence.phase is SequencePhase.PREFILLING and not sequence.started:
                sequence.started = True
                self._listener.prefill_started(sequence)

    def _note_first_steps(self) -> int:
        """Report the first decode step of requests that joined the batch. Returns their number."""
        batch, time_s = self._batch, self._run.began_s + self._run.first_step_s
        joined, batch.joined = batch.joined, []
        if batch.ended_outside:
            joined = [sequence for sequence in joined if sequence not in batch.ended_outside]
        for sequence in joined:
            sequence.first_step_s = time_s
            self._listener.drew_first(sequence, time_s)
        return len(joined)

    def _over(self, version: int) -> None:
        if version != self._version:
            return
        self._listener.before_step_ends()
        self.last_step_began_s = self._run.began_s
        computed: Iterable[CountedSequence] = ()
        if self._by_steps:
            computed = self._end_step()
        elif self._batch.members:
            self._end_run()
            if self._planned:
                computed = self._end_chunks()
            # Take the blocks of the next tokens, or else continue step by step.
            wanted = self._batch.crossing(0)
            if wanted <= self.blocks.free_count:
                self.blocks.free_count -= wanted
            else:
                self._by_steps = True
                self._batch.write_back(1)
        else:
            computed = self._end_chunks()
        self._begin()
        for sequence in computed:
            if sequence.phase is SequencePhase.COMPUTED:
                self._listener.first_token(sequence)
            else:
                self._listener.prefill_advanced(sequence)
        self._listener.stepped()

    def _end_run(self) -> None:
        run, batch = self._run, self._batch
        steps = run.steps
        first_count = self._note_first_steps() if batch.joined else 0
        gap_count = steps * len(batch.members) - first_count - len(batch.ended_outside)
        if steps > 1:
            self.blocks.free_count -= batch.growth(steps - 1)
            batch.steps += steps - 1
        if batch.ended_outside or batch.ends[0][0] <= batch.steps + 1:
            for sequence in batch.take_leaving():
                sequence.phase = SequencePhase.COMPUTED
                sequence.in_step = False
                sequence.block_ids = []
                # Its tokens before this step.
                self.blocks.free_count += -(-(sequence.offset_tokens + batch.steps) // self._pool.block_tokens)
                if not sequence.done:
                    sequence.done = True
                    self._listener.ended(sequence)
        self._listener.drew(steps, gap_count, run.seconds(steps) / steps, self._waiting)
        batch.steps += 1
        run.began_s = self._timeline.now_s

    def _end_chunks(self) -> list[CountedSequence]:
        planned, self._planned = self._planned, []
        return [sequence for sequence, tokens in planned if self._end_chunk(sequence, tokens)]

    def _end_chunk(self, sequence: CountedSequence, tokens: int) -> bool:
        """Apply one sequence's tokens of a step. False if the request was ended during it."""
        sequence.in_step = False
        if sequence.done:
            self._settle(sequence)
            return False
        sequence.computed += tokens
        if sequence.phase is SequencePhase.PREFILLING and not sequence.pending:
            self.prefilling.remove(sequence)
            sequence.phase = SequencePhase.COMPUTED
            sequence.tokens += 1
            sequence.remaining -= 1
            if not sequence.remaining:
                sequence.done = True
                self._settle(sequence)
        return True

    # Step by step.

    def _begin_step(self) -> None:
        batch = self._batch
        if not self._by_steps:
            self._by_steps = True
            batch.write_back(0)
        for preempted in self._residency.prepare_step():
            self._listener.preempted(preempted)
        if all(one.block_ids for one in self._waiting) and all(one.pending == 1 for one in batch.members):
            self._by_steps = False
            batch.recount()
            self._begin_run()
            return
        running, prefilling = cast(Any, batch.members), cast(Any, self.prefilling)
        self._planned = cast(Any, form_step(running, prefilling, self._pool.chunk_tokens))
        if not self._planned:
            self._busy = False
            return
        self._mark_planned()
        has_chunks = any(one.phase is SequencePhase.PREFILLING or one.pending > 1 for one, _ in self._planned)
        spans = [(sequence.computed, tokens) for sequence, tokens in self._planned]
        self._run.began_s = self._timeline.now_s
        self._run.first_step_s = self._times.step_s(spans, has_chunks)
        self._schedule()

    def _end_step(self) -> list[CountedSequence]:
        """Apply a step. Returns the sequences whose prompt chunks it computed."""
        drawn: list[CountedSequence] = []
        computed: list[CountedSequence] = []
        gap_count = 0
        planned, self._planned = self._planned, []
        for sequence, tokens in planned:
            is_prompt = sequence.phase is SequencePhase.PREFILLING
            if not self._end_chunk(sequence, tokens):
                continue
            if is_prompt:
                computed.append(sequence)
            elif not sequence.pending:
                drawn.append(sequence)
                gap_count += sequence.first_step_s >= 0
                self._draw(sequence)
        self._listener.drew_some(drawn, gap_count, self._run.first_step_s)
        return computed

    def _draw(self, sequence: CountedSequence) -> None:
        sequence.tokens += 1
        sequence.remaining -= 1
        if sequence.first_step_s < 0:
            sequence.first_step_s = self._timeline.now_s
            self._listener.drew_first(sequence, sequence.first_step_s)
        if not sequence.remaining:
            sequence.done = True
            self._residency.remove(sequence)
            self.blocks.release(sequence)
            self._listener.ended(sequence)
