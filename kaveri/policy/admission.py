"""Admits requests whose KV has arrived to a decode batch, and reserves KV blocks. Pure: no clock, no I/O."""

import enum
from collections.abc import Collection, Iterable
from itertools import islice

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.growth import BatchGrowth, BatchMember
from kaveri.policy.plugins import BatchAdmission, Guarded, RunningBatch, admitted_by


class AdmissionPolicy(enum.StrEnum):
    """Rule for adding requests whose KV has arrived ("landed") to the running decode batch."""

    GREEDY = "greedy"
    """Admit while the batch has free slots."""
    RESERVE_STATIC = "reserve-static"
    """Admit while free KV blocks cover the predicted rest of every answer in the batch."""
    RESERVE_DYNAMIC = "reserve-dynamic"
    """Admit while free KV blocks suffice until the first answer of the batch is predicted to end."""


AnyAdmission = AdmissionPolicy | Guarded[BatchAdmission]
"""Built-in rule or plug-in. A plug-in reserves no blocks; greedy decides when it fails."""


def admitted_count(
    policy: AnyAdmission, batch: BatchGrowth, landed: Iterable[BatchMember], seats: int, free_blocks: int
) -> int:
    """Return how many of the `landed` requests (their KV has arrived) to admit to the batch now, oldest first.

    The policies of TetriInfer (arXiv 2401.11181, section 3.4). Each needs a free slot in the batch per request. Greedy
    requires nothing else; if the batch outgrows its blocks, requests are preempted. Reserve-static admits a request
    only if the free blocks suffice for the batch, with the request, to grow to its predicted ends; reserve-dynamic,
    until the first predicted end, which frees blocks. The first request that must wait blocks later ones. An empty
    batch takes the first request whatever its prediction, so a wrong prediction blocks nothing.

    A request without a prediction, or that has outlived it, reserves only its next token (static), and never counts as
    the first to end (dynamic). When all are unknown and none is preempted, both policies are greedy.

    batch: running requests; unchanged on return, not read by greedy. seats: free slots. free_blocks: free KV blocks.
    """
    joined: list[int] = []
    count = 0
    first_landed = islice(landed, max(0, seats))
    if isinstance(policy, Guarded):
        members = tuple(first_landed)
        if not members:
            return 0
        running = RunningBatch(len(batch), seats, free_blocks, batch.until_first_ends(), batch.until_all_end())
        admitted = admitted_by(policy, running, members)
        return len(members) if admitted is None else admitted
    for member in first_landed:
        if policy is not AdmissionPolicy.GREEDY:
            # Numbers below those of running requests.
            joined.append(-1 - count)
            batch.add(joined[-1], member)
            if kept_blocks(policy, batch) > free_blocks and len(batch) > 1:
                break
        count += 1
    for number in joined:
        batch.remove(number)
    return count


def kept_blocks(policy: AnyAdmission, batch: BatchGrowth) -> int:
    """Return the free KV blocks to reserve for the predicted growth of `batch`: running requests, or the one to run
    first if none runs. 0 under greedy or a plug-in, and if all lengths are unknown and none is preempted."""
    match policy:
        case AdmissionPolicy.RESERVE_STATIC:
            return batch.until_all_end()
        case AdmissionPolicy.RESERVE_DYNAMIC:
            return batch.until_first_ends()
        case _:
            return 0


UNLANDED_KEEPS_S = 2.0
"""Seconds for which blocks are reserved for a request whose KV has not arrived; longer than most pushes take."""

_COUNTED = BatchMember(0)
"""Placeholder for members of a batch that are only counted."""


class DecodeBatch:
    """Requests of one decode instance, numbered by the caller from 1: "expected" while their KV blocks are requested or
    reserved, "ready" when their KV has arrived, "running" once admitted to the batch."""

    def __init__(self, policy: AnyAdmission, block_tokens: int, max_batch: int) -> None:
        """block_tokens: tokens per KV block. max_batch: max requests per decode step."""
        self._policy = policy
        self.keeps_blocks = policy is not AdmissionPolicy.GREEDY
        """True if the policy may reserve free blocks for current requests. Constant."""
        self._block_tokens = block_tokens
        self._max_batch = max_batch
        self._expected: dict[int, tuple[BatchMember, float]] = {}
        self._ready: dict[int, BatchMember] = {}
        self._running = BatchGrowth(block_tokens)
        """Running requests. Under greedy only their count is valid: their tokens are not tracked."""

    @property
    def running_count(self) -> int:
        """Number of requests admitted to the batch and not ended, preempted ones included."""
        return len(self._running)

    @property
    def ready_count(self) -> int:
        """Number of requests whose KV has arrived and that wait to join the batch."""
        return len(self._ready)

    def expect(self, number: int, member: BatchMember, now_s: float) -> None:
        """Add a request whose KV blocks were requested or reserved, and whose KV is still to arrive."""
        self._expected[number] = (member, now_s)

    def land(self, number: int, *, first: bool = False) -> None:
        """Move an expected request to ready: its KV has arrived. first: put it before all other ready requests."""
        member = self._expected.pop(number)[0]
        if first:
            self._ready = {number: member, **self._ready}
        else:
            self._ready[number] = member

    def admit(self, number: int) -> None:
        """Move a ready request to the running batch."""
        member = self._ready.pop(number)
        self._running.add(number, member if self.keeps_blocks else _COUNTED)

    def preempt(self, number: int) -> None:
        """Record that a ready or running request has lost its KV blocks."""
        if number in self._ready:
            self._ready[number] = self._ready[number]._replace(holds_blocks=False)
        self._running.preempt(number)

    def step(self, drawn: set[int]) -> None:
        """Record one decode step: the running requests numbered in `drawn` sampled one token each, the others none."""
        if self.keeps_blocks:
            self._running.step(drawn)

    def run(self, steps: int, resting: Collection[int] = ()) -> None:
        """Record `steps` decode steps in which every running request except those numbered in `resting` samples a
        token. Every preempted request must be in `resting`."""
        if self.keeps_blocks:
            self._running.run(steps, resting)

    def leave(self, number: int) -> None:
        """Remove a request that ended, or to which KV blocks were refused. Idempotent."""
        self._expected.pop(number, None)
        self._ready.pop(number, None)
        self._running.remove(number)

    def admissible(self, free_blocks: int) -> tuple[int, ...]:
        """Return the numbers of the ready requests to add to the running batch now, in order of arrival of their KV."""
        seats = self._max_batch - len(self._running)
        count = admitted_count(self._policy, self._running, self._ready.values(), seats, free_blocks)
        return tuple(self._ready)[:count]

    def kept_blocks(self, now_s: float, coming: BatchMember | None = None) -> int:
        """Return the free KV blocks to reserve for the growth of current requests; new requests may not take them.

        They serve the running batch, or, when nothing runs, the request to run first: a ready one, else the oldest
        expected one younger than UNLANDED_KEEPS_S (so a stalled push blocks others no longer), else `coming`, the next
        to be added.
        """
        if not self.keeps_blocks:
            return 0
        if len(self._running):
            return kept_blocks(self._policy, self._running)
        first = self._first(now_s) or coming
        if first is None:
            return 0
        alone = BatchGrowth(self._block_tokens)
        alone.add(0, first)
        return kept_blocks(self._policy, alone)

    def _first(self, now_s: float) -> BatchMember | None:
        if self._ready:
            return next(iter(self._ready.values()))
        recent = (member for member, since_s in self._expected.values() if now_s - since_s < UNLANDED_KEEPS_S)
        return next(recent, None)


def expected_answer(
    predicted: TokenRange | None, prompt_tokens: int, max_tokens: int | None, max_model_len: int
) -> TokenRange | None:
    """Clamp a predicted answer length, in tokens, to the limits of request and model. None: no prediction."""
    if predicted is None:
        return None
    most_tokens = max_model_len - prompt_tokens
    if max_tokens is not None:
        most_tokens = min(most_tokens, max_tokens)
    return predicted.up_to(max(1, most_tokens))


def member_of(token_count: int, generated_count: int, expected: TokenRange | None, end: RangeEnd) -> BatchMember:
    """Return the batch member for a new request. token_count: tokens whose KV is pushed, including `generated_count`
    answer tokens. expected: predicted tokens of the whole answer. end: whether to use the lower or upper bound."""
    # Prefill sampled the first token of this attempt.
    remaining = expected.after(generated_count + 1) if expected is not None else None
    return BatchMember(token_count, remaining.at(end) if remaining is not None else 0)
