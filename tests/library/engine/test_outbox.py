"""Events arrive in order and one call at a time, on any publishing thread."""

import threading
from collections.abc import Sequence

from kaveri.engine.contract import EngineEvent, EngineKey, EngineStopped, Preempted, PrefillStarted
from kaveri.engine.shared import Outbox
from kaveri.testing.engine_recorder import SOON_S

_FIRST, _SECOND = PrefillStarted(EngineKey("a", 1)), Preempted(EngineKey("b", 1))


class _Failed(Exception):
    pass


def _raise(error: Exception) -> None:
    raise _Failed from error


def test_thread_that_delivers_goes_on_with_what_others_put() -> None:
    outbox = Outbox(_raise)
    calls: list[tuple[str, list[EngineEvent]]] = []
    entered, go_on = threading.Event(), threading.Event()

    def listener(events: Sequence[EngineEvent]) -> None:
        calls.append((threading.current_thread().name, list(events)))
        entered.set()
        assert go_on.wait(SOON_S)

    outbox.listener = listener
    outbox.put(_FIRST)
    delivering = threading.Thread(target=outbox.publish, name="first")
    delivering.start()
    assert entered.wait(SOON_S)
    outbox.put(_SECOND)
    outbox.publish()  # returns at once
    assert len(calls) == 1
    go_on.set()
    delivering.join(SOON_S)
    assert calls == [("first", [_FIRST]), ("first", [_SECOND])]


def test_listener_may_put_and_publish() -> None:
    outbox = Outbox(_raise)
    heard: list[list[EngineEvent]] = []

    def listener(events: Sequence[EngineEvent]) -> None:
        heard.append(list(events))
        if _SECOND not in events:
            outbox.put(_SECOND)
            outbox.publish()

    outbox.listener = listener
    outbox.put(_FIRST)
    outbox.publish()
    assert heard == [[_FIRST], [_SECOND]]


def test_last_event_is_the_last() -> None:
    outbox = Outbox(_raise)
    heard: list[EngineEvent] = []
    outbox.listener = heard.extend
    outbox.put(_FIRST)
    outbox.close(EngineStopped("why"))
    outbox.put(_SECOND)
    outbox.close(EngineStopped("again"))
    outbox.publish()
    assert heard == [_FIRST, EngineStopped("why")]


def test_error_of_the_listener_is_told_and_the_rest_is_still_delivered() -> None:
    errors: list[Exception] = []
    heard: list[EngineEvent] = []
    outbox = Outbox(errors.append)

    def listener(events: Sequence[EngineEvent]) -> None:
        heard.extend(events)
        if _FIRST in events:
            outbox.put(_SECOND)
            raise ValueError("deaf")

    outbox.listener = listener
    outbox.put(_FIRST)
    outbox.publish()
    assert heard == [_FIRST, _SECOND]
    assert [str(error) for error in errors] == ["deaf"]
