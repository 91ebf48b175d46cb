"""`kaveri up --pairs`: what it stands for."""

import pytest
from typer.testing import CliRunner

from kaveri.cli import up as up_module
from kaveri.cli.main import app
from kaveri.local.config import StackConfig
from kaveri.local.service_flags import ServiceFlags


def test_with_vllm_pairs_have_their_copies_in_host_memory() -> None:
    settings = up_module._settings(ServiceFlags({}, {}), predictor="", pairs=True, engine="vllm")
    assert (settings["replication"], settings["replica_place"]) == ("pair", "host")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--pairs"], {"replication": "pair", "replica_place": "pool"}),
        (["--pairs", "--replica-place", "host"], {"replication": "pair", "replica_place": "host"}),
        ([], {"replication": None, "replica_place": None}),
    ],
)
def test_pairs_keep_copies_in_the_pools_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], settings: dict[str, str | None]
) -> None:
    started: list[StackConfig] = []

    async def run(config: StackConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(up_module, "_run", run)
    ended = CliRunner().invoke(app, ["up", "--engine", "fake", "--gateways", "0", *flags])
    assert ended.exit_code == 0, ended.output
    assert {name: started[0].settings.get(name) for name in settings} == settings
