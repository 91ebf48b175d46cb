"""Decides which phases (prefill, decode) the instances of a cluster serve. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kaveri.domain.view import ClusterView, Phase, PhaseOrder, Role, ViewedInstance, accepts, phases_now
from kaveri.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class OrderedPhases:
    """Order that was sent to one incarnation of an instance, whose load may not show it yet."""

    incarnation: int
    order: PhaseOrder
    phases: tuple[Phase, ...]


def check_order(
    view: ClusterView,
    instance_id: str,
    phases: tuple[Phase, ...],
    under_way: Mapping[str, OrderedPhases],
) -> None:
    """Raise InvalidArgument if the instance cannot serve exactly these phases, or the cluster would then lack an
    instance that computes prompts, one that draws tokens, or one that takes the KV of a prefill instance.

    instance_id: of an instance in the view. under_way: the newest order sent to each instance.
    """
    instance = view.instances[instance_id]
    able, model = instance.record.phases, instance.record.model
    if instance.record.role is not Role.ENGINE:
        raise InvalidArgument("instance_id", instance_id, f"of an engine, not of a {instance.record.role}")
    unable = [phase for phase in phases if phase not in able]
    if unable:
        raise InvalidArgument("phases", unable[0].value, f"of {', '.join(able)}, which {instance_id} can serve")
    shown = "+".join(phases) or "none"
    served = {
        one.record.instance_id: _accepted(one, under_way)
        for one in view.instances.values()
        if one.record.role is Role.ENGINE and one.record.model == model
    }
    before, after = served.values(), {**served, instance_id: frozenset(phases)}.values()
    for phase in Phase:
        if any(phase in each for each in before) and not any(phase in each for each in after):
            raise InvalidArgument("phases", shown, f"with {phase}: no other instance serves it")
    takes_kv, gives_kv = frozenset((Phase.DECODE,)), frozenset((Phase.PREFILL,))
    if gives_kv in after and takes_kv not in after:
        limit = "such that one instance serves decode only: prefill instances push their KV to it"
        raise InvalidArgument("phases", shown, limit)


def _accepted(instance: ViewedInstance, under_way: Mapping[str, OrderedPhases]) -> frozenset[Phase]:
    """Phases that the instance takes requests for once its newest order is carried out."""
    newest = under_way.get(instance.record.instance_id)
    if (
        newest is not None
        and newest.incarnation == instance.record.incarnation
        and newest.order > instance.load.phase_order
    ):
        return frozenset(newest.phases)
    return frozenset(phase for phase in phases_now(instance) if accepts(instance, phase))
