"""Watches processes from outside: how long their event loops stand still, and how much memory they take at most.

A loop is asked for /livez of its metrics port, every few milliseconds. The longest answer is the longest stall, with
what the machine's other work adds to it. Linux only.
"""

import asyncio
import multiprocessing
import re
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop

_PAUSE_S = 0.01
_READ_S = 60.0
_RESET_PEAK = "5"
"""See proc(5), clear_refs."""
_STATUS_KIB = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB", re.MULTILINE)


class LoopProbe:
    """A process that probes loops while its context lasts."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        """ports: of the metrics of each process, by its name, on loopback."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_probe, args=(dict(ports), theirs), daemon=True)

    async def begin(self) -> None:
        """Forgets what was measured before."""
        await asyncio.to_thread(self._ask, "begin")

    async def longest_s(self) -> dict[str, float]:
        """The slowest answer of each process since begin()."""
        return await asyncio.to_thread(self._ask, "read")

    def _ask(self, what: str) -> dict[str, float]:
        self._ours.send(what)
        assert self._ours.poll(_READ_S), "the probe does not answer"
        found: dict[str, float] = self._ours.recv()
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


def _probe(ports: dict[str, int], asked: "Connection[object, str]") -> None:
    uvloop.run(_probe_all(ports, asked))


async def _probe_all(ports: dict[str, int], asked: "Connection[object, str]") -> None:
    longest_s = dict.fromkeys(ports, 0.0)
    waiting_s: dict[str, float] = {}
    loop = asyncio.get_running_loop()

    def answer() -> None:
        if asked.recv() == "begin":
            longest_s.update(dict.fromkeys(ports, 0.0))
            waiting_s.update(dict.fromkeys(waiting_s, time.monotonic()))
        now_s = time.monotonic()
        asked.send({name: max(most, now_s - waiting_s.get(name, now_s)) for name, most in longest_s.items()})

    async def ask(name: str, port: int) -> None:
        while True:
            waiting_s[name] = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.read()
            longest_s[name] = max(longest_s[name], time.monotonic() - waiting_s.pop(name))
            writer.close()
            await asyncio.sleep(_PAUSE_S)

    loop.add_reader(asked.fileno(), answer)
    async with asyncio.TaskGroup() as group:
        for name, port in ports.items():
            group.create_task(ask(name, port))
