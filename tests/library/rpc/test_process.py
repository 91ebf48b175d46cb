import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kaveri.rpc.process import ServiceConfig

WAIT_S = 30.0

SCRIPT = """
import asyncio, gc, sys
from dataclasses import dataclass
from kaveri.config.settings import setting
from kaveri.errors import ConfigError
from kaveri.programs import setting_sections
from kaveri.rpc.process import ServiceConfig, run_service

# Python 3.12 spares some hundred objects from the beginning.
spared_by_python = gc.get_freeze_count()

@dataclass(frozen=True, kw_only=True)
class Config(ServiceConfig):
    '''A service for tests.'''
    act: str = setting("what to do")

async def refuse():
    raise ConfigError("--model", "is not to be found")

async def fail():
    raise ZeroDivisionError("a defect")

async def serve(config, stopping):
    print("serving", config.instance_id, flush=True)
    if config.act == "refuse":
        raise ConfigError("--model", "is not to be found")
    if config.act == "fail":
        raise ZeroDivisionError("a defect")
    if config.act == "refuse in a task":
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(refuse())
            outer.create_task(stopping.wait())
    if config.act == "fail beside a refusal":
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())
            group.create_task(fail())
    if config.act == "be ready":
        from kaveri.rpc.server import RpcServer
        server = RpcServer("127.0.0.1", 0, [])
        await server.start()
        await server.ready()
        print("ready", flush=True)
        await stopping.wait()
        await server.drain()
        print("draining", flush=True)
        await asyncio.Event().wait()
    if config.act == "count what is spared":
        from kaveri.telemetry.readiness import set_ready
        loaded = len(gc.get_objects())
        print(gc.get_freeze_count() - spared_by_python, flush=True)
        set_ready(True)
        print(gc.get_freeze_count() / loaded, len(gc.get_objects()) / loaded, flush=True)
        later = [[] for _ in range(loaded)]
        set_ready(False)
        set_ready(True)
        print(len(gc.get_objects()) / loaded, flush=True)
        return 0
    if config.act == "end":
        return 5
    await stopping.wait()
    print("draining", flush=True)
    if config.act == "drain":
        return 0
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

sys.exit(run_service("test", Config, serve, setting_sections))
"""


@contextmanager
def service(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, *flags]
    variables = os.environ | environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(signal_number: signal.Signals) -> None:
    with service("--act", "drain", "--instance-id", "test-0") as process:
        assert said(process) == "serving test-0"
        process.send_signal(signal_number)
        output, logs = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output) == (0, "draining\n")
    (line,) = logs.splitlines()
    assert json.loads(line)["event"] == "service_stopping"


def test_garbage_collection_looks_only_at_objects_that_came_after_the_process_was_ready() -> None:
    with service("--act", "count what is spared") as process:
        assert said(process).startswith("serving")
        assert said(process) == "0"
        spared, collected = map(float, said(process).split())
        collected_later = float(said(process))
    assert spared > 0.9
    assert collected < 0.1
    assert collected_later > 0.9, "objects of requests are collected as ever"


def test_a_second_signal_cancels_and_still_cleans_up() -> None:
    with service("--act", "linger") as process:
        assert said(process).startswith("serving test-")
        process.send_signal(signal.SIGTERM)
        assert said(process) == "draining"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=WAIT_S)
    assert output == "cleaned up\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--act", "refuse"], "kaveri test: --model: is not to be found"),
        (["--act", "refuse in a task"], "kaveri test: --model: is not to be found"),
        (
            ["--act", "end", "--lease-ttl-s", "0.1"],
            "kaveri test: --lease-ttl-s: is 0.1; it must be more than --heartbeat-interval-s, 0.1",
        ),
        (["--act", "end", "--cluster-name", ""], "kaveri test: --cluster-name: is empty"),
        (
            ["--act", "end", "--cluster-name", "a:b"],
            "kaveri test: --cluster-name: is 'a:b'; write up to 128 letters, digits, '.', '_' and '-'",
        ),
        (
            ["--act", "end", "--instance-id", "a/b"],
            "kaveri test: --instance-id: is 'a/b'; write up to 128 letters, digits, '.', '_' and '-'",
        ),
        (["--act", "end", "--redis-url", ""], "kaveri test: --redis-url: is empty"),
        (["--act", "end", "--port", "many"], "kaveri test: --port: 'many' is no whole number"),
        ([], "kaveri test: --act: is required (what to do)"),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_exit_status_2(flags: list[str], line: str) -> None:
    with service(*flags) as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert told.splitlines() == [line]


def test_a_variable_of_another_service_is_left_alone_and_one_of_none_is_refused() -> None:
    with service("--act", "end", KAVERI_MAX_BATCH="8", KAVERI_TARGET="router:50051") as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 5
    with service("--act", "end", KAVERI_MAX_BTCH="8") as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert told == "kaveri test: KAVERI_MAX_BTCH: is no variable of Kaveri; the nearest is KAVERI_MAX_BATCH\n"


def test_variables_of_kubernetes_service_links_do_not_break_a_start_and_are_one_line_in_the_log() -> None:
    links = {"KAVERI_ROUTER_SERVICE_HOST": "10.0.0.1", "KAVERI_ROUTER_PORT_50051_TCP": "tcp://10.0.0.1:50051"}
    with service("--act", "end", **links) as process:
        _, logs = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5
    (line,) = map(json.loads, logs.splitlines())
    assert line["event"] == "service_links_ignored"
    assert line["variables"] == "KAVERI_ROUTER_PORT_50051_TCP, KAVERI_ROUTER_SERVICE_HOST"
    assert "enableServiceLinks: false" in line["advice"]


@pytest.mark.parametrize("act", ["fail", "fail beside a refusal"])
def test_a_defect_is_shown_in_full(act: str) -> None:
    with service("--act", act) as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "ZeroDivisionError: a defect" in told


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"host": "192.0.2.7"}, "192.0.2.7"),
        ({"host": "0.0.0.0"}, socket.gethostname()),
        ({"host": "::"}, socket.gethostname()),
        ({"host": "0.0.0.0", "advertise_host": "router"}, "router"),
        ({"host": "192.0.2.7", "advertise_host": "router"}, "router"),
        ({"host": "::", "advertise_host": "fd00::7"}, "[fd00::7]"),
        ({"host": "[fd00::7]"}, "[fd00::7]"),
    ],
)
def test_others_are_told_an_address_that_can_be_reached(settings: dict[str, str], host: str) -> None:
    assert ServiceConfig(**settings).advertised_address(7) == f"{host}:7"
