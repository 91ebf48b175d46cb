"""Decides which waiting requests get KV blocks of a decode instance. Pure: no clock, no I/O."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.view import InstanceLoad
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.admission import DecodeBatch

MAX_OVERTAKES = 16
"""Same limit as in a prefill instance: its default scheduling batch."""
MAX_WAITING = 1024
MAX_WAITING_TOKENS = 4 * 2**20
"""Waiting prompts stay in memory, at about 40 bytes per token."""


@dataclass(slots=True)
class Place:
    """Entry of a request in a decode instance's queue for KV blocks."""

    needed_blocks: int
    token_count: int
    number: int
    """Increasing number that orders the queue."""
    overtakes: int = 0
    asked: bool = False
    """True while the engine has been asked for the request's blocks and has not answered."""
    overtaken: tuple["Place", ...] = ()
    """Entries that this request overtakes while the engine is asked for its blocks."""


RETRY_AFTER_S = 0.1


class FreeRoom(NamedTuple):
    """Free and quarantined KV blocks of a decode instance, as counted by its engine."""

    free_blocks: int
    """Blocks held by no request."""
    quarantined_blocks: int
    """Blocks to which frozen senders may still write; no known time when they become free."""
    running_requests: int
    """Requests admitted and not ended, as counted by the engine. Below the batch's count while end events are in
    flight."""


class DecodeRoom:
    """KV block pool of one decode instance, its batch, and the queue of requests that wait for blocks ("the line").
    Every request passes through the queue, even one that gets blocks at once.

    A request is overtaken when a later one gets blocks. Once the first in the queue has been overtaken `max_overtakes`
    times, no other gets blocks until it has left. Requests further back have been overtaken at most as often as those
    in front, so the limit holds for all. Exception: a request that cannot fit before quarantined blocks are released
    blocks no other, and may be overtaken without limit meanwhile.

    The caller asks the engine for blocks for the request that next_to_ask() returns, and calls asked(), then
    leave_line() if they were granted, or refused(). After a refusal it pauses: engines keep free blocks for preempted
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
        """total_blocks: KV blocks of the pool. block_tokens: tokens per block. max_waiting, max_waiting_tokens: queue
        limits in requests and prompt tokens for is_over_limit(); a single request never exceeds them."""
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
        """Fewest blocks that any queued request needs; None if unknown."""

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for KV blocks. Thread-safe to read."""
        return len(self._places)

    def needed_blocks(self, token_count: int) -> int:
        """Return the KV blocks for `token_count` pushed tokens and the next sampled one. Raises InvalidArgument if they
        exceed the whole pool."""
        needed_blocks = -(-(token_count + 1) // self._block_tokens)
        if needed_blocks > self._total_blocks:
            limit = f"at most {self._total_blocks * self._block_tokens - 1} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{token_count} tokens", limit)
        return needed_blocks

    def join(self, request_id: str, needed_blocks: int, token_count: int, former: Place | None = None) -> None:
        """Append a request to the queue for KV blocks, or reinsert it at `former`, which leave_line() returned."""
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
        """Remove a request that got its KV blocks or no longer needs them; return its queue entry. Idempotent."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._token_count -= place.token_count
            if place.needed_blocks == self._fewest_blocks:
                self._fewest_blocks = None
        return place

    def is_over_limit(self) -> bool:
        """Return True if too many requests or tokens wait for KV blocks: the last to join must be refused."""
        if len(self._places) < 2:
            return False
        return len(self._places) > self._max_waiting or self._token_count > self._max_waiting_tokens

    def is_open(self, room: FreeRoom) -> bool:
        """Return True unless the first queued request was overtaken so often that no other may get KV blocks."""
        first = self._first(self._attainable_blocks(room))
        return first is None or first[1].overtakes < self._max_overtakes

    def next_to_ask(self, room: FreeRoom, now_s: float) -> str | None:
        """Return the id of the first queued request that fits into free KV blocks and may get them now, or None."""
        room_blocks = self._open_blocks(room, now_s)
        if self._fewest_blocks is None:
            self._fewest_blocks = min((place.needed_blocks for place in self._places.values()), default=0)
        if room_blocks < self._fewest_blocks:
            return None
        first = self._first(self._attainable_blocks(room))
        if first is not None and first[1].overtakes >= self._max_overtakes:
            return first[0] if not first[1].asked and first[1].needed_blocks <= room_blocks else None
        for request_id, place in self._places.items():
            if not place.asked and place.needed_blocks <= room_blocks:
                return request_id
        return None

    def asked(self, request_id: str) -> None:
        """Record that the engine was asked for a request's KV blocks: it overtakes the requests queued before it."""
        place = self._places[request_id]
        place.asked = True
        if place is next(iter(self._places.values())):
            place.overtaken = ()
            return
        place.overtaken = tuple(itertools.takewhile(lambda other: other is not place, self._places.values()))
        for other in place.overtaken:
            other.overtakes += 1

    def refused(self, request_id: str) -> None:
        """Record that the engine refused KV blocks: the request stays queued, and has overtaken no other."""
        place = self._places[request_id]
        for other in place.overtaken:
            other.overtakes -= 1
        place.asked, place.overtaken = False, ()

    def has_ahead_of_line(self, needed_blocks: int, room: FreeRoom, now_s: float) -> bool:
        """Return True for a request that bypasses the queue if enough KV blocks are free, but for those kept."""
        return needed_blocks <= self._open_blocks(room, now_s)

    def refusal(self, room: FreeRoom, now_s: float) -> NoCapacity:
        """Return the NoCapacity error, with its reason, for a request that cannot get KV blocks now."""
        kept = self.batch.kept_blocks(now_s)
        reason = f"{kept} free KV blocks are kept for other requests" if kept else ""
        if not self.is_open(room):
            reason = "what comes free is for a request that has waited longer"
        return NoCapacity("decode", RETRY_AFTER_S, reason)

    def shown_blocks(self, room: FreeRoom, now_s: float) -> int:
        """Return the free KV blocks to report in the heartbeat: those that a new request can get."""
        return max(0, self._open_blocks(room, now_s)) if self.is_open(room) else 0

    def load(self, room: FreeRoom, request_count: int, now_s: float) -> InstanceLoad:
        """Return the load to report in the heartbeat. request_count: requests in any phase, queued ones included."""
        return InstanceLoad(
            waiting_requests=request_count - self.batch.running_count,
            running_requests=self.batch.running_count,
            free_blocks=self.shown_blocks(room, now_s),
            total_blocks=self._total_blocks,
        )

    def _open_blocks(self, room: FreeRoom, now_s: float) -> int:
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
        """The first queued request that could get KV blocks, given `attainable_blocks`; None if there is none. The
        engine may have been asked for it: until it answers, the request can still be overtaken."""
        for request_id, place in self._places.items():
            if place.needed_blocks <= attainable_blocks:
                return request_id, place
        return None
