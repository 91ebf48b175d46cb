"""`kaveri up` with a gateway, as its user meets it: real processes, curl's bytes and the openai package."""

import asyncio
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

from kaveri import AsyncClient, SamplingParams
from kaveri.extras import install_command
from tests.e2e.test_exactness import VOCAB_SIZE, make_prompts
from tests.e2e.test_up import _up, until
from tests.support.command import run_kaveri
from tests.support.local_cluster import run_cluster
from tests.support.tiny_models import make_tiny_model

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


async def test_greedy_answers_over_http_equal_the_sdks_streamed_and_whole(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE, max_positions=1024, tokenizer=True)
    prompts = make_prompts(seed=3)
    settings = {"engine": "transformers", "dtype": "float32", "gateway_count": 1, "kv_cache_memory": "16MiB"}
    async with run_cluster(model=str(folder), **settings) as cluster, AsyncClient(cluster.target) as sdk:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = await asyncio.gather(
            *(sdk.generate(prompt_token_ids=prompt, params=params, timeout_s=100) for prompt in prompts)
        )
        url = f"http://{cluster.stack.http_targets[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=100) as client:
            fields: dict[str, Any] = {
                "model": str(folder),
                "prompt": [list(prompt) for prompt in prompts],
                "max_tokens": 12,
                "temperature": 0,
                "extra_body": {"return_token_ids": True},
            }
            whole = await client.completions.create(**fields)
            streamed: dict[int, list[int]] = {}
            texts: dict[int, str] = {}
            async for event in await client.completions.create(**fields, stream=True):
                (choice,) = event.choices
                streamed.setdefault(choice.index, []).extend(choice.token_ids)  # type: ignore[attr-defined]
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            scored = await client.completions.create(**{**fields, "max_tokens": 0}, echo=True, logprobs=0)
            reported = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            reports = [await sdk.generate(prompt_token_ids=prompt, params=reported) for prompt in prompts]
    for score, report in zip(scored.choices, reports, strict=True):
        expected_logprobs = [None if each.logprobs is None else each.logprobs.logprob for each in report.prompt_tokens]
        assert score.logprobs is not None
        assert score.logprobs.token_logprobs == pytest.approx(expected_logprobs, abs=1e-4)
        assert score.finish_reason == "length"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    for index, answer in enumerate(expected):
        choice = whole.choices[index]
        assert tuple(choice.token_ids) == answer.token_ids == tuple(streamed[index])  # type: ignore[attr-defined]
        assert choice.text == answer.text == texts[index]


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
