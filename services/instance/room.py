"""Whether a prompt fits into a pool that running answers also use."""

from collections.abc import Callable, Collection

from kaveri.engine.contract import Engine
from kaveri.policy.prompt_queue import prompt_fits
from services.decode.instance import DecodeInstance
from services.prefill.requests import PrefillRequest


class PromptRoom:
    """Asks the policy about one engine's pool.

    Where no answers run and none are taken, the engine alone says what fits.
    """

    def __init__(self, engine: Engine, decode: DecodeInstance, decodes_here: Callable[[], bool]) -> None:
        self._engine = engine
        self._decode = decode
        self._decodes_here = decodes_here

    def has_room(self, request: PrefillRequest, computing: Collection[PrefillRequest]) -> bool:
        """Whether the prompt fits beside the blocks that the admission policy keeps for answers. For EngineFeed."""
        if self._decode.is_idle and not self._decodes_here():
            return True
        first = next(iter(computing), None)
        kept_blocks = self._decode.kept_blocks(
            (first.engine_request, first.predicted_length) if first is not None else None,
        )
        token_counts = (other.token_count for other in computing)
        free_blocks = self._engine.stats().free_blocks
        block_tokens = self._engine.info.layout.block_tokens
        return prompt_fits(request.token_count, token_counts, kept_blocks, free_blocks, block_tokens)
