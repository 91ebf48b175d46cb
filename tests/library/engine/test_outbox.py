"""Events arrive in order and one call at a time, on any publishing thread."""

import threading
from collections.abc import Sequence

from kaveri.engine.contract import EngineEvent, EngineKey, EngineStopped, Preempted, PrefillStarted
from kaveri.engine.shared import Shared
from kaveri.testing.engine_recorder import SOON_S

_FIRST, _SECOND = PrefillStarted(EngineKey("a", 1)), Preempted(EngineKey("b", 1))


def test_thread_that_delivers_goes_on_with_what_others_put() -> None:
    shared = Shared()
    calls: list[tuple[str, list[EngineEvent]]] = []
    entered, go_on = threading.Event(), threading.Event()

    def listener(events: Sequence[EngineEvent]) -> None:
        calls.append((threading.current_thread().name, list(events)))
        entered.set()
        assert go_on.wait(SOON_S)

    shared.listener = listener
    shared.put(_FIRST)
    delivering = threading.Thread(target=shared.publish, name="first")
    delivering.start()
    assert entered.wait(SOON_S)
    shared.put(_SECOND)
    shared.publish()  # returns at once
    assert len(calls) == 1
    go_on.set()
    delivering.join(SOON_S)
    assert calls == [("first", [_FIRST]), ("first", [_SECOND])]


def test_listener_may_put_and_publish() -> None:
    shared = Shared()
    heard: list[list[EngineEvent]] = []

    def listener(events: Sequence[EngineEvent]) -> None:
        heard.append(list(events))
        if _SECOND not in events:
            shared.put(_SECOND)
            shared.publish()

    shared.listener = listener
    shared.put(_FIRST)
    shared.publish()
    assert heard == [[_FIRST], [_SECOND]]


def test_last_event_is_the_last() -> None:
    shared = Shared()
    heard: list[EngineEvent] = []
    shared.listener = heard.extend
    shared.put(_FIRST)
    shared.stop("why")
    shared.put(_SECOND)
    shared.publish()
    shared.stop("again")
    shared.close()
    assert heard == [_FIRST, EngineStopped("why")]


def test_error_of_the_listener_stops_the_engine_and_the_rest_is_still_delivered() -> None:
    heard: list[EngineEvent] = []
    shared = Shared()

    def listener(events: Sequence[EngineEvent]) -> None:
        heard.extend(events)
        if _FIRST in events:
            shared.put(_SECOND)
            raise ValueError("deaf")

    shared.listener = listener
    shared.put(_FIRST)
    shared.publish()
    assert heard == [_FIRST, _SECOND, EngineStopped("the listener raised ValueError('deaf')")]
