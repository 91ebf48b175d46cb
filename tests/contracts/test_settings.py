"""Every service's settings are found by name, and the file in docs/operations.md is one that all services take."""

import re
from pathlib import Path

import pytest

from kaveri.config.services import setting_sections, settings_types
from kaveri.config.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]


def test_every_service_has_its_settings_listed() -> None:
    listed = {f"{declared.__module__}" for declared in settings_types().values()}
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
    assert read.config.model == "kaveri-tiny"
    if section == "decode":
        assert (read.config.max_batch, read.config.redis_url) == (128, "redis://redis:6379/0")
