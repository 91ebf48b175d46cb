"""The recent workload of a running cluster, as input for a plan. Pure.

DistServe replans from observations (arXiv 2401.09670, section 4.3): here the rate and burstiness of arrivals, and the
lengths of complete answers. Running requests and those cut short are only counted. Soon after a start, short answers
are over-represented, which the count of running requests shows.

A pause looks like heavy bursts, so a burstiness above MOST_BURSTINESS must be given explicitly. Arrivals can also be
replayed as recorded. It is unknown which answer belongs to which arrival, so lengths are sampled.
"""

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.workload.requests import RequestLengths

FLAG = "--from-cluster"
LEAST_COUNT = 20
"""Minimum number of arrivals and of answers for an estimate."""
MOST_BURSTINESS = 10.0
"""Above this, a pause in the traffic is more likely than bursts."""
_LEAST_BURSTINESS = 0.01
"""Lower bound: gaps of equal length have no gamma distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSample:
    """Requests that one router observed recently."""

    observed_s: float
    """Seconds of observation, up to now; includes all arrivals below."""
    arrived_ago_s: Sequence[float]
    """Seconds since each arrival, in any order."""
    answered: Sequence[tuple[float, RequestLengths]]
    """Completed requests: seconds since the end, and the lengths."""
    cut_short_ago_s: Sequence[float]
    """Seconds since the end of requests that were cancelled, failed, or lost their client."""
    running: Sequence[RequestLengths]
    """Requests in progress: prompt, and answer so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorkload:
    """Requests that all routers of a cluster observed in the same period."""

    router_count: int
    period_s: float
    """Seconds of observation."""
    arrivals_s: tuple[float, ...]
    """Seconds from the start of the period to each arrival, ascending."""
    burstiness: float
    """Squared coefficient of variation of the gaps between arrivals."""
    longest_gap_s: float
    lengths: tuple[RequestLengths, ...]
    """Lengths of completed requests."""
    too_long_count: int
    """Completed requests left out because they exceed the planned model's maximum length."""
    cut_short_count: int
    """Requests that were cancelled, failed, or lost their client; their lengths are left out."""
    running_count: int
    """Requests in progress; their lengths are left out."""
    longest_running_tokens: int
    """Longest partial answer among the running requests; 0 if none runs."""

    @property
    def arrival_count(self) -> int:
        return len(self.arrivals_s)

    @property
    def rate_per_s(self) -> float:
        return self.arrival_count / self.period_s

    @property
    def cut_short_share(self) -> float:
        """Share of ended requests that were cut short. The plan counts them, with lengths of complete answers."""
        return self.cut_short_count / (self.cut_short_count + len(self.lengths) + self.too_long_count)

    def demand(self, rate_per_s: float | None, burstiness: float | None) -> ExpectedLoad:
        """Return the load to plan for; None: as observed. Raises ConfigError if bursts exceed MOST_BURSTINESS."""
        if burstiness is None and self.burstiness > MOST_BURSTINESS:
            reason = (
                f"has seen a burstiness of {self.burstiness:.3g}, with a gap of {self.longest_gap_s:.3g} s between two"
                f" requests; above {MOST_BURSTINESS:g} it is taken for a pause. Leave the pause out with --last-s, or"
                " give --burstiness, and --rate, which the pause has lowered"
            )
            raise ConfigError(FLAG, reason)
        return ExpectedLoad(
            lengths=self.lengths,
            rate_per_s=self.rate_per_s if rate_per_s is None else rate_per_s,
            burstiness=self.burstiness if burstiness is None else burstiness,
        )

    def recorded_demand(self, rate_per_s: float | None, seed: int) -> ExpectedLoad:
        """Return a load that replays the arrivals, with sampled lengths. rate_per_s: None for the rate of the arrivals.
        Raises ConfigError if all arrived at once."""
        rng = random.Random(seed)
        lengths = tuple(rng.choice(self.lengths) for _ in self.arrivals_s)
        return ExpectedLoad.as_recorded(lengths, self.arrivals_s, rate_per_s)


def observed_workload(samples: Sequence[RouterSample], last_s: float, longest: int) -> ObservedWorkload:
    """Combine the samples of all routers over the period that all have observed, at most the last `last_s` seconds.
    longest: maximum tokens of prompt and answer; longer requests are left out.

    The common period keeps idle routers from being over-represented: new or busy routers remember only a short time.
    Raises ConfigError if there are fewer than LEAST_COUNT arrivals or answers.
    """
    period_s = min(last_s, *(sample.observed_s for sample in samples))
    ages_s = sorted((ago_s for sample in samples for ago_s in sample.arrived_ago_s if ago_s <= period_s), reverse=True)
    ended = [lengths for sample in samples for ago_s, lengths in sample.answered if ago_s <= period_s]
    running = [lengths for sample in samples for lengths in sample.running]
    for count, what in ((len(ages_s), "arrived"), (len(ended), "were answered")):
        if count < LEAST_COUNT:
            reason = f"has seen {count} requests that {what} in the last {period_s:.0f} s; {LEAST_COUNT} are needed"
            raise ConfigError(FLAG, reason)
    # An answer without a token costs its prompt, and is simulated with one.
    whole = [RequestLengths(one.prompt_tokens, max(1, one.output_tokens)) for one in ended]
    fitting = tuple(one for one in whole if one.prompt_tokens + one.output_tokens <= longest)
    if not fitting:
        raise ConfigError(FLAG, f"has answered no request that fits into {longest} tokens")
    gaps_s = [before_s - after_s for before_s, after_s in itertools.pairwise(ages_s)]
    return ObservedWorkload(
        router_count=len(samples),
        period_s=period_s,
        arrivals_s=tuple(period_s - ago_s for ago_s in ages_s),
        burstiness=_burstiness(gaps_s),
        longest_gap_s=max(gaps_s),
        lengths=fitting,
        too_long_count=len(whole) - len(fitting),
        cut_short_count=sum(ago_s <= period_s for sample in samples for ago_s in sample.cut_short_ago_s),
        running_count=len(running),
        longest_running_tokens=max((one.output_tokens for one in running), default=0),
    )


def _burstiness(gaps_s: Sequence[float]) -> float:
    mean_s = statistics.fmean(gaps_s)
    if mean_s <= 0:
        return _LEAST_BURSTINESS
    return max(_LEAST_BURSTINESS, statistics.pvariance(gaps_s, mean_s) / mean_s**2)
