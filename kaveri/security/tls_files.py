"""TLS files: certificate, key and authority, validated, and reread when they change. All certificates of a cluster
carry one DNS name, which both ends verify instead of host names, because instances change addresses."""

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kaveri.errors import ConfigError
from kaveri.security.regular_file import read_regular

LOOK_EVERY_S = 1.0
ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one TLS endpoint, and the name that it requires of its peer."""

    certificate: str = ""
    """Certificate chain, own certificate first. Empty: a client without a certificate."""
    key: str = ""
    """Unencrypted private key of the certificate."""
    authority: str = ""
    """Trusted authorities. Empty: a client trusts the public ones, and a server asks for no certificate."""
    name: str = ""
    """DNS name required in the peer's certificate. Empty: none for a server's peers; a client requires the host's."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    generation: int
    """Increases with each change."""
    certificate: bytes | None
    key: bytes | None
    authority: bytes | None


class WatchedTlsFiles:
    """Rereads TLS files when they change, and keeps the last valid contents. Thread-safe; blocks only for the disk."""

    def __init__(self, files: TlsFiles, prefix: str = "--tls-") -> None:
        """prefix: of the flags that name the files, for errors. Raises ConfigError for an unusable file."""
        if bool(files.certificate) != bool(files.key):
            missing, given = ("key", "cert") if files.certificate else ("cert", "key")
            raise ConfigError(f"{prefix}{missing}", f"is not given, but {prefix}{given}: they belong together")
        self.files = files
        self._prefix = prefix
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._stamp = self._stamps()
        self._contents = self._read(0)
        self._failure = ""

    def now(self) -> TlsContents:
        """Return the valid contents, at most a second old. Unusable files are logged once and ignored: a certificate
        and its key may be replaced one after the other."""
        with self._lock:
            if time.monotonic() - self._looked_s < LOOK_EVERY_S:
                return self._contents
            self._looked_s = time.monotonic()
            try:
                stamp = self._stamps()
                if stamp != self._stamp or self._failure:
                    contents = self._read(self._contents.generation + 1)
                    # Changed during the read: the parts may not match. The next call rereads.
                    if stamp == self._stamps():
                        self._stamp, self._contents, self._failure = stamp, contents, ""
                        log = _logger()
                        log.info("tls_files_read", certificate=self.files.certificate)
            except ConfigError as error:
                if str(error) != self._failure:
                    self._failure = str(error)
                    log = _logger()
                    log.error("tls_files_refused", error=self._failure, effect="the former ones stay in use")
            return self._contents

    def make_context(self, protocol: int) -> ssl.SSLContext:
        """Build a TLS 1.3 context of Python's ssl from the files as they are now. Raises ConfigError."""
        files, prefix = self.files, self._prefix
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED if files.authority else ssl.CERT_NONE
        if files.authority:
            try:
                context.load_verify_locations(files.authority)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{prefix}ca", f"{files.authority} holds no certificate") from error
        if files.certificate:
            self._load_certificate(context)
        return context

    def server_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        """Build a server's ssl context; each handshake uses the files as they are then. protocols: for ALPN."""
        used = self.now().generation
        context = first = self._port_context(protocols)

        def renew(connection: Any, host_name: str | None, of: ssl.SSLContext) -> None:
            nonlocal context, used
            now = self.now().generation
            if now != used:
                # During a change the former context stays in use until the next handshake.
                with contextlib.suppress(ConfigError):
                    context, used = self._port_context(protocols), now
            connection.context = context

        first.sni_callback = renew
        return first

    def _port_context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        context = self.make_context(ssl.PROTOCOL_TLS_SERVER)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        files, prefix = self.files, self._prefix
        try:
            # Without this, OpenSSL would prompt for a password on the terminal.
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(f"{prefix}key", f"{files.key} is not the key of {files.certificate}") from error
            reason = f"{files.certificate} and {files.key} are not a certificate and its key, unencrypted, in PEM"
            raise ConfigError(f"{prefix}cert", reason) from error

    def _read(self, generation: int) -> TlsContents:
        # OpenSSL opens the files itself, and would block on a FIFO.
        read = self._of_each(read_regular)
        self.make_context(ssl.PROTOCOL_TLS_CLIENT)
        certificate, key, authority = (read.get(f"{self._prefix}{end}") for end in ("cert", "key", "ca"))
        return TlsContents(generation, certificate, key, authority)

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        stats = self._of_each(os.stat)
        return {setting: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for setting, stat in stats.items()}

    def _of_each(self, read: Callable[[str], ReadT]) -> dict[str, ReadT]:
        found = {}
        paths = {"cert": self.files.certificate, "key": self.files.key, "ca": self.files.authority}
        for end, path in paths.items():
            try:
                if path:
                    found[f"{self._prefix}{end}"] = read(path)
            except OSError as error:
                raise ConfigError(f"{self._prefix}{end}", f"cannot read {path}: {error.strerror}") from error
        return found


def _logger() -> Any:
    # Import here: the SDK imports this module, so it must stay light.
    from kaveri.telemetry.logs import get_logger

    return get_logger()


def is_named(certificate: Mapping[str, Any] | None, name: str) -> bool:
    """Return True if a certificate, as a dict from Python's ssl, has this DNS name in subjectAltName."""
    return any(kind == "DNS" and value == name for kind, value in (certificate or {}).get("subjectAltName", ()))
