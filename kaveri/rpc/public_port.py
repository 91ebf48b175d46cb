"""Authenticates gRPC calls of clients without a certificate by API key, before the message is read."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from kaveri.errors import Unauthenticated
from kaveri.rpc.tls import RpcTls
from kaveri.wire.status import abort

if TYPE_CHECKING:
    # The SDK imports this module, so it must stay light.
    from kaveri.security.callers import Callers

AUTHORIZATION = "authorization"
"""The metadata key of `Bearer KEY`."""
_OPEN = "/grpc.health.v1.Health/"
"""Methods open to load balancers. They reveal only whether the port accepts requests."""


@dataclass(frozen=True, slots=True)
class PublicPort:
    """TLS and API keys of a port for clients outside the cluster."""

    tls: RpcTls | None
    callers: "Callers"


class KeyCheck(aio.ServerInterceptor):
    """Server interceptor that rejects calls without a valid API key. Does not enforce the key's limits."""

    def __init__(self, callers: "Callers") -> None:
        self._callers = callers

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if not details.method.startswith(_OPEN):
            try:
                self._callers.find(authorization_of(details.invocation_metadata))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(details)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """Return the value of `authorization` in a call's metadata; None if absent."""
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            return value.encode() if isinstance(value, str) else value
    return None


def _refusal(error: Unauthenticated) -> Any:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # Covers every kind of method: a request stream is not read.
    return grpc.stream_stream_rpc_method_handler(refuse)
