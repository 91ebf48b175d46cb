"""Account of one request at its router: timing, steps, changes of its instances, and trace spans."""

import time
from collections import deque
from dataclasses import dataclass, field

from kaveri.lives.request_values import InstanceLife
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import OpenSpan
from kaveri.v1 import inference_pb2
from services.router import metrics

_MOST_STEPS = 64
_MOST_CAUSE_CHARACTERS = 300


@dataclass(slots=True)
class OwnerChange:
    """Interruption of a request from the loss of an instance to its next token; may include a second loss."""

    cause: str
    former_instance_id: str
    since_s: float
    """time.monotonic() of the last token, or of the loss if there was no token yet."""
    until_s: float = 0.0
    """time.monotonic() of the next token; 0: none yet."""
    outcome: str = ""
    """resumed (from a replica) or recomputed; empty: unknown yet."""
    instance_id: str = ""
    """The new prefill instance, or the replica's holder."""
    held_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(eq=False, slots=True)
class RequestAccount:
    """Timing, steps and trace spans of one session of a request. Times are time.monotonic()'s.

    Spans: `generate` for the request; below it `place` for each wait for an instance, and `attempt` for each placement,
    linked to the previous one. Instances add theirs below `attempt`."""

    request_id: str
    session: int
    waits_since_s: float
    """Time when its input was validated or its last attempt ended."""
    span: OpenSpan | None
    """The request's span; whoever created it ends it. None: not traced."""
    timing: inference_pb2.Timing = field(default_factory=inference_pb2.Timing)
    """Timing of the last attempt. Lacks the fields that the relay adds at the end."""
    steps: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    """The last steps, with their times."""
    owner_change: OwnerChange | None = None
    """The interruption in progress, if any."""
    traceparent: str = ""
    """traceparent of the present attempt, for the instances; empty: not traced."""
    _attempt: OpenSpan | None = None
    _former: OpenSpan | None = None

    def begin_span(self, number: int, now_s: float) -> None:
        """Begin the span of attempt `number`, and end the previous one. Only for traced requests."""
        assert self.span is not None
        self.end_span(now_s)
        self.span.write("place", self.waits_since_s, now_s)
        self._attempt = self.span.begin("attempt", now_s, self._former, attempt=number)
        self.traceparent = self._attempt.traceparent if self._attempt is not None else ""

    def end_span(self, now_s: float, error: object = None, **attributes: object) -> None:
        """End the present attempt's span, if it is open. error: reason of the attempt's loss."""
        if self._attempt is not None:
            self._attempt.end(now_s, error, **attributes)
            self._former, self._attempt, self.waits_since_s = self._attempt, None, now_s
            self.traceparent = ""

    def note_loss(self, cause: str, former: InstanceLife, last_token_s: float) -> None:
        """Record the loss of an instance, as an OwnerChange unless one is open. last_token_s: 0: no token so far."""
        now_s = time.monotonic()
        self.steps.append((now_s, f"lost {former.instance_id or 'its instance'}: {cause[:_MOST_CAUSE_CHARACTERS]}"))
        if self.owner_change is None:
            self.owner_change = OwnerChange(cause, former.instance_id, last_token_s or now_s)

    def note_new_owner(
        self, outcome: str, life: InstanceLife, attempt: int, held_tokens: int, context_tokens: int
    ) -> None:
        """Record the instance that continues the request, and the part of its `context_tokens` whose KV it has.
        outcome: "resumed" from a replica, or "recomputed"."""
        recomputed_tokens = max(0, context_tokens - held_tokens)
        self.timing.held_tokens += held_tokens
        self.timing.recomputed_tokens += recomputed_tokens
        if (change := self.owner_change) is not None:
            change.outcome, change.instance_id = outcome, life.instance_id
            change.held_tokens += held_tokens
            change.recomputed_tokens += recomputed_tokens
            self.end_owner_change(attempt)

    def note_tokens(self, attempt: int, now_s: float) -> None:
        """Record that tokens have arrived again after the loss of an instance."""
        assert self.owner_change is not None
        self.owner_change.until_s = self.owner_change.until_s or now_s
        self.end_owner_change(attempt)

    def end_owner_change(self, attempt: int, *, has_ended: bool = False) -> None:
        """Log and count the OwnerChange in progress, once tokens have arrived again and its outcome is known.
        has_ended: True if the request has ended, so that no outcome will follow."""
        change = self.owner_change
        if change is None or not change.until_s or not (change.outcome or has_ended):
            return
        if not change.outcome:
            # The holder's answer comes too late.
            change.outcome = "resumed"
            self.timing.resumes += 1
        self.owner_change = None
        stall_s = change.until_s - change.since_s
        self.timing.stall_s += stall_s
        metrics.STALL_S.labels(outcome=change.outcome).observe(stall_s)
        get_logger().info(
            "owner_changed",
            request_id=self.request_id,
            session=self.session,
            attempt=attempt,
            outcome=change.outcome,
            former_instance_id=change.former_instance_id,
            new_instance_id=change.instance_id,
            held_tokens=change.held_tokens,
            recomputed_tokens=change.recomputed_tokens,
            stall_s=round(stall_s, 4),
            cause=change.cause,
        )
