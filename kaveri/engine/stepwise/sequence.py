"""One request inside the stepwise engine: its tokens, its blocks, its progress. No I/O, no locks."""

from dataclasses import dataclass, field

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.kv_plane import Source
from kaveri.engine.stepwise.phase import SequencePhase
from kaveri.engine.stepwise.runner import SequenceSlice


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. Also the owner of its blocks in the allocator, so that a key used again cannot free them.

    # [0, computed) KV is in the blocks   [computed, len(token_ids)) to be computed; the next token is drawn at the end
    """

    key: EngineKey
    params: ResolvedParams
    token_ids: list[int]
    """Prompt and every token drawn so far; grows in place."""
    draw_index: int
    """Index within the answer of the next token to draw."""
    phase: SequencePhase
    held_tokens: int | None = None
    """Resumed: the KV of this many tokens lands, and the rest is computed here."""
    block_ids: list[int] = field(default_factory=list)
    """Grows in place between steps; empty after a preemption."""
    computed: int = 0
    admission: int = -1
    """Rank among the admitted; kept through preemptions."""
    source: Source | None = None
    """Its blocks that may be pushed. Prefill side only."""
    runner_unaware: bool = False
    """A transfer has written its blocks, and the runner does not know yet."""
    in_step: bool = False
    """The running step reads or writes its blocks."""
    is_saving: bool = False
    """The engine's thread is copying its last blocks to the pool."""
    transfer_id: bytes | None = None
    """The open transfer that reads its blocks (prefill side) or can write them (decode side)."""
    is_copied: bool = False
    """Its blocks are copied to a replica."""
    mirrored: int = 0
    """Whole blocks whose KV is in the pool, if the runner computes in a device's memory; kept while it is copied."""
    generation: int = 0
    """Times that it has given its blocks up."""
    done: bool = False
    """Ended. Its blocks are free as soon as neither a step nor a transfer can touch them."""
    suspect_until: int = 0
    """See EngineRequest."""
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    @classmethod
    def of(cls, request: EngineRequest, phase: SequencePhase, held_tokens: int | None = None) -> "Sequence":
        """Copy the values that will grow; takes no blocks."""
        return cls(
            request.key,
            request.params,
            list(request.token_ids),
            request.generated_count,
            phase,
            held_tokens,
            suspect_until=request.suspect_until,
        )

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next one can be drawn; 1 for a decode step."""
        return len(self.token_ids) - self.computed

    @property
    def is_suspect(self) -> bool:
        """True if a step takes no other suspect at the same time."""
        return self.draw_index < self.suspect_until

    @property
    def touched(self) -> bool:
        """True if the engine's thread or a transfer can still touch its blocks."""
        return self.in_step or self.is_saving or self.transfer_id is not None

    def slice(self, token_count: int) -> SequenceSlice:
        """Return the next `token_count` tokens to compute; draws when they reach the end."""
        start, stop = self.computed, self.computed + token_count
        draw = stop == len(self.token_ids)
        scored_ids = self.token_ids[start + 1 : stop + 1] if self.is_scored else ()
        return SequenceSlice(
            self.token_ids[start:stop], start, self.block_ids, draw, self.draw_index, self.params, scored_ids
        )

    @property
    def is_scored(self) -> bool:
        """True if the log-probabilities of its tokens are reported while they are computed."""
        is_first = self.phase is SequencePhase.PREFILLING and self.draw_index == 0
        return is_first and self.params.prompt_logprobs is not None
