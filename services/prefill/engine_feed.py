"""Submits queued prompts to the engine as late as possible."""

import asyncio
from collections.abc import Callable, Collection

from kaveri.engine.contract import PrefillEngine
from kaveri.errors import EngineError, InvalidArgument, NoCapacity
from kaveri.policy.prompt_queue import PromptQueue
from kaveri.policy.waits import PROMPT_BLOCKS_RETRY_S as _BLOCKS_RETRY_S
from services.prefill.requests import HandOverFailed, PrefillRequest

HasRoom = Callable[[PrefillRequest, Collection[PrefillRequest]], bool]
"""True if a prompt may be submitted next to the prompts under way, the earliest first."""


class EngineFeed:
    """Submits prompts to one engine. For one event loop."""

    def __init__(self, engine: PrefillEngine, queue: PromptQueue[PrefillRequest], has_room: HasRoom) -> None:
        """has_room: asked before each submission, where answers need free blocks too."""
        self._engine = engine
        self._queue = queue
        self._has_room = has_room
        self._retry: asyncio.TimerHandle | None = None

    def submit(self) -> None:
        """Submit the prompts that the engine needs now. Prompts that can never fit fail within."""
        while (request := self._queue.next()) is not None:
            try:
                if not self._has_room(request, self._queue.computing):
                    self._submit_later()
                    return
                self._engine.prefill(request.engine_request)
            except NoCapacity:
                self._submit_later()
                return
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            except InvalidArgument as error:
                request.report(request, HandOverFailed(error))
            else:
                self._queue.submitted(request)

    def _submit_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_BLOCKS_RETRY_S, self._submit_again)

    def _submit_again(self) -> None:
        self._retry = None
        self.submit()
