"""Harness of the engine conformance suites for the transformers runner, with expected answers."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kaveri.engine.transformers.attention import PagedMemory
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.kv.tiers.pool import KvPool
from tests.support.engine_suite import StepwiseHarness
from tests.support.plain_transformers import PlainTransformers

BLOCK_TOKENS = 8


class TransformersHarness(StepwiseHarness):
    """Factory of engines on one checkpoint and device, with these block sizes."""

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
        super().__init__(socket_folder, decode_block_tokens, prefill_block_tokens)
        self._model_folder = model_folder
        self._reference = reference
        self._device = device

    def _runner(self, max_model_len: int, block_tokens: int) -> TransformersRunner:
        return load_runner(str(self._model_folder), "float32", self._device, max_model_len, block_tokens)

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return self._reference.answer(token_ids, token_count)


class CopiedMemoryHarness(TransformersHarness):
    """Factory of engines that compute on a copy of the KV pool, as on a GPU."""

    def _runner(self, max_model_len: int, block_tokens: int) -> TransformersRunner:
        runner = super()._runner(max_model_len, block_tokens)
        attach = runner.attach

        def attach_copy(pool: KvPool) -> None:
            attach(pool)
            runner._memory = PagedMemory(pool, torch.device("cpu"), separate=True)

        runner.attach = attach_copy  # type: ignore[method-assign]
        return runner
