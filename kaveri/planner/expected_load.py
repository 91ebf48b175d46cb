"""The requests that a plan must serve: lengths and arrivals at any rate. Pure.

As in DistServe's section 4.1 (arXiv 2401.09670), new requests are drawn from what was seen. The same seed draws the
same lengths and the same gaps at every rate, so two rates differ in nothing but the rate.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.workload.requests import PlannedRequest, RequestLengths, gamma_arrivals, plan_requests

LEAST_RUN_S = 60.0
"""Of a simulation. In a shorter one most requests would come before the first long answers end, and find empty
instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoad:
    """Lengths to draw from, and how bursts come."""

    lengths: Sequence[RequestLengths]
    """Of requests that were seen; each is drawn as often as any other."""
    rate_per_s: float
    """Requests per second that the cluster must serve."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals; 1: Poisson."""

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the flag, its value and the limit."""
        if not self.lengths:
            raise ConfigError("--trace", "has no requests")
        for flag, value in (("--rate", self.rate_per_s), ("--burstiness", self.burstiness)):
            if not 0 < value < math.inf:
                raise ConfigError(flag, f"is {value:g}; it must be a number above 0")

    def draw(self, count: int, rate_per_s: float, seed: int) -> list[PlannedRequest]:
        """At least so many requests at that rate, and as many more as LEAST_RUN_S takes."""
        count = max(count, math.ceil(rate_per_s * LEAST_RUN_S))
        rng = random.Random(seed)
        lengths = [rng.choice(self.lengths) for _ in range(count)]
        return plan_requests(lengths, gamma_arrivals(count, rate_per_s, self.burstiness, rng))


def parse_lengths(text: str) -> list[RequestLengths]:
    """Reads "512,64" or "512,64;100,200": prompt and answer tokens. Raises ConfigError."""
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
