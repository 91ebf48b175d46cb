import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kaveri import NoCapacity
from kaveri.cli.chat import chat
from kaveri.client.sync_client import Client, Stream
from tests.library.client.inference_double import WAIT_S, InferenceDouble, wait_until

COMMAND = [sys.executable, "-c", "from kaveri.cli.main import main; main()"]


def kaveri(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        check=False,
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_generate_prints_the_answer_and_nothing_else(running_target: str) -> None:
    ended = kaveri("generate", "prompt", "--max-tokens", "5", "--target", running_target)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "abcde\n", "")


def test_generate_sends_its_flags(service: InferenceDouble, running_target: str) -> None:
    flags = "--max-tokens 3 --temperature 0.5 --top-p 0.25 --top-k 7 --seed 11 --stop x --stop y --model alphabet"
    flags += " --min-tokens 2"
    ended = kaveri("generate", "prompt", *flags.split(), "--timeout-s", "30", KAVERI_TARGET=running_target)
    assert ended.returncode == 0, ended.stderr
    (request,) = service.requests
    params = request.params
    assert (request.text, request.model) == ("prompt", "alphabet")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (3, 0.5, 0.25, 7, 11)
    assert (params.min_tokens, list(params.stop)) == (2, ["x", "y"])
    (deadline_s,) = service.deadlines_s
    assert deadline_s is not None
    assert 20 < deadline_s < 31


def test_generate_json_is_one_object_with_everything(running_target: str) -> None:
    ended = kaveri("generate", "prompt", "--max-tokens", "2", "--json", "--target", running_target)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("ab", [0, 1], "length")
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 2, "cached_tokens": 0}
    assert answer["timing"]["ttft_s"] > 0
    assert answer["timing"]["server"]["decode_instance_id"] == "decode-1"


def test_an_error_is_one_line_and_exit_status_1(service: InferenceDouble, running_target: str) -> None:
    service.error = NoCapacity("router", 0.25, "queue full")
    ended = kaveri("generate", "error", "--target", running_target)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "kaveri: router: queue full; try again in 0.25 s\n"


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--max-tokens", "0"], ["--timeout-s", "0"]])
def test_a_value_over_its_limit_is_one_line(arguments: list[str]) -> None:
    ended = kaveri("generate", "prompt", *arguments)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert arguments[0].removeprefix("--").replace("-", "_") in line


def test_ctrl_c_cancels_the_request(service: InferenceDouble, running_target: str) -> None:
    arguments = ["generate", "endless", "--target", running_target]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: bool(service.running), "the request runs")
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert "Traceback" not in told
    wait_until(lambda: len(service.cancelled) == 1, "the server sees the cancellation")


def test_chat_keeps_the_conversation(service: InferenceDouble, running_target: str) -> None:
    flags = ["--system", "be brief", "--max-tokens", "3", "--target", running_target]
    ended = kaveri("chat", *flags, typed="first\n\nsecond\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "abc\nabc\n", "")
    turns = [(turn.role, turn.content) for turn in service.requests[-1].messages.messages]
    assert turns == [("system", "be brief"), ("user", "first"), ("assistant", "abc"), ("user", "second")]


def test_chat_goes_on_after_an_error_without_the_turn_that_failed(
    service: InferenceDouble, running_target: str
) -> None:
    service.error = NoCapacity("router", 0.25, "queue full")
    ended = kaveri("chat", "--max-tokens", "2", "--target", running_target, typed="error\nagain\n")
    assert (ended.returncode, ended.stdout) == (0, "ab\n")
    assert ended.stderr == "kaveri: router: queue full; try again in 0.25 s\n"
    assert [turn.content for turn in service.requests[-1].messages.messages] == ["again"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Open a pseudo-terminal; yields the test's end and the command's."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_in_a_chat_ctrl_c_cancels_the_answer_and_ctrl_d_leaves(
    service: InferenceDouble, running_target: str, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    command = [*COMMAND, "chat", "--max-tokens", "2", "--target", running_target]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        os.write(ours, b"endless\n")
        wait_until(lambda: bool(service.running), "the request runs")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: len(service.cancelled) == 1, "the server sees the cancellation")
        os.write(ours, b"next\n")
        wait_until(lambda: len(service.finished) == 1, "the next answer ends")
        # A line editor reads the terminal in another mode than it is in between: typed then, Ctrl-D would be lost.
        shown = b""
        while shown.count(b"> ") < 3:
            shown += os.read(ours, 4096)
        os.write(ours, b"\x04")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)
    turns = [(turn.role, turn.content) for turn in service.requests[-1].messages.messages]
    assert turns[0] == ("user", "endless")
    assert turns[1][0] == "assistant"
    assert turns[2] == ("user", "next")


def test_in_a_chat_ctrl_c_just_when_the_request_was_sent_cancels_the_answer(
    service: InferenceDouble, running_target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["silent", "next"]

    def type_line(_: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    send = Client.stream

    def send_interrupted(client: Client, **request: Any) -> Stream:
        stream = send(client, **request)
        if request["messages"][-1].content == "silent":
            wait_until(lambda: bool(service.running), "the request runs")
            raise KeyboardInterrupt
        return stream

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(Client, "stream", send_interrupted)
    chat(target=running_target, max_tokens=2)
    wait_until(lambda: len(service.cancelled) == 1, "the server sees the cancellation")
    assert capsys.readouterr().out == " [cancelled]\nab\n"
    assert len(service.finished) == 1


def test_version_and_help_are_quick() -> None:
    assert kaveri("--version").stdout.strip() == "0.1.0"
    helped = kaveri("--help")
    assert helped.returncode == 0
    for command in ("generate", "chat", "up", "status", "router", "prefill", "decode"):
        assert command in helped.stdout
