"""An engine that computes in steps, with blocks that are counted and seconds that a latency model gives. Pure.

The steps of a batch that cannot change are one event, a run, in closed form: the seconds of its steps are an arithmetic
series. An arrival in the batch, an end, or blocks that run short cut the run at the right step. Steps with chunks of
prompts are one event each. While a request that lost its blocks waits or is recomputed, the engine goes step by step
with kaveri.engine.stepwise's own Residency and form_step.
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
"""Tolerance, as a share of a step, for the end of a step in floating point."""


class EngineListener:
    """Receives the engine's events, at their times. Ignores those that a subclass does not override."""

    def before_step_ends(self) -> None:
        """A step ends: the next calls report it, and may change the engine."""

    def prefill_started(self, sequence: CountedSequence) -> None:
        """The sequence's first chunk begins."""

    def prefill_advanced(self, sequence: CountedSequence) -> None:
        """A chunk that was not the last has been computed."""

    def first_token(self, sequence: CountedSequence) -> None:
        """The sequence's prompt is computed. Also its last token if none remains."""

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        """The running requests have drawn a token in each of `steps` steps, of `step_s` on average. gap_count: tokens
        that followed another one. resting: admitted, and not running."""

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        """Only these have drawn a token in one step. gap_count: tokens that followed another one."""

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        """The sequence's first decode step ended at that time."""

    def ended(self, sequence: CountedSequence) -> None:
        """The sequence has drawn its last token."""

    def preempted(self, sequence: CountedSequence) -> None:
        """The sequence has given its blocks up."""

    def stepped(self) -> None:
        """A step is over, and all of its results have been reported."""


class _StepTimes:
    """Seconds of a step: those of the latency model, and what the services take."""

    def __init__(self, pool: PoolSpec, overheads: Overheads) -> None:
        self._latency = pool.latency
        self._overheads = overheads
        self._fits = [pool.latency.decode_fit(count) for count in range(pool.max_batch + 1)]
        """Latency fits by number of running requests."""

    def decode_s(self, count: int, context: int) -> tuple[float, float]:
        """Seconds of a step that only decodes, and by how many each next one is longer."""
        fit = self._fits[count]
        step_s = fit.step_s + (context * fit.context_token_s + count * fit.request_s) + self._overheads.decode_step_s
        return step_s, count * fit.context_token_s

    def mixed_s(self, spans: list[tuple[int, int]], count: int, context: int) -> float:
        """Seconds of a step with chunks next to `count` running requests."""
        return self._latency.mixed_step_s(spans, count, context) + self._overheads.prefill_step_s

    def step_s(self, spans: list[tuple[int, int]], has_chunks: bool) -> float:
        """Seconds of a step that was formed from single sequences."""
        overhead_s = self._overheads.prefill_step_s if has_chunks else self._overheads.decode_step_s
        return self._latency.step_s(spans) + overhead_s


class _Run:
    """The steps under way: step j takes first_step_s + j * more_s."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.steps = 0
        """1: a lone step, which nothing cuts."""
        self.first_step_s = 0.0
        self.more_s = 0.0

    def seconds(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        return steps * self.first_step_s + self.more_s * (steps * (steps - 1) // 2)

    def ended_steps(self, time_s: float) -> int:
        """Steps of several that have ended by then; not the last one, which is an event."""
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
    """Both sides of a stepwise engine (kaveri.engine.stepwise.lifecycle)."""

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
        """True while a request lacks blocks, or computes its tokens again: sequences hold their own tokens."""
        self._run = _Run()
        self._busy = False
        """True while a run or step is under way."""
        self._dead = False
        self._version = 0
        """Number of the end that is due; those scheduled before it are void."""
        self._planned: list[tuple[CountedSequence, int]] = []
        """Step by step: the step's sequences and their tokens. Otherwise its chunks."""
        self._lands_parts = False
        """True once a request has landed without all of its KV."""
        self.last_step_began_s = 0.0
        """Begin of the step that ends now; within a run, of any of its steps."""

    # Blocks.

    @property
    def free_blocks(self) -> int:
        """Free blocks after the last step that sync() has seen."""
        return self.blocks.free_count

    @property
    def admitted_count(self) -> int:
        """Number of requests that run or wait for a place in the batch."""
        return len(self._batch.members) + len(self._waiting)

    def open(self, sequence: CountedSequence, token_count: int) -> bool:
        """Take the blocks of this many tokens. False: there is no room now."""
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
        """Queue a prompt whose blocks are open."""
        self.prefilling.append(sequence)
        self._work_came()

    def land(self, sequence: CountedSequence) -> None:
        """Land a request whose blocks are open: its KV is here, and its first token is drawn."""
        sequence.computed = sequence.tokens
        sequence.tokens += 1
        self._residency.land(sequence)
        self._blocks_may_be_taken()

    def land_partly(self, sequence: CountedSequence, held_tokens: int) -> None:
        """Land a request whose blocks are open with the KV of its first `held_tokens`. All its tokens are known. The
        batch computes the others, step by step."""
        assert 0 < held_tokens < sequence.tokens
        self._lands_parts = True
        sequence.computed = held_tokens
        self._residency.land(sequence)
        self._blocks_may_be_taken()

    def adopt(self, sequence: CountedSequence) -> bool:
        """Turn a computed prompt into a landed request. False: it had to give its blocks up."""
        self._residency.land(sequence)
        preempted = self._residency.make_whole(sequence)
        if not preempted and self._run.steps > 1:
            self._shorten()
        self._blocks_may_be_taken()
        return not preempted

    def admit(self, sequence: CountedSequence) -> None:
        """Let a landed request run from the next step on."""
        self._residency.admit(sequence)
        self._work_came()

    def end(self, sequence: CountedSequence) -> None:
        """End a request here; its blocks are freed as soon as nothing can touch them."""
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
        """Tokens of prompt and answer, after the last step that sync() has seen."""
        if sequence.phase is SequencePhase.RUNNING and not self._by_steps:
            return sequence.offset_tokens + self._batch.steps
        return sequence.tokens

    @property
    def computed_by_run(self) -> int | None:
        """Term to add to `offset_tokens` of a running request to get the tokens whose KV is here, after the last step
        that sync() has seen. None: `computed` of each holds."""
        return None if self._by_steps else self._batch.steps - 1

    @property
    def step_began_s(self) -> float:
        """Time at which the step under way began."""
        return self._run.began_s

    def stop(self) -> None:
        """Stop the engine: no event follows."""
        self._dead = True
        self._version += 1

    # Runs.

    def sync(self, time_s: float) -> None:
        """Apply the steps of the run that have ended by then; not the last one, which is an event."""
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
        """Free blocks, and the KV tokens of all requests that decode here, after the steps that have ended by then."""
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
        """Free the blocks of a request that has ended, unless something can still touch them."""
        if sequence.done and not (sequence.in_step or sequence.transfer_open):
            self.blocks.release(sequence)
            self._blocks_may_be_taken()

    def _blocks_may_be_taken(self) -> None:
        """Retry for a request that lacks blocks, while nothing runs: free ones, or those of a landed one."""
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
        """End the run with the step under way."""
        if self._run.steps > 1:
            self.sync(self._timeline.now_s)
            if self._run.steps > 1:
                self._run.steps = 1
                self._schedule()

    def _shorten(self) -> None:
        """Shorten the run if need be: blocks were taken."""
        # sync() was called before blocks were taken.
        steps = self._batch.steps_with_blocks(self._run.steps, self.blocks.free_count)
        if steps < self._run.steps:
            self._run.steps = max(1, steps)
            self._schedule()

    def _schedule(self) -> None:
        self._version += 1
        self._timeline.at(self._run.began_s + self._run.seconds(self._run.steps), self._over, self._version)

    def _begin(self) -> None:
        """Form the next run or step, if there is anything to do."""
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
        """Report the first step of the requests that joined the batch; it has ended. Returns how many these are."""
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
        """Return the sequences whose chunks are computed."""
        planned, self._planned = self._planned, []
        return [sequence for sequence, tokens in planned if self._end_chunk(sequence, tokens)]

    def _end_chunk(self, sequence: CountedSequence, tokens: int) -> bool:
        """Apply a sequence's part of a step. False: it has ended meanwhile."""
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
        """Return the sequences whose chunks of prompts are computed."""
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
