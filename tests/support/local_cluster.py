"""Real cluster of processes for tests, whose processes can be killed, stopped and restarted."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from kaveri.domain.view import ClusterView
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from tests.support.command import run_kaveri

_POLL_S = 0.1
_SHOWN_LINES = 20
_DEFAULTS: dict[str, Any] = {
    "engine": "fake",
    "prefill_count": 1,
    "decode_count": 1,
    "restart": False,
    "drain_timeout_s": 5.0,
    "start_timeout_s": 90.0,
}


class LocalCluster:
    """LocalStack with the operations of fault tests. name: an instance id or "redis"."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.target = stack.target
        """Address of the first router, "host:port"."""
        self.redis_url = stack.redis_url

    def pids(self) -> dict[str, int]:
        """Return the ids of running processes by instance id and "redis"."""
        return self.stack.pids()

    def view(self) -> ClusterView:
        return self.stack.view()

    def log_text(self, name: str) -> str:
        """Return all output of a process since the cluster started, over its restarts."""
        return self.stack.process(name).log_path.read_text(errors="replace")

    async def kill(self, name: str) -> None:
        """Send SIGKILL. The process is not restarted before restart()."""
        await self.stack.process(name).kill()

    def freeze(self, name: str) -> None:
        """Send SIGSTOP, also to the process of its engine; connections stay open."""
        os.killpg(self.stack.process(name).pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        os.killpg(self.stack.process(name).pid, signal.SIGCONT)

    async def stop(self, name: str, grace_s: float = 10.0) -> int:
        """Send SIGTERM, which drains the instance; return its exit status. It is not restarted before restart()."""
        return await self.stack.process(name).stop(grace_s)

    async def restart(self, name: str, within_s: float = 120.0) -> None:
        """Restart a dead process and wait until the whole cluster accepts requests."""
        await self.stack.restart(name)
        await self.stack.wait_until_ready(within_s)

    async def command(self, *arguments: str) -> tuple[int, str, str]:
        """Run `kaveri ARGUMENTS --target` with this cluster's routers; return exit status, stdout and stderr."""
        ended = await asyncio.to_thread(run_kaveri, *arguments, "--target", ",".join(self.stack.targets))
        return ended.returncode, ended.stdout, ended.stderr

    async def wait_for_view(self, condition: Callable[[ClusterView], bool], within_s: float = 60.0) -> ClusterView:
        """Return the first view that meets the condition. Raises AssertionError, with the last view, after `within_s`
        s."""
        give_up_at_s = time.monotonic() + within_s
        while not condition(view := self.view()):
            assert time.monotonic() < give_up_at_s, f"after {within_s} s the view is still {view}"
            await self.stack.wait_for_change(_POLL_S)
        return view

    def show_logs(self) -> None:
        """Print the last log lines of every process, for a failing test."""
        for name in ("redis", *self.stack.instance_ids):
            for line in self.stack.process(name).last_lines(_SHOWN_LINES):
                print(f"{name}: {line}", file=sys.stderr)


@contextlib.asynccontextmanager
async def run_cluster(**settings: Any) -> AsyncIterator[LocalCluster]:
    """Run a cluster: one router, prefill and decode instance on the fake engine, unless `settings` (StackConfig's
    fields) differ. Prints the logs on an error; asserts at the end that no process is left."""
    stack = LocalStack(StackConfig.of(**_DEFAULTS | settings), report=_report)
    pids: set[int] = set()
    async with stack:
        cluster = LocalCluster(stack)
        try:
            yield cluster
        except BaseException:
            cluster.show_logs()
            raise
        finally:
            pids.update(cluster.pids().values())
    left = [pid for pid in pids if _is_alive(pid)]
    assert not left, f"processes left behind: {left}"


def run_vllm_cluster(model: Path, **settings: Any) -> contextlib.AbstractAsyncContextManager[LocalCluster]:
    """Run a cluster on vLLM in float32."""
    given = {"model": str(model), "engine": "vllm", "dtype": "float32", "start_timeout_s": 600.0}
    return run_cluster(**given | settings)


def all_blocks_free(view: ClusterView) -> bool:
    return all(status.load.free_blocks == status.load.total_blocks for status in view.instances.values())


def _report(line: str) -> None:
    # With the time, so that a test that took too long shows where.
    print(f"{time.strftime('%X')} {line}", file=sys.stderr)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
