"""Random draws have the same distribution as draws from a list of all candidates."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.domain.view import InstanceStatus, ViewedInstance
from kaveri.policy import placement as candidates_module
from kaveri.policy.placement import Candidates
from tests.library.policy.reference_choices import Distribution, any_of, better_of_two, candidates_of
from tests.library.policy.views import DECODE, instance

_MOST_RUNS = 200_000


def _instance(number: int, load: int, takes: bool, wanted: bool) -> InstanceStatus:
    return instance(f"i{number:03}", DECODE, running_requests=load, free_blocks=takes, light_requests=wanted)


def _load(viewed: ViewedInstance) -> tuple[float, ...]:
    return (viewed.load.running_requests,)


def _takes(viewed: ViewedInstance) -> bool:
    return viewed.load.free_blocks > 0


def _wanted(viewed: ViewedInstance) -> bool:
    return _takes(viewed) and viewed.load.light_requests > 0


class _EveryDraw(random.Random):
    """Random source that replays `path`, then takes the first possibility; records the number of possibilities."""

    def __init__(self, path: Sequence[int], ready_count: int) -> None:
        super().__init__(0)
        self._path = path
        self._ready_count = ready_count
        self.possibilities: list[int] = []

    def _draw(self, count: int) -> int:
        place = len(self.possibilities)
        self.possibilities.append(count)
        return self._path[place] if place < len(self._path) else 0

    def random(self) -> float:
        return (self._draw(self._ready_count) + 0.5) / self._ready_count

    def choice(self, seq: Any) -> Any:
        return seq[self._draw(len(seq))]

    def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
        samples = list(itertools.permutations(population, k))
        return list(samples[self._draw(len(samples))])


def _distribution(choose: Callable[[random.Random], ViewedInstance | None], ready_count: int) -> Distribution:
    """Return each instance's exact probability of being chosen, by enumerating all random draws."""
    found: Counter[str | None] = Counter()
    paths: list[list[int]] = [[]]
    for _ in range(_MOST_RUNS):
        path = paths.pop()
        rng = _EveryDraw(path, ready_count)
        chosen = choose(rng)
        probability = Fraction(1)
        for count in rng.possibilities:
            probability /= count
        found[chosen.record.instance_id if chosen is not None else None] += probability  # type: ignore[assignment]
        drawn = [*path, *[0] * (len(rng.possibilities) - len(path))]
        for place in range(len(path), len(drawn)):
            paths += [[*drawn[:place], other] for other in range(1, rng.possibilities[place])]
        if not paths:
            return dict(found)  # type: ignore[arg-type]
    raise AssertionError("more possibilities than are looked at")


@st.composite
def _clusters(draw: st.DrawFn) -> tuple[tuple[InstanceStatus, ...], frozenset[str]]:
    count = draw(st.integers(0, 4))
    ready = tuple(
        _instance(number, draw(st.integers(0, 2)), draw(st.booleans()), draw(st.booleans())) for number in range(count)
    )
    return ready, frozenset(draw(st.sets(st.sampled_from([f"i{number:03}" for number in range(4)]))))


@settings(max_examples=60, deadline=None)
@given(_clusters(), st.integers(0, 4))
def test_small_clusters_have_exactly_the_probabilities_of_looking_at_all(
    cluster: tuple[tuple[InstanceStatus, ...], frozenset[str]], most_draws: int
) -> None:
    ready, avoid = cluster
    drawing = Candidates(ready, _takes, avoid)
    everyone = candidates_of(ready, _takes, avoid)
    wanted = [each for each in everyone if _wanted(each)] or everyone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates_module, "_MOST_DRAWS", most_draws)
        assert _distribution(drawing.any, len(ready)) == any_of(everyone)
        assert _distribution(lambda rng: drawing.better_of_two(_load, rng), len(ready)) == better_of_two(
            everyone, _load
        )
        assert _distribution(lambda rng: drawing.better_of_two(_load, rng, _wanted), len(ready)) == better_of_two(
            wanted, _load
        )
    assert drawing.first() == next(iter(everyone), None)
    assert drawing.all() == everyone
