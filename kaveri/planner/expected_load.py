"""The requests to plan for: lengths and arrivals, at any rate. Pure.

As in DistServe's section 4.1 (arXiv 2401.09670), requests are sampled from observed ones. One seed gives the same
lengths and relative gaps at every rate, so that comparisons show only the effect of the rate.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kaveri.errors import ConfigError
from kaveri.workload.requests import PlannedRequest, RequestLengths, gamma_arrivals, plan_requests

LEAST_RUN_S = 60.0
"""Minimum seconds of a simulation; in shorter ones, most requests arrive before the first long answers end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """Workload to plan for: request lengths to sample from, rate, and burstiness of arrivals."""

    lengths: Sequence[RequestLengths]
    """Lengths of observed requests, sampled uniformly."""
    rate_per_s: float
    """Requests per second that the cluster must serve."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals; 1: Poisson."""
    recorded_s: Sequence[float] = ()
    """Ascending arrival times of `lengths`, replayed in a loop from a random position, with gaps scaled to the rate.
    Empty: lengths and gaps are sampled."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError("--trace", "has no requests")
        for flag, value in (("--rate", self.rate_per_s), ("--burstiness", self.burstiness)):
            if not 0 < value < math.inf:
                raise ConfigError(flag, f"is {value:g}; it must be a number above 0")
        assert len(self.recorded_s) in (0, len(self.lengths)), "each request has its arrival"

    @classmethod
    def as_recorded(
        cls, lengths: Sequence[RequestLengths], recorded_s: Sequence[float], rate_per_s: float | None
    ) -> Self:
        """Replay recorded arrivals. rate_per_s: None for their own rate. Raises ConfigError if all are at one time."""
        found_per_s = recorded_rate_per_s(recorded_s)
        rate_per_s = found_per_s if rate_per_s is None else rate_per_s
        return cls(lengths=lengths, rate_per_s=rate_per_s, recorded_s=recorded_s)

    def draw(self, count: int, rate_per_s: float, seed: int) -> list[PlannedRequest]:
        """Sample at least `count` requests, and at least LEAST_RUN_S (60) seconds of them at that rate."""
        count = max(count, math.ceil(rate_per_s * LEAST_RUN_S))
        rng = random.Random(seed)
        if self.recorded_s:
            return self._from_record(count, rate_per_s, rng.randrange(len(self.lengths)))
        lengths = [rng.choice(self.lengths) for _ in range(count)]
        return plan_requests(lengths, gamma_arrivals(count, rate_per_s, self.burstiness, rng))

    def _from_record(self, count: int, rate_per_s: float, first: int) -> list[PlannedRequest]:
        times_s, total = self.recorded_s, len(self.recorded_s)
        scale = recorded_rate_per_s(times_s) / rate_per_s
        round_s = total / recorded_rate_per_s(times_s)
        numbers = range(first, first + count)
        arrivals_s = [
            (number // total * round_s + times_s[number % total] - times_s[first]) * scale for number in numbers
        ]
        return plan_requests([self.lengths[number % total] for number in numbers], arrivals_s)


def recorded_rate_per_s(recorded_s: Sequence[float]) -> float:
    """Return the requests per second of ascending arrival times. Raises ConfigError if all are equal."""
    span_s = recorded_s[-1] - recorded_s[0]
    if span_s <= 0:
        raise ConfigError(
            "--recorded", f"finds {len(recorded_s)} requests at one time; a rate needs a time between them"
        )
    return (len(recorded_s) - 1) / span_s


def parse_lengths(text: str) -> list[RequestLengths]:
    """Parse pairs of prompt and answer tokens: "512,64" or "512,64;100,200". Raises ConfigError."""
    found = []
    for part in text.split(";"):
        try:
            prompt_tokens, output_tokens = (int(number) for number in part.split(","))
        except ValueError:
            raise ConfigError("--lengths", f"is {text!r}; write PROMPT,ANSWER, such as 512,64") from None
        if prompt_tokens < 1 or output_tokens < 1:
            raise ConfigError("--lengths", f"is {part}; both must be at least 1 token")
        found.append(RequestLengths(prompt_tokens, output_tokens))
    return found
