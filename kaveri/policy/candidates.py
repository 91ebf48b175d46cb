"""Draws instances that accept a request, at a cost that does not grow with the cluster. Pure."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kaveri.domain.view import ViewedInstance

_MOST_DRAWS = 48
"""Max random draws before a scan of the whole cluster; bounds the cost of a choice while most instances are full."""
_DRAWS_OF_EACH = 4
"""Max draws per instance. Scanning a small cluster costs less than many draws."""

LoadKey = tuple[float, ...]
Load = Callable[[ViewedInstance], LoadKey]
Takes = Callable[[ViewedInstance], bool]
# Named here because an annotation inside a function is evaluated at every call.


@dataclass(slots=True)
class Candidates:
    """The `ready` instances that accept a request. Instances to avoid are candidates only if there are no others.

    Every draw is uniform over the candidates: redrawing from all ready instances until one is a candidate (rejection
    sampling) gives each the same probability.
    """

    ready: Sequence[ViewedInstance]
    takes: Takes
    avoid: Collection[str] = ()

    def all(self) -> list[ViewedInstance]:
        """Every candidate, in the order of `ready`."""
        taking = [instance for instance in self.ready if self.takes(instance)]
        if not self.avoid:
            return taking
        return [instance for instance in taking if instance.record.instance_id not in self.avoid] or taking

    def first(self) -> ViewedInstance | None:
        """The first candidate in the order of `ready`."""
        found = next(filter(self._is_preferred, self.ready), None)
        return found or next(iter(self.all()), None)

    def in_turn(self, turn: int) -> ViewedInstance | None:
        """The candidate at position `turn`, round-robin."""
        if not self.ready:
            return None
        found = self.ready[turn % len(self.ready)]
        if self._is_preferred(found):
            return found
        candidates = self.all()
        return candidates[turn % len(candidates)] if candidates else None

    def any(self, rng: random.Random) -> ViewedInstance | None:
        """One candidate at random."""
        for _ in range(_draws(len(self.ready))):
            found = self.ready[int(rng.random() * len(self.ready))]
            if self._is_preferred(found):
                return found
        candidates = self.all()
        return rng.choice(candidates) if candidates else None

    def better_of_two(self, load: Load, rng: random.Random, wanted: Takes | None = None) -> ViewedInstance | None:
        """Return the less loaded of two random candidates; the only candidate if there is one.

        wanted: if given, draw the two from the candidates that it accepts, if any. It must accept only instances that
        take the request.
        """
        ready, avoid, fits = self.ready, self.avoid, wanted or self.takes
        first: ViewedInstance | None = None
        count, draw = len(ready), rng.random
        for _ in range(_draws(count) if count > 1 else 0):
            found = ready[int(draw() * count)]
            if found is first or (avoid and found.record.instance_id in avoid) or not fits(found):
                continue
            if first is None:
                first = found
            else:
                # The pair is in random order, so ties are broken evenly.
                return found if load(found) < load(first) else first
        candidates = self.all()
        if wanted is not None:
            candidates = list(filter(wanted, candidates)) or candidates
        return min(rng.sample(candidates, min(2, len(candidates))), key=load, default=None)

    def _is_preferred(self, instance: ViewedInstance) -> bool:
        return instance.record.instance_id not in self.avoid and self.takes(instance)


def _draws(ready_count: int) -> int:
    return min(_MOST_DRAWS, _DRAWS_OF_EACH * ready_count)
