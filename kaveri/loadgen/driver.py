"""Sends planned requests through the SDK on time, and records token arrivals. Not thread-safe."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kaveri.client.answer import ServerTiming
from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import KaveriError
from kaveri.workload.prompts import RequestPrompt
from kaveri.workload.requests import PlannedRequest, RequestLengths

_PROBE_S = 0.02
_PROMPT_TOKEN_IDS = 1000
"""Number of token ids used in random prompts: enough that prompts share no prefix, within every vocabulary."""


@dataclass(slots=True)
class RequestRecord:
    """Outcome of one request. Times are seconds after the start of the run, on the client's clock."""

    planned: PlannedRequest
    due_s: float
    """Due time: the planned arrival, or in a closed loop the end of the previous request."""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival time of each chunk; a chunk has several tokens when the client is slower than the model."""
    received_tokens: int = 0
    error: str | None = None
    """Name of the error that ended the request; None: it was answered."""
    reason: str = ""
    server: ServerTiming | None = None
    prompt_tokens: int | None = None
    """Prompt tokens as counted by the cluster; None without an answer."""

    @property
    def lengths(self) -> RequestLengths:
        """Actual prompt and answer lengths; the planned ones if the request was not answered."""
        if self.prompt_tokens is None:
            return self.planned.lengths
        return RequestLengths(self.prompt_tokens, self.received_tokens)

    @property
    def first_s(self) -> float:
        """Arrival time of the first token; NaN: none has arrived."""
        return self.arrivals_s[0] if self.arrivals_s else math.nan

    @property
    def last_s(self) -> float:
        """Arrival time of the last token; NaN: none has arrived."""
        return self.arrivals_s[-1] if self.arrivals_s else math.nan


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Records of a run's requests, in planned order."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    """Seconds from the first request's due time to the end of the last request."""
    loop_delays_s: tuple[float, ...]
    """Delays of the client's event loop, sampled 50 times a second. Token arrivals are recorded late by as much."""


class LoadTarget(ABC):
    """Interface of a server that the load generator drives by another API than Kaveri's gRPC."""

    @abstractmethod
    async def send(
        self,
        record: RequestRecord,
        prompt: RequestPrompt,
        settings: "RequestSettings",
        now_s: Callable[[], float],
    ) -> None:
        """Send a request, and store its answer or error in `record`. now_s: seconds since the start of the run."""


async def run_open(
    client: "AsyncClient | LoadTarget",
    requests: Sequence[PlannedRequest],
    send: "RequestSettings",
    max_in_flight: int,
    on_end: Callable[[RequestRecord], None],
) -> LoadRun:
    """Open loop: send each request at its planned time, late only while `max_in_flight` are unfinished. on_end: called
    with each that ends. Cancellation cancels all requests."""
    clock = _Clock()
    records = [RequestRecord(planned, planned.arrival_s) for planned in requests]
    seats = asyncio.Semaphore(max_in_flight)

    async def one(record: RequestRecord, prompt: RequestPrompt) -> None:
        try:
            await _send(client, record, prompt, send, clock)
        finally:
            seats.release()
        on_end(record)

    async with _Probe() as probe, asyncio.TaskGroup() as group:
        for record in records:
            prompt = send.prompt(record.planned)
            if (wait_s := record.due_s - clock.now_s()) > 0:
                await asyncio.sleep(wait_s)
            await seats.acquire()
            group.create_task(one(record, prompt))
    return LoadRun(tuple(records), clock.now_s(), tuple(probe.delays_s))


async def run_closed(
    client: "AsyncClient | LoadTarget",
    requests: Sequence[PlannedRequest],
    send: "RequestSettings",
    concurrency: int,
    on_end: Callable[[RequestRecord], None],
) -> LoadRun:
    """Closed loop: keep `concurrency` requests in flight until all have ended. Cancellation cancels all requests."""
    clock = _Clock()
    records = [RequestRecord(planned, 0.0) for planned in requests]

    async def worker(waiting: Iterator[RequestRecord]) -> None:
        for record in waiting:
            # Before the prompt is generated, because that time is the client's delay.
            record.due_s = clock.now_s()
            prompt = send.prompt(record.planned)
            await _send(client, record, prompt, send, clock)
            on_end(record)

    waiting = iter(records)
    async with _Probe() as probe, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker(waiting))
    return LoadRun(tuple(records), clock.now_s(), tuple(probe.delays_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Settings shared by all requests of a run."""

    model: str | None
    vocab_size: int
    seed: int
    timeout_s: float
    natural_length: bool = False
    """True: answers end at an end-of-sequence token or the planned length. False: all have exactly that length."""

    def prompt(self, planned: PlannedRequest) -> RequestPrompt:
        """Return the planned prompt, or random token ids that depend on seed and request number only."""
        if planned.prompt is not None:
            return planned.prompt
        rng = np.random.default_rng((self.seed, planned.number))
        token_ids: list[int] = rng.integers(
            0, min(self.vocab_size, _PROMPT_TOKEN_IDS), planned.lengths.prompt_tokens
        ).tolist()
        return RequestPrompt("prompt_token_ids", token_ids)


async def _send(
    client: "AsyncClient | LoadTarget",
    record: RequestRecord,
    prompt: RequestPrompt,
    send: RequestSettings,
    clock: "_Clock",
) -> None:
    if isinstance(client, LoadTarget):
        record.sent_s = clock.now_s()
        return await client.send(record, prompt, send, clock.now_s)
    params = SamplingParams(
        temperature=0,
        max_tokens=record.planned.lengths.output_tokens,
        ignore_eos=not send.natural_length,
        seed=send.seed,
    )
    record.sent_s = clock.now_s()
    try:
        stream = client.stream(**prompt.as_json(), params=params, model=send.model, timeout_s=send.timeout_s)
        async with stream:
            async for chunk in stream:
                if chunk.token_ids:
                    record.arrivals_s.append(clock.now_s())
                    record.received_tokens += len(chunk.token_ids)
                if chunk.timing is not None:
                    record.server = chunk.timing.server
                if chunk.usage is not None:
                    record.prompt_tokens = chunk.usage.prompt_tokens
    except KaveriError as error:
        record.error, record.reason = type(error).__name__, str(error)


class _Clock:
    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._started_s


class _Probe:
    """Async context manager that samples the delay of the event loop."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_Probe":
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _measure(self) -> None:
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(_PROBE_S)
            self.delays_s.append(time.monotonic() - asked_s - _PROBE_S)
