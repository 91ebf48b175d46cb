"""The hand-over of an instance that can serve both phases: to its own decode side, or to other instances."""

from collections.abc import Callable

from kaveri.engine.contract import KvPushFailed
from services.instance.adoption import Adoption
from services.prefill.decode_placer import DecodePlacer
from services.prefill.requests import PrefillRequest


class HereOrElsewhere:
    """The HandOver that adopts while the instance decodes, and pushes otherwise. For one event loop."""

    def __init__(self, adoption: Adoption, decode_placer: DecodePlacer, decodes_here: Callable[[], bool]) -> None:
        self._adoption = adoption
        self._decode_placer = decode_placer
        self._decodes_here = decodes_here

    @property
    def at_first_token(self) -> bool:
        return self._decodes_here()

    async def run(self) -> None:
        await self._decode_placer.run()

    def begin(self, request: PrefillRequest) -> None:
        """A request that came while the instance did not decode is pushed: its first token may not be drawn yet."""
        adopts = request.placed_at_first_token and self._decodes_here()
        (self._adoption if adopts else self._decode_placer).begin(request)

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        self._decode_placer.push_failed(request, event)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        # Each ignores requests that it has not begun.
        self._adoption.end(request)
        self._decode_placer.end(request, handed_over)
