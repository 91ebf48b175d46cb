"""What happens in one schedule: who is there, what is asked, which faults. Values only; a seed draws them all."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kaveri.client.request import ChatOptions, Message
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import BOTH_PHASES, DrainWay, Phase, Role
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy, PlacementPolicy
from kaveri.policy.prediction import PredictionMode
from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.network import LinkQuality


class FaultKind(enum.StrEnum):
    """What can go wrong. `target` and `other` are names of processes."""

    KILL = "kill"
    """The target dies and stays away until the faults end."""
    RESTART = "restart"
    """The target dies; a new life of the same name begins after `lasts_s`. With `other`, an engine: that one dies as
    well, and the target's new life begins at its address; the target itself: at its own former address."""
    FREEZE = "freeze"
    """The target stands still for `lasts_s`."""
    CUT = "cut"
    """Nothing passes between target and other, either way, for `lasts_s`."""
    CUT_ONE_WAY = "cut_one_way"
    """Nothing passes from target to other for `lasts_s`."""
    ISOLATE = "isolate"
    """Nothing passes between the target and all others, the store among them, for `lasts_s`."""
    SLOW = "slow"
    """Messages from target to other take `amount` seconds longer for `lasts_s`."""
    RESET = "reset"
    """One connection between target and other breaks."""
    CLOCK = "clock"
    """The target's clock jumps by `amount` seconds. Of a service forwards, of the store either way."""
    STORE_AWAY = "store_away"
    """The store is away for `lasts_s`."""
    STORE_LOST = "store_lost"
    """The store is away for `lasts_s`, and comes back empty."""
    STORE_EMPTIED = "store_emptied"
    """The store loses its state while it runs."""
    STORE_REFUSES = "store_refuses"
    """The store refuses writes for `lasts_s`."""
    DRAIN = "drain"
    """The target gets SIGTERM, and a new life of the same name begins `lasts_s` after it has."""
    UNDRAIN = "undrain"
    """The target drains, and takes requests again `lasts_s` later."""
    ENGINE = "engine"
    """The target's engine breaks; its process ends, and a new life begins `lasts_s` later."""
    STUCK = "stuck"
    """The target's engine makes no step any more; its process ends, and a new life begins `lasts_s` later."""
    DAMAGE = "damage"
    """The next block of KV from target to other within `lasts_s` arrives damaged."""
    CLIENT = "client"
    """A client's process dies."""
    DEATH = "death"
    """The target, a request, raises an exception in each step that is to draw token `amount` of its answer. In its draw
    where `other` is "draw"; else in the forward pass, which ends the instance: a new life begins soon after."""
    SWITCH = "switch"
    """The target, an engine, serves only the phase `other` for `lasts_s`, and then what it served before."""
    FLIP = "flip"
    """An operator asks the routers, one after the other until one has answered, to let the target, an engine, serve
    only the phase `other`; and `lasts_s` after the order, what it served before. An order may be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. at_s counts from when the cluster is ready, or from when what `after` names has happened."""

    kind: FaultKind
    at_s: float
    after: str = ""
    """Part of a line of the trace, "kind what": see trace.py. Faults whose line never comes do not happen."""
    after_count: int = 1
    """How often the line must have come."""
    target: str = ""
    other: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0
    drain: DrainWay = DrainWay.MIGRATE
    """FLIP: how the requests of a phase that ends are treated."""

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.target}".rstrip()]
        parts += [f"({self.drain})"] if self.drain is not DrainWay.MIGRATE else []
        parts += [f"and {self.other}"] if self.other else []
        parts += [f"by {self.amount:.3f}"] if self.amount else []
        parts += [f"for {self.lasts_s:.3f} s"] if self.lasts_s else []
        behind = f" after {self.after!r} ({self.after_count})" if self.after else ""
        return f"at {self.at_s:.3f} s{behind}: {' '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInstance:
    """One name of the cluster, over all its lives."""

    name: str
    role: Role
    phases: tuple[Phase, ...] = ()
    """Those of an engine."""
    block_count: int = 200
    step_s: float = 0.01
    """Mean seconds of a step of its engine."""
    chunk_tokens: int = 64
    max_batch: int = 16


INSTANCE_KINDS: Mapping[str, tuple[Role, tuple[Phase, ...]]] = {
    "router": (Role.ROUTER, ()),
    "prefill": (Role.ENGINE, (Phase.PREFILL,)),
    "decode": (Role.ENGINE, (Phase.DECODE,)),
    "colocated": (Role.ENGINE, BOTH_PHASES),
    "predictor": (Role.PREDICTOR, ()),
}
"""By the first part of their names."""


ROUTER_DEFAULTS: Mapping[str, SamplingParams] = {
    "router-0": SamplingParams(temperature=0.7, top_k=20),
    "router-1": SamplingParams(temperature=0.0),
}
"""By router: what it fills in, as if each had a --generation-config of its own. Others fill in nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChat:
    """A conversation that is sent instead of a prompt."""

    messages: tuple[Message, ...]
    options: ChatOptions

    def __str__(self) -> str:
        names = [tool["function"]["name"] for tool in self.options.tools]
        arguments = dict(self.options.template_arguments)
        return f"{len(self.messages)} messages, tools {names} {self.options.tool_choice} {arguments}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request of one client."""

    request_id: str
    client: str
    router: str
    at_s: float
    prompt: tuple[int, ...] = ()
    text: str = ""
    """Sent instead of the prompt if not empty."""
    chat: PlannedChat | None = None
    """Sent instead of the prompt, by a client that reads calls of tools and reasoning as the gateway does."""
    params: SamplingParams = field(default_factory=SamplingParams)
    timeout_s: float = 120.0
    cancel_after_s: float | None = None
    """Its client gives it up after so long. By closing its stream, or else as `cancels_by_id` says."""
    cancels_by_id: bool = False
    read_pause_s: float = 0.0
    """Its client waits so long after each chunk."""
    draws_id: bool = False
    """Its client draws the id together with the secret."""
    sends_again: tuple[str, ...] = ()
    """Routers that it is sent to next, with the same id, each time that it ends as unavailable or cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One whole schedule. What is not drawn here is drawn from `seed` while it runs."""

    seed: int
    instances: tuple[PlannedInstance, ...]
    clients: tuple[str, ...]
    requests: tuple[ScheduledRequest, ...]
    faults: tuple[Fault, ...] = ()
    link: LinkQuality = field(default_factory=LinkQuality)
    max_model_len: int = 256
    eos_probability: float = 0.0
    divergent: bool = False
    lease_ttl_s: float = 1.0
    heartbeat_interval_s: float = 0.1
    reservation_ttl_s: float = 5.0
    drain_timeout_s: float = 2.0
    orphan_grace_s: float = 2.0
    max_requests: int = 1024
    max_queue: int = 256
    placement_policy: PlacementPolicy = PlacementPolicy.POWER_OF_TWO
    decode_placement: DecodePlacementPolicy = DecodePlacementPolicy.POWER_OF_TWO
    decode_policy: AdmissionPolicy = AdmissionPolicy.GREEDY
    prefill_policy: OrderingPolicy = OrderingPolicy.FCFS
    probes_per_router: int = 2
    replication: ReplicationMode = ReplicationMode.OFF
    replica_blocks: int = 200
    """Blocks of each instance that decodes, for copies in host memory."""
    replica_place: str = "host"
    """Whether copies are kept in host memory or in the engines' pools."""
    prefills_hold_copies: bool = False
    """Instances that start with prefill have memory for copies too, for the time after a flip."""
    replica_min_tokens: int = 32
    prediction: PredictionMode = PredictionMode.OFF
    failure_domains: int = 1
    """Instances with an engine have these in turn."""
    flip_targets: tuple[float, float, float] | None = None
    """Targets of TTFT and TPOT and the cooldown, in seconds, of the policy that changes phases; None: no policy."""
    direct_clients: tuple[str, ...] = ()
    """Those that read answers at decode instances."""

    @property
    def has_chats(self) -> bool:
        """The model has a chat template."""
        return any(request.chat is not None for request in self.requests)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all instances."""
        return tuple(instance.name for instance in self.instances)

    @property
    def routers(self) -> tuple[PlannedInstance, ...]:
        """The routers."""
        return tuple(instance for instance in self.instances if instance.role is Role.ROUTER)

    def serving(self, phase: Phase) -> tuple[PlannedInstance, ...]:
        """The instances that serve a phase."""
        return tuple(instance for instance in self.instances if phase in instance.phases)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}"]
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if item.name in ("seed", "requests", "faults", "instances"):
                continue
            lines.append(f"  {item.name} = {value}")
        for instance in self.instances:
            shown = " ".join(f"{f.name}={getattr(instance, f.name)}" for f in fields(instance) if f.name != "name")
            lines.append(f"  instance {instance.name}: {shown}")
        lines += [f"  request {_request(request)}" for request in self.requests]
        lines += [f"  fault {fault}" for fault in self.faults]
        return "\n".join(lines)


def _request(request: ScheduledRequest) -> str:
    default = SamplingParams()
    params = {
        item.name: getattr(request.params, item.name)
        for item in fields(SamplingParams)
        if getattr(request.params, item.name) != getattr(default, item.name)
    }
    parts = [f"{request.request_id} at {request.at_s:.3f} s: {request.client} -> {request.router}"]
    text = f"text {request.text!r}" if request.chat is None else f"chat of {request.chat}"
    parts.append(f"{len(request.prompt)} tokens" if request.prompt else text)
    parts.append(" ".join(f"{name}={value}" for name, value in params.items()))
    if request.cancel_after_s is not None:
        parts.append(f"cancelled {'by id ' if request.cancels_by_id else ''}after {request.cancel_after_s:.3f} s")
    if request.read_pause_s:
        parts.append(f"reads every {request.read_pause_s:.3f} s")
    if request.sends_again:
        parts.append(f"sent again to {', '.join(request.sends_again)}")
    return ", ".join(parts)
