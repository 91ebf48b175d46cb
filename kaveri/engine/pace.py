"""Spreads bytes over time. Pure: the caller supplies the time, and waits."""


class Pace:
    """A rate limit. bytes_per_s: bytes that may begin in a second; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        # When the earlier bytes are paid for.
        self._free_at_s = 0.0

    def wait_s(self, byte_count: int, now_s: float) -> float:
        """Seconds to wait before the next bytes, which count from now on. Unused capacity is lost."""
        if not self._bytes_per_s:
            return 0.0
        begin_s = max(now_s, self._free_at_s)
        self._free_at_s = begin_s + byte_count / self._bytes_per_s
        return begin_s - now_s
