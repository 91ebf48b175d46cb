"""`vllm serve` as a process of this machine, and a client of its completions endpoint that streams token ids."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from kaveri.local.process import ChildProcess
from kaveri.models import resolve_model

_START_TIMEOUT_S = 600.0
_STOP_GRACE_S = 20.0
_POLL_S = 0.25
_KEEP_ALIVE_S = 3600
_ANSWER_TIMEOUT_S = 300.0
MODEL_NAME = "served"


class VllmServer:
    """A running server. Only its own process is known here; it has started others, see psutil."""

    def __init__(self, url: str, process: ChildProcess, session: Any) -> None:
        """session: an aiohttp.ClientSession."""
        self._url = url
        self._process = process
        self._session = session

    @property
    def pid(self) -> int:
        """Of the HTTP server, whose children compute."""
        return self._process.pid

    async def ask(self, prompt: Sequence[int], answer_tokens: int, note: Callable[[int], None]) -> None:
        """Waits for an answer, drawn greedily past the end-of-sequence token; notes how many tokens came.

        Raises RuntimeError when the answer has an error in it.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            # One server-sent event a line, empty lines between them.
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "choices" not in event:
                    raise RuntimeError(f"vllm serve has answered {event}")
                note(sum(len(choice["token_ids"] or ()) for choice in event["choices"]))


@contextlib.asynccontextmanager
async def serving(
    name: str, model: str, flags: Sequence[str], threads: int, log_dir: Path
) -> AsyncIterator[VllmServer]:
    """A server while the context lasts. threads: with which it computes, wherever it may run.

    The executor is within the engine's process, which saves a process and a copy of every step against vLLM's default
    on CPUs, and is how Kaveri runs it.
    """
    import aiohttp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What `vllm serve` comes to. The command itself asks for the metadata of a package named vllm, which the CPU build
    # is not.
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", resolve_model(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--disable-uvicorn-access-log", "--disable-log-stats", *flags]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        # Where its threads run is said from outside, once they are there.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Servers idle while others are asked; a connection must not be closed just as it is used again.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_S),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = ChildProcess.start(name, command, log_dir / f"{name}.log", environment)
    url = f"http://127.0.0.1:{port}"
    try:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await _wait_until_ready(process, session, url)
            yield VllmServer(url, process, session)
    finally:
        await process.stop(_STOP_GRACE_S)


async def _wait_until_ready(process: ChildProcess, session: Any, url: str) -> None:
    import aiohttp

    give_up_at_s = time.monotonic() + _START_TIMEOUT_S
    while process.exit_status is None and time.monotonic() < give_up_at_s:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"vllm serve is not there: {' '.join(process.last_lines(3))}")
