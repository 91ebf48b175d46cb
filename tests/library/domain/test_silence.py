"""SilenceWatch: silent peers, and time in which the observer itself did not run."""

from kaveri.domain.silence import SilenceWatch
from kaveri.timeouts import TICK_S


def ticks(watch: SilenceWatch[str], from_s: float, to_s: float) -> list[str]:
    count = round((to_s - from_s) / TICK_S)
    return [peer for number in range(1, count + 1) for peer in watch.tick(from_s + number * TICK_S)]


def test_a_peer_that_stops_sending_goes_silent_once() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 100.0)
    watch.heard("decode-0")
    assert ticks(watch, 100.0, 100.5) == []
    assert ticks(watch, 100.5, 100.65) == ["decode-0"]
    assert ticks(watch, 100.65, 110.0) == []


def test_a_peer_that_beats_never_goes_silent() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    for number in range(100):
        watch.heard("decode-0")
        assert ticks(watch, number * 0.4, (number + 1) * 0.4) == []


def test_a_stall_of_the_observer_is_no_silence_of_others() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("decode-0")
    assert ticks(watch, 0.0, 0.2) == []
    # The process stood still: what came meanwhile waits unread, and is read a moment later.
    assert watch.tick(60.0) == []
    assert ticks(watch, 60.0, 60.15) == []
    watch.heard("decode-0")
    assert ticks(watch, 60.15, 60.6) == []


def test_a_peer_that_was_frozen_too_is_found_after_a_stall_of_the_observer() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("decode-0")
    assert watch.tick(60.0) == []
    assert ticks(watch, 60.0, 60.5) == ["decode-0"]


def test_a_peer_that_is_late_now_and_then_is_given_more_time_for_a_while() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("busy")
    now_s = 0.0
    for late_s in (0.45, 0.6, 0.85, 1.2, 1.7, 2.4):
        assert ticks(watch, now_s, now_s + late_s) == [], late_s
        now_s += late_s
        watch.heard("busy")
    assert ticks(watch, now_s, now_s + 2.65) == ["busy"], "never more than 2.5 s"


def test_a_peer_that_has_been_in_time_for_a_while_is_found_as_soon_as_ever() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("busy")
    assert ticks(watch, 0.0, 0.45) == []
    now_s = 0.45
    for _ in range(110):
        watch.heard("busy")
        assert ticks(watch, now_s, now_s + 0.1) == []
        now_s += 0.1
    watch.heard("busy")
    assert ticks(watch, now_s, now_s + 0.65) == ["busy"]


def test_each_peer_has_its_own_silence_and_a_forgotten_one_has_none() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    for peer in ("a", "b", "c"):
        watch.heard(peer)
    ticks(watch, 0.0, 0.3)
    watch.heard("b")
    watch.forget("c")
    watch.forget("c")
    assert ticks(watch, 0.3, 0.7) == ["a"]
    assert ticks(watch, 0.7, 1.0) == ["b"]


def test_a_peer_that_was_found_and_is_heard_soon_after_was_late_and_is_given_more_time() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("slow")
    assert ticks(watch, 0.0, 0.8) == ["slow"]
    watch.begin("slow")  # Others ask it again; it has not answered yet.
    ticks(watch, 0.8, 1.0)
    watch.heard("slow")
    assert ticks(watch, 1.0, 2.4) == []
    assert ticks(watch, 2.4, 2.65) == ["slow"]


def test_a_peer_that_was_found_and_was_away_for_long_is_found_as_soon_as_ever() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("frozen")
    assert ticks(watch, 0.0, 3.0) == ["frozen"]
    watch.heard("frozen")
    assert ticks(watch, 3.0, 3.65) == ["frozen"]


def test_a_peer_that_is_not_watched_for_a_moment_keeps_the_time_that_it_was_given() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    watch.heard("busy")
    ticks(watch, 0.0, 0.45)
    watch.heard("busy")
    watch.forget("busy")
    ticks(watch, 0.45, 1.0)
    watch.heard("busy")
    assert ticks(watch, 1.0, 1.6) == []
    assert ticks(watch, 1.6, 1.75) == ["busy"]


def test_what_is_known_of_peers_that_have_gone_is_forgotten() -> None:
    watch: SilenceWatch[str] = SilenceWatch(0.5, 0.0)
    for number in range(10):
        watch.heard(f"decode-{number}")
    assert len(ticks(watch, 0.0, 1.0)) == 10
    assert len(watch._found_s) == 10
    ticks(watch, 1.0, 12.0)
    assert not watch._found_s
    assert not watch._patience
