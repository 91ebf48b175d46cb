"""Moves running requests between decode instances, to level their batches. Pure: no clock, no I/O.

A request stays where it was placed. So an instance that begins to decode takes new requests only, and the batches of
the others stay long until their answers end. Each decode instance compares its batch with another one's, as
kaveri.policy.levelling does with queues of prompts, and moves requests there with their KV, until both have as many
tokens. AcceLLM (arXiv 2411.05555, section 4.1.3) levels the batches of its
instances likewise.

A move copies a request's KV, and stops it for a few steps. So small differences stay: those below a factor of two, and
those that hardly change the time of a step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, is_late
from kaveri.policy.unconfirmed import KeyT

_RATIO = 2
"""A batch is levelled with one that has at most 1/_RATIO of its tokens."""
_LEAST_SHARE = 1 / 16
"""Least difference that is levelled, as a share of the tokens in the instance's KV pool. A step reads the KV of its
batch: as much less takes little off it."""
_MOST_PLANNED = 8
"""Max requests to move at a time: until they have left, later loads change the plan."""


@dataclass(frozen=True, slots=True)
class RunningRequest(Generic[KeyT]):
    """A request that decodes here and can be moved."""

    key: KeyT
    context_tokens: int
    holder_id: str | None = None
    """Instance that has or is about to get a copy of its KV."""


@dataclass(frozen=True, slots=True)
class Moves(Generic[KeyT]):
    """Requests to move to another instance."""

    target: InstanceRecord
    keys: tuple[KeyT, ...]


def plan_moves(
    view: ClusterView,
    own: InstanceRecord,
    requests: Iterable[RunningRequest[KeyT]],
    unconfirmed_tokens: Callable[[ViewedInstance], int],
) -> Moves[KeyT] | None:
    """Return the requests that instance `own` should move to its counterpart: of the longest batch that is the instance
    with the shortest, of the second longest the second shortest, and so on. None if there is nothing to move.

    Instances that hold no copies, or whose heartbeats are late, are left out. requests: in order of arrival; the newest
    move first, as their answers last longest, but before them those whose copy is at the counterpart, and last those
    whose copy is elsewhere, as they would be without one for a while.
    unconfirmed_tokens: of requests moved to an instance that its heartbeat does not show yet.
    """
    counterpart, surplus_tokens = _counterpart(view, own, unconfirmed_tokens)
    if counterpart is None:
        return None
    target = counterpart.record
    left_tokens, keys = surplus_tokens // 2, list[KeyT]()
    newest_first = reversed(tuple(requests))
    cost_rank = {target.instance_id: 0, None: 1}
    for request in sorted(newest_first, key=lambda one: cost_rank.get(one.holder_id, 2)):
        if len(keys) < _MOST_PLANNED and request.context_tokens <= left_tokens:
            keys.append(request.key)
            left_tokens -= request.context_tokens
    return Moves(target, tuple(keys)) if keys else None


def _counterpart(
    view: ClusterView, own: InstanceRecord, unconfirmed_tokens: Callable[[ViewedInstance], int]
) -> tuple[ViewedInstance | None, int]:
    """Return the instance to level with, and by how many tokens its batch is shorter."""

    def tokens(instance: ViewedInstance) -> int:
        return instance.load.context_tokens + unconfirmed_tokens(instance)

    able = [
        one
        for one in view.ready(Phase.DECODE, own.model)
        if one.record.layout == own.layout and one.load.replica_total_bytes > 0 and not is_late(one)
    ]
    by_batch = sorted(able, key=lambda one: (tokens(one), one.record.instance_id))
    for place, counterpart in enumerate(by_batch[: len(by_batch) // 2]):
        here = by_batch[-1 - place]
        if here.record.instance_id == own.instance_id and own.layout is not None:
            surplus_tokens = tokens(here) - tokens(counterpart)
            least_tokens = _LEAST_SHARE * here.load.total_blocks * own.layout.block_tokens
            is_much = tokens(counterpart) * _RATIO <= tokens(here) and surplus_tokens >= least_tokens
            return (counterpart, surplus_tokens) if is_much else (None, 0)
    return None, 0
