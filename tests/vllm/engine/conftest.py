"""vLLM engines for these tests: processes that load a model once and lend it to one test at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_process import EngineProcess, vllm_process
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

MAX_MODEL_LEN = 128
_BLOCKS = 401
"""One more than a test uses: vLLM keeps the first for itself."""


class Lender:
    """Processes for the prefill or decode side of a test, each with vLLM and the same model loaded."""

    def __init__(self, model: Path, *, mirrored: bool = False, tensor_ranks: int = 1) -> None:
        self._model = model
        self._mirrored = mirrored
        self._tensor_ranks = tensor_ranks
        self._processes: list[EngineProcess] = []

    def lend(self) -> EngineProcess:
        for process in self._processes:
            if process.is_alive and process.is_free:
                return process
        process = vllm_process(
            self._model,
            has_children=self._tensor_ranks > 1,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_memory=2**27,
            max_batch=8,
            engine_args={"num_gpu_blocks_override": _BLOCKS, "tensor_parallel_size": self._tensor_ranks},
            mirrored=self._mirrored,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    # Heads as wide as vLLM's CPU kernels take them.
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        max_positions=256,
        eos_token_id=7,
        hidden_size=128,
        head_dim=32,
        tokenizer=True,
    )


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> PlainTransformers:
    return PlainTransformers(model_folder, ignore_eos=True)


def _lender(**loading: Any) -> Any:
    @pytest.fixture(scope="session")
    def lender(model_folder: Path) -> Iterator[Lender]:
        made = Lender(model_folder, **loading)
        yield made
        made.close()

    return lender


prefills, decodes = _lender(), _lender()
mirrored_prefills, mirrored_decodes = _lender(mirrored=True), _lender(mirrored=True)
two_rank_prefills, two_rank_decodes = _lender(tensor_ranks=2), _lender(tensor_ranks=2)
mirrored_two_rank_prefills = _lender(mirrored=True, tensor_ranks=2)
mirrored_two_rank_decodes = _lender(mirrored=True, tensor_ranks=2)
