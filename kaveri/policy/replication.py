"""Who holds copies of whose KV cache, which requests are worth one, what a full holder drops. Pure: no clock, no I/O.

    pair    instances in the order of their ids, two by two, hold each other's (AcceLLM, section 4.1.2)
    ring    each one's are held by the next in the order of ids (DéjàVu, section 4.2.3)
    spread  of two at random the one with more room and less to do, of another failure domain where there is one

When an instance dies, pair and ring bring all its requests to one neighbour; spread brings each survivor its share.
The cost of a choice does not grow with the cluster, as long as a few instances in a hundred have room.
"""

import bisect
import enum
import heapq
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple

from kaveri.domain.view import ClusterView, InstanceRecord, InstanceState, Phase, ViewedInstance
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.candidates import Candidates
from kaveri.policy.plugins import Guarded, HolderPlacement, chosen_by
from kaveri.policy.unconfirmed import KeyT, UnconfirmedWork

_MOST_STEPS = 16
"""Instances that ring looks at before it gives up."""
_USED_STEPS = 16
"""Shares of used memory are compared in steps of this part, so that among similar ones the load decides."""
_WORTH_RATIO = 2
"""A copy is dropped only for one of at least so many times its tokens."""


class ReplicationMode(enum.StrEnum):
    """Where copies of KV go."""

    OFF = "off"
    """Nowhere."""
    PAIR = "pair"
    RING = "ring"
    SPREAD = "spread"


AnyReplication = ReplicationMode | Guarded[HolderPlacement]
"""A plug-in is shown all holders that SPREAD would draw from. Where it fails, SPREAD decides."""


@dataclass(frozen=True, slots=True)
class CopyRules:
    """Which requests are worth a copy."""

    min_context_tokens: int = 256
    """A shorter context is computed again as fast as it is resumed."""
    min_rest_tokens: int = 16
    """An answer that ends sooner is over before its copy is whole."""

    def is_worth_a_copy(self, context_tokens: int, rest_tokens: int | None) -> bool:
        """context_tokens: prompt and answer so far. rest_tokens: most that are still to come, as far as known."""
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
) -> ViewedInstance | None:
    """The instance to hold a copy of `needed_bytes` of one of the owner's requests, or None when there is none now.

    It is ready, serves the same model with the same layout, has so much memory for copies free beside what is
    `unconfirmed`, and is never the owner. avoid: ids of instances that are not taken. is_fit: what else it must be.
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
    match mode:
        case ReplicationMode.PAIR:
            return next(filter(takes, holders.partner_of(owner.instance_id)), None)
        case ReplicationMode.RING:
            return next(filter(takes, holders.after(owner.instance_id)), None)
        case ReplicationMode.SPREAD | Guarded():
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
    """Of the copy of so many tokens: its whole blocks, and those that it grows into soon."""
    return (token_count // layout.block_tokens + ahead) * layout.layer_count * layout.block_bytes


def has_room_to_run(instance: ViewedInstance, needed_blocks: int, unconfirmed: UnconfirmedWork[KeyT]) -> bool:
    """Whether the instance would resume a request of so many blocks now, beside what is `unconfirmed`."""
    # Each request that runs there may take a block before the next heartbeat.
    free_blocks = instance.load.free_blocks - instance.load.running_requests - unconfirmed.at(instance).amount
    return instance.load.state is InstanceState.READY and free_blocks >= needed_blocks


class HeldCopy(NamedTuple, Generic[KeyT]):
    """What a holder knows of a copy."""

    key: KeyT
    token_count: int
    held_bytes: int


def drop_first(
    copies: Iterable[HeldCopy[KeyT]], token_count: int, free_bytes: int, needed_bytes: int
) -> list[KeyT] | None:
    """The copies that a full holder drops for one of a request of `token_count` tokens: those that are the cheapest to
    compute again, the shortest. None: it has no room for that one, and drops nothing.

    copies: those that may be dropped, so none whose owner is lost.
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
    """The ready instances of one model and layout that hold copies."""

    ready: tuple[ViewedInstance, ...]
    """In the order of their ids."""
    ids: tuple[str, ...]

    def partner_of(self, instance_id: str) -> tuple[ViewedInstance, ...]:
        """The other one of its pair, if any. The last of an odd number takes the one before it."""
        place = bisect.bisect_left(self.ids, instance_id)
        if place == len(self.ids) or self.ids[place] != instance_id:
            return ()
        partner = place ^ 1 if place ^ 1 < len(self.ids) else place - 1
        return (self.ready[partner],) if partner >= 0 else ()

    def after(self, instance_id: str) -> Iterable[ViewedInstance]:
        """Those that follow it in the ring, itself left out."""
        first = bisect.bisect_right(self.ids, instance_id)
        for step in range(min(_MOST_STEPS, len(self.ids))):
            yield self.ready[(first + step) % len(self.ids)]


def _holders(view: ClusterView, model: str, layout: KvLayout) -> _Holders:
    # By identity, as kaveri.policy.placement does: an owner names one object. The value holds it.
    return view.derive(("holders", model, id(layout)), _find_holders, view, model, layout)[1]


def _find_holders(view: ClusterView, model: str, layout: KvLayout) -> tuple[KvLayout, _Holders]:
    ready = tuple(
        instance
        for instance in view.ready(Phase.DECODE, model)
        if instance.load.replica_total_bytes > 0 and instance.record.layout == layout
    )
    return layout, _Holders(ready, tuple(instance.record.instance_id for instance in ready))


def _holders_elsewhere(view: ClusterView, owner: InstanceRecord, holders: _Holders) -> tuple[ViewedInstance, ...]:
    """The holders of other failure domains. All of them where the owner's is not known."""
    domain = owner.failure_domain
    if not domain:
        return holders.ready
    key = ("holders elsewhere", owner.model, id(owner.layout), domain)
    return view.derive(key, _find_elsewhere, holders, domain)


def _find_elsewhere(holders: _Holders, domain: str) -> tuple[ViewedInstance, ...]:
    return tuple(instance for instance in holders.ready if instance.record.failure_domain != domain)
