"""Whether a request whose decode instance was lost is resumed from its replica, or computed again. Pure.

Costs are counted in prompt tokens that an idle prefill instance computes. A token that the replica lacks is computed by
the holder between the steps of what runs there, so it costs more than one at a prefill instance. One that the replica
has is only copied.
"""

from dataclasses import dataclass

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, Phase, phases_now


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """Of one token, relative to one of a prompt."""

    lacking: float = 2.0
    """One that the replica lacks."""
    held: float = 0.01
    """One that it has."""


DEFAULT_COSTS = RecoveryCosts()
_MOST_QUEUES = 48
"""Prefill queues that are looked at: the cost of a decision must not grow with the cluster."""


def is_worth_a_resume(
    replica: ReplicaLocation, context_tokens: int, view: ClusterView, model: str, costs: RecoveryCosts = DEFAULT_COSTS
) -> bool:
    """Whether the holder of the replica is to go on with the request. False: it is placed on a prefill instance.

    context_tokens: of prompt and answer together. Whether the holder has room is the holder's to say.
    """
    holder = view.instances.get(replica.holder_id)
    if holder is None or holder.record.incarnation != replica.holder_incarnation or holder.record.model != model:
        return False
    # One that drains pushes the replica on.
    if Phase.DECODE not in phases_now(holder):
        return False
    # The last token has no KV yet, in whatever way the request goes on.
    held = min(replica.token_count, context_tokens - 1)
    if held <= 0:
        return False
    prefills = view.ready(Phase.PREFILL, model)
    if not prefills:
        return True
    queued = min(prefill.load.queued_prefill_tokens for prefill in prefills[:_MOST_QUEUES])
    return held * costs.held + (context_tokens - held) * costs.lacking <= context_tokens + queued
