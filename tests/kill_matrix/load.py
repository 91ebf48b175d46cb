"""Clients that send requests while processes die, and compare each answer with that of an undisturbed run."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kaveri import AsyncClient, Completion
from kaveri.errors import KaveriError, Unavailable
from kaveri.v1 import inference_pb2
from tests.kill_matrix.plan import MatrixQuestion, RequestPhase
from tests.support.reading import Reading

REQUEST_TIMEOUT_S = 300.0
"""Five vLLM engines that start at once keep two cores busy for two minutes, which delays all answers."""
_REFUSED_PAUSE_S = 0.1
_LEARN_TRIES = 5
_LONGEST = 5


@dataclass(slots=True)
class MatrixAnswers:
    exact: int = 0
    refused: int = 0
    """Requests sent while no router could be reached; they are sent again."""
    failed: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """Longest pause of each answer, before its first chunk or between two."""
    longest: list[tuple[float, str, str]] = field(default_factory=list)
    """Longest pauses of all: seconds, request and time of day."""
    reattached: int = 0
    resumed: int = 0
    placed_again: int = 0
    """Attempts that were lost and not resumed: their prompts are recomputed."""
    recomputed_tokens: int = 0


class AskedRequest:
    def __init__(self, stream: object, reading: Reading) -> None:
        self._stream = stream
        self.reading = reading

    @property
    def owner(self) -> inference_pb2.OwnerHint:
        """Instances that have the request, as far as its client knows."""
        owner: inference_pb2.OwnerHint = self._stream._sessions.received.owner  # type: ignore[attr-defined]
        return owner


class MatrixLoad:
    def __init__(
        self, client: AsyncClient, questions: Sequence[MatrixQuestion], seed: int, logprob_tolerance: float
    ) -> None:
        self.answers = MatrixAnswers()
        self._client = client
        self._questions = questions
        self._expected: list[Completion] = []
        self._logprob_tolerance = logprob_tolerance
        self._rng = random.Random(f"load {seed}")
        self._numbers = itertools.count()
        self._open = asyncio.Event()
        self._in_flight: dict[str, float] = {}
        self._idle = asyncio.Event()
        self._waiting: dict[RequestPhase, list[asyncio.Future[AskedRequest]]] = {phase: [] for phase in RequestPhase}
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> Sequence[Completion]:
        self._expected = await asyncio.gather(*(self._undisturbed(question) for question in self._questions))
        return self._expected

    def start(self, client_count: int) -> None:
        self._open.set()
        self._tasks = [asyncio.create_task(self._run()) for _ in range(client_count)]

    async def pause(self, within_s: float) -> list[str]:
        """Stop new requests until go_on(), and wait for those in flight. Returns one line for each that hangs."""
        self._open.clear()
        try:
            async with asyncio.timeout(within_s):
                while self._in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        now_s = time.monotonic()
        return [f"{request_id} hangs, asked {now_s - at_s:.1f} s ago" for request_id, at_s in self._in_flight.items()]

    def go_on(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reaches(self, phase: RequestPhase, within_s: float) -> AskedRequest | None:
        """Return the next request that reaches a phase; None if none does in time."""
        future: asyncio.Future[AskedRequest] = asyncio.get_running_loop().create_future()
        self._waiting[phase].append(future)
        try:
            async with asyncio.timeout(within_s):
                return await future
        except TimeoutError:
            return None

    async def _undisturbed(self, question: MatrixQuestion) -> Completion:
        # On a machine that is too busy for heartbeats instances come and go.
        for _ in range(_LEARN_TRIES):
            with contextlib.suppress(Unavailable):
                return await self._client.generate(params=question.params, **question.asked)
        return await self._client.generate(params=question.params, **question.asked)

    async def _run(self) -> None:
        while True:
            await self._open.wait()
            request_id = f"kill-{next(self._numbers)}"
            number = self._rng.randrange(len(self._questions))
            self._in_flight[request_id] = time.monotonic()
            try:
                await self._ask(request_id, number)
            finally:
                del self._in_flight[request_id]
                self._idle.set()

    async def _ask(self, request_id: str, number: int) -> None:
        question, expected = self._questions[number], self._expected[number]
        while True:
            began_s = time.monotonic()
            stream = self._client.stream(
                params=question.params,
                **question.asked,
                request_id=request_id,
                timeout_s=REQUEST_TIMEOUT_S,
            )
            reading = Reading(stream)
            asked = AskedRequest(stream, reading)
            watching = asyncio.create_task(self._watch(asked, len(expected.token_ids)))
            try:
                await reading.task
            except Unavailable as error:
                if not reading.chunks and stream._sessions._tried is not None:
                    self.answers.refused += 1
                    await asyncio.sleep(_REFUSED_PAUSE_S)
                    continue
                self._fail(request_id, number, reading, began_s, repr(error))
            except (KaveriError, AssertionError) as error:
                self._fail(request_id, number, reading, began_s, repr(error))
            else:
                self._check(request_id, number, reading, began_s)
            finally:
                watching.cancel()
                reading.task.cancel()
                self._tell(RequestPhase.OVER, asked)
            return

    def _check(self, request_id: str, number: int, reading: Reading, began_s: float) -> None:
        try:
            reading.check(self._expected[number], logprob_tolerance=self._logprob_tolerance)
        except AssertionError as error:
            self._fail(request_id, number, reading, began_s, f"wrong: {str(error)[:300]}")
            return
        answers, timing = self.answers, reading.timing
        answers.exact += 1
        times_s = [began_s, *reading.times_s]
        pause_s, ended_s = max(((b - a, b) for a, b in itertools.pairwise(times_s)), default=(0.0, 0.0))
        answers.pauses_s.append(pause_s)
        at = time.strftime("%X", time.localtime(time.time() - time.monotonic() + ended_s))
        answers.longest = sorted([*answers.longest, (round(pause_s, 3), request_id, f"until {at}")])[-_LONGEST:]
        answers.reattached += timing.reattaches > 0
        answers.resumed += timing.resumes
        answers.placed_again += max(0, timing.attempts - 1 - timing.resumes)
        answers.recomputed_tokens += timing.recomputed_tokens

    def _fail(self, request_id: str, number: int, reading: Reading, began_s: float, what: str) -> None:
        after_s = time.monotonic() - began_s
        line = (
            f"{request_id} (question {number}), {reading.token_count} tokens, {after_s:.1f} s after it was sent: {what}"
        )
        self.answers.failed.append(line)

    async def _watch(self, asked: AskedRequest, token_count: int) -> None:
        self._tell(RequestPhase.SENT, asked)
        await asked.reading.has(1, REQUEST_TIMEOUT_S)
        self._tell(RequestPhase.FIRST_TOKEN, asked)
        await asked.reading.has(token_count // 2, REQUEST_TIMEOUT_S)
        self._tell(RequestPhase.MIDDLE, asked)
        await asked.reading.has(token_count - 2, REQUEST_TIMEOUT_S)
        self._tell(RequestPhase.LAST_TOKENS, asked)

    def _tell(self, phase: RequestPhase, asked: AskedRequest) -> None:
        waiting, self._waiting[phase] = self._waiting[phase], []
        for future in waiting:
            if not future.done():
                future.set_result(asked)
