"""The thread that tells a listener what happened."""

import queue

from kaveri.kv.reporter import Reporter
from kaveri.testing.transport_peer import WAIT_S


def test_events_come_in_order_and_all_before_close_returns() -> None:
    heard: list[int] = []
    reporter = Reporter[int]("kv-test", heard.append)
    for event in range(100):
        reporter.report(event)
    reporter.close()
    assert heard == list(range(100))
    reporter.close()


def test_timers_run_when_due_and_not_in_the_order_of_asking() -> None:
    ran: queue.Queue[str] = queue.Queue()
    reporter = Reporter[int]("kv-test", lambda _: None)
    reporter.call_after(60.0, lambda: ran.put("never"))
    reporter.call_after(0.05, lambda: ran.put("second"))
    reporter.call_after(0.0, lambda: ran.put("first"))
    assert [ran.get(timeout=WAIT_S), ran.get(timeout=WAIT_S)] == ["first", "second"]
    reporter.close()
    assert ran.empty()


def test_a_listener_that_raises_does_not_silence_the_others() -> None:
    heard: list[int] = []

    def listen(event: int) -> None:
        if event == 1:
            raise ValueError("listener's own trouble")
        heard.append(event)

    reporter = Reporter[int]("kv-test", listen)
    for event in range(3):
        reporter.report(event)
    reporter.close()
    assert heard == [0, 2]
