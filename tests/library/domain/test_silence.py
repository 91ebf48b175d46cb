"""Which peers count as silent, and what of the observer's own time does not count against them."""

from kaveri.domain.silence import TICK_S, SilenceWatch


def ticks(watch: SilenceWatch[str], from_s: float, to_s: float) -> list[str]:
    """Ticks as a process that runs does; all that went silent meanwhile."""
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
