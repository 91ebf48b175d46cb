"""Finds peers that have gone silent: they hang, or are cut off. Pure."""

from typing import Generic, TypeVar

from kaveri.domain.running_clock import RunningClock

TICK_S = 0.05
"""Between two ticks of a SilenceWatch."""
_LONGEST_TICK_S = 2 * TICK_S

PeerT = TypeVar("PeerT")


class SilenceWatch(Generic[PeerT]):
    """Peers that should be heard from all the time. Only time in which the observer itself runs counts as silence."""

    def __init__(self, after_s: float, now_s: float) -> None:
        """after_s: seconds without a sign of life after which a peer counts as silent."""
        self.after_s = after_s
        self._clock = RunningClock(now_s, _LONGEST_TICK_S)
        self._heard_s: dict[PeerT, float] = {}

    def heard(self, peer: PeerT) -> None:
        """A sign of life. The first one begins to watch the peer."""
        self._heard_s[peer] = self._clock.elapsed_s

    def forget(self, peer: PeerT) -> None:
        """Ends the watch of a peer. Idempotent."""
        self._heard_s.pop(peer, None)

    def silence_s(self, peer: PeerT) -> float:
        """Seconds since the last sign of life of a peer, as of the last tick; infinite when it is not watched."""
        return self._clock.elapsed_s - self._heard_s.get(peer, float("-inf"))

    def tick(self, now_s: float) -> list[PeerT]:
        """Takes in the time since the last tick. Returns the peers that have gone silent, which it forgets."""
        self._clock.tick(now_s)
        silent = [peer for peer in self._heard_s if self.silence_s(peer) > self.after_s]
        for peer in silent:
            self.forget(peer)
        return silent
