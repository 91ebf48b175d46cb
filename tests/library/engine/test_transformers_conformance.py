"""The stepwise engine on the transformers runner does what every engine must, KV pushed over real sockets."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.memory import PagedMemory
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

BLOCK_TOKENS = 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _TransformersHarness:
    def __init__(self, model_folder: Path, socket_folder: Path, reference: PlainTransformers) -> None:
        self._model_folder = model_folder
        self._socket_folder = socket_folder
        self._reference = reference
        self._count = 0

    def _runner(self, max_model_len: int) -> TransformersRunner:
        return load_runner(str(self._model_folder), "float32", "cpu", max_model_len, BLOCK_TOKENS)

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> StepwiseEngine:
        return StepwiseEngine(self._runner(max_model_len), total_blocks, chunk_tokens=chunk_tokens)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> StepwiseEngine:
        self._count += 1
        return StepwiseEngine(
            self._runner(max_model_len),
            total_blocks,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            listen=[
                KvEndpoint("unix", str(self._socket_folder / f"kv{self._count}.sock")),
                KvEndpoint("tcp", "127.0.0.1:0"),
            ],
        )

    def replica_store(self, layout: KvLayout, block_count: int) -> HostReplicas:
        self._count += 1
        memory_bytes = block_count * layout.layer_count * layout.block_bytes
        listen = [KvEndpoint("unix", str(self._socket_folder / f"replicas{self._count}.sock"))]
        return HostReplicas(layout, memory_bytes, listen=listen, transports=make_transports(), epoch=self._count)

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return self._reference.answer(token_ids, token_count)


class _DeviceHarness(_TransformersHarness):
    """Engines that compute on a copy of the pool, as on a GPU."""

    def _runner(self, max_model_len: int) -> TransformersRunner:
        runner = super()._runner(max_model_len)
        attach = runner.attach

        def attach_copy(pool: KvPool) -> None:
            attach(pool)
            runner._memory = PagedMemory(pool, torch.device("cpu"), separate=True)

        runner.attach = attach_copy  # type: ignore[method-assign]
        return runner


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", max_positions=256, eos_token_id=7)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PlainTransformers:
    return PlainTransformers(model_folder, ignore_eos=True)


class TestStepwiseOnTransformers(EngineConformance, ResumptionConformance, ReplicationConformance, ReleaseConformance):
    @pytest.fixture
    def harness(self, model_folder: Path, reference: PlainTransformers, tmp_path: Path) -> _TransformersHarness:
        return _TransformersHarness(model_folder, tmp_path, reference)


class TestStepwiseOnDeviceMemory(ResumptionConformance, ReplicationConformance, ReleaseConformance):
    @pytest.fixture
    def harness(self, model_folder: Path, reference: PlainTransformers, tmp_path: Path) -> _DeviceHarness:
        return _DeviceHarness(model_folder, tmp_path, reference)
