import http.client
import shutil
import signal
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kaveri.rpc.process import ServiceConfig
from kaveri.security.posture import is_loopback, open_ports
from kaveri.security.tls_files import TlsFiles, WatchedTlsFiles
from services.gateway.config import GatewayConfig
from services.instance.config import DecodeConfig
from services.router.config import RouterConfig
from tests.library.rpc.test_process import WAIT_S, said, service
from tests.support.certificates import Authority
from tests.support.redis_fixture import free_port

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
_TLS = {"tls_cert": "a.pem", "tls_key": "a.key", "tls_ca": "ca.pem"}
_PUBLIC_TLS = {"public_tls_cert": "a.pem", "public_tls_key": "a.key"}


@needs_openssl
def test_with_tls_metrics_ask_for_a_certificate_and_health_has_a_plain_port_of_its_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (others := tmp_path / "others").mkdir()
    files = authority.certify("server")
    foreign = replace(Authority(others, "others").certify("foreign"), authority=files.authority)
    metrics, health = free_port(), free_port()
    flags = ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]
    with service("--act", "be ready", "--metrics-port", str(metrics), "--health-port", str(health), *flags) as process:
        assert said(process).startswith("serving")
        assert said(process) == "ready"
        for path in ("/metrics", "/livez", "/readyz"):
            assert _get(metrics, path, files) == 200
        for stranger in (None, TlsFiles(authority=files.authority), foreign, authority.certify("other", dns="other")):
            with pytest.raises((OSError, http.client.HTTPException)):
                _get(metrics, "/metrics", stranger)
        assert [_get(health, path) for path in ("/livez", "/readyz", "/metrics", "/")] == [200, 200, 404, 404]
        process.send_signal(signal.SIGTERM)
        assert said(process) == "draining"
        assert _get(health, "/readyz") == 503
        # Renewed by another authority: the port then refuses certificates of the old one.
        renewed = Authority(others, "renewed-authority").certify("renewed")
        former = replace(files, authority=renewed.authority)
        shutil.copy(files.certificate, former_certificate := str(tmp_path / "former.pem"))
        shutil.copy(files.key, former_key := str(tmp_path / "former.key"))
        for name in ("authority", "key", "certificate"):
            shutil.copy(getattr(renewed, name), getattr(files, name))
        _until_answered(metrics, renewed)
        with pytest.raises((OSError, http.client.HTTPException)):
            _get(metrics, "/metrics", replace(former, certificate=former_certificate, key=former_key))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (ServiceConfig(host="10.0.0.1", **_TLS), []),
        (ServiceConfig(host="10.0.0.1", metrics_port=9100, health_port=9101), ["--port", "--metrics-port"]),
        (ServiceConfig(host="localhost", metrics_port=9100), []),
        (GatewayConfig(host="::"), ["--port"]),
        (GatewayConfig(host="::", keys_file="keys"), ["--port"]),
        (GatewayConfig(host="::", keys_file="keys", **_PUBLIC_TLS), []),
        (GatewayConfig(host="::", keys_file="keys", metrics_port=9100, **_PUBLIC_TLS), ["--metrics-port"]),
        (RouterConfig(public_host="0.0.0.0", public_port=50443, keys_file="keys"), ["--public-port"]),
        (RouterConfig(public_host="0.0.0.0", public_port=50443, keys_file="keys", **_PUBLIC_TLS), []),
        (DecodeConfig(host="10.0.0.1", **_TLS), ["--kv-port (tcp)"]),
        (DecodeConfig(host="10.0.0.1", kv_transports=("shm", "unix"), **_TLS), []),
        (DecodeConfig(host="10.0.0.1", kv_transports=("tls",), **_TLS), []),
        (DecodeConfig(kv_host="10.0.0.1"), ["--kv-port (tcp)"]),
    ],
)
def test_what_is_open_is_what_a_network_reaches_without_encryption_or_without_asking(
    config: ServiceConfig, found: list[str]
) -> None:
    assert [line.partition(" at ")[0] for line in open_ports(config.ports)] == found


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("[::1]", True), ("::", False), ("0.0.0.0", False), ("node-7", False)],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def _until_answered(port: int, tls: TlsFiles) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while True:
        try:
            assert _get(port, "/metrics", tls) == 200
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
        else:
            return


def _get(port: int, path: str, tls: TlsFiles | None = None) -> int:
    """Return the HTTP status. tls: None: plain HTTP."""
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    else:
        context = WatchedTlsFiles(tls).make_context(ssl.PROTOCOL_TLS_CLIENT)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
