"""An engine that computes in steps, with blocks that are counted and seconds that a latency model gives. Pure.

The steps of a batch that cannot change are one event, a run, in closed form: the seconds of its steps are an arithmetic
series. An arrival in the batch, an end, or blocks that run short cut the run at the right step. Steps with chunks of
prompts are one event each. While a request that lost its blocks waits or is recomputed, the engine goes step by step
with kaveri.engine.stepwise's own Residency and form_step.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, cast

from kaveri.engine.stepwise.residency import Residency
from kaveri.engine.stepwise.sequence import SequencePhase, form_step
from kaveri.kv.layout.layout import KvLayout
from kaveri.simulator.sequence import CountedBlocks, CountedSequence
from kaveri.simulator.spec import Overheads, PoolSpec
from kaveri.simulator.timeline import Timeline

_ALMOST = 1e-9
"""Tolerance, as a share of a step, for the end of a step in floating point."""

_ADMISSION = attrgetter("admission")


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


class CountedEngine:
    """Both sides of a stepwise engine (kaveri.engine.stepwise.lifecycle)."""

    def __init__(
        self, timeline: Timeline, pool: PoolSpec, layout: KvLayout, overheads: Overheads, listener: EngineListener
    ) -> None:
        self._timeline = timeline
        self._latency = pool.latency
        self._block_tokens = layout.block_tokens
        self._chunk_tokens = pool.chunk_tokens
        self._max_batch = pool.max_batch
        self._listener = listener
        self._prefill_overhead_s = overheads.prefill_step_s
        self._decode_overhead_s = overheads.decode_step_s
        self.blocks = CountedBlocks(pool.total_blocks)
        self.residency = Residency(cast(Any, self.blocks), layout, pool.max_batch)
        # As Any on the path of each step: the sequences are counted ones, and a cast() would cost a call.
        self._decoding: Any = self.residency
        self._running = cast(list[CountedSequence], self.residency.running)
        self._waiting = cast(list[CountedSequence], self.residency.waiting)
        self._landed: Any = self.residency.landed
        self._fits = [pool.latency.decode_fit(count) for count in range(pool.max_batch + 1)]
        """Latency fits by number of running requests."""
        self.prefilling: deque[CountedSequence] = deque()
        self._by_steps = False
        """True while a request lacks blocks, or computes its tokens again."""
        # The running requests, while they are not tracked one by one.
        self._steps = 0
        self._offset_sum = 0
        self._counts = [0] * self._block_tokens
        self._ends: list[tuple[int, int, CountedSequence]] = []
        self._joined: list[CountedSequence] = []
        self._ended_outside: list[CountedSequence] = []
        # The run or step under way.
        self._busy = False
        self._version = 0
        self._began_s = 0.0
        self._run_steps = 0
        self._first_step_s = 0.0
        self._more_s = 0.0
        self._chunks: list[tuple[CountedSequence, int]] = []
        self._planned: list[tuple[CountedSequence, int]] = []
        self._dead = False
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
        return len(self._running) + len(self._waiting)

    def block_count(self, token_count: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-token_count // self._block_tokens)

    def context_tokens(self) -> int:
        """KV tokens of all requests that decode here."""
        tokens = 0
        if self._landed or self._waiting:
            tokens = sum(sequence.computed for sequence in (*self._landed, *self._waiting))
        if self._by_steps:
            return tokens + sum(sequence.computed for sequence in self._running)
        return tokens + self._offset_sum + len(self._running) * (self._steps - 1)

    def open(self, sequence: CountedSequence, token_count: int) -> bool:
        """Take the blocks of this many tokens. False: there is no room now."""
        wanted, blocks = -(-token_count // self._block_tokens), self.blocks
        if wanted > blocks.free_count or (self._waiting and self.residency.short_of_blocks):
            return False
        blocks.free_count -= wanted
        sequence.block_ids = [0] * wanted
        if self._run_steps > 1 and self._busy and not self._by_steps:
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
        self._decoding.land(sequence)
        self._blocks_may_be_taken()

    def land_partly(self, sequence: CountedSequence, held_tokens: int) -> None:
        """Land a request whose blocks are open with the KV of its first `held_tokens`. All its tokens are known. The
        batch computes the others, step by step."""
        assert 0 < held_tokens < sequence.tokens
        self._lands_parts = True
        sequence.computed = held_tokens
        self._decoding.land(sequence)
        self._blocks_may_be_taken()

    def adopt(self, sequence: CountedSequence) -> bool:
        """Turn a computed prompt into a landed request. False: it had to give its blocks up."""
        self.residency.land(cast(Any, sequence))
        preempted = self.residency.make_whole(cast(Any, sequence))
        if not preempted and self._busy and not self._by_steps:
            self._shorten()
        self._blocks_may_be_taken()
        return not preempted

    def admit(self, sequence: CountedSequence) -> None:
        """Let a landed request run from the next step on."""
        self._decoding.admit(sequence)
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
            self._ended_outside.append(sequence)
            self._cut()
            return
        elif phase is not SequencePhase.COMPUTED:
            self._decoding.remove(sequence)
        self.settle(sequence)

    def settle(self, sequence: CountedSequence) -> None:
        """Free the blocks of a request that has ended, unless something can still touch them."""
        if sequence.done and not (sequence.in_step or sequence.transfer_open):
            self.blocks.free_count += len(sequence.block_ids)
            sequence.block_ids = []
            if self._waiting:
                self._blocks_may_be_taken()

    def token_count(self, sequence: CountedSequence) -> int:
        """Tokens of prompt and answer, after the last step that sync() has seen."""
        if sequence.phase is SequencePhase.RUNNING and not self._by_steps:
            return sequence.offset_tokens + self._steps
        return sequence.tokens

    @property
    def computed_by_run(self) -> int | None:
        """Term to add to `offset_tokens` of a running request to get the tokens whose KV is here, after the last step
        that sync() has seen. None: `computed` of each holds."""
        return None if self._by_steps else self._steps - 1

    @property
    def step_began_s(self) -> float:
        """Time at which the step under way began."""
        return self._began_s

    def stop(self) -> None:
        """Stop the engine: no event follows."""
        self._dead = True
        self._version += 1

    # Steps.

    def sync(self, time_s: float) -> None:
        """Apply the steps of the run that have ended by then; not the last one, which is an event."""
        if self._run_steps <= 1 or not self._busy or self._by_steps:
            return
        elapsed_s = time_s - self._began_s
        if elapsed_s < self._first_step_s:
            return
        steps = min(self._steps_within(elapsed_s), self._run_steps - 1)
        if steps > 0:
            self._commit(steps)

    def _blocks_may_be_taken(self) -> None:
        """Retry for a request that lacks blocks, while nothing runs: free ones, or those of a landed one."""
        if self._waiting and not self._busy:
            self._begin()

    def room_at(self, time_s: float) -> tuple[int, int]:
        """Free blocks, and the KV tokens of all requests that decode here, after the steps that have ended by then."""
        free, context = self.blocks.free_count, self.context_tokens()
        if self._run_steps > 1 and self._busy and not self._by_steps:
            elapsed_s = time_s - self._began_s
            if elapsed_s >= self._first_step_s:
                steps = min(self._steps_within(elapsed_s), self._run_steps - 1)
                free -= self._growth(steps)
                context += steps * len(self._running)
        return free, context

    def _work_came(self) -> None:
        if self._dead:
            return
        if not self._busy:
            self._begin()
        elif not self._by_steps and not self._chunks:
            self._cut()

    def _cut(self) -> None:
        """End the run with the step under way."""
        if self._run_steps > 1:
            self.sync(self._timeline.now_s)
            if self._run_steps > 1:
                self._run_steps = 1
                self._schedule()

    def _shorten(self) -> None:
        """Shorten the run if need be: blocks were taken."""
        if self._run_steps > 1:
            # sync() was called before blocks were taken.
            steps = self._steps_with_blocks(self._run_steps)
            if steps < self._run_steps:
                self._run_steps = max(1, steps)
                self._schedule()

    def _schedule(self) -> None:
        self._version += 1
        seconds = self._first_step_s if self._run_steps == 1 else self._seconds(self._run_steps)
        self._timeline.at(self._began_s + seconds, self._over, self._version)

    def _begin(self) -> None:
        """Form the next run or step, if there is anything to do."""
        # A prompt that begins may cause the arrival of another, which must not begin a second step.
        self._busy, self._run_steps = True, 1
        waiting = self._waiting
        if self._by_steps:
            self._begin_step()
            return
        if waiting:
            if self.residency.short_of_blocks or (self._lands_parts and any(one.pending > 1 for one in waiting)):
                self._begin_step()
                return
            while waiting and len(self._running) < self._max_batch:
                self._join(waiting.pop(0))
        self._begin_run()

    def _begin_run(self) -> None:
        count = len(self._running)
        if self.prefilling:
            self._plan_chunks()
        elif not count:
            self._busy = False
            return
        self._began_s = self._timeline.now_s
        if self._chunks:
            spans = [(sequence.computed, tokens) for sequence, tokens in self._chunks]
            context = self._offset_sum + count * self._steps
            step_s = self._latency.mixed_step_s(spans, count, context)
            self._first_step_s, self._more_s, self._run_steps = step_s + self._prefill_overhead_s, 0.0, 1
        else:
            fit = self._fits[count]
            context = self._offset_sum + count * self._steps
            self._more_s = count * fit.context_token_s
            self._first_step_s = (
                fit.step_s + (context * fit.context_token_s + count * fit.request_s) + self._decode_overhead_s
            )
            most = self._ends[0][0] - self._steps
            if count * ((most - 1) // self._block_tokens + 1) > self.blocks.free_count:
                most = self._steps_with_blocks(most)
            self._run_steps = most
        self._schedule()

    def _plan_chunks(self) -> None:
        prefilling: Any = self.prefilling
        for counted, tokens in cast(Any, form_step((), prefilling, self._chunk_tokens)):
            counted.in_step = True
            self._chunks.append((counted, tokens))
            if not counted.started:
                counted.started = True
                self._listener.prefill_started(counted)

    def _join(self, sequence: CountedSequence) -> None:
        sequence.phase = SequencePhase.RUNNING
        running = self._running
        # Earlier members were admitted earlier, unless they came back.
        if running and running[-1].admission > sequence.admission:
            place = next(index for index, other in enumerate(running) if other.admission > sequence.admission)
            running.insert(place, sequence)
        else:
            running.append(sequence)
        self._count_in(sequence)
        if sequence.first_step_s < 0:
            self._joined.append(sequence)

    def _count_in(self, sequence: CountedSequence) -> None:
        sequence.offset_tokens = sequence.tokens - self._steps
        sequence.end_step = self._steps + sequence.remaining
        self._offset_sum += sequence.offset_tokens
        self._counts[sequence.offset_tokens % self._block_tokens] += 1
        heapq.heappush(self._ends, (sequence.end_step, sequence.admission, sequence))

    def _count_out(self, sequence: CountedSequence) -> None:
        self._offset_sum -= sequence.offset_tokens
        self._counts[sequence.offset_tokens % self._block_tokens] -= 1

    # Closed form. Step j of a run of n requests takes first + j * more seconds.

    def _seconds(self, steps: int) -> float:
        return steps * self._first_step_s + self._more_s * (steps * (steps - 1) // 2)

    def _steps_within(self, elapsed_s: float) -> int:
        first, half = self._first_step_s, self._more_s / 2
        if half * self._run_steps < first * _ALMOST:
            steps = int(elapsed_s / first)
        else:
            linear = first - half
            steps = int((math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half))
        more_s = self._more_s
        while (steps + 1) * first + more_s * ((steps + 1) * steps // 2) <= elapsed_s:
            steps += 1
        while steps * first + more_s * (steps * (steps - 1) // 2) > elapsed_s:
            steps -= 1
        return steps

    def _crossing(self, step: int) -> int:
        """Number of running requests that need another block when step `step` from here has ended."""
        return self._counts[-(self._steps + step - 1) % self._block_tokens]

    def _growth(self, steps: int) -> int:
        """Blocks that the running requests take with the ends of this many steps."""
        size, counts = self._block_tokens, self._counts
        whole, rest = divmod(steps, size)
        # Step `step` from here counts at -(self._steps + step - 1) % size.
        first = (1 - self._steps - rest) % size
        last = first + rest
        blocks = sum(counts[first:last])
        if last > size:
            blocks += sum(counts[: last - size])
        return whole * len(self._running) + blocks

    def _steps_with_blocks(self, most: int) -> int:
        """Steps of at most `most` that can be taken before blocks run short: only after the last may there be too
        few."""
        count, free, size = len(self._running), self.blocks.free_count, self._block_tokens
        if count * ((most - 1) // size + 1) <= free:
            return most
        whole = min((most - 1) // size, free // count)
        free -= whole * count
        steps = whole * size
        while steps < most - 1:
            free -= self._crossing(steps + 1)
            if free < 0:
                break
            steps += 1
        return steps + 1

    def _commit(self, steps: int) -> None:
        """Apply steps of the run that are over and followed by others."""
        self.blocks.free_count -= self._growth(steps)
        first_count = self._note_first_steps() if self._joined else 0
        seconds = self._seconds(steps)
        self._listener.drew(steps, steps * len(self._running) - first_count, seconds / steps, self._waiting)
        self._steps += steps
        self._began_s += seconds
        self._first_step_s += steps * self._more_s
        self._run_steps -= steps

    def _note_first_steps(self) -> int:
        """Report the first step of the requests that joined the batch; it has ended. Returns how many these are."""
        time_s = self._began_s + self._first_step_s
        joined, self._joined = self._joined, []
        if self._ended_outside:
            joined = [sequence for sequence in joined if sequence not in self._ended_outside]
        for sequence in joined:
            sequence.first_step_s = time_s
            self._listener.drew_first(sequence, time_s)
        return len(joined)

    def _over(self, version: int) -> None:
        """Handle the end of the run or step."""
        if version != self._version:
            return
        self._listener.before_step_ends()
        self.last_step_began_s = self._began_s
        if self._by_steps:
            self._end_step()
            return
        if self._running:
            self._end_run(self._run_steps)
            computed = self._end_chunks() if self._chunks else ()
            self._grow()
        else:
            computed = self._end_chunks()
        self._begin()
        if computed:
            self._tell(computed)
        self._listener.stepped()

    def _end_run(self, steps: int) -> None:
        """Apply the last of `steps` steps."""
        first_count = self._note_first_steps() if self._joined else 0
        gap_count = steps * len(self._running) - first_count - len(self._ended_outside)
        if steps > 1:
            self.blocks.free_count -= self._growth(steps - 1)
            self._steps += steps - 1
        if self._ended_outside or self._ends[0][0] <= self._steps + 1:
            self._leave_batch()
        self._listener.drew(steps, gap_count, self._seconds(steps) / steps, self._waiting)
        self._steps += 1
        self._began_s = self._timeline.now_s

    def _tell(self, computed: Iterable[CountedSequence]) -> None:
        listener = self._listener
        for sequence in computed:
            if sequence.phase is SequencePhase.COMPUTED:
                listener.first_token(sequence)
            else:
                listener.prefill_advanced(sequence)

    def _leave_batch(self) -> None:
        """Remove from the batch the requests that draw their last token in this step, or were ended from outside."""
        running = self._running
        leaving: list[CountedSequence] = []
        last_step = self._steps + 1
        while self._ends and self._ends[0][0] <= last_step:
            sequence = heapq.heappop(self._ends)[2]
            if sequence.phase is SequencePhase.RUNNING and sequence.end_step == last_step and not sequence.done:
                leaving.append(sequence)
        if self._ended_outside:
            leaving += self._ended_outside
            self._ended_outside = []
        for sequence in leaving:
            self._count_out(sequence)
            del running[bisect_left(running, sequence.admission, key=_ADMISSION)]
            sequence.phase = SequencePhase.COMPUTED
            sequence.in_step = False
            sequence.block_ids = []
            # Its tokens before this step.
            self.blocks.free_count += self.block_count(sequence.offset_tokens + self._steps)
            if not sequence.done:
                sequence.done = True
                self._listener.ended(sequence)

    def _end_chunks(self) -> list[CountedSequence]:
        """Return the sequences whose chunks are computed."""
        computed: list[CountedSequence] = []
        for sequence, tokens in self._chunks:
            sequence.in_step = False
            if sequence.done:
                self.settle(sequence)
                continue
            sequence.computed += tokens
            if not sequence.pending:
                self.prefilling.remove(sequence)
                self._draw_first(sequence)
            computed.append(sequence)
        self._chunks = []
        return computed

    def _draw_first(self, sequence: CountedSequence) -> None:
        sequence.phase = SequencePhase.COMPUTED
        sequence.tokens += 1
        sequence.remaining -= 1
        if not sequence.remaining:
            sequence.done = True
            self.settle(sequence)

    def _grow(self) -> None:
        """Take the blocks of the next tokens, or else continue step by step."""
        wanted = self._counts[-(self._steps - 1) % self._block_tokens]
        if wanted <= self.blocks.free_count:
            self.blocks.free_count -= wanted
        else:
            self._look_at_each(1)

    # Step by step.

    def _look_at_each(self, missing: int) -> None:
        """Leave the closed form. missing: tokens of each running request that it has no block for yet."""
        self._by_steps = True
        for sequence in self._running:
            sequence.tokens = sequence.offset_tokens + self._steps
            sequence.computed = sequence.tokens - 1
            sequence.remaining = sequence.end_step - self._steps
            sequence.block_ids = [0] * self.block_count(sequence.tokens - missing)

    def _begin_step(self) -> None:
        if not self._by_steps:
            self._look_at_each(0)
        for preempted in self.residency.prepare_step():
            self._listener.preempted(cast(CountedSequence, preempted))
        running, waiting = self._running, self._waiting
        if all(sequence.block_ids for sequence in waiting) and all(sequence.pending == 1 for sequence in running):
            self._return_to_runs(running)
            self._begin_run()
            return
        planned = form_step(self.residency.running, cast(Any, self.prefilling), self._chunk_tokens)
        self._planned = cast(list[tuple[CountedSequence, int]], planned)
        if not self._planned:
            self._busy = False
            return
        has_chunks = False
        for sequence, _ in self._planned:
            sequence.in_step = True
            if sequence.phase is SequencePhase.PREFILLING and not sequence.started:
                sequence.started = True
                self._listener.prefill_started(sequence)
            has_chunks = has_chunks or sequence.phase is SequencePhase.PREFILLING or sequence.pending > 1
        step_s = self._latency.step_s([(sequence.computed, tokens) for sequence, tokens in self._planned])
        step_s += self._prefill_overhead_s if has_chunks else self._decode_overhead_s
        self._began_s = self._timeline.now_s
        self._first_step_s = step_s
        self._version += 1
        self._timeline.at(self._began_s + step_s, self._over, self._version)

    def _return_to_runs(self, running: list[CountedSequence]) -> None:
        self._by_steps = False
        self._offset_sum = 0
        self._counts = [0] * self._block_tokens
        self._ends = []
        self._joined = []
        for sequence in running:
            self._count_in(sequence)
            if sequence.first_step_s < 0:
                self._joined.append(sequence)

    def _end_step(self) -> None:
        drawn: list[CountedSequence] = []
        computed: list[CountedSequence] = []
        gap_count = 0
        for sequence, tokens in self._planned:
            sequence.in_step = False
            if sequence.done:
                self.settle(sequence)
                continue
            sequence.computed += tokens
            if sequence.phase is SequencePhase.PREFILLING:
                computed.append(sequence)
                if not sequence.pending:
                    self.prefilling.remove(sequence)
                    self._draw_first(sequence)
            elif not sequence.pending:
                drawn.append(sequence)
                gap_count += sequence.first_step_s >= 0
                self._draw(sequence)
        self._planned = []
        self._listener.drew_some(drawn, gap_count, self._first_step_s)
        self._begin()
        self._tell(computed)
        self._listener.stepped()

    def _draw(self, sequence: CountedSequence) -> None:
        sequence.tokens += 1
        sequence.remaining -= 1
        if sequence.first_step_s < 0:
            sequence.first_step_s = self._timeline.now_s
            self._listener.drew_first(sequence, sequence.first_step_s)
        if not sequence.remaining:
            sequence.done = True
            self.residency.remove(cast(Any, sequence))
            self.blocks.release(sequence)
            self._listener.ended(sequence)
