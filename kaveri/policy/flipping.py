"""Decides which phases (prefill, decode) the instances of a cluster serve. Pure: no clock, no I/O.

The router that leads calls observe() at an interval. Two policies decide:

    idle  an instance that has been almost idle for a minute changes its phase if the other phase has work (TetriInfer,
          arXiv 2401.11181, section 3.5)
    slo   an instance changes its phase when a target of TTFT or TPOT is about to be missed and the other one is not

A flip that no target needs costs two drains and gains nothing, so `slo` acts near the targets only. Of a pair
(kaveri.policy.pairs) one instance decodes while the other one prefills, as long as others can change (AcceLLM, arXiv
2411.05555, section 4.2.1).
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kaveri.domain.view import (
    BOTH_PHASES,
    FIRST_ORDER,
    ClusterView,
    InstanceLoad,
    InstanceState,
    Phase,
    PhaseOrder,
    Role,
    ViewedInstance,
    accepts,
    is_late,
    phases_now,
)
from kaveri.errors import ConfigError, InvalidArgument

_SMOOTH_S = 0.5
"""Time over which the backlog of prompts is averaged, in seconds."""
_FIT_S = 30.0
"""Time over which measured step times count for the model of a step."""


class FlipPolicy(enum.StrEnum):
    """Policy for changing the phases of instances."""

    NONE = "none"
    IDLE = "idle"
    SLO = "slo"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipRules:
    """Settings of the decisions. Times are in seconds. Raises ConfigError."""

    policy: FlipPolicy = FlipPolicy.NONE
    ttft_s: float = 0.0
    """Target of the time to first token; needed by `slo`."""
    tpot_s: float = 0.0
    """Target of the time per output token; needed by `slo`."""
    min_prefill: int = 1
    min_decode: int = 1
    cooldown_s: float = 1.0
    """Min time between two flips."""
    backlog_share: float = 0.6
    """`slo`: share of ttft_s that the prompts waiting may take to compute; above, one more instance prefills."""
    calm_share: float = 0.08
    """`slo`: share of ttft_s below which prefill has an instance to spare, on average over half a second."""
    step_share: float = 0.88
    """`slo`: share of tpot_s above which one more instance decodes if prefill can spare one."""
    step_most_share: float = 1.0
    """`slo`: share of tpot_s above which one more decodes although prefill has work, and which a flip to prefill must
    not exceed."""
    late_step_share: float = 2.0
    """`slo`: the share that a flip to prefill must not exceed once the waiting prompts take longer than ttft_s."""
    idle_share: float = 0.1
    """`idle`: an instance is idle below this share of the mean load of its phase."""
    idle_s: float = 60.0
    """`idle`: time for which an instance is idle before it flips."""

    def __post_init__(self) -> None:
        for name in ("min_prefill", "min_decode"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"is {getattr(self, name)}; at least 1 instance must serve each phase")
        if self.policy is FlipPolicy.SLO:
            for name in ("ttft_s", "tpot_s"):
                if not 0 < getattr(self, name) < math.inf:
                    raise ConfigError(f"slo_{name}", f"is {getattr(self, name):g}; the policy slo needs both targets")
        limits = {
            "calm_share": (0.0, self.backlog_share),
            "backlog_share": (0.0, 1.0),
            "step_share": (0.0, self.step_most_share),
            "step_most_share": (0.0, 1.0),
            "late_step_share": (0.0, math.inf),
            "idle_share": (0.0, 1.0),
            "idle_s": (0.0, math.inf),
            "cooldown_s": (0.0, math.inf),
        }
        # Check the outer limits first, so that the error names the setting that is out of range.
        for name, (above, most) in sorted(limits.items(), key=lambda item: item[0] in ("calm_share", "step_share")):
            value = getattr(self, name)
            if not above < value <= most or value == math.inf:
                raise ConfigError(name, f"is {value:g}; it must be above {above:g} and at most {most:g}")
        if self.late_step_share < self.step_most_share:
            reason = f"is {self.late_step_share:g}; it must be at least step_most_share, {self.step_most_share:g}"
            raise ConfigError("late_step_share", reason)


def first_prefill_count(instances: int, rules: FlipRules) -> int:
    """Return how many of `instances` dynamic instances start with prefill: half of them, within the minima."""
    return max(rules.min_prefill, min((instances + 1) // 2, instances - rules.min_decode))


@dataclass(frozen=True, slots=True)
class OrderedPhases:
    """Order that was sent to one incarnation of an instance, whose load may not show it yet."""

    incarnation: int
    order: PhaseOrder
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """Decision that an instance shall serve `phases` from now on."""

    instance_id: str
    incarnation: int
    phases: tuple[Phase, ...]
    reason: str
    """Figures that the decision was made from, for the log."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Line through measured decode steps: step_s = base + slope * context tokens of the batch; old ones fade."""

    weight: float = 0.0
    context: float = 0.0
    step_s: float = 0.0
    context_2: float = 0.0
    context_step: float = 0.0
    """Sums, each weighted by age: of 1, context, step time, context squared, context times step time."""

    def faded(self, elapsed_s: float) -> "StepModel":
        left = math.exp(-elapsed_s / _FIT_S)
        return StepModel(
            self.weight * left,
            self.context * left,
            self.step_s * left,
            self.context_2 * left,
            self.context_step * left,
        )

    def with_step(self, context_tokens: int, step_s: float) -> "StepModel":
        return StepModel(
            self.weight + 1.0,
            self.context + context_tokens,
            self.step_s + step_s,
            self.context_2 + context_tokens**2,
            self.context_step + context_tokens * step_s,
        )

    def scaled(self, context_tokens: float, step_s: float, share: float) -> float:
        """Return the step time of a batch `share` times as large as one that takes step_s: by the slope of the line or,
        if the contexts measured hardly differ, in proportion, which is too high for share > 1."""
        spread = self.weight * self.context_2 - self.context**2
        if spread <= 1e-3 * self.weight * self.context_2:
            return step_s * share
        slope = (self.weight * self.context_step - self.context * self.step_s) / spread
        return step_s + max(0.0, min(slope * context_tokens, step_s)) * (share - 1)


@dataclass(frozen=True, slots=True)
class FlipState:
    """Memory between two calls of observe(). A new leader begins with an empty one."""

    observed_s: float = -math.inf
    """Time of the last call."""
    ordered_s: float = -math.inf
    """Time of the last order."""
    backlog_s: float = 0.0
    """Smoothed seconds of prefill that wait per prefill instance."""
    steps: StepModel = StepModel()
    seen: Mapping[str, int] = field(default_factory=dict)
    """Sequence number of the last heartbeat measured, by instance id."""
    idle_since_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Time since which an instance is idle, by id and incarnation."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """Instances by the phases that they take requests for; those whose heartbeats are late are left out."""

    prefill: Sequence[ViewedInstance]
    decode: Sequence[ViewedInstance]
    both: Sequence[ViewedInstance]
    settled: bool
    """The loads show every order."""


def observe(
    view: ClusterView,
    model: str,
    rules: FlipRules,
    under_way: Mapping[str, OrderedPhases],
    now_s: float,
    state: FlipState,
) -> tuple[tuple[FlipOrder, ...], FlipState]:
    """Return the orders to give now, and the state for the next call.

    under_way: the newest order sent to each instance. Without the store, or while the heartbeats of more than half of
    the instances are late, nothing is decided. Instances that serve both phases by their command keep them."""
    if rules.policy is FlipPolicy.NONE:
        return (), state
    engines = [
        one for _, one in sorted(view.instances.items()) if one.record.model == model and one.record.role is Role.ENGINE
    ]
    heard = [one for one in engines if not is_late(one)]
    phases, elapsed_s = _by_phase(heard, under_way), now_s - state.observed_s
    state = replace(_measured(heard, elapsed_s, state), observed_s=now_s)
    if not view.store_connected or 2 * len(heard) < len(engines):
        return (), state
    state = replace(state, backlog_s=_smoothed(_backlog_s(phases.prefill), elapsed_s, state.backlog_s))
    order: FlipOrder | None = None
    if not phases.both and not (phases.prefill and phases.decode):
        order = _replacement(phases)
    elif now_s - state.ordered_s < rules.cooldown_s or not phases.settled:
        order = None
    elif (order := _separation(phases)) is not None:
        pass
    elif rules.policy is FlipPolicy.SLO:
        order = _slo(phases, rules, state)
    else:
        order, state = _idle(phases, rules, now_s, state)
    if order is None:
        return (), state
    return (order,), replace(state, ordered_s=now_s)


def _measured(heard: Sequence[ViewedInstance], elapsed_s: float, state: FlipState) -> FlipState:
    """Add the step times of new heartbeats to the model of a step."""
    steps = state.steps.faded(elapsed_s) if elapsed_s < math.inf else state.steps
    seen = {one.record.instance_id: one.load.sequence_number for one in heard}
    for one in heard:
        load = one.load
        if load.step_s > 0 and state.seen.get(one.record.instance_id) != load.sequence_number:
            steps = steps.with_step(load.context_tokens, load.step_s)
    return replace(state, steps=steps, seen=seen)


def _by_phase(heard: Sequence[ViewedInstance], under_way: Mapping[str, OrderedPhases]) -> _Phases:
    served = {one.record.instance_id: _accepted(one, under_way) for one in heard}

    def serving(*phases: Phase) -> list[ViewedInstance]:
        return [one for one in heard if served[one.record.instance_id] == frozenset(phases)]

    settled = not any(
        (newest := under_way.get(one.record.instance_id)) is not None
        and newest.incarnation == one.record.incarnation
        and newest.order > one.load.phase_order
        for one in heard
    )
    return _Phases(serving(Phase.PREFILL), serving(Phase.DECODE), serving(*BOTH_PHASES), settled)


def _can_change(one: ViewedInstance) -> bool:
    return set(one.record.phases) == set(BOTH_PHASES)


def _backlog_s(prefills: Sequence[ViewedInstance]) -> float | None:
    """Seconds of prefill that wait per instance; None while no instance has measured its speed."""
    rates = [one.load.prefill_tokens_per_s for one in prefills if one.load.prefill_tokens_per_s > 0]
    if not rates:
        return None
    queued_tokens = sum(one.load.queued_prefill_tokens for one in prefills)
    return queued_tokens / (sum(rates) / len(rates) * len(prefills))


def _smoothed(backlog_s: float | None, elapsed_s: float, former_s: float) -> float:
    if backlog_s is None:
        return former_s
    return backlog_s + (former_s - backlog_s) * math.exp(-elapsed_s / _SMOOTH_S)


def _step_s(decodes: Sequence[ViewedInstance], steps: StepModel, count: int) -> float:
    """Model the time per token if `count` instances shared the requests of `decodes` evenly.

    If requests wait for a place in a batch, the time grows by the ratio of requests to batch places."""
    running = [one for one in decodes if one.load.step_s > 0]
    if not running:
        return 0.0
    context = sum(one.load.context_tokens for one in running) / len(running)
    step_s = sum(one.load.step_s for one in running) / len(running)
    # Idle instances count as well: they could take over requests of the others.
    share = len(running) / count
    ran = sum(one.load.running_requests for one in running)
    waited = sum(one.load.waiting_requests for one in decodes)
    crowded = (ran + waited) / ran * share if waited and ran else 1.0
    return steps.scaled(context, step_s, share) * max(1.0, crowded)


def _slo(phases: _Phases, rules: FlipRules, state: FlipState) -> FlipOrder | None:
    prefills, decodes = phases.prefill, phases.decode
    backlog_s = _backlog_s(prefills) or 0.0
    step_s = _step_s(decodes, state.steps, len(decodes))
    figures = f"backlog {backlog_s:.3f} s, smoothed {state.backlog_s:.3f} s, step {1e3 * step_s:.1f} ms"
    if backlog_s > rules.backlog_share * rules.ttft_s:
        able = [one for one in decodes if _can_change(one)]
        if not able or len(decodes) <= rules.min_decode:
            return None
        fewer_s = _step_s(decodes, state.steps, len(decodes) - 1)
        # Once waiting alone misses the target, every new request does, and steps may miss theirs for a while.
        most_share = rules.late_step_share if backlog_s > rules.ttft_s else rules.step_most_share
        if fewer_s < most_share * rules.tpot_s:
            chosen = _first(able, prefills, lambda load: load.context_tokens)
            return _flip(chosen, Phase.PREFILL, f"{figures}, {1e3 * fewer_s:.1f} ms with one less")
        return None
    able = [one for one in prefills if _can_change(one)]
    spare = state.backlog_s < rules.calm_share * rules.ttft_s and step_s > rules.step_share * rules.tpot_s
    must = step_s > rules.step_most_share * rules.tpot_s
    if able and len(prefills) > rules.min_prefill and (spare or must):
        chosen = _first(able, decodes, lambda load: load.queued_prefill_tokens)
        return _flip(chosen, Phase.DECODE, figures)
    return None


def _first(
    able: Sequence[ViewedInstance], serving: Sequence[ViewedInstance], work: Callable[[InstanceLoad], int]
) -> ViewedInstance:
    """Return the instance to join those that are `serving` a phase: preferably one whose partner does not, with the
    least work."""
    ids = {one.record.instance_id for one in serving}
    return min(able, key=lambda one: (one.load.partner_id in ids, work(one.load), one.record.instance_id))


def _idle(phases: _Phases, rules: FlipRules, now_s: float, state: FlipState) -> tuple[FlipOrder | None, FlipState]:
    """TetriInfer, section 3.5: flip an instance that has been idle for idle_s while the other phase has work."""
    groups = ((phases.prefill, Phase.DECODE, rules.min_prefill), (phases.decode, Phase.PREFILL, rules.min_decode))
    idle: dict[tuple[str, int], float] = {}
    order: FlipOrder | None = None
    for group, to, least in groups:
        mean = sum(map(_requests, group)) / max(1, len(group))
        others = phases.decode if to is Phase.DECODE else phases.prefill
        for one in filter(_can_change, group):
            if _requests(one) > rules.idle_share * mean:
                continue
            life = one.record.instance_id, one.record.incarnation
            since_s = idle[life] = state.idle_since_s.get(life, now_s)
            is_due = now_s - since_s >= rules.idle_s and len(group) > least
            if order is None and is_due and any(map(_requests, others)):
                order = _flip(one, to, f"idle for {now_s - since_s:.0f} s")
    if order is not None:
        idle.pop((order.instance_id, order.incarnation))
    return order, replace(state, idle_since_s=idle)


def _requests(one: ViewedInstance) -> int:
    return one.load.running_requests + one.load.waiting_requests


def _replacement(phases: _Phases) -> FlipOrder | None:
    """Replace the last instance of a phase by the one with the least work. If only one instance is left, it serves both
    phases."""
    left = (*phases.prefill, *phases.decode)
    able = list(filter(_can_change, left))
    if not able:
        return None
    missing = Phase.DECODE if not phases.decode else Phase.PREFILL
    chosen = min(able, key=lambda one: (_requests(one), one.record.instance_id))
    served = (missing,) if len(left) > 1 else BOTH_PHASES
    return FlipOrder(chosen.record.instance_id, chosen.record.incarnation, served, f"no instance serves {missing}")


def _separation(phases: _Phases) -> FlipOrder | None:
    """Flip an instance that was ordered to serve both phases as the only one left, once others are back, to the phase
    that fewer of them serve."""
    ordered = [one for one in phases.both if one.load.phase_order > FIRST_ORDER]
    if not ordered or not (phases.prefill or phases.decode):
        return None
    to = Phase.DECODE if len(phases.decode) <= len(phases.prefill) else Phase.PREFILL
    return _flip(ordered[0], to, f"{len(phases.prefill)} others prefill, {len(phases.decode)} decode")


def _flip(one: ViewedInstance, to: Phase, reason: str) -> FlipOrder:
    return FlipOrder(one.record.instance_id, one.record.incarnation, (to,), reason)


def check_order(
    view: ClusterView,
    instance_id: str,
    phases: tuple[Phase, ...],
    under_way: Mapping[str, OrderedPhases],
) -> None:
    """Raise InvalidArgument if the instance cannot serve exactly these phases, or the cluster would then lack an
    instance that computes prompts, one that draws tokens, or one that takes the KV of a prefill instance. Instances
    whose heartbeats are late do not count.

    instance_id: of an instance in the view. under_way: the newest order sent to each instance.
    """
    instance = view.instances[instance_id]
    able, model = instance.record.phases, instance.record.model
    if instance.record.role is not Role.ENGINE:
        raise InvalidArgument("instance_id", instance_id, f"of an engine, not of a {instance.record.role}")
    unable = [phase for phase in phases if phase not in able]
    if unable:
        raise InvalidArgument("phases", unable[0].value, f"of {', '.join(able)}, which {instance_id} can serve")
    shown = "+".join(phases) or "none"
    served = {
        one.record.instance_id: _accepted(one, under_way)
        for one in view.instances.values()
        if one.record.role is Role.ENGINE and one.record.model == model and (one is instance or not is_late(one))
    }
    before, after = served.values(), {**served, instance_id: frozenset(phases)}.values()
    for phase in Phase:
        if any(phase in each for each in before) and not any(phase in each for each in after):
            raise InvalidArgument("phases", shown, f"with {phase}: no other instance serves it")
    takes_kv, gives_kv = frozenset((Phase.DECODE,)), frozenset((Phase.PREFILL,))
    if gives_kv in after and takes_kv not in after:
        limit = "such that one instance serves decode only: prefill instances push their KV to it"
        raise InvalidArgument("phases", shown, limit)


def _accepted(instance: ViewedInstance, under_way: Mapping[str, OrderedPhases]) -> frozenset[Phase]:
    """Phases that the instance takes requests for once its newest order is carried out."""
    newest = under_way.get(instance.record.instance_id)
    if (
        newest is not None
        and instance.load.state is InstanceState.READY
        and newest.incarnation == instance.record.incarnation
        and newest.order > instance.load.phase_order
    ):
        return frozenset(newest.phases)
    return frozenset(phase for phase in phases_now(instance) if accepts(instance, phase))
