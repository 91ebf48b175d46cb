"""Answers that are read piece by piece from a running stack, for benchmarks in which processes die, freeze or drain.

Every token is compared with the fake model's own, so that a benchmark that measures a pause also proves the answer.
"""

import asyncio
import contextlib
import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kaveri import AsyncClient, SamplingParams
from kaveri.client.answer import ServerTiming
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.stack import LocalStack

TIMEOUT_S = 600.0
_POLL_S = 0.05
_PIECES_UNDER_WAY = 5
_PROMPT_TOKEN_IDS = 900


@dataclass
class AnswerStream:
    """One answer, and when its pieces came."""

    request_id: str
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """Of each piece that has tokens."""
    counts: list[int] = field(default_factory=list)
    """Tokens of each piece."""
    sent_s: float = 0.0
    timing: ServerTiming | None = None

    async def read(self, client: AsyncClient, max_tokens: int) -> None:
        """Reads it to its end, which may be a cancellation."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.sent_s = time.monotonic()
        async with client.stream(
            prompt_token_ids=self.prompt, params=params, request_id=self.request_id, timeout_s=TIMEOUT_S
        ) as stream:
            async for chunk in stream:
                assert chunk.index == len(self.token_ids), "a token is missing, or came twice"
                if chunk.token_ids:
                    self.token_ids += chunk.token_ids
                    self.counts.append(len(chunk.token_ids))
                    self.at_s.append(time.monotonic())
                if chunk.timing is not None:
                    self.timing = chunk.timing.server

    def gaps_s(self, from_s: float, until_s: float = float("inf")) -> list[float]:
        """The times between two pieces of which the second came between the two times."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return [later - sooner for sooner, later in pairs if from_s < later <= until_s]

    @property
    def reattaches(self) -> int:
        """How often the client has changed routers, or has opened its stream again."""
        return self.timing.reattaches if self.timing is not None else 0

    def pause_s(self, from_s: float) -> float:
        """The longest of gaps_s()."""
        return max(self.gaps_s(from_s), default=0.0)

    def next_s(self, from_s: float, until_s: float = float("inf")) -> float:
        """From `from_s` to the end of its longest pause that ends between the two times. inf: it got nothing."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        pauses = [(later - sooner, later) for sooner, later in pairs if from_s < later < until_s]
        return max(pauses)[1] - from_s if pauses else float("inf")

    def count_since(self, from_s: float) -> int:
        """Pieces that came after `from_s`."""
        return sum(at_s > from_s for at_s in self.at_s)

    def is_exact(self, model: FakeModel) -> bool:
        """Whether these are the model's own tokens."""
        return self.token_ids == model.answer(self.prompt, 0, len(self.token_ids))


def prompt_of(context: int, number: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt that no other number has."""
    return tuple(1 + (seed + 37 * number + place * (1 + number % 7)) % _PROMPT_TOKEN_IDS for place in range(context))


def percentile(values: Iterable[float], percent: int) -> float:
    """Of at least one value."""
    found = list(values)
    return statistics.quantiles(found, n=100, method="inclusive")[percent - 1] if len(found) > 1 else found[0]


def metric(stack: LocalStack, name: str, instances: Iterable[str]) -> float:
    """The sum of one metric over instances and labels. Instances that are gone have none."""
    return sum(sum(_samples(stack.config.metrics_port_of(instance), name)) for instance in instances)


def most(stack: LocalStack, name: str, instances: Iterable[str]) -> float:
    """The greatest sample of one metric over instances and labels. 0 where there is none."""
    return max(
        (max(_samples(stack.config.metrics_port_of(name_), name), default=0.0) for name_ in instances), default=0
    )


def _samples(port: int, name: str) -> list[float]:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer,
    ):
        return [float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.M)]
    return []


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """TimeoutError after `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def busiest(stack: LocalStack, instances: Collection[str]) -> str:
    """The instance with most running requests."""
    view = stack.view()
    return max(instances, key=lambda name: view.instances[name].load.running_requests)


async def replicas_of(stack: LocalStack, instances: Sequence[str], count: int) -> None:
    """Waits until so many requests have copies."""
    await wait_until(lambda: metric(stack, "kaveri_replicas_owned", instances) >= count, 60.0)


async def whole_replicas_of(stack: LocalStack, instances: Sequence[str], count: int, lag_tokens: int) -> None:
    """Waits until so many requests have copies, none of which lacks more tokens."""

    def are_whole() -> bool:
        lag = metric(stack, "kaveri_replica_lag_tokens", instances)
        return lag <= lag_tokens and metric(stack, "kaveri_replicas_owned", instances) >= count

    await wait_until(are_whole, 60.0)


async def go_on(streams: Sequence[AnswerStream], from_s: float, timeout_s: float) -> None:
    """Waits until each has pieces that came after `from_s`, and more of them than may have been on their way then."""
    await wait_until(lambda: all(stream.count_since(from_s) > _PIECES_UNDER_WAY for stream in streams), timeout_s)
