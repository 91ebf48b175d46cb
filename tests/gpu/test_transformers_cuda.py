"""On a CUDA device the transformers engine does what every engine must, and draws what the host draws.

Exactness against `generate` on the device: tests/library/engine/test_transformers_exactness.py and
tests/e2e/test_exactness.py run on every device in tests/support/devices.py.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.attention import PagedMemory, report_last
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.engine.transformers.step import LayerReports
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.testing.engine_conformance import EngineConformance
from kaveri.testing.engine_endings import EndingConformance
from kaveri.testing.engine_release import ReleaseConformance
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_resumption import ResumptionConformance
from kaveri.testing.engine_rules import RulesConformance
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model
from tests.support.transformers_harness import BLOCK_TOKENS, TransformersHarness

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", max_positions=256, eos_token_id=7)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> PlainTransformers:
    return PlainTransformers(model_folder, ignore_eos=True, device="cuda")


class TestStepwiseOnCuda(
    EngineConformance,
    EndingConformance,
    RulesConformance,
    ResumptionConformance,
    ReplicationConformance,
    ReleaseConformance,
):
    @pytest.fixture(
        params=[(BLOCK_TOKENS, BLOCK_TOKENS), (16, BLOCK_TOKENS), (BLOCK_TOKENS, 16)],
        ids=["equal blocks", "blocks of 16 to 8", "blocks of 8 to 16"],
    )
    def harness(
        self, request: pytest.FixtureRequest, model_folder: Path, reference: PlainTransformers, tmp_path: Path
    ) -> TransformersHarness:
        here, there = request.param
        return TransformersHarness(
            model_folder, tmp_path, reference, device="cuda", prefill_block_tokens=here, decode_block_tokens=there
        )


def test_the_device_draws_the_tokens_that_the_host_draws() -> None:
    rng = random.Random(1)
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1)) * 2
    slices = [
        SequenceSlice(
            [1],
            0,
            [0],
            True,
            rng.randrange(100),
            ResolvedParams(
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 40]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(2**64),
                logprobs=rng.choice([None, 2]),
            ),
        )
        for _ in range(len(logits))
    ]
    here, there = draw_tokens(logits, slices), draw_tokens(logits.cuda(), slices)
    assert [token.token_id for token in there] == [token.token_id for token in here]  # type: ignore[union-attr]


@pytest.mark.parametrize("locked", [True, False], ids=["through a window", "through ordinary memory"])
def test_blocks_come_down_and_go_up_unchanged(locked: bool) -> None:
    layout = KvLayout("model", layer_count=3, block_tokens=4, kv_head_count=2, head_dim=8, dtype="bfloat16")
    block_ids = [7, 3, 39, 0]
    # Again and again: pages that are locked twice, or unmapped while they are locked, are an error of CUDA's.
    for seed in range(3):
        pool = KvPool(layout, 40)
        random_bytes = np.random.default_rng(seed)
        pool.memory[:] = random_bytes.integers(0, 256, pool.memory.shape, np.uint8)
        before = pool.memory.copy()
        if not locked:
            # Pages that another has locked are refused.
            torch.cuda.cudart().cudaHostRegister(pool.memory.ctypes.data, pool.memory.nbytes, 0)
        memory = PagedMemory(pool, torch.device("cuda"))
        assert (memory._pool is not None and memory._pool.is_cuda) == locked
        pool.memory[:, block_ids] = 0
        memory.mirror_all(block_ids)
        np.testing.assert_array_equal(pool.memory, before)

        arrived = random_bytes.integers(0, 256, before[:, block_ids].shape, np.uint8)
        pool.memory[:, block_ids] = arrived
        memory.landed(block_ids)
        pool.memory[:, block_ids] = 0
        reported: list[int] = []
        reports = LayerReports(reported.append, torch.tensor(block_ids, device="cuda"))
        for layer in range(layout.layer_count):
            memory.mirror(layer, reports)
            # A copy that the device makes by itself is reported with the next layer.
            assert reported == list(range(layer if locked else layer + 1))
        report_last(reports)
        assert reported == list(range(layout.layer_count))
        np.testing.assert_array_equal(pool.memory[:, block_ids], arrived)
        if not locked:
            torch.cuda.cudart().cudaHostUnregister(pool.memory.ctypes.data)


def test_a_pool_that_the_device_has_no_room_for_is_refused_by_name(model_folder: Path) -> None:
    runner = load_runner(str(model_folder), "float32", "cuda", None, BLOCK_TOKENS)
    block_bytes = runner.layout.layer_count * runner.layout.block_bytes
    free_bytes, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free_bytes - 2**30, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(ConfigError, match="kv_cache_memory"):
            runner.attach(KvPool(runner.layout, 2**31 // block_bytes))
    finally:
        del hog
        torch.cuda.empty_cache()


def test_a_gpu_that_is_not_there_is_refused_by_name(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device"):
        load_runner(str(model_folder), "float32", f"cuda:{torch.cuda.device_count()}", None, BLOCK_TOKENS)
