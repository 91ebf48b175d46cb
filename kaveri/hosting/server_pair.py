"""A process that listens twice: for its cluster, and for others."""

import asyncio
from typing import Protocol


class ProcessServer(Protocol):
    """The server of a process. RpcServer is one."""

    @property
    def port(self) -> int:
        """Where it listens, known after start()."""

    async def start(self) -> None:
        """Takes its address. Raises ConfigError."""

    async def ready(self) -> None:
        """Takes requests."""

    async def drain(self) -> None:
        """Says that it takes no requests, until ready(). Those in flight go on."""

    async def stop(self, grace_s: float) -> None:
        """Refuses requests, gives those in flight `grace_s` seconds, then ends them. Idempotent."""


class ServerPair:
    """Two servers as one ProcessServer."""

    def __init__(self, inner: ProcessServer, public: ProcessServer) -> None:
        self._inner = inner
        self._public = public

    @property
    def port(self) -> int:
        """Of the inner one."""
        return self._inner.port

    async def start(self) -> None:
        """See ProcessServer."""
        await self._inner.start()
        await self._public.start()

    async def ready(self) -> None:
        """See ProcessServer."""
        await self._inner.ready()
        await self._public.ready()

    async def drain(self) -> None:
        """See ProcessServer."""
        await self._public.drain()
        await self._inner.drain()

    async def stop(self, grace_s: float) -> None:
        """See ProcessServer."""
        await asyncio.gather(self._inner.stop(grace_s), self._public.stop(grace_s))
