"""Services as processes with a real Redis."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from kaveri.cluster.redis_store import RedisStore
from kaveri.config.services import ServiceKind, program_of
from kaveri.domain.view import InstanceStatus
from kaveri.local.process import ChildProcess

DEADLINE_S = 90.0


class ServiceProcesses:
    def __init__(self, redis_url: str, store: RedisStore, logs: Path) -> None:
        self._redis_url = redis_url
        self._store = store
        self._logs = logs
        self.children: list[ChildProcess] = []

    def start(self, role: str, instance_id: str, *flags: str, name: str = "") -> ChildProcess:
        name = name or instance_id
        command = [sys.executable, *program_of(ServiceKind(role)), "--instance-id", instance_id]
        child = ChildProcess.start(name, [*command, "--redis-url", self._redis_url, *flags], self._logs / f"{name}.log")
        self.children.append(child)
        return child

    def status(self, instance_id: str) -> InstanceStatus | None:
        return self._store.view().instances.get(instance_id)

    async def ready(self, instance_id: str) -> InstanceStatus:
        await self.eventually(lambda: self.status(instance_id) is not None, f"{instance_id} registers")
        status = self.status(instance_id)
        assert status is not None
        return status

    async def eventually(self, condition: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + DEADLINE_S
        while not condition():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self._logs.glob("*.log")}
            assert loop.time() < until_s, f"not within {DEADLINE_S} s: {what}\n{logs}"
            await asyncio.sleep(0.01)
