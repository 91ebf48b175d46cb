"""The command lines of a local stack's services: who listens where."""

import pytest

from kaveri.cluster.view import Role
from kaveri.local.config import StackConfig, service_command


def flags_of(config: StackConfig, role: Role, instance_id: str) -> dict[str, str]:
    words = service_command(config, role, instance_id, "redis://127.0.0.1:1/0", 7)[4:]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("host", "advertised"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("192.0.2.7", "192.0.2.7")]
)
def test_only_the_router_leaves_loopback_and_is_advertised_where_it_listens(host: str, advertised: str) -> None:
    config = StackConfig(host=host)
    router = flags_of(config, Role.ROUTER, "router-0")
    assert (router["--host"], router["--advertise-host"]) == (host, advertised)
    for role in (Role.PREFILL, Role.DECODE):
        flags = flags_of(config, role, f"{role}-0")
        assert (flags["--host"], flags["--advertise-host"]) == ("127.0.0.1", "127.0.0.1")


def test_metrics_ports_follow_one_another_routers_first() -> None:
    config = StackConfig(metrics_port=9100, prefill_count=1, decode_count=2)
    ports = [config.metrics_port_of(name) for name in ("router-0", "prefill-0", "decode-0", "decode-1")]
    assert ports == [9100, 9101, 9102, 9103]
    assert flags_of(config, Role.DECODE, "decode-1")["--metrics-port"] == "9103"
    assert flags_of(StackConfig(), Role.DECODE, "decode-1")["--metrics-port"] == "0"
