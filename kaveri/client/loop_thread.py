"""Runs an event loop in its own thread, for coroutines submitted by other threads."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_END_TIMEOUT_S = 5.0


class LoopThread:
    """Event loop in a daemon thread, which runs from construction until end()."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Reentrant: a signal handler may use the client of the thread that it interrupts.
        self._submitting = threading.RLock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the loop and wait for its result. An interrupted wait (for example Ctrl-C) cancels it.
        Raises RuntimeError if end() is called before it is done."""
        future: concurrent.futures.Future[ResultT] | None = None
        started: list[asyncio.Task[Any]] = []
        interrupted = threading.Event()

        async def tracked() -> ResultT:
            if interrupted.is_set():
                work.close()
                raise asyncio.CancelledError
            task = asyncio.current_task()
            assert task is not None
            started.append(task)
            return await work

        def cancel() -> None:
            interrupted.set()
            for task in started:
                task.cancel()

        try:
            with self._submitting:
                if self._ended:
                    work.close()
                    raise RuntimeError("closed already")
                tracking = tracked()
                try:
                    future = asyncio.run_coroutine_threadsafe(tracking, self._loop)
                except RuntimeError as error:
                    # A signal handler has called end() in this thread.
                    tracking.close()
                    work.close()
                    raise RuntimeError("closed already") from error
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise RuntimeError("closed while waiting") from error
        except BaseException:
            # Ctrl-C may arrive while the work is being submitted, before there is a future to cancel.
            if future is None and not self._ended:
                self._loop.call_soon_threadsafe(cancel)
            raise
        finally:
            if future is not None:
                future.cancel()

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine `last`, cancel all other work, and end the thread. Must be called once only."""
        # Earlier work is on the loop before `_finish`, so `_finish` cancels it and no caller waits forever.
        with self._submitting:
            assert not self._ended
            self._ended = True
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        # The garbage collector may run this in the loop's own thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_TIMEOUT_S)

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await last
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            # stop() leaves callbacks unrun, perhaps one that passes a result to its waiting thread.
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
