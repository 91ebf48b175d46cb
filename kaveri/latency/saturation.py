"""Finds the chunk size that saturates an accelerator. Pure."""

import statistics
from collections.abc import Sequence

from kaveri.latency.profile import PrefillPoint, Saturation

DEFAULT_SHARE = 0.95


def find_saturation(throughputs: Sequence[tuple[int, float]], share: float = DEFAULT_SHARE) -> Saturation:
    """Return the smallest chunk whose throughput is at least `share` of the best; larger steps only take longer.

    TetriInfer calls it ChunkSize (arXiv 2401.11181, section 3.3.1), DistServe L_m (arXiv 2401.09670, section 3.1); both
    read it off a curve. throughputs: (tokens per step, tokens/s), one or more, ascending by tokens. Outliers are
    smoothed by a median of three, at the ends by Tukey's rule (Exploratory Data Analysis, 1977, chapter 7).
    """
    chunks = [chunk for chunk, _ in throughputs]
    assert chunks, "there is no curve"
    assert chunks == sorted(set(chunks)), f"tokens must rise: {chunks}"
    smooth = _smoothed([throughput for _, throughput in throughputs])
    best = max(smooth)
    first = next(index for index, throughput in enumerate(smooth) if throughput >= share * best)
    return Saturation(chunk_tokens=chunks[first], share=share, best_tokens_per_s=best, reached=first < len(chunks) - 1)


def throughput_curve(points: Sequence[PrefillPoint]) -> list[tuple[int, float]]:
    """Return (tokens per step, tokens/s), ascending: of steps without earlier context, with the fewest prompts."""
    fewest: dict[int, PrefillPoint] = {}
    for point in points:
        if any(start > 0 for start, _ in point.prompts):
            continue
        known = fewest.get(point.tokens)
        if known is None or len(point.prompts) < len(known.prompts):
            fewest[point.tokens] = point
    return [(tokens, tokens / point.times.median_s) for tokens, point in sorted(fewest.items())]


def _smoothed(values: Sequence[float]) -> list[float]:
    if len(values) < 3:
        return list(values)
    inner = [statistics.median(values[index : index + 3]) for index in range(len(values) - 2)]
    return [_end(values[0], inner), *inner, _end(values[-1], inner[::-1])]


def _end(value: float, neighbours: Sequence[float]) -> float:
    """Return a smoothed end of the curve: the median of the end, its neighbour, and both neighbours' extrapolation."""
    nearest, next_one = neighbours[0], neighbours[min(1, len(neighbours) - 1)]
    return statistics.median((value, nearest, 3 * nearest - 2 * next_one))
