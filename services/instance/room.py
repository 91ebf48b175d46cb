"""Room for prompts in a pool that answers grow in."""

from collections.abc import Collection

from kaveri.engine.contract import Engine
from services.decode.instance import DecodeInstance
from services.prefill.requests import PrefillRequest


class PromptRoom:
    """Says what a decode instance says to a reservation: whether there are blocks that are not meant for others."""

    def __init__(self, engine: Engine, decode: DecodeInstance) -> None:
        self._engine = engine
        self._layout = engine.info.layout
        self._decode = decode

    def has_room(self, request: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        """Whether the prompt fits beside what the admission policy keeps for answers. For PrefillQueue.

        It counts with the token that is drawn behind it: adopted without a block for that, it would be preempted at
        once. So do those that are being computed, which hold the blocks of their prompts only.
        """
        first = next(iter(computing), None)
        kept = self._decode.kept_blocks(
            (first.engine_request, first.predicted_length) if first is not None else None,
        )
        promised = sum(
            self._layout.block_count(other.token_count + 1) - self._layout.block_count(other.token_count)
            for other in computing
        )
        needed = self._layout.block_count(request.token_count + 1)
        return needed + promised + kept <= self._engine.stats().free_blocks
