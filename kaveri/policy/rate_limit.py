"""Token bucket. Pure: no clock, no I/O."""


class RateLimit:
    """Token bucket: `burst` tokens at first, refilled at `per_s` tokens per second."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        """now_s: current time in seconds, on a monotonic clock."""
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Take a token and return 0; if none is available, return the seconds until one is."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0
