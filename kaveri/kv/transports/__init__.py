"""The transports there are. `socket` serves "unix" and "tcp"."""

from kaveri.kv.transport import Transport
from kaveri.kv.transports.socket import SocketTransport


def unix_transport() -> SocketTransport:
    """Unix sockets, between processes of one host."""
    return SocketTransport("unix")


def tcp_transport(advertise_host: str | None = None) -> SocketTransport:
    """TCP. advertise_host: what tickets say for a listener on a wildcard address; None for the listening host."""
    return SocketTransport("tcp", advertise_host=advertise_host)


def socket_transports(advertise_host: str | None = None) -> tuple[Transport, ...]:
    """Both, in the order in which a sender prefers them."""
    return (unix_transport(), tcp_transport(advertise_host))
