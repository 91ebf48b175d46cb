"""The simulator's clock and its events. Pure."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Calls in the order of their times; those of one time in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._count = 0

    def at(self, time_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        """Schedule `call(argument)` at a time that is not past."""
        self._count += 1
        heapq.heappush(self._calls, (time_s, self._count, call, argument))

    def after(self, delay_s: float, call: Callable[[Any], object], argument: Any = None) -> None:
        """Schedule `call(argument)` in `delay_s` seconds."""
        self._count += 1
        heapq.heappush(self._calls, (self.now_s + delay_s, self._count, call, argument))

    @property
    def next_s(self) -> float:
        """Time of the next call; infinite when there is none."""
        return self._calls[0][0] if self._calls else float("inf")

    def run_until(self, until_s: float) -> None:
        """Make all calls that are due by then, including those that they schedule."""
        calls, pop = self._calls, heapq.heappop
        while calls and calls[0][0] <= until_s:
            time_s, _, call, argument = pop(calls)
            assert time_s >= self.now_s, f"{time_s} is before {self.now_s}"
            self.now_s = time_s
            call(argument)

    def step(self) -> None:
        """Make the next call. There must be one. The clock never runs back."""
        time_s, _, call, argument = heapq.heappop(self._calls)
        assert time_s >= self.now_s, f"{time_s} is before {self.now_s}"
        self.now_s = time_s
        call(argument)
