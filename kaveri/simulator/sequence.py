"""One request inside a simulated engine: its tokens are counted, not kept. Pure."""

from typing import Any

from kaveri.engine.stepwise.phase import SequencePhase


class CountedSequence:
    """The sequence that kaveri.engine.stepwise's Residency and form_step work on, with counts for tokens and blocks.

    `tokens`, `computed` and `block_ids` hold while the engine goes step by step. In a run of steps the engine keeps
    `offset_tokens` and `end_step` only.
    """

    __slots__ = (
        "admission",
        "block_ids",
        "computed",
        "done",
        "end_step",
        "first_step_s",
        "generation",
        "in_step",
        "key",
        "mirrored",
        "number",
        "offset_tokens",
        "owner",
        "phase",
        "remaining",
        "runner_unaware",
        "started",
        "tokens",
        "transfer_open",
    )
    is_scored = False
    """Simulated requests need no log-probabilities of their prompts."""
    suspect_until = 0
    """Simulated steps never raise."""
    is_suspect = False

    def __init__(self, number: int, owner: Any, tokens: int, remaining: int, phase: SequencePhase) -> None:
        """number: unique in the engine. owner: of the caller's. tokens: prompt and the answer so far. remaining: tokens
        that it will still draw, at least 1."""
        self.number = number
        self.key = number
        self.owner = owner
        self.tokens = tokens
        self.remaining = remaining
        self.phase = phase
        self.computed = 0
        self.block_ids: list[int] = []
        self.admission = -1
        self.started = False
        self.in_step = False
        self.transfer_open = False
        """A push reads or writes its blocks."""
        self.done = False
        self.offset_tokens = 0
        """Within a run: its tokens minus the steps of the engine."""
        self.end_step = 0
        """Within a run: the step of the engine in which it draws its last token."""
        self.first_step_s = -1.0
        """End of its first decode step."""
        self.mirrored = self.generation = 0
        self.runner_unaware = False

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
