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


@dataclass(frozen=True, slots=True)
class _Patience:
    """A peer may be silent for so long, until `until_s`."""

    silence_s: float
    until_s: float


class SilenceWatch(Generic[PeerT]):
    """Peers that should be heard from all the time. Only time in which the observer itself runs counts as silence.

    A peer on a busy machine is late now and then before it is very late: those that have been late are given more time.
    So is one that was found silent and is heard soon after: where all are slow, suspicions slow them further.
    """

    def __init__(self, after_s: float, now_s: float) -> None:
        """after_s: seconds without a sign of life after which a peer counts as silent, unless it was late before."""
        self.after_s = after_s
        self._clock = RunningClock(now_s, _LONGEST_TICK_S)
        self._heard_s: dict[PeerT, float] = {}
        self._found_s: dict[PeerT, float] = {}
        """When those that were found silent had been heard last."""
        self._patience: dict[PeerT, _Patience] = {}
        """With peers that are late. It outlives the watch of a peer."""

    def begin(self, peer: PeerT) -> None:
        """Watches the peer from now on. Idempotent."""
        self._heard_s.setdefault(peer, self._clock.elapsed_s)

    def heard(self, peer: PeerT) -> None:
        """A sign of life. The first one begins to watch the peer."""
        now_s = self._clock.elapsed_s
        last_s = self._found_s.pop(peer, self._heard_s.get(peer, now_s))
        self._heard_s[peer] = now_s
        late_s = now_s - last_s
        if late_s < _MOST_PATIENCE * self.after_s and _PATIENCE * late_s > self.after_s:
            self._allow(peer, max(_PATIENCE * late_s, self._allowed_s(peer)))

    def forget(self, peer: PeerT) -> None:
        """Ends the watch of a peer. Idempotent."""
        self._heard_s.pop(peer, None)

    def silence_s(self, peer: PeerT) -> float:
        """Seconds since the last sign of life of a peer, as of the last tick; infinite when it is not watched."""
        heard_s = self._heard_s.get(peer)
        return self._clock.elapsed_s - heard_s if heard_s is not None else float("inf")

    def tick(self, now_s: float) -> list[PeerT]:
        """Takes in the time since the last tick. Returns the peers that have gone silent, which it forgets."""
        self._clock.tick(now_s)
        elapsed_s = self._clock.elapsed_s
        silent = [
            peer
            for peer, heard_s in self._heard_s.items()
            if (silence_s := elapsed_s - heard_s) > self.after_s and silence_s > self._allowed_s(peer)
        ]
        for peer in silent:
            self._found_s[peer] = self._heard_s.pop(peer)
        if self._patience or self._found_s:
            self._forget_old(elapsed_s)
        return silent

    def _forget_old(self, elapsed_s: float) -> None:
        for peer, patience in tuple(self._patience.items()):
            if patience.until_s <= elapsed_s:
                del self._patience[peer]
        for peer, heard_s in tuple(self._found_s.items()):
            if elapsed_s - heard_s > _MOST_PATIENCE * self.after_s:
                del self._found_s[peer]

    def _allowed_s(self, peer: PeerT) -> float:
        patience = self._patience.get(peer)
        return self.after_s if patience is None else patience.silence_s

    def _allow(self, peer: PeerT, silence_s: float) -> None:
        until_s = self._clock.elapsed_s + _PATIENT_FOR_S
        self._patience[peer] = _Patience(min(silence_s, _MOST_PATIENCE * self.after_s), until_s)
