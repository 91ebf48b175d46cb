"""Thread that loads the length predictor and computes, so that the event loop never blocks."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class WorkerThread:
    """Thread that runs calls one at a time, in order. Used from one event loop. A daemon: a hanging call does not keep
    the process alive. One for all calls, because torch creates a thread pool for every calling thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(
        self, function: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> ResultT:
        """Run a call on the thread. Once started it cannot be cancelled: it completes and its result is dropped."""
        outcome: Future[ResultT] = Future()

        def run() -> None:
            # Cannot be cancelled from here on.
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(function(*args, **kwargs))
            except Exception as error:  # Raised at the await of the caller.
                outcome.set_exception(error)

        self._calls.put(run)
        return await asyncio.wrap_future(outcome)

    def close(self) -> None:
        """End the thread after the calls queued so far. Does not wait for the end."""
        self._calls.put(None)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
