"""Who is given room next on a decode instance that has too little for everyone. Pure: no clock, no I/O.

Strictly first come, first served leaves blocks idle whenever the first request is large. Giving room to every request
that fits lets small requests overtake a large one forever. So a request may be overtaken, but only so often.
"""

import itertools
from dataclasses import dataclass

MAX_OVERTAKES = 16
"""The same number as prefill's scheduling batch allows."""
MAX_WAITING = 1024
MAX_WAITING_TOKENS = 4 * 2**20
"""Prompts that wait are kept in memory, at about 40 bytes per token."""


@dataclass(slots=True)
class Place:
    """A request's place in line."""

    needed_blocks: int
    token_count: int
    number: int
    """Rises with each place given; orders the line."""
    overtakes: int = 0
    asked: bool = False
    """The engine has been asked for its room and has not answered."""
    overtaken: tuple["Place", ...] = ()
    """While it is asked: the places in front of it."""


class RoomLine:
    """Requests that want room, in the order in which they came. One that is given room at once passes through as well.

    A request is overtaken when one that came later is given room. When the first in line has been overtaken
    `max_overtakes` times, no other request is given any until it has left. No request is overtaken more than
    max_overtakes times: one further back has been overtaken at most as often as those in front of it.

    Exception: a request that cannot fit before some blocks come out of quarantine holds no other request up, and is
    overtaken without a limit meanwhile.

    The owner asks the engine for the request that next_to_ask() names: asked(), then leave() when room was granted, or
    refused(). After a refusal it waits a moment before it asks again: engines keep free blocks for preempted requests.
    An overtaking counts from when the engine is asked.
    """

    def __init__(
        self,
        max_overtakes: int = MAX_OVERTAKES,
        max_waiting: int = MAX_WAITING,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
    ) -> None:
        """max_waiting, max_waiting_tokens: beyond them is_over_limit() says so; a line of one is never over them."""
        self._max_overtakes = max_overtakes
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._places: dict[str, Place] = {}
        self._token_count = 0
        self._last_number = 0
        self._fewest_blocks: int | None = None
        """The least that any in line needs; None: not known. With fewer free, next_to_ask() looks at no place."""

    @property
    def length(self) -> int:
        """Requests in line. May be read by any thread."""
        return len(self._places)

    def join(self, request_id: str, needed_blocks: int, token_count: int, former: Place | None = None) -> None:
        """The request wants room, and gets the last place, or that of `former`, which left() has returned."""
        assert request_id not in self._places, request_id
        self._token_count += token_count
        if not self._places or (self._fewest_blocks is not None and needed_blocks < self._fewest_blocks):
            self._fewest_blocks = needed_blocks
        if former is None:
            self._last_number += 1
            self._places[request_id] = Place(needed_blocks, token_count, self._last_number)
            return
        self._places[request_id] = Place(needed_blocks, token_count, former.number, former.overtakes)
        self._places = dict(sorted(self._places.items(), key=lambda item: item[1].number))

    def leave(self, request_id: str) -> Place | None:
        """The request has been given room, or wants none any more. Returns the place that it had. Idempotent."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._token_count -= place.token_count
            if place.needed_blocks == self._fewest_blocks:
                self._fewest_blocks = None
        return place

    def is_over_limit(self) -> bool:
        """Whether more wait than the line has places for: the last one to join must be refused."""
        if len(self._places) < 2:
            return False
        return len(self._places) > self._max_waiting or self._token_count > self._max_waiting_tokens

    def is_open(self, attainable_blocks: int) -> bool:
        """Whether a request that is not in line may be given room."""
        first = self._first(attainable_blocks)
        return first is None or first[1].overtakes < self._max_overtakes

    def next_to_ask(self, room_blocks: int, attainable_blocks: int) -> str | None:
        """The first request that `room_blocks` suffice for and that may be given room now. None: there is none.

        attainable_blocks: blocks that can come free without waiting for blocks in quarantine.
        """
        if self._fewest_blocks is None:
            self._fewest_blocks = min((place.needed_blocks for place in self._places.values()), default=0)
        if room_blocks < self._fewest_blocks:
            return None
        first = self._first(attainable_blocks)
        if first is not None and first[1].overtakes >= self._max_overtakes:
            return first[0] if first[1].needed_blocks <= room_blocks else None
        for request_id, place in self._places.items():
            if not place.asked and place.needed_blocks <= room_blocks:
                return request_id
        return None

    def asked(self, request_id: str) -> None:
        """The engine is asked for the request's room: it overtakes the requests in front of it."""
        place = self._places[request_id]
        place.asked = True
        if place is next(iter(self._places.values())):
            place.overtaken = ()
            return
        place.overtaken = tuple(itertools.takewhile(lambda other: other is not place, self._places.values()))
        for other in place.overtaken:
            other.overtakes += 1

    def refused(self, request_id: str) -> None:
        """The engine had no room for the request after all: it waits on, at its place, and has overtaken no other."""
        place = self._places[request_id]
        for other in place.overtaken:
            other.overtakes -= 1
        place.asked, place.overtaken = False, ()

    def _first(self, attainable_blocks: int) -> tuple[str, Place] | None:
        """The first that waits for nothing but room. None: no request does."""
        if not self._places:
            return None
        for request_id, place in self._places.items():
            if not place.asked and place.needed_blocks <= attainable_blocks:
                return request_id, place
        return None
