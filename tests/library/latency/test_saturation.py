"""The saturating chunk size is found on curves whose answer is known."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.latency.saturation import find_saturation, throughput_curve
from tests.library.profiling.profile_double import prefill_point

CHUNKS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def curve(throughput: Callable[[int], float]) -> list[tuple[int, float]]:
    return [(chunk, throughput(chunk)) for chunk in CHUNKS]


def knee(chunk: int) -> float:
    return 10.0 * min(chunk, 384)


@pytest.mark.parametrize(
    ("throughput", "chunk_tokens", "reached"),
    [
        (knee, 384, True),
        # chunk / (chunk + 20) of the limit: 95 % of the best, which 2048 tokens have, is first met by 384.
        (lambda chunk: chunk / (chunk + 20), 384, True),
        # Long chunks are slower again: the best is 0.833 of the limit at 192 tokens; 96 have 0.796.
        (lambda chunk: chunk / (20 + chunk + chunk * chunk / 2000), 96, True),
        (lambda chunk: 3.0 * chunk, 2048, False),
    ],
)
def test_the_smallest_chunk_near_the_best_is_found(
    throughput: Callable[[int], float], chunk_tokens: int, reached: bool
) -> None:
    found = find_saturation(curve(throughput))
    assert (found.chunk_tokens, found.reached) == (chunk_tokens, reached)


def test_a_smaller_share_takes_a_smaller_chunk() -> None:
    assert find_saturation(curve(knee), share=0.6).chunk_tokens == 256
    assert find_saturation(curve(knee), share=1.0).chunk_tokens == 384


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_the_answer_by_one_chunk_at_most(seed: int) -> None:
    rng = random.Random(seed)
    found = find_saturation(curve(lambda chunk: knee(chunk) * rng.uniform(0.96, 1.04)))
    assert found.chunk_tokens in (384, 512), f"seed {seed}"
    assert found.reached


@pytest.mark.parametrize("factor", [0.2, 3.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_wrong_measurement_moves_the_answer_by_one_chunk_at_most(chunk: int, factor: float) -> None:
    found = find_saturation([(size, knee(size) * (factor if size == chunk else 1)) for size in CHUNKS])
    assert found.chunk_tokens in (256, 384, 512)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=len(CHUNKS)), st.floats(0.05, 1.0))
def test_the_answer_is_a_measured_chunk_and_knows_no_unit(values: list[float], share: float) -> None:
    found = find_saturation(list(zip(CHUNKS, values, strict=False)), share)
    assert found.chunk_tokens in CHUNKS[: len(values)]
    assert found.reached == (found.chunk_tokens < CHUNKS[len(values) - 1])
    # A power of two scales without rounding.
    assert find_saturation(
        [(chunk, value * 8) for chunk, value in zip(CHUNKS, values, strict=False)], share
    ).chunk_tokens == (found.chunk_tokens)


def test_the_curve_is_of_steps_without_context_and_of_few_prompts() -> None:
    points = [
        prefill_point(0.2, (0, 8), (0, 8)),
        prefill_point(0.1, (0, 16)),
        prefill_point(0.3, (16, 32)),
        prefill_point(0.05, (0, 4)),
        prefill_point(0.4, (0, 16), (0, 4)),
    ]
    tokens, rates = zip(*throughput_curve(points), strict=True)
    assert tokens == (4, 16, 20)
    assert rates == pytest.approx((80, 160, 50))
