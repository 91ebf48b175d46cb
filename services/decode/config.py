"""Settings of an instance's decode phase."""

from dataclasses import dataclass
from typing import ClassVar

from kaveri.config.settings import setting, size_bytes
from kaveri.domain.length import RangeEnd
from kaveri.hosting.config import InstanceConfig
from kaveri.hosting.policy_settings import ADMISSIONS, REPLICATIONS
from kaveri.policy.admission import AdmissionPolicy, AnyAdmission
from kaveri.policy.replication import AnyReplication, ReplicationMode

_WITHOUT_MODEL = ("fake", "timed")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(InstanceConfig):
    """Settings of an instance's decode side: admission to the batch, reservations, and copies of requests' KV."""

    HELP_TITLE: ClassVar = "Decoding"

    decode_policy: AnyAdmission = setting(  # noqa: RUF009
        "when a request joins the batch: greedy, reserve-static, reserve-dynamic or a plug-in",
        AdmissionPolicy.GREEDY,
        ADMISSIONS.parse,
    )
    reservation_ttl_s: float = setting("seconds that a reservation waits for its KV", 30.0, above=0)
    replication: AnyReplication = setting(  # noqa: RUF009
        "who holds copies of requests' KV, to go on when this instance is lost: off, pair, ring, spread or a plug-in",
        ReplicationMode.OFF,
        REPLICATIONS.parse,
    )
    replica_place: str = setting(
        "with replication: where copies of other instances' requests are kept: in host memory of their own, or in the "
        "pool, as long as no request needs their blocks; not with vLLM",
        "host",
        choices=("host", "pool"),
    )
    replica_memory: int = setting(
        "with replication: host memory for copies of other instances' requests, 256MiB or a number of bytes",
        256 * 2**20,
        size_bytes,
    )
    replica_min_tokens: int = setting(
        "with replication: a request with a shorter context has no copy, since it is computed again as fast",
        256,
        least=1,
    )
    direct_answers: str = setting(
        "whether callers may read answers here, which takes its tokenizer; auto: unless the engine has no model",
        "auto",
        choices=("auto", "on", "off"),
    )
    decode_range_end: RangeEnd = setting("end of predicted lengths that counts: low or high", RangeEnd.LOW)  # noqa: RUF009

    @property
    def keeps_kv(self) -> bool:
        """True if an instance keeps the KV of a request that leaves for another instance, as the request's copy."""
        return self.replication is ReplicationMode.PAIR and self.replica_place == "pool"

    @property
    def reads_directly(self) -> bool:
        return self.direct_answers == "on" or (self.direct_answers == "auto" and self.engine not in _WITHOUT_MODEL)
