"""One request inside the stepwise engine: its tokens, its blocks, how far it is computed. No I/O, no locks."""

import enum
from dataclasses import dataclass, field

from kaveri.engine.contract import AttemptKey, EngineInfo, EngineRequest
from kaveri.engine.runner import SequenceSlice
from kaveri.errors import InvalidArgument
from kaveri.sampling import SamplingParams


class Phase(enum.Enum):
    """Where a request stands. The prefill side uses the first two, the decode side the others."""

    PREFILLING = enum.auto()
    """Submitted, the prompt not fully computed."""
    COMPUTED = enum.auto()
    """The first token is drawn; the KV waits to be accepted elsewhere."""
    RESERVED = enum.auto()
    """Blocks are leased to a transfer that has not landed."""
    LANDED = enum.auto()
    """The KV is here, or was and is to be recomputed; not admitted."""
    WAITING = enum.auto()
    """Admitted, not in the running batch: the batch is full, or the blocks were given up."""
    RUNNING = enum.auto()
    """In the running batch: drawing tokens, or recomputing."""


@dataclass(eq=False, slots=True)
class Source:
    """What of a sequence's blocks may be pushed, and what is. Guarded by stepwise_pushes.Pushes."""

    block_ids: list[int]
    token_count: int
    ready: int = 0
    """Blocks with final KV in every layer. The part-full last block counts once the prompt is computed."""
    ready_in_step: int = 0
    """The same in those layers that the running step has passed; equals `ready` between steps."""
    note: bytes | None = None
    """The serialized hand-over, once the first token is known."""
    transfer_id: bytes | None = None
    """The last push opened. It may have failed meanwhile: the sender ignores what is written to it then."""
    first_block: int = 0
    """Blocks that hold nothing but what the receiver of that push has already."""
    written: list[int] = field(default_factory=list)
    """Per layer, up to which block the source is queued for that push."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. Also the owner of its blocks in the allocator, so that a key used again cannot free them.

    # [0, computed) KV is in the blocks   [computed, len(token_ids)) to be computed; the next token is drawn at the end
    """

    key: AttemptKey
    params: SamplingParams
    token_ids: list[int]
    """Prompt and every token drawn so far; grows in place."""
    draw_index: int
    """Index within the answer of the next token to draw."""
    phase: Phase
    block_ids: list[int] = field(default_factory=list)
    """Grows in place between steps; empty after a preemption."""
    computed: int = 0
    admission: int = -1
    """Rank among the admitted; kept through preemptions."""
    started: bool = False
    """Its first chunk has begun."""
    source: Source | None = None
    """What of its blocks may be pushed. Prefill side only."""
    runner_unaware: bool = False
    """A transfer has written its blocks and the runner has not been told."""
    in_step: bool = False
    """The running step reads or writes its blocks."""
    transfer_id: bytes | None = None
    """The open transfer that reads its blocks (prefill side) or can write them (decode side)."""
    done: bool = False
    """Ended. Its blocks are free as soon as neither a step nor a transfer can touch them."""

    @classmethod
    def of(cls, request: EngineRequest, phase: Phase) -> "Sequence":
        """Copies what will grow; takes no blocks."""
        return cls(request.key, request.params, list(request.token_ids), request.generated_count, phase)

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next one can be drawn; 1 for a decode step."""
        return len(self.token_ids) - self.computed

    @property
    def touched(self) -> bool:
        """Whether a step or a transfer can still touch its blocks."""
        return self.in_step or self.transfer_id is not None

    def slice(self, token_count: int) -> SequenceSlice:
        """The next `token_count` tokens to compute; draws when they reach the end."""
        stop = self.computed + token_count
        draw = stop == len(self.token_ids)
        return SequenceSlice(
            self.token_ids[self.computed : stop], self.computed, self.block_ids, draw, self.draw_index, self.params
        )


def validate_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raises InvalidArgument for what this engine can never serve."""
    token_ids, max_tokens = request.token_ids, request.params.max_tokens
    longest = info.max_model_len - 1
    if not 1 <= len(token_ids) <= longest:
        raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", f"1 to {longest} tokens")
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise InvalidArgument("token_ids", (min(token_ids), max(token_ids)), f"in [0, {info.vocab_size})")
    if not 0 <= request.generated_count < len(token_ids):
        raise InvalidArgument("generated_count", request.generated_count, f"in [0, {len(token_ids)})")
    if max_tokens is not None and request.generated_count >= max_tokens:
        raise InvalidArgument("params.max_tokens", max_tokens, f"above the {request.generated_count} drawn already")
