"""The loop of the router that leads: what is decided is ordered, logged and counted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.errors import ConfigError, Unavailable
from kaveri.policy.flipping import FlipOrder, FlipPolicy, FlipRules, FlipState
from services.router import flipper, metrics
from services.router.config import RouterConfig
from services.router.flipper import Flipper
from tests.services.router.scripted_answers import eventually

RULES = FlipRules(policy=FlipPolicy.SLO, ttft_s=1.0, tpot_s=0.05)
RECORD = InstanceRecord("engine-0", 7, Role.ENGINE, "host:1", "model")
ORDER = FlipOrder("engine-0", 7, (Phase.PREFILL,), "backlog 1 s")


class Orders:
    def __init__(self, answer: Any) -> None:
        self.under_way: dict[str, Any] = {}
        self.given: list[tuple[str, tuple[Phase, ...]]] = []
        self._answer = answer

    async def set_phases(self, record: InstanceRecord, phases: tuple[Phase, ...]) -> Any:
        self.given.append((record.instance_id, phases))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class World:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: Any, *decided: FlipOrder, dry_run: bool = False
    ) -> None:
        self.orders = Orders(answer)
        self.monitor = SimpleNamespace(leading=True)
        self.states: list[FlipState] = []
        self.decided = list(decided)
        view = ClusterView({"engine-0": InstanceStatus(RECORD, InstanceLoad())})
        store: Any = SimpleNamespace(view=lambda: view)
        monkeypatch.setattr(flipper, "observe", self._observe)
        orders: Any = self.orders
        monitor: Any = self.monitor
        self.flipper = Flipper(RULES, dry_run, "model", store, orders, monitor)

    def _observe(self, *given: Any) -> tuple[tuple[FlipOrder, ...], FlipState]:
        self.states.append(given[-1])
        orders = (self.decided.pop(0),) if self.decided else ()
        return orders, FlipState(ordered_s=float(len(self.states)))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[list[Any]]:
        with capture_logs() as logs:
            task = asyncio.create_task(self.flipper.run(0.001))
            try:
                yield logs
            finally:
                task.cancel()


def failures() -> float:
    return metrics.FLIPS_FAILED._value.get()


async def test_a_decision_is_ordered_and_logged_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, SimpleNamespace(accepted=True), ORDER)
    async with world.running() as logs:
        await eventually(lambda: len(world.states) > 2)
    assert world.orders.given == [("engine-0", (Phase.PREFILL,))]
    assert [log["figures"] for log in logs if log["event"] == "flip_decided"] == ["backlog 1 s"]


@pytest.mark.parametrize(
    "answer",
    [Unavailable("cut off"), None, SimpleNamespace(accepted=False)],
    ids=["no answer", "not leading", "refused"],
)
async def test_an_order_that_fails_is_counted_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    before = failures()
    world = World(monkeypatch, answer, ORDER)
    async with world.running() as logs:
        await eventually(lambda: len(world.states) > 2)
    assert failures() == before + 1
    assert [log["event"] for log in logs] == ["flip_decided", "flip_failed"]


async def test_a_dry_run_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, None, ORDER, dry_run=True)
    async with world.running() as logs:
        await eventually(lambda: len(world.states) > 1)
    assert (world.orders.given, [log["dry_run"] for log in logs]) == ([], [True])


async def test_no_order_goes_to_another_life_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, None, FlipOrder("engine-0", 8, (Phase.DECODE,), ""), FlipOrder("gone", 1, (), ""))
    async with world.running():
        await eventually(lambda: len(world.states) > 2)
    assert world.orders.given == []


async def test_a_router_that_leads_again_begins_with_an_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, None)
    async with world.running():
        await eventually(lambda: len(world.states) > 1)
        assert world.states[-1] != FlipState()
        world.monitor.leading = False
        await eventually(lambda: world.flipper._state == FlipState())
        seen = len(world.states)
        world.monitor.leading = True
        await eventually(lambda: len(world.states) > seen)
    assert world.states[seen] == FlipState()


def test_the_policy_is_slo_once_both_targets_are_given() -> None:
    def policy(**settings: Any) -> FlipPolicy:
        return RouterConfig(**settings).flip_rules.policy

    assert policy() is FlipPolicy.NONE
    assert policy(slo_ttft_s=1.0) is FlipPolicy.NONE
    assert policy(slo_ttft_s=1.0, slo_tpot_s=0.05) is FlipPolicy.SLO
    assert policy(slo_ttft_s=1.0, slo_tpot_s=0.05, flip_policy="none") is FlipPolicy.NONE
    with pytest.raises(ConfigError, match="--slo-tpot-s"):
        policy(flip_policy="slo", slo_ttft_s=1.0)
