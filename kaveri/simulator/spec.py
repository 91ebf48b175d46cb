"""Specification of a simulation: cluster, engines, links, overheads. Pure.

The names and defaults of settings are those of the services.
"""

import math
from dataclasses import dataclass, field, fields

from kaveri.domain.length import RangeEnd
from kaveri.domain.view import BOTH_PHASES, Phase
from kaveri.errors import ConfigError
from kaveri.kv.transports.link_speed import LinkSpeed
from kaveri.latency.model import LatencyModel
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.flipping import FlipRules, first_prefill_count
from kaveri.policy.ordering import DEFAULT_SCHEDULING_BATCH, OrderingPolicy
from kaveri.policy.placement import DEFAULT_THRESHOLDS, DecodePlacementPolicy, HeavyThresholds, PlacementPolicy
from kaveri.policy.replication import ReplicationMode
from kaveri.simulator.failures import FailureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Settings of one engine: latency model, pool of KV blocks, limits of a step."""

    latency: LatencyModel
    total_blocks: int = 32_768
    block_tokens: int = 16
    chunk_tokens: int = 512
    max_batch: int = 64
    max_model_len: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """Settings of prefill instances."""

    engine: PoolSpec
    max_queue: int = 256
    prefill_policy: OrderingPolicy = OrderingPolicy.FCFS
    prefill_sched_batch: int = DEFAULT_SCHEDULING_BATCH
    decode_placement: DecodePlacementPolicy = DecodePlacementPolicy.POWER_OF_TWO
    thresholds: HeavyThresholds = DEFAULT_THRESHOLDS
    layer_count: int = 2
    """Layers of the model: KV is pushed layer by layer while a chunk is computed. The timed engine has 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpec:
    """Settings of KV copies (replicas) at other instances, and of the memory for them."""

    replication: ReplicationMode = ReplicationMode.OFF
    replica_blocks: int = 65_536
    """Blocks that fit into `replica_memory`."""
    replica_min_tokens: int = 256
    blocks_per_s: float = 0.0
    """Limit on the blocks that one instance copies per second, from `replication_rate`. 0: only the link limits."""
    orphan_grace_s: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("replica_blocks", 1), ("replica_min_tokens", 1), ("blocks_per_s", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(name, f"is {getattr(self, name)!r}; it must be a number of at least {least}")
        if not 0 <= self.orphan_grace_s < math.inf:
            reason = f"is {self.orphan_grace_s!r}; it must be a number of seconds of at least 0"
            raise ConfigError("orphan_grace_s", reason)

    @property
    def is_on(self) -> bool:
        return self.replication is not ReplicationMode.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """Settings of decode instances."""

    engine: PoolSpec
    decode_policy: AdmissionPolicy = AdmissionPolicy.GREEDY
    decode_range_end: RangeEnd = RangeEnd.LOW
    copies: CopySpec = field(default_factory=CopySpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Settings of the router."""

    placement_policy: PlacementPolicy = PlacementPolicy.POWER_OF_TWO
    max_attempts: int = 8
    unavailable_after_s: float = 120.0
    monitor_interval_s: float = 0.1
    lengths_known: bool = True
    """True if requests state their answer's length, as in `kaveri bench` without --natural-length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that Kaveri's services take in addition to the engines' steps."""

    hop_s: float = 0.0
    """A message from one process to another."""
    prefill_step_s: float = 0.0
    """A step with chunks, beyond the latency model."""
    decode_step_s: float = 0.0
    """A step without chunks, beyond the latency model."""
    push_tail_s: float = 0.0
    """From the last sent byte of a prompt's KV until the request can join the decode batch."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"overheads.{entry.name}", f"is {value!r}; it must be a number of at least 0")

    @property
    def are_known(self) -> bool:
        return any(getattr(self, entry.name) > 0 for entry in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A simulated cluster: one router, and either prefill and decode instances or colocated ones."""

    prefill_count: int
    decode_count: int
    prefill: PrefillSpec
    decode: DecodeSpec
    colocated_count: int = 0
    """Instances that prefill and decode. Above 0: there are no others, and `prefill` and `decode` have one engine."""
    dynamic_count: int = 0
    """Instances that change their phase; the first half starts with prefill. As with colocated ones, no others."""
    flips: FlipRules = field(default_factory=FlipRules)
    """Decides the changes of dynamic instances."""
    router: RouterSpec = field(default_factory=RouterSpec)
    link: LinkSpeed | None = None
    """Between any two instances; None: pushes take no time."""
    overheads: Overheads = field(default_factory=Overheads)
    failures: FailureSpec = field(default_factory=FailureSpec)
    seed: int = 0

    @property
    def prefill_ids(self) -> tuple[str, ...]:
        return tuple(f"prefill-{number}" for number in range(self.prefill_count))

    @property
    def decode_ids(self) -> tuple[str, ...]:
        return tuple(f"decode-{number}" for number in range(self.decode_count))

    @property
    def colocated_ids(self) -> tuple[str, ...]:
        return tuple(f"colocated-{number}" for number in range(self.colocated_count))

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return (*self.prefill_ids, *self.decode_ids, *self.colocated_ids, *self.dynamic_ids)

    @property
    def dynamic_ids(self) -> tuple[str, ...]:
        return tuple(f"dynamic-{number}" for number in range(self.dynamic_count))

    def first_phases(self, instance_id: str) -> tuple[Phase, ...]:
        """Phases that the instance serves at the start."""
        if instance_id in self.colocated_ids:
            return BOTH_PHASES
        prefills = (*self.prefill_ids, *self.dynamic_ids[: first_prefill_count(self.dynamic_count, self.flips)])
        return (Phase.PREFILL if instance_id in prefills else Phase.DECODE,)

    def __post_init__(self) -> None:
        both = self.colocated_count or self.dynamic_count
        for name, count in (("prefill", self.prefill_count), ("decode", self.decode_count)):
            if both and count:
                raise ConfigError(name, f"is {count}; beside instances of both phases there are no others")
            if not both and count < 1:
                raise ConfigError(name, f"is {count}; there must be at least 1 instance")
        if self.colocated_count and self.dynamic_count:
            raise ConfigError("dynamic", f"is {self.dynamic_count}; beside colocated instances there are no others")
        if self.dynamic_count and self.dynamic_count < self.flips.min_prefill + self.flips.min_decode:
            least = f"{self.flips.min_prefill} + {self.flips.min_decode}"
            raise ConfigError("dynamic", f"is {self.dynamic_count}; it must be at least {least}, one for each phase")
        if both and self.prefill.engine != self.decode.engine:
            raise ConfigError("colocated", "has two engines; an instance of both phases has one")
        if not 0 < self.router.monitor_interval_s < math.inf:
            reason = f"is {self.router.monitor_interval_s!r}; it must be a number above 0"
            raise ConfigError("monitor_interval_s", reason)
        for role, pool in (("prefill", self.prefill.engine), ("decode", self.decode.engine)):
            for name in ("total_blocks", "block_tokens", "chunk_tokens", "max_batch", "max_model_len"):
                if getattr(pool, name) < 1:
                    raise ConfigError(f"{role}.{name}", f"is {getattr(pool, name)}; it must be at least 1")
            needed = -(-pool.max_model_len // pool.block_tokens)
            if needed > pool.total_blocks:
                reason = f"is {pool.max_model_len}, which takes {needed} blocks; the pool has {pool.total_blocks}"
                raise ConfigError(f"{role}.max_model_len", reason)
        if self.link is not None and self.link.token_bytes is None:
            raise ConfigError("kv_link", "does not say how large a token is; write 200Gbps,800KiB/token")
        self.failures.require_known(self.instance_ids)
        for name, count in (("layer_count", self.prefill.layer_count), ("prefill.max_queue", self.prefill.max_queue)):
            if count < 1:
                raise ConfigError(name, f"is {count}; it must be at least 1")
