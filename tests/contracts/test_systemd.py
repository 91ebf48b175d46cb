"""deploy/systemd, and the settings in docs/many-machines.md, as systemd and the services read them. Starts no unit."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kaveri.config.settings import read_settings
from kaveri.programs import setting_sections, settings_types
from kaveri.rpc.process import ServiceConfig

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kaveri@.service"
PAGE = (ROOT / "docs" / "many-machines.md").read_text()
INSTANCES = dict(re.findall(r"`/etc/kaveri/(\S+)\.env` \| (.*) \|$", PAGE, re.MULTILINE))


def _environment(lines: str) -> dict[str, str]:
    return {key: value for key, _, value in (line.partition("=") for line in re.findall(r"`([^`]*)`", lines))}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The command must exist where this runs.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kaveri/bin/kaveri", "/bin/true"))
    command = ["systemd-analyze", "verify", str(tmp_path / "kaveri@decode-0.service")]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"}
    )
    assert ended.returncode == 0, ended.stderr
    assert UNIT.name not in ended.stderr, ended.stderr


def test_sigkill_does_not_end_a_drain() -> None:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert int(seconds) > ServiceConfig(instance_id="any").drain_timeout_s


def test_the_page_has_two_instances_of_each_role() -> None:
    roles = [_environment(lines)["ROLE"] for lines in INSTANCES.values()]
    assert sorted(roles) == sorted(["router", "gateway", "prefill", "decode"] * 2)


@pytest.mark.parametrize("name", INSTANCES)
def test_the_services_read_what_the_page_writes(name: str, tmp_path: Path) -> None:
    (common,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "redis-url").write_text("redis://:secret@door:6379/0\n")
    file = tmp_path / "kaveri.toml"
    file.write_text(common.replace("/etc/kaveri/redis-url", str(tmp_path / "redis-url")))
    environment = _environment(INSTANCES[name])
    role = environment.pop("ROLE")
    environment |= {"KAVERI_CONFIG": str(file), "KAVERI_INSTANCE_ID": f"gpu-1-{name}"}
    config = read_settings(settings_types()[role], f"kaveri {role}", [], environment, setting_sections).config
    assert config.redis_url == "redis://:secret@door:6379/0"
    assert config.advertised_address(1) == f"{environment['KAVERI_ADVERTISE_HOST']}:1"
    assert config.host == "0.0.0.0"
    assert config.tls is not None
