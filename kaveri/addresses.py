"""Parses, formats and binds hosts and "host:port" addresses, which have brackets around an IPv6 host: "[::1]:80"."""

import errno
import ipaddress
import re
import socket

_MAX_PORT = 65_535
_MAX_CHARACTERS = 300
_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\],]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):(?P<port>[0-9]{1,5})")


def bare_host(host: str) -> str:
    """Return the host without the brackets of an IPv6 host."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_text(text: str) -> str:
    """Parse a host name or IP address, with or without brackets; empty text is allowed. Raises ValueError."""
    host = bare_host(text)
    if ":" in host or host != text:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"is {text!r:.140}; write a host name or an address, and the port apart") from None
    return host


def is_all_addresses(host: str) -> bool:
    """Return True for a wildcard host, "0.0.0.0" or "::": it can be bound but not connected to."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_unspecified
    except ValueError:
        return False


def join_address(host: str, port: int | str) -> str:
    """Format "host:port", with brackets around an IPv6 host."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into the host, without brackets, and the port. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator:
        raise ValueError("write HOST:PORT")
    return bare_host(host), int(port)


def is_address(text: str) -> bool:
    """Return True if the text is a "host:port" that can be connected to, with brackets around an IPv6 host."""
    match = _ADDRESS.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    return match is not None and 0 < int(match["port"]) <= _MAX_PORT


def address_text(text: str) -> str:
    """Parse a "host:port" address; empty text is allowed. Raises ValueError."""
    if text and not is_address(text):
        raise ValueError(f"is {text!r:.140}; write HOST:PORT, an IPv6 host in brackets")
    return text


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket, without listening. "::" accepts IPv4 too; without IPv6 in the kernel it binds "0.0.0.0".
    Raises OSError, and OverflowError for an invalid port."""
    host = bare_host(host)
    family, kind, protocol, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    try:
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT or host != "::":
            raise
        return bind_socket("0.0.0.0", port)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and is_all_addresses(host):
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # getaddrinfo() would take port 65536 for 0.
        bound.bind((address[0], port, *address[2:]))
    except BaseException:
        bound.close()
        raise
    return bound
