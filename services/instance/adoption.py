"""The hand-over that moves nothing: a computed prompt goes on in the running batch of the engine that computed it."""

import time

from kaveri.engine.contract import KvPushFailed
from kaveri.errors import KaveriError
from services.decode.instance import DecodeInstance
from services.prefill.requests import Adopted, Failed, Placed, PrefillRequest


class Adoption:
    """The HandOver of a colocated instance. For one event loop."""

    def __init__(self, instance_id: str, incarnation: int, decode: DecodeInstance) -> None:
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._decode = decode

    at_first_token = True
    """There is always a place: adoption never fails for want of room. So there is nothing to look for earlier."""

    async def run(self) -> None:
        """Nothing to do beside the events."""

    def begin(self, request: PrefillRequest) -> None:
        """Hands over at once."""
        try:
            self._decode.adopt(
                request.engine_request,
                request.attempt,
                request.router_id,
                request.deadline_s - time.monotonic(),
                request.predicted_length,
            )
        except KaveriError as error:
            request.report(request, Failed(error))
            return
        placed = Placed(self._instance_id, self._incarnation, self._decode.streams.losses)
        request.report(request, Adopted(placed))

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Never called: nothing is pushed."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """Nothing is kept for a request here."""
