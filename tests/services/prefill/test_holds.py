"""Holds whose push ends just when the decode instance that waits for it goes, over an engine that does nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest, KvPushFailed
from kaveri.errors import Unavailable
from services.prefill.holds import HoldName, Holds
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import HandOverReport, HoldOver, PrefillRequest, RoomReserved

KEY = EngineKey("r", 1)
TICKET: Any = SimpleNamespace(token_count=3)


class HoldBench:
    """One request that is held, and what is reported about it."""

    def __init__(self) -> None:
        layout = SimpleNamespace(block_count=lambda token_count: 1, block_tokens=4)
        engine: Any = SimpleNamespace(
            info=SimpleNamespace(layout=layout, total_blocks=8), push_to=lambda key, ticket: None
        )
        self.holds = Holds(engine, 1, 60.0, 1.0, 8, PrefillMetrics(CollectorRegistry()))
        self.reports: list[HandOverReport] = []
        engine_request = EngineRequest(KEY, (1, 2, 3), 0, ResolvedParams(max_tokens=2, seed=0))
        ownership = Ownership(Owner(0, 1), "leg-0")
        self.request = PrefillRequest(ownership, engine_request, 60.0, lambda _, report: self.reports.append(report))
        self.holds.begin(self.request)
        name = self.holds.name_of(self.request)
        assert name is not None
        self.name: HoldName = name

    async def pushing(self, decode_id: str) -> "asyncio.Task[None]":
        push = asyncio.create_task(self.holds.push(self.name, TICKET, RoomReserved(decode_id, 1)))
        await asyncio.sleep(0)
        return push

    def fail(self) -> None:
        self.holds.push_failed(self.request, KvPushFailed(KEY, "the link broke"))


async def test_a_leg_that_goes_when_its_push_has_just_failed_leaves_the_hold() -> None:
    bench = HoldBench()
    push = await bench.pushing("decode-0")
    bench.fail()
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    # It is there for another leg.
    assert bench.holds.name_of(bench.request) == bench.name
    assert not any(isinstance(report, HoldOver) for report in bench.reports)
    bench.holds.release(bench.name)


async def test_a_leg_that_goes_when_its_push_has_just_failed_ends_no_push_of_another_leg() -> None:
    bench = HoldBench()
    first = await bench.pushing("decode-0")
    # It begins before the first one hears of its failure.
    second = asyncio.create_task(bench.holds.push(bench.name, TICKET, RoomReserved("decode-1", 1)))
    bench.fail()
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    assert not second.done()
    assert not any(isinstance(report, HoldOver) for report in bench.reports)
    bench.fail()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(second, 20.0)
    bench.holds.release(bench.name)
