"""The images' health check, run as a container runs it, against the server of --health-port."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kaveri.telemetry.metrics import serve_metrics
from tests.support.redis_fixture import free_port

READY_FILE = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "ready.py"


async def _exit_status(port: int) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(READY_FILE)),
        env={**os.environ, "KAVERI_HEALTH_PORT": str(port)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    return await asyncio.wait_for(process.wait(), 20)


@pytest.mark.parametrize(("is_ready", "status"), [(True, 0), (False, 1)])
async def test_its_status_is_that_of_readyz(is_ready: bool, status: int) -> None:
    port = free_port()
    async with serve_metrics("127.0.0.1", port, lambda: is_ready, registry=None):
        assert await _exit_status(port) == status


async def test_it_fails_where_nothing_listens() -> None:
    assert await _exit_status(free_port()) == 1
