"""The hand-over of an instance that can serve both phases: to its own decode side, or to other instances."""

import asyncio
import time
from collections.abc import Callable

from kaveri.engine.contract import KvPushFailed
from kaveri.errors import KaveriError
from services.decode.instance import DecodeInstance
from services.prefill.decode_placer import DecodePlacer
from services.prefill.requests import Adopted, HandOverFailed, PrefillRequest, RoomReserved

_AFTER_FIRST_TOKEN_S = 0.002
"""Delay of the adoption on engines that run ahead; about the time until a first token reaches its client."""


class HereOrElsewhere:
    """The HandOver that adopts while the instance decodes, and pushes otherwise. For one event loop."""

    def __init__(
        self,
        own: RoomReserved,
        decode: DecodeInstance,
        runs_ahead: bool,
        decode_placer: DecodePlacer,
        decodes_here: Callable[[], bool],
    ) -> None:
        """own: this instance, as routers are told of it."""
        self._own = own
        self._decode = decode
        self._delay_s = _AFTER_FIRST_TOKEN_S if runs_ahead else 0.0
        self._decode_placer = decode_placer
        self._decodes_here = decodes_here
        self._adopting: dict[PrefillRequest, asyncio.Handle] = {}

    @property
    def at_first_token(self) -> bool:
        return self._decodes_here()

    async def run(self) -> None:
        await self._decode_placer.run()

    def begin(self, request: PrefillRequest) -> None:
        # A request that came while the instance did not decode is pushed: its first token may not be drawn yet.
        if request.placed_at_first_token and self._decodes_here():
            # After the event loop's present iteration, so that the first token is sent before.
            loop = asyncio.get_running_loop()
            self._adopting[request] = loop.call_later(self._delay_s, self._adopt, request)
        else:
            self._decode_placer.begin(request)

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        self._decode_placer.push_failed(request, event)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        if (adopting := self._adopting.pop(request, None)) is not None:
            adopting.cancel()
        self._decode_placer.end(request, handed_over)

    def _adopt(self, request: PrefillRequest) -> None:
        del self._adopting[request]
        first = request.log.first_token
        assert first is not None, request
        try:
            self._decode.adopt(
                request.engine_request,
                request.ownership,
                request.deadline_s - time.monotonic(),
                (first.token_id, first.logprobs),
                request.predicted_length,
                request.traceparent,
            )
        except KaveriError as error:
            request.report(request, HandOverFailed(error))
            return
        request.report(request, Adopted(self._own))
