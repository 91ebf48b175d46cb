"""Engines for service tests: fake ones in the test process, or vLLM's in processes of their own. Both are configured in
the fake engine's terms: bytes of its KV pool, seconds per step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.factory import BuiltEngine, build_engine, listen_endpoints
from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from services.instance.config import DecodeConfig
from tests.support.engine_process import EngineProcess
from tests.support.tiny_models import make_tiny_model

_FAKE_TOKEN_BYTES = 256
"""KV bytes per token of the fake engine, over all layers."""
_VLLM_BLOCKS = 401
_VLLM_LOADING = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_tokens": 32,
    "kv_cache_memory": 2**27,
    "chunk_tokens": 512,
    "max_batch": 64,
    "engine_args": {"num_gpu_blocks_override": _VLLM_BLOCKS},
}


class Engines(Protocol):
    """Factory of engines for service tests, with their expected answers."""

    block_tokens: int
    """Tokens per KV block unless a test sets it."""
    free_within_s: float
    """Time within which blocks that are no longer needed must be free, in seconds."""

    def make(self, settings: EngineSettings) -> BuiltEngine:
        """Make an engine, not started."""

    def answer(self, token_ids: Sequence[int], token_count: int, generated_count: int = 0) -> list[int]:
        """Return the next tokens, sampled with seed 0 and temperature 1, past end-of-sequence ids. generated_count: how
        many of token_ids belong to the answer already."""


class FakeEngines:
    block_tokens = 16
    free_within_s = 1.0

    def make(self, settings: EngineSettings) -> BuiltEngine:
        return build_engine(settings)

    def answer(self, token_ids: Sequence[int], token_count: int, generated_count: int = 0) -> list[int]:
        return FakeModel().answer(token_ids, generated_count, token_count)


class VllmEngines:
    """Factory of vLLM engines. Processes start when needed, and are reused by later tests."""

    block_tokens = 32
    # Two processes and a pipe between the test and its blocks.
    free_within_s = 60.0

    def __init__(self, folder: Path) -> None:
        # Heads as wide as vLLM's CPU kernels take them, and the fake model's vocabulary.
        self._folder = make_tiny_model(
            folder, "qwen2", vocab_size=FakeModel().vocab_size, max_positions=1024, hidden_size=128
        )
        # Most tests take two, and loading the model takes long.
        self._processes = [self._start() for _ in range(2)]
        self._model: Any = None
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def make(self, settings: EngineSettings) -> BuiltEngine:
        tokens = settings.kv_cache_memory // _FAKE_TOKEN_BYTES
        engine = self._lend().open(
            total_blocks=min(_VLLM_BLOCKS - 1, tokens // self.block_tokens),
            max_model_len=settings.max_model_len,
            # An instance that only decodes computes a token of each answer beside what was preempted.
            step_tokens=settings.chunk_tokens + settings.max_batch * isinstance(settings, DecodeConfig),
            max_batch=settings.max_batch,
            step_s=settings.fake_step_s,
            listen=listen_endpoints(settings),
            transports=settings.kv_transports,
            advertise_host=settings.kv_advertise_host,
        )
        return cast(BuiltEngine, engine)

    def answer(self, token_ids: Sequence[int], token_count: int, generated_count: int = 0) -> list[int]:
        """Compute the answer with transformers' model and Kaveri's sampler for it."""
        # A later attempt's answer goes on where the earlier one's stopped.
        prompt = tuple(token_ids[: len(token_ids) - generated_count])
        known = self._answers.get(prompt, [])
        if len(known) < generated_count + token_count:
            known = self._answers[prompt] = self._draw(prompt, generated_count + token_count)
        assert list(token_ids[len(prompt) :]) == known[:generated_count], "not the beginning of an answer"
        return known[generated_count : generated_count + token_count]

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _draw(self, prompt: tuple[int, ...], token_count: int) -> list[int]:
        import torch
        from transformers import AutoModelForCausalLM

        from kaveri.engine.transformers.sampler import draw_tokens

        if self._model is None:
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        params = ResolvedParams(seed=0)
        drawn: list[int] = []
        inputs, past = list(prompt), None
        for index in range(token_count):
            with torch.no_grad():
                output = self._model(torch.tensor([inputs]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            piece = SequenceSlice((), 0, (), True, index, params)
            (token,) = draw_tokens(output.logits[:, -1], [piece])
            assert isinstance(token, DrawnToken)
            inputs = [token.token_id]
            drawn += inputs
        return drawn

    def _lend(self) -> EngineProcess:
        for process in self._processes:
            if process.is_alive and process.is_free:
                return process
        process = self._start()
        self._processes.append(process)
        return process

    def _start(self) -> EngineProcess:
        # Only where vLLM is installed.
        from tests.support.vllm_services import prepare

        return EngineProcess(
            prepare,
            str(self._folder),
            _VLLM_LOADING,
            preload=["tests.support.imported_vllm", "tests.support.vllm_services"],
            OMP_NUM_THREADS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
