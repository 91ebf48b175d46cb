"""Finds peers that have gone silent: they hang, or are cut off. Pure."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from kaveri.domain.running_clock import RunningClock

TICK_S = 0.05
"""Between two ticks of a SilenceWatch."""
_LONGEST_TICK_S = 2 * TICK_S
_PATIENCE = 1.5
"""A peer that has been silent for so long before, and was heard again, may be silent for this many times that long."""
_MOST_PATIENCE = 3.0
"""In terms of after_s."""
_PATIENT_FOR_S = 10.0
"""Such a silence is remembered for so long."""

PeerT = TypeVar("PeerT")


@dataclass(slots=True)
class _Heard:
    at_s: float
    patience_s: float
    """It may be silent for so long, until `patient_until_s`."""
    patient_until_s: float


class SilenceWatch(Generic[PeerT]):
    """Peers that should be heard from all the time. Only time in which the observer itself runs counts as silence.

    A peer on a busy machine is late now and then before it is very late: those that have been late are given more time.
    """

    def __init__(self, after_s: float, now_s: float) -> None:
        """after_s: seconds without a sign of life after which a peer counts as silent, unless it was late before."""
        self.after_s = after_s
        self._clock = RunningClock(now_s, _LONGEST_TICK_S)
        self._heard: dict[PeerT, _Heard] = {}

    def heard(self, peer: PeerT) -> None:
        """A sign of life. The first one begins to watch the peer."""
        now_s, heard = self._clock.elapsed_s, self._heard.get(peer)
        if heard is None:
            self._heard[peer] = _Heard(now_s, self.after_s, now_s)
            return
        patience_s = _PATIENCE * (now_s - heard.at_s)
        heard.at_s = now_s
        if patience_s > self.after_s:
            if now_s < heard.patient_until_s:
                patience_s = max(patience_s, heard.patience_s)
            heard.patience_s = min(patience_s, _MOST_PATIENCE * self.after_s)
            heard.patient_until_s = now_s + _PATIENT_FOR_S

    def forget(self, peer: PeerT) -> None:
        """Ends the watch of a peer. Idempotent."""
        self._heard.pop(peer, None)

    def silence_s(self, peer: PeerT) -> float:
        """Seconds since the last sign of life of a peer, as of the last tick; infinite when it is not watched."""
        heard = self._heard.get(peer)
        return self._clock.elapsed_s - heard.at_s if heard is not None else float("inf")

    def tick(self, now_s: float) -> list[PeerT]:
        """Takes in the time since the last tick. Returns the peers that have gone silent, which it forgets."""
        self._clock.tick(now_s)
        elapsed_s = self._clock.elapsed_s
        silent = [
            peer
            for peer, heard in self._heard.items()
            if (silence_s := elapsed_s - heard.at_s) > self.after_s
            and (silence_s > heard.patience_s or elapsed_s > heard.patient_until_s)
        ]
        for peer in silent:
            self.forget(peer)
        return silent
