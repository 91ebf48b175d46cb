"""Spreads bytes over time. Pure: the caller says what time it is, and waits."""


class Pace:
    """bytes_per_s: what may begin in a second; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        # When the bytes before are paid for.
        self._free_at_s = 0.0

    def wait_s(self, byte_count: int, now_s: float) -> float:
        """How long to wait before the next bytes. They count from now on. What was not used before is lost."""
        if not self._bytes_per_s:
            return 0.0
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + byte_count / self._bytes_per_s
        return begin_s - now_s
