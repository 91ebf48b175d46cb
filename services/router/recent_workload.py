"""What this router was asked for of late: when requests came, and how long they were. Pure: times are arguments.

A window of the last arrivals and of the last ends, not a reservoir over the router's life. A plan is for what comes
now, as in DistServe's section 4.3 (arXiv 2401.09670); and the rate and the bursts are in the gaps between neighbours,
which a random sample would not keep.

Arrivals and lengths are two windows, because the length of an answer is known at its end only. Of the requests that
came last, short ones have ended and long ones have not: their lengths would be too short. Of the requests that ended
last, in a steady stream, there are as many long ones as come. While a stream has run for less time than its long
answers take, lengths are too short all the same; the requests that still run, with what they have so far, show it.
"""

from collections import deque
from typing import NamedTuple

MOST_ARRIVALS = 4096
"""Arrivals that are kept: 40 s of 100 requests per second."""
MOST_ENDS = 4096
"""Ends that are kept: with the arrivals, less than a MiB."""


class RecentEnd(NamedTuple):
    """A request that is over."""

    ended_s: float
    """time.monotonic()."""
    prompt_tokens: int
    answer_tokens: int
    is_whole: bool
    """False: it was cancelled, failed, or lost its client, and its answer would have been longer."""


class RecentWorkload:
    """For one event loop. Both notes take a microsecond or less, however many requests there are."""

    def __init__(self, started_s: float, most_arrivals: int = MOST_ARRIVALS, most_ends: int = MOST_ENDS) -> None:
        """started_s: time.monotonic(); no request came before."""
        self._since_s = started_s
        self._most_arrivals = most_arrivals
        self._arrivals: deque[float] = deque()
        self._ends: deque[RecentEnd] = deque(maxlen=most_ends)

    def note_arrival(self, arrived_s: float) -> None:
        """A request was accepted. Not called again when its client re-attaches. Requests are not accepted in the order
        in which they came."""
        self._arrivals.append(arrived_s)
        if len(self._arrivals) > self._most_arrivals:
            self._since_s = max(self._since_s, self._arrivals.popleft())

    def note_end(self, ended_s: float, prompt_tokens: int, answer_tokens: int, is_whole: bool) -> None:
        """A request is over, as far as this router knows: it did not leave it to another one."""
        self._ends.append(RecentEnd(ended_s, prompt_tokens, answer_tokens, is_whole))

    def observed_s(self, now_s: float) -> float:
        """All arrivals of so many seconds are in arrived_ago_s()."""
        return now_s - self._since_s

    def arrived_ago_s(self, now_s: float) -> list[float]:
        """Seconds since each arrival, the first accepted first."""
        return [now_s - arrived_s for arrived_s in self._arrivals]

    def ends(self, is_whole: bool) -> list[RecentEnd]:
        """Those with a whole answer, or the others, the oldest first."""
        return [end for end in self._ends if end.is_whole is is_whole]
