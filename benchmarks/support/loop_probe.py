"""Watches processes from outside: how long their event loops stand still, and how much memory they take at most.

A loop is asked for /livez of its metrics port, every few milliseconds. An answer takes as long as the loop stands
still, and as long as its thread waits for a core that other processes use, which Linux counts. Linux only.
"""

import asyncio
import multiprocessing
import re
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import uvloop

_PAUSE_S = 0.01
_READ_S = 60.0
_RESET_PEAK = "5"
"""See proc(5), clear_refs."""
_STATUS_KIB = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB", re.MULTILINE)


class Loop(NamedTuple):
    """An event loop, on the main thread of a process."""

    pid: int
    port: int
    """The metrics port, on loopback."""


class Stalls(NamedTuple):
    """The longest delays of a loop since begin(), in seconds."""

    blocked_s: float = 0.0
    """Slowest answer, without the time in which the loop's thread was ready and waited for a core."""
    answer_s: float = 0.0
    """Slowest answer."""


class LoopProbe:
    """A process that probes loops while its context lasts."""

    def __init__(self, loops: Mapping[str, Loop]) -> None:
        """loops: by name."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_probe, args=(dict(loops), theirs), daemon=True)

    async def begin(self) -> None:
        """Forgets what was measured before."""
        await asyncio.to_thread(self._ask, "begin")

    async def longest(self) -> dict[str, Stalls]:
        """Return the longest delays of each loop since begin()."""
        return await asyncio.to_thread(self._ask, "read")

    def _ask(self, what: str) -> dict[str, Stalls]:
        self._ours.send(what)
        assert self._ours.poll(_READ_S), "the probe does not answer"
        found: dict[str, Stalls] = self._ours.recv()
        return found

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()


def resident_bytes(pid: int) -> int:
    """What a process has in memory now."""
    return _of_status(pid)["VmRSS"]


def forget_peak(pid: int) -> None:
    """The peak begins again at what the process has now."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)


def peak_bytes(pid: int) -> int:
    """The most that a process has had in memory since forget_peak()."""
    return _of_status(pid)["VmHWM"]


def _of_status(pid: int) -> dict[str, int]:
    found = _STATUS_KIB.findall(Path(f"/proc/{pid}/status").read_text())
    return {name: 1024 * int(kib) for name, kib in found}


def _waited_for_core_s(pid: int) -> float:
    """Time that the main thread has been ready to run without a core: the second field of schedstat, in seconds."""
    return 1e-9 * int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])


class _Sent(NamedTuple):
    """When a pending request was sent, and how long the loop's thread had waited for a core until then."""

    at_s: float
    waited_s: float

    @classmethod
    def now(cls, loop: Loop) -> Self:
        return cls(time.monotonic(), _waited_for_core_s(loop.pid))

    def stalls(self, loop: Loop, longest: Stalls) -> Stalls:
        """Return the longest delays so far, this one included."""
        answer_s = time.monotonic() - self.at_s
        blocked_s = answer_s - (_waited_for_core_s(loop.pid) - self.waited_s)
        return Stalls(max(longest.blocked_s, blocked_s), max(longest.answer_s, answer_s))


def _probe(loops: dict[str, Loop], asked: "Connection[object, str]") -> None:
    uvloop.run(_probe_all(loops, asked))


async def _probe_all(loops: dict[str, Loop], asked: "Connection[object, str]") -> None:
    longest = dict.fromkeys(loops, Stalls())
    waiting: dict[str, _Sent] = {}

    def answer() -> None:
        if asked.recv() == "begin":
            longest.update(dict.fromkeys(loops, Stalls()))
            waiting.update({name: _Sent.now(loops[name]) for name in waiting})
        for name, sent in waiting.items():
            longest[name] = sent.stalls(loops[name], longest[name])
        asked.send(longest)

    async def ask(name: str, loop: Loop) -> None:
        while True:
            # Opened before the measured time begins: accepting a connection takes iterations of the loop as well.
            reader, writer = await asyncio.open_connection("127.0.0.1", loop.port)
            await asyncio.sleep(_PAUSE_S)
            waiting[name] = _Sent.now(loop)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.read()
            longest[name] = waiting.pop(name).stalls(loop, longest[name])
            writer.close()

    asyncio.get_running_loop().add_reader(asked.fileno(), answer)
    async with asyncio.TaskGroup() as group:
        for name, loop in loops.items():
            group.create_task(ask(name, loop))
