"""Last part of the demo: kills processes during answers, and shows that the answers continue."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from kaveri.client.answer import Chunk
from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import ClusterView
from kaveri.errors import Unavailable
from kaveri.local.stack import LocalStack

_KILL_BEHIND = 60
"""Number of tokens that every answer has when the process is killed."""
_WAIT_S = 30.0


@dataclass
class Reading:
    """Prompt and the answer read so far."""

    prompt: str
    expected: str
    text: str = ""
    token_count: int = 0
    last_s: float = 0.0
    longest_pause_s: float = 0.0
    last: Chunk | None = None

    async def read(self, client: AsyncClient, on_chunk: Callable[[], object] = lambda: None) -> None:
        """Read the answer to its end. Raises KaveriError."""
        async with client.stream(self.prompt, params=SamplingParams(temperature=0)) as stream:
            async for chunk in stream:
                now_s = time.monotonic()
                if self.last_s:
                    self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_s)
                self.last_s = now_s
                self.text += chunk.text
                self.token_count += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    self.last = chunk
                on_chunk()

    @property
    def is_right(self) -> bool:
        """True if the answer has ended and is the expected one."""
        return self.last is not None and self.text.strip() == self.expected

    @property
    def recovery(self) -> str:
        """Describe the answer's recovery, once the answer has ended."""
        assert self.last is not None
        assert self.last.timing is not None
        timing = self.last.timing.server
        if timing.resumes:
            return f"resumed from the copy of its KV, {timing.recomputed_tokens} tokens computed again"
        if timing.reattaches:
            return "re-attached through the other router, nothing computed again"
        return "computed again elsewhere" if timing.attempts > 1 else "undisturbed"


async def show_kills(stack: LocalStack, expected: Mapping[str, str], console: Console) -> bool:
    """Kill a decode process, and then a router, during answers. Returns True if all answers are correct. expected:
    prompts and their answers, each of more than 60 tokens."""
    async with AsyncClient(list(stack.targets), timeout_s=120.0) as client:
        right = True
        for choose in (_busiest_decode, lambda view: _router_at(view, client.target)):
            kill = partial(_kill, stack, choose, console)
            for reading in await _read_all(client, expected, kill):
                right = right and reading.is_right
                mark = "[green]✓ as expected[/]" if reading.is_right else "[red]✗ not as expected[/]"
                pause = f"longest pause {reading.longest_pause_s * 1e3:.0f} ms"
                console.print(f"  {mark}  {pause}; {reading.recovery}")
            await stack.wait_until_ready(_WAIT_S)
    return right


async def _read_all(
    client: AsyncClient, expected: Mapping[str, str], disturb: Callable[[], Awaitable[None]]
) -> list[Reading]:
    """Read an answer to each prompt, all at once. disturb: awaited when every answer has some tokens."""
    readings = [Reading(prompt, answer) for prompt, answer in expected.items()]
    have_some = asyncio.Event()

    def grew() -> None:
        if min(reading.token_count for reading in readings) >= _KILL_BEHIND:
            have_some.set()

    async with asyncio.TaskGroup() as group:
        for reading in readings:
            group.create_task(reading.read(client, grew))
        async with asyncio.timeout(_WAIT_S):
            await have_some.wait()
        await disturb()
    return readings


async def _kill(stack: LocalStack, choose: Callable[[ClusterView], str], console: Console) -> None:
    give_up_s = time.monotonic() + _WAIT_S
    while not (name := choose(stack.view())):
        if time.monotonic() > give_up_s:
            raise Unavailable("no process serves the requests")
        await stack.wait_for_change(0.1)
    console.print(f"\n[bold]kill -9 {stack.pids()[name]}[/]  [dim]({name}, in the middle of answers)[/]")
    stack.process(name).send_signal(signal.SIGKILL)


def _busiest_decode(view: ClusterView) -> str:
    """Return the decode instance with the most requests; empty while none has any."""
    running = {name: each.load.running_requests for name, each in view.instances.items() if name.startswith("decode-")}
    busiest = max(running, key=lambda name: running[name], default="")
    return busiest if running.get(busiest) else ""


def _router_at(view: ClusterView, target: str) -> str:
    return next((name for name, each in view.instances.items() if each.record.address == target), "")
