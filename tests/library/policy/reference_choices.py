"""Placement and unconfirmed work written plainly; cost grows with the cluster. The real ones must equal it."""

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
    """All that take the request, without those to avoid where others are left."""
    taking = [instance for instance in ready if takes(instance)]
    return [instance for instance in taking if instance.record.instance_id not in avoid] or taking


def better_of_two(candidates: Sequence[ViewedInstance], load: Load) -> Distribution:
    """With which probability each is chosen: the better one of two different ones, all pairs being as likely."""
    pairs = list(itertools.permutations(candidates, min(2, len(candidates))))
    chosen = Counter(min(pair, key=load).record.instance_id for pair in pairs if pair)
    return {name: Fraction(count, len(pairs)) for name, count in chosen.items()} or {None: Fraction(1)}


def any_of(candidates: Sequence[ViewedInstance]) -> Distribution:
    """With which probability each is chosen: all with the same."""
    return {one.record.instance_id: Fraction(1, len(candidates)) for one in candidates} or {None: Fraction(1)}


@dataclass(frozen=True, slots=True)
class _UnconfirmedPiece:
    incarnation: int
    sequence_number: int
    amount: int
    heavy: bool


class PlainUnconfirmedWork:
    """Pieces in a list, added up when asked."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, _UnconfirmedPiece]] = {}

    def add(self, key: str, target: InstanceStatus, amount: int, heavy: bool) -> None:
        piece = _UnconfirmedPiece(target.record.incarnation, target.load.sequence_number, amount, heavy)
        self._sent.setdefault(target.record.instance_id, {})[key] = piece

    def remove(self, key: str, instance_id: str) -> None:
        self._sent.get(instance_id, {}).pop(key, None)

    def sums(self, instance: InstanceStatus) -> tuple[int, int, int]:
        """Pieces, their amounts, and how many of them are heavy."""
        pieces = self._sent.get(instance.record.instance_id, {})
        for key, piece in list(pieces.items()):
            is_former = piece.incarnation != instance.record.incarnation
            if is_former or instance.load.sequence_number >= piece.sequence_number + 2:
                del pieces[key]
        values = pieces.values()
        return len(values), sum(piece.amount for piece in values), sum(piece.heavy for piece in values)
