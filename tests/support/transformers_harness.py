"""Engines on the transformers runner for the conformance suites, and what they must answer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.transformers.attention import PagedMemory
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports
from tests.support.plain_transformers import PlainTransformers

BLOCK_TOKENS = 8


class TransformersHarness:
    """Of one checkpoint on one device, with blocks of these sizes."""

    def __init__(
        self,
        model_folder: Path,
        socket_folder: Path,
        reference: PlainTransformers,
        *,
        device: str = "cpu",
        prefill_block_tokens: int = BLOCK_TOKENS,
        decode_block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._model_folder = model_folder
        self._socket_folder = socket_folder
        self._reference = reference
        self._device = device
        self._prefill_block_tokens = prefill_block_tokens
        self._decode_block_tokens = decode_block_tokens
        self._count = 0

    def _runner(self, max_model_len: int, block_tokens: int) -> TransformersRunner:
        return load_runner(str(self._model_folder), "float32", self._device, max_model_len, block_tokens)

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> StepwiseEngine:
        runner = self._runner(max_model_len, self._prefill_block_tokens)
        return StepwiseEngine(runner, total_blocks, chunk_tokens=chunk_tokens)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> StepwiseEngine:
        self._count += 1
        return StepwiseEngine(
            self._runner(max_model_len, self._decode_block_tokens),
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


class CopiedMemoryHarness(TransformersHarness):
    """Engines that compute on a copy of the pool, as on a GPU."""

    def _runner(self, max_model_len: int, block_tokens: int) -> TransformersRunner:
        runner = super()._runner(max_model_len, block_tokens)
        attach = runner.attach

        def attach_copy(pool: KvPool) -> None:
            attach(pool)
            runner._memory = PagedMemory(pool, torch.device("cpu"), separate=True)

        runner.attach = attach_copy  # type: ignore[method-assign]
        return runner
