"""What a cluster was asked for of late, as the workload to plan for. Pure.

DistServe plans again by what it has observed (arXiv 2401.09670, section 4.3): here the rate and the bursts of arrivals,
and the lengths of whole answers. Requests that still run are left out, and so are those that were cut short; both are
counted. In a steady stream the requests that ended last have the lengths of all; soon after a start, short answers are
over-represented, and the requests that still run show it.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.workload.requests import RequestLengths

FLAG = "--from-cluster"
LEAST_COUNT = 20
"""Arrivals and answers; of fewer nothing can be said."""
_LEAST_BURSTINESS = 0.01
"""Nearly even. Gaps that are all alike have no gamma distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSample:
    """What one router was asked for of late."""

    observed_s: float
    """All arrivals of so many seconds are below."""
    arrived_ago_s: Sequence[float]
    """In any order."""
    answered: Sequence[tuple[float, RequestLengths]]
    """Of requests with a whole answer: seconds since the end, and the lengths."""
    cut_short_ago_s: Sequence[float]
    """Seconds since the end of requests that were cancelled, failed, or lost their client."""
    running: Sequence[RequestLengths]
    """Of requests that are not over: prompt, and answer so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorkload:
    """The workload of a whole cluster."""

    router_count: int
    period_s: float
    """Arrivals are of so many seconds."""
    arrival_count: int
    burstiness: float
    """Squared coefficient of variation of the gaps between arrivals."""
    lengths: tuple[RequestLengths, ...]
    """Of whole answers."""
    too_long_count: int
    """Whole answers that are left out, as the model that is planned for does not take them."""
    cut_short_count: int
    """Left out."""
    running_count: int
    """Left out."""
    longest_running_tokens: int
    """Of the answers of these, so far; 0: none runs."""

    @property
    def rate_per_s(self) -> float:
        """Arrivals per second."""
        return self.arrival_count / self.period_s

    def demand(self, rate_per_s: float | None, burstiness: float | None) -> ExpectedLoad:
        """To plan for. None: as observed."""
        return ExpectedLoad(
            lengths=self.lengths,
            rate_per_s=self.rate_per_s if rate_per_s is None else rate_per_s,
            burstiness=self.burstiness if burstiness is None else burstiness,
        )


def observed_workload(samples: Sequence[RouterSample], last_s: float, longest: int) -> ObservedWorkload:
    """The samples of all routers as one. last_s: what is older does not count. longest: tokens of prompt and answer.

    Arrivals are those of the time that every router has observed: one that has just started shortens it. Raises
    ConfigError where there are fewer than LEAST_COUNT arrivals or answers.
    """
    period_s = min(last_s, *(sample.observed_s for sample in samples))
    ages_s = sorted((ago_s for sample in samples for ago_s in sample.arrived_ago_s if ago_s <= period_s), reverse=True)
    ended = [lengths for sample in samples for ago_s, lengths in sample.answered if ago_s <= last_s]
    running = [lengths for sample in samples for lengths in sample.running]
    for count, what, within_s in ((len(ages_s), "arrived", period_s), (len(ended), "were answered", last_s)):
        if count < LEAST_COUNT:
            reason = f"has seen {count} requests that {what} in the last {within_s:.0f} s; {LEAST_COUNT} are needed"
            raise ConfigError(FLAG, reason)
    # An answer without a token costs its prompt, and is simulated with one.
    whole = [RequestLengths(one.prompt_tokens, max(1, one.output_tokens)) for one in ended]
    fitting = tuple(one for one in whole if one.prompt_tokens + one.output_tokens <= longest)
    if not fitting:
        raise ConfigError(FLAG, f"has answered no request that fits into {longest} tokens")
    return ObservedWorkload(
        router_count=len(samples),
        period_s=period_s,
        arrival_count=len(ages_s),
        burstiness=_burstiness(ages_s),
        lengths=fitting,
        too_long_count=len(whole) - len(fitting),
        cut_short_count=sum(ago_s <= last_s for sample in samples for ago_s in sample.cut_short_ago_s),
        running_count=len(running),
        longest_running_tokens=max((one.output_tokens for one in running), default=0),
    )


def _burstiness(ages_s: Sequence[float]) -> float:
    """ages_s: in descending order."""
    gaps_s = [before_s - after_s for before_s, after_s in itertools.pairwise(ages_s)]
    mean_s = statistics.fmean(gaps_s)
    if mean_s <= 0:
        return _LEAST_BURSTINESS
    return max(_LEAST_BURSTINESS, statistics.pvariance(gaps_s, mean_s) / mean_s**2)
