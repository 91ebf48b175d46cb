"""One colocated instance: passes the engine's events to both phases and reports one load for both."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kaveri.domain.view import InstanceLoad
from kaveri.engine.contract import EngineEvent
from services.decode.instance import DecodeInstance
from services.prefill.role import PrefillRole


class ColocatedInstance:
    """The EngineRole of a colocated instance. For one event loop.

    Prefill owns a request until its first token, decode from then on. Prefill hands it over in the same event-loop turn
    in which it receives that token, so exactly one phase owns it at any time.
    """

    def __init__(self, prefill: PrefillRole, decode: DecodeInstance) -> None:
        self._prefill = prefill
        self._decode = decode

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._prefill.run())
            tasks.create_task(self._decode.run())

    def handle(self, events: Sequence[EngineEvent]) -> None:
        # Prefill first: requests that it hands over are admitted in the same turn. Each ignores the other's requests.
        self._prefill.handle(events)
        self._decode.handle(events)

    def load(self) -> InstanceLoad:
        prefill, decode = self._prefill.load(), self._decode.load()
        return replace(
            decode,
            waiting_requests=prefill.waiting_requests + decode.waiting_requests,
            running_requests=prefill.running_requests + decode.running_requests,
            queued_prefill_tokens=prefill.queued_prefill_tokens,
            queue_room=prefill.queue_room,
        )

    def drain(self) -> None:
        self._prefill.drain()
        self._decode.drain()

    async def wait_idle(self) -> None:
        # In the order that requests pass through. New ones are refused by now.
        await self._prefill.wait_idle()
        await self._decode.wait_idle()

    def fail_all(self, reason: str) -> None:
        self._prefill.fail_all(reason)
        self._decode.fail_all(reason)
