"""Input of a plan: model, hardware, workload, SLOs and limits. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kaveri.errors import ConfigError
from kaveri.planner.catalog import Hardware, ModelShape
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.planner.parallelism import Parallelism
from kaveri.policy.replication import ReplicationMode
from kaveri.simulator.spec import Overheads
from kaveri.workload.requests import PlannedRequest
from kaveri.workload.summary import Slo

SEEDS = 5
"""Number of simulations of a whole cluster, with different seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """SLOs in seconds, and the share `attain` of requests that must meet both."""

    ttft_s: float
    tpot_s: float
    attain: float

    def __post_init__(self) -> None:
        for flag, value in (("--slo-ttft-s", self.ttft_s), ("--slo-tpot-s", self.tpot_s)):
            if not 0 < value < math.inf:
                raise ConfigError(flag, f"is {value:g}; it must be a number of seconds above 0")
        if not 0 < self.attain < 1:
            raise ConfigError("--attain", f"is {self.attain:g}; it must be a share above 0 and below 1")

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimits:
    """Limits of the planned instances."""

    prefill: Parallelism | None = None
    """Parallelism of prefill instances. None: try all that fit."""
    decode: Parallelism | None = None
    same_node: bool = False
    """True to keep KV transfers within machines (DistServe's algorithm 2)."""
    chunk_tokens: int | None = None
    """Prompt tokens per step. None: the smallest chunk that saturates the GPUs."""
    max_batch: int = 256

    def __post_init__(self) -> None:
        for flag, count in (("--max-batch", self.max_batch), ("--chunk-tokens", self.chunk_tokens)):
            if count is not None and count < 1:
                raise ConfigError(flag, f"is {count}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings of the planner's simulations."""

    request_count: int = 1000
    """Minimum number of requests per simulation."""
    overheads: Overheads = field(default_factory=Overheads)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_count < 1:
            raise ConfigError("--requests", f"is {self.request_count}; it must be at least 1")

    @property
    def cluster_seeds(self) -> range:
        """Seeds of whole-cluster simulations, other than the one that chose the configuration."""
        return range(self.seed + 1, self.seed + 1 + SEEDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Input of a plan: model, hardware, workload, SLOs and limits."""

    model: ModelShape
    hardware: Hardware
    profiles: Sequence[str]
    """Measured latencies, as read_step_latencies() takes them."""
    gpus: int
    """Maximum number of GPUs of the plan."""
    target: SloTarget
    demand: ExpectedLoad
    limits: InstanceLimits = field(default_factory=InstanceLimits)
    replication: ReplicationMode = ReplicationMode.OFF
    """Placement of decode instances' KV copies, simulated in whole clusters and after a death."""
    simulations: SimulationSettings = field(default_factory=SimulationSettings)

    def __post_init__(self) -> None:
        if self.gpus < 2:
            raise ConfigError("--gpus", f"is {self.gpus}; prefill and decode need at least 1 each")
        longest = max(one.prompt_tokens + one.output_tokens for one in self.demand.lengths)
        if longest > self.model.max_model_len:
            limit = self.model.max_model_len
            raise ConfigError(
                "--lengths", f"has a request of {longest} tokens; {self.model.name} takes at most {limit}"
            )

    def price_per_hour(self, gpus: int) -> float:
        """Return the hourly price of this many GPUs, in US dollars."""
        return gpus * self.hardware.price_per_hour

    def draw(self, rate_per_s: float | None = None, seed: int | None = None) -> list[PlannedRequest]:
        """Sample the requests of a simulation. None: the rate to plan for, and the configuration search's seed."""
        rate_per_s = self.demand.rate_per_s if rate_per_s is None else rate_per_s
        return self.demand.draw(
            self.simulations.request_count, rate_per_s, self.simulations.seed if seed is None else seed
        )
