"""Chooses which landed requests join a decode instance's running batch. Pure: no clock, no I/O."""

import enum
from collections.abc import Iterable
from itertools import islice

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
        return _admitted_by_plugin(policy, batch, tuple(first_landed), seats, free_blocks)
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
