"""Registry of transports. Modules: `socket` has "unix" and "tcp", `tls` encrypted tcp, `shm` shared memory on one host,
`nixl` whatever UCX reaches, `collective` "gloo" and "nccl", `emulated` links for studies. Others come from plug-ins."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from kaveri.errors import ConfigError
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports.extra.collective import CollectiveTransport
from kaveri.kv.transports.extra.emulated import EmulatedTransport
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.tls import TlsTransport
from kaveri.plugins.registry import PluginPoint
from kaveri.security.tls_files import TlsFiles

TRANSPORT_NAMES = ("shm", "unix", "tcp")
"""Transports in a sender's order of preference, fastest first."""
PATH_NAMES = ("shm", "unix")
"""Transports whose addresses are paths of Unix sockets; all others' are HOST:PORT."""
MOCK = "mock"
"""Moves no bytes; used only on request."""
TLS = "tls"
"""Used only on request: it needs certificates."""
_PARTS = ("name", "label", "capabilities", "connect", "listen")
"""Attributes that a Transport must have."""
_HERE = "kaveri.kv.transports"

TRANSPORTS = PluginPoint(
    kind="transport",
    group="kaveri.transports",
    own={
        "shm": f"{_HERE}.shm:ShmTransport",
        "unix": f"{_HERE}:unix_transport",
        "tcp": f"{_HERE}:tcp_transport",
        TLS: f"{_HERE}:tls_transport",
        "nixl": f"{_HERE}.nixl:NixlTransport",
        "nccl": f"{_HERE}:nccl_transport",
        "gloo": f"{_HERE}:gloo_transport",
        MOCK: f"{_HERE}.extra.emulated:MockTransport",
    },
    needs={"nixl": "nixl_cu13", "nccl": "torch", "gloo": "torch"},
)
"""Factories of Transports. Each is passed `advertise_host` and `tls` if it has such parameters; see make_transports."""


def transport_names(text: str) -> tuple[str, ...]:
    """Parse a list such as "shm,tcp" or "tcp,my_package.link:MyLink" (plug-in). Raises ValueError for unknown ones."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"names none of {TRANSPORTS.names()}")
    return tuple(map(TRANSPORTS.known, names))


unix_transport = partial(SocketTransport, "unix")
tcp_transport = partial(SocketTransport, "tcp")
gloo_transport = partial(CollectiveTransport, "gloo")
nccl_transport = partial(CollectiveTransport, "nccl")


def tls_transport(tls: TlsFiles | None = None, advertise_host: str | None = None) -> TlsTransport:
    """Create the TLS transport. advertise_host: host in its endpoints. Raises ConfigError for missing or bad files."""
    if tls is None:
        raise ConfigError("kv_transports", "tls needs kv_tls_cert, kv_tls_key and kv_tls_ca, or the same of --tls-*")
    return TlsTransport(tls, advertise_host=advertise_host)


def make_transports(
    names: Sequence[str] = TRANSPORT_NAMES, advertise_host: str | None = None, tls: TlsFiles | None = None
) -> tuple[Transport, ...]:
    """Create the transports of these names, in this order. advertise_host: host in their tcp endpoints. tls:
    certificate files.

    Raises ConfigError when one cannot be created, or a name occurs twice.
    """
    made = tuple(_make(name, {"advertise_host": advertise_host, "tls": tls}) for name in names)
    spoken = [transport.name for transport in made]
    if twice := [name for name in spoken if spoken.count(name) > 1]:
        raise ConfigError("kv_transports", f"{twice[0]} is there twice; peers know a transport by its name")
    return made


def _make(name: str, arguments: Mapping[str, object]) -> Transport:
    try:
        maker = TRANSPORTS.load(name)
    except ValueError as error:
        raise ConfigError("kv_transports", str(error)) from error
    try:
        parameters = inspect.signature(maker).parameters
        made = maker(**{argument: value for argument, value in arguments.items() if argument in parameters})
    except ConfigError:
        raise
    except Exception as error:
        if name in TRANSPORTS.own:
            raise
        reason = f"{name} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError("kv_transports", reason) from error
    if missing := [part for part in _PARTS if not hasattr(made, part)]:
        reason = f"{name} made a {type(made).__name__}, which is no Transport: it has no {', '.join(missing)}"
        raise ConfigError("kv_transports", reason)
    return cast(Transport, made)


def slowed(transports: Sequence[Transport], link: str) -> tuple[Transport, ...]:
    """Wrap the transports to emulate a link of this speed, such as "25Gbps,50us". Raises ValueError."""
    speed = parse_link_speed(link)
    return tuple(EmulatedTransport(transport, speed, link) for transport in transports)
