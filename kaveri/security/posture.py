"""Finds a process's ports that are exposed without encryption or authentication. Pure."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from kaveri.addresses import bare_host, join_address

A_CERTIFICATE = "a certificate"
AN_API_KEY = "an API key"
A_TICKET = "a ticket of one push"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningPort:
    flag: str
    """Flag that opens it: "--port"."""
    host: str
    port: int
    """Port number; 0: any free port, unknown until bound."""
    is_encrypted: bool
    asks_for: str
    """Credential that callers must show, such as A_CERTIFICATE; empty: none."""


def open_ports(ports: Iterable[ListeningPort]) -> tuple[str, ...]:
    """Describe the ports reachable from a network without encryption or without authentication."""
    found = []
    for port in ports:
        faults = [] if port.is_encrypted else ["not encrypted"]
        faults += [] if port.asks_for else ["everyone may call"]
        if faults and not is_loopback(port.host):
            found.append(f"{port.flag} at {join_address(port.host, port.port or 'any')}: {', '.join(faults)}")
    return tuple(found)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the host."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return host == "localhost"
