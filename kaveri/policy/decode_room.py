"""Decides which requests get room on a decode instance, explains refusals, and reports free room. Pure: no clock, no
I/O."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.view import InstanceLoad
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.admission import DecodeBatch

MAX_OVERTAKES = 16
"""Same limit as prefill's scheduling batch."""
MAX_WAITING = 1024
MAX_WAITING_TOKENS = 4 * 2**20
"""Waiting prompts stay in memory, at about 40 bytes per token."""


@dataclass(slots=True)
class Place:
    """A request's place in line."""

    needed_blocks: int
    token_count: int
    number: int
    """Increasing number that orders the line."""
    overtakes: int = 0
    asked: bool = False
    """True while the engine has been asked for the request's room and has not answered."""
    overtaken: tuple["Place", ...] = ()
    """Places that this request overtakes while the engine is asked for its room."""


RETRY_AFTER_S = 0.1


class FreeRoom(NamedTuple):
    """Current KV blocks of a decode instance."""

    free_blocks: int
    """Blocks held by no request."""
    quarantined_blocks: int
    """Blocks that frozen senders may still write to; no known time when they become free."""
    running_requests: int
    """Requests admitted and not ended, as counted by the engine. Below the batch's count while end events are in
    flight."""


class DecodeRoom:
    """The block pool of one decode instance, its batch, and the line of requests that wait for room, in order of
    arrival. A request that gets room at once passes through the line as well.

    A request is overtaken when a later one gets room. Once the first in line has been overtaken `max_overtakes` times,
    no other request gets room until it has left. No request is overtaken more than max_overtakes times: one further
    back has been overtaken at most as often as those in front of it.

    Exception: a request that cannot fit before quarantined blocks are released blocks no other request, and may be
    overtaken without limit meanwhile.

    The owner asks the engine for the request that next_to_ask() names: asked(), then leave_line() when room was
    granted, or refused(). After a refusal it waits a moment before asking again: engines keep free blocks for preempted
    requests. An overtaking counts from when the engine is asked.
    """

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int,
        batch: DecodeBatch,
        max_overtakes: int = MAX_OVERTAKES,
        max_waiting: int = MAX_WAITING,
        max_waiting_tokens: int = MAX_WAITING_TOKENS,
    ) -> None:
        """max_waiting, max_waiting_tokens: limits checked by is_over_limit(); a line of one is never over them."""
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self.batch = batch
        self._max_overtakes = max_overtakes
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._places: dict[str, Place] = {}
        self._token_count = 0
        self._last_number = 0
        self._fewest_blocks: int | None = None
        """Fewest blocks that any request in line needs; None if unknown. With fewer free, next_to_ask() skips the
        scan."""

    @property
    def waiting_count(self) -> int:
        """Number of requests in line. Thread-safe to read."""
        return len(self._places)

    def needed_blocks(self, token_count: int) -> int:
        """Blocks needed by a request that pushes `token_count` tokens and samples one more at once. Raises
        InvalidArgument if the whole pool cannot hold it."""
        needed_blocks = -(-(token_count + 1) // self._block_tokens)
        if needed_blocks > self._total_blocks:
            limit = f"at most {self._total_blocks * self._block_tokens - 1} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{token_count} tokens", limit)
        return needed_blocks

    def join(self, request_id: str, needed_blocks: int, token_count: int, former: Place | None = None) -> None:
        """Add the request at the end of the line, or at the place `former` that leave_line() returned."""
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

    def leave_line(self, request_id: str) -> Place | None:
        """Remove the request, because it has room or no longer needs it. Return its former place. Idempotent."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._token_count -= place.token_count
            if place.needed_blocks == self._fewest_blocks:
                self._fewest_blocks = None
        return place

    def is_over_limit(self) -> bool:
        """True if the line is over its limits: the last request to join must be refused."""
        if len(self._places) < 2:
            return False
        return len(self._places) > self._max_waiting or self._token_count > self._max_waiting_tokens

    def is_open(self, room: FreeRoom) -> bool:
        """Return True if a request outside the line may get room."""
        first = self._first(self._attainable_blocks(room))
        return first is None or first[1].overtakes < self._max_overtakes

    def next_to_ask(self, room: FreeRoom, now_s: float) -> str | None:
        """The first request in line that fits and may get room now; None if there is none."""
        room_blocks = self._open_blocks(room, now_s)
        if self._fewest_blocks is None:
            self._fewest_blocks = min((place.needed_blocks for place in self._places.values()), default=0)
        if room_blocks < self._fewest_blocks:
            return None
        first = self._first(self._attainable_blocks(room))
        if first is not None and first[1].overtakes >= self._max_overtakes:
            return first[0] if first[1].needed_blocks <= room_blocks else None
        for request_id, place in self._places.items():
            if not place.asked and place.needed_blocks <= room_blocks:
                return request_id
        return None

    def asked(self, request_id: str) -> None:
        """Record that the engine was asked for the request's room: it overtakes the requests in front of it."""
        place = self._places[request_id]
        place.asked = True
        if place is next(iter(self._places.values())):
            place.overtaken = ()
            return
        place.overtaken = tuple(itertools.takewhile(lambda other: other is not place, self._places.values()))
        for other in place.overtaken:
            other.overtakes += 1

    def refused(self, request_id: str) -> None:
        """Record that the engine refused: the request keeps its place, and has overtaken no other."""
        place = self._places[request_id]
        for other in place.overtaken:
            other.overtakes -= 1
        place.asked, place.overtaken = False, ()

    def has_ahead_of_line(self, needed_blocks: int, room: FreeRoom, now_s: float) -> bool:
        """True if there is room for a request that skips the line."""
        return needed_blocks <= self._open_blocks(room, now_s)

    def refusal(self, room: FreeRoom, now_s: float) -> NoCapacity:
        """NoCapacity error for a request that has no room now, with the reason."""
        kept = self.batch.kept_blocks(now_s)
        reason = f"{kept} free KV blocks are kept for other requests" if kept else ""
        if not self.is_open(room):
            reason = "what comes free is for a request that has waited longer"
        return NoCapacity("decode", RETRY_AFTER_S, reason)

    def shown_blocks(self, room: FreeRoom, now_s: float) -> int:
        """Free blocks to report in the heartbeat: those available to a new request."""
        return max(0, self._open_blocks(room, now_s)) if self.is_open(room) else 0

    def load(self, room: FreeRoom, request_count: int, now_s: float) -> InstanceLoad:
        """Requests and blocks for the heartbeat. request_count: in any phase, including those in line."""
        return InstanceLoad(
            waiting_requests=request_count - self.batch.running_count,
            running_requests=self.batch.running_count,
            free_blocks=self.shown_blocks(room, now_s),
            total_blocks=self._total_blocks,
        )

    def _open_blocks(self, room: FreeRoom, now_s: float) -> int:
        """Free blocks not reserved for requests here."""
        batch = self.batch
        if not batch.keeps_blocks:
            return room.free_blocks
        if room.running_requests < batch.running_count:
            # Blocks of ended requests go to those that run next, once the batch knows of these ends.
            return 0
        return room.free_blocks - batch.kept_blocks(now_s)

    def _attainable_blocks(self, room: FreeRoom) -> int:
        return self._total_blocks - room.quarantined_blocks

    def _first(self, attainable_blocks: int) -> tuple[str, Place] | None:
        """The first request that waits only for room; None if there is none."""
        if not self._places:
            return None
        for request_id, place in self._places.items():
            if not place.asked and place.needed_blocks <= attainable_blocks:
                return request_id, place
        return None
