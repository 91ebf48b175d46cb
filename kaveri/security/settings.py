"""Settings of API keys and of TLS."""

from dataclasses import dataclass
from typing import ClassVar

from kaveri.config.settings import present, setting
from kaveri.errors import ConfigError
from kaveri.security.tls_files import TlsFiles

DEFAULT_NAME = "kaveri"
PUBLIC_PREFIX = "--public-tls-"


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Settings of a service that asks for API keys."""

    HELP_TITLE: ClassVar = "API keys"

    keys_file: str = setting(
        "file of API keys, made by `kaveri key new`, read again when it changes; empty: no key is asked for", ""
    )


@dataclass(frozen=True, kw_only=True)
class PublicSettings(KeySettings):
    """Settings of a port for clients that show no certificate."""

    HELP_TITLE: ClassVar = "Public port"

    public_tls_cert: str = setting(
        "PEM file of the certificate that clients of the public port see, which are asked for none; empty: no TLS", ""
    )
    public_tls_key: str = setting("PEM file of its key, unencrypted", "")

    @property
    def public_tls(self) -> TlsFiles | None:
        """TLS files of the public port; None if not set. Raises ConfigError when some are missing."""
        if not self.public_tls_cert and not self.public_tls_key:
            return None
        return TlsFiles(self.public_tls_cert, self.public_tls_key)


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Settings of everything that speaks gRPC within a cluster."""

    HELP_TITLE: ClassVar = "TLS within the cluster"

    tls_cert: str = setting(
        "PEM file of this process's certificate, shown to all peers on gRPC and on KV's transport tls; empty: no TLS",
        "",
    )
    tls_key: str = setting("PEM file of its key, unencrypted", "")
    tls_ca: str = setting("PEM file of the authority that all peers' certificates are of", "")
    tls_name: str = setting(
        "DNS name in the certificates of all peers, by which both ends know the cluster", DEFAULT_NAME, present
    )

    @property
    def tls(self) -> TlsFiles | None:
        """TLS files for calls within the cluster; None if not set. Raises ConfigError when some are missing."""
        return tls_files(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)


def tls_files(certificate: str, key: str, authority: str, name: str, prefix: str = "--tls-") -> TlsFiles | None:
    """Create TlsFiles; None if all three paths are empty. Raises ConfigError for a missing one, named by `prefix`."""
    paths = {f"{prefix}cert": certificate, f"{prefix}key": key, f"{prefix}ca": authority}
    given = [flag for flag, path in paths.items() if path]
    if not given:
        return None
    for flag, path in paths.items():
        if not path:
            raise ConfigError(flag, f"is not given, but {' and '.join(given)}: TLS takes all three")
    return TlsFiles(certificate, key, authority, name)
