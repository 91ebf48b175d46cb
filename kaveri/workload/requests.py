"""Plans requests: lengths by class, and arrival times. Pure: no clock, no I/O."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from kaveri.errors import ConfigError
from kaveri.workload.prompts import RequestPrompt

HEAVY_PROMPT_TOKENS = 512
"""A prompt of more tokens is heavy (TetriInfer, arXiv 2401.11181, section 5.1)."""
HEAVY_OUTPUT_TOKENS = 128
"""An answer of more tokens is heavy."""
_LEAST_PROMPT_TOKENS = 16
_LEAST_OUTPUT_TOKENS = 8


class WorkloadClass(enum.StrEnum):
    """Class of request lengths: light or heavy (L, H) in prefill (P) and decode (D)."""

    LPLD = "LPLD"
    LPHD = "LPHD"
    HPLD = "HPLD"
    HPHD = "HPHD"
    MIXED = "Mixed"
    """The four classes with equal probability."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Prompt and answer length of one request, in tokens."""

    prompt_tokens: int
    """Prompt length; 0: unknown, a text not tokenized yet."""
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths of requests, with a trace's arrival times and with prompts where known."""

    lengths: Sequence[RequestLengths]
    times_s: Sequence[float] = ()
    """Arrival times from a trace; empty if there are none."""
    prompts: Sequence[RequestPrompt] = ()
    """Empty: random prompts of the given lengths are generated."""

    def fitting(self, most_tokens: int) -> "Workload":
        """Return the requests of at most `most_tokens` tokens, prompt and answer together."""
        fits = [entry.prompt_tokens + entry.output_tokens <= most_tokens for entry in self.lengths]
        return Workload(
            lengths=list(compress(self.lengths, fits)),
            times_s=list(compress(self.times_s, fits)),
            prompts=list(compress(self.prompts, fits)),
        )


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Request to be sent in a run: its number, arrival time, lengths and prompt."""

    number: int
    """Number in order of arrival, from 0."""
    arrival_s: float
    """Seconds after the start of the run. Closed loop: 0, it is sent when an earlier one ends."""
    lengths: RequestLengths
    prompt: RequestPrompt | None = None
    """Prompt to send; if None, a random one of the planned length is generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Arrivals of a run: drawn at a rate, all at once for a closed loop, or a trace's own. Raises ConfigError."""

    rate_per_s: float | None
    concurrency: int | None
    burstiness: float
    speed: float = 1.0
    """Divides a trace's own times."""
    seed: int

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and self.concurrency is not None:
            raise ConfigError("--concurrency", "is a closed loop and --rate an open one; give one of them")

    def plan(self, load: Workload, rate_per_s: float | None = None) -> list[PlannedRequest]:
        """Assign arrival times to requests. rate_per_s: replaces the schedule's, and scales the same random gaps."""
        count, rate_per_s = len(load.lengths), rate_per_s or self.rate_per_s
        if rate_per_s is not None:
            arrivals_s = gamma_arrivals(count, rate_per_s, self.burstiness, random.Random(self.seed))
        elif self.concurrency is not None:
            arrivals_s = [0.0] * count
        else:
            arrivals_s = [time_s / self.speed for time_s in load.times_s]
        return plan_requests(load.lengths, arrivals_s, load.prompts)


def draw_lengths(
    workload: WorkloadClass, count: int, rng: random.Random, most_prompt_tokens: int, most_output_tokens: int
) -> list[RequestLengths]:
    """Draw the lengths of `count` requests of a class, uniform over its ranges.

    # prompts: light [16, 512]   heavy [513, most_prompt_tokens]
    # answers: light [8, 128]    heavy [129, most_output_tokens]

    A limit below the start of a heavy range is an error if the class needs that range, and shortens a light range.
    Raises ConfigError, naming the flag.
    """
    drawn = []
    for _ in range(count):
        chosen = workload
        if workload is WorkloadClass.MIXED:
            chosen = rng.choice((WorkloadClass.LPLD, WorkloadClass.LPHD, WorkloadClass.HPLD, WorkloadClass.HPHD))
        heavy_prompt, heavy_output = chosen.value[0] == "H", chosen.value[2] == "H"
        prompt_tokens = _draw(
            "--max-prompt", heavy_prompt, _LEAST_PROMPT_TOKENS, HEAVY_PROMPT_TOKENS, most_prompt_tokens, rng
        )
        output_tokens = _draw(
            "--max-output", heavy_output, _LEAST_OUTPUT_TOKENS, HEAVY_OUTPUT_TOKENS, most_output_tokens, rng
        )
        drawn.append(RequestLengths(prompt_tokens, output_tokens))
    return drawn


def gamma_arrivals(count: int, rate_per_s: float, burstiness: float, rng: random.Random) -> list[float]:
    """Draw `count` arrival times in seconds, the first at 0, at a mean of `rate_per_s`. Gaps are gamma distributed;
    burstiness: their squared coefficient of variation; 1: Poisson process, more: bursts, less: more even."""
    shape = 1.0 / burstiness
    times_s: list[float] = []
    now_s = 0.0
    for _ in range(count):
        times_s.append(now_s)
        now_s += rng.gammavariate(shape, 1.0 / (rate_per_s * shape))
    return times_s


def plan_requests(
    lengths: Sequence[RequestLengths], arrivals_s: Sequence[float], prompts: Sequence[RequestPrompt] = ()
) -> list[PlannedRequest]:
    """Combine lengths with as many arrival times, in ascending order, and with as many prompts or none."""
    texts: Sequence[RequestPrompt | None] = prompts or [None] * len(lengths)
    entries = enumerate(zip(arrivals_s, lengths, texts, strict=True))
    return [PlannedRequest(number, *entry) for number, entry in entries]


def _draw(flag: str, heavy: bool, least_light: int, most_light: int, most: int, rng: random.Random) -> int:
    if heavy:
        if most <= most_light:
            raise ConfigError(flag, f"is {most}; this workload has heavy requests, of more than {most_light} tokens")
        return rng.randint(most_light + 1, most)
    if most < least_light:
        raise ConfigError(flag, f"is {most}; it must be at least {least_light}")
    return rng.randint(least_light, min(most_light, most))
