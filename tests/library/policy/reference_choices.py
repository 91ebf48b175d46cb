"""Simple placement and counts of unconfirmed work, as references for the real ones, which scale better."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kaveri.domain.view import InstanceStatus, ViewedInstance

Load = Callable[[ViewedInstance], tuple[float, ...]]
Distribution = dict[str | None, Fraction]


def candidates_of(
    ready: Sequence[ViewedInstance], takes: Callable[[ViewedInstance], bool], avoid: Collection[str]
) -> list[ViewedInstance]:
    taking = [instance for instance in ready if takes(instance)]
    return [instance for instance in taking if instance.record.instance_id not in avoid] or taking


def better_of_two(candidates: Sequence[ViewedInstance], load: Load) -> Distribution:
    """Return each instance's probability of being chosen as the better of two different random candidates."""
    pairs = list(itertools.permutations(candidates, min(2, len(candidates))))
    chosen = Counter(min(pair, key=load).record.instance_id for pair in pairs if pair)
    return {name: Fraction(count, len(pairs)) for name, count in chosen.items()} or {None: Fraction(1)}


def any_of(candidates: Sequence[ViewedInstance]) -> Distribution:
    """Return each instance's probability when one candidate is drawn uniformly."""
    return {one.record.instance_id: Fraction(1, len(candidates)) for one in candidates} or {None: Fraction(1)}


@dataclass(frozen=True, slots=True)
class _UnconfirmedPiece:
    incarnation: int
    sequence_number: int
    amount: int
    heavy: bool


class PlainUnconfirmedWork:
    """Unconfirmed requests in a list, summed on demand."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, _UnconfirmedPiece]] = {}

    def add(self, key: str, target: InstanceStatus, amount: int, heavy: bool) -> None:
        piece = _UnconfirmedPiece(target.record.incarnation, target.load.sequence_number, amount, heavy)
        self._sent.setdefault(target.record.instance_id, {})[key] = piece

    def remove(self, key: str, instance_id: str) -> None:
        self._sent.get(instance_id, {}).pop(key, None)

    def sums(self, instance: InstanceStatus) -> tuple[int, int, int]:
        pieces = self._sent.get(instance.record.instance_id, {})
        for key, piece in list(pieces.items()):
            is_former = piece.incarnation != instance.record.incarnation
            if is_former or instance.load.sequence_number >= piece.sequence_number + 2:
                del pieces[key]
        values = pieces.values()
        return len(values), sum(piece.amount for piece in values), sum(piece.heavy for piece in values)
