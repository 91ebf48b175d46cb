"""`kaveri up` as its user meets it: the ready line, requests, restarts, and an end that leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kaveri.config.services import ServiceKind, program_of
from tests.support.command import PROGRAM, run_kaveri
from tests.support.redis_fixture import free_port

_READY = re.compile(r"kaveri is ready at (127\.0\.0\.1:\d+(?:,127\.0\.0\.1:\d+)*)\n")
_HTTP = re.compile(r"OpenAI's HTTP API is at (http://127\.0\.0\.1:\d+)/v1\n")
_SMALL = ("--engine", "fake", "--prefill", "1", "--decode", "1", "--drain-timeout-s", "5", "--gateways", "0")
_WITHIN_S = 60.0


class _Up:
    def __init__(self, process: "subprocess.Popen[str]", stderr_path: Path) -> None:
        self.process = process
        self.target = ""
        self._stderr_path = stderr_path
        self._seen: dict[int, psutil.Process] = {}

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = _READY.fullmatch(line)
        assert match is not None, f"{line!r}; {self.stderr}"
        self.target = match[1]

    def children(self) -> dict[int, psutil.Process]:
        """All descendants seen so far; call it before they can have exited."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        return self._seen

    def child_of(self, service: str) -> psutil.Process:
        program = list(program_of(ServiceKind(service)))
        return next(
            child
            for child in self.children().values()
            if child.is_running() and child.cmdline()[1 : 1 + len(program)] == program
        )

    def assert_nothing_left(self) -> None:
        until(lambda: not [child for child in self._seen.values() if _runs(child)], "processes are left")

    def end(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        self.children()
        self.process.send_signal(signal_number)
        code = self.process.wait(timeout=_WITHIN_S)
        self.assert_nothing_left()
        return code


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], complaint: str, within_s: float = 30.0) -> None:
    give_up_at_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at_s, complaint
        time.sleep(0.05)


@contextlib.contextmanager
def _up(directory: Path, *flags: str, python: str = sys.executable) -> Iterator[_Up]:
    stderr_path = directory / "up.stderr"
    # Its temporary files go where they are removed even when it was killed; a short path, for the sockets among them.
    with tempfile.TemporaryDirectory(prefix="up-") as temporary, stderr_path.open("w") as stderr:
        environment = os.environ | {"TMPDIR": temporary}
        command = [python, *PROGRAM[1:], "up", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        up = _Up(process, stderr_path)
        try:
            yield up
        finally:
            up.children()
            process.kill()
            process.communicate(timeout=10)
            up.assert_nothing_left()


def test_requests_and_status_succeed_after_the_ready_line_and_sigterm_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kaveri.toml"
    path.write_text("[up]\nport = 0\nprefill = 1\ndecode = 1\n[decode]\nkv_cache_memory = '1MiB'\n")
    flags = ("--config", str(path), "--engine", "fake", "--prefill.chunk-tokens", "7", "--drain-timeout-s", "5")
    with _up(tmp_path, *flags, "--gateways", "0", "--routers", "2", "--log-dir", str(tmp_path / "logs")) as up:
        up.wait_until_ready()
        first, second = up.target.split(",")
        shown = json.loads(run_kaveri("status", "--target", up.target, "--json").stdout)
        assert shown["store_connected"] is True
        instances = {one["record"]["instance_id"]: one for one in shown["instances"]}
        assert list(instances) == ["decode-0", "prefill-0", "router-0", "router-1"]
        addresses = [instances[name]["record"]["address"] for name in ("router-0", "router-1")]
        assert addresses == [first, second]
        decode, prefill = (instances[name]["load"] for name in ("decode-0", "prefill-0"))
        assert decode["state"] == "ready"
        assert decode["free_blocks"] == decode["total_blocks"] > 0
        assert instances["decode-0"]["heartbeat_age_s"] < 1.0
        assert prefill["total_blocks"] == 128 * decode["total_blocks"]
        assert "--chunk-tokens 7" in " ".join(up.child_of("prefill").cmdline())
        for target in (first, f"127.0.0.1:{free_port()},{second}"):
            generated = run_kaveri("generate", "hello", "--target", target, "--max-tokens", "3")
            assert generated.returncode == 0, generated.stderr
            assert generated.stdout.strip()
            table = run_kaveri("status", "--target", target)
            assert table.returncode == 0
            assert [word for word in (*instances, "ready") if word not in table.stdout] == []
        assert sorted(os.listdir(tmp_path / "logs")) == [f"{name}.log" for name in instances]
        assert up.end() == 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == "", "more than the ready line on stdout"


def test_a_preset_counts_where_no_flag_says_something_else(tmp_path: Path) -> None:
    flags = ("--preset", "accellm", "--engine", "fake", "--gateways", "0", "--port", "0", "--replica-min-tokens", "32")
    with _up(tmp_path, *flags) as up:
        up.wait_until_ready()
        instances = [child.cmdline() for child in up.children().values() if "services.instance" in child.cmdline()]
        assert len(instances) == 2
        for words in instances:
            assert words[words.index("services.instance") + 1] == "colocated"
            assert words[words.index("--replication") + 1] == "pair"
            assert words.count("--replica-min-tokens") == 1
            assert words[words.index("--replica-min-tokens") + 1] == "32"
        generated = run_kaveri("generate", "hello", "--target", up.target, "--max-tokens", "3")
        assert generated.returncode == 0, generated.stderr
        assert "preset accellm: without one phase at a time" in up.stderr
        assert up.end() == 0


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--port", "0") as up:
        until(lambda: len(up.children()) == 4, "children did not start")
        assert up.end(signal.SIGINT) == 130
        assert "Traceback" not in up.stderr


def test_killed_children_are_restarted_with_a_word_about_it_and_sigkill_of_up_leaves_no_process(tmp_path: Path) -> None:
    with _up(tmp_path, "--engine", "fake", "--prefill", "1", "--decode", "1", "--port", "0") as up:
        up.wait_until_ready()
        assert len(up.children()) == 5
        found = _HTTP.search(up.stderr)
        assert found is not None, up.stderr
        assert _post(found[1])["usage"]["completion_tokens"] == 3
        shown = json.loads(run_kaveri("status", "--target", up.target, "--json").stdout)["instances"]
        roles = {one["record"]["instance_id"]: one["record"]["role"] for one in shown}
        assert roles["gateway-0"] == "gateway"
        drained = run_kaveri("drain", "gateway-0", "--target", up.target)
        assert drained.returncode == 1
        assert "SIGTERM" in drained.stderr
        for service in ("decode", "router", "gateway"):
            victim = up.child_of(service)
            victim.kill()
            until(lambda: f"{service}-0 was ended by SIGKILL; starting it again" in up.stderr, "not a word about it")  # noqa: B023
            until(lambda: not _runs(victim), "still there")  # noqa: B023
            until(lambda: run_kaveri("health", "--target", up.target).returncode == 0, "the router did not come back")
            generated = run_kaveri("generate", "hello", "--target", up.target, "--max-tokens", "3", "--timeout-s", "50")
            assert generated.returncode == 0, generated.stderr
            assert up.child_of(service).pid != victim.pid

        def answers_again() -> bool:
            with contextlib.suppress(OSError):
                return bool(_post(found[1])["choices"])
            return False

        until(answers_again, "the gateway was not started again", 60.0)
        assert up.end(signal.SIGKILL) == -signal.SIGKILL


def _post(url: str) -> Any:
    body = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _fails_to_start(tmp_path: Path, flags: tuple[str, ...], within_s: float) -> str:
    started_at_s = time.monotonic()
    with _up(tmp_path, *flags) as up:
        while up.process.poll() is None:
            up.children()
            assert time.monotonic() - started_at_s < within_s, f"still running: {up.stderr}"
            time.sleep(0.02)
        assert up.process.returncode != 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == ""
        assert "Traceback" not in up.stderr
        up.assert_nothing_left()
        errors = [line for line in up.stderr.splitlines() if line.startswith("kaveri: ")]
        assert len(errors) == 1, up.stderr
        return errors[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "/no/such/model", "--port", "0"), ("--model", "/no/such/model")),
        (("--model", "{folder}", *_SMALL[2:], "--port", "0"), ("--model", "{folder}")),
        (("--redis-url", "redis://127.0.0.1:1/0", *_SMALL, "--port", "0"), ("--redis-url", "redis://127.0.0.1:1/0")),
    ],
    ids=["no model", "an empty folder", "no Redis"],
)
def test_what_cannot_work_is_one_clear_line(tmp_path: Path, flags: tuple[str, ...], said: tuple[str, ...]) -> None:
    (folder := tmp_path / "empty").mkdir()
    error = _fails_to_start(tmp_path, tuple(flag.format(folder=folder) for flag in flags), within_s=_WITHIN_S)
    assert all(word.format(folder=folder) in error for word in said), error


def test_port_in_use_is_one_clear_line_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = _fails_to_start(tmp_path, (*_SMALL, "--port", str(port)), within_s=15.0)
    assert "--port" in error
    assert "in use" in error


def test_redis_url_and_cluster_name_may_come_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "redis-url"
    secret.write_text(f"redis://:hunter2@127.0.0.1:{free_port()}/0\n")
    monkeypatch.setenv("KAVERI_REDIS_URL_FILE", str(secret))
    error = _fails_to_start(tmp_path, (*_SMALL, "--port", "0"), within_s=15.0)
    assert "--redis-url: no Redis answers at redis://***@127.0.0.1" in error
    monkeypatch.setenv("KAVERI_CLUSTER_NAME", "a:b")
    error = _fails_to_start(tmp_path, (*_SMALL, "--port", "0"), within_s=15.0)
    assert "--cluster-name: is 'a:b'" in error


def test_status_of_a_router_that_is_not_there_is_one_line() -> None:
    answer = run_kaveri("status", "--target", f"127.0.0.1:{free_port()}")
    assert answer.returncode == 1
    assert answer.stderr.startswith("kaveri: ")
    assert len(answer.stderr.splitlines()) == 1
