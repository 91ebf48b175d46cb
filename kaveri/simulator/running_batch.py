"""The decode batch of a simulated engine in closed form: tokens follow from the number of steps. Pure."""

import heapq
from bisect import bisect_left
from operator import attrgetter

from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.simulator.sequence import CountedSequence

_ADMISSION = attrgetter("admission")


class RunningBatch:
    """Decode batch in which each request samples one token per step."""

    def __init__(self, members: list[CountedSequence], block_tokens: int) -> None:
        """members: the engine's own list of running requests, in order of admission."""
        self.members = members
        self.steps = 0
        self.joined: list[CountedSequence] = []
        """Members whose first step has not ended."""
        self.ended_outside: list[CountedSequence] = []
        """Members ended by a caller; they leave after the current step."""
        self._block_tokens = block_tokens
        self._offset_sum = 0
        self._counts = [0] * block_tokens
        """Number of members by offset_tokens modulo block_tokens."""
        self.ends: list[tuple[int, int, CountedSequence]] = []
        """Heap by end_step; may contain members that have left."""

    @property
    def context_tokens(self) -> int:
        """Total tokens (prompts and answers) of all members."""
        return self._offset_sum + len(self.members) * self.steps

    def join(self, sequence: CountedSequence) -> None:
        sequence.phase = SequencePhase.RUNNING
        members = self.members
        # Earlier members were admitted earlier, unless they came back.
        if members and members[-1].admission > sequence.admission:
            members.insert(bisect_left(members, sequence.admission, key=_ADMISSION), sequence)
        else:
            members.append(sequence)
        self._count_in(sequence)

    def recount(self) -> None:
        """Recompute the totals from the sequences, which were updated step by step meanwhile."""
        self._offset_sum = 0
        self._counts = [0] * self._block_tokens
        self.ends = []
        self.joined = []
        for sequence in self.members:
            self._count_in(sequence)

    def write_back(self, missing: int) -> None:
        """Store the members' token counts in their sequences. missing: tokens of each that have no block yet."""
        for sequence in self.members:
            sequence.tokens = sequence.offset_tokens + self.steps
            sequence.computed = sequence.tokens - 1
            sequence.remaining = sequence.end_step - self.steps
            sequence.block_ids = [0] * -(-(sequence.tokens - missing) // self._block_tokens)

    def take_leaving(self) -> list[CountedSequence]:
        """Remove and return members that sample their last token in this step or were ended by a caller."""
        leaving: list[CountedSequence] = []
        last_step = self.steps + 1
        while self.ends and self.ends[0][0] <= last_step:
            sequence = heapq.heappop(self.ends)[2]
            if sequence.phase is SequencePhase.RUNNING and sequence.end_step == last_step and not sequence.done:
                leaving.append(sequence)
        if self.ended_outside:
            leaving += self.ended_outside
            self.ended_outside = []
        for sequence in leaving:
            self._offset_sum -= sequence.offset_tokens
            self._counts[sequence.offset_tokens % self._block_tokens] -= 1
            del self.members[bisect_left(self.members, sequence.admission, key=_ADMISSION)]
        return leaving

    def growth(self, steps: int) -> int:
        """Return the number of blocks that the members allocate in the next `steps` steps."""
        size, counts = self._block_tokens, self._counts
        whole, rest = divmod(steps, size)
        # Step `step` from here counts at -(self.steps + step - 1) % size.
        first = (1 - self.steps - rest) % size
        last = first + rest
        blocks = sum(counts[first:last])
        if last > size:
            blocks += sum(counts[: last - size])
        return whole * len(self.members) + blocks

    def crossing(self, step: int) -> int:
        """Return the number of members that need another block after `step` more steps."""
        return self._counts[-(self.steps + step - 1) % self._block_tokens]

    def steps_with_blocks(self, most: int, free: int) -> int:
        """Return the number of steps, up to `most`, that `free` blocks suffice for; they may run out after the last."""
        count, size = len(self.members), self._block_tokens
        if count * ((most - 1) // size + 1) <= free:
            return most
        whole = min((most - 1) // size, free // count)
        free -= whole * count
        steps = whole * size
        while steps < most - 1:
            free -= self.crossing(steps + 1)
            if free < 0:
                break
            steps += 1
        return steps + 1

    def _count_in(self, sequence: CountedSequence) -> None:
        sequence.offset_tokens = sequence.tokens - self.steps
        sequence.end_step = self.steps + sequence.remaining
        self._offset_sum += sequence.offset_tokens
        self._counts[sequence.offset_tokens % self._block_tokens] += 1
        heapq.heappush(self.ends, (sequence.end_step, sequence.admission, sequence))
        if sequence.first_step_s < 0:
            self.joined.append(sequence)
