"""A gateway's process: it outlives its routers, drains, and says what it lacks. test_up.py restarts one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai

from kaveri.extras import install_command
from tests.support.command import run_kaveri
from tests.support.local_cluster import run_cluster


async def test_a_gateway_goes_on_when_a_router_is_stopped_and_ends_its_answers_at_sigterm() -> None:
    settings = {"gateway_count": 1, "router_count": 2, "decode_flags": ("--fake-step-s", "0.05")}
    async with run_cluster(**settings) as cluster:
        url = f"http://{cluster.stack.http_targets[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            for stops in ("router", "gateway"):
                stream = await client.completions.create(
                    model="kaveri-tiny", prompt="x", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
                )
                begun_s, reasons = time.monotonic(), []
                async for event in stream:
                    if not reasons:
                        name = "gateway-0" if stops == "gateway" else _busy_router(cluster.view())
                        cluster.stack.process(name).send_signal(signal.SIGTERM)
                    reasons.append(event.choices[0].finish_reason)
                assert reasons[-1] == "length", f"{stops}: after {time.monotonic() - begun_s:.1f} s"


def _busy_router(view: Any) -> str:
    routers = [one for name, one in view.instances.items() if name.startswith("router-")]
    return str(max(routers, key=lambda one: one.load.running_requests).record.instance_id)


def test_without_the_extra_the_gateway_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "uvicorn"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='uvicorn')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ended = run_kaveri("gateway", "--routers", "127.0.0.1:1", "--port", "0", PYTHONPATH=path)
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last == f"kaveri gateway: gateway: uvicorn is not installed: {install_command('gateway')}"
