"""The simulated router: places requests on prefill instances, retries them, and records results. Pure.

It mirrors services/router/request_placer.py, event by event.
"""

import math
import random
from collections.abc import Callable

from kaveri.domain.length import TokenRange
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, Phase
from kaveri.errors import InvalidArgument, KaveriError, LayoutMismatch, NoCapacity, Unavailable
from kaveri.policy.placement import choose_prefill, missing_phases
from kaveri.policy.replication import is_worth_a_resume
from kaveri.policy.retry import RetryLimits, Setback, after_setback
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.policy.waits import PREFILL_LOOK_S
from kaveri.simulator.copies import InstanceCopies
from kaveri.simulator.instance import NO_SETBACK, LossAccount, SimulatedAttempt, SimulatedRequest
from kaveri.simulator.member import HEARTBEAT_INTERVAL_S, Broadcasts
from kaveri.simulator.prefill import SimulatedPrefill
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.table import RunTable
from kaveri.simulator.timeline import Timeline

MODEL = "model"
"""The served model of every instance."""
_HOPELESS = (InvalidArgument, LayoutMismatch)


class SimulatedRouter:
    """Simulated router, the only one of its cluster; also the cluster monitor, which broadcasts loads."""

    def __init__(self, timeline: Timeline, spec: ClusterSpec, table: RunTable, seeds: random.Random) -> None:
        """seeds: source of the seeds of router and instances."""
        self.timeline = timeline
        self.spec = spec
        self.seeds = seeds
        self._rng = random.Random(seeds.random())
        self._unconfirmed: UnconfirmedWork[str] = UnconfirmedWork()
        self._turn = 0
        self.moved_count = 0
        """Requests that went on elsewhere without a loss."""
        self._line: dict[SimulatedRequest, None] = {}
        self._line_looks = False
        self._unserved: dict[SimulatedRequest, float] = {}
        """Requests that wait for an instance of a missing phase, with the start of the wait."""
        self.table = table
        self.gaps = table.gaps
        self.view = ClusterView()
        self.prefills: dict[str, SimulatedPrefill] = {}
        self.holders: dict[str, InstanceCopies] = {}
        """Instances that hold copies of KV."""
        self.broadcasts = Broadcasts(timeline, spec.router.monitor_interval_s)
        self.on_phases: Callable[[], object] = lambda: None
        """Called when an instance has changed its phases, before the broadcast that shows it."""
        self.on_end: Callable[[SimulatedRequest], object] = lambda _: None

    # Calls of clients.

    def generate(self, request: SimulatedRequest) -> None:
        self.table.plan(request.number, request.due_s, request.prompt_tokens, request.output_tokens)
        longest = min(self.spec.prefill.engine.max_model_len, self.spec.decode.engine.max_model_len)
        if request.prompt_tokens + request.output_tokens > longest:
            tokens = f"{request.prompt_tokens} + {request.output_tokens} tokens"
            self._fail(request, InvalidArgument("prompt", tokens, f"at most {longest} tokens together"))
            return
        if self.spec.router.lengths_known:
            request.length = TokenRange(request.output_tokens, request.output_tokens + 1)
        self.timeline.send(self._place, request)

    def _place(self, request: SimulatedRequest) -> None:
        """Send a request to a prefill instance, or queue it after those that wait longer."""
        if missing_phases(self.view, MODEL):
            self._unserved[request] = self.timeline.now_s
            self._look_at_line_later()
        elif self._line and request not in self._line:
            self._line[request] = None
        elif not self._send(request):
            self._line[request] = None
            self._look_at_line_later()

    def _send(self, request: SimulatedRequest) -> bool:
        now_s = self.timeline.now_s
        retry = request.retry
        resting = retry.resting(self.view, now_s) if retry is not NO_SETBACK else {}
        failed = retry.failed(self.view) if retry is not NO_SETBACK else ()
        self._turn += 1
        target = choose_prefill(
            self.view,
            MODEL,
            self._unconfirmed,
            self.spec.router.placement_policy,
            self._rng,
            turn=self._turn,
            avoid=failed,
            exclude=resting,
        )
        if target is None:
            return False
        attempt = SimulatedAttempt(request, self.prefills[target.record.instance_id])
        if request.losses is not None:
            request.losses.computes_again(attempt.token_count)
        self._unconfirmed.add(attempt.key, target, attempt.token_count)
        if request.attempt_count == 1:
            self.table.times["router_s"][request.number] = now_s - request.due_s - self.timeline.hop_s
        self.timeline.send(attempt.prefill.accept, attempt)
        return True

    def _look_at_line_later(self) -> None:
        if not self._line_looks:
            self._line_looks = True
            # Each heartbeat wakes the first in line.
            pause_s = min(PREFILL_LOOK_S, HEARTBEAT_INTERVAL_S / len(self.prefills))
            self.timeline.after(pause_s, self._look_at_line)

    def _look_at_line(self, _: None) -> None:
        self._line_looks = False
        if missing := missing_phases(self.view, MODEL):
            self._wait_for_instances(missing[0])
            return
        if self._unserved:
            self._line |= dict.fromkeys(self._unserved)
            self._unserved.clear()
        while self._line:
            request = next(iter(self._line))
            # A sent request may be refused at once.
            del self._line[request]
            if not self._send(request):
                self._line = {request: None, **self._line}
                self._look_at_line_later()
                return

    def _wait_for_instances(self, phase: Phase) -> None:
        """Hold all queued requests while `phase` has no instance; fail those that waited unavailable_after_s."""
        now_s = self.timeline.now_s
        for request in self._line:
            self._unserved.setdefault(request, now_s)
        self._line.clear()
        for request, since_s in tuple(self._unserved.items()):
            if now_s - since_s < self.spec.router.unavailable_after_s:
                break
            del self._unserved[request]
            self._fail(request, Unavailable(f"no {phase} instance", retry_after_s=1.0))
        if self._unserved:
            self._look_at_line_later()

    # Events of instances.

    def started(self, attempt: SimulatedAttempt) -> None:
        """Handle the start of a request's first prefill chunk."""
        self.timeline.send(self._confirm, attempt)

    def _confirm(self, attempt: SimulatedAttempt) -> None:
        self._unconfirmed.remove(attempt.key, attempt.prefill.record.instance_id)
        if self._line:
            self._look_at_line(None)

    def drew_first(self, attempt: SimulatedAttempt, drawn_s: float) -> None:
        """Record that the prefill instance sampled a token at `drawn_s`."""
        request = attempt.request
        request.generated = attempt.generated + 1
        request.last_token_s = drawn_s
        if not attempt.generated:
            self.table.times["first_s"][request.number] = drawn_s + 2 * self.timeline.hop_s
        if request.losses is not None:
            request.losses.drew(drawn_s)

    def finished(self, attempt: SimulatedAttempt, first_step_s: float = -1.0, preemptions: int = 0) -> None:
        """Record a request's last token. first_step_s: end of its first decode step; negative if there was none."""
        end_s = self.timeline.now_s
        attempt.is_over = True
        attempt.request.generated = attempt.request.output_tokens
        self.table.answered(attempt, end_s + 2 * self.timeline.hop_s, first_step_s, end_s, preemptions)
        self.on_end(attempt.request)

    def decode_lost(self, attempt: SimulatedAttempt) -> None:
        """Handle a decode instance's death: resume the request from its KV copy if possible, else retry or fail it."""
        attempt.is_over = True
        is_both = attempt.prefill is attempt.decode
        at_fault = attempt.prefill.record if is_both and attempt.resumed_from is None else None
        name = "its instance" if is_both else "the decode instance"
        self._set_back(attempt, Setback.LOST, at_fault, Unavailable(f"{name} has died"))

    def moved(self, attempt: SimulatedAttempt) -> None:
        """Let a request that has left its instance go on at the holder of its KV copy; costs no attempt."""
        attempt.is_over = True
        attempt.request.attempt_count -= 1
        assert attempt.replica is not None
        if self._is_usable(attempt.replica, attempt.request):
            self.moved_count += 1
            self._resume(attempt, attempt.replica)
        else:
            self._place(attempt.request)

    def not_resumed(self, attempt: SimulatedAttempt) -> None:
        """Handle an instance's refusal to resume a request from the KV copy that it holds."""
        attempt.is_over = True
        attempt.request.attempt_count -= 1
        attempt.replica = None
        self._set_back(attempt, Setback.REFUSED, None, NoCapacity("decode", 0.0))

    def resume_lost(self, attempt: SimulatedAttempt) -> None:
        """Handle the death of the instance that was to resume a request from its KV copy."""
        attempt.is_over = True
        self._set_back(attempt, Setback.LOST, None, Unavailable("the holder of its copy has died"))

    def lost(
        self,
        attempt: SimulatedAttempt,
        error: KaveriError,
        setback: Setback = Setback.LOST,
        retry_after_s: float = 0.0,
    ) -> None:
        """Handle the failure of an attempt (placement of a request) at prefill: retry, or fail the request."""
        self._confirm(attempt)
        attempt.is_over = True
        if setback in (Setback.FULL, Setback.UNREACHED):
            attempt.request.attempt_count -= 1
        if isinstance(error, _HOPELESS):
            self._fail(attempt.request, error)
        else:
            self._set_back(attempt, setback, attempt.prefill.record, error, retry_after_s)

    def _set_back(
        self,
        attempt: SimulatedAttempt,
        setback: Setback,
        at_fault: InstanceRecord | None,
        error: KaveriError,
        retry_after_s: float = 0.0,
    ) -> None:
        request, now_s = attempt.request, self.timeline.now_s
        limits = RetryLimits(self.spec.router.max_attempts, self.spec.router.unavailable_after_s)
        after = after_setback(request.retry, limits, setback, at_fault, now_s, self._rng.random(), retry_after_s)
        if after is None:
            self._fail(request, error)
            return
        request.retry = after
        if setback is Setback.LOST:
            request.losses = request.losses or LossAccount()
            request.losses.lost(now_s if math.isnan(request.last_token_s) else request.last_token_s)
        if attempt.replica is not None and self._is_usable(attempt.replica, request):
            self._resume(attempt, attempt.replica)
        else:
            self.timeline.at(max(now_s, after.pause_until_s), self._place, request)

    def _is_usable(self, replica: ReplicaLocation, request: SimulatedRequest) -> bool:
        holder = self.holders.get(replica.holder_id)
        if holder is None or holder.is_dead or holder.record.incarnation != replica.holder_incarnation:
            return False  # it is unreachable
        context_tokens = request.prompt_tokens + request.generated
        return is_worth_a_resume(replica, context_tokens, self.view, MODEL)

    def _resume(self, former: SimulatedAttempt, replica: ReplicaLocation) -> None:
        attempt = SimulatedAttempt(former.request, former.prefill)
        attempt.resumed_from = former.resumed_from or former
        attempt.replica = replica
        # The next token follows the last one.
        attempt.first_token_s = former.request.last_token_s
        self.timeline.post(self.holders[replica.holder_id].resume, attempt)

    def _fail(self, request: SimulatedRequest, error: KaveriError) -> None:
        self.table.failed(request, type(error).__name__, str(error))
        self.on_end(request)

    # Role of the cluster monitor.

    def wake_at_broadcast(self) -> None:
        """Schedule the next broadcast of loads as an event that wakes the prefill instances."""
        next_s = self.broadcasts.next_s()
        if self.broadcasts.scheduled_s < self.timeline.now_s:
            self.broadcasts.scheduled_s = next_s
            self.timeline.at(next_s, self._broadcast)

    def _broadcast(self, _: None) -> None:
        self.broadcasts.make()
        for prefill in self.prefills.values():
            prefill.broadcast_heard()

    def phases_changed(self) -> None:
        """Broadcast an instance's change of phases at once."""
        self.broadcasts.make(anew=True)
        self.on_phases()
        self.timeline.after(0.0, self._broadcast)

    def is_empty(self) -> bool:
        return not self._line and not len(self._unconfirmed)
