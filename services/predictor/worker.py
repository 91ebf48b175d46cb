"""The thread that loads the predictor and computes with it, so the event loop never waits for computation."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class WorkerThread:
    """Runs calls one at a time, in order. Used from one event loop.

    A daemon thread: a call that hangs does not stop the process from exiting. One thread for all calls, because torch
    creates a thread pool for every thread that calls it.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(
        self, function: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> ResultT:
        """Returns or raises what function(*args, **kwargs) does. A call that has begun cannot be cancelled: it runs to
        its end and its result is dropped."""
        outcome: Future[ResultT] = Future()

        def run() -> None:
            # From here on it cannot be cancelled.
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(function(*args, **kwargs))
            except Exception as error:  # Raised where it is awaited.
                outcome.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        """Ends the thread after the calls queued so far. Does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
