"""Wrong flags of any command end with one line and status 2, as wrong settings do."""

import sys

import pytest

from kaveri.cli.main import main
from kaveri.predictor.__main__ import main as predictor_main


def _run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["kaveri", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


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
def test_a_wrong_flag_is_one_line(
    arguments: list[str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(arguments, monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert all(word in shown.err for word in words), shown.err


def test_a_wrong_flag_of_a_step_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kaveri predictor train` runs in a process of its own."""
    monkeypatch.setattr(sys, "argv", ["kaveri predictor", "train", "--nope"])
    with pytest.raises(SystemExit) as ended:
        predictor_main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kaveri predictor train: No such option: --nope")


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run([], monkeypatch)
    shown = capsys.readouterr()
    assert "Commands:" in shown.out + shown.err


@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--help"]])
def test_what_is_asked_for_is_no_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(arguments, monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out
    assert shown.err == ""
