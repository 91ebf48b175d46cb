"""Computes how many more KV blocks a decode batch will need. Pure: no clock, no I/O."""

import heapq
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

_SPARE_ENDS = 64


class BatchMember(NamedTuple):
    """Request in a decode instance's running batch, or a candidate for it."""

    context_tokens: int
    """Tokens whose KV the request holds, or must recompute after a preemption."""
    remaining_tokens: int = 0
    """Predicted number of tokens still to sample. 0: unknown, or the answer is longer than predicted."""
    holds_blocks: bool = True
    """True if the request holds the blocks of its context and next token; False if it was preempted."""


@dataclass(slots=True)
class _Holder:
    """Batch member that holds its KV blocks. Values are relative to the steps so far, so a step changes none."""

    offset_tokens: int
    """The member's context tokens, minus the steps so far."""
    end_step: int
    """Predicted last step. 0: unknown."""


class BatchGrowth:
    """KV-block growth of one decode batch, whose members are numbered by the caller. Neither a step nor a query visits
    every member.

    Members with equal context length modulo the block size need their next block at the same step, so they are counted
    together, and a query visits one counter per token of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._steps = 0
        self._holders: dict[int, _Holder] = {}
        self._preempted: dict[int, BatchMember] = {}
        # Holders by (context - steps) mod block_tokens: all of them, and those with a predicted end.
        self._counts = [0] * block_tokens
        self._counts_with_end = [0] * block_tokens
        # Blocks that the holders with a predicted end will need until then.
        self._wanted_to_end = 0
        # Min-heap of (end_step, number). Stale entries of members that left are skipped on access.
        self._ends: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._holders) + len(self._preempted)

    def add(self, number: int, member: BatchMember) -> None:
        """Add a request to the batch, under an unused number."""
        if not member.holds_blocks:
            self._preempted[number] = member
            return
        end_step = self._steps + member.remaining_tokens if member.remaining_tokens > 0 else 0
        holder = _Holder(member.context_tokens - self._steps, end_step)
        self._holders[number] = holder
        self._counts[holder.offset_tokens % self._block_tokens] += 1
        if member.remaining_tokens > 0:
            self._count_end(holder, 1)
            heapq.heappush(self._ends, (holder.end_step, number))
            if len(self._ends) > 2 * len(self._holders) + _SPARE_ENDS:
                # A member that left and came back may leave duplicate entries.
                self._ends = [*dict.fromkeys(end for end in self._ends if self._is_current(end))]
                heapq.heapify(self._ends)

    def remove(self, number: int) -> None:
        """Remove a request from the batch; no-op if unknown."""
        if self._preempted.pop(number, None) is None and number in self._holders:
            self._take(number)

    def preempt(self, number: int) -> None:
        """Record that a request has lost its KV blocks; no-op if unknown."""
        if number in self._holders:
            self._preempted[number] = self._take(number)._replace(holds_blocks=False)

    def step(self, drawn: AbstractSet[int]) -> None:
        """Record one decode step: the requests numbered in `drawn` sampled one token each, the others none. A preempted
        request in `drawn` holds its blocks again. Unknown numbers are ignored."""
        resumed: dict[int, BatchMember] = {}
        still: dict[int, BatchMember] = {}
        if drawn != self._holders.keys():
            resumed = {number: member for number, member in self._preempted.items() if number in drawn}
            still = {number: self._take(number) for number in self._holders.keys() - drawn}
        self._steps += 1
        # These filled a block and took the next one.
        self._wanted_to_end -= self._counts_with_end[-self._steps % self._block_tokens]
        self._drop_ends_reached()
        for number, member in resumed.items():
            del self._preempted[number]
            left = max(0, member.remaining_tokens - 1)
            self.add(number, BatchMember(member.context_tokens + 1, left))
        for number, member in still.items():
            self.add(number, member)

    def run(self, steps: int, resting: Collection[int] = ()) -> None:
        """Record `steps` decode steps in which all requests except those numbered in `resting` sample a token. Every
        preempted request must be in `resting`."""
        still = {number: self._take(number) for number in resting if number in self._holders}
        size, last_step = self._block_tokens, self._steps + steps
        while self._steps < last_step:
            # Members with a predicted end do not change before the next such end.
            stop = max(self._steps + 1, min(last_step, self._ends[0][0])) if self._ends else last_step
            whole, rest = divmod(stop - self._steps, size)
            if whole:
                self._wanted_to_end -= whole * sum(self._counts_with_end)
            for step in range(stop - rest + 1, stop + 1):
                self._wanted_to_end -= self._counts_with_end[-step % size]
            self._steps = stop
            self._drop_ends_reached()
        for number in still:
            self.add(number, still[number])

    def until_all_end(self) -> int:
        """Return the KV blocks still needed until every request of the batch has ended as predicted. One without
        prediction counts its next token only."""
        preempted = self._preempted.values()
        return self._wanted_to_end + sum(
            self._blocks(member.context_tokens + max(1, member.remaining_tokens)) for member in preempted
        )

    def until_first_ends(self) -> int:
        """Return the KV blocks that the batch needs until its first predicted end; the next token if none is known."""
        steps = self._steps_to_first_end()
        total = sum(self._blocks(member.context_tokens + steps) for member in self._preempted.values())
        size, shift = self._block_tokens, self._steps
        # With r tokens in its last block, a member that samples k tokens begins (r + k - 1) // B more blocks beyond the
        # one that it has for its next token.
        for offset, count in enumerate(self._counts):
            if count:
                total += count * (((offset + shift) % size + steps - 1) // size)
        return total

    def _drop_ends_reached(self) -> None:
        """Mark the ends of members that have outlived their predictions as unknown."""
        while self._ends and self._ends[0][0] <= self._steps:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                holder = self._holders[end[1]]
                self._count_end(holder, -1)
                holder.end_step = 0

    def _steps_to_first_end(self) -> int:
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        ends = [member.remaining_tokens for member in self._preempted.values() if member.remaining_tokens > 0]
        if self._ends:
            ends.append(self._ends[0][0] - self._steps)
        return min(ends, default=1)

    def _take(self, number: int) -> BatchMember:
        holder = self._holders.pop(number)
        self._counts[holder.offset_tokens % self._block_tokens] -= 1
        left = max(0, holder.end_step - self._steps)
        if left:
            self._count_end(holder, -1)
        return BatchMember(holder.offset_tokens + self._steps, left)

    def _count_end(self, holder: _Holder, sign: int) -> None:
        """Count a holder with a predicted end. sign: 1 to add, -1 to remove."""
        context_tokens = holder.offset_tokens + self._steps
        end_tokens = holder.offset_tokens + holder.end_step
        self._counts_with_end[holder.offset_tokens % self._block_tokens] += sign
        self._wanted_to_end += sign * (self._blocks(end_tokens) - self._blocks(context_tokens + 1))

    def _is_current(self, end: tuple[int, int]) -> bool:
        end_step, number = end
        holder = self._holders.get(number)
        return holder is not None and holder.end_step == end_step

    def _blocks(self, token_count: int) -> int:
        return -(-token_count // self._block_tokens)
