"""What a decode instance's batch takes in next, and the blocks that it keeps for that. Pure: no clock, no I/O."""

from collections.abc import Collection

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.admission import AdmissionPolicy, AnyAdmission, admitted_count, kept_blocks
from kaveri.policy.growth import BatchGrowth, BatchMember

UNLANDED_KEEPS_S = 2.0
"""How long blocks are kept for the growth of an answer whose KV has not landed: longer than most pushes take."""

_COUNTED = BatchMember(0)
"""Of a batch whose members are only counted."""


class DecodeBatch:
    """The requests of one decode instance from their reservation to their end, named by numbers of the caller's choice,
    from 1 on. Reserved ones are expected, landed ones are ready, admitted ones run."""

    def __init__(self, policy: AnyAdmission, block_tokens: int, max_batch: int) -> None:
        """max_batch: most requests that one step can carry."""
        self._policy = policy
        self.keeps_blocks = policy is not AdmissionPolicy.GREEDY
        """Whether the policy keeps blocks for requests that are here. Does not change."""
        self._block_tokens = block_tokens
        self._max_batch = max_batch
        self._expected: dict[int, tuple[BatchMember, float]] = {}
        self._ready: dict[int, BatchMember] = {}
        self._running = BatchGrowth(block_tokens)
        """Greedy keeps nothing, and only asks how many there are: their tokens are not followed."""

    @property
    def running_count(self) -> int:
        """Requests admitted and not ended, preempted ones included."""
        return len(self._running)

    @property
    def ready_count(self) -> int:
        """Requests that have landed and wait for a seat."""
        return len(self._ready)

    def expect(self, number: int, member: BatchMember, now_s: float) -> None:
        """Room is asked for or taken; the KV will come."""
        self._expected[number] = (member, now_s)

    def land(self, number: int, *, first: bool = False) -> None:
        """The KV of an expected request is here. first: it is admitted before all that are ready."""
        member = self._expected.pop(number)[0]
        if first:
            self._ready = {number: member, **self._ready}
        else:
            self._ready[number] = member

    def admit(self, number: int) -> None:
        """A ready request joins the running ones."""
        member = self._ready.pop(number)
        self._running.add(number, member if self.keeps_blocks else _COUNTED)

    def preempt(self, number: int) -> None:
        """A ready or running request has lost its blocks."""
        if number in self._ready:
            self._ready[number] = self._ready[number]._replace(holds_blocks=False)
        self._running.preempt(number)

    def step(self, drawn: set[int]) -> None:
        """The running requests `drawn` have drawn one token each, the others none."""
        if self.keeps_blocks:
            self._running.step(drawn)

    def run(self, steps: int, resting: Collection[int] = ()) -> None:
        """As `steps` calls of step(), in each of which all running requests draw but those `resting`. No other one may
        be preempted."""
        if self.keeps_blocks:
            self._running.run(steps, resting)

    def leave(self, number: int) -> None:
        """The request has ended, or has no room after all. Idempotent."""
        self._expected.pop(number, None)
        self._ready.pop(number, None)
        self._running.remove(number)

    def admissible(self, free_blocks: int) -> tuple[int, ...]:
        """The ready requests to admit now, in the order of their landing."""
        seats = self._max_batch - len(self._running)
        count = admitted_count(self._policy, self._running, self._ready.values(), seats, free_blocks)
        return tuple(self._ready)[:count]

    def kept_blocks(self, now_s: float, coming: BatchMember | None = None) -> int:
        """Free blocks that the policy keeps for what is here; nothing new may take them.

        When nothing runs they are kept for the request that is expected to run first: one that is ready, else the
        oldest one expected that has been so for less than UNLANDED_KEEPS_S. A push that stands still keeps nothing from
        others for longer. coming: the request that will be adopted next. It runs first when there is no other.
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
    """A predicted length of an answer, cut to what the request and the model allow. None: unknown."""
    if predicted is None:
        return None
    most_tokens = max_model_len - prompt_tokens
    if max_tokens is not None:
        most_tokens = min(most_tokens, max_tokens)
    return predicted.up_to(max(1, most_tokens))


def member_of(token_count: int, generated_count: int, expected: TokenRange | None, end: RangeEnd) -> BatchMember:
    """What a request counts as when it comes. token_count: tokens whose KV is pushed, of which `generated_count` are of
    the answer. expected: tokens of the whole answer. end: of the range, the one that counts."""
    # Prefill drew the first one of this attempt.
    remaining = expected.after(generated_count + 1) if expected is not None else None
    return BatchMember(token_count, remaining.at(end) if remaining is not None else 0)
