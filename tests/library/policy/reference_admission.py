"""Admission computed anew over all members at each call; the real, incremental one must give the same results."""

from collections.abc import Sequence

from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.growth import BatchMember


def admitted_count(
    policy: AdmissionPolicy,
    running: Sequence[BatchMember],
    landed: Sequence[BatchMember],
    seats: int,
    free_blocks: int,
    block_tokens: int,
) -> int:
    landed = landed[: max(0, seats)]
    if policy is AdmissionPolicy.GREEDY:
        return len(landed)
    batch = list(running)
    for count, member in enumerate(landed):
        batch.append(member)
        if len(batch) > 1 and kept_blocks(policy, batch, block_tokens) > free_blocks:
            return count
    return len(landed)


def kept_blocks(policy: AdmissionPolicy, batch: Sequence[BatchMember], block_tokens: int) -> int:
    if policy is AdmissionPolicy.GREEDY:
        return 0
    counted = [member.remaining_tokens for member in batch]
    if policy is AdmissionPolicy.RESERVE_DYNAMIC:
        counted = [min(filter(None, counted), default=1)] * len(batch)
    return sum(
        -(-(member.context_tokens + max(1, steps)) // block_tokens)
        - member.holds_blocks * -(-(member.context_tokens + 1) // block_tokens)
        for member, steps in zip(batch, counted, strict=True)
    )
