"""Chooses which landed requests join a decode instance's running batch. Pure: no clock, no I/O."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.length import RangeEnd, TokenRange


class AdmissionPolicy(enum.StrEnum):
    """When a landed request joins the running batch."""

    GREEDY = "greedy"
    """As long as there are seats."""
    RESERVE_STATIC = "reserve-static"
    """When there are blocks for the rest of every answer in the batch."""
    RESERVE_DYNAMIC = "reserve-dynamic"
    """When there are blocks until the first answer of the batch ends."""


@dataclass(frozen=True, slots=True)
class LandedRequest:
    """A request whose KV is here and which does not run yet."""

    landing_number: int
    """Rises with each landing; names the request within its instance."""
    context_tokens: int
    """Tokens whose KV it holds, or must compute again when it was preempted."""
    held_blocks: int = 0
    """0 when it was preempted."""
    remaining: TokenRange | None = None
    """Tokens that it will still draw, as predicted. None: unknown."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """An admitted request that has not ended. Fields as LandedRequest's."""

    context_tokens: int
    held_blocks: int
    remaining: TokenRange | None


@dataclass(frozen=True, slots=True)
class DecodeSnapshot:
    """What a decode instance knows when it decides."""

    landed: tuple[LandedRequest, ...]
    """In the order of their landing."""
    running_requests: int
    """Admitted and not ended, preempted ones included."""
    max_batch: int
    """Most requests that one step can carry."""
    free_blocks: int
    total_blocks: int
    block_tokens: int = 16
    """Tokens per block."""
    running: tuple[RunningRequest, ...] = ()
    """Each of the `running_requests`; greedy does not look at them."""


def choose_admitted(
    policy: AdmissionPolicy, snapshot: DecodeSnapshot, end: RangeEnd = RangeEnd.LOW
) -> tuple[LandedRequest, ...]:
    """The landed requests to admit now, in the order of their landing: none overtakes a request that must wait.

    The policies of TetriInfer (arXiv 2401.11181, section 3.4). All need a seat in the batch. Greedy asks for no more,
    and what answers grow by is found by preemption. Reserve-static admits a request when the free blocks suffice for
    the batch and it to grow to their predicted ends; what was admitted earlier keeps what it has not grown by yet.
    Reserve-dynamic wants blocks only for what they all grow by until the first of them is predicted to end, which then
    frees its own. An empty batch takes the first whatever is predicted, so that a wrong prediction blocks nothing.

    end: which end of a predicted range counts. A request that has outlived that end, or has no prediction, is unknown:
    nothing is kept for it but its next token (static), and it never is the first to end (dynamic). When all are unknown
    and none is preempted, both policies are greedy.
    """
    landed = snapshot.landed[: max(0, snapshot.max_batch - snapshot.running_requests)]
    if policy is AdmissionPolicy.GREEDY:
        return landed
    batch: list[LandedRequest | RunningRequest] = list(snapshot.running)
    for count, request in enumerate(landed):
        batch.append(request)
        growth_blocks = _growth_blocks(policy, batch, snapshot.block_tokens, end)
        if growth_blocks > snapshot.free_blocks and snapshot.running_requests + count > 0:
            return landed[:count]
    return landed


def kept_blocks(
    policy: AdmissionPolicy, batch: Sequence[RunningRequest], block_tokens: int, end: RangeEnd = RangeEnd.LOW
) -> int:
    """Free blocks that the batch is predicted to grow by, and that no new reservation may take.

    Without it reservations would take what choose_admitted has kept. batch: what runs, or when nothing does the one
    that will run first. 0 under greedy, and when all lengths are unknown and none is preempted.
    """
    if policy is AdmissionPolicy.GREEDY or not batch:
        return 0
    return _growth_blocks(policy, batch, block_tokens, end)


def _growth_blocks(
    policy: AdmissionPolicy, batch: Sequence[LandedRequest | RunningRequest], block_tokens: int, end: RangeEnd
) -> int:
    """Blocks that the batch will want beyond those that it holds."""
    counted = [request.remaining.at(end) if request.remaining is not None else 0 for request in batch]
    if policy is AdmissionPolicy.RESERVE_DYNAMIC:
        counted = [min(filter(None, counted), default=1)] * len(batch)
    return sum(
        max(0, -(-(request.context_tokens + max(1, steps)) // block_tokens) - request.held_blocks)
        for request, steps in zip(batch, counted, strict=True)
    )
