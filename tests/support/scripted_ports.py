"""Ports and channels for gRPC servers and clients of tests, with mutual TLS if the tests run with --tls."""

import os
from pathlib import Path

import grpc
from grpc import aio

from kaveri.rpc.tls import ChannelOptions, RpcTls, process_tls, use_tls
from kaveri.security.settings import DEFAULT_NAME
from kaveri.security.tls_files import TlsFiles


def add_port(server: aio.Server, address: str = "127.0.0.1:0") -> int:
    """Make the server listen at "host:port"; return the port."""
    tls = process_tls()
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def plain_channel(address: str, options: ChannelOptions = ()) -> aio.Channel:
    """Open a channel without Kaveri's own options."""
    tls = process_tls()
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return tls.open_channel(address, options)


def blocking_channel(address: str, options: ChannelOptions = ()) -> grpc.Channel:
    """Open a channel for blocking calls, without Kaveri's own options."""
    files = inherited_tls()
    if files is None:
        return grpc.insecure_channel(address, options)
    read = (Path(path).read_bytes() for path in (files.authority, files.key, files.certificate))
    credentials = grpc.ssl_channel_credentials(*read)
    return grpc.secure_channel(address, credentials, (*options, ("grpc.ssl_target_name_override", files.name)))


def inherited_tls() -> TlsFiles | None:
    """Return the certificate files for processes that tests start, from the environment (--tls). None: no TLS."""
    paths = [os.environ.get(f"KAVERI_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
    return TlsFiles(*paths, DEFAULT_NAME) if all(paths) else None


def use_inherited_tls() -> None:
    """Use the certificate of inherited_tls() in this process, a client started by a test."""
    files = inherited_tls()
    if files is not None:
        use_tls(RpcTls(files))
