"""Where more tokens in a step stop being of use: on curves whose answer is known."""

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
    """Rises in proportion up to 384 tokens, and no further."""
    return 10.0 * min(chunk, 384)


def test_the_smallest_chunk_on_the_plateau_is_found() -> None:
    found = find_saturation(curve(knee))
    assert (found.chunk_tokens, found.reached) == (384, True)
    assert found.best_tokens_per_s == pytest.approx(3840)


def test_a_smaller_share_takes_a_smaller_chunk() -> None:
    assert find_saturation(curve(knee), share=0.6).chunk_tokens == 256
    assert find_saturation(curve(knee), share=1.0).chunk_tokens == 384


def test_with_a_constant_per_step_it_is_where_the_constant_is_small_enough() -> None:
    # chunk / (chunk + 20) of the limit: 1536 tokens have 98.7 % of it, 95 % of the best is first met by 384.
    found = find_saturation(curve(lambda chunk: chunk / (chunk + 20)))
    assert found.chunk_tokens == 384
    assert 256 / 276 < 0.95 * 2048 / 2068 <= 384 / 404


def test_long_chunks_that_are_slower_again_do_not_count() -> None:
    found = find_saturation(curve(lambda chunk: chunk / (20 + chunk + chunk * chunk / 2000)))
    # The best is 0.833 of the limit at 192 tokens; 96 have 0.796.
    assert (found.chunk_tokens, found.reached) == (96, True)


def test_a_curve_that_still_rises_is_said_to() -> None:
    found = find_saturation(curve(lambda chunk: 3.0 * chunk))
    assert (found.chunk_tokens, found.reached) == (2048, False)


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
