"""The hand-over without a transfer: decode continues on the engine that computed the prompt."""

import time

from kaveri.engine.contract import KvPushFailed
from kaveri.errors import KaveriError
from services.decode.instance import DecodeInstance
from services.prefill.requests import Adopted, HandOverFailed, PrefillRequest, RoomReserved


class Adoption:
    """The HandOver while the instance also decodes. For one event loop."""

    def __init__(self, instance_id: str, incarnation: int, decode: DecodeInstance) -> None:
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._decode = decode

    at_first_token = True
    """Adoption always has room, so no place has to be found before the first token."""

    async def run(self) -> None:
        """No background work."""

    def begin(self, request: PrefillRequest) -> None:
        """Hands over immediately."""
        first = request.outbox.first_token
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
        placed = RoomReserved(self._instance_id, self._incarnation)
        request.report(request, Adopted(placed))

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Never called: this hand-over pushes nothing."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """Does nothing: no state is kept per request."""
