"""Moves running requests between decode instances, to level their batches. Pure: no clock, no I/O.

A request stays where it was placed. So an instance that begins to decode takes new requests only, and the batches of
the others stay long until their answers end. Each decode instance compares its batch with another one's, as
kaveri.policy.levelling does with queues of prompts, and moves requests there with their KV until about half of the
difference has left. AcceLLM (arXiv 2411.05555, section 4.1.3) levels the batches of its instances likewise.

A move copies a request's KV, and stops it for a few steps. So small differences stay: those below a factor of two, and
those that hardly change the time of a step. On an instance that also computes prompts their tokens count, too.

Within a pair (kaveri.policy.pairs) whose instances hold copies in their KV pools a move costs a step and copies next to
nothing: there plan_within_pair() levels the number of the requests, as AcceLLM does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic

from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, is_late
from kaveri.policy.unconfirmed import KeyT

_RATIO = 2
"""A batch is levelled with one that has at most 1/_RATIO of its tokens."""
_LEAST_SHARE = 1 / 16
"""Least difference that is levelled, as a share of the tokens in the instance's KV pool. A step takes longer the more
KV it reads; moving less than this hardly shortens it."""
_MOST_PLANNED = 4
"""Max requests planned at once. The plan is made anew every 0.1 s, from newer loads."""


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
    takes: Callable[[ViewedInstance, RunningRequest[KeyT]], bool],
    former: InstanceRecord | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Moves[KeyT] | None:
    """Return the requests that instance `own` should move to its counterpart; None if there is nothing to move. The
    longest batch is levelled with the shortest, the second longest with the second shortest, and so on.

    Instances that hold no copies, or whose heartbeats are late, are left out. requests: in order of arrival; the newest
    move first, as their answers last longest, but before them those whose copy is at the counterpart, and last those
    whose copy is elsewhere, as they would be without one for a while. unconfirmed_tokens: of requests moved to an
    instance that its heartbeat does not show yet. takes: returns True if the instance has room for the request, and for
    a copy of it unless it has one. former: the last plan's target, which stays while its batch is short enough.
    limits: max requests to plan for an instance, by id (most_to_partner()).
    """
    counterpart, surplus_tokens = _counterpart(view, own, unconfirmed_tokens, former)
    if counterpart is None:
        return None
    target = counterpart.record
    left_tokens, keys = surplus_tokens // 2, list[KeyT]()
    most = min(_MOST_PLANNED, limits.get(target.instance_id, _MOST_PLANNED))
    newest_first = reversed(tuple(requests))
    cost_rank = {target.instance_id: 0, None: 1}
    for request in sorted(newest_first, key=lambda one: cost_rank.get(one.holder_id, 2)):
        if len(keys) >= most:
            break
        if request.context_tokens <= left_tokens and takes(counterpart, request):
            keys.append(request.key)
            left_tokens -= request.context_tokens
    return Moves(target, tuple(keys)) if keys else None


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests at an instance."""

    request_count: int
    context_tokens: int


def most_to_partner(own: Batch, partner: Batch) -> int:
    """Return how many requests plan_moves() may move to the partner, so that plan_within_pair() moves none back."""
    return (own.request_count - partner.request_count) // 2


def plan_within_pair(own: Batch, partner: Batch, movable: Iterable[RunningRequest[KeyT]]) -> KeyT | None:
    """Return the request that the instance with batch `own` should hand to its partner next; None if there is none.

    movable: requests here whose copy is at the partner. If all are, a few moves make the numbers of requests differ
    by at most 1 (AcceLLM, arXiv 2411.05555, section 4.1.3): an instance with two requests more hands over the one that
    levels the lengths best. One with one request more, and more tokens than its longest movable one has, hands that
    over. Neither gives a request back, whichever are movable."""
    able = tuple(movable)
    if not able:
        return None
    more, longer = own.request_count - partner.request_count, own.context_tokens - partner.context_tokens
    if more >= 2:
        return min(able, key=lambda one: abs(longer / 2 - one.context_tokens)).key
    longest = max(able, key=lambda one: one.context_tokens)
    return longest.key if more == 1 and longer > longest.context_tokens else None


def _counterpart(
    view: ClusterView,
    own: InstanceRecord,
    unconfirmed_tokens: Callable[[ViewedInstance], int],
    former: InstanceRecord | None,
) -> tuple[ViewedInstance | None, int]:
    """Return the instance to level with, and by how many tokens its batch is shorter."""

    def tokens(instance: ViewedInstance) -> int:
        return instance.load.context_tokens + unconfirmed_tokens(instance)

    here = view.instances.get(own.instance_id)
    if here is None or own.layout is None:
        return None, 0
    own_tokens, least_tokens = tokens(here), _LEAST_SHARE * here.load.total_blocks * own.layout.block_tokens
    if own_tokens < least_tokens:
        return None, 0
    able = {
        one.record.instance_id: one
        for one in view.ready(Phase.DECODE, own.model)
        if one.record.layout == own.layout and one.load.replica_total_bytes > 0 and not is_late(one)
    }

    def is_much_shorter(instance: ViewedInstance) -> bool:
        other_tokens = tokens(instance)
        return other_tokens * _RATIO <= own_tokens and own_tokens - other_tokens >= least_tokens

    kept = able.get(former.instance_id) if former is not None else None
    if kept is not None and kept.record == former and own.instance_id in able and is_much_shorter(kept):
        return kept, own_tokens - tokens(kept)
    by_batch = sorted(able.values(), key=lambda one: (tokens(one), one.record.instance_id))
    for place, counterpart in enumerate(by_batch[: len(by_batch) // 2]):
        if by_batch[-1 - place].record.instance_id == own.instance_id and is_much_shorter(counterpart):
            return counterpart, own_tokens - tokens(counterpart)
    return None, 0
