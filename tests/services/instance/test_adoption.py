"""Hand-over to the decode side of the same instance, without an engine."""

import asyncio
import random
from typing import Any

import pytest

from kaveri.domain.owner import Ownership, Term
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.feeds.feed import RouterFeed
from kaveri.lives.prompt import Adopted, FirstTokenDrawn, RoomReserved
from services.prefill import decode_placer
from services.prefill.decode_placer import DecodePlacer
from services.prefill.requests import PrefillRequest
from tests.services.prefill.scripted import MODEL, ScriptedEngine, new_metrics, params


class Turns:
    """Records in order what happens to a request whose first token is drawn."""

    def __init__(self, runs_ahead: bool = False) -> None:
        self.happened: list[str] = []
        engine: Any = ScriptedEngine(runs_ahead=runs_ahead)
        self.hand_over = DecodePlacer(
            engine,
            None,
            MODEL,
            new_metrics(),
            random.Random(0),
            decodes_here=lambda: True,
            adopt=self.adopt,  # type: ignore[arg-type]
        )
        self.hand_over.report = self.report
        sent = EngineRequest(EngineKey("a", 1), (1, 2), 0, params(2), stays=True)
        self.reported = asyncio.Event()
        self.feed = RouterFeed("router", ())
        self.request = PrefillRequest("a", Ownership(Term(0, 1), "router"), sent, 2, 1.0)

    def report(self, _: PrefillRequest, report: object) -> None:
        self.happened.append(type(report).__name__)
        self.reported.set()

    def adopt(self, _: PrefillRequest) -> Adopted:
        self.happened.append("adopted")
        return Adopted(RoomReserved("colocated-0", 1))

    async def read(self) -> None:
        await self.feed.take()
        self.happened.append("read")

    def draw(self) -> None:
        self.request.log.put(FirstTokenDrawn(7, None, None, 0.1))
        self.feed.add(self.request)
        self.hand_over.begin(self.request)

    async def pass_by(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


async def test_a_first_token_is_read_before_its_request_is_adopted() -> None:
    turns = Turns()
    reader = asyncio.create_task(turns.read())
    await turns.pass_by()
    turns.draw()
    await asyncio.wait_for(turns.reported.wait(), 60)
    await reader
    assert turns.happened == ["read", "adopted", "Adopted"]


async def test_an_engine_that_runs_ahead_decodes_while_the_first_token_goes_to_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than this machine may stall.
    monkeypatch.setattr(decode_placer, "_AFTER_FIRST_TOKEN_S", 1.0)
    turns = Turns(runs_ahead=True)
    turns.draw()
    await turns.pass_by()
    assert turns.happened == []
    await asyncio.wait_for(turns.reported.wait(), 60)
    assert turns.happened == ["adopted", "Adopted"]


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_a_request_that_ends_behind_its_first_token_is_not_adopted(runs_ahead: bool) -> None:
    turns = Turns(runs_ahead)
    turns.draw()
    turns.hand_over.end(turns.request, False)
    assert not turns.hand_over._placements
    later = Turns(runs_ahead)
    later.draw()
    await asyncio.wait_for(later.reported.wait(), 60)
    assert turns.happened == []
