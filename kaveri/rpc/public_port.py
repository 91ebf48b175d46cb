"""Authenticates gRPC calls without a client certificate: each call's API key is checked before its message is read."""

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
    """TLS and API-key check of a public port."""

    tls: RpcTls | None
    callers: "Callers"


class KeyCheck(aio.ServerInterceptor):
    """Rejects calls without a valid API key. The servicer enforces limits."""

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
    """Authorization in a call's metadata; None if absent."""
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            return value.encode() if isinstance(value, str) else value
    return None


def _refusal(error: Unauthenticated) -> Any:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # Covers every kind of method: a request stream is not read.
    return grpc.stream_stream_rpc_method_handler(refuse)
