import asyncio
from collections.abc import Sequence

from kaveri.domain.view import DrainWay, InstanceLoad
from kaveri.engine.contract import EngineEvent


class IdleService:
    """A HostedService without requests, for tests to extend. Records drains, events and failures."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[EngineEvent] = []
        self.failed_with = ""

    @property
    def is_idle(self) -> bool:
        return True

    async def run(self) -> None:
        await asyncio.Event().wait()

    def handle(self, events: Sequence[EngineEvent]) -> None:
        self.events += events

    def load(self) -> InstanceLoad:
        return InstanceLoad()

    def drain(self, retry_after_s: float = 1.0, way: DrainWay = DrainWay.MIGRATE) -> None:
        self.calls.append("drain")

    def undrain(self) -> None:
        self.calls.append("undrain")

    async def wait_idle(self) -> None:
        pass

    def fail_all(self, reason: str) -> None:
        self.failed_with = reason
