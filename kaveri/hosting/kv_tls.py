"""The settings of KV over TLS, which are the same where it is pushed and where it is taken."""

from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.config.settings import setting
from kaveri.errors import ConfigError
from kaveri.kv.transports import TLS
from kaveri.kv.transports.tls import TlsFiles


@dataclass(frozen=True, kw_only=True)
class KvTlsConfig:
    """Of instances that exchange KV."""

    kv_tls_cert: str = setting("transport tls: PEM file of this instance's certificate, shown to its peers", "")
    kv_tls_key: str = setting("transport tls: PEM file of its key, unencrypted", "")
    kv_tls_ca: str = setting("transport tls: PEM file of the authority that all peers' certificates are of", "")

    def tls_files(self, kv_transports: Sequence[str]) -> TlsFiles | None:
        """None where none is given. Raises ConfigError when one is missing, or they would change nothing."""
        paths = {"kv_tls_cert": self.kv_tls_cert, "kv_tls_key": self.kv_tls_key, "kv_tls_ca": self.kv_tls_ca}
        given = [name for name, path in paths.items() if path]
        if not given:
            return None
        for name, path in paths.items():
            if not path:
                raise ConfigError(name, f"is not given, but {' and '.join(given)}: TLS takes all three")
        if TLS not in kv_transports:
            raise ConfigError(given[0], f"would change nothing: tls is not in kv_transports, {','.join(kv_transports)}")
        return TlsFiles(*paths.values())
