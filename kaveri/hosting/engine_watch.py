"""Detects a stuck engine: it is alive, has work, and makes no step. Pure."""

from kaveri.domain.running_clock import RunningClock
from kaveri.engine.contract import EngineStats

LOOK_EVERY_S = 0.25
_USUAL_STEPS = 20
_FIRST_STEP_S = 300.0
"""Limit of an engine's first step, which may compile kernels or read weights for minutes."""


class EngineWatch:
    """Checks the engine's statistics every LOOK_EVERY_S."""

    def __init__(self, stuck_after_s: float, now_s: float) -> None:
        """stuck_after_s: min time before an engine counts as stuck, however short its steps are."""
        self._stuck_after_s = stuck_after_s
        # A process that is stopped as a whole is not a stuck engine.
        self._clock = RunningClock(now_s, 2 * LOOK_EVERY_S)
        self._turn_count = 0
        self._since_s: float | None = None
        """First sight of the current turn, on the clock; None if the engine was idle."""

    def limit_s(self, stats: EngineStats) -> float:
        """Max duration of a step now, in seconds."""
        # The longest step, not the mean: a prompt's chunk takes many times a token's step.
        usual_s = stats.longest_step_s
        return max(self._stuck_after_s, _USUAL_STEPS * usual_s if usual_s > 0 else _FIRST_STEP_S)

    def look(self, stats: EngineStats, now_s: float) -> float | None:
        """Seconds for which the engine has been stuck; None if it is not."""
        self._clock.tick(now_s)
        at_s = self._clock.elapsed_s
        if not stats.is_busy:
            self._since_s = None
            return None
        if self._since_s is None or stats.turn_count != self._turn_count:
            self._since_s, self._turn_count = at_s, stats.turn_count
        busy_s = at_s - self._since_s
        return busy_s if busy_s > self.limit_s(stats) else None
