"""Clock that excludes the time in which this process did not run. Pure."""


class RunningClock:
    """Clock for the silence of peers that advances only while this process runs and ticks: while it stands still,
    messages wait unread. A late tick adds at most `longest_tick_s`."""

    def __init__(self, now_s: float, longest_tick_s: float) -> None:
        """now_s: of a monotonic clock. longest_tick_s: more than the usual time between two ticks."""
        self.elapsed_s = 0.0
        self._ticked_at_s = now_s
        self._longest_tick_s = longest_tick_s

    def tick(self, now_s: float) -> None:
        """Add the time since the last tick. now_s: of a monotonic clock."""
        self.elapsed_s += min(now_s - self._ticked_at_s, self._longest_tick_s)
        self._ticked_at_s = now_s

    def skip(self, now_s: float) -> None:
        """Exclude the time since the last tick."""
        self._ticked_at_s = now_s
