"""Certificates for TLS tests, made by the openssl command."""

import os
import subprocess
from pathlib import Path

from kaveri.kv.transports.tls import TlsTransport
from kaveri.security.settings import DEFAULT_NAME
from kaveri.security.tls_files import TlsFiles

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
FILES_VARIABLE = "KAVERI_TESTING_TLS"
"""Environment variable with the paths of key, certificate and authority, for processes that tests start."""


class Authority:
    """Certificate authority of one test; its files are in `folder`, which must exist."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        # Python 3.13's default context refuses an authority that does not say this.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        files = ("-keyout", self._key, "-out", self.certificate)
        _openssl("req", "-x509", *_NEW_KEY, *usage, "-subj", f"/CN={name}", *files)

    def certify(self, name: str, days: int = 1, dns: str = DEFAULT_NAME) -> TlsFiles:
        """Make a key and a certificate. days: lifetime; negative: already expired. dns: name of the cluster in it."""
        certificate, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{dns}\n")
        signed_by = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial")
        made_of = ("-in", request, "-days", str(days), "-extfile", extensions)
        _openssl("x509", "-req", *made_of, *signed_by, "-out", certificate)
        return TlsFiles(str(certificate), str(key), str(self.certificate), dns)


def tls_transport() -> TlsTransport:
    """Return a TLS transport with the files that FILES_VARIABLE names, for the conformance suite."""
    return TlsTransport(TlsFiles(*os.environ[FILES_VARIABLE].split(os.pathsep)))


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
