"""The KV pool and the arithmetic of a simulated engine: a few numbers stand for a block, and are verified when read."""

from collections.abc import Sequence

from kaveri.engine.stepwise.fake import FakeModel, StaleKv
from kaveri.engine.stepwise.runner import Drawn, DrawnToken, NoToken, SequenceSlice
from tests.simulation.cluster.kv_wire import DAMAGED, KvBlock


class KvMemory:
    """`block_count` blocks. What is in them stays until it is overwritten."""

    def __init__(self, model: FakeModel, block_count: int) -> None:
        self._model = model
        self._block_tokens = model.block_tokens
        self._blocks: list[KvBlock | None] = [None] * block_count

    def get(self, block_id: int) -> KvBlock:
        """What the block holds. Raises StaleKv for a block that was never written."""
        block = self._blocks[block_id]
        if block is None:
            raise StaleKv(f"block {block_id} was never written")
        return block

    def put(self, block_id: int, block: KvBlock) -> None:
        """Overwrites a block."""
        self._blocks[block_id] = block

    def is_damaged(self, block_ids: Sequence[int]) -> bool:
        """Whether one of the blocks was damaged on its way here."""
        blocks = (self._blocks[block_id] for block_id in block_ids)
        return any(block is not None and block.chain == DAMAGED for block in blocks)

    def read(self, block_ids: Sequence[int], token_count: int, first_block: int = 0) -> int:
        """The chain behind `token_count` tokens of a request with these blocks. first_block: number of blocks of the
        request before these; what their tokens were is taken from the first of these.

        Raises StaleKv when any of the blocks does not hold the KV that belongs there.
        """
        chain, position, end = self._model.chain(()), 0, token_count
        if first_block and block_ids:
            chain, position = self.get(block_ids[0]).chain_before, first_block * self._block_tokens
            end += position
        for block_id in block_ids[: -(-token_count // self._block_tokens)]:
            block = self._blocks[block_id]
            held = min(self._block_tokens, end - position)
            if block is None or (block.start, block.chain_before, len(block.token_ids)) != (position, chain, held):
                raise StaleKv(f"block {block_id} holds {block}, not {held} tokens from {position} behind {chain:#x}")
            if block.chain == DAMAGED:
                raise StaleKv(f"block {block_id} was damaged on its way")
            chain, position = block.chain, position + held
        return chain

    def verify(self, block_ids: Sequence[int], first_block: int = 0) -> int:
        """The chain behind blocks that are full, but for the last one, which may be part full. first_block: as read().

        Raises StaleKv as read().
        """
        tail = len(self.get(block_ids[-1]).token_ids) if block_ids else 0
        return self.read(block_ids, max(0, len(block_ids) - 1) * self._block_tokens + tail, first_block)

    def write(self, part: SequenceSlice) -> int:
        """Computes the KV of a slice on that of the tokens before it, and returns the chain behind it.

        Raises StaleKv as read().
        """
        chain, position = self.read(part.block_ids, part.start), part.start
        token_ids = tuple(part.token_ids)
        taken = 0
        while taken < len(token_ids):
            index, slot = divmod(position, self._block_tokens)
            block_id = part.block_ids[index]
            piece = token_ids[taken : taken + self._block_tokens - slot]
            after = self._model.chain(piece, chain)
            if slot == 0:
                block = KvBlock(position, piece, chain, after)
            else:
                before = self.get(block_id)
                block = KvBlock(before.start, before.token_ids + piece, before.chain_before, after)
            self._blocks[block_id] = block
            chain, position, taken = after, position + len(piece), taken + len(piece)
        return chain

    def drawn(self, part: SequenceSlice, chain: int, salt: int) -> DrawnToken | NoToken:
        """The token behind a chain. salt: what it depends on beside the tokens."""
        return self._model.drawn(part, chain ^ salt)

    def scored(self, part: SequenceSlice, drawn: DrawnToken | None) -> Drawn:
        """What a slice gives: the token, and what it asks for about its prompt."""
        return self._model.scored(part, drawn)
