"""The hand-over without a transfer: decode continues on the engine that computed the prompt."""

import asyncio
import time

from kaveri.errors import KaveriError
from services.decode.instance import DecodeInstance
from services.prefill.requests import Adopted, HandOverFailed, PrefillRequest, RoomReserved

_AFTER_FIRST_TOKEN_S = 0.002
"""Delay of the hand-over on engines that run ahead; about the time until a first token reaches its client."""


class Adoption:
    """Hand-over of a request to the decode side of the same instance. For one event loop."""

    def __init__(self, instance_id: str, incarnation: int, decode: DecodeInstance, runs_ahead: bool) -> None:
        self._delay_s = _AFTER_FIRST_TOKEN_S if runs_ahead else 0.0
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._decode = decode
        self._begun: dict[PrefillRequest, asyncio.Handle] = {}

    def begin(self, request: PrefillRequest) -> None:
        """Hand over after the event loop's present iteration, so that the first token is sent before."""
        self._begun[request] = asyncio.get_running_loop().call_later(self._delay_s, self._adopt, request)

    def end(self, request: PrefillRequest) -> None:
        """Cancel the hand-over of a request that has ended."""
        if (begun := self._begun.pop(request, None)) is not None:
            begun.cancel()

    def _adopt(self, request: PrefillRequest) -> None:
        del self._begun[request]
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
        request.report(request, Adopted(RoomReserved(self._instance_id, self._incarnation)))
