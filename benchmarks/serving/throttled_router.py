"""Clients of one router that gets little CPU: 100 ms in each 1.8 s, as a throttled container does.

The same load by clients that suspect silent routers, as the SDK does, and by clients that never do. Every answer is
compared with the first one of its prompt. A SIGSTOP stands for the throttling.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.errors import KaveriError
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc import liveness

CLIENTS = 16
ANSWER_TOKENS = 200
RUNNING_S = 0.1
STOPPED_S = 1.7
ANSWER_TIMEOUT_S = 120.0
NEVER_S = 1e9
LEAST_SHARE = 0.95
"""Answers of the SDK's clients, as a share of those of clients that never suspect."""


@dataclass
class Answers:
    """Results of one load."""

    exact: int = 0
    wrong: int = 0
    failed: int = 0
    reattaches: int = 0
    first: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The first answer to each client's prompt."""

    def add(self, client: int, token_ids: tuple[int, ...]) -> None:
        """Compare an answer with the first one of its client."""
        if self.first.setdefault(client, token_ids) == token_ids:
            self.exact += 1
        else:
            self.wrong += 1


_THROTTLE = """
import os, signal, sys, time
process, running_s, stopped_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while os.getppid() != 1:
    os.kill(process, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(process, signal.SIGCONT)
    time.sleep(running_s)
"""


@contextlib.contextmanager
def throttled(process: int) -> Iterator[None]:
    """Stop the process for most of the time while the context is open."""
    # In a process of its own: as a task beside the clients it gives the router the more time the busier they are.
    arguments = (str(process), str(RUNNING_S), str(STOPPED_S))
    throttle = subprocess.Popen([sys.executable, "-c", _THROTTLE, *arguments])
    try:
        yield
    finally:
        throttle.kill()
        throttle.wait()
        os.kill(process, signal.SIGCONT)


async def ask_until(end_s: float, client: int, target: str, answers: Answers) -> None:
    """Ask the same again and again until end_s on the monotonic clock."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=client)
    async with AsyncClient(target) as sdk:
        while time.monotonic() < end_s:
            try:
                answer = await sdk.generate(f"client {client}", params=params, timeout_s=ANSWER_TIMEOUT_S)
            except KaveriError:
                answers.failed += 1
            else:
                answers.reattaches += answer.timing.server.reattaches
                answers.add(client, tuple(answer.token_ids))


async def serve(seconds: float) -> Answers:
    """Run the load on a new stack, whose router is throttled."""
    answers = Answers()
    config = StackConfig.of(prefill_count=1, decode_count=1, engine="fake", restart=False)
    async with LocalStack(config) as stack:
        await stack.wait_until_ready(config.supervision.start_timeout_s)
        with throttled(stack.pids()["router-0"]):
            end_s = time.monotonic() + seconds
            await asyncio.gather(*(ask_until(end_s, each, stack.target, answers) for each in range(CLIENTS)))
    return answers


def measure(options: Options, report: Report) -> None:
    """Both kinds of clients in turn, a new stack each time."""
    seconds = options.choose(60.0, 20.0)
    report.workload = {"clients": CLIENTS, "answer_tokens": ANSWER_TOKENS, "seconds": seconds}
    runs: dict[str, list[Answers]] = {"never suspect": [], "SDK": []}
    # Each kind comes first as often as second: a machine that slows down or recovers meanwhile favours neither.
    order = ("never suspect", "SDK", "SDK", "never suspect")
    for name in options.choose(2 * order, order[:2]):
        after_s = (liveness.SUSPECT_AFTER_S, liveness.SUSPECT_UNHEARD_AFTER_S) if name == "SDK" else (NEVER_S, NEVER_S)
        with mock.patch.multiple(liveness, SUSPECT_AFTER_S=after_s[0], SUSPECT_UNHEARD_AFTER_S=after_s[1]):
            runs[name].append(asyncio.run(serve(seconds)))
    for name, found in runs.items():
        for kind in ("exact", "wrong", "failed", "reattaches"):
            report.row("answers", [getattr(answers, kind) for answers in found], "", clients=name, kind=kind)
    exact = {name: sum(answers.exact for answers in found) for name, found in runs.items()}
    report.ratio("SDK / never suspect", exact["SDK"] / exact["never suspect"], LEAST_SHARE)
    wrong = [answers for found in runs.values() for answers in found if answers.wrong or answers.failed]
    assert not wrong, wrong


if __name__ == "__main__":
    run("serving.throttled_router", measure, description=__doc__)
