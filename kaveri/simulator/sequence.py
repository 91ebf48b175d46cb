"""A request in a simulated engine: its tokens and blocks are counted, not stored. Pure."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kaveri.engine.stepwise.sequence import SequencePhase


@dataclass(slots=True, eq=False)
class CountedSequence:
    """Request in a simulated engine, with counts of tokens and blocks, for the code of kaveri.engine.stepwise.

    `tokens`, `computed` and `block_ids` are valid while each step is simulated by itself; while a run of steps is one
    event, only `offset_tokens` and `end_step` are.
    """

    is_scored: ClassVar = False
    """Simulated requests need no log-probabilities of their prompts."""
    suspect_until: ClassVar = 0
    """Simulated steps never raise."""
    is_suspect: ClassVar = False

    number: int
    owner: Any
    """Any object of the engine's caller."""
    tokens: int
    """Tokens of the prompt and the answer so far."""
    remaining: int
    """Tokens still to generate, at least 1."""
    phase: SequencePhase
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    admission: int = -1
    started: bool = False
    in_step: bool = False
    transfer_open: bool = False
    """A push reads or writes its blocks."""
    done: bool = False
    offset_tokens: int = 0
    """In a run: its tokens minus the engine's step count."""
    end_step: int = 0
    """In a run: number of the engine's step that samples its last token."""
    first_step_s: float = -1.0
    """End of its first decode step."""
    mirrored: int = 0
    generation: int = 0
    runner_unaware: bool = False

    @property
    def token_ids(self) -> range:
        """A range whose length is the number of tokens; its values mean nothing."""
        return range(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next token is sampled."""
        return self.tokens - self.computed

    @property
    def touched(self) -> bool:
        """True while a step or a transfer may use its blocks."""
        return self.in_step or self.transfer_open


class CountedBlocks:
    """Block allocator that counts free blocks, without block numbers."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free_count = total

    def allocate(self, owner: object, count: int) -> list[int]:
        """Take `count` blocks, which must be free. Returns placeholder numbers."""
        assert count <= self.free_count, f"{count} of {self.free_count} blocks"
        self.free_count -= count
        return [0] * count

    def release(self, owner: CountedSequence) -> int:
        count = len(owner.block_ids)
        self.free_count += count
        owner.block_ids = []
        return count
