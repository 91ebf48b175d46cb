"""Failure detector for peers that hang or are cut off while calls wait for them. Not thread-safe: for one event
loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

import grpc
from grpc import aio

from kaveri.domain.silence import SilenceWatch
from kaveri.timeouts import BEAT_AFTER_S, SUSPECT_AFTER_S, SUSPECT_UNHEARD_AFTER_S, TICK_S

_SLOW_BEAT_AFTER_S = 1.0
"""Interval between beats to peers that have not answered fast."""
_PROMPT_S = 0.2
"""Only peers that have answered a beat this fast are watched. gRPC's keep-alive covers distant ones."""
_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WaitingCall(Protocol):
    """A call whose caller waits for a message."""

    target: str
    leaves_unheard: bool
    """True if it may fail over when its peer has never answered a beat."""

    @property
    def can_fail_over(self) -> bool:
        """True if there is another peer to go to. A call without one is never suspected: waiting is all it can do."""

    def suspect(self, after_s: float) -> None:
        """End the call: its peer has been silent for `after_s`."""


class Liveness:
    """Detects silent peers. Sends beats only while calls wait, and only to peers that send nothing else."""

    def __init__(self, beat: Callable[[str], Awaitable[object]]) -> None:
        """beat: calls Beat at a target, with CALL_TIMEOUT_S."""
        self._beat = beat
        self._watch: SilenceWatch[str] = SilenceWatch(SUSPECT_AFTER_S, time.monotonic())
        self._unheard: SilenceWatch[WaitingCall] = SilenceWatch(SUSPECT_UNHEARD_AFTER_S, time.monotonic())
        """Calls to peers that have answered no beat yet."""
        self._waiting: dict[str, dict[WaitingCall, None]] = {}
        self.heard_s: dict[str, float] = {}
        """Time of each peer's last message, on the monotonic clock. Lacks peers that have never sent any."""
        self._answered: dict[str, None] = {}
        """Peers that have answered a beat."""
        self._prompt: dict[str, None] = {}
        """Peers that answer fast."""
        self._asked_s: dict[str, float] = {}
        """Time of the last beat sent to each peer."""
        self._running = False
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, call: WaitingCall) -> None:
        """Start waiting for a message of this call."""
        self._waiting.setdefault(call.target, {})[call] = None
        if call.target in self._prompt:
            self._watch.begin(call.target)
        if call.leaves_unheard and call.target not in self._answered:
            self._unheard.heard(call)
        if not self._running:
            self._running = True
            self._start(self._run())

    def end(self, call: WaitingCall) -> None:
        """Stop waiting for this call."""
        self._unheard.forget(call)
        waiting = self._waiting.get(call.target)
        if waiting is not None:
            waiting.pop(call, None)

    def heard(self, target: str) -> None:
        """Record a message from the peer."""
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
                    self._asked_s[target] = now_s
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
        if target not in self._answered:
            self._answered[target] = None
            for call in self._waiting.get(target, ()):
                self._unheard.forget(call)
        if time.monotonic() - asked_s <= _PROMPT_S:
            self._prompt[target] = None
        self.heard(target)
