"""The vLLM engine does what every engine must, KV pushed over real sockets between two processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.contract import FirstToken, PromptLogprobs
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.testing.engine_conformance import (
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    EngineConformance,
    make_request,
    running_pair,
    with_params,
)
from kaveri.testing.engine_replication import ReplicationConformance
from kaveri.testing.engine_rules import RulesConformance
from tests.support.engine_process import RemoteEngine
from tests.support.engine_suite import EngineSuite, ReplicaStores
from tests.support.plain_transformers import PlainTransformers

# The first test of a module loads vLLM.
pytestmark = pytest.mark.timeout(300)


class _VllmHarness(ReplicaStores):
    def __init__(self, prefills: Any, decodes: Any, folder: Path, reference: PlainTransformers) -> None:
        super().__init__(folder)
        self._prefills = prefills
        self._decodes = decodes
        self._reference = reference

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> RemoteEngine:
        assert (max_model_len, chunk_tokens) == (MAX_MODEL_LEN, CHUNK_TOKENS)
        return self._prefills.lend().open(total_blocks=total_blocks, max_batch=1)

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> RemoteEngine:
        assert (max_model_len, chunk_tokens) == (MAX_MODEL_LEN, CHUNK_TOKENS)
        listen = [self._endpoint("kv"), KvEndpoint("tcp", "127.0.0.1:0")]
        # A pause before each step, so that changes between two steps are seen.
        return self._decodes.lend().open(total_blocks=total_blocks, max_batch=max_batch, listen=listen, pause_s=0.002)

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return self._reference.answer(token_ids, token_count)


class TestVllmEngine(EngineSuite):
    @pytest.fixture
    def harness(self, prefills: Any, decodes: Any, reference: PlainTransformers, tmp_path: Path) -> _VllmHarness:
        return _VllmHarness(prefills, decodes, tmp_path, reference)

    def test_prompt_logprobs_equal_a_plain_forward_pass(
        self, harness: _VllmHarness, reference: PlainTransformers
    ) -> None:
        with running_pair(harness) as pair:
            for length in (2, CHUNK_TOKENS + 1, 75):
                request = make_request(pair.prefill, f"r{length}", length, 1, prompt_logprobs=2)
                pair.prefill.prefill(request)
                pair.prefilled.wait_for_finish(request.key)
                events = pair.prefilled.of(PromptLogprobs, request.key)
                expected = reference.logprobs(request.token_ids)
                entries = [entry for event in events for entry in event.entries]
                assert len(entries) == length - 1
                for token_id, entry, row in zip(request.token_ids[1:], entries, expected, strict=False):
                    assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
                    likeliest = row.topk(2).values.tolist()
                    assert [value for _, value in entry.top] == pytest.approx(likeliest, abs=1e-4)

    def test_first_tokens_say_how_much_of_the_prompt_came_from_the_prefix_cache(self, harness: _VllmHarness) -> None:
        with running_pair(harness) as pair:
            for name, cached in (("new", False), ("again", True)):
                request = with_params(make_request(pair.prefill, "prompt", 100, 1), name)
                pair.prefill.prefill(request)
                pair.prefilled.wait_for_finish(request.key)
                (first,) = pair.prefilled.of(FirstToken, request.key)
                assert (0 < first.cached_tokens < len(request.token_ids)) == cached


# One test loads vLLM in up to four engines of two ranks, on as few as two cores.
@pytest.mark.timeout(900)
class TestVllmEngineOfTwoRanks(EngineConformance, ReplicationConformance, RulesConformance):
    """Tests of what two tensor-parallel ranks split, pushes and copies, and of what both draw."""

    @pytest.fixture
    def harness(
        self, two_rank_prefills: Any, two_rank_decodes: Any, reference: PlainTransformers, tmp_path: Path
    ) -> _VllmHarness:
        return _VllmHarness(two_rank_prefills, two_rank_decodes, tmp_path, reference)

    @pytest.mark.parametrize("seed", [0])
    def test_random_mix_on_small_pools_gives_exact_tokens_and_leaks_no_block(
        self, harness: _VllmHarness, seed: int
    ) -> None:
        super().test_random_mix_on_small_pools_gives_exact_tokens_and_leaks_no_block(harness, seed)
