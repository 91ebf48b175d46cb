"""The encrypted socket transport, "tls", over tcp, for peers with a certificate of the same authority.

Any process with such a certificate may push and be pushed to, if it also carries the cluster's name where one is given.
New connections use the current certificate files.

A connection keeps its handshake's keys: Python's ssl cannot renew them. RFC 8446, section 5.5, limits them to 2**24.5
records of AES-GCM. So after three quarters of 2**24 records (256 GiB) a sender opens a new connection as soon as no
push is active; at 2**24 the connection is lost, and its pushes are repeated.
"""

import contextlib
import socket
import ssl
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.stream import ByteStream
from kaveri.kv.transports.tls_stream import KEY_RECORDS, TlsStream
from kaveri.security.tls_files import TlsFiles, WatchedTlsFiles


class TlsTransport(SocketTransport):
    """Transport over TLS 1.3 on tcp, both sides with certificates. Raises ConfigError for invalid files."""

    key_records: int = KEY_RECORDS
    """Max TLS records sent by each side of a connection."""

    def __init__(self, files: TlsFiles, *, advertise_host: str | None = None) -> None:
        super().__init__("tcp", advertise_host=advertise_host)
        self.name = self.label = "tls"
        self._peer_name = files.name
        self._files = WatchedTlsFiles(files, "kv_tls_")
        self._contexts = self._make_contexts()

    def _stream(self, connected: socket.socket, progress_timeout_s: float, *, is_accepted: bool = False) -> ByteStream:
        self._set_up(connected, progress_timeout_s)
        if self._files.now().generation != self._contexts.generation:
            # Files in the middle of a change cannot be used; the former ones can.
            with contextlib.suppress(ConfigError):
                self._contexts = self._make_contexts()
        contexts = self._contexts
        context = contexts.accepting if is_accepted else contexts.connecting
        return TlsStream(
            connected,
            progress_timeout_s,
            context,
            is_server=is_accepted,
            peer_name=self._peer_name,
            key_records=self.key_records,
        )

    def _make_contexts(self) -> "_Contexts":
        generation = self._files.now().generation
        accepting = self._files.make_context(ssl.PROTOCOL_TLS_SERVER)
        # For session resumption, which is not used.
        accepting.num_tickets = 0
        return _Contexts(generation, self._files.make_context(ssl.PROTOCOL_TLS_CLIENT), accepting)


@dataclass(frozen=True, slots=True)
class _Contexts:
    """SSL contexts made from one generation of the certificate files."""

    generation: int
    connecting: ssl.SSLContext
    accepting: ssl.SSLContext
