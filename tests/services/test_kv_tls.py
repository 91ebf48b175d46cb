"""KV over TLS between prefill and decode servers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError
from kaveri.security.tls_files import TlsFiles
from services.instance.config import DecodeConfig, PrefillConfig
from tests.support.certificates import Authority
from tests.support.settings import parse_config

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")

TOKEN_IDS = list(range(1, 60))


@pytest.fixture
def kv_transports() -> tuple[str, ...]:
    return ("tls",)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., dict[str, str]]:
    authority = Authority(tmp_path)

    def made(name: str) -> dict[str, str]:
        files = authority.certify(name)
        return {"kv_tls_cert": files.certificate, "kv_tls_key": files.key, "kv_tls_ca": files.authority}

    return made


async def test_a_request_is_pushed_over_tls_and_says_so(cluster: Any, settings: Callable[..., dict[str, str]]) -> None:
    prefill = await cluster.prefill(**settings("prefill"))
    await cluster.decode(**settings("decode"))
    router = await cluster.router()
    call = router.prefill(prefill, "a", TOKEN_IDS, max_tokens=8)
    assert await router.answer(call, "a") == FakeModel().answer(TOKEN_IDS, 0, 8)
    assert call.get("handed_over").kv_transport == "tls"
    await cluster.all_free()


async def test_what_tls_refuses_is_pushed_elsewhere(
    cluster: Any, settings: Callable[..., dict[str, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (others := tmp_path / "others").mkdir()
    foreign = Authority(others, "others").certify("foreign")
    prefill = await cluster.prefill(kv_transports=("tls", "unix"), **settings("prefill"))
    await cluster.decode(
        kv_transports=("tls", "unix"),
        kv_tls_cert=foreign.certificate,
        kv_tls_key=foreign.key,
        kv_tls_ca=foreign.authority,
    )
    router = await cluster.router()
    call = router.prefill(prefill, "a", TOKEN_IDS, max_tokens=8)
    assert await router.answer(call, "a") == FakeModel().answer(TOKEN_IDS, 0, 8)
    assert call.get("handed_over").kv_transport == "unix"
    logged = capfd.readouterr().out
    assert "kv_peer_connected" in logged
    assert "the peer's certificate: self-signed certificate in certificate chain" in logged
    await cluster.all_free()


@pytest.mark.parametrize("config_type", [PrefillConfig, DecodeConfig])
def test_the_flags_are_read_and_incomplete_or_idle_ones_are_named(config_type: type[DecodeConfig]) -> None:
    def files(*flags: str) -> TlsFiles | None:
        return parse_config(config_type, "test", flags, {}).kv_tls

    over_tls = ("--kv-transports", "shm,tls")
    all_three = ("--kv-tls-cert", "a.pem", "--kv-tls-key", "a.key", "--kv-tls-ca", "ca.pem")
    assert files() is None
    assert files(*over_tls, *all_three) == TlsFiles("a.pem", "a.key", "ca.pem")
    general = tuple(flag.replace("--kv-tls", "--tls") for flag in all_three)
    assert files("--kv-transports", "tcp", *general, "--tls-name", "c") == TlsFiles("a.pem", "a.key", "ca.pem", "c")
    with pytest.raises(ConfigError, match="is not given") as incomplete:
        files(*over_tls, *all_three[:4])
    assert incomplete.value.field == "kv_tls_ca"
    with pytest.raises(ConfigError, match="would change nothing: tls is not in kv_transports") as idle:
        files(*all_three)
    assert idle.value.field == "kv_tls_cert"
