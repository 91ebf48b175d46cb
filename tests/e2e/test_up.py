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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kaveri.config.services import ServiceKind, program_of
from tests.support.command import PROGRAM, run_kaveri
from tests.support.redis_fixture import free_port

_READY = re.compile(r"kaveri is ready at (127\.0\.0\.1:\d+(?:,127\.0\.0\.1:\d+)*)\n")
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
        """Every descendant ever seen; call it before they can be gone."""
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


def test_request_and_status_succeed_after_the_ready_line_and_sigterm_leaves_nothing(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--port", "0", "--log-dir", str(tmp_path / "logs")) as up:
        up.wait_until_ready()
        generated = run_kaveri("generate", "hello", "--target", up.target, "--max-tokens", "3")
        assert generated.returncode == 0, generated.stderr
        assert generated.stdout.strip()
        _status_shows_every_instance(up.target)
        assert sorted(os.listdir(tmp_path / "logs")) == ["decode-0.log", "prefill-0.log", "router-0.log"]
        assert up.end() == 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == "", "more than the ready line on stdout"


def test_several_routers_are_named_and_shown_and_one_of_them_is_enough(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--routers", "2", "--port", "0") as up:
        up.wait_until_ready()
        first, second = up.target.split(",")
        assert first != second
        shown = json.loads(run_kaveri("status", "--target", up.target, "--json").stdout)["instances"]
        addresses = [one["record"]["address"] for one in shown if one["record"]["instance_id"].startswith("router-")]
        assert addresses == [first, second]
        for target in (first, second, f"127.0.0.1:{free_port()},{second}"):
            assert run_kaveri("generate", "hello", "--target", target, "--max-tokens", "3").returncode == 0
            assert run_kaveri("status", "--target", target).returncode == 0
        assert up.end() == 0


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


def test_router_ports_that_do_not_fit_are_refused_at_once() -> None:
    answer = run_kaveri("up", "--routers", "2", "--port", "65535")
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "--port" in answer.stderr


def _status_shows_every_instance(target: str) -> None:
    shown = json.loads(run_kaveri("status", "--target", target, "--json").stdout)
    assert shown["store_connected"] is True
    assert [one["record"]["instance_id"] for one in shown["instances"]] == ["decode-0", "prefill-0", "router-0"]
    decode = shown["instances"][0]
    assert decode["load"]["state"] == "ready"
    assert decode["load"]["free_blocks"] == decode["load"]["total_blocks"] > 0
    assert decode["heartbeat_age_s"] < 1.0
    table = run_kaveri("status", "--target", target)
    assert table.returncode == 0
    assert [word for word in ("decode-0", "prefill-0", "router-0", "ready") if word not in table.stdout] == []


def test_sigkill_of_up_leaves_no_process(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--port", "0") as up:
        up.wait_until_ready()
        assert len(up.children()) == 4
        assert up.end(signal.SIGKILL) == -signal.SIGKILL


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--port", "0") as up:
        until(lambda: len(up.children()) == 4, "children did not start")
        assert up.end(signal.SIGINT) == 130
        assert "Traceback" not in up.stderr


def test_killed_children_are_restarted_with_a_word_about_it(tmp_path: Path) -> None:
    with _up(tmp_path, *_SMALL, "--port", "0") as up:
        up.wait_until_ready()
        for service in ("decode", "router"):
            victim = up.child_of(service)
            victim.kill()
            until(lambda: f"{service}-0 was ended by SIGKILL; starting it again" in up.stderr, "not a word about it")  # noqa: B023
            until(lambda: not _runs(victim), "still there")  # noqa: B023
            until(lambda: run_kaveri("health", "--target", up.target).returncode == 0, "the router did not come back")
            generated = run_kaveri("generate", "hello", "--target", up.target, "--max-tokens", "3", "--timeout-s", "50")
            assert generated.returncode == 0, generated.stderr
            assert up.child_of(service).pid != victim.pid
        assert up.end() == 0


def _fails_to_start(tmp_path: Path, flags: tuple[str, ...], within_s: float) -> str:
    """The error line, once the rules for bad input are seen to hold."""
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
        (("--model", "{folder}", "--port", "0"), ("--model", "{folder}")),
        (("--redis-url", "redis://127.0.0.1:1/0", *_SMALL, "--port", "0"), ("--redis-url", "redis://127.0.0.1:1/0")),
        (("--engine", "fake", "--colocated", "2", "--decode", "1"), ("--colocated",)),
    ],
    ids=["no model", "an empty folder", "no Redis", "colocated and decode"],
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


def test_a_flag_of_one_role_and_a_file_reach_the_services_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "kaveri.toml"
    path.write_text("[up]\nport = 0\nprefill = 1\ndecode = 1\n[decode]\nkv_cache_memory = '1MiB'\n")
    flags = ("--config", str(path), "--engine", "fake", "--prefill.chunk-tokens", "7", "--drain-timeout-s", "5")
    with _up(tmp_path, *flags, "--gateways", "0") as up:
        up.wait_until_ready()
        assert "--chunk-tokens 7" in " ".join(up.child_of("prefill").cmdline())
        shown = json.loads(run_kaveri("status", "--target", up.target, "--json").stdout)["instances"]
        blocks = {one["record"]["instance_id"]: one["load"]["total_blocks"] for one in shown}
        assert len(shown) == 3
        assert blocks["prefill-0"] == 128 * blocks["decode-0"]
        assert up.end() == 0


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
    ],
)
def test_a_flag_that_no_service_takes_is_one_clear_line_before_anything_starts(flags: list[str], line: str) -> None:
    ended = run_kaveri("up", "--engine", "fake", *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    (told,) = ended.stderr.splitlines()
    assert told.startswith(f"kaveri: {line}")


def test_status_of_a_router_that_is_not_there_is_one_line() -> None:
    answer = run_kaveri("status", "--target", f"127.0.0.1:{free_port()}")
    assert answer.returncode == 1
    assert answer.stderr.startswith("kaveri: ")
    assert len(answer.stderr.splitlines()) == 1
