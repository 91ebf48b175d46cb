"""The clock and the event queue of a simulation. Pure."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Event queue and clock: makes scheduled calls by time, at equal times in order of scheduling."""

    def __init__(self, hop_s: float = 0.0) -> None:
        """hop_s: seconds that a message between processes takes."""
        self.now_s = 0.0
        self.hop_s = hop_s
        self._calls: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._count = 0

    def at(self, time_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        """Schedule `call(argument)` at `time_s`, which must not be in the past."""
        self._count += 1
        heapq.heappush(self._calls, (time_s, self._count, call, argument))

    def after(self, delay_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        """Schedule `call(argument)` in `delay_s` seconds."""
        self._count += 1
        heapq.heappush(self._calls, (self.now_s + delay_s, self._count, call, argument))

    def post(self, call: Callable[[Any], object], argument: Any = None) -> None:
        """Schedule `call(argument)` after one message delay, `hop_s`; never make it within this call."""
        self.after(self.hop_s, call, argument)

    def send(self, call: Callable[[Any], object], argument: Any) -> None:
        """Schedule `call(argument)` after one message delay, `hop_s`; if that is 0, make it now."""
        if self.hop_s:
            self.after(self.hop_s, call, argument)
        else:
            call(argument)

    def run_until(self, until_s: float) -> None:
        """Make all calls due by `until_s`, including those scheduled meanwhile."""
        calls, pop = self._calls, heapq.heappop
        while calls and calls[0][0] <= until_s:
            time_s, _, call, argument = pop(calls)
            assert time_s >= self.now_s, f"{time_s} is before {self.now_s}"
            self.now_s = time_s
            call(argument)
