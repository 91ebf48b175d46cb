"""Chooses which requests join a decode instance's batch, and how many blocks to reserve. Pure: no clock, no I/O."""

from collections.abc import Collection

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.admission import AdmissionPolicy, AnyAdmission, admitted_count, kept_blocks
from kaveri.policy.growth import BatchGrowth, BatchMember

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
