"""Chooses which landed requests join a decode instance's running batch. Pure: no clock, no I/O."""

import enum
from collections.abc import Iterable
from itertools import islice

from kaveri.policy.growth import BatchGrowth, BatchMember
from kaveri.policy.plugins import BatchAdmission, Guarded, RunningBatch, admitted_by


class AdmissionPolicy(enum.StrEnum):
    """When a landed request joins the running batch."""

    GREEDY = "greedy"
    """As long as there are seats."""
    RESERVE_STATIC = "reserve-static"
    """When there are blocks for the rest of every answer in the batch."""
    RESERVE_DYNAMIC = "reserve-dynamic"
    """When there are blocks until the first answer of the batch ends."""


AnyAdmission = AdmissionPolicy | Guarded[BatchAdmission]
"""No blocks are kept for what a plug-in admits. Where it fails, greedy decides."""


def admitted_count(
    policy: AnyAdmission, batch: BatchGrowth, landed: Iterable[BatchMember], seats: int, free_blocks: int
) -> int:
    """How many of the `landed` requests to admit now, from the first in the order of their landing on: none overtakes
    one that must wait.

    The policies of TetriInfer (arXiv 2401.11181, section 3.4). All need a seat in the batch. Greedy asks for no more,
    and growth that does not fit is found by preemption. Reserve-static admits a request when the free blocks suffice
    for the batch and it to grow to their predicted ends; what was admitted earlier keeps what it has not grown by yet.
    Reserve-dynamic wants blocks only for what they all grow by until the first of them is predicted to end, which then
    frees its own. An empty batch takes the first whatever is predicted, so that a wrong prediction blocks nothing.

    For a request without a prediction, or one that has outlived it, nothing is kept but its next token (static), and it
    never is the first to end (dynamic). When all are unknown and none is preempted, both policies are greedy.

    batch: what runs; the same when this returns. Greedy does not look at it. seats: left in the batch.
    """
    joined: list[int] = []
    count = 0
    first_landed = islice(landed, max(0, seats))
    if isinstance(policy, Guarded):
        return _admitted_by_plugin(policy, batch, tuple(first_landed), seats, free_blocks)
    for member in first_landed:
        if policy is not AdmissionPolicy.GREEDY:
            # Below the numbers of those that run.
            joined.append(-1 - count)
            batch.add(joined[-1], member)
            if kept_blocks(policy, batch) > free_blocks and len(batch) > 1:
                break
        count += 1
    for number in joined:
        batch.remove(number)
    return count


def kept_blocks(policy: AnyAdmission, batch: BatchGrowth) -> int:
    """Free blocks that the batch is predicted to grow by, and that no new reservation may take.

    Without it reservations would take what admitted_count has kept. batch: what runs, or when nothing does the one that
    will run first. 0 under greedy and with a plug-in, and when all lengths are unknown and none is preempted.
    """
    match policy:
        case AdmissionPolicy.GREEDY:
            return 0
        case AdmissionPolicy.RESERVE_STATIC:
            return batch.until_all_end()
        case AdmissionPolicy.RESERVE_DYNAMIC:
            return batch.until_first_ends()
        case Guarded():
            return 0


def _admitted_by_plugin(
    policy: Guarded[BatchAdmission], batch: BatchGrowth, landed: tuple[BatchMember, ...], seats: int, free_blocks: int
) -> int:
    if not landed:
        return 0
    running = RunningBatch(len(batch), seats, free_blocks, batch.until_first_ends(), batch.until_all_end())
    count = admitted_by(policy, running, landed)
    return len(landed) if count is None else count
