from kaveri.engine.contract import EngineStats
from kaveri.hosting.engine_host import LOOK_EVERY_S, EngineWatch


class WatchedEngine:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.turns = 0
        self.longest_s = 0.0
        self.watch = EngineWatch(5.0, self.now_s)

    def run(self, for_s: float, *, step_s: float | None, busy: bool = True) -> float | None:
        """Look until the engine is stuck. Returns the seconds that took, else None. step_s: None: it makes no step."""
        began_s = self.now_s
        next_s = self.now_s + step_s if step_s is not None else float("inf")
        while self.now_s - began_s < for_s:
            self.now_s += LOOK_EVERY_S
            while self.now_s >= next_s:
                self.turns += 1
                self.longest_s = max(self.longest_s, step_s or 0.0)
                next_s += step_s or 0.0
            stats = EngineStats(0, 1, 0, 0, 0, self.turns, busy, self.longest_s)
            if self.watch.look(stats, self.now_s) is not None:
                return self.now_s - began_s
        return None


def test_an_engine_that_stops_stepping_is_stuck_after_five_seconds() -> None:
    watched = WatchedEngine()
    assert watched.run(10.0, step_s=0.02) is None
    after_s = watched.run(60.0, step_s=None)
    assert after_s is not None
    assert 5.0 <= after_s <= 6.0


def test_an_engine_with_long_steps_gets_twenty_of_them() -> None:
    watched = WatchedEngine()
    assert watched.run(30.0, step_s=3.0) is None
    after_s = watched.run(200.0, step_s=None)
    assert after_s is not None
    assert 55.0 <= after_s <= 70.0


def test_an_idle_engine_is_not_stuck_and_begins_to_count_with_its_next_work() -> None:
    watched = WatchedEngine()
    watched.run(10.0, step_s=0.02)
    assert watched.run(1000.0, step_s=None, busy=False) is None
    assert watched.run(4.5, step_s=None) is None
    assert watched.run(2.0, step_s=None) is not None


def test_the_first_step_may_take_minutes() -> None:
    watched = WatchedEngine()
    assert watched.run(290.0, step_s=None) is None
    assert watched.run(20.0, step_s=None) is not None


def test_a_process_that_stood_still_has_no_stuck_engine() -> None:
    watched = WatchedEngine()
    watched.run(10.0, step_s=0.02)
    watched.now_s += 3600.0
    assert watched.run(2.0, step_s=None) is None
    assert watched.run(10.0, step_s=0.02) is None
