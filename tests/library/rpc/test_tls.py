import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog.testing
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kaveri.client.async_client import AsyncClient
from kaveri.errors import ConfigError, Unauthenticated, Unavailable
from kaveri.rpc.channels import Channels
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.rpc.tls import RpcTls, process_tls, use_tls
from kaveri.security import tls_files
from kaveri.security.tls_files import TlsFiles, WatchedTlsFiles
from kaveri.wire.status import error_of
from tests.support.certificates import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def _tls_of_this_test_only() -> Iterator[None]:
    former = process_tls()
    use_tls(None)
    yield
    use_tls(former)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.certify("server")


@contextlib.asynccontextmanager
async def _serving(files: TlsFiles) -> AsyncIterator[str]:
    use_tls(RpcTls(files))
    server = RpcServer("127.0.0.1", 0, [])
    use_tls(None)
    await server.start()
    await server.ready()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def _ask(address: str, tls: RpcTls | None) -> None:
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        except aio.AioRpcError as error:
            raise error_of(error) from error


async def test_a_caller_without_tls_is_refused(files: TlsFiles) -> None:
    async with _serving(files) as address:
        with pytest.raises(Unavailable):
            await _ask(address, None)


async def test_a_caller_without_a_certificate_is_refused(files: TlsFiles) -> None:
    credentials = grpc.ssl_channel_credentials(_read(files.authority))
    options = (("grpc.ssl_target_name_override", files.name),)
    async with _serving(files) as address, aio.secure_channel(address, credentials, options=options) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_of_another_authority_or_with_an_expired_certificate_is_refused(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    (others := tmp_path / "others").mkdir()
    # The caller trusts the server, so only the server can refuse.
    foreign = replace(Authority(others, "others").certify("foreign"), authority=files.authority, name=files.name)
    async with _serving(files) as address:
        for refused in (foreign, authority.certify("expired", days=-1)):
            with pytest.raises(Unavailable):
                await _ask(address, RpcTls(refused))


async def test_a_caller_of_another_cluster_is_refused_by_name(authority: Authority, files: TlsFiles) -> None:
    other = replace(authority.certify("other", dns="other-cluster"), name=files.name)
    async with _serving(files) as address:
        with pytest.raises(Unauthenticated, match="does not carry the name of this cluster, kaveri"):
            await _ask(address, RpcTls(other))


async def test_a_server_of_another_cluster_or_authority_gets_no_call(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    (others := tmp_path / "others").mkdir()
    ours = RpcTls(authority.certify("client"))
    for server in (authority.certify("other", dns="other-cluster"), Authority(others, "others").certify("foreign")):
        async with _serving(server) as address:
            with pytest.raises(Unavailable):
                await _ask(address, ours)


async def test_reflection_and_streams_are_refused_by_name_too(authority: Authority, files: TlsFiles) -> None:
    other = replace(authority.certify("other", dns="other-cluster"), name=files.name)
    async with _serving(files) as address, open_channel(address, RpcTls(other)) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        with pytest.raises(aio.AioRpcError) as refused:
            await watching.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with _serving(files) as address, open_channel(address, RpcTls(files)) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()


async def test_certificates_of_a_new_authority_are_taken_up_by_ports_and_channels_without_a_restart(
    authority: Authority, files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    (others := tmp_path / "others").mkdir()
    renewed = Authority(others, "others").certify("renewed")
    former = authority.certify("former")
    # With a copy of its authority's file, because the test replaces the original.
    shutil.copy(former.authority, former.authority + ".former")
    former = replace(former, authority=former.authority + ".former")
    ours = RpcTls(files)
    async with _serving(files) as address:
        use_tls(ours)
        channels = Channels()
        stub = channels.stub(health_pb2_grpc.HealthStub, address)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        _replace(files, renewed)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert channels.stub(health_pb2_grpc.HealthStub, address) is stub
        with pytest.raises(Unavailable):
            await _ask(address, RpcTls(former))
        await _ask(address, ours)
        await _ask(address, RpcTls(renewed))
        await channels.close()


async def test_a_channel_that_lost_its_peer_comes_back_with_renewed_certificates(
    files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    (others := tmp_path / "others").mkdir()
    renewed = Authority(others, "others").certify("renewed")
    use_tls(RpcTls(files))
    first = RpcServer("127.0.0.1", 0, [])
    await first.start()
    await first.ready()
    address, channels = f"127.0.0.1:{first.port}", Channels()
    await channels.stub(health_pb2_grpc.HealthStub, address).Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
    await first.stop(0)
    _replace(files, renewed)
    again = RpcServer("127.0.0.1", first.port, [])
    await again.start()
    await again.ready()
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                stub = channels.stub(health_pb2_grpc.HealthStub, address)
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
                    break
                except aio.AioRpcError:
                    await asyncio.sleep(0.05)
    finally:
        await channels.close()
        await again.stop(0)


def test_files_in_the_middle_of_a_change_keep_the_former_ones_and_are_logged_once(
    authority: Authority, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    watched = WatchedTlsFiles(files)
    before = watched.now()
    renewed = authority.certify("renewed")
    with structlog.testing.capture_logs() as logged:
        os.replace(renewed.certificate, files.certificate)
        assert watched.now() == before
        assert watched.now() == before
        os.replace(renewed.key, files.key)
        after = watched.now()
    assert [line["event"] for line in logged] == ["tls_files_refused", "tls_files_read"]
    assert after.generation == before.generation + 1
    assert after.certificate != before.certificate


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
async def test_a_client_names_the_file_that_cannot_be_read(files: TlsFiles, missing: str) -> None:
    os.unlink(getattr(files, missing))
    field = {"certificate": "tls.cert", "key": "tls.key", "authority": "tls.ca"}[missing]
    with pytest.raises(ConfigError, match=f"{field}: cannot read"):
        AsyncClient("127.0.0.1:1", tls=files)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _replace(files: TlsFiles, renewed: TlsFiles) -> None:
    for name in ("authority", "key", "certificate"):
        shutil.copy(getattr(renewed, name), getattr(files, name) + ".new")
        os.replace(getattr(files, name) + ".new", getattr(files, name))
