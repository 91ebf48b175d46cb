"""Selects what the cluster monitor (the leading router) broadcasts: the loads of predictors and of instances with an
engine; and detects changes to broadcast at once. Pure: no clock, no I/O. From TetriInfer's cluster
monitor (arXiv 2401.11181, section 3.2)."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kaveri.domain.view import ClusterView, InstanceStatus, is_broadcast, status_now, takes_pushes

_TIGHT = 4
"""An instance is tight when less than 1/_TIGHT of its KV blocks is free."""


@dataclass(frozen=True, slots=True)
class Told:
    """Content of the last broadcast, to be compared with a newer view."""

    lives: frozenset[tuple[Hashable, ...]] = frozenset()
    free_blocks_when_tight: Mapping[str, int] = field(default_factory=dict)
    """Free KV blocks by instance id, for tight instances."""
    numbers: tuple[int, ...] = ()


def broadcast_statuses(view: ClusterView) -> tuple[InstanceStatus, ...]:
    return tuple(status_now(instance) for instance in view.instances.values() if is_broadcast(instance))


def told_by(view: ClusterView, statuses: tuple[InstanceStatus, ...]) -> Told:
    """Summarize a broadcast. statuses: the broadcast instances of `view`."""
    tight = {
        status.record.instance_id: status.load.free_blocks
        for status in statuses
        if takes_pushes(status) and status.load.free_blocks * _TIGHT < status.load.total_blocks
    }
    return Told(view.broadcast_lives(), tight, tuple(status.load.sequence_number for status in statuses))


def has_new_loads(told: Told, view: ClusterView) -> bool:
    """Return True if a broadcast instance of the view has sent a newer heartbeat than in the last broadcast, `told`."""
    loads = (instance.load for instance in view.instances.values() if is_broadcast(instance))
    return told.numbers != tuple(load.sequence_number for load in loads)


def is_news(told: Told, view: ClusterView) -> bool:
    """Return True if the view has a change since the last broadcast that must not wait for the next one: an instance
    joined, left, drains or changes its phases, or a decode instance had few free KV blocks, which requests may await,
    and has more."""
    lives = view.broadcast_lives()
    if lives is not told.lives and lives != told.lives:
        return True
    instances = view.instances
    return any(
        instance_id in instances and instances[instance_id].load.free_blocks > free_blocks
        for instance_id, free_blocks in told.free_blocks_when_tight.items()
    )
