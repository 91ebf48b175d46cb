"""The one thread on which a predictor is loaded and computes, so that the event loop never waits for arithmetic."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class WorkerThread:
    """Runs one call at a time, in the order of asking. Used from one event loop.

    A daemon: a call that hangs does not keep the process from ending. One thread for good and not one per call, because
    torch gives every thread that calls it a team of threads of its own.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(
        self, function: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> ResultT:
        """What function(*args, **kwargs) returns or raises. Cancelled, a call that has begun runs on for nobody."""
        outcome: Future[ResultT] = Future()

        def run() -> None:
            # From here on it cannot be cancelled: its outcome may be set although nobody may wait for it.
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(function(*args, **kwargs))
            except Exception as error:  # Raised where it is awaited.
                outcome.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        """Ends the thread after the calls that it was given. Does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
