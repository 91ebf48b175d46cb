"""One request at a time to a running stack, with the time of each of its tokens as the caller sees them."""

import random
import time
from dataclasses import dataclass

from kaveri import AsyncClient, SamplingParams, ServerTiming

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class TimedAnswer:
    """An answer of at least three tokens."""

    token_times_s: tuple[float, ...]
    """Of each token: seconds since the request was sent."""
    server: ServerTiming

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0]

    @property
    def second_s(self) -> float:
        """Time to second token: the first that the decode instance draws."""
        return self.token_times_s[1]

    @property
    def later_gap_s(self) -> float:
        """Mean gap between the tokens behind the second."""
        return (self.token_times_s[-1] - self.token_times_s[1]) / (len(self.token_times_s) - 2)


async def ask(client: AsyncClient, prompt_tokens: int, answer_tokens: int, vocab_size: int, seed: int) -> TimedAnswer:
    """A prompt of random ids: what they say does not matter."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, vocab_size) for _ in range(prompt_tokens)]
    params = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
    times_s: list[float] = []
    server: ServerTiming | None = None
    began_s = time.perf_counter()
    async with client.stream(prompt_token_ids=prompt, params=params, timeout_s=_DEADLINE_S) as stream:
        async for chunk in stream:
            times_s += [time.perf_counter() - began_s] * len(chunk.token_ids)
            if chunk.timing is not None:
                server = chunk.timing.server
    assert server is not None, "the answer has no end"
    assert len(times_s) == answer_tokens, times_s
    return TimedAnswer(tuple(times_s), server)
