import sys

import pytest

from kaveri.predictor.__main__ import main as predictor_main
from tests.library.cli.conftest import Run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hello", "--nope"], ("kaveri generate: ", "--nope")),
        (["generate"], ("kaveri generate: ", "prompt")),
        (["nope"], ("kaveri: ", "nope")),
        (["bench", "--requests", "0"], ("kaveri bench: ", "--requests", "1")),
        (["bench", "--requests", "many"], ("kaveri bench: ", "--requests", "integer")),
        (["plan", "--last-s", "60"], ("--last-s", "--from-cluster is not")),
        (["plan", "--running-tp", "2"], ("--running-tp", "--from-cluster is not")),
        (["plan", "--recorded", "--lengths", "300,200"], ("--recorded", "needs --trace")),
        (["plan", "--recorded", "--burstiness", "2"], ("--burstiness", "--recorded as well")),
        (["plan", "--recorded"], ("--recorded", "needs --trace or --from-cluster")),
        (["predictor", "nope"], ("kaveri predictor: ", "nope")),
    ],
)
def test_a_wrong_flag_is_one_line(kaveri: Run, arguments: list[str], words: tuple[str, ...]) -> None:
    ended = kaveri(*arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert all(word in ended.stderr for word in words), ended.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--max-btch", "8"], "--max-btch: is no flag of kaveri up or of a service; the nearest is --max-batch"),
        (["--prefil.max-batch", "8"], "--prefil.max-batch: 'prefil' is no role; choose gateway, router, prefill"),
        (["--prefill.kv-prt", "8"], "--prefill.kv-prt: is no flag of kaveri prefill"),
        (["--prefill.chunk-tokens", "many"], "--prefill.chunk-tokens: 'many' is no whole number"),
        (["--chunk-tokens", "many"], "--chunk-tokens: 'many' is no whole number"),
        (["--chunk-tokens"], "--chunk-tokens: has no value; write --chunk-tokens VALUE"),
        (
            ["--colocated.max-batch", "8"],
            "--colocated.max-batch: would change nothing: no colocated instance is started",
        ),
        (["--instance-id", "a"], "--instance-id: is no flag of kaveri up or of a service"),
        (["--colocated", "2", "--decode", "1"], "--colocated: these instances do both phases"),
        (["--dynamic", "2", "--decode", "1"], "--dynamic: these instances do either phase"),
        (["--dynamic", "4"], "--dynamic: needs a flip policy"),
        (
            ["--dynamic", "4", "--flip-policy", "slo", "--slo-ttft-s", "1"],
            "--slo-tpot-s: is 0; the policy slo needs both",
        ),
        (
            ["--dynamic", "4", "--slo-ttft-s", "1", "--slo-tpot-s", "1", "--min-prefill", "4"],
            "--dynamic: is 4; --min-prefill and --min-decode together are 5",
        ),
        (["--routers", "2", "--port", "65535"], "--port: is 65535; 2 ports follow one another, up to 65535"),
    ],
)
def test_up_refuses_what_cannot_work_in_one_line_before_anything_starts(
    kaveri: Run, flags: list[str], line: str
) -> None:
    ended = kaveri("up", "--engine", "fake", *flags)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith(f"kaveri: {line}")


def test_a_wrong_flag_of_a_step_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kaveri predictor", "train", "--nope"])
    with pytest.raises(SystemExit) as ended:
        predictor_main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kaveri predictor train: No such option: --nope")


def test_without_a_command_the_help_is_shown(kaveri: Run) -> None:
    shown = kaveri()
    assert "Commands:" in shown.stdout + shown.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--help"]])
def test_what_is_asked_for_is_no_error(kaveri: Run, arguments: list[str]) -> None:
    ended = kaveri(*arguments)
    assert (ended.returncode, bool(ended.stdout), ended.stderr) == (0, True, "")
