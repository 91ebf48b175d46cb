"""Failure detector for peers that hang or are cut off. Pure."""

from typing import Generic, TypeVar

from kaveri.timeouts import MOST_PATIENCE, MOST_PATIENCE_S, TICK_S

_LONGEST_TICK_S = 2 * TICK_S
_PATIENCE = 1.5
"""A peer heard again after a silence may be silent for this many times as long."""
_PATIENT_FOR_S = 10.0
"""Duration for which such a silence is remembered."""

PeerT = TypeVar("PeerT")


class SilenceWatch(Generic[PeerT]):
    """Watches peers that should send messages all the time, and suspects those that are silent for too long. Only time
    in which this process runs counts. A peer that was late, or suspected and then heard again, gets more time: where
    all are slow, suspicions slow them further."""

    def __init__(self, after_s: float, now_s: float) -> None:
        """after_s: silence after which a peer is suspected; one that was late recently gets more. now_s: monotonic."""
        self.after_s = after_s
        self._most_s = max(after_s, min(MOST_PATIENCE * after_s, MOST_PATIENCE_S))
        self.elapsed_s = 0.0
        """Time in which this process ran and ticked: messages that wait unread while it stands still are no silence."""
        self._ticked_at_s = now_s
        self._heard_s: dict[PeerT, float] = {}
        self._found_s: dict[PeerT, float] = {}
        """Time of the last message of each suspected peer."""
        self._patience: dict[PeerT, tuple[float, float]] = {}
        """Silence that a late peer is allowed, and the time until which it is. Kept after the watch of a peer ends."""

    def begin(self, peer: PeerT) -> None:
        """Start to watch the peer. Idempotent."""
        self._heard_s.setdefault(peer, self.elapsed_s)

    def heard(self, peer: PeerT) -> None:
        """Record a message of the peer. The first one starts the watch."""
        now_s = self.elapsed_s
        last_s = self._found_s.pop(peer, self._heard_s.get(peer, now_s))
        self._heard_s[peer] = now_s
        late_s = now_s - last_s
        if late_s < self._most_s and _PATIENCE * late_s > self.after_s:
            allowed_s, _ = self._patience.get(peer, (self.after_s, 0.0))
            silence_s = min(max(_PATIENCE * late_s, allowed_s), self._most_s)
            self._patience[peer] = silence_s, now_s + _PATIENT_FOR_S

    def forget(self, peer: PeerT) -> None:
        """Stop watching a peer. Idempotent."""
        self._heard_s.pop(peer, None)

    def silence_s(self, peer: PeerT) -> float:
        """Seconds from a peer's last message to the last tick; infinite if the peer is not watched."""
        heard_s = self._heard_s.get(peer)
        return self.elapsed_s - heard_s if heard_s is not None else float("inf")

    def tick(self, now_s: float) -> list[PeerT]:
        """Advance the clock. Returns the peers that are silent for too long, and stops watching them."""
        self.elapsed_s += min(now_s - self._ticked_at_s, _LONGEST_TICK_S)
        self._ticked_at_s = now_s
        elapsed_s = self.elapsed_s
        silent = [
            peer
            for peer, heard_s in self._heard_s.items()
            if (silence_s := elapsed_s - heard_s) > self.after_s
            and silence_s > self._patience.get(peer, (self.after_s, 0.0))[0]
        ]
        for peer in silent:
            self._found_s[peer] = self._heard_s.pop(peer)
        for peer, (_, until_s) in tuple(self._patience.items()):
            if until_s <= elapsed_s:
                del self._patience[peer]
        for peer, heard_s in tuple(self._found_s.items()):
            if elapsed_s - heard_s > self._most_s:
                del self._found_s[peer]
        return silent
