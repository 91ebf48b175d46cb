"""The decode service's settings; read from flags and KAVERI_* variables by kaveri.rpc.process."""

from dataclasses import dataclass, replace

from kaveri.config.settings import setting, size_bytes
from kaveri.domain.length import RangeEnd
from kaveri.engine.factory import EngineSettings
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.kv_tls import KvTlsConfig
from kaveri.kv.transfer.receiver import CREDIT_BYTES
from kaveri.kv.transports import TRANSPORT_NAMES, transport_names
from kaveri.policy.admission import AdmissionPolicy
from kaveri.rpc.process import ALL_ADDRESSES, MAX_PORT


@dataclass(frozen=True, kw_only=True)
class BatchConfig(InstanceConfig):
    """Settings of whoever generates tokens in a running batch, wherever the KV comes from."""

    decode_policy: AdmissionPolicy = setting("greedy, reserve-static or reserve-dynamic", AdmissionPolicy.GREEDY)  # noqa: RUF009
    decode_range_end: RangeEnd = setting("end of predicted lengths that counts: low or high", RangeEnd.LOW)  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(KvTlsConfig, BatchConfig):
    """Takes requests with their KV cache and generates their tokens."""

    kv_host: str = setting("address on which pushed KV is taken; empty: the value of --host", "")
    kv_port: int = setting("port on which pushed KV is taken; 0: a free one", 0, least=0, most=MAX_PORT)
    kv_transports: tuple[str, ...] = setting(
        "how pushed KV is taken: some of shm and unix (same machine and user only), tcp and tls, and, where they are "
        "installed, nixl, gloo and nccl",
        TRANSPORT_NAMES,
        transport_names,
    )
    kv_credit_bytes: int = setting(
        "KV that all prefill instances together may have under way to this one: 128MiB or a number of bytes",
        CREDIT_BYTES,
        size_bytes,
    )
    reservation_ttl_s: float = setting("seconds that a reservation waits for its KV", 30.0, above=0)

    def engine_settings(self, receives: bool = True) -> EngineSettings:
        settings = super().engine_settings(receives)
        if self.kv_host not in ("", *ALL_ADDRESSES):
            # A network of its own for KV: tickets name it as it is.
            settings = replace(settings, kv_advertise_host=None)
        return replace(
            settings,
            kv_host=self.kv_host or self.host,
            kv_port=self.kv_port,
            kv_transports=self.kv_transports,
            kv_tls=self.tls_files(self.kv_transports),
            kv_credit_bytes=self.kv_credit_bytes,
        )
