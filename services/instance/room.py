"""Whether a prompt fits into a pool that running answers also use."""

from collections.abc import Collection

from kaveri.engine.contract import Engine
from services.decode.instance import DecodeInstance
from services.prefill.requests import PrefillRequest


class PromptRoom:
    """Applies a decode instance's rule for reservations: enough free blocks beside those kept for other requests."""

    def __init__(self, engine: Engine, decode: DecodeInstance) -> None:
        self._engine = engine
        self._layout = engine.info.layout
        self._decode = decode

    def has_room(self, request: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        """Whether the prompt fits beside the blocks that the admission policy keeps for answers. For EngineFeed.

        Counts one token more than the prompt: without a block for its first token it would be preempted immediately
        after adoption. The prompts being computed count the same way, since they hold blocks for their prompts only.
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
