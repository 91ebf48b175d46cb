"""Predictor services around a deterministic length model, and around a real one with set weights."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.length import TokenRange
from kaveri.domain.view import InstanceStatus
from kaveri.hosting.service_host import ServiceHost
from kaveri.predictor.manifest import Manifest, write_manifest
from kaveri.rpc.server import open_channel
from kaveri.v1 import predictor_pb2
from kaveri.v1.predictor_pb2_grpc import LengthPredictorServiceStub
from services.predictor.config import PredictorConfig
from services.predictor.service import predictor_host
from services.predictor.worker import WorkerThread
from tests.services.conftest import eventually
from tests.support.redis_fixture import run_redis

DEADLINE_S = 30.0
BUCKETS = 5


class LastTokenModel:
    """Length model that predicts the bucket (last token) % BUCKETS. Records its batches."""

    model = "fake"
    granularity = 100
    bucket_count = BUCKETS
    version = "v1"
    vocab_size = 1000
    max_prompt_tokens = 64

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self.free = threading.Event()
        self.free.set()
        self.rows: Callable[[int], list[list[float]]] | None = None
        """If set, called with the prompt count to make the answer."""

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.batches.append([tuple(prompt) for prompt in prompts])
        assert self.free.wait(DEADLINE_S)
        if self.rows is not None:
            return self.rows(len(prompts))
        return [[0.6 if prompt[-1] % BUCKETS == bucket else 0.1 for bucket in range(BUCKETS)] for prompt in prompts]

    def range_of(self, bucket: int) -> TokenRange:
        return TokenRange(100 * bucket, 100 * (bucket + 1))


@dataclass(eq=False)
class RunningPredictor:
    host: ServiceHost
    channel: aio.Channel
    registry: CollectorRegistry
    store: RedisStore
    stopping: asyncio.Event
    serving: asyncio.Task[None]
    calls: list[asyncio.Task[Any]] = field(default_factory=list)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def status(self) -> InstanceStatus | None:
        return self.store.view().instances.get("predictor-0")

    def ask(
        self, *prompts: Sequence[int], model: str = "fake", timeout_s: float | None = DEADLINE_S
    ) -> "asyncio.Task[predictor_pb2.PredictResponse]":
        message = predictor_pb2.PredictRequest(
            model=model, prompts=[predictor_pb2.PromptTokens(token_ids=prompt) for prompt in prompts]
        )

        async def call() -> predictor_pb2.PredictResponse:
            response: predictor_pb2.PredictResponse = await LengthPredictorServiceStub(self.channel).Predict(
                message, timeout=timeout_s
            )
            return response

        task = asyncio.create_task(call())
        self.calls.append(task)
        return task


@pytest.fixture
def model() -> LastTokenModel:
    return LastTokenModel()


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread("predictor")
    yield worker
    worker.close()


@pytest.fixture
async def predictor(model: LastTokenModel, worker: WorkerThread) -> AsyncIterator[RunningPredictor]:
    """Run a service with a real Redis: batches of 4, a queue of 8, 6 prompts a call."""
    config = PredictorConfig(
        instance_id="predictor-0",
        model="fake",
        batch_prompts=4,
        max_queue=8,
        max_call_prompts=6,
        drain_timeout_s=DEADLINE_S,
    )
    async with run_redis() as redis, RedisStore(redis.url) as store:
        registry, stopping = CollectorRegistry(), asyncio.Event()
        host = predictor_host(config, model, worker, store, registry)
        serving = asyncio.create_task(host.serve(stopping))
        await eventually(lambda: host.started.is_set() or serving.done(), "it starts")
        running = RunningPredictor(host, open_channel(host.address), registry, store, stopping, serving)
        try:
            yield running
        finally:
            model.free.set()
            stopping.set()
            await serving
            for call in running.calls:
                call.cancel()
            await asyncio.gather(*running.calls, return_exceptions=True)
            await running.channel.close()


@pytest.fixture
def bundle_of(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a folder with a real classifier, which always chooses one bucket of 100 tokens."""

    def make(bucket: int, model: str = "fake", bucket_count: int = BUCKETS) -> Path:
        import torch
        from transformers import ModernBertConfig, ModernBertForSequenceClassification

        folder = tmp_path / f"predictor-{bucket}"
        torch.manual_seed(0)
        config = ModernBertConfig(
            vocab_size=1000,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=64,
            num_labels=bucket_count,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            cls_token_id=None,
            sep_token_id=None,
        )
        classifier = ModernBertForSequenceClassification(config)
        with torch.no_grad():
            classifier.classifier.weight.zero_()
            classifier.classifier.bias.copy_(torch.eye(bucket_count)[bucket] * 5)
        classifier.save_pretrained(folder)
        manifest = Manifest(
            model=model,
            vocab_size=1000,
            granularity=100,
            bucket_count=bucket_count,
            longest_answer_tokens=100 * bucket_count - 1,
            max_prompt_tokens=64,
            own_tokenizer=False,
        )
        write_manifest(folder, manifest, [path for path in folder.iterdir() if path.is_file()])
        return folder

    return make
