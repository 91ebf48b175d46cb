"""Reserves KV blocks and batch seats at the engine, in the order of the admission policy."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kaveri.engine.contract import DecodeEngine
from kaveri.errors import EngineError, KaveriError, NoCapacity, Unavailable
from kaveri.kv.transfer.ticket import Ticket
from kaveri.policy.decode_room import DecodeRoom, FreeRoom
from kaveri.policy.waits import LINE_LOOK_S
from services.decode import lifecycle
from services.decode.lifecycle import InLine, Released
from services.decode.requests import DecodeRequest, DecodeRequests


class EngineRoom:
    """KV blocks and batch seats of one decode instance. Not thread-safe."""

    def __init__(
        self,
        engine: DecodeEngine,
        room: DecodeRoom,
        requests: DecodeRequests,
        reservation_ttl_s: float,
        take: Callable[[DecodeRequest, lifecycle.Event], None],
    ) -> None:
        """reservation_ttl_s: limit on a reservation's wait for its KV. take: applies an event to a request."""
        self._engine = engine
        self._room = room
        self._requests = requests
        self._reservation_ttl_s = reservation_ttl_s
        self._take = take
        self._look_again: asyncio.TimerHandle | None = None
        self.is_draining = False

    def free(self) -> FreeRoom:
        quarantined_blocks = self._engine.kv_flow().receiving.quarantined_block_count
        stats = self._engine.stats()
        return FreeRoom(stats.free_blocks, quarantined_blocks, stats.running_requests)

    def give(self) -> None:
        """Reserve room for waiting requests as long as there is some."""
        room = self._room
        while room.waiting_count:
            request_id = room.next_to_ask(self.free(), time.monotonic())
            if request_id is None:
                break
            request = self._requests.by_request_id(request_id)
            assert request is not None, request_id
            self.ask(request)
            if isinstance(request.state, InLine):
                break  # the engine keeps its free blocks for preempted requests
        if room.waiting_count and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(LINE_LOOK_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        self.give()

    def ask(self, request: DecodeRequest) -> None:
        left_s = request.expires_s - time.monotonic()
        if left_s <= 0:
            self._take(request, lifecycle.BareEvent.TIME_OVER)
            return
        held_tokens = None
        if request.resumed is not None:
            held_tokens = request.resumed.held_tokens
        else:
            self._room.asked(request.request_id)
        self._take(request, lifecycle.BareEvent.ROOM_ASKED)
        expires_in_s = min(left_s, self._reservation_ttl_s)
        granting = self._engine.reserve(request.engine_request, expires_in_s, request.source, held_tokens)
        if granting.done():
            self._answered(request, granting)
        else:
            asyncio.wrap_future(granting).add_done_callback(partial(self._answered, request))

    def turn_away(self, request: DecodeRequest) -> None:
        """Refuse a request that may not wait in line."""
        refusal = self._room.refusal(self.free(), time.monotonic())
        self._take(request, lifecycle.TurnedAway(refusal))

    async def granted(self, request: DecodeRequest) -> Ticket:
        """Wait for the request's ticket. Cancellation ends the request."""
        assert request.answer is not None
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._take(request, lifecycle.BareEvent.CALL_ENDED)
            raise

    def _answered(self, request: DecodeRequest, granting: "Future[Ticket] | asyncio.Future[Ticket]") -> None:
        """Handle the engine's answer; the request may have ended meanwhile."""
        error = granting.exception()
        if isinstance(request.state, Released):
            if error is None:
                self._engine.abort(request.engine_request.key)
        elif error is None:
            self._take(request, lifecycle.RoomGranted(granting.result()))
        else:
            known = error if isinstance(error, KaveriError) else EngineError(repr(error))
            if self.is_draining and isinstance(known, NoCapacity):
                # drain() emptied the line while this request was outside; joining again would make it wait forever.
                known = draining()
            self._take(request, lifecycle.RoomRefused(known))

    def admit(self) -> None:
        """Admit requests that the policy has seats for."""
        if not self._room.batch.ready_count:
            return
        for serial in self._room.batch.admissible(self._engine.stats().free_blocks):
            request = self._requests.by_serial(serial)
            assert request is not None, serial
            try:
                self._engine.admit(request.engine_request.key)
            except EngineError:
                return  # it stopped; EngineStopped follows and ends every request
            self._take(request, lifecycle.BareEvent.SEAT_TAKEN)


def draining() -> Unavailable:
    """Return the error with which a draining instance refuses requests."""
    return Unavailable("the decode instance is draining", retry_after_s=1.0)
