"""Pairs instances, which then hold each other's KV copies. Pure: no clock, no I/O.

The router that leads pairs the instances of one model and KV layout (AcceLLM, arXiv 2411.05555, section 4.2.1): first
those of one host, whose copies take the fastest link. Among these it prefers to pair one that prefills with one that
decodes. A pair ends when one of the two leaves, drains, restarts or ceases to hold copies. The other one then gets
another partner, if one is left over.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kaveri.domain.view import ClusterView, InstanceState, Phase, ViewedInstance, is_late, phases_now


@dataclass(frozen=True, slots=True)
class PartnerOrder:
    """Decision that an instance has this partner from now on. partner_id: empty for none."""

    instance_id: str
    incarnation: int
    partner_id: str


def partner_orders(view: ClusterView, under_way: Mapping[str, PartnerOrder]) -> tuple[PartnerOrder, ...]:
    """Return the orders to give now: one for each instance of a new pair, and for each that has lost its partner and
    gets none.

    under_way: the newest order sent to each instance, which its load may not show yet. Without the store, or while the
    heartbeats of more than half of the instances are late, nothing is decided."""
    able = {name: one for name, one in sorted(view.instances.items()) if one.load.partner_id is not None}
    late_count = sum(map(is_late, able.values()))
    if not view.store_connected or 2 * late_count > len(able):
        return ()
    present = {name: _partner(one, under_way.get(name)) for name, one in able.items()}
    return tuple(
        PartnerOrder(name, able[name].record.incarnation, partner_id)
        for name, partner_id in pair_up(able.values(), present).items()
        if partner_id != present[name]
    )


def pair_up(instances: Iterable[ViewedInstance], partners: Mapping[str, str]) -> dict[str, str]:
    """Return the partner of each instance, by id; empty for one that holds no copies now, or is left over.

    instances: in order of id. partners: the present ones, by id. An instance whose heartbeats are late keeps its
    partner, and is left out if it has none."""
    by_id = {one.record.instance_id: one for one in instances}
    paired = {
        name: partner_id
        for name, one in by_id.items()
        if (other := by_id.get(partner_id := partners.get(name, ""))) is not None
        and other is not one
        and partners.get(partner_id) == name
        and _kind(one) == _kind(other)
        and _holds(one)
        and _holds(other)
    }
    alone = [one for name, one in by_id.items() if name not in paired and not is_late(one)]
    free = [one for one in alone if _holds(one)]
    for group_of in (lambda one: (_kind(one), one.record.address.rpartition(":")[0]), _kind):
        groups = defaultdict[Hashable, list[ViewedInstance]](list)
        for one in free:
            groups[group_of(one)].append(one)
        for group in groups.values():
            for one, other in _pairs(group):
                names = one.record.instance_id, other.record.instance_id
                paired |= {names[0]: names[1], names[1]: names[0]}
        free = [one for one in free if one.record.instance_id not in paired]
    return {one.record.instance_id: "" for one in alone} | paired


def _partner(one: ViewedInstance, newest: PartnerOrder | None) -> str:
    if newest is not None and newest.incarnation == one.record.incarnation:
        return newest.partner_id
    return one.load.partner_id or ""


def _holds(one: ViewedInstance) -> bool:
    return one.load.state is InstanceState.READY and one.load.replica_total_bytes > 0


def _kind(one: ViewedInstance) -> Hashable:
    return one.record.model, one.record.layout


def _pairs(group: Sequence[ViewedInstance]) -> Iterator[tuple[ViewedInstance, ViewedInstance]]:
    """Pair the members of a group, one that prefills with one that does not as far as possible."""
    prefills = [one for one in group if Phase.PREFILL in phases_now(one)]
    others = [one for one in group if Phase.PREFILL not in phases_now(one)]
    mixed = min(len(prefills), len(others))
    rest = [*prefills[mixed:], *others[mixed:]]
    yield from zip(prefills, others, strict=False)
    yield from zip(rest[::2], rest[1::2], strict=False)
