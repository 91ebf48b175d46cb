"""The files of TLS: a certificate, its key, and the authority of all peers; checked, and read again when they change.

All certificates of a cluster carry one name in subjectAltName, which both ends ask for. Other names, as of hosts, are
not looked at: instances change their addresses.
"""

import os
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaveri.errors import ConfigError

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What an end shows, and what it asks of the other; paths of files in PEM."""

    certificate: str
    """With those between it and the authority, its own first."""
    key: str
    """Not encrypted."""
    authority: str
    """Certificates of those whose certificates are good."""
    name: str = ""
    """A DNS name that the other end's certificate must carry; empty: the authority alone counts."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """What the files hold at one time."""

    generation: int
    """Grows with each change."""
    certificate: bytes
    key: bytes
    authority: bytes


class WatchedTlsFiles:
    """The files as they were when they were good last. Thread-safe; never waits for more than the disk."""

    def __init__(self, files: TlsFiles, prefix: str = "--tls-") -> None:
        """prefix: of the settings that name the files. Raises ConfigError, naming the one that is wrong."""
        self.files = files
        self._prefix = prefix
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._stamp = self._stamps()
        self._contents = self._read(0)
        self._failure = ""

    def now(self) -> TlsContents:
        """The contents, at most a second old. Files that cannot be used change nothing, and are logged once: a
        certificate and its key may be replaced one after the other."""
        with self._lock:
            if time.monotonic() - self._looked_s < LOOK_EVERY_S:
                return self._contents
            self._looked_s = time.monotonic()
            try:
                stamp = self._stamps()
                if stamp != self._stamp or self._failure:
                    contents = self._read(self._contents.generation + 1)
                    # Changed while it was read: the parts may not belong together. The next look reads it again.
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
        """For TLS 1.3 by Python's ssl, with the files as they are. Raises ConfigError."""
        files, prefix = self.files, self._prefix
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{prefix}ca", f"{files.authority} holds no certificate") from error
        try:
            # OpenSSL would prompt for a password on the terminal.
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(f"{prefix}key", f"{files.key} is not the key of {files.certificate}") from error
            reason = f"{files.certificate} and {files.key} are not a certificate and its key, unencrypted, in PEM"
            raise ConfigError(f"{prefix}cert", reason) from error
        return context

    def _read(self, generation: int) -> TlsContents:
        read = [self._read_one(setting, path) for setting, path in self._paths()]
        self.make_context(ssl.PROTOCOL_TLS_CLIENT)
        return TlsContents(generation, *read)

    def _read_one(self, setting: str, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(setting, f"cannot read {path}: {error.strerror}") from error

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for setting, path in self._paths():
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ConfigError(setting, f"cannot read {path}: {error.strerror}") from error
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _paths(self) -> tuple[tuple[str, str], ...]:
        files, prefix = self.files, self._prefix
        return (
            (f"{prefix}cert", files.certificate),
            (f"{prefix}key", files.key),
            (f"{prefix}ca", files.authority),
        )


def _logger() -> Any:
    # Only here: the SDK imports this module, and is to be light.
    from kaveri.telemetry.logs import get_logger

    return get_logger()


def is_named(certificate: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a certificate, as Python's ssl describes it, carries a DNS name."""
    return any(kind == "DNS" and value == name for kind, value in (certificate or {}).get("subjectAltName", ()))
