import asyncio
import json
import os
import shutil
import ssl
from pathlib import Path

import pytest

from kaveri.security import tls_files
from kaveri.security.tls_files import TlsFiles
from tests.services.gateway.conftest import WITHIN_S, GatewayUnderTest, read_answer, request_bytes, run_gateway
from tests.services.router.cluster_script import ScriptedCluster
from tests.support.certificates import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
_HOST = "models.example.com"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.certify("public", dns=_HOST)


def _settings(files: TlsFiles) -> dict[str, str]:
    return {"public_tls_cert": files.certificate, "public_tls_key": files.key}


async def test_a_client_without_a_certificate_streams_over_https_and_plain_http_is_not_answered(
    cluster: ScriptedCluster, files: TlsFiles
) -> None:
    asked = {"prompt": [300, 301, 302], "max_tokens": 5, "stream": True}
    async with run_gateway(cluster, **_settings(files)) as gateway:
        async with asyncio.timeout(WITHIN_S):
            reader, writer = await _connect(gateway, files)
            writer.write(request_bytes("POST", "/v1/completions", json.dumps(asked).encode()))
            answer = await read_answer(reader)
            writer.close()
        assert answer.status == 200
        assert "".join(event["choices"][0]["text"] for event in answer.events)
        reader, writer = await gateway.connect()
        writer.write(request_bytes("GET", "/v1/models"))
        async with asyncio.timeout(WITHIN_S):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()


async def test_a_refused_head_is_answered_over_tls_too(cluster: ScriptedCluster, files: TlsFiles) -> None:
    async with run_gateway(cluster, max_header_bytes=2048, **_settings(files)) as gateway:
        status, _ = await _ask(gateway, files, {"x-long": "x" * 4096})
        assert status == 431


async def test_a_renewed_certificate_is_shown_to_new_connections(
    cluster: ScriptedCluster, authority: Authority, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    async with run_gateway(cluster, **_settings(files)) as gateway:
        status, first = await _ask(gateway, files, {})
        assert status == 200
        renewed = authority.certify("renewed", dns=_HOST)
        os.replace(renewed.certificate, files.certificate)
        # It has no key yet: the former one stays in use.
        assert await _ask(gateway, files, {}) == (200, first)
        os.replace(renewed.key, files.key)
        status, second = await _ask(gateway, files, {})
        assert status == 200
        assert second != first


async def test_half_a_handshake_costs_no_more_than_its_time(cluster: ScriptedCluster, files: TlsFiles) -> None:
    async with run_gateway(cluster, slow_sender_s=0.5, **_settings(files)) as gateway:
        reader, writer = await gateway.connect()
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        async with asyncio.timeout(WITHIN_S):
            assert await reader.read() == b""
        writer.close()


async def _connect(gateway: GatewayUnderTest, files: TlsFiles) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=files.authority)
    return await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context, server_hostname=_HOST)


async def _ask(gateway: GatewayUnderTest, files: TlsFiles, headers: dict[str, str]) -> tuple[int, bytes]:
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await _connect(gateway, files)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.write(request_bytes("GET", "/v1/models", headers=headers))
        answer = await read_answer(reader)
        writer.close()
    return answer.status, shown
