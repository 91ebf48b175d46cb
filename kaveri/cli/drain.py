"""kaveri drain and kaveri undrain: take an instance out of service, and back, while it lives."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaveri.cli import options
from kaveri.client.defaults import DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.25

Instance = Annotated[str, typer.Argument(help="Its name, as `kaveri status` shows it: decode-0.")]


def drain(
    instance: Instance,
    target: options.Target = DEFAULT_TARGET,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the instance has no request left.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait of --wait, in seconds.")] = 600.0,
) -> None:
    """Let an instance take no new requests: it finishes what it has, or passes it on, and lives on.

    A router sends its clients to the other routers; a prefill instance gives back what it has not begun. The instance
    takes requests again after `kaveri undrain`, or when it is started again. SIGTERM does the same, and then ends it.
    A router with a keys file asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    asyncio.run(_drain(instance, options.targets_of(target), wait, timeout_s))


def undrain(instance: Instance, target: options.Target = DEFAULT_TARGET) -> None:
    """Let a drained instance take requests again."""
    changed = asyncio.run(_undrain(instance, options.targets_of(target)))
    print(f"{instance} takes requests again" if changed else f"{instance} does not drain")


async def _drain(instance: str, targets: "Sequence[str]", wait: bool, timeout_s: float) -> None:
    import time

    from kaveri.errors import DeadlineExceeded, InvalidArgument
    from kaveri.v1 import cluster_pb2

    until_s = time.monotonic() + timeout_s
    request = cluster_pb2.DrainRequest(instance_id=instance)
    answer = await _ask(targets, request)
    print(f"{instance} {'drains' if answer.changed else 'drains already'}: {_left(answer.requests)}", flush=True)
    while wait and answer.requests:
        if time.monotonic() >= until_s:
            raise DeadlineExceeded(f"the drain of {instance}, with {_left(answer.requests)},")
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            answer = await _ask(targets, request)
        except InvalidArgument:
            print(f"{instance} has left the cluster")
            return
    if wait:
        print(f"{instance} is drained")


async def _undrain(instance: str, targets: "Sequence[str]") -> bool:
    from kaveri.v1 import cluster_pb2

    answer = await _ask(targets, cluster_pb2.DrainRequest(instance_id=instance, undo=True))
    return bool(answer.changed)


async def _ask(targets: "Sequence[str]", request: Any) -> Any:
    """Return the answer of the first reachable router. Raises KaveriError."""
    from grpc import aio

    from kaveri.client.api_key import find_api_key, key_metadata
    from kaveri.client.targets import check_targets
    from kaveri.errors import KaveriError
    from kaveri.rpc.server import open_channel
    from kaveri.v1.cluster_pb2_grpc import DrainServiceStub
    from kaveri.wire.status import error_of, is_answer

    failure: KaveriError | None = None
    for target in check_targets(targets):
        async with open_channel(target) as channel:
            try:
                metadata = key_metadata(find_api_key(None))
                return await DrainServiceStub(channel).Drain(request, timeout=_TIMEOUT_S, metadata=metadata)
            except aio.AioRpcError as error:
                failure = failure or error_of(error, peer=target)
                if is_answer(error):
                    raise error_of(error, peer=target) from error
    assert failure is not None
    raise failure


def _left(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'} left"
