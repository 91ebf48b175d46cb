"""Who is given room on a decode instance, why others are not, and the room that it shows. Pure: no clock, no I/O."""

from dataclasses import dataclass
from typing import NamedTuple

from kaveri.domain.view import InstanceLoad
from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.policy.decode_batch import DecodeBatch
from kaveri.policy.room_line import RoomLine

RETRY_AFTER_S = 0.1


class FreeRoom(NamedTuple):
    """The blocks of a decode instance now."""

    free_blocks: int
    """Held by no request."""
    quarantined_blocks: int
    """Blocks that frozen senders may still write to: it is unknown when they come free."""
    running_requests: int
    """Admitted and not ended, as the engine counts them. It counts fewer than the batch while events of ended requests
    are on their way."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests of a decode instance."""

    all: int
    """In any phase, those in line included."""
    heavy: int
    """Of those past the line, the heavy ones (kaveri.policy.placement.HeavyThresholds)."""
    light: int
    """Of those past the line, the others."""


class DecodeRoom:
    """The pool of one decode instance, the line in front of it and the batch inside."""

    def __init__(self, total_blocks: int, block_tokens: int, batch: DecodeBatch) -> None:
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self.batch = batch
        self.line = RoomLine()

    def needed_blocks(self, token_count: int) -> int:
        """Blocks of a request that pushes so many tokens: it draws one more at once. Raises InvalidArgument when the
        whole pool cannot hold it."""
        needed_blocks = -(-(token_count + 1) // self._block_tokens)
        if needed_blocks > self._total_blocks:
            limit = f"at most {self._total_blocks * self._block_tokens - 1} tokens (the KV pool here)"
            raise InvalidArgument("token_ids", f"{token_count} tokens", limit)
        return needed_blocks

    def next_to_ask(self, room: FreeRoom, now_s: float) -> str | None:
        """The id of the request in line that the engine is asked for next. None: there is room for none."""
        return self.line.next_to_ask(self._open_blocks(room, now_s), self._attainable_blocks(room))

    def has_ahead_of_line(self, needed_blocks: int, room: FreeRoom, now_s: float) -> bool:
        """Whether a request that waits for none in line has room."""
        return needed_blocks <= self._open_blocks(room, now_s)

    def refusal(self, room: FreeRoom, now_s: float) -> NoCapacity:
        """Why a request has no room now."""
        kept = self.batch.kept_blocks(now_s)
        reason = f"{kept} free KV blocks are kept for other requests" if kept else ""
        if not self.line.is_open(self._attainable_blocks(room)):
            reason = "what comes free is for a request that has waited longer"
        return NoCapacity("decode", RETRY_AFTER_S, reason)

    def shown_blocks(self, room: FreeRoom, now_s: float) -> int:
        """The free blocks of which a heartbeat tells: those that a new request can have, and no others."""
        return max(0, self._open_blocks(room, now_s)) if self.line.is_open(self._attainable_blocks(room)) else 0

    def load(self, room: FreeRoom, context_tokens: int, requests: RequestCounts, now_s: float) -> InstanceLoad:
        """What the instance's heartbeat says."""
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
        """Free blocks that are not kept for requests that are here."""
        batch = self.batch
        if not batch.keeps_blocks:
            return room.free_blocks
        if room.running_requests < batch.running_count:
            # What ended requests have left free is kept for those that run next, once their ends are known here.
            return 0
        return room.free_blocks - batch.kept_blocks(now_s)

    def _attainable_blocks(self, room: FreeRoom) -> int:
        return self._total_blocks - room.quarantined_blocks
