"""`kaveri profile` as it is run: real engines, real time, files that instances then take."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import typer
from typer.testing import CliRunner

from kaveri.cli.profile import profile
from kaveri.cli.services import PASS_ON
from kaveri.engine.factory import build_engine
from kaveri.errors import ConfigError
from kaveri.latency.fit import predict_decode_s, predict_prefill_s
from kaveri.latency.model import load_latency_model
from kaveri.latency.profile import read_profile
from kaveri.profiling.__main__ import main
from services.instance.config import PrefillConfig
from tests.support.settings import parse_config
from tests.support.tiny_models import make_tiny_model

QUICK = ("--quick", "true")
LATENCY = {
    "name": "short steps",
    "source": "this test",
    "prefill": {"step_s": 0.002, "token_s": 0.00002, "token_squared_s": 0.0},
    "decode": [{"min_batch": 1, "step_s": 0.002, "context_token_s": 1e-7, "request_s": 0.0001}],
}


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """main() configures structlog for the whole process."""
    configured = structlog.get_config()
    yield
    structlog.configure(**configured)


def run_module(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kaveri.profiling", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_timed_engine_is_profiled_in_a_process_of_its_own(tmp_path: Path) -> None:
    latency_file, out, plot = tmp_path / "latency.json", tmp_path / "profile.json", tmp_path / "profile.svg"
    latency_file.write_text(json.dumps(LATENCY))
    engine = ("--engine", "timed", "--latency-model", str(latency_file))
    small = ("--max-chunk-tokens", "256", "--max-batch", "8", "--max-model-len", "512")
    done = run_module(*engine, *small, *QUICK, "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert "chunk_tokens: " in done.stdout
    assert str(out) in done.stdout
    found = read_profile(out)
    assert (found.engine.engine, found.engine.model) == ("timed", "short steps")
    latency = load_latency_model(str(latency_file))
    # A busy machine makes a step longer, and nothing makes it shorter.
    for point in found.prefill:
        assert point.times.min_s >= predict_prefill_s(latency.prefill, point) * 0.999
    for entry in found.decode:
        assert entry.times.min_s >= predict_decode_s(latency.decode[0], entry) * 0.999
    assert found.chunk_tokens in {point.tokens for point in found.prefill}
    assert "<svg" in plot.read_text()
    again = ("--engine", "timed", "--latency-model", str(latency_file), "--profile", str(out))
    config = parse_config(PrefillConfig, "prefill", again, {})
    build_engine(config).close()


@pytest.fixture(scope="module")
def tiny_profile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("profile")
    model, out = make_tiny_model(folder / "tiny", max_positions=512), folder / "profile.json"
    small = ("--max-chunk-tokens", "128", "--max-batch", "4", "--kv-cache-memory", "8MiB")
    done = run_module("--model", str(model), *small, *QUICK, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return model, out


def test_a_real_model_is_profiled_and_its_instances_take_the_profile(tiny_profile: tuple[Path, Path]) -> None:
    model, out = tiny_profile
    found = read_profile(out)
    assert (found.engine.engine, found.engine.dtype, found.engine.device) == ("transformers", "float32", "cpu")
    assert min(point.times.repeats for point in found.prefill) >= 3
    assert min(point.times.repeats for point in found.decode) >= 3
    flags = ["--model", str(model), "--kv-cache-memory", "8MiB", "--profile", str(out)]
    config = parse_config(PrefillConfig, "prefill", flags, {})
    engine = build_engine(config)
    engine.close()
    assert config.chunk_tokens == found.chunk_tokens


def test_another_model_refuses_the_profile(tiny_profile: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1, max_positions=512)
    flags = ["--model", str(other), "--kv-cache-memory", "8MiB", "--profile", str(tiny_profile[1])]
    with pytest.raises(ConfigError, match=r"profile: was measured on model .*tiny .*; here it is .*other"):
        build_engine(parse_config(PrefillConfig, "prefill", flags, {}))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--out: is required"),
        (("--out", "{folder}/none/profile.json"), "--out: there is no folder"),
        (("--out", "{folder}"), "--out: .* is a folder"),
        (("--out", "/proc/p.json"), "--out: /proc/p.json cannot be written"),
        (("--out", "{folder}/p.json", "--plot", "{folder}/p.txt"), "--plot: is .*must end in .svg"),
        (("--out", "{folder}/p.json", "--plot", "{folder}/none/p.svg"), "--plot: there is no folder"),
        (("--out", "{folder}/p.json", "--engine", "abacus"), "--engine: is 'abacus'"),
        (("--out", "{folder}/p.json", "--engine", "fake", "--kv-cache-memory", "1k"), "--kv-cache-memory: is 1000"),
        (("--out", "{folder}/p.json", "--engine", "fake", "--max-model-len", "1"), "--max-model-len: is 1; "),
        (("--out", "{folder}/p.json", "--saturation-share", "1.5"), "--saturation-share: is 1.5"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], complaint: str
) -> None:
    assert main([flag.format(folder=tmp_path) for flag in flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("kaveri profile: ")
    assert re.search(complaint, line), line
    assert not list(tmp_path.iterdir())


def test_when_the_profile_cannot_be_written_after_all_its_findings_are_not_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("--engine", "fake", "--max-chunk-tokens", "256", "--max-batch", "8", "--max-model-len", "512")
    assert main([*small, *QUICK, "--out", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "chunk_tokens: " in printed.out
    assert "written: " not in printed.out
    assert "kaveri profile: --out: /dev/full cannot be written: No space left" in printed.err


def test_the_command_becomes_the_measuring_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        raise Replaced(*arguments[1:])

    monkeypatch.setattr(os, "execv", execv)
    app = typer.Typer()
    app.command("profile", context_settings=PASS_ON, add_help_option=False)(profile)
    result = CliRunner().invoke(app, ["--model", "m", "--quick", "--out", "f"])
    assert isinstance(result.exception, Replaced)
    flags = ("--model", "m", "--out", "f", "--quick", "true")
    assert result.exception.args == ("-P", "-m", "kaveri.profiling", *flags)
    shown = CliRunner().invoke(app, ["--help"])
    assert isinstance(shown.exception, Replaced)
    assert shown.exception.args[-1] == "--help"


def test_the_command_imports_no_torch() -> None:
    program = "import sys; import kaveri.cli.profile, kaveri.latency.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
