"""Cancels the work for a client that has disconnected."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from services.gateway.body import ClientGone


class UntilGone:
    """Cancels the work in its context when the client disconnects, and raises ClientGone. The request's body must have
    been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[object] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watching = asyncio.create_task(self._watch(), name="gateway client watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self._watching is not None
        self._watching.cancel()
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGone from error

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._task is not None
        self._gone = True
        self._task.cancel()
