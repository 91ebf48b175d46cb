"""TLS for gRPC ports and channels. Mutual within a cluster: both sides present a certificate of one authority, with the
cluster's name. On public ports only the server presents one."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from kaveri.errors import Unauthenticated
from kaveri.security.tls_files import TlsContents, TlsFiles, WatchedTlsFiles
from kaveri.wire.status import abort

ChannelOptions = tuple[tuple[str, Any], ...]


class RpcTls:
    """TLS credentials from files, for gRPC ports and channels. Thread-safe."""

    def __init__(self, files: TlsFiles, prefix: str = "--tls-") -> None:
        """prefix: of the settings that name the files, for errors. Raises ConfigError for invalid files."""
        self.name = files.name
        self._files = WatchedTlsFiles(files, prefix)

    @property
    def generation(self) -> int:
        """Version of the files; increases when they change. Open channels keep their version."""
        return self._files.now().generation

    def open_channel(self, address: str, options: ChannelOptions) -> aio.Channel:
        """Open a gRPC channel with the current files."""
        now = self._files.now()
        credentials = grpc.ssl_channel_credentials(now.authority, now.key, now.certificate)
        if self.name:
            options = (*options, ("grpc.ssl_target_name_override", self.name))
        return aio.secure_channel(address, credentials, options=options)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a listening port. Each new connection gets the current certificate, and must present
        one if there is an authority."""
        used = self._files.now()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # Runs on gRPC's own threads, at each handshake.
            nonlocal used
            now = self._files.now()
            if now.generation == used.generation:
                return None
            used = now
            return _configuration(now)

        asks = used.authority is not None
        return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, require_client_authentication=asks)  # type: ignore[arg-type]

    def interceptors(self) -> tuple[aio.ServerInterceptor, ...]:
        """Return server interceptors that check the name in clients' certificates: gRPC checks only the authority."""
        return (_CallerName(self.name),) if self.name else ()


_process_tls: RpcTls | None = None


def use_tls(tls: RpcTls | None) -> None:
    """Set the default TLS of the gRPC ports and channels that this process opens from now on. None: no TLS."""
    global _process_tls  # noqa: PLW0603 - as logs and readiness, it is the process's own
    _process_tls = tls


def process_tls() -> RpcTls | None:
    """Return the TLS set by use_tls(); None if the process uses none."""
    return _process_tls


class _CallerName(aio.ServerInterceptor):
    """Rejects clients whose certificate does not carry the cluster's name."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        return _guarded(await continuation(details), self._check)

    async def _check(self, context: aio.ServicerContext[Any, Any]) -> None:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if self._name not in names:
            reason = f"the caller's certificate does not carry the name of this cluster, {self._name.decode()}"
            await abort(context, Unauthenticated(reason))


def _guarded(handler: Any, check: Callable[[aio.ServicerContext[Any, Any]], Awaitable[None]]) -> Any:
    """Wrap a gRPC method handler so that `check`, which aborts unwanted calls, runs before it."""
    if handler is None:
        return None
    streamed = handler.request_streaming
    if handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler if streamed else grpc.unary_stream_rpc_method_handler
        inner = handler.stream_stream or handler.unary_stream

        async def answers(request: Any, context: Any) -> Any:
            await check(context)
            answered = inner(request, context)
            if not hasattr(answered, "__aiter__"):
                # It writes to the context.
                await answered
                return
            async with contextlib.aclosing(answered):
                async for answer in answered:
                    yield answer

        return make(answers, handler.request_deserializer, handler.response_serializer)
    make = grpc.stream_unary_rpc_method_handler if streamed else grpc.unary_unary_rpc_method_handler
    inner = handler.stream_unary or handler.unary_unary

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await inner(request, context)

    return make(answer, handler.request_deserializer, handler.response_serializer)


def _configuration(now: TlsContents) -> grpc.ServerCertificateConfiguration:
    assert now.key is not None
    assert now.certificate is not None
    return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.authority)
