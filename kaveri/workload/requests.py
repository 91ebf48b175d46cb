"""Which requests come when, and how long they are: synthetic classes and arrival processes. Pure: no clock, no I/O."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from kaveri.errors import ConfigError
from kaveri.workload.prompts import Prompt

HEAVY_PROMPT_TOKENS = 512
"""A prompt of more tokens is heavy (TetriInfer, arXiv 2401.11181, section 5.1)."""
HEAVY_OUTPUT_TOKENS = 128
"""An answer of more tokens is heavy."""
_LEAST_PROMPT_TOKENS = 16
_LEAST_OUTPUT_TOKENS = 8


class WorkloadClass(enum.StrEnum):
    """Light or heavy in prefill (P) and in decode (D)."""

    LPLD = "LPLD"
    LPHD = "LPHD"
    HPLD = "HPLD"
    HPHD = "HPHD"
    MIXED = "Mixed"
    """Each of the four as likely as the others."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """One request before anybody has said when it comes."""

    prompt_tokens: int
    """0: a text that nobody has tokenized yet."""
    output_tokens: int

    @property
    def workload_class(self) -> WorkloadClass:
        """One of the four; never MIXED."""
        prefill = "HP" if self.prompt_tokens > HEAVY_PROMPT_TOKENS else "LP"
        decode = "HD" if self.output_tokens > HEAVY_OUTPUT_TOKENS else "LD"
        return WorkloadClass(prefill + decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of which nobody has planned yet when they come."""

    lengths: Sequence[RequestLengths]
    times_s: Sequence[float] = ()
    """When each came, of a trace. Empty: it has no times of its own."""
    prompts: Sequence[Prompt] = ()
    """Empty: they are made up, of the lengths."""

    def fitting(self, most_tokens: int) -> "Workload":
        """The requests of at most so many tokens, prompt and answer together, with their times and prompts."""
        fits = [entry.prompt_tokens + entry.output_tokens <= most_tokens for entry in self.lengths]
        return Workload(
            lengths=list(compress(self.lengths, fits)),
            times_s=list(compress(self.times_s, fits)),
            prompts=list(compress(self.prompts, fits)),
        )


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a run."""

    number: int
    """From 0, in the order of arrival."""
    arrival_s: float
    """Seconds after the start of the run. Closed loop: 0, it is sent when an earlier one ends."""
    lengths: RequestLengths
    prompt: Prompt | None = None
    """None: one is made up, of the planned length."""


def draw_lengths(
    workload: WorkloadClass, count: int, rng: random.Random, most_prompt_tokens: int, most_output_tokens: int
) -> list[RequestLengths]:
    """`count` requests of a class, lengths uniform over the class's ranges.

    # prompts: light [16, 512]   heavy [513, most_prompt_tokens]
    # answers: light [8, 128]    heavy [129, most_output_tokens]

    Limits below a heavy range's beginning are refused for a class that needs it, and cut a light range. Raises
    ConfigError, naming the flag.
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
    """Times of `count` arrivals in seconds, from 0 on, `rate_per_s` of them per second on average.

    The gaps are drawn from a gamma distribution whose squared coefficient of variation is `burstiness`: 1 is a Poisson
    process, more comes in bursts, less is more even.
    """
    shape = 1.0 / burstiness
    times_s: list[float] = []
    now_s = 0.0
    for _ in range(count):
        times_s.append(now_s)
        now_s += rng.gammavariate(shape, 1.0 / (rate_per_s * shape))
    return times_s


def plan_requests(
    lengths: Sequence[RequestLengths], arrivals_s: Sequence[float], prompts: Sequence[Prompt] = ()
) -> list[PlannedRequest]:
    """Pairs lengths with arrivals, and with prompts if there are any; as many of each, arrivals in order."""
    texts: Sequence[Prompt | None] = prompts or [None] * len(lengths)
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
