"""View of the cluster, as one process has it: the input of policies. Pure."""

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.timeouts import LEASE_S

ValueT = TypeVar("ValueT")
ParamsT = ParamSpec("ParamsT")


WIRE = 7
"""Version of the contracts (protos/) and of grammars' masks, raised with each incompatible change. Processes ignore
other versions."""


class Role(enum.StrEnum):
    """Kind of a process in the cluster."""

    ROUTER = "router"
    PREDICTOR = "predictor"
    GATEWAY = "gateway"
    """Serves HTTP as a client of the routers."""
    ENGINE = "engine"
    """Serves phases with an engine."""


class Phase(enum.StrEnum):
    """Part of a request's work that an instance with an engine can do."""

    PREFILL = "prefill"
    DECODE = "decode"


BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)
"""Phases of a colocated instance."""


class InstanceState(enum.StrEnum):
    """Availability of an instance for new requests."""

    READY = "ready"
    DRAINING = "draining"


class DrainWay(enum.StrEnum):
    """What an instance does with its requests of a phase that ends."""

    FINISH = "finish"
    """They end where they are, except those that still wait for blocks to decode in, which are refused."""
    RETURN = "return"
    """Prompts that have not begun go back to their routers."""
    MIGRATE = "migrate"
    """As RETURN, and running answers move to other instances with their KV, if it is copied there."""


class PhaseOrder(NamedTuple):
    """Number of an order to change an instance's phases. A greater one replaces a smaller one."""

    fencing_token: int = 0
    """Token of the router that led the cluster monitor; 0: the command that started the instance."""
    number: int = 0
    """Count of that leader's orders, from 1. 0: no order is stated."""


NO_ORDER = PhaseOrder()
FIRST_ORDER = PhaseOrder(0, 1)
"""Order of the command that started an instance."""


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """Name, address and service of one incarnation (one start) of an instance."""

    instance_id: str
    """Stable across restarts: "decode-0"."""
    incarnation: int
    """Random number, new at each start."""
    role: Role
    address: str
    """"host:port" of its gRPC services, or of a gateway's HTTP."""
    model: str
    engine: str = ""


@dataclass(frozen=True, slots=True)
class InstanceRecord(InstanceIdentity):
    """Properties of an instance that are fixed for one incarnation (one start)."""

    layout: KvLayout | None = None
    kv_endpoints: tuple[KvEndpoint, ...] = ()
    max_model_len: int = 0
    lease_ttl_s: float = LEASE_S
    """Seconds without a heartbeat after which it is presumed gone."""
    version: str = ""
    phases: tuple[Phase, ...] = ()
    """Phases that it can serve, in the order of Phase. Empty without an engine."""
    failure_domain: str = ""
    """Instances with the same name here may fail together. Empty: unknown."""
    public_address: str = ""
    """"host:port" of a router for clients with API keys. Empty: no such port."""
    metrics_address: str = ""
    """"host:port" of its metrics. Empty: none, or not reported by its version."""
    wire: int = WIRE


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Counts of a decode instance's requests with KV copies, resumed and moved, at its last heartbeat."""

    owned: int = 0
    """Requests here with a replica at another instance."""
    unprotected: int = 0
    """Requests here that are worth a replica and have no block copied yet."""
    lag_tokens: int = 0
    """Largest number of tokens missing from the replica of one request here."""
    resumed: int = 0
    """Requests resumed here from a replica, in this incarnation."""
    moved: int = 0
    """Requests moved in a drain or to level batches, with all their KV at the holder, in this incarnation."""


@dataclass(frozen=True, slots=True)
class WorkLoad:
    """Requests and KV blocks of an instance at its last heartbeat."""

    sequence_number: int = 0
    """Increases by one with each heartbeat of an incarnation; if only some are received, with each received one."""
    state: InstanceState = InstanceState.READY
    waiting_requests: int = 0
    running_requests: int = 0
    queued_prefill_tokens: int = 0
    queue_room: int | None = None
    """Prefill: free places in its queue. None: not stated."""
    free_blocks: int = 0
    """Blocks available to a new request: not held, and not reserved for running ones (kaveri.policy.admission)."""
    total_blocks: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InstanceLoad(WorkLoad):
    """Load of an instance at its last heartbeat, with the phases that it serves and its memory for KV copies."""

    heavy_requests: int = 0
    """Decode: heavy requests here in any phase (kaveri.policy.placement.HeavyThresholds)."""
    light_requests: int = 0
    """Decode: all other requests here."""
    phases: tuple[Phase, ...] = ()
    """Phases served now, if phase_order is stated; otherwise it serves all in its record."""
    ending_phases: tuple[Phase, ...] = ()
    """Phases that take no new requests and end with their last request; a subset of `phases`."""
    phase_order: PhaseOrder = NO_ORDER
    """Newest order to change `phases`."""
    phase_fault: str = ""
    """Reason for which the newest order was taken back. Empty: it holds."""
    fencing_token: int = 0
    """Router: its token as the leader of the cluster monitor. 0: it does not lead."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens per second of recent prefill; 0: none was measured."""
    step_s: float = 0.0
    """Seconds of a recent decode step; 0: no request decodes."""
    replica_free_bytes: int = 0
    """Memory that replicas of other instances' requests can take now."""
    replica_total_bytes: int = 0
    """Most memory that replicas can take. 0: it holds none, or drains."""
    replica_counts: ReplicaCounts | None = None
    """None: no replicas, or not reported by its version."""
    partner_id: str | None = None
    """Other instance of its pair, by order of the leading router (kaveri.policy.pairs): preferred as holder of its
    requests' KV copies. Empty: it has none yet. None: it is not to be in a pair."""


class ViewedInstance(Protocol):
    """Instance in a view of the cluster: its record, and its load at the last heartbeat."""

    @property
    def record(self) -> InstanceRecord:
        """Properties that are fixed for the instance's incarnation."""

    @property
    def load(self) -> InstanceLoad:
        """Load of the instance at its last heartbeat."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the instance's last heartbeat."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """Snapshot of an instance's record and load, as carried by messages. Is a ViewedInstance."""

    record: InstanceRecord
    load: InstanceLoad
    heartbeat_age_s: float = 0.0
    """Age of the last heartbeat when the status was taken, in seconds."""


def phases_now(instance: ViewedInstance) -> tuple[Phase, ...]:
    """Phases (prefill, decode) that the instance serves now, also while it drains."""
    return instance.load.phases if instance.load.phase_order != NO_ORDER else instance.record.phases


def accepts(instance: ViewedInstance, phase: Phase) -> bool:
    """Return True if the instance takes new requests for the phase: it serves it, not only to its end, and does not
    drain."""
    load = instance.load
    return load.state is InstanceState.READY and phase in phases_now(instance) and phase not in load.ending_phases


def takes_pushes(instance: ViewedInstance) -> bool:
    """Return True if prefill instances push KV to the instance: it decodes, and does not prefill."""
    return phases_now(instance) == (Phase.DECODE,)


def is_late(instance: ViewedInstance) -> bool:
    """Return True if the instance's last heartbeat is older than half its lease, which it renews three times as often
    at least: it may be dead, and its load is no basis for a decision."""
    return instance.heartbeat_age_s > instance.record.lease_ttl_s / 2


def is_broadcast(instance: ViewedInstance) -> bool:
    """Return True if the cluster monitor broadcasts the instance's load: it is a predictor or has an engine."""
    return instance.record.role in (Role.PREDICTOR, Role.ENGINE)


def status_now(instance: ViewedInstance) -> InstanceStatus:
    """Return a snapshot of the instance's record and load."""
    return InstanceStatus(instance.record, instance.load, instance.heartbeat_age_s)


def once_per_view(
    compute: Callable[Concatenate["ClusterView", ParamsT], ValueT],
) -> Callable[Concatenate["ClusterView", ParamsT], ValueT]:
    """Decorate a function of a ClusterView, to compute it once per view and arguments."""

    def derived(view: "ClusterView", /, *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ValueT:
        key = (compute, args, *kwargs.items()) if kwargs else (compute, args)
        try:
            return cast(ValueT, view._derived[key])
        except KeyError:
            value = view._derived[key] = compute(view, *args, **kwargs)
            return value

    update_wrapper(derived, compute)
    return derived


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances with a valid lease and a compatible protocol. Their set, states, phases and pool sizes are constant
    within one view; the rest of their loads follows heartbeats. So a decision uses one view, without an await."""

    instances: Mapping[str, ViewedInstance] = field(default_factory=dict)
    """Instances by id. Views with the same mapping object have the same instances in the same states."""
    store_connected: bool = True
    """False while the store cannot be reached and this is the last view known."""
    incompatible: Mapping[str, ViewedInstance] = field(default_factory=dict)
    """Instances with another WIRE number: shown to operators, and ignored."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @once_per_view
    def ready(self, phase: Phase, model: str | None = None) -> tuple[ViewedInstance, ...]:
        """Return the instances that take new requests for `phase` (and `model`, if given), ordered by id."""
        return tuple(
            each
            for _, each in sorted(self.instances.items())
            if accepts(each, phase) and model in (None, each.record.model)
        )

    @once_per_view
    def ready_predictors(self, model: str) -> tuple[ViewedInstance, ...]:
        """Return the predictors of `model` that take requests, ordered by id."""
        return tuple(
            each
            for _, each in sorted(self.instances.items())
            if (each.record.role, each.record.model) == (Role.PREDICTOR, model)
            and each.load.state is InstanceState.READY
        )

    def leader(self) -> ViewedInstance | None:
        """Return the router that leads the cluster monitor, according to the last heartbeats; None if unknown."""
        leading = [each for each in self.instances.values() if each.load.fencing_token]
        return max(leading, key=lambda each: each.load.fencing_token, default=None)

    @once_per_view
    def incarnations(self) -> Mapping[str, int]:
        """Map the address of each instance to its incarnation."""
        return {instance.record.address: instance.record.incarnation for instance in self.instances.values()}

    @once_per_view
    def broadcast_lives(self) -> frozenset[tuple[Hashable, ...]]:
        """Id, incarnation, state and phases of every instance whose load is broadcast (see is_broadcast)."""
        return frozenset(
            (
                instance_id,
                instance.record.incarnation,
                instance.load.state,
                instance.load.phases,
                instance.load.ending_phases,
            )
            for instance_id, instance in self.instances.items()
            if is_broadcast(instance)
        )

    def derive(self, key: Hashable, compute: Callable[..., ValueT], *args: object) -> ValueT:
        """Return `compute(*args)`, cached per view and key. It must depend only on what is constant in a view."""
        try:
            return cast(ValueT, self._derived[key])
        except KeyError:
            value = self._derived[key] = compute(*args)
            return value


@dataclass(frozen=True, slots=True)
class LoadBroadcast:
    """Message of the cluster monitor to prefill instances: the loads of instances that they choose from."""

    leader_id: str
    fencing_token: int
    """From 1, increases with each change of leader. A follower ignores broadcasts with an older token."""
    sequence_number: int
    """From 1, increases by one with each broadcast under one token."""
    instances: tuple[InstanceStatus, ...]
    """The instances that are broadcast (is_broadcast()) with a valid lease, as the leader sees them."""
