"""Failure detector for peers that hang or are cut off while calls wait for them. Not thread-safe."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

import grpc
from grpc import aio

from kaveri.domain.silence import SilenceWatch
from kaveri.timeouts import BEAT_AFTER_S, SUSPECT_AFTER_S, SUSPECT_UNHEARD_AFTER_S, TICK_S

_SLOW_BEAT_AFTER_S = 1.0
"""Interval between pings (Beat calls) to peers that have not answered fast."""
_PROMPT_S = 0.2
"""Only peers that have answered a ping this fast are watched. gRPC's keep-alive covers distant ones."""
_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WaitingCall(Protocol):
    """Call that waits for a message from its peer `target`."""

    target: str
    leaves_unheard: bool
    """True if it may fail over when its peer has never answered a ping."""

    @property
    def can_fail_over(self) -> bool:
        """True if another peer can serve the call. Otherwise the call waits on, however long its peer is silent."""

    def suspect(self, after_s: float) -> None:
        """Fail the call, since its peer has sent nothing for `after_s` seconds."""


class Liveness:
    """Detects silent peers. Sends pings (Beat calls) only while calls wait, to peers that send nothing else."""

    def __init__(self, beat: Callable[[str], Awaitable[object]]) -> None:
        """beat: sends a ping to an address and waits for the response, at most CALL_TIMEOUT_S."""
        self._beat = beat
        self._watch: SilenceWatch[str] = SilenceWatch(SUSPECT_AFTER_S, time.monotonic())
        self._unheard: SilenceWatch[WaitingCall] = SilenceWatch(SUSPECT_UNHEARD_AFTER_S, time.monotonic())
        """Calls to peers that have answered no ping yet."""
        self._waiting: dict[str, dict[WaitingCall, None]] = {}
        self.heard_s: dict[str, float] = {}
        """Time of each peer's last message, on the monotonic clock. Lacks peers that have never sent any."""
        self._answered: dict[str, None] = {}
        """Peers that have answered a ping."""
        self._prompt: dict[str, None] = {}
        """Peers that answer fast."""
        self._asked_s: dict[str, float] = {}
        """Time of the last ping to each peer; infinite while it is unanswered: more would only burden a slow peer."""
        self._running = False
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, call: WaitingCall) -> None:
        """Record that the call waits for a message, and watch its peer."""
        self._waiting.setdefault(call.target, {})[call] = None
        if call.target in self._prompt:
            self._watch.begin(call.target)
        if call.leaves_unheard and call.target not in self._answered:
            self._unheard.heard(call)
        if not self._running:
            self._running = True
            self._start(self._run())

    def end(self, call: WaitingCall) -> None:
        """Record that the call no longer waits for a message."""
        self._unheard.forget(call)
        waiting = self._waiting.get(call.target)
        if waiting is not None:
            waiting.pop(call, None)

    def heard(self, target: str) -> None:
        """Record a message from the peer at address `target`."""
        self.heard_s[target] = time.monotonic()
        if target not in self._answered:
            for call in self._waiting.get(target, ()):
                if call.leaves_unheard:
                    self._unheard.heard(call)
        if target in self._prompt and target in self._waiting:
            self._watch.heard(target)

    def close(self) -> None:
        """Cancel background tasks. Idempotent."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, name="liveness of peers")
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    async def _run(self) -> None:
        # Ends when no call waits, so that an idle process sends no beats.
        while self._waiting:
            for target, waiting in tuple(self._waiting.items()):
                if not waiting:
                    del self._waiting[target]
                    self._watch.forget(target)
                    continue
                now_s = time.monotonic()
                pause_s = BEAT_AFTER_S if target in self._prompt else _SLOW_BEAT_AFTER_S
                is_rested = now_s - self._asked_s.get(target, float("-inf")) >= pause_s
                if is_rested and self._watch.silence_s(target) >= BEAT_AFTER_S:
                    self._asked_s[target] = float("inf")
                    self._start(self._ask(target))
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            silent = self._watch.tick(now_s)
            suspects = [(call, SUSPECT_AFTER_S) for target in silent for call in self._waiting.get(target, ())]
            suspects += [(call, SUSPECT_UNHEARD_AFTER_S) for call in self._unheard.tick(now_s)]
            for call, after_s in suspects:
                if call.can_fail_over:
                    self.end(call)
                    call.suspect(after_s)
        self._running = False

    async def _ask(self, target: str) -> None:
        asked_s = time.monotonic()
        try:
            await self._beat(target)
        except aio.AioRpcError as error:
            # A peer of a former version does not know the call; its error proves that it is alive.
            if error.code() in _UNREACHED:
                return
        finally:
            self._asked_s[target] = asked_s
        if target not in self._answered:
            self._answered[target] = None
            for call in self._waiting.get(target, ()):
                self._unheard.forget(call)
        if time.monotonic() - asked_s <= _PROMPT_S:
            self._prompt[target] = None
        self.heard(target)
