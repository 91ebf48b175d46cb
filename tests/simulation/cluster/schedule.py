"""Runs one plan from beginning to end: load under faults, then none, then rest; and what is found on the way.

Two phases. In the first faults happen under load, and nothing that any client sees may be wrong. Then the faults end:
links are whole, dead instances live again. From there on everything must finish within a bound, new requests succeed,
and nothing is left of the old ones. Faults that heal by themselves would hide what never ends.
"""

import asyncio
import contextlib
import gc
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import structlog

from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import Phase
from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster.checks import CHECKS, Check, may_be_suspected
from tests.simulation.cluster.clients import Clients
from tests.simulation.cluster.draw import draw_prompt
from tests.simulation.cluster.entropy import DrawnIds, import_services, replaced_world
from tests.simulation.cluster.faults import Faults
from tests.simulation.cluster.loop import SimulatedLoop, Stuck
from tests.simulation.cluster.network import Network
from tests.simulation.cluster.plan import Plan, ScheduledRequest
from tests.simulation.cluster.rest import extra_tasks, leftovers, unpaired
from tests.simulation.cluster.tokenizer import make_tokenizer
from tests.simulation.cluster.trace import Trace
from tests.simulation.cluster.watched_lives import watched_lives
from tests.simulation.cluster.world import PROBER, World

READY_WITHIN_S = 10.0
FINISH_WITHIN_S = 30.0
"""Everything that was sent before the faults ended has ended so many seconds after, or as soon as engines that run one
request at a time would have drawn all tokens, if that is later: some pools hold little more than one request."""
_LATEST_FINISH_S = 90.0
"""Before the deadline of a request that hangs."""
PROBE_WITHIN_S = 20.0
REST_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05
_MOST_VIRTUAL_S = 600.0


@dataclass(slots=True)
class ScheduleResult:
    """How one schedule ended."""

    plan: Plan
    violations: list[str]
    hash: str
    virtual_s: float
    callbacks: int
    counts: Counter[str]
    """Events by kind; faults as fault:kind."""
    lines: list[str] = field(default_factory=list)
    """The trace, where it was asked for."""


def simulated_tokenizer(*, chats: bool = False) -> ModelTokenizer:
    """The router's tokenizer; any number of schedules may share one. chats: with a chat template."""
    tokenizer = make_tokenizer(chats=chats)
    return ModelTokenizer(tokenizer, len(tokenizer))


@cache
def _chat_tokenizer() -> ModelTokenizer:
    return simulated_tokenizer(chats=True)


def run_schedule(
    plan: Plan, tokenizer: ModelTokenizer, checks: Sequence[Check] = CHECKS, *, lines: bool = False
) -> ScheduleResult:
    """Runs the plan. tokenizer: of plans without chats. checks: called at the end. lines: keep the trace as text."""
    import_services()
    if plan.has_chats:
        tokenizer = _chat_tokenizer()
    logs = structlog.get_config()
    collects = gc.isenabled()
    gc.disable()
    try:
        result = _simulate(plan, tokenizer, checks, lines)
        _collect()
        return result
    finally:
        structlog.configure(**logs)
        if collects:
            gc.enable()


def _simulate(plan: Plan, tokenizer: ModelTokenizer, checks: Sequence[Check], lines: bool) -> ScheduleResult:
    rng = random.Random(plan.seed)
    loop = SimulatedLoop(_branch(rng))
    trace = Trace(loop, lines)
    network = Network(loop, _branch(rng), trace, plan.link)
    violations: list[str] = []
    with contextlib.ExitStack() as stack:
        drawn_ids = DrawnIds()
        stack.enter_context(replaced_world(loop, network, _branch(rng), drawn_ids))
        world = World(plan, loop, network, trace, tokenizer, _branch(rng), drawn_ids)
        stack.enter_context(watched_lives(world))
        structlog.configure(
            processors=[_LogTap(world)],
            wrapper_class=structlog.make_filtering_bound_logger(20),
            cache_logger_on_first_use=False,
        )
        try:
            loop.run_until_complete(loop.create_task(_run(world)))
        except Stuck as error:
            world.violations.append(f"the simulation is stuck: {error}")
        world.violations += [f"not caught: {error}" for error in loop.unhandled]
        for check in checks:
            world.violations += check(world)
        violations += world.violations
        trace.note("end", str(loop.callback_count))
        loop.close()
    return ScheduleResult(
        plan, violations, trace.hexdigest(), loop.elapsed_s, loop.callback_count, trace.counts, trace.lines
    )


def _branch(rng: random.Random) -> random.Random:
    return random.Random(rng.getrandbits(64))


def _collect() -> None:
    """Frees what the simulated processes left behind. Their clean-up runs only now, and means nothing."""
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    # asyncio.gather() in a clean-up would make a loop of its own here, which keeps the whole simulated cluster.
    asyncio.set_event_loop(None)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
            # What a clean-up of the first time has made, such as the coroutines that it wanted to wait for.
            gc.collect()
    finally:
        sys.unraisablehook = hook


def _drop(logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent


def _finish_within_s(plan: Plan) -> float:
    tokens = sum(request.params.max_tokens or plan.max_model_len for request in plan.requests)
    tokens_per_s = sum(1 / engine.step_s for engine in plan.serving(Phase.DECODE))
    return min(_LATEST_FINISH_S, max(FINISH_WITHIN_S, tokens / tokens_per_s))


async def _run(world: World) -> None:
    plan = world.plan
    for name in plan.names:
        world.start(name)
    if not await _until(world, lambda: _all_known(world) and not leftovers(world), READY_WITHIN_S):
        world.violations.append(f"the cluster was not ready after {READY_WITHIN_S} s")
        return
    world.usual_tasks = world.task_counts()
    world.ready_s = world.now()
    world.trace.note("phase:load", "")
    clients = Clients(world)
    sending = [_at(world, request, clients) for request in plan.requests]
    faults = Faults(world)
    await faults.run()
    world.trace.note("phase:recovery", "")
    await faults.end()
    world.healed_s = world.now()
    within_s = _finish_within_s(plan)
    if not await _until(world, lambda: all(task.done() or world.is_gone(task) for task in sending), within_s):
        world.violations += [
            f"{outcome.request_id} sent to {outcome.router} at {outcome.started_s - world.ready_s:.3f} s has not ended "
            f"{within_s:.1f} s after the last fault"
            for outcome in world.outcomes
            if outcome.ended_s is None and not outcome.gone
        ]
        return
    world.trace.note("phase:probes", "")
    if not await _until(world, lambda: _all_known(world), READY_WITHIN_S):
        world.violations.append(f"the cluster was not whole again {READY_WITHIN_S} s after the last fault")
        return
    probes = [_at(world, probe, clients, probe=True) for probe in _probes(world)]
    if not await _until(world, lambda: all(task.done() for task in probes), PROBE_WITHIN_S):
        world.violations.append(f"a request sent after the faults has not ended within {PROBE_WITHIN_S} s")
        return
    for outcome in world.outcomes:
        if outcome.probe and outcome.finish is None:
            world.violations.append(f"{outcome.request_id}, sent after the faults, failed: {outcome.error!r}")
    world.trace.note("phase:rest", "")
    clients.end_streams()
    await _until(world, lambda: not (leftovers(world) or extra_tasks(world) or unpaired(world)), REST_WITHIN_S)
    world.violations += leftovers(world) + extra_tasks(world) + unpaired(world)


def _at(world: World, request: ScheduledRequest, clients: Clients, probe: bool = False) -> asyncio.Task[None]:
    """Sends a request at its time, in its client's process."""

    async def send() -> None:
        await asyncio.sleep(max(0.0, world.ready_s + request.at_s - world.now()))
        await clients.send(request, probe)

    return world.loop.spawn(world.clients[request.client], send())


def _probes(world: World) -> list[ScheduledRequest]:
    rng = random.Random(world.plan.seed + 1)
    return [
        ScheduledRequest(
            request_id=f"probe-{router.name}-{number}",
            client=PROBER,
            router=router.name,
            at_s=0.0,
            prompt=draw_prompt(rng, 1 + rng.randrange(60)),
            params=SamplingParams(max_tokens=1 + rng.randrange(12), temperature=0.0, ignore_eos=True),
        )
        for router in world.plan.routers
        for number in range(world.plan.probes_per_router)
    ]


def _all_known(world: World) -> bool:
    """Whether every instance lives, and every router knows and follows all of them."""
    lives = list(world.lives.values())
    if any(life.ended or life.serving is None for life in lives):
        return False
    records = {life.name: life for life in lives}
    for life in lives:
        if life.router is None:
            continue
        view = life.router.store.view()
        if not view.store_connected or view.instances.keys() != records.keys():
            return False
        if any(status.record.address != records[name].address for name, status in view.instances.items()):
            return False
    return True


async def _until(world: World, condition: Callable[[], bool], within_s: float) -> bool:
    until_s = world.now() + within_s
    while not condition():
        if world.now() >= until_s:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


class _LogTap:
    """Takes the services' log lines into the trace; errors are violations unless a fault explains them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        world = self._world
        exc_info = event.pop("exc_info", None)
        what = event.pop("event")
        shown = " ".join(f"{key}={value}" for key, value in event.items())
        world.trace.note("log", f"{method} {what} {shown}")
        if method in ("error", "exception", "critical") and not world.expected_errors:
            world.violations.append(f"{world.loop.current} logged an error: {what} {shown} {exc_info or ''}")
        if what == "stream_broken" and "it sent nothing" in str(event["error"]):
            router, instance = world.loop.current.name, event["instance_id"]
            if not may_be_suspected(world.plan, router, instance, world.now() - world.ready_s):
                world.violations.append(f"{router} suspects {instance}, which nothing has kept from sending")
        raise structlog.DropEvent
