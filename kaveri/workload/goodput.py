"""Finds the goodput: the highest rate at which enough requests meet their SLOs. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """What one run at one rate has shown."""

    rate_per_s: float
    attainment: float
    """Share of requests that met the SLOs."""


class GoodputSearch:
    """Chooses the rates of successive runs: doubles or halves until the goodput lies between two, then bisects.

    Goodput as DistServe defines it (arXiv 2401.09670, section 1): the highest request rate at which the SLOs are
    attained by a share of at least `target`. It takes attainment to fall as the rate rises.
    """

    def __init__(self, start_per_s: float, target: float, max_runs: int, resolution: float) -> None:
        """start_per_s: the first rate. max_runs: give up after so many. resolution: end when the lowest rate that
        failed is above the highest that held by no more than this share."""
        self._target = target
        self._max_runs = max_runs
        self._resolution = resolution
        self._next_per_s = start_per_s
        self.probes: list[Probe] = []
        self.held: Probe | None = None
        """At the highest rate that was attained: the goodput. None: no rate was."""
        self.failed: Probe | None = None
        """At the lowest rate that was not attained. None: the goodput is at least `held`."""

    def next_rate(self) -> float | None:
        """The rate to try next, in requests per second; None when the search is over."""
        if len(self.probes) >= self._max_runs:
            return None
        if self.held is not None and self.failed is not None:
            low, high = self.held.rate_per_s, self.failed.rate_per_s
            if high <= low * (1 + self._resolution):
                return None
        return self._next_per_s

    def note(self, probe: Probe) -> None:
        """Takes in what the run at next_rate() has shown."""
        self.probes.append(probe)
        if probe.attainment >= self._target:
            self.held = probe
        else:
            self.failed = probe
        if self.held is None:
            self._next_per_s = probe.rate_per_s / 2
        elif self.failed is None:
            self._next_per_s = probe.rate_per_s * 2
        else:
            self._next_per_s = math.sqrt(self.held.rate_per_s * self.failed.rate_per_s)
