"""The stepwise engine on the fake runner does what every engine must."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_endings import EndingConformance
from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance

_EOS = 0.02
"""Chance of each token to be the end of its answer."""


class _StepwiseHarness:
    def __init__(self, folder: Path, block_tokens: int, prefill_block_tokens: int | None = None) -> None:
        self._folder = folder
        self._block_tokens = block_tokens
        self._prefill_block_tokens = prefill_block_tokens or block_tokens
        self._count = 0

    def _runner(self, max_model_len: int, block_tokens: int) -> ModelRunner:
        return FakeRunner(FakeModel(max_model_len=max_model_len, block_tokens=block_tokens, eos_probability=_EOS))

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> StepwiseEngine:
        runner = self._runner(max_model_len, self._prefill_block_tokens)
        return StepwiseEngine(runner, total_blocks, chunk_tokens=chunk_tokens)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> StepwiseEngine:
        self._count += 1
        return StepwiseEngine(
            self._runner(max_model_len, self._block_tokens),
            total_blocks,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            listen=[KvEndpoint("unix", str(self._folder / f"kv{self._count}.sock")), KvEndpoint("tcp", "127.0.0.1:0")],
        )

    def replica_store(self, layout: KvLayout, block_count: int) -> HostReplicas:
        self._count += 1
        memory_bytes = block_count * layout.layer_count * layout.block_bytes
        listen = [KvEndpoint("unix", str(self._folder / f"replicas{self._count}.sock"))]
        return HostReplicas(layout, memory_bytes, listen=listen, transports=make_transports(), epoch=self._count)

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return FakeModel(eos_probability=_EOS).answer(token_ids, 0, token_count)


class _TimedHarness(_StepwiseHarness):
    """Steps of a millisecond or so."""

    def _runner(self, max_model_len: int, block_tokens: int) -> ModelRunner:
        latency = LatencyModel(
            name="quick",
            source="this test",
            prefill=PrefillLatency(step_s=5e-4, token_s=1e-6, token_squared_s=1e-9),
            decode=(DecodeLatency(min_batch=1, step_s=5e-4, context_token_s=1e-8, request_s=1e-6),),
        )
        model = FakeModel(max_model_len=max_model_len, block_tokens=block_tokens, eos_probability=_EOS)
        return TimedRunner(model, latency)


class TestStepwiseOnTimed(
    EngineConformance, EndingConformance, ResumptionConformance, ReplicationConformance, ReleaseConformance
):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> _TimedHarness:
        return _TimedHarness(tmp_path, 16)


class TestStepwiseOnFake(
    EngineConformance, EndingConformance, ResumptionConformance, ReplicationConformance, ReleaseConformance
):
    @pytest.fixture(params=[4, 16], ids=["blocks of 4", "blocks of 16"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _StepwiseHarness:
        return _StepwiseHarness(tmp_path, request.param)


class TestStepwiseWithUnlikeBlocks(
    EngineConformance, EndingConformance, ResumptionConformance, ReplicationConformance, ReleaseConformance
):
    """Every push is mapped."""

    @pytest.fixture(params=[(4, 16), (16, 4)], ids=["blocks of 4 to 16", "blocks of 16 to 4"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _StepwiseHarness:
        here, there = request.param
        return _StepwiseHarness(tmp_path, there, prefill_block_tokens=here)
