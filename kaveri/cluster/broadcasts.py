"""What the leading router broadcasts, and which changes it broadcasts at once. Pure: no clock, no I/O.

TetriInfer's cluster monitor (arXiv 2401.11181, section 3.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kaveri.domain.view import ClusterView, InstanceState, InstanceStatus, is_broadcast, status_now

_TIGHT = 4
"""An instance is tight when less than one block in so many is free."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the last broadcast said."""

    lives: frozenset[tuple[str, int, InstanceState]] = frozenset()
    free_blocks_when_tight: Mapping[str, int] = field(default_factory=dict)
    """By the ids of the instances that were tight."""


def broadcast_statuses(view: ClusterView) -> tuple[InstanceStatus, ...]:
    """The instances to broadcast, as they are now."""
    return tuple(status_now(instance) for instance in view.instances.values() if is_broadcast(instance))


def told_by(view: ClusterView, statuses: tuple[InstanceStatus, ...]) -> Told:
    """What followers know once they have heard the broadcast of `statuses`, which were taken from `view`."""
    tight = {
        status.record.instance_id: status.load.free_blocks
        for status in statuses
        if status.load.free_blocks * _TIGHT < status.load.total_blocks
    }
    return Told(view.broadcast_lives(), tight)


def is_news(told: Told, view: ClusterView) -> bool:
    """Whether the view has something to broadcast at once: an instance that came, began to drain or left, or blocks
    that came free on an instance that was tight. Requests may wait for just those blocks."""
    lives = view.broadcast_lives()
    if lives is not told.lives and lives != told.lives:
        return True
    instances = view.instances
    return any(
        instance_id in instances and instances[instance_id].load.free_blocks > free_blocks
        for instance_id, free_blocks in told.free_blocks_when_tight.items()
    )
