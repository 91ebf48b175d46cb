"""Predictor processes around a real Redis: bad bundles, SIGTERM, and killed while a prefill process asks them."""

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from kaveri.cluster.redis_store import RedisStore
from kaveri.config.services import ServiceKind, program_of
from kaveri.domain.sampling import SamplingParams
from kaveri.domain.view import InstanceStatus
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.process import ChildProcess
from kaveri.rpc.server import open_channel
from kaveri.v1 import feed_pb2, predictor_pb2, prefill_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import params_to_proto
from tests.support.metrics_pages import read_page
from tests.support.redis_fixture import run_redis

pytestmark = pytest.mark.usefixtures("warm_services")

DEADLINE_S = 90.0


class PredictorProcesses:
    """Services started by hand, and their cluster's view."""

    def __init__(self, redis_url: str, store: RedisStore, logs: Path) -> None:
        self._redis_url = redis_url
        self._store = store
        self._logs = logs
        self.children: list[ChildProcess] = []

    def start(self, role: str, *flags: str) -> ChildProcess:
        name = f"{role}-0"
        command = [sys.executable, *program_of(ServiceKind(role)), "--instance-id", name, "--model", "fake"]
        child = ChildProcess.start(name, [*command, "--redis-url", self._redis_url, *flags], self._logs / f"{name}.log")
        self.children.append(child)
        return child

    def status(self, role: str) -> InstanceStatus | None:
        return self._store.view().instances.get(f"{role}-0")

    async def ready(self, role: str) -> InstanceStatus:
        await self.eventually(lambda: self.status(role) is not None, f"{role} registers")
        status = self.status(role)
        assert status is not None
        return status

    def lines(self, role: str, event: str) -> int:
        """How often a process logged something."""
        return (self._logs / f"{role}-0.log").read_text().count(f'"event": "{event}')

    async def eventually(self, condition: Callable[[], bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + DEADLINE_S
        while not condition():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self._logs.glob("*.log")}
            assert loop.time() < until_s, f"not within {DEADLINE_S} s: {what}\n{logs}"
            await asyncio.sleep(0.01)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[PredictorProcesses]:
    logs = tmp_path / "logs"
    logs.mkdir()
    async with run_redis() as redis, RedisStore(redis.url) as store:
        processes = PredictorProcesses(redis.url, store, logs)
        try:
            yield processes
        finally:
            for child in processes.children:
                if child.exit_status is None:
                    await child.kill()


async def test_a_real_classifier_is_served_and_sigterm_ends_it_with_0(
    processes: PredictorProcesses, bundle_of: Callable[..., Path]
) -> None:
    child = processes.start("predictor", "--predictor", str(bundle_of(3)))
    status = await processes.ready("predictor")
    async with open_channel(status.record.address) as channel:
        prompts = [predictor_pb2.PromptTokens(token_ids=[number + 1] * (number + 1)) for number in range(20)]
        response = await LengthPredictorServiceStub(channel).Predict(
            predictor_pb2.PredictRequest(model="fake", prompts=prompts), timeout=DEADLINE_S
        )
    assert {(answer.length.low, answer.length.high) for answer in response.predictions} == {(300, 400)}
    assert len(response.predictions) == 20
    assert response.version in status.record.engine
    assert await child.stop(DEADLINE_S) == 0
    await processes.eventually(lambda: processes.status("predictor") is None, "it has left")


def corrupt_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("model", "damage", "says"),
    [
        ("fake", corrupt_weights, "corrupt"),
        ("another-model", lambda folder: None, "was made for model 'another-model'"),
    ],
)
async def test_an_unusable_bundle_is_one_line_and_exit_status_2(
    processes: PredictorProcesses,
    bundle_of: Callable[..., Path],
    model: str,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder = bundle_of(1, model=model)
    damage(folder)
    child = processes.start("predictor", "--predictor", str(folder))
    async with asyncio.timeout(DEADLINE_S):
        assert await child.wait() == 2
    lines = [line for line in child.log_path.read_text().splitlines() if not line.startswith("{")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("kaveri predictor: --predictor: ")
    assert says in lines[0]


class Traffic:
    """Requests through a prefill and a decode process, one after the other, as a router makes them."""

    def __init__(self, prefill: aio.Channel, decode: aio.Channel, metrics_port: int) -> None:
        self._prefill = PrefillServiceStub(prefill)
        self._feeds = FeedServiceStub(prefill), FeedServiceStub(decode)
        self._metrics = f"127.0.0.1:{metrics_port}"
        self._rng = random.Random(1)
        self._first: dict[str, asyncio.Future[int]] = {}
        self._tokens: dict[str, dict[int, int]] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self.answered = 0
        self.following: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        await asyncio.gather(*map(self._follow, self._feeds))

    async def _follow(self, stub: FeedServiceStub) -> None:
        stream: Any = stub.Follow(feed_pb2.FollowRequest(router_id="router"))
        async for message in stream:
            for report in message.reports:
                if report.HasField("first_token") and not (first := self._first[report.request_id]).done():
                    first.set_result(report.first_token.token_id)
                assert not report.ended.error, report.ended.error
            for gained in message.requests:
                tokens = self._tokens.setdefault(gained.request_id, {})
                tokens.update({gained.index + offset: token for offset, token in enumerate(gained.token_ids)})
                assert not gained.error, gained.error
                if gained.finish_reason:
                    self._ended[gained.request_id].set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Requests until told to stop; each must be answered, with the right tokens."""
        while not stopping.is_set():
            await self.request(f"r{self.answered}")
            self.answered += 1

    async def request(self, request_id: str) -> None:
        prompt = [self._rng.randrange(1, 1000) for _ in range(120)]
        self._ended[request_id] = asyncio.Event()
        self._first[request_id] = asyncio.get_running_loop().create_future()
        message = prefill_pb2.SubmitRequest(
            request_id=request_id,
            attempt=1,
            router_id="router",
            token_ids=prompt,
            params=params_to_proto(SamplingParams(max_tokens=6, seed=0)),
            timeout_s=DEADLINE_S,
        )
        await self._prefill.Submit(message, timeout=DEADLINE_S)
        ended = asyncio.ensure_future(self._ended[request_id].wait())
        assert self.following is not None
        await asyncio.wait((ended, self.following), timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        assert ended.done(), f"{request_id} was not answered"
        tokens = self._tokens.pop(request_id)
        # Reported on the other stream, which may be behind.
        first = await asyncio.wait_for(self._first[request_id], DEADLINE_S)
        assert [first, *(tokens[index] for index in sorted(tokens))] == FakeModel().answer(prompt, 0, 6)

    async def predictions(self, outcome: str) -> float:
        name = f'kaveri_predictions_total{{outcome="{outcome}"}} '
        lines = await self.all_predictions()
        return next((float(line[len(name) :]) for line in lines if line.startswith(name)), 0.0)

    async def all_predictions(self) -> list[str]:
        text = await asyncio.to_thread(read_page, self._metrics)
        return [line for line in text.splitlines() if line.startswith("kaveri_prediction")]

    async def until_more(self, outcome: str, traffic: "asyncio.Task[None]") -> None:
        """Waits until another prediction had that outcome; fails when a request fails."""
        before = await self.predictions(outcome)
        until_s = asyncio.get_running_loop().time() + DEADLINE_S
        while await self.predictions(outcome) <= before:
            assert not traffic.done(), traffic.result()
            assert asyncio.get_running_loop().time() < until_s, await self.all_predictions()
            await asyncio.sleep(0.02)


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """A port reserved by a bound socket until a process listens on it, which a bound socket allows."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
async def test_traffic_outlives_its_predictor_and_uses_it_again_when_it_is_back(
    processes: PredictorProcesses, bundle_of: Callable[..., Path], metrics_port: int, mode: str
) -> None:
    folder = str(bundle_of(2))
    engine = ("--engine", "fake", "--kv-cache-memory", "2MiB", "--max-model-len", "512")
    prediction = ("--prediction", mode, "--prediction-budget-s", "10")
    # Four chunks, so that there is a while to predict beside the first.
    slow = ("--chunk-tokens", "32", "--fake-step-s", "0.05", "--metrics-port", str(metrics_port))
    processes.start("prefill", *engine, *slow, *prediction)
    processes.start("decode", *engine)
    predictor = processes.start("predictor", "--predictor", folder)
    addresses = {role: (await processes.ready(role)).record.address for role in ("prefill", "decode", "predictor")}
    channels = {role: open_channel(addresses[role]) for role in ("prefill", "decode")}
    traffic = Traffic(channels["prefill"], channels["decode"], metrics_port)
    following = traffic.following = asyncio.create_task(traffic.follow())
    stopping = asyncio.Event()
    running = asyncio.create_task(traffic.run(stopping))
    try:
        await traffic.until_more("used", running)
        await predictor.kill()
        # Its lease ends; until then asking it fails.
        await traffic.until_more("none", running)
        before = traffic.answered
        await processes.eventually(lambda: traffic.answered > before + 3, "requests go on without it")
        processes.start("predictor", "--predictor", folder)
        await traffic.until_more("used", running)
        stopping.set()
        await running
    finally:
        for task in (running, following):
            task.cancel()
        await asyncio.gather(running, following, return_exceptions=True)
        for channel in channels.values():
            await channel.close()
    gone = processes.lines("prefill", "predictor_failing") + processes.lines("prefill", "predictor_left")
    assert gone == 1
    assert processes.lines("prefill", "predictor_works") == 2


async def test_a_taken_port_is_found_before_the_predictor_is_loaded(processes: PredictorProcesses) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = processes.start("predictor", "--predictor", "/nowhere", "--port", port)
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 2
    assert f"kaveri predictor: --port: cannot listen on 127.0.0.1:{port}" in child.log_path.read_text()
