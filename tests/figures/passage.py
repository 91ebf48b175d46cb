"""Files, classes and functions of Kaveri that one streamed request runs, by process.

A cluster of one router, one prefill and one decode instance (kaveri-tiny, tcp) serves one request of 180 words and 60
tokens. Functions that the processes also call during three seconds in which only another instance's load changes do not
count, nor do module bodies and comprehensions. It is the cluster's first request, so opening connections counts."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.view import InstanceRecord, Role
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from tests.support.store_conformance import beating

_HOOK = Path(__file__).parent / "hook"
_IDLE_S = 3.0
_CHANGING = InstanceRecord("predictor-0", 1, Role.PREDICTOR, "127.0.0.1:1", "another-model", lease_ttl_s=1.0)
_WINDOW_WITHIN_S = 60.0
_POLL_S = 0.05
_START = 0
_IDLE = 1
_REQUEST = 2


@dataclass(frozen=True)
class Passage:
    """Functions that a request runs in one process or in several, as (file, qualified name, line)."""

    functions: frozenset[tuple[str, str, int]]

    def __and__(self, other: "Passage") -> "Passage":
        return Passage(self.functions & other.functions)

    @property
    def files(self) -> frozenset[str]:
        """Return the functions' files, relative to the repository's root."""
        return frozenset(file for file, _, _ in self.functions)

    @property
    def classes(self) -> frozenset[tuple[str, str]]:
        """Return the functions' classes, as (file, qualified name)."""
        owners = ((file, name.split(".<locals>")[0].rpartition(".")[0]) for file, name, _ in self.functions)
        return frozenset((file, owner) for file, owner in owners if owner)

    @property
    def counts(self) -> dict[str, int]:
        return {"files": len(self.files), "classes": len(self.classes), "functions": len(self.functions)}


def joined(passages: Iterable[Passage]) -> Passage:
    """Return the union of the passages: functions of several processes count once."""
    return Passage(frozenset().union(*(passage.functions for passage in passages)))


async def trace_request() -> Mapping[str, Passage]:
    """Run a cluster for one request. Returns the Passage of each process: client, router, prefill, decode."""
    with tempfile.TemporaryDirectory(prefix="kaveri-trace-") as name:
        folder = Path(name)
        os.environ |= {"TRACE_CALLS_TO": name, "PYTHONPATH": f"{_HOOK}:{os.environ.get('PYTHONPATH', '')}"}
        try:
            return await _trace_in(folder)
        finally:
            del os.environ["TRACE_CALLS_TO"]
            os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(f"{_HOOK}:")


async def _trace_in(folder: Path) -> Mapping[str, Passage]:
    config = StackConfig.of(prefill_count=1, decode_count=1, engine="transformers", kv_transports="tcp", restart=False)
    async with LocalStack(config) as stack:
        await stack.wait_until_ready(config.supervision.start_timeout_s)
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.figures.client", stack.target),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        pids = {kind: stack.pids()[f"{kind}-0"] for kind in ("router", "prefill", "decode")} | {"client": client.pid}
        await _end_window(folder, pids, _START)
        async with RedisStore(stack.redis_url, config.cluster_name) as store, beating(store, _CHANGING):
            await asyncio.sleep(_IDLE_S)
            idle = await _end_window(folder, pids, _IDLE)
            # The other instance stays: its leaving would be heard in either window.
            client.stdin.write(b"\n")
            assert await client.stdout.readline() == b"answered\n"
            called = await _end_window(folder, pids, _REQUEST)
        client.stdin.close()
        assert await client.wait() == 0
    return {process: Passage(called[process] - idle[process]) for process in sorted(pids)}


async def _end_window(folder: Path, pids: Mapping[str, int], number: int) -> dict[str, frozenset[tuple[str, str, int]]]:
    """End the recording window of all processes; return the functions that each called in it."""
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    found = {}
    async with asyncio.timeout(_WINDOW_WITHIN_S):
        for process, pid in pids.items():
            path = folder / f"{pid}.{number}"
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(_POLL_S)
            found[process] = frozenset(_function_of(line) for line in path.read_text().splitlines() if _counts(line))
    return found


def _counts(line: str) -> bool:
    return not line.endswith(("<module>", "<lambda>", "comp>", "<genexpr>"))


def _function_of(line: str) -> tuple[str, str, int]:
    where, _, name = line.partition(" ")
    file, _, number = where.rpartition(":")
    return file, name, int(number)
