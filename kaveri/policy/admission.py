"""Chooses which landed requests join a decode instance's batch, and how many blocks to reserve. Pure: no clock, no
I/O."""

import enum
from collections.abc import Collection, Iterable
from itertools import islice

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.growth import BatchGrowth, BatchMember
from kaveri.policy.plugins import BatchAdmission, Guarded, RunningBatch, admitted_by


class AdmissionPolicy(enum.StrEnum):
    """Rule that admits landed requests to the running batch."""

    GREEDY = "greedy"
    """Admit while there are seats."""
    RESERVE_STATIC = "reserve-static"
    """Admit while free blocks cover the rest of every answer in the batch."""
    RESERVE_DYNAMIC = "reserve-dynamic"
    """Admit while free blocks suffice until the first answer of the batch ends."""


AnyAdmission = AdmissionPolicy | Guarded[BatchAdmission]
"""A plug-in reserves no blocks. Greedy decides when it fails."""


def admitted_count(
    policy: AnyAdmission, batch: BatchGrowth, landed: Iterable[BatchMember], seats: int, free_blocks: int
) -> int:
    """Return how many `landed` requests to admit now, in landing order; none overtakes one that must wait.

    The policies of TetriInfer (arXiv 2401.11181, section 3.4). All need a seat in the batch. Greedy requires nothing
    else; growth that does not fit is resolved by preemption. Reserve-static admits a request when the free blocks
    suffice for the batch and the request to grow to their predicted ends; requests admitted earlier keep the blocks
    reserved for their growth. Reserve-dynamic reserves blocks only for the growth of all until the first is predicted
    to end, which then frees its own. An empty batch takes the first request regardless of predictions, so a wrong
    prediction blocks nothing.

    A request without a prediction, or one that has outlived it, reserves only its next token (static), and never counts
    as the first to end (dynamic). When all are unknown and none is preempted, both policies are greedy.

    batch: the running batch; unchanged on return. Not read by greedy. seats: free seats in the batch.
    """
    joined: list[int] = []
    count = 0
    first_landed = islice(landed, max(0, seats))
    if isinstance(policy, Guarded):
        members = tuple(first_landed)
        running = RunningBatch(len(batch), seats, free_blocks, batch.until_first_ends(), batch.until_all_end())
        admitted = admitted_by(policy, running, members) if members else 0
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
    """Free blocks reserved for the predicted growth of the batch; new reservations may not take them.

    Protects what admitted_count has reserved. batch: the running batch, or the request that will run first when nothing
    runs. 0 under greedy and with a plug-in, and when all lengths are unknown and none is preempted.
    """
    match policy:
        case AdmissionPolicy.RESERVE_STATIC:
            return batch.until_all_end()
        case AdmissionPolicy.RESERVE_DYNAMIC:
            return batch.until_first_ends()
        case _:
            return 0


UNLANDED_KEEPS_S = 2.0
"""How long to reserve blocks for an answer whose KV has not landed; longer than most pushes take."""

_COUNTED = BatchMember(0)
"""Placeholder for the members of a batch that are only counted."""


class DecodeBatch:
    """The requests of one decode instance, from reservation to end. The caller numbers them, from 1 on. Reserved
    requests are expected, landed ones ready, admitted ones running."""

    def __init__(self, policy: AnyAdmission, block_tokens: int, max_batch: int) -> None:
        """max_batch: most requests that one step can carry."""
        self._policy = policy
        self.keeps_blocks = policy is not AdmissionPolicy.GREEDY
        """True if the policy reserves blocks for present requests. Constant."""
        self._block_tokens = block_tokens
        self._max_batch = max_batch
        self._expected: dict[int, tuple[BatchMember, float]] = {}
        self._ready: dict[int, BatchMember] = {}
        self._running = BatchGrowth(block_tokens)
        """Running requests. Under greedy only their count is valid: their tokens are not tracked."""

    @property
    def running_count(self) -> int:
        """Requests admitted and not ended, preempted ones included."""
        return len(self._running)

    @property
    def ready_count(self) -> int:
        """Requests that have landed and wait for a seat."""
        return len(self._ready)

    def expect(self, number: int, member: BatchMember, now_s: float) -> None:
        """Add a request whose room was requested or granted, and whose KV will follow."""
        self._expected[number] = (member, now_s)

    def land(self, number: int, *, first: bool = False) -> None:
        """Mark an expected request's KV as landed. first: admit it before all ready requests."""
        member = self._expected.pop(number)[0]
        if first:
            self._ready = {number: member, **self._ready}
        else:
            self._ready[number] = member

    def admit(self, number: int) -> None:
        """Move a ready request to the running ones."""
        member = self._ready.pop(number)
        self._running.add(number, member if self.keeps_blocks else _COUNTED)

    def preempt(self, number: int) -> None:
        """Record that a ready or running request has lost its blocks."""
        if number in self._ready:
            self._ready[number] = self._ready[number]._replace(holds_blocks=False)
        self._running.preempt(number)

    def step(self, drawn: set[int]) -> None:
        """Record one step: the running requests in `drawn` sampled one token each, the others none."""
        if self.keeps_blocks:
            self._running.step(drawn)

    def run(self, steps: int, resting: Collection[int] = ()) -> None:
        """Record `steps` steps in which all running requests except `resting` sample a token. No other request may be
        preempted."""
        if self.keeps_blocks:
            self._running.run(steps, resting)

    def leave(self, number: int) -> None:
        """Remove a request that ended or got no room. Idempotent."""
        self._expected.pop(number, None)
        self._ready.pop(number, None)
        self._running.remove(number)

    def admissible(self, free_blocks: int) -> tuple[int, ...]:
        """Ready requests to admit now, in landing order."""
        seats = self._max_batch - len(self._running)
        count = admitted_count(self._policy, self._running, self._ready.values(), seats, free_blocks)
        return tuple(self._ready)[:count]

    def kept_blocks(self, now_s: float, coming: BatchMember | None = None) -> int:
        """Free blocks reserved for the requests here; new requests may not take them.

        When nothing runs, they are reserved for the request that is expected to run first: a ready one, else the oldest
        expected one younger than UNLANDED_KEEPS_S, so that a stalled push blocks others no longer than that. coming:
        the request to be adopted next; it runs first if there is no other.
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
    """Clamp a predicted answer length to the limits of the request and the model. None: unknown."""
    if predicted is None:
        return None
    most_tokens = max_model_len - prompt_tokens
    if max_tokens is not None:
        most_tokens = min(most_tokens, max_tokens)
    return predicted.up_to(max(1, most_tokens))


def member_of(token_count: int, generated_count: int, expected: TokenRange | None, end: RangeEnd) -> BatchMember:
    """Batch member for a new request. token_count: tokens whose KV is pushed, including `generated_count` answer
    tokens. expected: tokens of the whole answer. end: which end of the range to use."""
    # Prefill sampled the first token of this attempt.
    remaining = expected.after(generated_count + 1) if expected is not None else None
    return BatchMember(token_count, remaining.at(end) if remaining is not None else 0)
