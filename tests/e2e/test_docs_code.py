"""The code in docs/experiments.md and docs/plugins.md runs as printed."""

import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.engine.settings import ENGINES
from kaveri.hosting.policy_settings import DECODE_PLACEMENTS
from kaveri.kv.transports import TRANSPORTS
from kaveri.parsers.answer import TOOL_PARSERS
from kaveri.policy.demand import Demand
from kaveri.policy.placement import choose_decode
from kaveri.policy.plugins import Guarded
from kaveri.policy.unconfirmed import UnconfirmedWork

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.shows_no_certificate
@pytest.mark.timeout(240)
def test_the_experiment_compares_two_policies_and_draws_them(tmp_path: Path) -> None:
    (script,) = _blocks("experiments.md", "python")
    plot = tmp_path / "policies.svg"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(plot)], capture_output=True, text=True, timeout=220, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    shown = re.findall(r"(\S+): 60 answered, TPOT p99 \d+\.\d ms", ended.stdout)
    assert shown == ["random", "power-of-two"]
    assert "</svg>" in plot.read_text()


def test_the_policy_of_the_page_decides() -> None:
    names: dict[str, object] = {}
    exec(_blocks("plugins.md", "python")[0], names)
    view = ClusterView(
        {
            name: InstanceStatus(
                InstanceRecord(name, 1, Role.ENGINE, "h:1", "tiny", phases=(Phase.DECODE,)),
                InstanceLoad(free_blocks=blocks, total_blocks=100),
            )
            for name, blocks in (("a", 5), ("b", 50), ("c", 10))
        }
    )
    policy = Guarded(names["MostRoom"](), pytest.fail)  # type: ignore[operator]
    chosen = choose_decode(view, "tiny", Demand(tokens=2), UnconfirmedWork[str](), policy, random.Random(0))
    assert chosen is not None
    assert chosen.record.instance_id == "b"


def test_the_entry_points_of_the_page_are_in_the_groups_that_are_read() -> None:
    (block,) = _blocks("plugins.md", "toml")
    groups = tomllib.loads(block)["project"]["entry-points"]
    assert set(groups) == {ENGINES.group, TRANSPORTS.group, TOOL_PARSERS.group, DECODE_PLACEMENTS.group}
    assert all(name.startswith(DECODE_PLACEMENTS.prefix) for name in groups[DECODE_PLACEMENTS.group])
