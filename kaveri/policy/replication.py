"""Chooses where to copy requests' KV, which copies to make, resume from or drop. Pure.

Modes (holder: the instance that stores a copy of another instance's KV):
pair    two instances hold each other's copies (AcceLLM, section 4.1.2): kaveri.policy.pairs. Without a partner that has
        room as spread. If instances keep the KV of requests that leave them, first the one that the request came from
ring    the next instance by id holds them (DéjàVu, section 4.2.3)
spread  the less loaded of two random instances, in another failure domain if possible

When an instance dies, ring brings all its requests to one neighbour; spread distributes them.
The cost of a choice does not grow with the cluster, as long as a few percent of the instances have room.
"""

import bisect
import enum
import heapq
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, accepts, phases_now
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.placement import Candidates
from kaveri.policy.plugins import Guarded, HolderPlacement, chosen_by
from kaveri.policy.unconfirmed import KeyT, UnconfirmedWork

_MOST_STEPS = 16
"""Max instances that ring examines."""
_USED_STEPS = 16
"""Used memory is compared in steps of 1/_USED_STEPS, so that load decides between similar instances."""
_WORTH_RATIO = 2
"""A copy is dropped only for one with at least this many times its tokens."""
_HELD_COST = 0.01
"""Cost of a token in the replica, which is only copied, relative to a prompt token on an idle prefill instance."""
_LACKING_COST = 2.0
"""Cost of a token missing from the replica: the holder computes it between the steps of its own requests."""
_MOST_QUEUES = 48
"""Max prefill queues examined; keeps the cost of a decision independent of the cluster's size."""


class ReplicationMode(enum.StrEnum):
    """Instance for a request's KV copy: the owner's partner, the next by id (ring), or less loaded of two (spread)."""

    OFF = "off"
    PAIR = "pair"
    RING = "ring"
    SPREAD = "spread"


AnyReplication = ReplicationMode | Guarded[HolderPlacement]
"""Built-in mode or plug-in, which chooses from all holders that SPREAD would draw from. If it fails, SPREAD decides."""


@dataclass(frozen=True, slots=True)
class CopyRules:
    """Which requests get a copy of their KV, and which instance holds it."""

    min_context_tokens: int = 256
    """Context, in tokens, below which recomputing is as fast as resuming."""
    min_rest_tokens: int = 16
    """Remaining tokens below which the answer ends before its copy is complete."""
    mode: AnyReplication = ReplicationMode.SPREAD
    """Chooses the instance that holds a copy."""
    keeps: bool = False
    """True if an instance keeps the KV of a request that leaves it, for the next instance to extend."""

    def is_worth_a_copy(self, context_tokens: int, rest_tokens: int | None) -> bool:
        """Return True if a request's KV should be copied. context_tokens: prompt and answer so far. rest_tokens: upper
        bound on remaining tokens; None if unknown."""
        is_ending = rest_tokens is not None and rest_tokens < self.min_rest_tokens
        return context_tokens >= self.min_context_tokens and not is_ending


def choose_holder(
    mode: AnyReplication,
    view: ClusterView,
    owner: InstanceRecord,
    needed_bytes: int,
    unconfirmed: UnconfirmedWork[KeyT],
    rng: random.Random,
    avoid: Collection[str] = (),
    is_fit: Callable[[ViewedInstance], bool] = lambda _: True,
    kept_at: str | None = None,
    partner_id: str = "",
) -> ViewedInstance | None:
    """Choose the instance to store a KV copy of `needed_bytes` for a request of `owner`; None if there is none now.

    Candidates are ready decode instances other than the owner, with the same model and KV layout, and enough free
    memory for copies, less that of copies sent but in no heartbeat yet (`unconfirmed`).

    mode: PAIR takes the owner's partner (partner_id), RING the next instance by id, SPREAD the less loaded of two drawn
    by rng, as PAIR does if the partner has no room. avoid: ids of instances not to use. is_fit: additional condition.

    kept_at: id of the instance that the request came from, if instances keep the KV of requests that leave them; empty
    if unknown, None if they do not keep it. Unless it is None, PAIR prefers that instance, and instances that only
    prefill are candidates too: they can resume the request beside their prompts.
    """
    if mode is ReplicationMode.OFF or owner.layout is None:
        return None

    def takes(instance: ViewedInstance) -> bool:
        instance_id = instance.record.instance_id
        free_bytes = instance.load.replica_free_bytes - unconfirmed.at(instance).amount
        is_other = instance_id != owner.instance_id and instance_id not in avoid
        return is_other and free_bytes >= needed_bytes and is_fit(instance)

    def load(instance: ViewedInstance) -> tuple[float, ...]:
        load, sent = instance.load, unconfirmed.at(instance)
        used_bytes = load.replica_total_bytes - load.replica_free_bytes + sent.amount
        used_steps = _USED_STEPS * used_bytes // max(1, load.replica_total_bytes)
        return used_steps, load.running_requests + load.waiting_requests + sent.count

    holders = _holders(view, owner.model, owner.layout)
    if mode is ReplicationMode.PAIR:
        if kept_at is not None:
            holders = _holders(view, owner.model, owner.layout, (Phase.PREFILL, Phase.DECODE))
        options = (*holders.of(kept_at or ""), *holders.of(partner_id))
        if (found := next(filter(takes, options), None)) is not None:
            return found
    match mode:
        case ReplicationMode.RING:
            return next(filter(takes, holders.after(owner.instance_id)), None)
        case ReplicationMode.PAIR | ReplicationMode.SPREAD | Guarded():
            elsewhere = _holders_elsewhere(view, owner, holders)
            if isinstance(mode, Guarded):
                taking = Candidates(elsewhere, takes).all() or Candidates(holders.ready, takes).all()
                chosen = chosen_by(
                    mode,
                    taking,
                    unconfirmed,
                    lambda plugin, options: plugin.choose(options, owner, needed_bytes, rng),
                )
                if chosen is not None or not taking:
                    return chosen
            found = Candidates(elsewhere, takes).better_of_two(load, rng) if elsewhere else None
            if found is None and len(elsewhere) < len(holders.ready):
                found = Candidates(holders.ready, takes).better_of_two(load, rng)
            return found


def copy_bytes(layout: KvLayout, token_count: int, ahead: int = 1) -> int:
    """Return the bytes of a KV copy of `token_count` tokens: its full blocks, plus `ahead` blocks for growth."""
    return (token_count // layout.block_tokens + ahead) * layout.layer_count * layout.block_bytes


def has_room_to_run(instance: ViewedInstance, needed_blocks: int, unconfirmed: UnconfirmedWork[KeyT]) -> bool:
    """Return True if the instance can resume a request of `needed_blocks` KV blocks now. unconfirmed: requests sent
    there that its heartbeat does not show yet."""
    # Each running request may take a block before the next heartbeat.
    free_blocks = instance.load.free_blocks - instance.load.running_requests - unconfirmed.at(instance).amount
    return accepts(instance, Phase.DECODE) and free_blocks >= needed_blocks


class HeldCopy(NamedTuple, Generic[KeyT]):
    """Copy of another instance's KV for one request, as recorded by its holder."""

    key: KeyT
    token_count: int
    held_bytes: int


def drop_first(
    copies: Iterable[HeldCopy[KeyT]], token_count: int, free_bytes: int, needed_bytes: int
) -> list[KeyT] | None:
    """Choose the KV copies that a full holder drops for a new copy of `token_count` tokens: the shortest, which are the
    cheapest to recompute. Return their keys; None if dropping cannot make enough room.

    copies: the droppable ones; a copy whose owner has died is not.
    """
    dropped: list[KeyT] = []
    shortest = [(copy.token_count, number, copy) for number, copy in enumerate(copies)]
    heapq.heapify(shortest)
    while free_bytes < needed_bytes:
        if not shortest or shortest[0][0] * _WORTH_RATIO > token_count:
            return None
        copy = heapq.heappop(shortest)[2]
        dropped.append(copy.key)
        free_bytes += copy.held_bytes
    return dropped


@dataclass(frozen=True, slots=True)
class _Holders:
    """Ready instances that can hold copies for one model and KV layout."""

    ready: tuple[ViewedInstance, ...]
    """Ordered by id."""
    ids: tuple[str, ...]

    def of(self, instance_id: str) -> tuple[ViewedInstance, ...]:
        """The instance of this id, or none."""
        place = bisect.bisect_left(self.ids, instance_id)
        return self.ready[place : place + 1] if self.ids[place : place + 1] == (instance_id,) else ()

    def after(self, instance_id: str) -> Iterable[ViewedInstance]:
        """Up to _MOST_STEPS instances that follow in the ring; a short ring ends with the instance itself."""
        first = bisect.bisect_right(self.ids, instance_id)
        for step in range(min(_MOST_STEPS, len(self.ids))):
            yield self.ready[(first + step) % len(self.ids)]


def _holders(view: ClusterView, model: str, layout: KvLayout, phases: tuple[Phase, ...] = (Phase.DECODE,)) -> _Holders:
    # Keyed by identity, as in kaveri.policy.placement. The value holds the object.
    return view.derive(("holders", model, id(layout), phases), _find_holders, view, model, layout, phases)[1]


def _find_holders(
    view: ClusterView, model: str, layout: KvLayout, phases: tuple[Phase, ...]
) -> tuple[KvLayout, _Holders]:
    found = {
        instance.record.instance_id: instance
        for phase in phases
        for instance in view.ready(phase, model)
        if instance.load.replica_total_bytes > 0 and instance.record.layout == layout
    }
    ids = tuple(sorted(found))
    return layout, _Holders(tuple(found[instance_id] for instance_id in ids), ids)


def _holders_elsewhere(view: ClusterView, owner: InstanceRecord, holders: _Holders) -> tuple[ViewedInstance, ...]:
    """The holders in other failure domains; all of them if the owner's domain is unknown."""
    domain = owner.failure_domain
    if not domain:
        return holders.ready
    key = ("holders elsewhere", owner.model, id(owner.layout), domain)
    return view.derive(key, lambda: tuple(each for each in holders.ready if each.record.failure_domain != domain))


def is_worth_a_resume(replica: ReplicaLocation, context_tokens: int, view: ClusterView, model: str) -> bool:
    """Return True if the instance that holds the request's KV copy should resume it; False if recomputing the KV in
    prefill is cheaper. context_tokens: prompt and answer so far. Does not check free KV blocks; the holder does."""
    holder = view.instances.get(replica.holder_id)
    if holder is None or holder.record.incarnation != replica.holder_incarnation or holder.record.model != model:
        return False
    # A draining holder, or one that prefills, may resume the request, and moves it to another afterwards.
    if Phase.DECODE not in phases_now(holder) and not holder.load.replica_total_bytes:
        return False
    # The last token never has KV yet.
    held = min(replica.token_count, context_tokens - 1)
    if held <= 0:
        return False
    prefills = view.ready(Phase.PREFILL, model)
    if not prefills:
        return True
    queued = min(prefill.load.queued_prefill_tokens for prefill in prefills[:_MOST_QUEUES])
    return held * _HELD_COST + (context_tokens - held) * _LACKING_COST <= context_tokens + queued
