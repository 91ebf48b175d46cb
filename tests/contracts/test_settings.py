"""Every service's settings are registered by name, and all services accept the file in docs/operations.md."""

import re
from collections import Counter
from pathlib import Path

import pytest

from kaveri.config.settings import names_of, read_settings
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.programs import setting_sections, settings_types

ROOT = Path(__file__).resolve().parents[2]


def test_every_service_has_its_settings_listed() -> None:
    listed = {base.__module__ for declared in settings_types().values() for base in declared.__mro__}
    assert {f"services.{path.parent.name}.config" for path in ROOT.glob("services/*/config.py")} <= listed


@pytest.mark.parametrize("section", sorted(settings_types()))
def test_every_service_takes_the_documented_file(section: str, tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    assert found is not None
    secret = tmp_path / "redis-url"
    secret.write_text("redis://redis:6379/0\n")
    path = tmp_path / "kaveri.toml"
    path.write_text(found[1].replace("/run/secrets/redis-url", str(secret)))
    needed = ("--out", "profile.json") if section == "profile" else ()
    arguments = ("--config", str(path), *needed)
    read = read_settings(settings_types()[section], f"kaveri {section}", arguments, {}, setting_sections)
    if section != "gateway":
        assert read.config.model == "kaveri-tiny"
    if section == "decode":
        assert (read.config.max_batch, read.config.redis_url) == (128, "redis://redis:6379/0")


@pytest.mark.parametrize(
    ("section", "flag"),
    [
        ("profile", "--kv-port"),
        ("profile", "--chunk-tokens"),
    ],
)
def test_a_service_refuses_what_would_change_nothing_there(section: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: is no flag of kaveri {section}"):
        read_settings(settings_types()[section], f"kaveri {section}", (flag, "1"), {}, setting_sections)


def test_every_setting_of_an_engine_is_declared_once() -> None:
    with_engine = [settings for settings in settings_types().values() if issubclass(settings, EngineSettings)]
    classes = {base for settings in with_engine for base in settings.__mro__}
    declared = Counter(name for found in classes for name in vars(found).get("__annotations__", ()))
    assert len(with_engine) == 4
    assert {name for name in names_of(EngineSettings).own if declared[name] != 1} == set()
