"""The transports there are. `socket` serves "unix" and "tcp", and `tls` the latter encrypted; `shm` serves processes of
one host and `nixl` whatever UCX reaches, both by the protocol of `one_sided`; `collective` is "gloo" and "nccl";
`emulated` is for studies."""

from collections.abc import Callable, Sequence
from functools import partial

from kaveri.errors import ConfigError
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports.extra.collective import CollectiveTransport
from kaveri.kv.transports.extra.emulated import EmulatedTransport, MockTransport
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.kv.transports.nixl import NixlTransport
from kaveri.kv.transports.shm import ShmTransport
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.tls import TlsTransport
from kaveri.security.tls_files import TlsFiles

TRANSPORT_NAMES = ("shm", "unix", "tcp")
"""Fastest first: the order in which a sender prefers them."""
PATH_NAMES = ("shm", "unix")
"""Their addresses are paths of Unix sockets; all others' are HOST:PORT."""
MOCK = "mock"
"""Moves no bytes; only ever used when asked for."""
TLS = "tls"
"""Used when asked for: it needs certificates."""
OPTIONAL_NAMES = ("nixl", "nccl", "gloo")
"""Used when asked for: they need packages or devices that not every machine has."""
_KNOWN_NAMES = (*TRANSPORT_NAMES, TLS, *OPTIONAL_NAMES, MOCK)


def transport_names(text: str) -> tuple[str, ...]:
    """Reads "shm,tcp". Raises ValueError, naming what is unknown."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(set(names) - set(_KNOWN_NAMES)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(_KNOWN_NAMES)}")
    if not names:
        raise ValueError(f"names none of {', '.join(_KNOWN_NAMES)}")
    return names


def shm_transport() -> ShmTransport:
    """Shared memory, between processes of one host and one user."""
    return ShmTransport()


def unix_transport() -> SocketTransport:
    """Unix sockets, between processes of one host."""
    return SocketTransport("unix")


def tcp_transport(advertise_host: str | None = None) -> SocketTransport:
    """TCP. advertise_host: what tickets say for a listener on a wildcard address; None for the listening host."""
    return SocketTransport("tcp", advertise_host=advertise_host)


def tls_transport(files: TlsFiles | None, advertise_host: str | None = None) -> TlsTransport:
    """TCP, encrypted. advertise_host: see tcp_transport. Raises ConfigError without files, or with bad ones."""
    if files is None:
        raise ConfigError("kv_transports", "tls needs kv_tls_cert, kv_tls_key and kv_tls_ca, or the same of --tls-*")
    return TlsTransport(files, advertise_host=advertise_host)


def nixl_transport(advertise_host: str | None = None) -> NixlTransport:
    """NIXL. advertise_host: see tcp_transport. Raises ConfigError when it is not installed."""
    return NixlTransport(advertise_host=advertise_host)


def gloo_transport(advertise_host: str | None = None) -> CollectiveTransport:
    """gloo. advertise_host: see tcp_transport. Raises ConfigError without torch."""
    return CollectiveTransport("gloo", advertise_host=advertise_host)


def nccl_transport(advertise_host: str | None = None) -> CollectiveTransport:
    """NCCL. advertise_host: see tcp_transport. Raises ConfigError without a GPU and a torch that is built for it."""
    return CollectiveTransport("nccl", advertise_host=advertise_host)


def slowed_tcp_transport() -> Transport:
    """TCP over an emulated link that is faster than this machine's: for the conformance suite."""
    return slowed((tcp_transport(),), "100Gbps,10us")[0]


def make_transports(
    names: Sequence[str] = TRANSPORT_NAMES, advertise_host: str | None = None, tls: TlsFiles | None = None
) -> tuple[Transport, ...]:
    """The transports of these names, in this order. advertise_host: see tcp_transport. tls: for "tls"."""
    makers: dict[str, Callable[[], Transport]] = {
        "shm": shm_transport,
        "unix": unix_transport,
        "tcp": partial(tcp_transport, advertise_host),
        TLS: partial(tls_transport, tls, advertise_host),
        "nixl": partial(nixl_transport, advertise_host),
        "gloo": partial(gloo_transport, advertise_host),
        "nccl": partial(nccl_transport, advertise_host),
        MOCK: partial(MockTransport, advertise_host=advertise_host),
    }
    return tuple(makers[name]() for name in names)


def slowed(transports: Sequence[Transport], link: str) -> tuple[Transport, ...]:
    """The same transports over a link as `link` describes it; see parse_link_speed. Raises ValueError."""
    speed = parse_link_speed(link)
    return tuple(EmulatedTransport(transport, speed, link) for transport in transports)
