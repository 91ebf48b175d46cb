"""The cluster as one process sees it: what policies decide over. Pure."""

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint

ValueT = TypeVar("ValueT")


class Role(enum.StrEnum):
    """What an instance is."""

    ROUTER = "router"
    """The entry that clients talk to."""
    PREDICTOR = "predictor"
    """Guesses how long answers will be."""
    GATEWAY = "gateway"
    """Answers HTTP: a client of the routers."""
    ENGINE = "engine"
    """Serves phases with an engine."""


class Phase(enum.StrEnum):
    """A part of a request's work that an instance with an engine can do."""

    PREFILL = "prefill"
    """Computes prompts."""
    DECODE = "decode"
    """Draws tokens."""


BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)
"""Of a colocated instance."""


class InstanceState(enum.StrEnum):
    """Whether an instance takes work."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """What does not change during an instance's life."""

    instance_id: str
    """Stable over restarts: "decode-0"."""
    incarnation: int
    """One life of it: a random number, new at each start."""
    role: Role
    address: str
    """Where its gRPC services answer, or a gateway's HTTP, "host:port"."""
    model: str
    engine: str = ""
    layout: KvLayout | None = None
    kv_endpoints: tuple[KvEndpoint, ...] = ()
    max_model_len: int = 0
    lease_ttl_s: float = 1.0
    """Seconds without a heartbeat after which it counts as gone."""
    version: str = ""
    phases: tuple[Phase, ...] = ()
    """The phases that it can serve, in the order of Phase. None without an engine."""
    failure_domain: str = ""
    """Instances with the same name here may fail together. Empty: not known."""
    public_address: str = ""
    """Where clients with API keys reach a router, "host:port". Empty: it has no port for them."""
    metrics_address: str = ""
    """Where its metrics are, "host:port". Empty: it serves none, or its version does not say."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """How the replication of one decode instance did at its last heartbeat."""

    owned: int = 0
    """Requests here of which another instance holds a replica."""
    unprotected: int = 0
    """Requests here that are worth a replica, and of which no whole block is copied yet."""
    lag_tokens: int = 0
    """Most tokens of one request here that its replica lacks."""
    resumed: int = 0
    """Requests that went on here from a replica, in this life of the instance."""
    moved: int = 0
    """Requests that it has let go while it drained, with all their KV at the holder, in this life of the instance."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """How busy an instance was at its last heartbeat."""

    sequence_number: int = 0
    """Rises by one with each heartbeat of an incarnation; where only some are heard, with each that is heard."""
    state: InstanceState = InstanceState.READY
    waiting_requests: int = 0
    running_requests: int = 0
    queued_prefill_tokens: int = 0
    queue_room: int | None = None
    """Prefill: requests that its queue takes before it is full. None: not stated."""
    free_blocks: int = 0
    """Blocks that a new request may take: held by none, and not kept for what runs (kaveri.policy.admission)."""
    total_blocks: int = 0
    context_tokens: int = 0
    heavy_requests: int = 0
    """Decode: requests here in any phase that are heavy (kaveri.policy.placement.HeavyThresholds)."""
    light_requests: int = 0
    """Decode: all others here."""
    phases: tuple[Phase, ...] = ()
    """The phases that it serves now. Holds when phase_order is not 0; else it serves all that its record names."""
    ending_phases: tuple[Phase, ...] = ()
    """Those of `phases` that take no new requests: they will not be served when the last request has ended."""
    phase_order: int = 0
    """The number of the order that set `phases`. 1: the command that started the instance. 0: not stated."""
    replica_free_bytes: int = 0
    """Host memory that new replicas of other instances' requests may take."""
    replica_total_bytes: int = 0
    """All host memory for replicas. 0: it holds none."""
    replica_counts: ReplicaCounts | None = None
    """None: it has no replicas, or its version does not say."""


class ViewedInstance(Protocol):
    """An instance as a view shows it."""

    @property
    def record(self) -> InstanceRecord:
        """What does not change during its life."""

    @property
    def load(self) -> InstanceLoad:
        """As of its last heartbeat."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since that heartbeat."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance at one moment, as messages carry it. Is a ViewedInstance."""

    record: InstanceRecord
    load: InstanceLoad
    heartbeat_age_s: float = 0.0
    """Seconds since that heartbeat, when the status was taken."""


def phases_now(instance: ViewedInstance) -> tuple[Phase, ...]:
    """The phases that the instance serves now. One that drains still serves what it has."""
    return instance.load.phases if instance.load.phase_order else instance.record.phases


def takes_pushes(instance: ViewedInstance) -> bool:
    """Whether prefill instances push KV to it: it decodes, and computes no prompts itself."""
    return phases_now(instance) == (Phase.DECODE,)


def is_broadcast(instance: ViewedInstance) -> bool:
    """Whether the cluster monitor broadcasts its load: prefill instances choose among these, and owners of requests
    among those that hold copies of KV."""
    return instance.record.role is Role.PREDICTOR or takes_pushes(instance) or instance.load.replica_total_bytes > 0


def status_now(instance: ViewedInstance) -> InstanceStatus:
    """The instance at this moment."""
    return InstanceStatus(instance.record, instance.load, instance.heartbeat_age_s)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Every instance whose lease holds.

    Which instances there are, their states, their phases and the sizes of their pools stay the same within one view;
    the rest of their loads follows their heartbeats. So a decision takes one view, and does not wait before it has
    decided.
    """

    instances: Mapping[str, ViewedInstance] = field(default_factory=dict)
    """By instance id. Views with the same mapping object have the same instances in the same states."""
    store_connected: bool = True
    """False while the store cannot be reached and this is the last view known."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ready(self, phase: Phase, model: str | None = None) -> tuple[ViewedInstance, ...]:
        """The instances that take requests of `phase` now (for `model`, when named), in the order of their ids."""
        return self.derive(("ready", phase, model), self._ready, phase, model)

    def ready_predictors(self, model: str) -> tuple[ViewedInstance, ...]:
        """The predictors of `model` that take work, in the order of their ids."""
        return self.derive(("predictors", model), self._ready, None, model)

    def addresses(self) -> frozenset[str]:
        """Of all instances."""
        return self.derive("addresses", self._addresses)

    def broadcast_lives(self) -> frozenset[tuple[str, int, InstanceState]]:
        """Id, incarnation and state of every instance that the cluster monitor broadcasts."""
        return self.derive("broadcast lives", self._broadcast_lives)

    def derive(self, key: Hashable, compute: Callable[..., ValueT], *args: object) -> ValueT:
        """The value of `compute(*args)`, which is called once per view and key.

        It may depend only on what stays the same within a view.
        """
        try:
            return cast(ValueT, self._derived[key])
        except KeyError:
            value = self._derived[key] = compute(*args)
            return value

    def _ready(self, phase: Phase | None, model: str | None) -> tuple[ViewedInstance, ...]:
        """phase: None for predictors."""
        instances = (self.instances[instance_id] for instance_id in sorted(self.instances))
        return tuple(
            instance
            for instance in instances
            if (instance.record.role is Role.PREDICTOR if phase is None else _takes(instance, phase))
            and instance.load.state is InstanceState.READY
            and model in (None, instance.record.model)
        )

    def _addresses(self) -> frozenset[str]:
        return frozenset(instance.record.address for instance in self.instances.values())

    def _broadcast_lives(self) -> frozenset[tuple[str, int, InstanceState]]:
        return frozenset(
            (instance_id, instance.record.incarnation, instance.load.state)
            for instance_id, instance in self.instances.items()
            if is_broadcast(instance)
        )


def _takes(instance: ViewedInstance, phase: Phase) -> bool:
    return phase in phases_now(instance) and phase not in instance.load.ending_phases


@dataclass(frozen=True, slots=True)
class LoadBroadcast:
    """What the cluster monitor tells prefill instances."""

    leader_id: str
    fencing_token: int
    """From 1, larger with each change of leader. A follower ignores broadcasts with an older token."""
    sequence_number: int
    """From 1, rises by one with each broadcast under one token."""
    instances: tuple[InstanceStatus, ...]
    """The instances that are broadcast (is_broadcast()) and whose lease holds, as the leader sees them."""
