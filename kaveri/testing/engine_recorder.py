"""Listeners for tests of engines: record events, wait for them, and check their order against the contract."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import (
    DecodeEngine,
    Engine,
    EngineEvent,
    EngineKey,
    EngineStopped,
    FirstToken,
    KvPushed,
    KvPushFailed,
    Landed,
    StepTokens,
)
from kaveri.errors import EngineError

SOON_S = 60.0
"""Timeout of waits, far above what a busy machine needs."""

EventT = TypeVar("EventT")


class EngineRecorder:
    """Records one engine's events. Thread-safe. Waits raise AssertionError if the engine broke the contract. admit_to:
    engine to admit requests at once their KV has arrived. on_event: called after each event, on the engine's thread."""

    def __init__(
        self, admit_to: DecodeEngine | None = None, on_event: Callable[[EngineEvent], None] | None = None
    ) -> None:
        self.events: list[EngineEvent] = []
        self.calls: list[tuple[EngineEvent, ...]] = []
        self.token_ids: dict[EngineKey, list[int]] = {}
        """Tokens that this engine sampled, by request."""
        self.finished: dict[EngineKey, FinishReason] = {}
        self.problems: list[str] = []
        self._first_index: dict[EngineKey, int] = {}
        self._ended_by_first_token: set[EngineKey] = set()
        self._changed = threading.Condition()
        self._admit_to = admit_to
        self.on_event = on_event

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        with self._changed:
            self.calls.append(tuple(events))
            for event in events:
                self._record(event)
            self._changed.notify_all()
        for event in events:
            if self._admit_to is not None and isinstance(event, Landed):
                # The engine may have been closed meanwhile, at the end of a test.
                with contextlib.suppress(EngineError):
                    self._admit_to.admit(event.key)
            if self.on_event is not None:
                self.on_event(event)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; it is checked after each call of the engine. what: for the error message.
        Raises AssertionError after SOON_S seconds, or if the engine broke the contract."""
        give_up_at_s = time.monotonic() + SOON_S
        with self._changed:
            while not condition():
                assert not self.problems, self.problems
                remaining_s = give_up_at_s - time.monotonic()
                assert remaining_s > 0, f"no {what} after {SOON_S} s; the last events: {self.events[-5:]}"
                self._changed.wait(remaining_s)
            assert not self.problems, self.problems

    def wait_for(self, kind: type[EventT], key: EngineKey) -> EventT:
        self.wait_until(lambda: bool(self.of(kind, key)), f"{kind.__name__} of {key}")
        return self.of(kind, key)[0]

    def wait_for_tokens(self, key: EngineKey, token_count: int) -> list[int]:
        drawn = f"{token_count} tokens of {key}"
        self.wait_until(lambda: len(self.token_ids.get(key, ())) >= token_count, drawn)
        return self.token_ids[key]

    def wait_for_finish(self, key: EngineKey) -> FinishReason:
        self.wait_until(lambda: key in self.finished, f"end of {key}")
        return self.finished[key]

    def of(self, kind: type[EventT], key: EngineKey | None = None) -> list[EventT]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and (key is None or getattr(event, "key", None) == key)
        ]

    def _record(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, EngineStopped):
            self.problems.append(event.reason)
        if isinstance(event, FirstToken):
            self._draw(event.key, None, event.token_id, event.finish)
            if event.finish is not None:
                self._ended_by_first_token.add(event.key)
        elif isinstance(event, StepTokens):
            keys = [step.key for step in event.steps]
            if len(set(keys)) < len(keys):
                self.problems.append(f"two tokens of one request in one step: {event}")
            for step in event.steps:
                self._draw(step.key, step.index, step.token_id, step.finish)
        # An engine of both phases may receive the acceptance of a push after decode has ended the request.
        elif (isinstance(event, Landed) and event.key in self.finished) or (
            isinstance(event, KvPushed | KvPushFailed) and event.key in self._ended_by_first_token
        ):
            self.problems.append(f"{event} after the end of the request")

    def _draw(self, key: EngineKey, index: int | None, token_id: int, finish: FinishReason | None) -> None:
        drawn = self.token_ids.setdefault(key, [])
        if index is not None and index != self._first_index.setdefault(key, index - len(drawn)) + len(drawn):
            self.problems.append(f"{key}: token {index} came after {len(drawn)} tokens")
        if key in self.finished:
            self.problems.append(f"{key}: a token after the end")
        drawn.append(token_id)
        if finish is not None:
            self.finished[key] = finish


class EventLog:
    """Records the events of a replica store, or of a KV sender or receiver. Thread-safe."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[EventT], is_wanted: Callable[[EventT], bool] = lambda _: True) -> list[EventT]:
        return [event for event in tuple(self.events) if isinstance(event, kind) and is_wanted(event)]

    def wait_for(self, kind: type[EventT], is_wanted: Callable[[EventT], bool] = lambda _: True) -> EventT:
        """Return the first event of this type that `is_wanted` accepts. Raises AssertionError after SOON_S seconds."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.of(kind, is_wanted), SOON_S)
        assert arrived, f"no {kind.__name__} after {SOON_S} s; the last events: {self.events[-5:]}"
        return self.of(kind, is_wanted)[0]


def wait_until_free(*engines: Engine) -> None:
    """Wait until all KV blocks of these engines are free, and check the engines' integrity."""
    give_up_at_s = time.monotonic() + SOON_S
    for engine in engines:
        while engine.stats().free_blocks < engine.info.total_blocks:
            engine.check_integrity()
            assert time.monotonic() < give_up_at_s, f"blocks are held after {SOON_S} s: {engine.stats()}"
            threading.Event().wait(0.002)
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.running_requests, stats.waiting_requests, stats.context_tokens) == (0, 0, 0), stats


def wait_until_idle(*engines: Engine) -> None:
    give_up_at_s = time.monotonic() + SOON_S
    while any(engine.stats().is_busy for engine in engines):
        assert time.monotonic() < give_up_at_s, [engine.stats() for engine in engines]
        time.sleep(0.005)
