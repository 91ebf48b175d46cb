"""The engine does what every engine must."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from kaveri_example.engine import ExampleRunner, next_token

from kaveri.engine.contract import KeepingEngine
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.store import ReplicaStore
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_endings import EndingConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance


class _ExampleHarness:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> StepwiseEngine:
        return StepwiseEngine(ExampleRunner(1000, max_model_len, 16), total_blocks, chunk_tokens=chunk_tokens)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> StepwiseEngine:
        return StepwiseEngine(
            ExampleRunner(1000, max_model_len, 16),
            total_blocks,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            listen=[self._endpoint()],
        )

    def replica_store(self, layout: KvLayout, block_count: int) -> HostReplicas:
        memory_bytes = block_count * layout.layer_count * layout.block_bytes
        return HostReplicas(
            layout, memory_bytes, listen=[self._endpoint()], transports=make_transports(), epoch=self._count
        )

    def kept_replicas(self, engine: KeepingEngine) -> ReplicaStore:
        return engine.keep_replicas([self._endpoint()], 1)

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        tokens = list(token_ids)
        for _ in range(token_count):
            tokens.append(next_token(tokens))
        return tokens[len(token_ids) :]

    def _endpoint(self) -> KvEndpoint:
        self._count += 1
        return KvEndpoint("unix", str(self._folder / f"kv{self._count}.sock"))


class TestExample(EngineConformance, EndingConformance, ResumptionConformance, ReplicationConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> _ExampleHarness:
        return _ExampleHarness(tmp_path)
