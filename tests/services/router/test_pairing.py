"""The loop of the router that leads: instances that are to be in pairs get a partner each."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Role
from kaveri.errors import Unavailable
from kaveri.policy.pairs import PartnerOrder
from services.router import metrics
from services.router.pairing import Pairing
from tests.services.router.scripted_answers import eventually

LOAD = InstanceLoad(partner_id="", replica_total_bytes=1)
VIEW = ClusterView(
    {name: InstanceStatus(InstanceRecord(name, 7, Role.ENGINE, "host:1", "model"), LOAD) for name in ("e0", "e1")}
)
EXPECTED = {"e0": PartnerOrder("e0", 7, "e1"), "e1": PartnerOrder("e1", 7, "e0")}


class Orders:
    """Records orders; each answer is accepted, refused or an error."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        self.partners: dict[str, PartnerOrder] = {}
        self.given: list[PartnerOrder] = []
        self._answer = answer

    async def set_partner(self, record: InstanceRecord, ordered: PartnerOrder) -> bool:
        self.given.append(ordered)
        accepted = self._answer()
        if accepted:
            self.partners[record.instance_id] = ordered
        return accepted


def pairing(orders: Orders, *, fencing_token: int = 7) -> tuple[Pairing, Any]:
    monitor: Any = SimpleNamespace(fencing_token=fencing_token)
    store: Any = SimpleNamespace(view=lambda: VIEW)
    sent: Any = orders
    return Pairing(store, sent, monitor), monitor


async def test_each_instance_gets_its_order_once_under_each_lead() -> None:
    orders = Orders(lambda: True)
    loop, monitor = pairing(orders)
    task = asyncio.create_task(loop.run(0.001))
    await eventually(lambda: len(orders.given) == 2)
    await asyncio.sleep(0.02)
    assert {order.instance_id: order for order in orders.given} == EXPECTED
    assert len(orders.given) == 2
    # It leads again at once. Another router has led meanwhile.
    monitor.fencing_token = 9
    await eventually(lambda: len(orders.given) == 4)
    monitor.fencing_token = 0
    await eventually(lambda: orders.partners == {})
    task.cancel()


async def test_an_order_that_fails_is_counted_logged_and_given_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away() -> bool:
        raise Unavailable("cut off")

    monkeypatch.setattr("services.router.pairing.CALL_TIMEOUT_S", 0.02)
    for answer in (lambda: False, away):
        before, orders = metrics.FLIPS_FAILED._value.get(), Orders(answer)
        loop, _ = pairing(orders)
        with capture_logs() as logs:
            task = asyncio.create_task(loop.run(0.001))
            await eventually(lambda given=orders.given: len(given) >= 4)
            task.cancel()
        assert metrics.FLIPS_FAILED._value.get() >= before + 3
        assert {(log["event"], log["instance_id"]) for log in logs} == {
            ("partner_order_failed", "e0"),
            ("partner_order_failed", "e1"),
        }


async def test_a_router_that_does_not_lead_gives_no_orders() -> None:
    orders = Orders(lambda: True)
    loop, _ = pairing(orders, fencing_token=0)
    task = asyncio.create_task(loop.run(0.001))
    await asyncio.sleep(0.02)
    task.cancel()
    assert orders.given == []


async def test_an_instance_that_has_not_taken_its_order_is_left_alone_for_a_while() -> None:
    orders = Orders(lambda: False)
    loop, _ = pairing(orders)
    task = asyncio.create_task(loop.run(0.001))
    await eventually(lambda: len(orders.given) == 2)
    await asyncio.sleep(0.05)
    task.cancel()
    assert {order.instance_id: order for order in orders.given} == EXPECTED
    assert len(orders.given) == 2
