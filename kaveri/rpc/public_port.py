"""How a gRPC server meets clients that show no certificate: it asks each call for an API key before it reads it."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from kaveri.errors import Unauthenticated
from kaveri.rpc.tls import RpcTls
from kaveri.wire.status import abort

if TYPE_CHECKING:
    # The SDK imports this module, and is to be light.
    from kaveri.security.callers import Callers

AUTHORIZATION = "authorization"
"""The metadata key of `Bearer KEY`."""
_OPEN = "/grpc.health.v1.Health/"
"""For load balancers. It says no more than whether the port takes requests."""


@dataclass(frozen=True, slots=True)
class PublicPort:
    """What a public port shows and asks for."""

    tls: RpcTls | None
    callers: "Callers"


class KeyCheck(aio.ServerInterceptor):
    """Refuses calls without a good API key. Limits are the servicer's to hold."""

    def __init__(self, callers: "Callers") -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        if not details.method.startswith(_OPEN):
            try:
                self._callers.find(authorization_of(details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(details)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """What a call gives as authorization; None: nothing."""
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            return value.encode() if isinstance(value, str) else value
    return None


def _refusal(error: Unauthenticated) -> Any:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # Whatever the method takes: as a stream it is not read.
    return grpc.stream_stream_rpc_method_handler(refuse)
