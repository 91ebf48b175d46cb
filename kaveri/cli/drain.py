"""kaveri drain and kaveri undrain: take a running instance out of service, and back."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET

if TYPE_CHECKING:
    from kaveri.v1 import instance_pb2

_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.25

Instance = Annotated[str, typer.Argument(help="Its name, as `kaveri status` shows it: decode-0.")]


def drain(
    instance: Instance,
    target: options.Target = DEFAULT_TARGET,
    wait: Annotated[bool, option("Return when the instance has no request left.", "--wait")] = False,
    timeout_s: Annotated[float, option("Longest wait of --wait, in seconds.")] = 600.0,
) -> None:
    """Let an instance take no new requests: it finishes what it has, or passes it on, and lives on.

    A router sends its clients to the other routers; a prefill instance gives back what it has not begun. The instance
    takes requests again after `kaveri undrain`, or when it is started again. SIGTERM does the same, and then ends it.
    A router with a keys file asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    asyncio.run(_drain(instance, target, wait, timeout_s))


def undrain(instance: Instance, target: options.Target = DEFAULT_TARGET) -> None:
    """Let a drained instance take requests again."""
    answer = asyncio.run(_ask(instance, target, undo=True))
    print(f"{instance} takes requests again" if answer.changed else f"{instance} does not drain")


async def _drain(instance: str, target: str, wait: bool, timeout_s: float) -> None:
    from kaveri.errors import DeadlineExceeded, InvalidArgument

    until_s = time.monotonic() + timeout_s
    answer = await _ask(instance, target)
    print(f"{instance} {'drains' if answer.changed else 'drains already'}: {_left(answer.requests)}", flush=True)
    while wait and answer.requests:
        if time.monotonic() >= until_s:
            raise DeadlineExceeded(f"the drain of {instance}, with {_left(answer.requests)},")
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            answer = await _ask(instance, target)
        except InvalidArgument:
            print(f"{instance} has left the cluster")
            return
    if wait:
        print(f"{instance} is drained")


async def _ask(instance: str, target: str, undo: bool = False) -> "instance_pb2.DrainResponse":
    from kaveri.cli.routers import call_options, first_answer, open_channels
    from kaveri.v1 import instance_pb2
    from kaveri.v1.instance_pb2_grpc import InstanceServiceStub

    request = instance_pb2.DrainRequest(instance_id=instance, undo=undo)
    async with open_channels(target) as channels:
        return await first_answer(
            channels, lambda _, channel: InstanceServiceStub(channel).Drain(request, **call_options(_TIMEOUT_S))
        )


def _left(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'} left"
