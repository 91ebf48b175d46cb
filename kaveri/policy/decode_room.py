"""Decides which requests get room on a decode instance, explains refusals, and reports free room. Pure: no clock, no
I/O."""

from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.view import InstanceLoad
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.decode_batch import DecodeBatch
from kaveri.policy.room_line import RoomLine

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


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Request counts of a decode instance."""

    all: int
    """Requests in any phase, including those in line."""
    heavy: int
    """Heavy requests past the line (kaveri.policy.placement.HeavyThresholds)."""
    light: int
    """Other requests past the line."""


class DecodeRoom:
    """The block pool of one decode instance, its waiting line and its batch."""

    def __init__(self, total_blocks: int, block_tokens: int, batch: DecodeBatch) -> None:
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self.batch = batch
        self.line = RoomLine()

    def needed_blocks(self, token_count: int) -> int:
        """Blocks needed by a request that pushes `token_count` tokens and samples one more at once. Raises
        InvalidArgument if the whole pool cannot hold it."""
        needed_blocks = -(-(token_count + 1) // self._block_tokens)
        if needed_blocks > self._total_blocks:
            limit = f"at most {self._total_blocks * self._block_tokens - 1} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{token_count} tokens", limit)
        return needed_blocks

    def next_to_ask(self, room: FreeRoom, now_s: float) -> str | None:
        """Id of the waiting request to ask the engine for next; None if there is room for none."""
        return self.line.next_to_ask(self._open_blocks(room, now_s), self._attainable_blocks(room))

    def has_ahead_of_line(self, needed_blocks: int, room: FreeRoom, now_s: float) -> bool:
        """True if there is room for a request that skips the line."""
        return needed_blocks <= self._open_blocks(room, now_s)

    def refusal(self, room: FreeRoom, now_s: float) -> NoCapacity:
        """NoCapacity error for a request that has no room now, with the reason."""
        kept = self.batch.kept_blocks(now_s)
        reason = f"{kept} free KV blocks are kept for other requests" if kept else ""
        if not self.line.is_open(self._attainable_blocks(room)):
            reason = "what comes free is for a request that has waited longer"
        return NoCapacity("decode", RETRY_AFTER_S, reason)

    def shown_blocks(self, room: FreeRoom, now_s: float) -> int:
        """Free blocks to report in the heartbeat: those available to a new request."""
        return max(0, self._open_blocks(room, now_s)) if self.line.is_open(self._attainable_blocks(room)) else 0

    def load(self, room: FreeRoom, context_tokens: int, requests: RequestCounts, now_s: float) -> InstanceLoad:
        """Instance load for the heartbeat."""
        return InstanceLoad(
            waiting_requests=requests.all - self.batch.running_count,
            running_requests=self.batch.running_count,
            free_blocks=self.shown_blocks(room, now_s),
            total_blocks=self._total_blocks,
            context_tokens=context_tokens,
            heavy_requests=requests.heavy,
            light_requests=requests.light,
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
