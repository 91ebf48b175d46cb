"""Prefill and decode services as the processes they are, around a real Redis: killed, terminated, misconfigured."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.cluster.redis_store import RedisStore
from kaveri.config.services import ServiceKind, program_of
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import InstanceStatus
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.process import ChildProcess
from kaveri.rpc.server import open_channel
from kaveri.v1 import feed_pb2, prefill_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import params_to_proto
from tests.services.refusals import refuses
from tests.support.redis_fixture import run_redis

pytestmark = pytest.mark.usefixtures("warm_services")

DEADLINE_S = 60.0
PROMPT = [number % 900 + 1 for number in range(2000)]


class PrefillAndDecode:
    """Services started by hand, and their cluster's view."""

    def __init__(self, redis_url: str, store: RedisStore, logs: Path) -> None:
        self._redis_url = redis_url
        self._store = store
        self._logs = logs
        self.children: dict[str, ChildProcess] = {}

    def start(self, role: str, instance_id: str, *flags: str) -> ChildProcess:
        command = self.command(role, instance_id, *flags)
        child = ChildProcess.start(instance_id, command, self._logs / f"{instance_id}.log")
        self.children[instance_id] = child
        return child

    def command(self, role: str, instance_id: str, *flags: str) -> list[str]:
        return [
            sys.executable,
            *program_of(ServiceKind(role)),
            "--instance-id",
            instance_id,
            "--engine",
            "fake",
            "--redis-url",
            self._redis_url,
            "--kv-cache-memory",
            "2MiB",
            "--max-model-len",
            "4096",
            *flags,
        ]

    def status(self, instance_id: str) -> InstanceStatus | None:
        return self._store.view().instances.get(instance_id)

    async def ready(self, instance_id: str) -> InstanceStatus:
        await self.eventually(lambda: self.status(instance_id) is not None, f"{instance_id} registers")
        status = self.status(instance_id)
        assert status is not None
        return status

    def holds_nothing(self, instance_id: str) -> bool:
        status = self.status(instance_id)
        return status is not None and status.load.free_blocks == status.load.total_blocks

    async def eventually(self, condition: Any, what: str, within_s: float = DEADLINE_S) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while not condition():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self._logs.iterdir()}
            assert loop.time() < until_s, f"not within {within_s} s: {what}\n{logs}"
            await asyncio.sleep(0.01)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[PrefillAndDecode]:
    async with run_redis() as redis, RedisStore(redis.url) as store:
        processes = PrefillAndDecode(redis.url, store, tmp_path)
        try:
            yield processes
        finally:
            for child in processes.children.values():
                if child.exit_status is None:
                    await child.kill()


async def tokens_of(channel: aio.Channel, finished: asyncio.Event) -> list[int]:
    """Follows one decode instance's stream until a request is finished there."""
    tokens: list[int] = []
    stream = FeedServiceStub(channel).Follow(feed_pb2.FollowRequest(router_id="router"))
    try:
        while (message := await stream.read()) is not aio.EOF:
            for gained in message.requests:
                tokens.extend(gained.token_ids)
                if gained.finish_reason:
                    finished.set()
    except aio.AioRpcError:
        pass  # killed
    return tokens


async def reports_of(channel: aio.Channel, max_tokens: int) -> AsyncIterator[prefill_pb2.PrefillReport]:
    """Submits a prompt; what is reported of it, until the end."""
    stream = FeedServiceStub(channel).Follow(feed_pb2.FollowRequest(router_id="router"))
    message = prefill_pb2.SubmitRequest(
        request_id="a",
        attempt=1,
        router_id="router",
        token_ids=PROMPT,
        params=params_to_proto(SamplingParams(max_tokens=max_tokens, seed=0)),
        timeout_s=DEADLINE_S,
    )
    await PrefillServiceStub(channel).Submit(message, timeout=DEADLINE_S)
    async for response in stream:
        for report in response.reports:
            yield report
            if report.HasField("ended"):
                stream.cancel()
                return


async def test_a_killed_decode_process_is_replaced_while_the_kv_is_under_way(processes: PrefillAndDecode) -> None:
    processes.start("prefill", "prefill-0", "--chunk-tokens", "64", "--fake-step-s", "0.02")
    for instance_id in ("decode-0", "decode-1"):
        processes.start("decode", instance_id)
    statuses = {name: await processes.ready(name) for name in ("prefill-0", "decode-0", "decode-1")}
    channels = {name: open_channel(status.record.address) for name, status in statuses.items()}
    finished = asyncio.Event()
    streams = {name: asyncio.create_task(tokens_of(channels[name], finished)) for name in ("decode-0", "decode-1")}
    places, first_token, handed_over = [], None, False
    async for event in reports_of(channels["prefill-0"], max_tokens=20):
        if event.HasField("placed"):
            places.append(event.placed.decode_instance_id)
            if len(places) == 1:
                assert first_token is None
                await processes.children[places[0]].kill()
        if event.HasField("first_token"):
            first_token = event.first_token.token_id
        handed_over = handed_over or event.HasField("handed_over")
    assert handed_over
    survivor = ({"decode-0", "decode-1"} - {places[0]}).pop()
    assert places[-1] == survivor
    await asyncio.wait_for(finished.wait(), DEADLINE_S)
    await processes.eventually(lambda: processes.status(places[0]) is None, "the dead one leaves the view", 5.0)
    await processes.eventually(lambda: processes.holds_nothing(survivor), "decode frees its blocks")
    await processes.eventually(lambda: processes.holds_nothing("prefill-0"), "prefill frees its blocks")
    for channel in channels.values():
        await channel.close()
    for stream in streams.values():
        stream.cancel()
    await asyncio.gather(*streams.values(), return_exceptions=True)
    assert first_token == FakeModel().answer(PROMPT, 0, 1)[0]


async def test_a_killed_prefill_process_leaves_no_blocks_at_decode(processes: PrefillAndDecode) -> None:
    prefill = processes.start("prefill", "prefill-0", "--chunk-tokens", "64", "--fake-step-s", "0.02")
    processes.start("decode", "decode-0")
    statuses = [await processes.ready(name) for name in ("prefill-0", "decode-0")]
    channels = [open_channel(status.record.address) for status in statuses]
    stream = asyncio.create_task(tokens_of(channels[1], asyncio.Event()))
    reports = reports_of(channels[0], max_tokens=20)
    while not (await anext(reports)).HasField("placed"):
        pass
    await processes.eventually(lambda: not processes.holds_nothing("decode-0"), "room is held")
    # Decode learns of the death by the connection. Before there is one, the router would abort the reservation.
    await processes.eventually(lambda: "kv_peer_connected" in prefill.log_path.read_text(), "the push is connected")
    await prefill.kill()
    with refuses(grpc.StatusCode.UNAVAILABLE):
        async for _ in reports:
            pass
    await processes.eventually(lambda: processes.holds_nothing("decode-0"), "its blocks are free", 2.0)
    await processes.eventually(lambda: processes.status("prefill-0") is None, "it leaves the view", 5.0)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    for channel in channels:
        await channel.close()


async def test_a_terminated_process_leaves_the_view_at_once_and_exits_with_0(processes: PrefillAndDecode) -> None:
    # It does not leave by the end of its lease.
    lease = ("--lease-ttl-s", "600")
    children = [processes.start("prefill", "prefill-0", *lease), processes.start("decode", "decode-0", *lease)]
    for child in children:
        await processes.ready(child.name)
        assert await child.stop(DEADLINE_S) == 0
        await processes.eventually(lambda: processes.status(child.name) is None, "it has left")  # noqa: B023


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_of_two_processes_with_one_instance_id_the_older_ends_and_both_say_so(
    processes: PrefillAndDecode, role: str
) -> None:
    older = processes.start(role, "one")
    first = await processes.ready("one")
    newer = ChildProcess.start("newer", processes.command(role, "one"), older.log_path.with_name("newer.log"))
    processes.children["newer"] = newer
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
    processes: PrefillAndDecode, role: str, flags: list[str], says: str
) -> None:
    child = processes.start(role, f"{role}-0", *flags)
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2
    lines = [line for line in child.log_path.read_text().splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert lines[0].startswith(f"kaveri {role}: {says}")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_taken_port_is_found_before_the_model_is_loaded(processes: PrefillAndDecode, role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = processes.start(role, f"{role}-0", "--engine", "transformers", "--model", "/nowhere", "--port", port)
        assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 2
    assert f"kaveri {role}: --port: cannot listen on 127.0.0.1:{port}" in child.log_path.read_text()
