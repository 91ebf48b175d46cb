"""A seeded asyncio loop with virtual time that runs many simulated processes in one thread.

Each process has one FIFO queue of callbacks; the seed picks whose next callback runs. That is what asyncio promises
within one real process, and nothing more is promised between two. Callbacks take no virtual time; time moves to the
next timer when no process has anything to run.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_STARTED_AT_S = 1000.0
_MOST_CALLBACKS_AT_ONCE = 500_000
"""More callbacks than this without any time passing is a loop that would never end."""
_EXECUTOR_DELAY_S = 0.002
"""Most virtual seconds that work handed to a thread takes."""


class SimulatedProcess:
    """One life of one process: its queue, its clock, its faults."""

    def __init__(self, name: str, life: int = 1) -> None:
        """name: stable over restarts. life: counts them from 1."""
        self.name = name
        self.life = life
        self.ready: deque[asyncio.Handle] = deque()
        self.frozen = False
        self.dead = False
        self.died_s: float | None = None
        """The simulation's time of its death."""
        self.clock_offset_s = 0.0
        """What its clock shows beyond the simulation's time."""
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def __str__(self) -> str:
        return f"{self.name}#{self.life}"


_PROCESS: contextvars.ContextVar[SimulatedProcess] = contextvars.ContextVar("simulated_process")


class _Serials:
    """Numbers tasks and futures; begins again with each loop."""

    numbers = itertools.count(1)


class SimulatedTask(asyncio.Task[ResultT]):
    """A task whose hash is a serial number: asyncio keeps tasks in sets, and goes through them when a group ends."""

    process: SimulatedProcess

    def __hash__(self) -> int:
        try:
            return self._serial
        except AttributeError:
            self._serial: int = next(_Serials.numbers)
            return self._serial


class SimulatedFuture(asyncio.Future[ResultT]):
    """A future that is hashed as a SimulatedTask is."""

    def __hash__(self) -> int:
        try:
            return self._serial
        except AttributeError:
            self._serial: int = next(_Serials.numbers)
            return self._serial


class Stuck(Exception):
    """Nothing is scheduled any more, or time has stopped passing."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs the processes. `world` is the process that drives the simulation; it never dies."""

    def __init__(self, rng: random.Random) -> None:
        """rng: picks the process that runs next."""
        super().__init__()
        _Serials.numbers = itertools.count(1)
        self.set_debug(False)
        self._rng = rng
        self._now = _STARTED_AT_S
        self._timers: list[tuple[float, int, asyncio.Handle, SimulatedProcess]] = []
        self._numbers = itertools.count()
        self._runnable: list[SimulatedProcess] = []
        self._graves: list[object] = []
        self._callbacks_now = 0
        self.callback_count = 0
        """Callbacks run so far."""
        self.unhandled: list[str] = []
        """What the loop's exception handler was given: an error that no code has caught."""
        self.world = SimulatedProcess("world")
        self.current = self.world
        """The process whose callback runs."""
        self.set_exception_handler(self._note_unhandled)

    # ---- for the simulation ----

    @property
    def now(self) -> float:
        """The simulation's time in seconds; no process sees it."""
        return self._now

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now - _STARTED_AT_S

    def spawn(self, process: SimulatedProcess, main: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Starts `main` in the process."""
        return self.create_task(main, context=process.context.copy())

    def schedule(self, process: SimulatedProcess, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Runs callback(*args) in the process after `delay_s` of the simulation's time, whatever its clock shows."""
        handle = asyncio.Handle(callback, args, self, process.context)
        heapq.heappush(self._timers, (self._now + delay_s, next(self._numbers), handle, process))

    def freeze(self, process: SimulatedProcess) -> None:
        """Its callbacks stand still until thaw()."""
        process.frozen = True
        if process in self._runnable:
            self._runnable.remove(process)

    def thaw(self, process: SimulatedProcess) -> None:
        """Ends freeze()."""
        process.frozen = False
        if process.ready and not process.dead and process not in self._runnable:
            self._runnable.append(process)

    def kill(self, process: SimulatedProcess) -> None:
        """Nothing of the process ever runs again, not even the clean-up of its coroutines."""
        process.dead = True
        process.died_s = self._now
        # Kept until the loop is closed: a coroutine that nothing refers to would run its `finally`.
        self._graves.append(tuple(process.ready))
        self._graves.append(self.tasks_of(process))
        process.ready.clear()
        if process in self._runnable:
            self._runnable.remove(process)

    def tasks_of(self, process: SimulatedProcess) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended."""
        return [task for task in asyncio.all_tasks(self) if process_of(task) is process]

    def jump_clock(self, process: SimulatedProcess, seconds: float) -> None:
        """Moves the process's clock. Timers that it had set come due by the new one."""
        process.clock_offset_s += seconds
        self._timers = [
            (max(self._now, at_s - seconds), number, handle, owner)
            if owner is process and isinstance(handle, asyncio.TimerHandle)
            else (at_s, number, handle, owner)
            for at_s, number, handle, owner in self._timers
        ]
        heapq.heapify(self._timers)

    @contextlib.contextmanager
    def as_process(self, process: SimulatedProcess) -> Iterator[None]:
        """Code in the context reads that process's clock."""
        former, self.current = self.current, process
        try:
            yield
        finally:
            self.current = former

    # ---- for asyncio ----

    def time(self) -> float:
        """The clock of the process that runs."""
        return self._now + self.current.clock_offset_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = self.current if context is None else context.get(_PROCESS, self.world)
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(process, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = self.current if context is None else context.get(_PROCESS, self.world)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        at_s = max(self._now, when - process.clock_offset_s)
        heapq.heappush(self._timers, (at_s, next(self._numbers), handle, process))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: SimulatedTask[Any] = SimulatedTask(coro, loop=self, name=name, context=context)
        task.process = self.current if context is None else context.get(_PROCESS, self.world)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Runs it on the loop, a drawn moment later."""
        future = self.create_future()
        self.call_later(self._rng.random() * _EXECUTOR_DELAY_S, _run_into, future, func, args)
        return future

    def close(self) -> None:
        """Ends it. What killed processes left behind is freed with the loop itself: see schedule.py."""
        if self.is_closed():
            return
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        super().close()
        self._timers.clear()
        self._runnable.clear()

    def _run_once(self) -> None:
        runnable, draw = self._runnable, self._rng.random
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._pass_time()
                continue
            count = len(runnable)
            process = runnable[int(draw() * count)] if count > 1 else runnable[0]
            queue = process.ready
            handle = queue.popleft()
            if not queue:
                runnable.remove(process)
            if not handle._cancelled:
                self.callback_count += 1
                self._callbacks_now += 1
                self.current = process
                handle._run()
                if self._callbacks_now > _MOST_CALLBACKS_AT_ONCE:
                    raise Stuck(f"{process} never waits")
        self.current = self.world

    def _pass_time(self) -> None:
        timers = self._timers
        if not timers:
            raise Stuck("nothing is scheduled any more")
        self._callbacks_now = 0
        self._now = now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= now:
            _, _, handle, process = heapq.heappop(timers)
            if not handle._cancelled:
                self._enqueue(process, handle)

    def _enqueue(self, process: SimulatedProcess, handle: asyncio.Handle) -> None:
        if process.dead:
            self._graves.append(handle)
            return
        queue = process.ready
        if not queue and not process.frozen:
            self._runnable.append(process)
        queue.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Left in the heap until its time comes."""

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.unhandled.append(f"{self.current}: {context.get('message')}: {error!r}")

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        pass


def current_process() -> SimulatedProcess:
    """The process whose code runs."""
    return _PROCESS.get()


def process_of(task: asyncio.Task[Any]) -> SimulatedProcess:
    """The process that a task belongs to."""
    assert isinstance(task, SimulatedTask)
    return task.process


def _run_into(future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = function(*args)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
