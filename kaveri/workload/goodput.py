"""Finds the goodput: the highest rate at which enough requests meet their SLOs. Pure: no clock, no I/O."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """SLO attainment measured in one run at one request rate."""

    rate_per_s: float
    attainment: float
    """Share of requests that met the SLOs."""


class GoodputSearch:
    """Chooses the request rates of successive runs: doubles or halves until the goodput lies between two, then bisects.

    Goodput: the highest rate at which a share of at least `target` of the requests meets the SLOs (DistServe, arXiv
    2401.09670, section 1). Assumes that this share falls as the rate rises.
    """

    def __init__(self, start_per_s: float, target: float, max_runs: int, resolution: float) -> None:
        """start_per_s: first rate. max_runs: limit of runs. resolution: stop when the lowest rate that missed the
        target is at most this share above the highest that met it."""
        self._target = target
        self._max_runs = max_runs
        self._resolution = resolution
        self._next_per_s = start_per_s
        self.probes: list[Probe] = []
        self.held: Probe | None = None
        """Run at the highest rate that met the target, the goodput; None: no rate did."""
        self.failed: Probe | None = None
        """Run at the lowest rate that missed the target; None: no rate did."""

    def next_rate(self) -> float | None:
        """Return the rate to try next, in requests per second; None when the search is over."""
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
