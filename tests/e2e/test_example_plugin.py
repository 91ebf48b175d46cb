"""examples/plugin in an environment of its own: it passes the public suites, and `kaveri up` runs on it."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kaveri import Client, SamplingParams
from tests.e2e.test_up import _up
from tests.support.command import PROGRAM
from tests.support.metrics_pages import read_page
from tests.support.redis_fixture import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
_BROKEN = """
from kaveri.policy.plugins import PrefillPlacement

class Broken(PrefillPlacement):
    def choose(self, options, rng):
        raise RuntimeError("out of ideas")
"""
_REFERENCE = """
from kaveri_example.engine import next_token
tokens = {tokens}
for _ in range(12):
    tokens.append(next_token(tokens))
print(tokens)
"""
_PROMPT = [5, 9, 300, 17] * 20


def _run(*command: str, cwd: Path | None = None, timeout_s: float = 60.0) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("example") / "plugin"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    return copy


@pytest.fixture(scope="module")
def python(folder: Path) -> str:
    home = folder.parent / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", str(home))
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    seen = [str(ROOT), sysconfig.get_path("purelib")]
    (packages / "kaveri_under_test.pth").write_text("\n".join(seen) + "\n")
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    _run(sys.executable, "-m", "pip", "install", *flags, "--target", str(packages), str(folder))
    (packages / "broken_policy.py").write_text(_BROKEN)
    return str(home / "bin" / "python")


@pytest.mark.timeout(400)
def test_the_example_passes_the_public_suites(python: str, folder: Path) -> None:
    flags = ("-q", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    shown = _run(python, "-m", "pytest", *flags, "tests", cwd=folder, timeout_s=380.0)
    passed = re.search(r"(\d+) passed", shown)
    assert passed is not None, shown
    assert int(passed[1]) > 100
    assert "skipped" not in shown


def test_the_list_names_what_the_example_brings(python: str) -> None:
    rows = [line.split() for line in _run(python, *PROGRAM[1:], "plugins").splitlines()]
    for kind, name in (("engine", "example"), ("transport", "counted"), ("--decode-placement", "most-room")):
        assert [kind, name, "kaveri-example", "0.1.0", "ok"] in rows


@pytest.mark.timeout(180)
def test_kaveri_up_serves_with_the_example_by_flag_and_a_policy_that_raises_fails_no_request(
    python: str, tmp_path: Path
) -> None:
    expected = _run(python, "-c", _REFERENCE.format(tokens=_PROMPT))
    metrics_port = free_port()
    names = ("--engine", "example", "--kv-transports", "counted", "--prefill.decode-placement", "most-room")
    flags = ("--port", "0", "--metrics-port", str(metrics_port), "--router.placement-policy", "broken_policy:Broken")
    flags += ("--log-dir", str(tmp_path / "logs"), "--gateways", "0", "--prefill", "1", *names)
    with _up(tmp_path, *flags, python=python) as up:
        up.wait_until_ready()
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        with Client(up.target) as client:
            for _ in range(3):
                answer = client.generate(prompt_token_ids=_PROMPT, params=params)
                assert str(_PROMPT + list(answer.token_ids)) == expected.strip()
                assert answer.timing.server is not None
                assert answer.timing.server.kv_transport == "counted"
        scraped = read_page(f"127.0.0.1:{metrics_port}")
    assert 'kaveri_policy_faults_total{policy="placement_policy"} 3.0' in scraped
    logs = (tmp_path / "logs" / "router-0.log").read_text()
    assert logs.count('"event": "policy_failed"') == 1
    assert "raised RuntimeError: out of ideas" in logs
