"""One request of a simulation, and one placement of it. Pure."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from kaveri.domain.length import TokenRange
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import InstanceRecord
from kaveri.policy.retry import RetryState
from kaveri.simulator.member import BeatingMember
from kaveri.simulator.sequence import CountedSequence


class PrefillSide(Protocol):
    """The prefill instance of an attempt, as others see it."""

    record: InstanceRecord

    def accept(self, attempt: "SimulatedAttempt") -> None:
        """A router sends it."""

    def push_failed(self, reserved: Any) -> None:
        """The decode instance has died. reserved: what it had reserved."""


class DecodeSide(Protocol):
    """The decode instance of an attempt, as others see it."""

    member: BeatingMember
    is_dead: bool

    def give_back(self, reserved: Any) -> None:
        """The room is not wanted."""

    def land(self, reserved: Any) -> None:
        """All KV is there."""


_NO_SETBACK = RetryState()


@dataclass(slots=True)
class LossAccount:
    """What the losses of instances have cost one request, as kaveri.client.answer.ServerTiming."""

    since_s: float = math.nan
    """Of the last token before a loss, or of the loss where there was none; NaN: the request goes on."""
    resumes: int = 0
    held_tokens: int = 0
    recomputed_tokens: int = 0
    stall_s: float = 0.0

    def lost(self, since_s: float) -> None:
        """Its instance was lost. A second loss before the next token belongs to the first."""
        if math.isnan(self.since_s):
            self.since_s = since_s

    def computes_again(self, tokens: int) -> None:
        """It goes to a prefill instance with so many tokens."""
        if not math.isnan(self.since_s):
            self.recomputed_tokens += tokens

    def resumed(self, tokens: int, held_tokens: int) -> None:
        """It goes on with so many tokens where its copy is, which has the KV of `held_tokens`."""
        self.resumes += 1
        self.held_tokens += held_tokens
        self.recomputed_tokens += tokens - held_tokens

    def drew(self, drawn_s: float) -> None:
        """There is a token again."""
        if not math.isnan(self.since_s):
            self.stall_s += drawn_s - self.since_s
            self.since_s = math.nan


class SimulatedRequest:
    """What its client and its router know of it. Times are seconds of the timeline."""

    __slots__ = (
        "attempt_count",
        "due_s",
        "first_s",
        "generated",
        "last_token_s",
        "length",
        "losses",
        "number",
        "output_tokens",
        "prompt_tokens",
        "retry",
        "router_s",
    )

    def __init__(
        self, number: int, due_s: float, prompt_tokens: int, output_tokens: int, length: TokenRange | None
    ) -> None:
        """length: what the cluster knows of the answer's length."""
        self.number = number
        self.due_s = due_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.length = length
        self.generated = 0
        """Tokens of the answer that the router has."""
        self.first_s = math.nan
        """When prefill drew the first one."""
        self.last_token_s = math.nan
        """When its last token was drawn, as far as the router had it when an instance was lost."""
        self.router_s = 0.0
        self.attempt_count = 0
        self.retry = _NO_SETBACK
        self.losses: LossAccount | None = None
        """None: nothing was lost."""


class SimulatedAttempt:
    """One placement of a request on a prefill instance, and what follows. Hashed by identity."""

    __slots__ = (
        "arrived_s",
        "decode",
        "first_token_s",
        "generated",
        "heavy",
        "is_over",
        "key",
        "landed_s",
        "link_free_s",
        "place_search",
        "prefill",
        "prefill_s",
        "pushed_tokens",
        "pushing_since_s",
        "queue_s",
        "replica",
        "request",
        "resumed_from",
        "seeking",
        "sequence",
        "started_s",
        "token_count",
    )

    def __init__(self, request: SimulatedRequest, prefill: PrefillSide) -> None:
        request.attempt_count += 1
        self.request = request
        self.prefill = prefill
        self.key = f"{request.number}.{request.attempt_count}"
        self.generated = request.generated
        self.token_count = request.prompt_tokens + request.generated
        """Tokens to compute. The policies' Prompt."""
        self.is_over = False
        self.decode: DecodeSide | None = None
        self.sequence: CountedSequence | None = None
        """At prefill."""
        self.seeking: Any = None
        self.place_search: Any = None
        self.heavy = False
        self.arrived_s = self.started_s = self.first_token_s = self.landed_s = -1.0
        self.queue_s = self.prefill_s = 0.0
        self.pushing_since_s = -1.0
        self.pushed_tokens = 0
        """Those that link_free_s counts."""
        self.link_free_s = 0.0
        """When the link has sent their KV."""
        self.replica: ReplicaLocation | None = None
        """Where it can be resumed, since its instance was lost."""
        self.resumed_from: SimulatedAttempt | None = None
        """The one that prefill computed, when this one was resumed from a copy."""
