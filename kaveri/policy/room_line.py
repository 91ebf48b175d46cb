"""Who comes first where requests ask for room on a decode instance that has too little. Pure: no clock, no I/O.

Strictly first come, first served leaves blocks idle whenever the first one is large; giving everybody what fits lets
small requests overtake a large one for ever. So whoever is refused may be overtaken, but only so often.
"""

from dataclasses import dataclass

MAX_OVERTAKES = 16
"""As many as prefill's scheduling batch lets overtake a prompt."""
MAX_WAITING = 1024


@dataclass(slots=True)
class _Place:
    attempt: int
    until_s: float
    overtakes: int = 0


class RoomLine:
    """Requests that were refused for want of room and ask again and again, in the order in which they were refused
    first.

    A request is overtaken when one that was refused later than it, or never, is given room. When the first in line has
    been overtaken `max_overtakes` times nobody else is given any: what comes free is for the first, whose wait is then
    as long as those run who came before. Nobody is overtaken more often than that: who stands further behind has been
    overtaken by no more than those in front.

    A place is kept as long as its request asks; whoever stops asking is dropped, whatever became of it. Times are
    seconds of a clock of the caller's that does not go back.
    """

    def __init__(self, max_overtakes: int = MAX_OVERTAKES, max_waiting: int = MAX_WAITING) -> None:
        """max_waiting: whoever is refused beyond it gets no place; it is served when there is room for it."""
        self._max_overtakes = max_overtakes
        self._max_waiting = max_waiting
        self._places: dict[str, _Place] = {}

    @property
    def length(self) -> int:
        """Requests in line, as of the last call about one. May be read by another thread than the callers'."""
        return len(self._places)

    def may_take(self, request_id: str | None, now_s: float) -> bool:
        """Whether the request may be given room. None: whether anybody may who is not in line."""
        self._drop_silent(now_s)
        first_id = next(iter(self._places), None)
        return first_id is None or first_id == request_id or self._places[first_id].overtakes < self._max_overtakes

    def refuse(self, request_id: str, attempt: int, now_s: float, until_s: float) -> bool:
        """The request was refused. It keeps its place, or joins at the end; whether it had none before.

        attempt: a newer attempt of a request takes over the place of the former. until_s: it is dropped then unless it
        has asked again.
        """
        self._drop_silent(now_s)
        place = self._places.get(request_id)
        if place is not None:
            place.attempt, place.until_s = max(place.attempt, attempt), until_s
            return False
        if len(self._places) < self._max_waiting:
            self._places[request_id] = _Place(attempt, until_s)
        return True

    def take(self, request_id: str) -> None:
        """The request was given room: it has overtaken everybody before it, and leaves."""
        for other_id, place in self._places.items():
            if other_id == request_id:
                break
            place.overtakes += 1
        self._places.pop(request_id, None)

    def leave(self, request_id: str, attempt: int) -> None:
        """The attempt, or an older one, wants no room here any more. Unknown ones are ignored."""
        place = self._places.get(request_id)
        if place is not None and place.attempt <= attempt:
            del self._places[request_id]

    def _drop_silent(self, now_s: float) -> None:
        silent = [request_id for request_id, place in self._places.items() if place.until_s <= now_s]
        for request_id in silent:
            del self._places[request_id]
