"""Ports of gRPC servers and channels that tests make by hand, with mutual TLS where the tests run with --tls."""

import os
from pathlib import Path

import grpc
from grpc import aio

from kaveri.rpc.tls import ChannelOptions, process_tls


def add_port(server: aio.Server, address: str = "127.0.0.1:0") -> int:
    """Listens at "host:port", and returns the port."""
    tls = process_tls()
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def plain_channel(address: str, options: ChannelOptions = ()) -> aio.Channel:
    """A channel without Kaveri's own options."""
    tls = process_tls()
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return tls.open_channel(address, options)


def blocking_channel(address: str, options: ChannelOptions = ()) -> grpc.Channel:
    """The same for threads."""
    tls = process_tls()
    if tls is None:
        return grpc.insecure_channel(address, options)
    names = ("KAVERI_TLS_CA", "KAVERI_TLS_KEY", "KAVERI_TLS_CERT")
    credentials = grpc.ssl_channel_credentials(*(Path(os.environ[name]).read_bytes() for name in names))
    return grpc.secure_channel(address, credentials, (*options, ("grpc.ssl_target_name_override", tls.name)))
