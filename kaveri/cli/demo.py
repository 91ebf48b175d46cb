"""python -m kaveri.cli.demo: answers prompts on a local cluster, shows where their time went, survives kill -9, and has
an instance change its phase in the middle of answers."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kaveri.cli.flip import flip_instance
from kaveri.client.answer import Chunk
from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import ClusterView, Phase
from kaveri.errors import KaveriError, Unavailable
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import KAVERI_TINY, resolve_model

_PROMPT_COUNT = 8
_KILLED_COUNT = 4
_KILL_BEHIND = 60
"""Tokens that every answer must have before a process is killed."""
_WAIT_S = 30.0
_TIMEOUT_S = 120.0
_FRAMES_PER_S = 10
_PLAIN_WIDTH = 120


@dataclass
class _Ask:
    """Prompt of the demo, its expected answer, and the answer received so far."""

    prompt: str
    expected: str
    text: str = ""
    token_count: int = 0
    last_s: float = 0.0
    longest_pause_s: float = 0.0
    last: Chunk | None = None
    error: KaveriError | None = None

    async def read(self, client: AsyncClient, on_chunk: Callable[[], object] = lambda: None) -> None:
        """Stream the answer to its end, calling on_chunk after each chunk. Raises KaveriError."""
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
        return self.last is not None and self.text.strip() == self.expected

    @property
    def recovery(self) -> str:
        """How the cluster recovered the answer after a kill, in words; only once the answer has ended."""
        assert self.last is not None
        assert self.last.timing is not None
        timing = self.last.timing.server
        if timing.resumes:
            return f"resumed from the copy of its KV, {timing.recomputed_tokens} tokens computed again"
        if timing.reattaches:
            return "re-attached through the other router, nothing computed again"
        return "computed again elsewhere" if timing.attempts > 1 else "undisturbed"

    @property
    def mark(self) -> str:
        """Rich markup that shows whether the answer failed, is running, or ended as expected."""
        if self.error is not None:
            return "[red]✗ failed[/]"
        if self.last is None:
            return "[dim]…[/]"
        return "[green]✓ as expected[/]" if self.is_right else "[yellow]✗ not as expected[/]"


def main() -> int:
    """Run the demo. Returns 0 if every request was answered and no kill has changed an answer, 130 after Ctrl-C."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    try:
        return asyncio.run(_demo(console))
    except KaveriError as error:
        console.print(f"[red]kaveri demo: {escape(str(error))}[/]")
        return 1
    except KeyboardInterrupt:
        return 130


async def _demo(console: Console) -> int:
    prompts = _load_prompts()
    # Evenly spaced over the file, which is sorted by family of prompts.
    asks = [_Ask(*prompt) for prompt in prompts[:: max(1, len(prompts) // _PROMPT_COUNT)][:_PROMPT_COUNT]]
    longest = dict(sorted(prompts, key=lambda prompt: len(prompt[1]))[-_KILLED_COUNT:])
    started_s = time.monotonic()

    def progress(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:6.1f} s  {escape(line)}[/]")

    # The bundled model's answers are short; by default only longer contexts are worth a copy.
    settings = {"replication": "spread", "replica_min_tokens": 16, "replica_memory": "32MiB"}
    config = StackConfig.of(model=KAVERI_TINY, router_count=2, prefill_count=2, decode_count=2, **settings)
    async with LocalStack(config, progress) as stack:
        progress(f"the cluster is ready at {stack.target}; asking {len(asks)} things at once")
        async with AsyncClient(stack.target, timeout_s=_TIMEOUT_S) as client:
            await _ask_all(client, asks, console)
        console.print(_where_the_time_went(asks))
        right = sum(ask.is_right for ask in asks)
        answered = sum(ask.last is not None for ask in asks)
        console.print(f"{answered} of {len(asks)} requests answered, {right} as expected.")
        survived = await _show_kills(stack, longest, console)
    progress("everything is stopped")
    return 0 if answered == len(asks) and survived else 1


def _load_prompts() -> list[tuple[str, str]]:
    entries = json.loads(Path(resolve_model(KAVERI_TINY), "demo_prompts.json").read_text())
    return [(entry["prompt"], entry["expected"].strip()) for entry in entries]


async def _ask_all(client: AsyncClient, asks: list[_Ask], console: Console) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(client, ask)) for ask in asks]
        if console.is_terminal:
            with Live(console=console, refresh_per_second=_FRAMES_PER_S, transient=True) as live:
                while not all(task.done() for task in tasks):
                    live.update(_frame(asks, console.width))
                    await asyncio.wait(tasks, timeout=1 / _FRAMES_PER_S)
        else:
            await asyncio.wait(tasks)
    for ask in asks:
        console.print(f"\n[bold]{escape(ask.prompt)}[/]  {ask.mark}")
        console.print(Text(ask.text if ask.error is None else str(ask.error)))


async def _ask(client: AsyncClient, ask: _Ask) -> None:
    try:
        await ask.read(client)
    except KaveriError as error:
        ask.error = error


def _frame(asks: list[_Ask], width: int) -> Group:
    lines: list[Text] = []
    for ask in asks:
        lines.append(Text.from_markup(f"{ask.mark} [bold]{escape(ask.prompt)}[/]", overflow="ellipsis"))
        lines.append(Text("  " + ask.text[-(width - 3) :].replace("\n", " ")))
    for line in lines:
        line.no_wrap = True
    return Group(*lines)


def _where_the_time_went(asks: list[_Ask]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="where the time went, in ms", title_justify="left", padding=0)
    for name in ("tokens\nin", "\nout", "prefill\non", "decode\non"):
        table.add_column(name, justify="left" if name.endswith("on") else "right", no_wrap=True)
    for name in ("queue", "prefill", "KV\npush", "decode", "TTFT", "TPOT", "KV\nKiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for ask in asks:
        if ask.last is None or ask.last.usage is None or ask.last.timing is None:
            continue
        usage, timing, server = ask.last.usage, ask.last.timing, ask.last.timing.server
        table.add_row(
            str(usage.prompt_tokens),
            str(usage.completion_tokens),
            server.prefill_instance_id,
            server.decode_instance_id or "-",
            _ms(server.prefill_queue_s),
            _ms(server.prefill_s),
            _ms(server.kv_transfer_s),
            _ms(server.decode_s),
            _ms(timing.ttft_s),
            _ms(timing.tpot_s),
            f"{server.kv_bytes / 1024:.0f}",
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


async def _show_kills(stack: LocalStack, expected: Mapping[str, str], console: Console) -> bool:
    """During answers, kill a decode process, then a router, then let a decode instance prefill. expected: by prompt.
    Returns True if all answers match."""
    async with AsyncClient(list(stack.targets), timeout_s=_TIMEOUT_S) as client:
        right = True
        disturbances = (
            partial(_kill, stack, _busiest_decode, console),
            partial(_kill, stack, lambda view: _router_at(view, client.target), console),
            partial(_flip, stack, console),
        )
        for disturb in disturbances:
            for reading in await _read_all(client, expected, disturb):
                right = right and reading.is_right
                pause = f"longest pause {reading.longest_pause_s * 1e3:.0f} ms"
                console.print(f"  {reading.mark}  {pause}; {reading.recovery}")
            await stack.wait_until_ready(_WAIT_S)
    return right


async def _read_all(
    client: AsyncClient, expected: Mapping[str, str], disturb: Callable[[], Awaitable[None]]
) -> list[_Ask]:
    """Stream answers to all prompts at once. disturb: awaited once every answer has _KILL_BEHIND tokens."""
    readings = [_Ask(prompt, answer) for prompt, answer in expected.items()]
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


async def _choose(stack: LocalStack, choose: Callable[[ClusterView], str]) -> str:
    """Wait until `choose` returns a process. Raises Unavailable."""
    give_up_s = time.monotonic() + _WAIT_S
    while not (name := choose(stack.view())):
        if time.monotonic() > give_up_s:
            raise Unavailable("no process serves the requests")
        await stack.wait_for_change(0.1)
    return name


async def _flip(stack: LocalStack, console: Console) -> None:
    name = await _choose(stack, _busiest_decode)
    console.print(f"\n[bold]kaveri flip {name} --to prefill[/]  [dim](in the middle of answers)[/]")
    began_s = time.monotonic()
    await flip_instance(name, (Phase.PREFILL,), ",".join(stack.targets))
    console.print(f"  [dim]{name} takes prompts after {1e3 * (time.monotonic() - began_s):.0f} ms[/]")


async def _kill(stack: LocalStack, choose: Callable[[ClusterView], str], console: Console) -> None:
    name = await _choose(stack, choose)
    console.print(f"\n[bold]kill -9 {stack.pids()[name]}[/]  [dim]({name}, in the middle of answers)[/]")
    stack.process(name).send_signal(signal.SIGKILL)


def _busiest_decode(view: ClusterView) -> str:
    """Return the id of the decode instance with the most running requests; empty while none has any."""
    running = {name: each.load.running_requests for name, each in view.instances.items() if name.startswith("decode-")}
    busiest = max(running, key=lambda name: running[name], default="")
    return busiest if running.get(busiest) else ""


def _router_at(view: ClusterView, target: str) -> str:
    return next((name for name, each in view.instances.items() if each.record.address == target), "")


if __name__ == "__main__":
    sys.exit(main())
