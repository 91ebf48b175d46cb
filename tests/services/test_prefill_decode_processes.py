"""Prefill and decode processes with a real Redis: terminated, replaced, misconfigured."""

import asyncio
import socket

import pytest

from tests.services.service_processes import DEADLINE_S, ServiceProcesses

pytestmark = pytest.mark.usefixtures("warm_services")

ENGINE = ("--engine", "fake", "--kv-cache-memory", "2MiB", "--max-model-len", "4096")


async def test_a_terminated_process_leaves_the_view_at_once_and_exits_with_0(processes: ServiceProcesses) -> None:
    # The lease must not end first.
    lease = ("--lease-ttl-s", "600")
    children = [processes.start(role, f"{role}-0", *ENGINE, *lease) for role in ("prefill", "decode")]
    for child in children:
        await processes.ready(child.name)
        assert await child.stop(DEADLINE_S) == 0
        await processes.eventually(lambda: processes.status(child.name) is None, "it has left")  # noqa: B023


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_of_two_processes_with_one_instance_id_the_older_ends_and_both_say_so(
    processes: ServiceProcesses, role: str
) -> None:
    older = processes.start(role, "one", *ENGINE)
    first = await processes.ready("one")
    newer = processes.start(role, "one", *ENGINE, name="newer")
    assert await asyncio.wait_for(older.wait(), DEADLINE_S) == 2
    second = await processes.ready("one")
    assert second.record.incarnation != first.record.incarnation
    lost = [line for line in older.log_path.read_text().splitlines() if "instance_id_lost" in line]
    taken = [line for line in newer.log_path.read_text().splitlines() if "instance_id_taken_over" in line]
    assert len(lost) == len(taken) == 1
    assert second.record.address in lost[0]
    assert first.record.address in taken[0]
    assert older.last_lines(1) == [
        f"kaveri {role}: --instance-id: another process has registered as 'one', at {second.record.address}; "
        "this one ends. Ids must be unique"
    ]
    assert await newer.stop(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/nowhere/at/all", "--engine", "transformers"], "--model"),
        (["--engine", "abacus"], "--engine"),
        (["--kv-cache-memory", "much"], "--kv-cache-memory"),
        (["--kv-cache-memory", "1kB"], "--kv-cache-memory"),
        (["--redis-url", "redis://127.0.0.1:9/0", "--redis-wait-s", "0.5"], "--redis-url"),
        (["--host", "192.0.2.1"], "--host"),
        (["--port", "70000"], "--port"),
        (["--dtype", "float9"], "--dtype"),
        (["--model", ""], "--model: is empty"),
        (["--max-model-len", "1"], "--max-model-len: is 1; it must be 0 or at least 2"),
        (["--max-model-len", "-1"], "--max-model-len: is -1; it must be 0 or at least 2"),
        (["--lease-ttl-s", "0.05"], "--lease-ttl-s: is 0.05; it must be more than --heartbeat-interval-s, 0.1"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_bad_setting_is_one_line_and_exit_status_2(
    processes: ServiceProcesses, role: str, flags: list[str], says: str
) -> None:
    child = processes.start(role, f"{role}-0", *ENGINE, *flags)
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2
    lines = [line for line in child.log_path.read_text().splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert lines[0].startswith(f"kaveri {role}: {says}")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_taken_port_is_found_before_the_model_is_loaded(processes: ServiceProcesses, role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = processes.start(
            role, f"{role}-0", *ENGINE, "--engine", "transformers", "--model", "/nowhere", "--port", port
        )
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2
    assert f"kaveri {role}: --port: cannot listen on 127.0.0.1:{port}" in child.log_path.read_text()
