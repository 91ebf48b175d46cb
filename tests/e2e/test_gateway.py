"""`kaveri up` with a gateway, as its user meets it: real processes, curl's bytes and the openai package."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from kaveri.extras import install_command
from tests.e2e.test_up import _up, until
from tests.support.command import run_kaveri
from tests.support.local_cluster import run_cluster

_HTTP = re.compile(r"OpenAI's HTTP API is at (http://127\.0\.0\.1:\d+)/v1\n")


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_up_starts_a_gateway_that_status_shows_and_that_is_started_again(tmp_path: Path) -> None:
    with _up(tmp_path, "--engine", "fake", "--prefill", "1", "--decode", "1", "--port", "0") as up:
        up.wait_until_ready()
        found = _HTTP.search(up.stderr)
        assert found is not None, up.stderr
        url = found[1]
        body = {"prompt": "hello", "max_tokens": 3}
        assert _post(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 3
        shown = json.loads(run_kaveri("status", "--target", up.target, "--json").stdout)["instances"]
        roles = {one["record"]["instance_id"]: one["record"]["role"] for one in shown}
        assert roles["gateway-0"] == "gateway"
        drained = run_kaveri("drain", "gateway-0", "--target", up.target)
        assert drained.returncode == 1
        assert "SIGTERM" in drained.stderr
        up.child_of("gateway").kill()

        def answers_again() -> bool:
            try:
                return bool(_post(f"{url}/v1/completions", body)["choices"])
            except OSError:
                return False

        until(answers_again, "the gateway was not started again", 60.0)
        assert up.end() == 0
        up.assert_nothing_left()


@pytest.mark.parametrize("stops", ["router", "gateway"])
async def test_a_gateway_goes_on_when_a_router_is_stopped_and_ends_its_answers_at_sigterm(stops: str) -> None:
    settings = {"gateway_count": 1, "router_count": 2, "decode_flags": ("--fake-step-s", "0.05")}
    async with run_cluster(**settings) as cluster:
        url = f"http://{cluster.stack.http_targets[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            stream = await client.completions.create(
                model="kaveri-tiny", prompt="x", max_tokens=40, stream=True, extra_body={"ignore_eos": True}
            )
            begun_s, reasons = time.monotonic(), []
            async for event in stream:
                if not reasons:
                    name = "gateway-0" if stops == "gateway" else _busy_router(cluster.view())
                    cluster.stack.process(name).send_signal(signal.SIGTERM)
                reasons.append(event.choices[0].finish_reason)
            assert reasons[-1] == "length", f"after {time.monotonic() - begun_s:.1f} s"


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
