"""The cluster as one process sees it: frozen snapshots that policies decide over. Pure."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint


class Role(enum.StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    PREDICTOR = "predictor"
    COLOCATED = "colocated"
    """Both phases on one engine."""


BROADCAST_ROLES = frozenset({Role.DECODE, Role.PREDICTOR})
"""Roles in the cluster monitor's broadcasts: those that prefill instances choose among."""


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
    """Where its gRPC services answer, "host:port"."""
    model: str
    engine: str = ""
    layout: KvLayout | None = None
    kv_endpoints: tuple[KvEndpoint, ...] = ()
    max_model_len: int = 0
    lease_ttl_s: float = 1.0
    """Seconds without a heartbeat after which it counts as gone."""
    version: str = ""


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


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance with its last heartbeat."""

    record: InstanceRecord
    load: InstanceLoad
    heartbeat_age_s: float = 0.0
    """Seconds since that heartbeat, when the snapshot was taken."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Every instance whose lease holds."""

    instances: Mapping[str, InstanceStatus] = field(default_factory=dict)
    """By instance id."""
    store_connected: bool = True
    """False while the store cannot be reached and this is the last view known."""

    def ready(self, role: Role, model: str | None = None) -> Iterator[InstanceStatus]:
        """The instances of `role` (serving `model`, when named) that take work, in the order of their ids."""
        for instance_id in sorted(self.instances):
            status = self.instances[instance_id]
            if status.record.role is not role or status.load.state is not InstanceState.READY:
                continue
            if model is None or status.record.model == model:
                yield status


@dataclass(frozen=True, slots=True)
class LoadBroadcast:
    """What the cluster monitor tells prefill instances."""

    leader_id: str
    fencing_token: int
    """From 1, larger with each change of leader. A follower ignores broadcasts with an older token."""
    sequence_number: int
    """From 1, rises by one with each broadcast under one token."""
    instances: tuple[InstanceStatus, ...]
    """Instances of BROADCAST_ROLES whose lease holds, as the leader sees them."""
