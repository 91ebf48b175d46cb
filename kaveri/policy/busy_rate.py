"""Measures how fast work is done while there is some. Pure: no clock, no I/O."""

import math

_MEAN_S = 5.0
"""Busy time over which the rate is averaged, in seconds."""


class BusyRate:
    """Work per second over recent busy time: pauses without work do not count. Not thread-safe."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None
        """Time up to which busy time was counted; None: there is no work."""

    @property
    def per_s(self) -> float:
        """Work per second of busy time; 0: none was measured."""
        return self._work / self._busy_s if self._busy_s > 0 else 0.0

    def begin(self, now_s: float) -> None:
        """Record that there is work. Idempotent."""
        if self._since_s is None:
            self._since_s = now_s

    def done(self, work: float, now_s: float, has_more: bool) -> None:
        """Record that some work is done. has_more: work is left."""
        passed_s = now_s - self._since_s if self._since_s is not None else 0.0
        left = math.exp(-passed_s / _MEAN_S)
        self._work = self._work * left + work
        self._busy_s = self._busy_s * left + passed_s
        self._since_s = now_s if has_more else None
