"""Steps are measured on the test's clock: the runner's times are reported, and the fit finds them."""

from collections import Counter
from collections.abc import Sequence

import pytest

from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.stepwise.runner import Drawn, LayerListener, SequenceSlice
from kaveri.errors import ConfigError
from kaveri.latency.fit import fit_decode, fit_prefill, predict_decode_s, predict_prefill_s
from kaveri.latency.saturation import find_saturation, throughput_curve
from kaveri.profiling.measure import measure_steps
from kaveri.profiling.plan import StepLimits, plan_steps
from tests.library.profiling.profile_double import OPT_13B, ClockedRunner

BLOCKS = 2048


def limits(runner: ClockedRunner, **changes: int) -> StepLimits:
    values = {
        "max_chunk_tokens": 2048,
        "max_batch": 64,
        "max_model_len": runner.max_model_len,
        "total_blocks": BLOCKS,
        "block_tokens": runner.layout.block_tokens,
    }
    return StepLimits(**(values | changes))


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_measured_is_what_the_runner_took_and_gives_its_latency_model(quick: bool) -> None:
    runner = ClockedRunner(OPT_13B)
    prefill, decode = measure_steps(runner, BLOCKS, plan_steps(limits(runner), quick), 2, clock=runner.clock)
    for point in prefill:
        expected = predict_prefill_s(OPT_13B.prefill, point)
        # A prompt's chunk of one token behind a context would count as decode; none is measured.
        assert (point.times.min_s, point.times.max_s) == pytest.approx((expected, expected))
    for entry in decode:
        assert entry.times.median_s == pytest.approx(predict_decode_s(OPT_13B.decode[0], entry))
    latency, error = fit_prefill(prefill)
    assert latency.token_s == pytest.approx(OPT_13B.prefill.token_s, rel=1e-5)
    assert latency.step_s == pytest.approx(OPT_13B.prefill.step_s, rel=1e-5)
    assert error.largest < 1e-5
    assert fit_decode(decode)[0].request_s == pytest.approx(OPT_13B.decode[0].request_s, rel=1e-4)
    # n / (18.1 ms + n * 0.102 ms + n**2 * 7.1 ns): 7978 tokens/s at 2048, 7634 at 768, 7094 at 512.
    assert find_saturation(throughput_curve(prefill)).chunk_tokens == (1024 if quick else 768)


def test_every_step_has_its_rounds_and_the_first_one_is_not_counted() -> None:
    class SlowAtFirst(ClockedRunner):
        def __init__(self) -> None:
            super().__init__(OPT_13B)
            self.seen: set[tuple[tuple[int, int], ...]] = set()

        def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
            drawn = super().run(batch, on_layer)
            shape = tuple(self.steps[-1])
            self.now_s += 100.0 * (shape not in self.seen)
            self.seen.add(shape)
            return drawn

    runner = SlowAtFirst()
    plan = plan_steps(limits(runner), quick=True)
    done = Counter[str]()
    prefill, decode = measure_steps(runner, BLOCKS, plan, 3, lambda: done.update(["step"]), runner.clock)
    assert done["step"] == 4 * (len(plan.prefill) + len(plan.decode))
    assert {point.prompts for point in prefill} == set(plan.prefill)
    assert {(point.batch, point.context_tokens) for point in decode} == set(plan.decode)
    for times in [point.times for point in prefill] + [entry.times for entry in decode]:
        assert times.repeats >= 3
        assert times.max_s < 100.0
    shortest = min(prefill, key=lambda point: point.times.median_s)
    assert shortest.times.repeats > 3, "short steps are measured more often"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("max_model_len", [100, 256, 1000, 4096])
@pytest.mark.parametrize("blocks", [280, 1000])
def test_the_plan_keeps_to_what_the_engine_can(max_model_len: int, blocks: int, quick: bool) -> None:
    given = StepLimits(
        max_chunk_tokens=700, max_batch=20, max_model_len=max_model_len, total_blocks=blocks, block_tokens=16
    )
    plan = plan_steps(given, quick)
    assert len(set(plan.prefill)) == len(plan.prefill)
    assert len(set(plan.decode)) == len(plan.decode)
    for prompts in plan.prefill:
        assert sum(stop - start for start, stop in prompts) <= 700
        assert max(stop for _, stop in prompts) <= max_model_len
        assert sum(-(-stop // 16) for _, stop in prompts) <= blocks
    for batch, context in plan.decode:
        assert batch <= 20
        assert given.holds(batch, context)
    # Each term of the model must change while the others do not.
    assert max(batch for batch, _ in plan.decode) == 20
    assert any(len(prompts) > 1 for prompts in plan.prefill)
    assert max_model_len < 512 or any(start > 0 for prompts in plan.prefill for start, _ in prompts)
    runner = ClockedRunner(OPT_13B, FakeModel(max_model_len=max_model_len))
    measure_steps(runner, blocks, plan, 1, clock=runner.clock)


def test_an_engine_too_small_for_a_fit_is_refused() -> None:
    small = StepLimits(max_chunk_tokens=2048, max_batch=64, max_model_len=8, total_blocks=1, block_tokens=16)
    with pytest.raises(ConfigError, match="max_model_len"):
        plan_steps(small, quick=False)
