"""A rolling restart of every process under load, twice: two routers, two prefill and three decode instances.

Real processes on the fake engine. Clients ask one request after the other while each process gets SIGTERM, ends, and is
started again, one at a time. Every answer is compared with the model's own, token by token. A pause is the longest time
between two pieces of one answer, or before its first one.
"""

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.support.answer_streams import AnswerStream, percentile, prompt_of
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import KaveriError
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

CLIENTS = 12
PROMPT_TOKENS = 128
ANSWER_TOKENS = (20, 60, 150)
STEP_S = 0.01
DRAIN_TIMEOUT_S = 30.0
READY_WITHIN_S = 120.0
LEAST_REQUESTS = 1_000
ROUNDS = 2
MODEL = FakeModel()
_LOST = re.compile(r'"event": ?"attempt_lost"')
_LOST_BY = re.compile(r'"error": ?"([^"]*)".*"event": ?"attempt_lost"|"event": ?"attempt_lost".*"error": ?"([^"]*)"')
_MOVED = re.compile(r'"event": ?"request_moved"')
_GIVEN_BACK = re.compile(r'"outcome": ?"given_back"')


@dataclass
class RestartLoad:
    """Clients that ask without a break, and what came of it."""

    pauses_s: list[float] = field(default_factory=list)
    """The longest of each answer that one router delivered."""
    moved_pauses_s: list[float] = field(default_factory=list)
    """Of those that were sent, or delivered, by several routers."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def count(self) -> int:
        """Requests that have ended."""
        return len(self.pauses_s) + len(self.moved_pauses_s) + len(self.failed)

    async def run(self, client: AsyncClient, numbers: Iterator[int]) -> None:
        """One client."""
        while not self.is_over:
            number = next(numbers)
            stream = AnswerStream(f"request-{number}", prompt_of(PROMPT_TOKENS, number))
            try:
                await self._ask(client, stream, ANSWER_TOKENS[number % len(ANSWER_TOKENS)])
            except KaveriError as error:
                self.failed.append(f"request {number}: {error!r}")

    async def _ask(self, client: AsyncClient, stream: AnswerStream, token_count: int) -> None:
        await stream.read(client, token_count)
        pause_s = max(stream.at_s[0] - stream.sent_s, stream.pause_s(stream.sent_s))
        (self.moved_pauses_s if stream.reattaches else self.pauses_s).append(pause_s)
        if len(stream.token_ids) != token_count or not stream.is_exact(MODEL):
            self.wrong.append(f"{stream.token_ids} to {stream.prompt}")


@dataclass
class Restarts:
    """What the restarts took."""

    drains_s: dict[str, list[float]] = field(default_factory=dict)
    """From SIGTERM to the end, by role."""
    count: int = 0
    killed: int = 0
    """Processes that did not end by themselves."""

    async def restart(self, stack: LocalStack, name: str) -> None:
        """SIGTERM, the end, a new life."""
        began_s = time.monotonic()
        status = await stack.process(name).stop(DRAIN_TIMEOUT_S + 10)
        self.killed += status != 0
        self.drains_s.setdefault(name.partition("-")[0], []).append(time.monotonic() - began_s)
        await stack.restart(name)
        await stack.wait_until_ready(READY_WITHIN_S)
        self.count += 1


def stack_config() -> StackConfig:
    """The cluster that is restarted."""
    return StackConfig.of(
        engine="fake",
        router_count=2,
        prefill_count=2,
        decode_count=3,
        restart=False,
        drain_timeout_s=DRAIN_TIMEOUT_S,
        prefill_flags=("--fake-step-s", str(STEP_S)),
        decode_flags=("--fake-step-s", str(STEP_S)),
    )


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "engine": "fake",
        "clients": CLIENTS,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "step_s": STEP_S,
        "rounds": ROUNDS,
    }
    load, restarts, numbers = RestartLoad(), Restarts(), itertools.count()
    async with LocalStack(stack_config()) as stack:
        async with AsyncClient(stack.targets, timeout_s=120) as client:
            clients = [asyncio.create_task(load.run(client, numbers)) for _ in range(CLIENTS)]
            for _ in range(options.choose(ROUNDS, 1)):
                for name in stack.instance_ids:
                    await restarts.restart(stack, name)
            while load.count < options.choose(LEAST_REQUESTS, 1):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            load.is_over = True
            await asyncio.gather(*clients)
        logs = [stack.process(name).log_path.read_text(errors="replace") for name in stack.instance_ids]
    _report(load, restarts, logs, report)


def _report(load: RestartLoad, restarts: Restarts, logs: list[str], report: Report) -> None:
    for role, drains_s in restarts.drains_s.items():
        report.row("SIGTERM to end", drains_s, "s", role=role)
    for answers, pauses_s in (("of one router", load.pauses_s), ("of several", load.moved_pauses_s)):
        report.row("longest pause of an answer", [1e3 * pause_s for pause_s in pauses_s], "ms", answers=answers)
    p99_s, moved_p99_s = percentile(load.pauses_s, 99), percentile(load.moved_pauses_s, 99)
    lost, moved, given_back = (
        sum(len(pattern.findall(log)) for log in logs) for pattern in (_LOST, _MOVED, _GIVEN_BACK)
    )
    report.note(f"{load.count} requests, {restarts.count} restarts")
    report.note(f"pause p99 {1e3 * p99_s:.0f} ms, of several routers {1e3 * moved_p99_s:.0f} ms")
    report.note(f"failed: {len(load.failed)} {load.failed[:3]}; wrong: {len(load.wrong)} {load.wrong[:1]}")
    report.note(
        f"clients sent to another router: {moved}; requests that several routers had: {len(load.moved_pauses_s)}"
    )
    report.note(f"prompts given back by prefill: {given_back}; attempts lost: {lost}")
    causes = Counter(first or second for log in logs for first, second in _LOST_BY.findall(log))
    report.note("; ".join(f"{count} lost: {cause}" for cause, count in causes.most_common(3)) or "none lost")
    report.note(f"processes that had to be killed, or ended with an error: {restarts.killed}")
    report.ratio("answered exactly, of all requests", 1 - (len(load.failed) + len(load.wrong)) / load.count, 1.0)
    report.ratio("placed once, of all requests", 1 - lost / load.count, 1.0)


def measure(options: Options, report: Report) -> None:
    """Restarts every process, twice, under load."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.rolling_restart", measure, description=__doc__)
