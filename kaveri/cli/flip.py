"""kaveri flip: change the phases that a running instance serves."""

import asyncio
import enum
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET
from kaveri.domain.view import DrainWay

if TYPE_CHECKING:
    from kaveri.domain.view import ClusterView, InstanceLoad, Phase, PhaseOrder

_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.1


class Served(enum.StrEnum):
    """Phases that an instance is to serve."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def flip(
    instance: Annotated[str, typer.Argument(help="Its name, as `kaveri status` shows it: decode-0.")],
    to: Annotated[Served, option("What it serves from now on.", "--to")],
    target: options.Target = DEFAULT_TARGET,
    deadline_s: Annotated[
        float, option("Seconds for its requests of a phase that ends; then the order is taken back. 0: no limit.")
    ] = 0.0,
    drain: Annotated[
        DrainWay,
        option(
            "Requests of a phase that ends. finish: they end there; return: prompts that have not begun go to other "
            "instances; migrate: as return, and running answers move to the holders of their KV copies."
        ),
    ] = DrainWay.MIGRATE,
    wait: Annotated[bool, option("Return when the phase that ends has no request left.", "--wait")] = False,
) -> None:
    """Let an instance serve prefill, decode or both from now on, without a restart and without a lost request.

    It takes requests of a new phase at once. The last instance of a phase does not leave it. A router with a keys file
    asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    asyncio.run(_flip(instance, to, target, deadline_s, drain, wait))


async def flip_instance(
    instance: str,
    phases: "tuple[Phase, ...]",
    target: str,
    deadline_s: float = 0.0,
    way: DrainWay = DrainWay.MIGRATE,
) -> "tuple[int, PhaseOrder]":
    """Let an instance serve these phases. target: addresses of routers. Returns its incarnation and the order's number.
    Raises Unavailable, also if it has a newer order."""
    from kaveri.cli.routers import call_options, first_answer, open_channels
    from kaveri.errors import Unavailable
    from kaveri.v1 import instance_pb2
    from kaveri.v1.instance_pb2_grpc import InstanceServiceStub
    from kaveri.wire.messages import drain_way_to_proto, phase_order_from_proto, phases_to_proto

    request = instance_pb2.SetPhasesRequest(
        instance_id=instance, phases=phases_to_proto(phases), deadline_s=deadline_s, drain=drain_way_to_proto(way)
    )
    async with open_channels(target) as channels:
        answer: instance_pb2.SetPhasesResponse = await first_answer(
            channels, lambda _, channel: InstanceServiceStub(channel).SetPhases(request, **call_options(_TIMEOUT_S))
        )
    if not answer.accepted:
        raise Unavailable(f"{instance} has a newer order")
    return answer.incarnation, phase_order_from_proto(answer.order)


async def _flip(instance: str, to: Served, target: str, deadline_s: float, way: DrainWay, wait: bool) -> None:
    from kaveri.cli.routers import cluster_view, first_answer, open_channels
    from kaveri.domain.view import BOTH_PHASES, Phase
    from kaveri.errors import Unavailable

    phases = BOTH_PHASES if to is Served.BOTH else (Phase(to.value),)
    incarnation, order = await flip_instance(instance, phases, target, deadline_s, way)
    async with open_channels(target) as channels:
        print(f"{instance} serves {to}, by order {order.fencing_token}.{order.number}", flush=True)
        while wait:
            view = await first_answer(channels, lambda _, channel: cluster_view(channel, _TIMEOUT_S))
            load = _load_under(view, instance, incarnation, order)
            if load is not None and not load.ending_phases:
                if load.phase_fault:
                    raise Unavailable(f"{instance} serves {'+'.join(load.phases)} again: {load.phase_fault}")
                print(f"{instance} serves nothing else any more")
                return
            await asyncio.sleep(_LOOK_EVERY_S)


def _load_under(view: "ClusterView", instance_id: str, incarnation: int, order: "PhaseOrder") -> "InstanceLoad | None":
    """Return the instance's load; None if it does not show the order yet. Raises Unavailable if a newer order came, or
    the instance has left or restarted."""
    from kaveri.errors import Unavailable

    instance = view.instances.get(instance_id)
    if instance is None:
        raise Unavailable(f"{instance_id} has left the cluster")
    if instance.record.incarnation != incarnation:
        raise Unavailable(f"{instance_id} has restarted, and serves what its command says")
    if instance.load.phase_order > order:
        raise Unavailable(f"{instance_id} has a newer order")
    return instance.load if instance.load.phase_order == order else None
