"""A real nginx with default settings in front of a gateway: it sends HTTP/1.0."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.gateway.conftest import WITHIN_S, GatewayUnderTest, read_head, request_bytes
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually
from tests.support.redis_fixture import free_port

_MAIN = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{backend}; {more} }} }}
}}
"""
_KEPT_ALIVE = 'proxy_http_version 1.1; proxy_set_header Connection "";'
_BODY = b'{"prompt": [300, 301, 302], "max_tokens": 20, "temperature": 0}'
_STREAM = _BODY.replace(b"}", b', "stream": true}')


def nginx_program() -> str:
    """Return the path of nginx. Skips the test without it, but fails in continuous integration."""
    # Debian's is in a folder that only root's PATH has.
    path = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is None:
        reason = "nginx is not installed (Debian: apt-get install nginx-light)"
        assert os.environ.get("CI", "") not in ("true", "1"), f"{reason}; continuous integration must have it"
        pytest.skip(reason)
    return path


@contextlib.asynccontextmanager
async def nginx_before(gateway: GatewayUnderTest, folder: Path, more: str) -> AsyncIterator[GatewayUnderTest]:
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_MAIN.format(folder=folder, port=port, backend=gateway.port, more=more))
    process = await asyncio.create_subprocess_exec(
        nginx_program(), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                assert process.returncode is None, (folder / "error.log").read_text()
                with contextlib.suppress(ConnectionError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                await asyncio.sleep(0.02)
        yield GatewayUnderTest(gateway.gateway, port, gateway.router, gateway.sdk, gateway.stopping, gateway.serving)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("more", ["", _KEPT_ALIVE], ids=["default", "HTTP/1.1"])
async def test_answers_through_nginx_equal_the_gateways_whole_and_streamed(
    gateway: GatewayUnderTest, tmp_path: Path, more: str
) -> None:
    async with nginx_before(gateway, tmp_path, more) as behind:
        expected = await gateway.complete(max_tokens=20)
        for _ in range(2):
            whole = await behind.complete(max_tokens=20)
            assert (whole.status, whole.json["choices"]) == (200, expected.json["choices"])
            streamed = await behind.complete(max_tokens=20, stream=True)
            text = "".join(event["choices"][0]["text"] for event in streamed.events)
            assert (streamed.status, text) == (200, expected.json["choices"][0]["text"])
            refused = await behind.complete(n="x")
            assert (refused.status, refused.error["param"]) == (400, "n")


async def test_nginx_passes_events_on_as_they_come(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, tmp_path: Path
) -> None:
    cluster.decodes["decode-0"].pause_at = 5
    async with nginx_before(gateway, tmp_path, "") as behind:
        reader, writer = await behind.connect()
        writer.write(request_bytes("POST", "/v1/completions", _STREAM))
        async with asyncio.timeout(WITHIN_S):
            status, _ = await read_head(reader)
            await reader.readuntil(b"\n\n")
        # The first event has arrived while the instance still holds back the rest of the answer.
        assert status == 200
        await eventually(lambda: cluster.decodes["decode-0"].is_paused)
        cluster.let_all_go()
        async with asyncio.timeout(WITHIN_S):
            assert b"data: [DONE]" in await reader.read()
        writer.close()


@pytest.mark.parametrize("body", [_BODY, _STREAM], ids=["whole", "streamed"])
async def test_a_client_of_nginx_that_leaves_cancels_its_request(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, tmp_path: Path, body: bytes
) -> None:
    cluster.decodes["decode-0"].pause_at = 5
    async with nginx_before(gateway, tmp_path, "") as behind:
        _, writer = await behind.connect()
        writer.write(request_bytes("POST", "/v1/completions", body))
        await eventually(lambda: cluster.decodes["decode-0"].is_paused)
        writer.close()
        await eventually(lambda: not gateway.gateway.app.answering and not cluster.decodes["decode-0"].running)
        cluster.let_all_go()
