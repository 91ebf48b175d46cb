"""All conformance suites of engines as one class, and common parts of their harnesses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.contract import EngineEvent, FirstToken, KeepingEngine
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_endings import EndingConformance
from kaveri.testing.engine_recorder import EngineRecorder
from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance
from kaveri.testing.engine_rules import RulesConformance


class EngineSuite(
    EngineConformance,
    EndingConformance,
    RulesConformance,
    ResumptionConformance,
    ReplicationConformance,
    ReleaseConformance,
):
    """All conformance tests for an engine that decodes and replicates KV."""


class ReplicaStores:
    """Factory of KV replica stores, and of addresses in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def replica_store(self, layout: KvLayout, block_count: int) -> HostReplicas:
        memory_bytes = block_count * layout.layer_count * layout.block_bytes
        listen = [self._endpoint("replicas")]
        return HostReplicas(layout, memory_bytes, listen=listen, transports=make_transports(), epoch=self._count)

    def kept_replicas(self, engine: KeepingEngine) -> ReplicaStore:
        return engine.keep_replicas([self._endpoint("kept")], 1)

    def _endpoint(self, name: str) -> KvEndpoint:
        self._count += 1
        return KvEndpoint("unix", str(self._folder / f"{name}{self._count}.sock"))


class StepwiseHarness(ReplicaStores):
    """Factory of stepwise engines with these block sizes; a subclass makes the runners."""

    def __init__(self, folder: Path, block_tokens: int, prefill_block_tokens: int | None = None) -> None:
        super().__init__(folder)
        self._block_tokens = block_tokens
        self._prefill_block_tokens = prefill_block_tokens or block_tokens

    def _runner(self, max_model_len: int, block_tokens: int) -> ModelRunner:
        raise NotImplementedError

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> StepwiseEngine:
        runner = self._runner(max_model_len, self._prefill_block_tokens)
        return StepwiseEngine(runner, total_blocks, chunk_tokens=chunk_tokens)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> StepwiseEngine:
        runner = self._runner(max_model_len, self._block_tokens)
        listen = [self._endpoint("kv"), KvEndpoint("tcp", "127.0.0.1:0")]
        return StepwiseEngine(runner, total_blocks, chunk_tokens=chunk_tokens, max_batch=max_batch, listen=listen)


def start_adopting(engine: Any) -> EngineRecorder:
    """Start an engine that decodes the prompts that it prefilled itself. Returns its recorder."""

    def adopt(event: EngineEvent) -> None:
        if isinstance(event, FirstToken) and event.finish is None:
            engine.adopt(event.key)
            engine.admit(event.key)

    recorder = EngineRecorder(on_event=adopt)
    engine.start(recorder)
    return recorder


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
