"""The socket transport over tcp, encrypted, for those alone who show a certificate of the same authority: "tls".

Any process with such a certificate may push and be pushed to: the authority should certify only these instances. Names
in it are not compared with addresses, which change with every instance.

A connection keeps the keys of its handshake: Python's ssl cannot renew them. RFC 8446, section 5.5, advises to after
2**24.5 records of AES-GCM, which are 360 GiB here.
"""

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.stream import ByteStream
from kaveri.kv.transports.tls_stream import TlsStream


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What an end shows, and what it asks of the other; PEM. Read once."""

    certificate: str
    """With those between it and the authority, its own first."""
    key: str
    """Not encrypted."""
    authority: str
    """Certificates of those whose certificates are good."""


class TlsTransport(SocketTransport):
    """Makes links and listeners that speak TLS 1.3 over tcp."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        advertise_host: str | None = None,
        connect_timeout_s: float = 2.0,
        progress_timeout_s: float = 10.0,
        connection_limit: int = 256,
    ) -> None:
        """See SocketTransport. Raises ConfigError when the files are not what they should be."""
        super().__init__(
            "tcp",
            advertise_host=advertise_host,
            connect_timeout_s=connect_timeout_s,
            progress_timeout_s=progress_timeout_s,
            connection_limit=connection_limit,
        )
        self.name = self.label = "tls"
        self._connecting = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, files)
        # For resuming sessions, which is not used.
        self._accepting.num_tickets = 0

    def _make_stream(self, connected: socket.socket, progress_timeout_s: float, *, is_accepted: bool) -> ByteStream:
        context = self._accepting if is_accepted else self._connecting
        return TlsStream(connected, progress_timeout_s, context, is_server=is_accepted)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    for setting, path in (
        ("kv_tls_cert", files.certificate),
        ("kv_tls_key", files.key),
        ("kv_tls_ca", files.authority),
    ):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(setting, f"cannot read {path}: {error.strerror}") from error
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError as error:
        raise ConfigError("kv_tls_ca", f"{files.authority} holds no certificate") from error
    try:
        # OpenSSL would prompt for a password on the terminal.
        context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("kv_tls_key", f"{files.key} is not the key of {files.certificate}") from error
        reason = f"{files.certificate} and {files.key} are not a certificate and its key, unencrypted, in PEM"
        raise ConfigError("kv_tls_cert", reason) from error
    return context
