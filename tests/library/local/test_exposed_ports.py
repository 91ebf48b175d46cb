"""`kaveri up` warns of ports that other machines reach without a key or without encryption."""

from pathlib import Path

from kaveri.local.config import StackConfig, exposed_ports


def test_a_stack_on_loopback_exposes_nothing() -> None:
    assert exposed_ports(StackConfig.of(gateway_count=1, port=50051, gateway_port=8000), {}) == []


def test_ports_that_everyone_may_call_are_named() -> None:
    config = StackConfig.of(gateway_count=1, port=50051, gateway_port=8000, host="0.0.0.0")
    router, gateway = exposed_ports(config, {})
    assert router == "router-0 --port at 0.0.0.0:50051: not encrypted, everyone may call"
    assert gateway == "gateway-0 --port at 0.0.0.0:8000: not encrypted, everyone may call"


def test_keys_and_certificates_of_variables_and_files_count(tmp_path: Path) -> None:
    named = tmp_path / "settings.toml"
    named.write_text('[gateway]\nkeys_file = "/etc/keys.toml"\n')
    config = StackConfig.of(gateway_count=1, router_count=0, gateway_port=8000, host="0.0.0.0", config_file=str(named))
    assert exposed_ports(config, {}) == ["gateway-0 --port at 0.0.0.0:8000: not encrypted"]
