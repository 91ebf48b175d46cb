"""Admission written plainly, over all requests at each question. The real one, which keeps growth up to date, must
equal it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.length import RangeEnd, TokenRange
from kaveri.policy.admission import AdmissionPolicy


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
    """See kaveri.policy.admission.admitted_count."""
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
    """See kaveri.policy.admission.kept_blocks."""
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
