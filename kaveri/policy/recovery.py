"""Decides whether a request that lost its decode instance resumes from its replica or is recomputed. Pure.

Costs are in units of a prompt token computed by an idle prefill instance. A token missing from the replica is computed
by the holder between the steps of its own requests, so it costs more than at a prefill instance. A token in the replica
is only copied.
"""

from dataclasses import dataclass

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, Phase, phases_now


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """Costs per token, relative to a prompt token."""

    lacking: float = 2.0
    """Cost of a token missing from the replica."""
    held: float = 0.01
    """Cost of a token in the replica."""


DEFAULT_COSTS = RecoveryCosts()
_MOST_QUEUES = 48
"""Max prefill queues examined; keeps the cost of a decision independent of the cluster's size."""


def is_worth_a_resume(
    replica: ReplicaLocation, context_tokens: int, view: ClusterView, model: str, costs: RecoveryCosts = DEFAULT_COSTS
) -> bool:
    """Return True if the replica's holder should resume the request; False if a prefill instance should recompute it.

    context_tokens: of prompt and answer together. The holder itself decides whether it has room.
    """
    holder = view.instances.get(replica.holder_id)
    if holder is None or holder.record.incarnation != replica.holder_incarnation or holder.record.model != model:
        return False
    # A draining holder may resume the request; its drain moves it afterwards.
    if Phase.DECODE not in phases_now(holder):
        return False
    # The last token never has KV yet.
    held = min(replica.token_count, context_tokens - 1)
    if held <= 0:
        return False
    prefills = view.ready(Phase.PREFILL, model)
    if not prefills:
        return True
    queued = min(prefill.load.queued_prefill_tokens for prefill in prefills[:_MOST_QUEUES])
    return held * costs.held + (context_tokens - held) * costs.lacking <= context_tokens + queued
