"""Combines two servers of a process: one for its cluster, one for clients outside."""

import asyncio
from typing import Protocol


class ProcessServer(Protocol):
    """The server of a process. RpcServer is one."""

    @property
    def port(self) -> int:
        """Listening port, known after start()."""

    async def start(self) -> None:
        """Bind the address. Raises ConfigError."""

    async def ready(self) -> None:
        """Accept requests."""

    async def drain(self) -> None:
        """Report that no requests are accepted, until ready(). Those in flight continue."""

    async def stop(self, grace_s: float) -> None:
        """Refuse requests, give those in flight `grace_s` seconds, then end them. Idempotent."""


class ServerPair:
    """Two servers as one ProcessServer."""

    def __init__(self, inner: ProcessServer, public: ProcessServer) -> None:
        self._inner = inner
        self._public = public

    @property
    def port(self) -> int:
        """Port of the inner server."""
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
