"""One request inside a simulated engine: its tokens are counted, not kept. Pure."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kaveri.engine.stepwise.sequence import SequencePhase


@dataclass(slots=True, eq=False)
class CountedSequence:
    """The sequence that kaveri.engine.stepwise's Residency and form_step work on, with counts for tokens and blocks.

    `tokens`, `computed` and `block_ids` hold while the engine goes step by step. In a run of steps the engine keeps
    `offset_tokens` and `end_step` only.
    """

    is_scored: ClassVar = False
    """Simulated requests need no log-probabilities of their prompts."""
    suspect_until: ClassVar = 0
    """Simulated steps never raise."""
    is_suspect: ClassVar = False

    number: int
    """Unique in the engine."""
    owner: Any
    """The caller's."""
    tokens: int
    """Prompt and the answer so far."""
    remaining: int
    """Tokens that it will still draw, at least 1."""
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
    """Within a run: its tokens minus the steps of the engine."""
    end_step: int = 0
    """Within a run: the step of the engine in which it draws its last token."""
    first_step_s: float = -1.0
    """End of its first decode step."""
    mirrored: int = 0
    generation: int = 0
    runner_unaware: bool = False

    @property
    def token_ids(self) -> range:
        """Only its length is right: the number of tokens."""
        return range(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next one can be drawn."""
        return self.tokens - self.computed

    @property
    def touched(self) -> bool:
        """True if a step or a transfer can still touch its blocks."""
        return self.in_step or self.transfer_open


class CountedBlocks:
    """A BlockAllocator that counts blocks without block numbers."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free_count = total

    def allocate(self, owner: object, count: int) -> list[int]:
        """Take blocks. There must be enough."""
        assert count <= self.free_count, f"{count} of {self.free_count} blocks"
        self.free_count -= count
        return [0] * count

    def release(self, owner: CountedSequence) -> int:
        count = len(owner.block_ids)
        self.free_count += count
        owner.block_ids = []
        return count
