"""The decode service's settings; read from flags and KAVERI_* variables by kaveri.rpc.process."""

from dataclasses import dataclass

from kaveri.config.settings import setting
from kaveri.domain.length import RangeEnd
from kaveri.engine.settings import OF_PUSHES
from kaveri.hosting.config import InstanceConfig
from kaveri.policy.admission import AdmissionPolicy


@dataclass(frozen=True, kw_only=True)
class BatchConfig(InstanceConfig):
    """Settings of an instance that decodes in a running batch, for pushed and local KV."""

    decode_policy: AdmissionPolicy = setting(  # noqa: RUF009
        "when a request joins the batch: greedy, reserve-static or reserve-dynamic", AdmissionPolicy.GREEDY
    )
    reservation_ttl_s: float = setting("seconds that a reservation waits for its KV", 30.0, above=0)
    decode_range_end: RangeEnd = setting("end of predicted lengths that counts: low or high", RangeEnd.LOW)  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(BatchConfig):
    """Takes requests with their KV cache and generates their tokens."""

    NOT_TAKEN = OF_PUSHES
    receives: bool = True
