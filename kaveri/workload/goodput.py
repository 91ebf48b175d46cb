"""Finds the goodput: the highest rate at which enough requests meet their SLOs. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one run at one rate."""

    rate_per_s: float
    attainment: float
    """Share of requests that met the SLOs."""


class GoodputSearch:
    """Chooses the rates of successive runs: doubles or halves until the goodput lies between two rates, then bisects.

    Goodput as DistServe defines it (arXiv 2401.09670, section 1): the highest request rate at which a share of at least
    `target` meets the SLOs. It assumes that attainment falls as the rate rises.
    """

    def __init__(self, start_per_s: float, target: float, max_runs: int, resolution: float) -> None:
        """start_per_s: the first rate. max_runs: stop after this many runs. resolution: stop when the lowest failed
        rate is at most this share above the highest rate that met the target."""
        self._target = target
        self._max_runs = max_runs
        self._resolution = resolution
        self._next_per_s = start_per_s
        self.probes: list[Probe] = []
        self.held: Probe | None = None
        """The run at the highest rate that met the target: the goodput. None: no rate did."""
        self.failed: Probe | None = None
        """The run at the lowest rate that missed the target. None: the goodput is at least `held`."""

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
        """Record the result of the run at next_rate()."""
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
