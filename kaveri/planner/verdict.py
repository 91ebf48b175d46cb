"""Decides, as soon as it is certain, whether enough requests meet their SLO. Pure."""

import math


class Verdict:
    """Counts requests of one run, until the rest cannot change the result."""

    def __init__(self, count: int, target: float) -> None:
        """count: requests of the run. target: the share that must meet the SLO."""
        self._needed = math.ceil(target * count - 1e-9)
        self._count = count
        self._met = self._missed = 0

    def note(self, met: bool) -> None:
        """Record one more request that has ended, or cannot meet its SLO any more."""
        if met:
            self._met += 1
        else:
            self._missed += 1

    @property
    def is_certain(self) -> bool:
        """True if the run may stop."""
        return self.holds or self._missed > self._count - self._needed

    @property
    def holds(self) -> bool:
        """True if enough have met their SLO already."""
        return self._met >= self._needed

    @property
    def attainment(self) -> float:
        """Upper bound on the share of the run that meets the SLO; exact if the run did not stop early."""
        return 1 - self._missed / self._count
