"""How often something may happen. Pure: no clock, no I/O."""


class RateLimit:
    """At most `burst` at once, and `per_s` a second after that."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        """now_s: of a clock that never goes back."""
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Takes one, and returns 0; or takes none, and returns the seconds until there is one."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0
