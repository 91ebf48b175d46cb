import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kaveri.rpc.server import open_channel
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceStub
from tests.services.service_processes import DEADLINE_S, ServiceProcesses

pytestmark = pytest.mark.usefixtures("warm_services")

MODEL = ("--model", "fake")


async def test_a_real_classifier_is_served_and_sigterm_ends_it_with_0(
    processes: ServiceProcesses, bundle_of: Callable[..., Path]
) -> None:
    child = processes.start("predictor", "predictor-0", *MODEL, "--predictor", str(bundle_of(3)))
    status = await processes.ready("predictor-0")
    async with open_channel(status.record.address) as channel:
        prompts = [predictor_pb2.PromptTokens(token_ids=[number + 1] * (number + 1)) for number in range(20)]
        response = await LengthPredictorServiceStub(channel).Predict(
            predictor_pb2.PredictRequest(model="fake", prompts=prompts), timeout=DEADLINE_S
        )
    assert {(answer.length.low, answer.length.high) for answer in response.predictions} == {(300, 400)}
    assert len(response.predictions) == 20
    assert response.version in status.record.engine
    assert await child.stop(DEADLINE_S) == 0
    await processes.eventually(lambda: processes.status("predictor-0") is None, "it has left")


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
    processes: ServiceProcesses,
    bundle_of: Callable[..., Path],
    model: str,
    damage: Callable[[Path], object],
    says: str,
) -> None:
    folder = bundle_of(1, model=model)
    damage(folder)
    child = processes.start("predictor", "predictor-0", *MODEL, "--predictor", str(folder))
    async with asyncio.timeout(DEADLINE_S):
        assert await child.wait() == 2
    lines = [line for line in child.log_path.read_text().splitlines() if not line.startswith("{")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("kaveri predictor: --predictor: ")
    assert says in lines[0]


async def test_a_taken_port_is_found_before_the_predictor_is_loaded(processes: ServiceProcesses) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = processes.start("predictor", "predictor-0", *MODEL, "--predictor", "/nowhere", "--port", port)
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 2
    assert f"kaveri predictor: --port: cannot listen on 127.0.0.1:{port}" in child.log_path.read_text()
