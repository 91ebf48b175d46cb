"""What of a process's ports is open to strangers. Pure."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from kaveri.addresses import bare_host, join_address

A_CERTIFICATE = "a certificate"
AN_API_KEY = "an API key"
A_TICKET = "a ticket of one push"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningPort:
    """A port as the settings say it will be."""

    flag: str
    """That opens it: "--port"."""
    host: str
    port: int
    """0: a free one, not known yet."""
    is_encrypted: bool
    asks_for: str
    """What callers must show: A_CERTIFICATE, say. Empty: nothing."""


def open_ports(ports: Iterable[ListeningPort]) -> tuple[str, ...]:
    """Those that a network reaches, and on which bytes are not encrypted or callers show nothing; and why."""
    found = []
    for port in ports:
        faults = [] if port.is_encrypted else ["not encrypted"]
        faults += [] if port.asks_for else ["everyone may call"]
        if faults and not is_loopback(port.host):
            found.append(f"{port.flag} at {join_address(port.host, port.port or 'any')}: {', '.join(faults)}")
    return tuple(found)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"
