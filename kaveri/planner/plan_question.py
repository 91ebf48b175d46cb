"""The question that a plan answers. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kaveri.errors import ConfigError
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.planner.hardware import Hardware
from kaveri.planner.model_shape import ModelShape
from kaveri.planner.parallelism import Parallelism
from kaveri.policy.replication import ReplicationMode
from kaveri.simulator.spec import Overheads
from kaveri.workload.summary import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A question to the planner."""

    model: ModelShape
    hardware: Hardware
    profiles: Sequence[str]
    """See kaveri.planner.profiles."""
    gpus: int
    """Maximum number of GPUs of the plan."""
    slo_ttft_s: float
    slo_tpot_s: float
    attain: float
    """Required share of requests that meet both."""
    demand: ExpectedLoad
    prefill_parallelism: Parallelism | None = None
    """Parallelism of prefill instances. None: all that fit are tried."""
    decode_parallelism: Parallelism | None = None
    same_node: bool = False
    """DistServe's algorithm 2: KV never leaves a machine."""
    replication: ReplicationMode = ReplicationMode.OFF
    """Placement of copies of decode instances' KV. They count in the whole cluster, and so when an instance dies."""
    chunk_tokens: int | None = None
    max_batch: int = 256
    request_count: int = 1000
    """Minimum number of requests of each simulation."""
    overheads: Overheads = field(default_factory=Overheads)
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--slo-ttft-s", self.slo_ttft_s), ("--slo-tpot-s", self.slo_tpot_s)):
            if not 0 < value < math.inf:
                raise ConfigError(flag, f"is {value:g}; it must be a number of seconds above 0")
        if not 0 < self.attain < 1:
            raise ConfigError("--attain", f"is {self.attain:g}; it must be a share above 0 and below 1")
        if self.gpus < 2:
            raise ConfigError("--gpus", f"is {self.gpus}; prefill and decode need at least 1 each")
        for flag, count in (("--requests", self.request_count), ("--max-batch", self.max_batch)):
            if count < 1:
                raise ConfigError(flag, f"is {count}; it must be at least 1")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError("--chunk-tokens", f"is {self.chunk_tokens}; it must be at least 1")
        longest = max(one.prompt_tokens + one.output_tokens for one in self.demand.lengths)
        if longest > self.model.max_model_len:
            limit = self.model.max_model_len
            raise ConfigError(
                "--lengths", f"has a request of {longest} tokens; {self.model.name} takes at most {limit}"
            )

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft_s, self.slo_tpot_s)
