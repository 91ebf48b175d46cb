"""What takes requests on once they are computed: the seam between prefill and what decodes."""

from typing import Protocol

from kaveri.engine.contract import KvPushFailed
from services.prefill.requests import PrefillRequest


class HandOver(Protocol):
    """The DecodePlacer pushes to decode instances; where one engine does both phases nothing is pushed.

    It reports on a request by request.report(): RoomReserved when a push has begun, Adopted, or HandOverFailed.
    """

    @property
    def at_first_token(self) -> bool:
        """Whether requests are placed only once their first token is drawn, not before."""

    async def run(self) -> None:
        """Works until cancelled. begin() is called within."""

    def begin(self, request: PrefillRequest) -> None:
        """The request is or will be computed and needs a place. Once for a request, and not before its first token is
        drawn where at_first_token."""

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """The engine's push ended without acceptance."""

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """The request, which has begun, has ended here."""
