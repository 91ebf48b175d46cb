"""The thread that calls listeners with events."""

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from kaveri.kv.transfer.reporter import Reporter
from kaveri.testing.transport_peer import WAIT_S


def test_events_come_in_order_and_all_before_close_returns() -> None:
    heard: list[int] = []
    reporter = Reporter("kv-test")
    for event in range(100):
        reporter.report(partial(heard.append, event))
    reporter.close()
    assert heard == list(range(100))
    reporter.close()


def test_timers_run_when_due_and_not_in_the_order_of_asking() -> None:
    ran: queue.Queue[str] = queue.Queue()
    reporter = Reporter("kv-test")
    reporter.call_after(60.0, lambda: ran.put("never"))
    reporter.call_after(0.05, lambda: ran.put("second"))
    reporter.call_after(0.0, lambda: ran.put("first"))
    assert [ran.get(timeout=WAIT_S), ran.get(timeout=WAIT_S)] == ["first", "second"]
    reporter.close()
    assert ran.empty()


@pytest.mark.usefixtures("breaks_are_expected")
@pytest.mark.parametrize("send", [Reporter.report, Reporter.tell])
def test_a_listener_that_raises_does_not_silence_the_others(
    send: Callable[[Reporter, Callable[[], None]], None],
) -> None:
    heard: list[int] = []

    def listen(event: int) -> None:
        heard.append(event)
        raise ValueError("listener's own trouble")

    reporter = Reporter("kv-test")
    for event in range(3):
        send(reporter, partial(listen, event))
    reporter.close()
    assert heard == [0, 1, 2]


def test_a_timer_in_a_thousand_years_holds_up_no_other() -> None:
    ran: queue.Queue[str] = queue.Queue()
    reporter = Reporter("kv-test")
    for delay_s in (1e10, 3e10, float("inf")):
        reporter.call_after(delay_s, lambda: ran.put("never"))
        reporter.report(lambda: ran.put("told"))
        assert ran.get(timeout=WAIT_S) == "told"
    reporter.call_after(0.0, lambda: ran.put("due"))
    assert ran.get(timeout=WAIT_S) == "due"
    reporter.close()
    assert ran.empty()


def test_a_closed_reporter_holds_on_to_no_timer() -> None:
    class ReportedOwner:
        def act(self) -> None: ...

    owner = ReportedOwner()
    reporter = Reporter("kv-test")
    reporter.call_after(60.0, owner.act)
    reporter.close()
    reporter.call_after(60.0, owner.act)
    gone = weakref.ref(owner)
    del owner
    assert gone() is None


def test_a_thread_that_tells_an_event_itself_waits_for_none_and_overtakes_none() -> None:
    heard: list[tuple[int, str]] = []
    entered, go_on = threading.Event(), threading.Event()

    def listen(event: int) -> None:
        if event == 1:
            entered.set()
            assert go_on.wait(WAIT_S)
        heard.append((event, threading.current_thread().name))

    reporter = Reporter("kv-test")
    reporter.tell(partial(listen, 0))
    assert heard == [(0, threading.current_thread().name)]
    reporter.report(partial(listen, 1))
    assert entered.wait(WAIT_S)
    # The listener is busy: it is called for these when it is their turn.
    reporter.tell(partial(listen, 2))
    reporter.report(partial(listen, 3))
    assert len(heard) == 1
    go_on.set()
    reporter.close()
    assert [event for event, _ in heard] == [0, 1, 2, 3]
    assert {name for _, name in heard[1:]} == {"kv-test"}
