import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from kaveri.errors import ConfigError
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from services.gateway.config import GatewayConfig
from services.gateway.service import serve
from tests.services.gateway.conftest import WITHIN_S, GatewayUnderTest, HttpAnswer, run_gateway
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import MODEL

_NO_REDIS = "redis://127.0.0.1:1/0"
"""Without Redis, so that each test has its own counts per key."""
_ASKED = {"prompt": [300, 301, 302], "max_tokens": 5, "temperature": 0}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = str(tmp_path / "keys.toml")
    add_key(path, "root", KeyLimits())
    return path


def _text(path: str) -> str:
    return Path(path).read_text()


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _remove_last(keys_file: str) -> None:
    text = _text(keys_file)
    _write(keys_file, text[: text.rindex("\n[")])


def _bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_without_a_good_key_every_path_but_health_and_metrics_is_refused(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    given = ("", "Bearer", "Bearer ", "Basic cm9vdDo=", "Bearer kaveri-" + "A" * 43, "Bearer " + "A" * 10_000)
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        for path in ("completions", "chat/completions", "models", "models/kaveri-tiny"):
            _assert_refused(await gateway.ask(f"/v1/{path}", _ASKED), path)
        for path in ("/v1/completions", "/tokenize", "/version", "/no"):
            for headers in ({}, *({"authorization": each} for each in given)):
                _assert_refused(await gateway.ask(path, _ASKED, headers=headers), (path, headers))
        assert gateway.gateway.app.in_flight == 0
        for path in ("/health", "/metrics"):
            assert (await gateway.ask(path)).status == 200


def _assert_refused(answer: HttpAnswer, asked: object) -> None:
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), asked
    assert (answer.error["code"], answer.error["type"]) == ("invalid_api_key", "invalid_request_error"), asked


async def test_a_key_is_good_for_every_path_and_a_client_of_openai_sends_it_by_itself(
    cluster: ScriptedCluster, keys_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = add_key(keys_file, "alice", KeyLimits(requests_per_s=1000, tokens_per_min=10**6, in_flight=10))
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key=secret, max_retries=0) as client:
            answer = await client.completions.create(model=MODEL, prompt="hello", max_tokens=3)
            assert answer.usage is not None
            assert [model.id async for model in client.models.list()]
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="unknown, or was revoked"):
                await client.completions.create(model=MODEL, prompt="hello", max_tokens=3)
    logged = capfd.readouterr()
    assert secret not in logged.out + logged.err


async def test_a_new_key_and_a_revoked_one_are_noticed_while_the_gateway_runs(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        secret = add_key(keys_file, "late", KeyLimits())
        await _until_status(gateway, secret, 200)
        _remove_last(keys_file)
        await _until_status(gateway, secret, 401)


async def test_requests_past_the_limit_of_a_second_get_429_and_other_keys_go_on(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    secret = add_key(keys_file, "slow", KeyLimits(requests_per_s=2))
    other = add_key(keys_file, "other", KeyLimits())
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        answers = await asyncio.gather(*(gateway.ask("/v1/models", headers=_bearer(secret)) for _ in range(20)))
        refused = [answer for answer in answers if answer.status == 429]
        assert len(refused) >= 20 - 2 * 4, "a few seconds may pass on a busy machine"
        assert refused[0].error["code"] == "rate_limit_exceeded"
        assert "2 requests a second" in refused[0].error["message"]
        assert refused[0].headers["retry-after"] == "1"
        assert 1 <= int(refused[0].headers["retry-after-ms"]) <= 1000
        assert (await gateway.ask("/v1/models", headers=_bearer(other))).status == 200


async def test_tokens_of_answers_count_against_the_limit_of_a_minute(cluster: ScriptedCluster, keys_file: str) -> None:
    secrets = [add_key(keys_file, name, KeyLimits(tokens_per_min=8)) for name in ("whole", "streamed")]
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        for secret, stream in zip(secrets, (False, True), strict=True):
            # 3 tokens of prompt and 5 of answer.
            first = await gateway.ask("/v1/completions", {**_ASKED, "stream": stream}, headers=_bearer(secret))
            assert first.status == 200
            second = await gateway.ask("/v1/completions", {**_ASKED, "stream": stream}, headers=_bearer(secret))
            assert second.status == 429
            assert "8 tokens a minute" in second.error["message"]
            assert 1 <= int(second.headers["retry-after"]) <= 60


async def test_requests_in_flight_are_limited_and_freed_when_a_client_goes(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    secret = add_key(keys_file, "one", KeyLimits(in_flight=1))
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS) as gateway:
        _, writer = await gateway.connect()
        body = json.dumps({**_ASKED, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n"
        writer.write(head.encode() + f"content-length: {len(body) + 1}\r\n\r\n".encode() + body)
        # Its last byte is missing: it is in flight until it comes, or the client goes.
        await _until_status(gateway, secret, 429)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await _until_status(gateway, secret, 200)


async def test_without_a_keys_file_a_key_is_neither_asked_for_nor_looked_at(gateway: GatewayUnderTest) -> None:
    assert (await gateway.complete()).status == 200
    assert (await gateway.ask("/v1/models", headers=_bearer("none"))).status == 200


async def _until_status(gateway: GatewayUnderTest, secret: str, status: int) -> Any:
    async with asyncio.timeout(WITHIN_S):
        while (await gateway.ask("/v1/models", headers=_bearer(secret))).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_gateway_with_a_key_for_its_routers_reads_nothing_at_decode_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAVERI_API_KEY", "key")
    config = GatewayConfig(routers=("127.0.0.1:1",), direct="on", port=0)
    with pytest.raises(ConfigError, match="--direct: on does not go with KAVERI_API_KEY: the public ports"):
        await serve(config, asyncio.Event())
