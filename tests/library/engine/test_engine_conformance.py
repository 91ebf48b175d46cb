"""The stepwise engine on the fake runner does what every engine must."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency
from tests.support.engine_suite import EngineSuite, StepwiseHarness

_EOS = 0.02


class _FakeHarness(StepwiseHarness):
    def _runner(self, max_model_len: int, block_tokens: int) -> ModelRunner:
        return FakeRunner(FakeModel(max_model_len=max_model_len, block_tokens=block_tokens, eos_probability=_EOS))

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        return FakeModel(eos_probability=_EOS).answer(token_ids, 0, token_count)


class _TimedHarness(_FakeHarness):
    def _runner(self, max_model_len: int, block_tokens: int) -> ModelRunner:
        latency = LatencyModel(
            name="quick",
            source="this test",
            prefill=PrefillLatency(step_s=5e-4, token_s=1e-6, token_squared_s=1e-9),
            decode=(DecodeLatency(min_batch=1, step_s=5e-4, context_token_s=1e-8, request_s=1e-6),),
        )
        model = FakeModel(max_model_len=max_model_len, block_tokens=block_tokens, eos_probability=_EOS)
        return TimedRunner(model, latency)


class TestStepwiseOnTimed(EngineSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> _TimedHarness:
        return _TimedHarness(tmp_path, 16)


class TestStepwiseOnFake(EngineSuite):
    @pytest.fixture(params=[4, 16], ids=["blocks of 4", "blocks of 16"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _FakeHarness:
        return _FakeHarness(tmp_path, request.param)


class TestStepwiseWithUnlikeBlocks(EngineSuite):
    @pytest.fixture(params=[(4, 16), (16, 4)], ids=["blocks of 4 to 16", "blocks of 16 to 4"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _FakeHarness:
        here, there = request.param
        return _FakeHarness(tmp_path, there, prefill_block_tokens=here)
