from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from kaveri.config.services import ServiceKind, program_of
from kaveri.errors import ConfigError
from kaveri.local.config import StackConfig, exposed_ports, service_command, service_environment
from tests.support.local_cluster import run_cluster
from tests.support.redis_fixture import run_redis


def flags_of(config: StackConfig, role: ServiceKind, instance_id: str) -> dict[str, str]:
    words = service_command(config, role, instance_id, 7)[1 + len(program_of(role)) :]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("host", "advertised"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("192.0.2.7", "192.0.2.7")]
)
def test_only_the_router_leaves_loopback_and_is_advertised_where_it_listens(host: str, advertised: str) -> None:
    config = StackConfig.of(host=host)
    router = flags_of(config, ServiceKind.ROUTER, "router-0")
    assert (router["--host"], router["--advertise-host"]) == (host, advertised)
    for role in (ServiceKind.PREFILL, ServiceKind.DECODE):
        flags = flags_of(config, role, f"{role}-0")
        assert (flags["--host"], flags["--advertise-host"]) == ("127.0.0.1", "127.0.0.1")


def test_secrets_are_in_the_environment_and_on_no_command_line() -> None:
    engine_args = '{"hf_token": "hunter3"}'
    config = StackConfig.of(predictor="folder", engine_args=engine_args, redis_url="redis://:hunter2@127.0.0.1:1/0")
    inherited = {"HOME": "/home/me", "KAVERI_REDIS_URL": "redis://other", "KAVERI_REDIS_URL_FILE": "/run/other"}
    for role in ServiceKind:
        command = " ".join(service_command(config, role, f"{role}-0", 7) if role in config_roles(config) else ())
        assert "hunter" not in command
    environment = service_environment(config, ServiceKind.DECODE, config.redis_url, inherited)
    assert environment == {"HOME": "/home/me", "KAVERI_REDIS_URL": config.redis_url, "KAVERI_ENGINE_ARGS": engine_args}
    assert "KAVERI_ENGINE_ARGS" not in service_environment(config, ServiceKind.ROUTER, config.redis_url, inherited)
    assert service_environment(StackConfig(config_file="k.toml"), ServiceKind.ROUTER, "unix:///r.sock", {}) == {
        "KAVERI_REDIS_URL": "unix:///r.sock",
        "KAVERI_CONFIG": "k.toml",
    }


def config_roles(config: StackConfig) -> set[ServiceKind]:
    return {role for role in ServiceKind if config.instance_ids(role)}


@pytest.mark.parametrize("name", ["model", "host"])
def test_empty_setting_is_refused_and_becomes_no_default(name: str) -> None:
    with pytest.raises(ConfigError, match="is empty") as caught:
        StackConfig.of(**{name: " "})
    assert caught.value.field == "--" + name.replace("_", "-")


def test_metrics_ports_past_the_last_port_are_refused() -> None:
    assert StackConfig.of(metrics_port=65_531).metrics_port_of("decode-1") == 65_535
    with pytest.raises(ConfigError, match=r"--metrics-port: is 65532; 5 ports follow one another, up to 65535"):
        StackConfig.of(metrics_port=65_532)


def test_metrics_ports_follow_one_another_routers_first() -> None:
    config = StackConfig.of(metrics_port=9100, prefill_count=1, decode_count=2)
    ports = [config.metrics_port_of(name) for name in ("router-0", "prefill-0", "decode-0", "decode-1")]
    assert ports == [9100, 9101, 9102, 9103]
    assert flags_of(config, ServiceKind.DECODE, "decode-1")["--metrics-port"] == "9103"
    assert flags_of(StackConfig(), ServiceKind.DECODE, "decode-1")["--metrics-port"] == "0"


def test_a_setting_goes_to_the_services_that_have_it_and_a_roles_flag_wins() -> None:
    config = StackConfig.of(
        engine="fake", max_requests=9, log_level="debug", device="cpu", predictor="folder", max_model_len=0,
        decode_flags=("--engine", "timed"),
    )  # fmt: skip
    flags = {
        role: flags_of(config, role, f"{role}-0")
        for role in (ServiceKind.ROUTER, ServiceKind.DECODE, ServiceKind.PREDICTOR)
    }
    assert {role: found.get("--log-level") for role, found in flags.items()} == dict.fromkeys(flags, "debug")
    assert flags[ServiceKind.ROUTER]["--max-requests"] == "9"
    assert "--max-requests" not in flags[ServiceKind.DECODE]
    assert flags[ServiceKind.DECODE]["--engine"] == "timed"
    assert "--max-model-len" not in flags[ServiceKind.DECODE]
    # Without a role it means the engines' device.
    assert flags[ServiceKind.DECODE]["--device"] == "cpu"
    assert "--device" not in flags[ServiceKind.PREDICTOR]


def test_a_setting_that_is_switched_off_for_the_stack_is_switched_off_in_its_services() -> None:
    config = StackConfig.of(engine="fake", fake_verify_kv=False, kv_port=0)
    command = service_command(config, ServiceKind.DECODE, "decode-0", 0)
    assert command[command.index("--fake-verify-kv") + 1] == "False"
    assert "--kv-port" not in command


async def test_password_is_on_no_command_line_and_in_no_log() -> None:
    async with run_redis() as redis, Redis.from_url(redis.url) as client:
        await client.config_set("requirepass", "hunter2")
        url = redis.url.replace("redis://", "redis://:hunter2@")
        async with run_cluster(redis_url=url) as cluster:
            assert (await cluster.command("generate", "hello", "--max-tokens", "4"))[0] == 0
            children = [psutil.Process(pid) for pid in cluster.pids().values()]
            assert len(children) == 3
            for child in children:
                assert "hunter2" not in " ".join(child.cmdline())
                assert child.environ()["KAVERI_REDIS_URL"] == url
            for name in cluster.stack.instance_ids:
                assert "hunter2" not in cluster.log_text(name)


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
