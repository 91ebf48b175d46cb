"""Simulated requests, their attempts (placements on instances), and the base class of instances. Pure."""

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from kaveri.domain.length import TokenRange
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import InstanceRecord, Phase
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.retry import RetryState, Setback
from kaveri.policy.room_search import PlaceSearch
from kaveri.simulator.engine import CountedEngine, EngineListener
from kaveri.simulator.member import BeatingMember, SimulatedLoad
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.timeline import Timeline

NO_SETBACK = RetryState()


@dataclass(slots=True)
class LossAccount:
    """Delay and recomputed tokens that lost instances cost one request; fields as in the SDK's ServerTiming."""

    since_s: float = math.nan
    """Time of the last token before a loss, or of the loss if there was none; NaN: no loss is pending."""
    resumes: int = 0
    held_tokens: int = 0
    recomputed_tokens: int = 0
    stall_s: float = 0.0

    def lost(self, since_s: float) -> None:
        """Record the loss of an instance. since_s: time of the request's last token, when the stall begins."""
        if math.isnan(self.since_s):
            self.since_s = since_s

    def computes_again(self, tokens: int) -> None:
        """Count `tokens` as recomputed by a prefill instance, if the request has lost an instance."""
        if not math.isnan(self.since_s):
            self.recomputed_tokens += tokens

    def resumed(self, tokens: int, held_tokens: int) -> None:
        """Record that a request of `tokens` tokens resumes from a copy with the KV of `held_tokens` of them."""
        self.resumes += 1
        self.held_tokens += held_tokens
        self.recomputed_tokens += tokens - held_tokens

    def drew(self, drawn_s: float) -> None:
        """Record the time of a token, which ends the stall if there was a loss."""
        if not math.isnan(self.since_s):
            self.stall_s += drawn_s - self.since_s
            self.since_s = math.nan


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request as its client and router know it. Times are simulated seconds."""

    number: int
    due_s: float
    prompt_tokens: int
    output_tokens: int
    length: TokenRange | None = None
    """Range of the answer's token count, as known to the cluster."""
    generated: int = 0
    """Answer tokens that the router has received."""
    last_token_s: float = math.nan
    """Time of the last token that the router is known to have."""
    attempt_count: int = 0
    retry: RetryState = NO_SETBACK
    losses: LossAccount | None = None


@dataclass(slots=True)
class KvPush:
    """Progress of a prompt's KV transfer to a decode instance, layer by layer while prefill computes."""

    since_s: float
    tokens: int = 0
    """Tokens whose KV the link has sent by link_free_s."""
    link_free_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedAttempt:
    """An attempt: one placement of a request on a prefill and then a decode instance, until it ends or fails."""

    request: SimulatedRequest
    prefill: "SimulatedInstance"
    key: str = field(init=False)
    generated: int = field(init=False)
    token_count: int = field(init=False)
    """Tokens to prefill: the prompt, and answer tokens of earlier attempts."""
    is_over: bool = False
    decode: "SimulatedInstance | None" = None
    sequence: CountedSequence | None = None
    """Its sequence in the prefill instance's engine."""
    place_search: PlaceSearch | None = None
    heavy: bool = False
    arrived_s: float = -1.0
    started_s: float = -1.0
    first_token_s: float = -1.0
    landed_s: float = -1.0
    push: KvPush | None = None
    replica: ReplicaLocation | None = None
    """Copy of its KV at another instance, to resume from after a loss."""
    resumed_from: "SimulatedAttempt | None" = None
    """Attempt that was prefilled, if this one was resumed from a copy."""

    def __post_init__(self) -> None:
        request = self.request
        request.attempt_count += 1
        self.key = f"{request.number}.{request.attempt_count}"
        self.generated = request.generated
        self.token_count = request.prompt_tokens + request.generated


class InstanceRouter(Protocol):
    """Interface of the simulated router for instances; implemented by SimulatedRouter."""

    timeline: Timeline
    spec: ClusterSpec
    seeds: random.Random

    def gaps(self, gap_s: float, count: int) -> None: ...
    def started(self, attempt: SimulatedAttempt) -> None: ...
    def drew_first(self, attempt: SimulatedAttempt, drawn_s: float) -> None: ...
    def finished(self, attempt: SimulatedAttempt, first_step_s: float = -1.0, preemptions: int = 0) -> None: ...
    def decode_lost(self, attempt: SimulatedAttempt) -> None: ...
    def not_resumed(self, attempt: SimulatedAttempt) -> None: ...
    def resume_lost(self, attempt: SimulatedAttempt) -> None: ...
    def moved(self, attempt: SimulatedAttempt) -> None: ...
    def lost(
        self, attempt: SimulatedAttempt, error: KaveriError, setback: Setback = ..., retry_after_s: float = 0.0
    ) -> None: ...
    def wake_at_broadcast(self) -> None: ...
    def phases_changed(self) -> None: ...


class SimulatedInstance(EngineListener):
    """Base of simulated instances: one incarnation (run of the process), alive from start() to die()."""

    member: BeatingMember

    def __init__(self, router: InstanceRouter, record: InstanceRecord) -> None:
        assert isinstance(record.layout, KvLayout)
        self._router = router
        self._timeline = router.timeline
        self._spec = router.spec
        self.record = record
        self.pool = (router.spec.prefill if record.phases == (Phase.PREFILL,) else router.spec.decode).engine
        self.engine = CountedEngine(router.timeline, self.pool, record.layout, router.spec.overheads, self)
        self._serial = 0
        self.is_dead = False

    def start(self, first_beat_s: float) -> None:
        """Send heartbeats, the first at `first_beat_s`."""
        self.member = BeatingMember(self._timeline, self.record, first_beat_s, self._load_at)

    def die(self) -> None:
        self.is_dead = True
        self.engine.stop()
        self.member.stop()

    def is_empty(self) -> bool:
        """Return True if no request is left and all KV blocks are free. Ignores the blocks of a dead instance."""
        return self.is_dead or self.engine.free_blocks == self.pool.total_blocks

    def before_step_ends(self) -> None:
        now_s = self._timeline.now_s
        if now_s >= self.member.next_beat_s:
            self.member.take_beats(now_s)

    def _load_at(self, time_s: float, sequence_number: int) -> SimulatedLoad:
        """Return the load that heartbeat `sequence_number`, at `time_s`, reports."""
        raise NotImplementedError

    # Calls that an attempt's prefill or decode instance takes.

    def accept(self, attempt: SimulatedAttempt) -> None:
        raise NotImplementedError

    def push_failed(self, reserved: CountedSequence) -> None:
        raise NotImplementedError

    def touch(self) -> None:
        raise NotImplementedError

    def let_go(self, sequence: CountedSequence) -> int:
        raise NotImplementedError

    def reserve_resumed(self, attempt: SimulatedAttempt) -> CountedSequence | None:
        raise NotImplementedError

    def land_resumed(self, sequence: CountedSequence, held_tokens: int) -> None:
        raise NotImplementedError
